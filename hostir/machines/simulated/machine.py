"""The machine of simulated ranks: one process runs them on CPU tensors, in any order that the memory model permits.

First, every rank plans, which turns its statements into tasks. There is an edge between two tasks only where the memory
model orders them. Then a seeded scheduler runs the tasks in an order that the edges allow. Memory that was never
written holds NaN. After a call the caller's tensors hold NaN, too. An access to freed memory is an error. If a program
fails to order two accesses that must be ordered, some seed gives NaN, other bits or an error. With `watch`, such
accesses are an error under any seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import torch

from hostir.ir.program import Program, format_statement
from hostir.ir.source import Diagnostic, HostIRError, Span, error
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_table
from hostir.machines.simulated.collectives import match
from hostir.machines.simulated.memory import SimulatedMemory
from hostir.machines.simulated.messages import pair
from hostir.machines.simulated.onesided import SymmetricBuffers, meet
from hostir.machines.simulated.races import Watch
from hostir.machines.simulated.rank import Parts, RankMachine
from hostir.machines.simulated.scheduler import check_seed, execute, program_order, random_order, times
from hostir.machines.simulated.tasks import FlagGate, Task
from hostir.machines.trace import Trace, TraceMark

KernelChoice = str | Mapping[str, Kernel]  # the name of a policy, or the kernel of each computation


class LocalMachine:
    """A machine of simulated ranks. Each of `programs` is the program of one rank; usually all programs are equal.

    First, every rank r plans each call by `ranks[r].plan(sizes, inputs)`. Then `run` executes all planned calls from
    the beginning. `run` may be called several times. `kernels`, `dtype` and `device` are as for `rehearse`.
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
        self.delays: list[Task] = []  # the tasks that seeds delay: consecutive seeds delay consecutive tasks
        self.ran: list[Task] = []  # the tasks of the last run, in the order in which they ran

    @torch.no_grad()
    def run(self, seed: int = 0, *, watch: bool = False) -> list[list[Parts]]:
        """Execute the planned calls from the beginning. Return the outputs as a list `outputs[call][output][rank]`.

        Seed 0 runs the tasks in program order; other seeds run them in random orders. With `watch`, two unordered
        accesses to one element are an error if at least one of them is a write, even if the results are right. With
        `watch`, a read of undefined memory is also an error.

        Raises HostIRError if the collectives of ranks do not match, if a statement raises, if the ranks deadlock, and
        if `watch` finds an error. The error names ranks and statements.
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
                    raise self.ranks[task.rank].memory.used_after_free(task)

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
        """Free the memory of the ranks now.

        Ranks and tasks form reference cycles, which Python would free only when its garbage collector runs.
        """
        for buffer in self.memory.buffers:
            buffer.untyped_storage().resize_(0)
        for rank in self.ranks:
            rank.outputs.clear()

    def where(self, task: Task) -> tuple[Span | None, str]:
        """Return the place of a task's statement in the text, and a text that names rank, statement, round and call."""
        return self.ranks[task.rank].where(task)

    def record(self, trace: Trace) -> None:
        """Add the latest run to a trace.

        The times are computed as if every stream and every team had a separate processor.
        """
        at = times(self.ran)
        for task in (task for rank in self.ranks for task in rank.tasks if task.awaits is not None):
            assert task.statement is not None
            assert task.awaits is not None
            block, blocks = task.awaits
            statement = format_statement(task.statement, self.ranks[task.rank].program)
            text = f"block {block} of {blocks} is there: {statement}"
            trace.marks.append(TraceMark(task.rank, task.stream, text, at[task][1]))
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
        """Join the collectives, messages and barriers of all ranks. All ranks must have planned all calls."""
        ranks = self.ranks
        self.symmetric.check(self.where)
        joints = match([rank.parts for rank in ranks], self.where)
        joints += meet([rank.barriers for rank in ranks], self.where)
        for team in dict.fromkeys(team for rank in ranks for team in rank.messages):
            pair([rank.messages.get(team, []) for rank in ranks], self.where)
        issued = [task for rank in ranks for task in rank.tasks]
        self.tasks = [*issued, *joints]
        actions = [task for task in issued if task.run is not None]
        shuffled = Random(0).sample(actions, len(actions))
        last = max(task.call for task in actions)
        self.delays = sorted(shuffled, key=lambda task: task.call == last)  # the last call last: nothing follows it

    def _failed(self, task: Task, problem: Exception) -> Exception:
        span, where = self.where(task)
        if isinstance(problem, HostIRError):
            return HostIRError(*(replace(d, message=f"{where}: {d.message}", span=span) for d in problem.diagnostics))
        return error(f"{where}: {type(problem).__name__}: {problem}", span)

    def _deadlock(self) -> HostIRError:
        """Return the error for a deadlock. It names the tasks of each rank that wait at closed gates.

        If a rank has no such task, the error names the rank's first task that has not run.
        """
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
