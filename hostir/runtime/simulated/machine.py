"""Run simulated ranks in one process, on CPU tensors, in every order that the memory model permits.

Every rank first plans: its statements become tasks, with an edge wherever the memory model orders two of them, and
nowhere else. Then a seeded scheduler runs the tasks in an order that the edges allow. Undefined memory holds NaN: what
has not been written, and the caller's tensors after the call. An access to freed memory is an error. A program that
lacks an edge gives NaN, other bits or an error under some seed; with `watch`, unordered accesses are errors under any
seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from hostir.ir.op import Phase
from hostir.ir.program import Program, format_statement
from hostir.ir.source import Diagnostic, HostIRError, Span, error
from hostir.runtime.arguments import check_given, check_out_apart, sequence_of
from hostir.runtime.kernels.table import Kernel, kernel_table
from hostir.runtime.sharding import bind_sizes, memory_for, shard, solve_sizes
from hostir.runtime.simulated.collectives import SymmetricBuffers, match, meet, pair
from hostir.runtime.simulated.rank import Parts, RankMachine
from hostir.runtime.simulated.tasks import (
    FlagGate,
    SimulatedMemory,
    Task,
    Watch,
    check_seed,
    execute,
    program_order,
    random_order,
    times,
)
from hostir.runtime.trace import Trace

Inputs = Sequence[torch.Tensor | Parts]  # of one call: whole tensors, or of each input what every rank holds
KernelChoice = str | Mapping[str, Kernel]  # a policy, or what computes each kind


class LocalMachine:
    """Simulated ranks, one for each of `programs`, which are usually the same program.

    First every rank plans each call (`ranks[r].plan(sizes, inputs)`), then `run` executes all calls, repeatedly.
    `kernels`, `dtype` and `device` are as for `rehearse`.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        kernels: KernelChoice = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        table = kernel_table(kernels, "cpu") if isinstance(kernels, str) else kernels
        self.memory = SimulatedMemory(device)
        self.symmetric = SymmetricBuffers(self.memory)
        self.ranks = [
            RankMachine(rank, program, table, self.memory, self.symmetric, dtype)
            for rank, program in enumerate(programs)
        ]
        self.tasks: list[Task] = []  # set once the ranks' sides are joined
        self.delays: list[Task] = []  # those that seeds delay, in this order
        self.ran: list[Task] = []  # in the last run

    @torch.no_grad()
    def run(self, seed: int = 0, *, watch: bool = False) -> list[list[Parts]]:
        """Execute the planned calls from the beginning; return `outputs[call][output][rank]`.

        Seed 0 is program order, others are random. With `watch`, two unordered accesses to one element, at least one
        of them a write, are an error even if results do not differ, and so is a read of undefined memory.

        Raises HostIRError, naming ranks and statements, if the collectives of ranks do not match, if a statement
        raises, for a deadlock, and for what `watch` finds.
        """
        check_seed(seed)
        if not self.tasks:
            self._meet()
        self.memory.reset()
        self.symmetric.reset()
        for rank in self.ranks:
            rank.sms.reset()
        watching = Watch(self.tasks, self.memory, self.where) if watch else None
        freed = self.memory.freed

        def before(task: Task) -> None:
            if watching is not None:
                watching.runs(task)
            for storage in task.memory:
                if storage in freed:
                    raise self.ranks[task.rank].late(task)

        order = random_order(seed, self.delays) if seed else program_order
        threads = torch.get_num_threads()
        if threads > 1:  # tasks of simulated ranks are too small for several threads
            torch.set_num_threads(1)
        try:
            held = seed == 0 or Random(seed).random() < 0.5
            self.ran = execute(self.tasks, order, before, self._failed, held)
        finally:
            if threads > 1:
                torch.set_num_threads(threads)
        if len(self.ran) < len(self.tasks):
            raise self._deadlock()
        if watching is not None:
            watching.finish()
        calls = zip(*(rank.outputs for rank in self.ranks), strict=True)
        return [[list(parts) for parts in zip(*outputs, strict=True)] for outputs in calls]

    def release(self) -> None:
        """Free the memory now: ranks and tasks form reference cycles, which Python collects late."""
        for buffer in self.memory.buffers:
            buffer.untyped_storage().resize_(0)
        for rank in self.ranks:
            rank.outputs.clear()

    def where(self, task: Task) -> tuple[Span | None, str]:
        """Return the rank, statement, round and call that a task belongs to."""
        return self.ranks[task.rank].where(task)

    def record(self, trace: Trace) -> None:
        """Add the last run to a trace, as if every stream and every team had its own processor."""
        at = times(self.ran)
        for task in (task for rank in self.ranks for task in rank.tasks if task.since is not None):
            rank = self.ranks[task.rank]
            assert task.statement is not None
            assert task.since is not None
            lane = task.lane
            if task.team:
                several = len({*rank.parts, *rank.messages}) > 1
                lane = f"communication ({' '.join(map(str, task.team))})" if several else "communication"
            text = format_statement(task.statement, rank.program)
            trace.add(task.rank, lane, text, at[task.since][0], at[task][1], task.rounds)

    def _meet(self) -> None:
        """Join the collectives, messages and barriers of all ranks, after all have planned."""
        ranks = self.ranks
        self.symmetric.check(self.where)
        joints = match([rank.parts for rank in ranks], self.where)
        joints += meet([rank.barriers for rank in ranks], self.where)
        for team in dict.fromkeys(team for rank in ranks for team in rank.messages):
            pair([rank.messages.get(team, []) for rank in ranks], self.where)
        own = [task for rank in ranks for task in rank.tasks]
        self.tasks = [*own, *joints]
        acts = [task for task in own if task.run is not None]
        shuffled = Random(0).sample(acts, len(acts))
        last = max(task.call for task in acts)
        self.delays = sorted(shuffled, key=lambda task: task.call == last)  # nothing follows the last call

    def _failed(self, task: Task, problem: Exception) -> Exception:
        span, where = self.where(task)
        return error(f"{where}: {type(problem).__name__}: {problem}", span)

    def _deadlock(self) -> HostIRError:
        """Return the error for a deadlock, with what every rank waits for: closed gates, or else its first task."""
        notes = []
        ran = set(self.ran)
        for rank in self.ranks:
            left = [task for task in rank.tasks if task not in ran]
            stuck = [task for task in left if not task.blockers] or left[:1]
            notes += [self._stuck(task) for task in stuck]
        return HostIRError(
            Diagnostic(
                "deadlock: ranks wait for each other",
                expected="every communication, barrier and signal to start without what waits for it",
                notes=tuple(dict.fromkeys(notes)),
            )
        )

    def _stuck(self, task: Task) -> tuple[Span | None, str]:
        span, where = self.where(task)
        if task.blockers:
            return span, where
        if isinstance(task.gate, FlagGate):
            return span, f"{where}: no signal sets flag {task.gate.name} to epoch {task.epoch[1]}"
        holder = self.ranks[task.rank].sms.holder
        assert holder is not None
        return span, f"{where}: the SMs are held by {self.where(holder)[1]}"


def rehearse(
    program: Program,
    calls: Sequence[Inputs],
    sizes: Mapping[str, int] | None = None,
    kernels: KernelChoice = "auto",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LocalMachine:
    """Plan consecutive calls of a host program; `run(seed)` of the result executes them.

    Args:
        program: a host program that checks.
        calls: the inputs of each call: whole CPU tensors, or for each input what every rank holds (None where it holds
            none). The caller's memory is the same in every call, so shapes are too.
        sizes: of symbols that do not follow from the inputs' shapes.
        kernels: what computes: `auto`, `aten`, or `triton` (under TRITON_INTERPRET=1); or a table.
        dtype: what all tensors but flags are computed in, and rounded to, instead of what the program declares.
        device: where the inputs are.

    Raises HostIRError for inputs that do not fit, and for a statement that cannot be planned.
    """
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion", expected="a host program", hint="lower it first")
    machine = LocalMachine([program] * program.ranks, kernels, dtype, device)
    bound: dict[str, int] = {}
    with memory_for(f"@{program.name} on {program.ranks} simulated ranks"):
        for number, inputs in enumerate(calls):
            parts, found = _distribute(program, inputs, sizes or {}, device)
            if number and found != bound:
                expected = f"those of call 1, {bound}"
                raise error(f"call {number + 1} of @{program.name} has other sizes", expected=expected)
            bound = found
            for rank in machine.ranks:
                rank.plan(bound, [part[rank.rank] for part in parts])
    return machine


def run_calls(
    program: Program,
    calls: Sequence[Inputs],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    kernels: str = "auto",
    watch: bool = False,
    trace: Trace | None = None,
) -> list[list[Parts]]:
    """Run consecutive calls of a host program, on as many simulated ranks as its meshes name.

    After a call the caller reads the outputs and overwrites inputs and outputs; then it writes the next call's inputs.
    Nothing else separates calls: streams, teams, flags and symmetric buffers persist.

    Args:
        program, calls, sizes, kernels: as for `rehearse`.
        seed: selects the order: 0 is program order, any other number an order that the memory model allows.
        watch: whether to raise for unordered accesses and reads of undefined memory, as `LocalMachine.run` does.
        trace: gets an event for each statement that ran.

    Returns:
        The part of every rank for each call and output, `outputs[call][i][rank]`.

    Raises HostIRError for inputs that do not fit, and as `LocalMachine.run` does.
    """
    machine = rehearse(program, calls, sizes, kernels)
    outputs = machine.run(seed, watch=watch)
    if trace is not None:
        machine.record(trace)
    return outputs


def run_local(
    program: Program,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    kernels: str = "auto",
    watch: bool = False,
    trace: Trace | None = None,
    out: Any = None,
) -> list[Parts]:
    """Run one call as `run_calls` does; return the part of every rank for each output, `outputs[i][rank]`.

    `out` are tensors of the caller for them, in the same form or for the only output; these are then returned.
    """
    (outputs,) = run_calls(program, [inputs], sizes, seed=seed, kernels=kernels, watch=watch, trace=trace)
    return outputs if out is None else _deliver(program, inputs, outputs, out)


def _deliver(program: Program, inputs: Inputs, outputs: list[Parts], out: Any) -> list[Parts]:
    """Copy outputs to the caller's tensors. Raises HostIRError, and writes nothing, if those do not fit."""
    given = sequence_of(out)
    if len(outputs) == 1 and not isinstance(given[0] if given else None, list | tuple):
        given = (given,)
    if any(not isinstance(parts, list | tuple) or len(parts) != program.ranks for parts in given):
        raise error(
            f"out= of @{program.name} does not hold lists of parts", expected=f"{program.ranks} for each output"
        )
    for rank in range(program.ranks):
        check_given(program, rank, [x[rank] for x in given], [x[rank] for x in outputs], torch.device("cpu"))
    whole = all(isinstance(x, torch.Tensor) for x in inputs)
    by_rank = [inputs] if whole else list(zip(*inputs, strict=True))
    check_out_apart(program, _flat(zip(*given, strict=True)), _flat(by_rank))
    for mine, parts in zip(given, outputs, strict=True):
        for x, part in zip(mine, parts, strict=True):
            if part is not None:
                x.copy_(part)
    return [list(parts) for parts in given]


def _flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return [x for group in groups for x in group]


def _distribute(
    program: Program, inputs: Inputs, given: Mapping[str, int], device: torch.device | str
) -> tuple[list[Parts], dict[str, int]]:
    """Return what every rank holds of each input, and the sizes."""
    ranks = range(program.ranks)
    whole = [x for x in inputs if isinstance(x, torch.Tensor)]
    if len(whole) == len(inputs):
        sizes = bind_sizes(program, whole, given, device=device)
        pairs = zip(program.inputs, whole, strict=True)
        return [[shard(x, v.tensor, rank, sizes) for rank in ranks] for v, x in pairs], sizes
    parts = [x for x in inputs if not isinstance(x, torch.Tensor)]
    if whole or any(not isinstance(part, list | tuple) or len(part) != len(ranks) for part in parts):
        raise error(
            f"the inputs of @{program.name} are neither all whole nor all in parts",
            expected=f"tensors, or lists of {len(ranks)} parts",
        )
    sizes = dict(given)
    for rank in ranks:
        sizes = solve_sizes(program, [part[rank] for part in parts], sizes, rank=rank, device=device)
    program.check_sizes(sizes)
    return parts, sizes
