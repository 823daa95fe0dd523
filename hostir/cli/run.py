"""Run `hostir run`: execute a program on random inputs, once or repeatedly, and compare it with a reference."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from hostir import knobs
from hostir.call.bounds import Comparison, compare, of_single_ranks
from hostir.call.executor import Executor, everyones
from hostir.call.local import rehearse
from hostir.call.parts import assemble, shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.call.room import Room, free_here, of_host
from hostir.call.sizes import bind_sizes
from hostir.check import prove, verify
from hostir.cli.lowering import load_to_lower, lowered
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.ir.types import TensorType
from hostir.job.session import Session, launched, session
from hostir.kernels import aten
from hostir.kernels.dtypes import undefined
from hostir.machines.simulated.machine import LocalMachine
from hostir.machines.simulated.rank import Parts
from hostir.machines.trace import Trace
from hostir.machines.trace import TraceEvent as TraceEvent

REFUSED = "not run: 'hostir check --fix' may repair it, and --no-check runs it all the same"
COMPARING = 600.0  # seconds: the longest time that a rank waits for another rank's reference
TOGETHER = 4  # the most consecutive calls in one simulation; the limit saves memory
Tensors = Sequence[torch.Tensor]


def run_command(source: Program, program: Program, sizes: dict[str, int], options: Namespace) -> int:
    """Run a host program, report the results, and return the exit code.

    With `--compare`, the results are compared with reference results. The exit code is 1 if a result is too far from
    its reference. Raises HostIRError if `source` has no reference.

    Args:
        source: the program that the user named. It is `program` itself, or the fusion from which `program` was lowered.
            It defines the reference results. If it has statements for single ranks, the reference is a run of simulated
            ranks in program order.
        program: the host program to run.
        sizes: the sizes that `--set` binds.
        options: the options of the command line.
    """
    if options.repeat < 1:
        raise error(f"--repeat {options.repeat}", expected="at least 1")
    if options.schedule_seed < 0:
        raise error(f"--schedule-seed {options.schedule_seed}", expected="at least 0")
    program.check_sizes(sizes)
    sizes = {name: value for name, value in sizes.items() if name in program.size_names}
    trace = Trace(program.name) if options.trace else None
    _check_trace(options.trace)
    if launched():
        if options.schedule_seed:
            raise error(
                "--schedule-seed is for simulated ranks", hint="leave it out: real ranks run in an order of their own"
            )
        if (world := knobs.set_by_launcher("WORLD_SIZE", 1)) < program.ranks:
            hint = f"torchrun --nproc-per-node {program.ranks}; without torchrun, ranks are simulated"
            raise error(f"@{program.name} is for {program.ranks} ranks, and there are {world}", hint=hint)
        _check_room(program, sizes, options.device)
        with session(options.device) as job:
            assert job is not None
            return _on_ranks(job, source, program, sizes, options, trace)
    if options.device == "cuda":
        hint = "start real ranks: torchrun --nproc-per-node N -m hostir run ..."
        raise error("simulated ranks run on the CPU", hint=hint)
    return _simulated(source, program, sizes, options, trace)


def _check_trace(path: str | None) -> None:
    """Raise HostIRError if the name of the trace file ends neither in .json nor in .svg."""
    if path and Path(path).suffix not in (".json", ".svg"):
        raise error(f"--trace {path}", expected="a file ending in .json (Perfetto) or .svg (picture)")


def _check_room(program: Program, sizes: dict[str, int], device: str | None) -> None:
    """Raise HostIRError if the program needs more memory than there is.

    On a GPU, the limit is the memory of this rank's GPU. On CPUs, it is the memory of this host, which all ranks on the
    host share.
    """
    room = Room(program, sizes)
    local, ranks = (knobs.set_by_launcher(name, 0) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if device != "cpu" and torch.cuda.is_available():
        if local < torch.cuda.device_count():  # otherwise the session raises the error
            capacity = torch.cuda.get_device_properties(local).total_memory
            room.check(max(room.ranks) + room.inputs, capacity, "on a GPU", "what it has")
        return
    total = sum(sorted(room.ranks)[-max(ranks, 1) :]) + max(ranks, 1) * room.inputs
    room.check(total, of_host(), f"on this host for {max(ranks, 1)} ranks", "what it has", " on each")


def _write_trace(trace: Trace | None, path: str | None) -> None:
    if trace is None or path is None:
        return
    (trace.to_svg if Path(path).suffix == ".svg" else trace.to_chrome)(path)


def _turns(turns: range, title: str, *, shown: bool = True) -> Iterable[int]:
    """Return an iterable of `turns`, the numbers of the runs.

    If there are several runs and stderr is a terminal, the iteration shows a progress bar with this title.
    """
    if len(turns) == 1 or not shown or not sys.stderr.isatty():
        return turns
    from rich.console import Console
    from rich.progress import track

    return track(turns, title, console=Console(stderr=True), transient=True)


def _simulated(
    source: Program, program: Program, sizes: dict[str, int], options: Namespace, trace: Trace | None
) -> int:
    """Run a program on simulated ranks, and report the results as `run_command` says; return the exit code.

    One simulation runs several consecutive calls, because calls may overlap.
    """
    kernels = knobs.KERNELS.get(options.kernels)
    worst: list[Comparison] = []
    problems: list[str] = []
    # A trace shows one call. A schedule seed orders all calls together.
    calls_at_once = 1 if trace is not None else options.repeat if options.schedule_seed else TOGETHER
    room, free = Room(program, sizes, frees=False), free_here()
    a_call = sum(room.ranks) + room.inputs
    room.check(a_call, free, f"on {program.ranks} simulated ranks", "what is free here")
    if not options.schedule_seed:
        calls_at_once = max(1, min(calls_at_once, free // max(a_call, 1)))
    for first in _turns(range(0, options.repeat, calls_at_once), f"@{program.name}"):
        turns = range(first, min(first + calls_at_once, options.repeat))
        calls = [random_inputs(program, sizes, options.seed + turn) for turn in turns]
        machine = rehearse(program, calls, sizes, kernels)
        results = machine.run(options.schedule_seed)
        problems += wrong_outputs(program, results, machine.run() if options.schedule_seed else results, first)
        for inputs, parts in zip(calls, results, strict=True):
            if options.compare and not problems:
                outputs = _assembled(program, parts, sizes)
                rounded, exact = _expected(source, inputs, sizes)
                worst = _worse(worst, compare(program, outputs, rounded, exact, summed=of_single_ranks(source)))
        if trace is not None and turns.stop == options.repeat:
            machine.record(trace)
        if options.no_check and turns.stop == options.repeat:
            _print_races(machine, options.schedule_seed)
    _write_trace(trace, options.trace)
    return _report(
        program, f"{program.ranks} simulated ranks", kernels, _reference_name(source), worst, options, problems
    )


Results = Sequence[Sequence[Parts]]  # results[call][output]: the parts of all ranks


def _assembled(program: Program, parts: Sequence[Parts], sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """Combine the parts of all ranks into the unsharded outputs of one call.

    Partial sums are added without rounding.
    """
    outputs = zip(program.outputs, parts, strict=True)
    return [assemble(part, value.tensor, sizes, rounded=False) for value, part in outputs]


def wrong_outputs(program: Program, results: Results, in_order: Results, first: int = 0) -> list[str]:
    """Return a line of text for each wrong output: an output with NaN, or with other values than `in_order`.

    Args:
        program: the host program.
        results: the outputs of each call.
        in_order: the outputs of the same calls, run in program order.
        first: the number of calls before these calls. The texts count calls from 1.
    """
    lines = []
    for call, (outputs, expected) in enumerate(zip(results, in_order, strict=True), first + 1):
        for value, parts, others in zip(program.outputs, outputs, expected, strict=True):
            for problem, count in (("NaN", _nans), ("other values than in program order", _differences)):
                wrong = {rank: n for rank, pair in enumerate(zip(parts, others, strict=True)) if (n := count(*pair))}
                if wrong:
                    ranks = ", ".join(map(str, wrong))
                    lines.append(
                        f"{value}: {problem} in {sum(wrong.values())} elements, on rank {ranks} after call {call}"
                    )
                    break
    return lines


def _nans(x: torch.Tensor | None, _: torch.Tensor | None) -> int:
    """Return the number of elements that are NaN; for integers, the number of elements with undefined contents."""
    return 0 if x is None else int((x.isnan() if x.is_floating_point() else x == undefined(x.dtype)).sum())


def _differences(x: torch.Tensor | None, other: torch.Tensor | None) -> int:
    return 0 if x is None or other is None else int((x != other).sum())


def _print_races(machine: LocalMachine, seed: int) -> None:
    """Run the calls again and detect races; print each race as a warning, even if the results are right."""
    try:
        machine.run(seed, watch=True)
    except HostIRError as races:
        for race in races.diagnostics:
            print(replace(race, level="warning"), file=sys.stderr)


def _on_ranks(
    job: Session, source: Program, program: Program, sizes: dict[str, int], options: Namespace, trace: Trace | None
) -> int:
    """Run a program on this rank of a job, and compare the results if `--compare` is given; return the exit code.

    Rank 0 prints the report for all ranks. All ranks return the same exit code.
    """
    device, rank = job.device, job.rank
    kernels = knobs.KERNELS.get(options.kernels)
    executor = Executor(program, sizes=sizes, kernels=kernels, trace=trace, check=False)  # the caller has checked it
    worst: list[Comparison] = []
    for turn in _turns(range(options.repeat), f"@{program.name}", shown=rank == 0):
        inputs = random_inputs(program, sizes, options.seed + turn, device)
        parts = [shard(x, v.tensor, rank, sizes) for v, x in zip(program.inputs, inputs, strict=True)]
        if trace is not None:
            trace.events.clear()
        outputs = executor(*parts)
        if options.compare:
            worst = _worse(worst, _compared(job, source, program, inputs, outputs, sizes, turn))
    executor.synchronize()
    if trace is not None:
        texts = job.exchange("trace", json.dumps(trace.events))
        trace.events = [
            TraceEvent(e[0], e[1], e[2], e[3], e[4], tuple(e[5])) for text in texts for e in json.loads(text)
        ]
        if rank == 0:
            _write_trace(trace, options.trace)
    verdicts = job.exchange("verdict", "good" if all(c.good for c in worst) else "bad")
    if rank == 0:
        _report(program, f"{job.size} ranks on {device.type}", kernels, _reference_name(source), worst, options)
    return 1 if "bad" in verdicts else 0


def _expected(source: Program, inputs: Tensors, sizes: dict[str, int]) -> tuple[Tensors, Tensors]:
    """Return the reference outputs of `source` twice: computed in the program's dtypes, and computed in float64."""
    bound = {name: value for name, value in sizes.items() if name in source.size_names}
    evaluate = rehearsed if of_single_ranks(source) else reference
    return evaluate(source, inputs, bound, None), evaluate(source, inputs, bound)


def _reference_name(source: Program) -> str:
    """Return a description of the reference, for the report."""
    return "simulated ranks in program order" if of_single_ranks(source) else "the unsharded result"


def _compared(
    job: Session,
    source: Program,
    program: Program,
    inputs: Tensors,
    outputs: Sequence[torch.Tensor | None],
    sizes: dict[str, int],
    turn: int,
) -> list[Comparison]:
    """Compare the outputs of all ranks with the reference; return one comparison for each output.

    All ranks call it together. Each rank computes the squared error of its parts. The ranks exchange these numbers
    and add them.

    If an output is a partial sum, every rank gathers the addends of all ranks, adds them without rounding the sum, and
    compares the sum with the reference.

    Args:
        job: the session of this rank.
        source: the program that defines the reference.
        program: the host program that ran.
        inputs: the unsharded inputs.
        outputs: this rank's part of each output; None if this rank has no part.
        sizes: the values of the symbolic sizes.
        turn: the number of the run. It labels the exchange.
    """
    rounded, exact = _expected(source, inputs, sizes)
    squares = []
    for value, part, expected in zip(program.outputs, outputs, exact, strict=True):
        if value.tensor.partial:
            parts = [rank_part for (rank_part,) in everyones([part], job)]
            square = _squared_error(assemble(parts, value.tensor, sizes, rounded=False), expected) / job.size
        else:
            square = _squared_error(part, shard(expected, value.tensor, job.rank, sizes)) / copies(value.tensor)
        squares.append(square)
    by_rank = [json.loads(text) for text in job.exchange(f"errors of run {turn}", json.dumps(squares), COMPARING)]
    ring, summed = job.device.type == "cuda", of_single_ranks(source)
    comparisons = compare(program, exact, rounded, exact, ring=ring, summed=summed)
    norms = [float(torch.linalg.vector_norm(e.double())) or 1.0 for e in exact]
    return [replace(c, error=sum(e[n] for e in by_rank) ** 0.5 / norms[n]) for n, c in enumerate(comparisons)]


def _squared_error(part: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return the sum of the squared differences between a part and its expected elements; 0 if there is no part."""
    if part is None or expected is None:
        return 0.0
    return float(torch.linalg.vector_norm(part.double() - expected.double())) ** 2


def copies(type: TensorType) -> int:
    """Return the number of ranks that hold each element of a tensor of this type."""
    assert type.mesh
    shards = prod(type.mesh.size(mark) for axis in type.axes for mark in axis.marks)
    return len(type.mesh.devices) // shards


def _worse(old: list[Comparison], new: list[Comparison]) -> list[Comparison]:
    """Return, for each output, the worse of its two comparisons.

    The worse comparison has the larger quotient of error and bound.
    """
    if not old:
        return new
    pairs = zip(old, new, strict=True)
    return [b if not b.good or (a.good and b.error / b.bound > a.error / a.bound) else a for a, b in pairs]


def _report(
    program: Program,
    where: str,
    kernels: str,
    compared_with: str,
    comparisons: list[Comparison],
    options: Namespace,
    problems: Sequence[str] = (),
) -> int:
    """Print the comparisons and the problems, as text or as JSON; return the exit code.

    Args:
        program: the program that ran.
        where: the ranks that ran it, as text.
        kernels: the name of the kernels that ran.
        compared_with: the description of the reference.
        comparisons: the comparison of each output; empty without `--compare`.
        options: the options of the command line.
        problems: lines about wrong outputs.
    """
    good = all(c.good for c in comparisons) and not problems
    if options.json:
        outputs = [{"output": c.output, "error": c.error, "bound": c.bound, "good": c.good} for c in comparisons]
        ran = {"program": program.name, "ranks": program.ranks, "where": where, "kernels": kernels}
        against = {"reference": compared_with} if options.compare else {}
        print(json.dumps(ran | against | {"outputs": outputs, "wrong": list(problems)}))
        return 0 if good else 1
    times = f", {options.repeat} times" if options.repeat > 1 else ""
    print(f"@{program.name}: ran on {where}, kernels {kernels}{times}")
    for c in comparisons:
        print(f"  {c}", file=sys.stdout if c.good else sys.stderr)
    if comparisons and good:
        print(f"  maximum error {max(c.error for c in comparisons):.2e} from {compared_with}")
    for line in problems:
        print(f"  {line}", file=sys.stderr)
    return 0 if good else 1


@torch.no_grad()
def rehearsed(
    program: Program,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """Run one call on simulated ranks in program order, and return the unsharded outputs.

    These are the reference outputs of a program with statements for single ranks. `reference` runs statements on
    unsharded tensors, and cannot run such a program, because its ranks do different things. A comparison with these
    outputs shows whether a run computes what the statements say. The comparison does not show wrong statements or
    races. `hostir check` finds races.

    The arguments are the same as for `reference`. Partial sums are added in float64 and not rounded, for every `dtype`.
    Raises HostIRError if the inputs do not fit, if simulated ranks cannot run the program, and if the copies of an
    output differ between ranks.
    """
    bound = bind_sizes(program, inputs, sizes)
    device = inputs[0].device if inputs else torch.device("cpu")
    try:
        machine = rehearse(program, [inputs], bound, aten.KERNELS, dtype=dtype, device=device)
        (outputs,) = machine.run()
        unsharded = tuple(_assembled(program, outputs, bound))
    except HostIRError as refusal:
        raise _no_result(program, refusal) from refusal
    except torch.OutOfMemoryError as problem:  # from the inputs of all ranks; statements raise other errors
        raise _no_result(program, error(str(problem))) from problem
    machine.release()
    return unsharded


def _no_result(program: Program, refusal: HostIRError) -> HostIRError:
    """Return the error of `hostir run --compare` for a program that simulated ranks cannot run."""
    first = refusal.diagnostics[0]
    return error(
        f"@{program.name} has no result on simulated ranks to compare with: {first.message}",
        first.span,
        expected=first.expected,
        hint="leave out --compare",
        notes=first.notes,
    )


def main(options: Namespace) -> int:
    """Run `hostir run`; return its exit code."""
    program, sizes = load_to_lower(options)
    if program.phase is Phase.HOST:
        verify(program)
    host = lowered(program, sizes, options)
    if not options.no_check:
        host.check_sizes(sizes)
        try:
            prove(host, sizes)
        except HostIRError as findings:
            if all(finding.category for finding in findings.diagnostics):
                findings.add_note(REFUSED)
            raise
    return run_command(program, host, sizes, options)
