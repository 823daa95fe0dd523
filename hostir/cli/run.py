"""Run `hostir run`: execute a program on fresh inputs, once or repeatedly, and compare it with a reference."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from hostir import knobs
from hostir.check import prove, verify
from hostir.cli.lowering import load_to_lower, lowered
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.ir.types import TensorType
from hostir.runtime.executor import Executor, everyones
from hostir.runtime.kernels import aten
from hostir.runtime.reference import Comparison, compare, of_single_ranks, reference
from hostir.runtime.session import Session, launched, session
from hostir.runtime.sharding import Room, assemble, bind_sizes, free_here, of_host, random_inputs, shard
from hostir.runtime.simulated.machine import LocalMachine, rehearse
from hostir.runtime.simulated.rank import Parts
from hostir.runtime.trace import Trace
from hostir.runtime.trace import TraceEvent as TraceEvent

# The command ----------------------------------------------------------------------------------------------------------
# `hostir run`: fresh inputs, one run or several, and what they are compared with.

REFUSED = "not run: 'hostir check --fix' adds what orders it, where it can; --no-check runs it all the same"
COMPARING = 600.0  # seconds: a rank may wait so long for another's reference
TOGETHER = 4  # simulated calls that follow each other at once; more would hold more memory
Tensors = Sequence[torch.Tensor]


def run_command(source: Program, program: Program, sizes: dict[str, int], options: Namespace) -> int:
    """Run `program`; with `--compare`, compare it with `source`, the fusion or host program that it came from.

    A host program of single ranks means what simulated ranks compute in program order. Returns the exit code: 1 where
    a result is too far from the reference. Raises HostIRError where there is none.
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
            raise error("--schedule-seed is of simulated ranks", hint="real ones run in the order that they come to")
        if (world := int(os.environ["WORLD_SIZE"])) < program.ranks:
            hint = f"torchrun --nproc-per-node {program.ranks}; without torchrun, ranks are simulated"
            raise error(f"@{program.name} is for {program.ranks} ranks, and there are {world}", hint=hint)
        _check_room(program, sizes, options.device)
        with session(options.device) as joined:
            assert joined is not None
            return _on_ranks(joined, source, program, sizes, options, trace)
    if options.device == "cuda":
        hint = "start real ranks: torchrun --nproc-per-node N -m hostir run ..."
        raise error("simulated ranks run on the CPU", hint=hint)
    return _simulated(source, program, sizes, options, trace)


def _check_trace(path: str | None) -> None:
    if path and Path(path).suffix not in (".json", ".svg"):
        raise error(f"--trace {path}", expected="a file ending in .json (Perfetto) or .svg (picture)")


def _check_room(program: Program, sizes: dict[str, int], device: str | None) -> None:
    """Refuse sizes for which the memory of this rank's GPU, or of its host for all ranks there, is too small."""
    room = Room(program, sizes)
    local, ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if device != "cpu" and torch.cuda.is_available():
        if local < torch.cuda.device_count():  # else the session says so
            there = torch.cuda.get_device_properties(local).total_memory
            room.check(max(room.ranks) + room.inputs, there, "on a GPU", "what it has")
        return
    total = sum(sorted(room.ranks)[-max(ranks, 1) :]) + max(ranks, 1) * room.inputs
    room.check(total, of_host(), f"on this host for {max(ranks, 1)} ranks", "what it has", " on each")


def _write_trace(trace: Trace | None, path: str | None) -> None:
    if trace is None or path is None:
        return
    (trace.to_svg if Path(path).suffix == ".svg" else trace.to_chrome)(path)


def _turns(turns: range, title: str, *, shown: bool = True) -> Iterable[int]:
    """Return the runs to do; with a progress bar if there are several and stderr is a terminal."""
    if len(turns) == 1 or not shown or not sys.stderr.isatty():
        return turns
    from rich.console import Console
    from rich.progress import track

    return track(turns, title, console=Console(stderr=True), transient=True)


def _simulated(
    source: Program, program: Program, sizes: dict[str, int], options: Namespace, trace: Trace | None
) -> int:
    kernels = knobs.KERNELS.get(options.kernels)
    worst: list[Comparison] = []
    seen: list[str] = []
    # A trace shows one call; under a seed of its own all calls are one schedule.
    together = 1 if trace is not None else options.repeat if options.schedule_seed else TOGETHER
    room, there = Room(program, sizes, frees=False), free_here()
    a_call = sum(room.ranks) + room.inputs
    room.check(a_call, there, f"on {program.ranks} simulated ranks", "what is free here")
    if not options.schedule_seed:
        together = max(1, min(together, there // max(a_call, 1)))
    for first in _turns(range(0, options.repeat, together), f"@{program.name}"):
        turns = range(first, min(first + together, options.repeat))
        calls = [random_inputs(program, sizes, options.seed + turn) for turn in turns]
        machine = rehearse(program, calls, sizes, kernels)
        results = machine.run(options.schedule_seed)
        seen += what_is_wrong(program, results, machine.run() if options.schedule_seed else results, first)
        for inputs, parts in zip(calls, results, strict=True):
            if options.compare and not seen:
                ends = zip(program.outputs, parts, strict=True)
                outputs = [assemble(p, v.tensor, sizes, rounded=False) for v, p in ends]
                plain, exact = _expected(source, inputs, sizes)
                worst = _worse(worst, compare(program, outputs, plain, exact, summed=of_single_ranks(source)))
        if trace is not None and turns.stop == options.repeat:
            machine.record(trace)
        if options.no_check and turns.stop == options.repeat:
            _print_races(machine, options.schedule_seed)
    _write_trace(trace, options.trace)
    return _report(program, f"{program.ranks} simulated ranks", kernels, _reference_name(source), worst, options, seen)


Results = Sequence[Sequence[Parts]]  # by call and output


def what_is_wrong(program: Program, results: Results, in_order: Results, first: int = 0) -> list[str]:
    """Return the outputs' errors: NaN, or other values than in program order. `first` numbers the first call."""
    found = []
    for call, (outputs, expected) in enumerate(zip(results, in_order, strict=True), first + 1):
        for value, parts, others in zip(program.outputs, outputs, expected, strict=True):
            for what, count in (("NaN", _nans), ("other values than in program order", _differences)):
                bad = {rank: n for rank, pair in enumerate(zip(parts, others, strict=True)) if (n := count(*pair))}
                if bad:
                    where = f"rank {', '.join(map(str, bad))} after call {call}"
                    found.append(f"{value}: {what} in {sum(bad.values())} elements, on {where}")
                    break
    return found


def _nans(x: torch.Tensor | None, _: torch.Tensor | None) -> int:
    return 0 if x is None else int(x.isnan().sum())


def _differences(x: torch.Tensor | None, other: torch.Tensor | None) -> int:
    return 0 if x is None or other is None else int((x != other).sum())


def _print_races(machine: LocalMachine, seed: int) -> None:
    """Print the races that the simulated ranks detect, whether or not results differ."""
    try:
        machine.run(seed, watch=True)
    except HostIRError as seen:
        for found in seen.diagnostics:
            print(replace(found, level="warning"), file=sys.stderr)


def _on_ranks(
    joined: Session, source: Program, program: Program, sizes: dict[str, int], options: Namespace, trace: Trace | None
) -> int:
    """Run and compare on this rank of a job; rank 0 reports for all."""
    device, rank = joined.device, joined.rank
    kernels = knobs.KERNELS.get(options.kernels)
    executor = Executor(program, sizes=sizes, kernels=kernels, trace=trace, check=False)  # which the caller has done
    worst: list[Comparison] = []
    for turn in _turns(range(options.repeat), f"@{program.name}", shown=rank == 0):
        inputs = random_inputs(program, sizes, options.seed + turn, device)
        parts = [shard(x, v.tensor, rank, sizes) for v, x in zip(program.inputs, inputs, strict=True)]
        if trace is not None:
            trace.events.clear()
        outputs = executor(*parts)
        if options.compare:
            worst = _worse(worst, _part_against(joined, source, program, inputs, outputs, sizes, turn))
    executor.synchronize()
    if trace is not None:
        every = joined.exchange("trace", json.dumps(trace.events))
        trace.events = [
            TraceEvent(e[0], e[1], e[2], e[3], e[4], tuple(e[5])) for text in every for e in json.loads(text)
        ]
        if rank == 0:
            _write_trace(trace, options.trace)
    verdicts = joined.exchange("verdict", "good" if all(c.good for c in worst) else "bad")
    if rank == 0:
        _report(program, f"{joined.size} ranks on {device.type}", kernels, _reference_name(source), worst, options)
    return 1 if "bad" in verdicts else 0


def _expected(source: Program, inputs: Tensors, sizes: dict[str, int]) -> tuple[Tensors, Tensors]:
    """Return the expected outputs of the source, in the program's own dtypes and in float64."""
    bound = {name: value for name, value in sizes.items() if name in source.size_names}
    means = rehearsed if of_single_ranks(source) else reference
    return means(source, inputs, bound, None), means(source, inputs, bound)


def _reference_name(source: Program) -> str:
    """Return the name of the reference that results are compared with."""
    return "simulated ranks in program order" if of_single_ranks(source) else "the unsharded result"


def _part_against(
    joined: Session,
    source: Program,
    program: Program,
    inputs: Tensors,
    held: Sequence[torch.Tensor | None],
    sizes: dict[str, int],
    turn: int,
) -> list[Comparison]:
    """Compare this rank's own parts and add up the squared errors of all ranks. Partial sums are added up first.

    Each rank rounds its partial sum; their sum is not rounded again.
    """
    plain, exact = _expected(source, inputs, sizes)
    squares = []
    for value, part, expected in zip(program.outputs, held, exact, strict=True):
        if value.tensor.partial:
            parts = [theirs for (theirs,) in everyones([part], joined)]
            off = _squared(assemble(parts, value.tensor, sizes, rounded=False), expected) / joined.size
        else:
            off = _squared(part, shard(expected, value.tensor, joined.rank, sizes)) / copies(value.tensor)
        squares.append(off)
    every = [json.loads(text) for text in joined.exchange(f"errors of run {turn}", json.dumps(squares), COMPARING)]
    ring, summed = joined.device.type == "cuda", of_single_ranks(source)
    found = compare(program, exact, plain, exact, ring=ring, summed=summed)
    norms = [float(torch.linalg.vector_norm(e)) or 1.0 for e in exact]
    return [replace(c, error=sum(e[n] for e in every) ** 0.5 / norms[n]) for n, c in enumerate(found)]


def _squared(got: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return the square of the error's norm; 0 where a rank holds nothing."""
    if got is None or expected is None:
        return 0.0
    return float(torch.linalg.vector_norm(got.to(expected.dtype) - expected)) ** 2


def copies(type: TensorType) -> int:
    """Return the number of ranks that hold each element."""
    assert type.mesh
    spread = prod(type.mesh.size(mark) for axis in type.axes for mark in axis.marks)
    return len(type.mesh.devices) // spread


def _worse(old: list[Comparison], new: list[Comparison]) -> list[Comparison]:
    """Return, for each output, the comparison that is closer to its bound, or further beyond it."""
    if not old:
        return new
    pairs = zip(old, new, strict=True)
    return [b if not b.good or (a.good and b.error / b.bound > a.error / a.bound) else a for a, b in pairs]


def _report(
    program: Program,
    where: str,
    kernels: str,
    compared_with: str,
    found: list[Comparison],
    options: Namespace,
    wrong: Sequence[str] = (),
) -> int:
    """Report the result, and other errors, as text or as JSON; return the exit code."""
    good = all(c.good for c in found) and not wrong
    if options.json:
        outputs = [{"output": c.output, "error": c.error, "bound": c.bound, "good": c.good} for c in found]
        ran = {"program": program.name, "ranks": program.ranks, "where": where, "kernels": kernels}
        against = {"reference": compared_with} if options.compare else {}
        print(json.dumps(ran | against | {"outputs": outputs, "wrong": list(wrong)}))
        return 0 if good else 1
    times = f", {options.repeat} times" if options.repeat > 1 else ""
    print(f"@{program.name}: ran on {where}, kernels {kernels}{times}")
    for c in found:
        print(f"  {c}", file=sys.stdout if c.good else sys.stderr)
    if found and good:
        print(f"  maximum error {max(c.error for c in found):.2e} from {compared_with}")
    for line in wrong:
        print(f"  {line}", file=sys.stderr)
    return 0 if good else 1


# The reference of a program of single ranks ---------------------------------------------------------------------------
# The reference of a host program of single ranks: its statements on simulated ranks, in program order.
#
# Whole tensors cannot represent a program in which ranks do different things: its meaning is who copies what where. So
# every rank is simulated in this process, on the device of the inputs, always in the same order. A run is compared with
# that result as with whole tensors. This shows where it did not compute what the statements say, but neither statements
# that say something else than intended, nor races, which `hostir check` finds.


@torch.no_grad()
def rehearsed(
    program: Program,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """Return the whole outputs of one call of a host program, from whole inputs; arguments as of `reference`.

    The sum of partial sums is in float64, not rounded, whatever `dtype` is. Raises HostIRError for inputs that do not
    fit, and for a program that simulated ranks cannot run, or of which they end with copies of an output that differ.
    """
    bound = bind_sizes(program, inputs, sizes)
    device = inputs[0].device if inputs else torch.device("cpu")
    try:
        machine = rehearse(program, [inputs], bound, aten.KERNELS, dtype=dtype, device=device)
        (outputs,) = machine.run()
        ends = zip(program.outputs, outputs, strict=True)
        whole = tuple(assemble(parts, v.tensor, bound, rounded=False) for v, parts in ends)
    except HostIRError as refused:
        raise _no_result(program, refused) from refused
    except torch.OutOfMemoryError as problem:  # for the inputs of all ranks; statements say it of themselves
        raise _no_result(program, error(str(problem))) from problem
    machine.release()
    return whole


def _no_result(program: Program, refused: HostIRError) -> HostIRError:
    first = refused.diagnostics[0]
    return error(
        f"@{program.name} has no result on simulated ranks to be compared with: {first.message}",
        first.span,
        expected=first.expected,
        hint="leave out --compare",
        notes=first.notes,
    )


def main(options: Namespace) -> int:
    """Run the command; return its exit code."""
    program, sizes = load_to_lower(options)
    if program.phase is Phase.HOST:
        verify(program)
    host = lowered(program, sizes, options)
    if not options.no_check:
        host.check_sizes(sizes)
        try:
            prove(host, sizes)
        except HostIRError as findings:
            if all(found.kind for found in findings.diagnostics):
                findings.add_note(REFUSED)
            raise
    return run_command(program, host, sizes, options)
