"""Predict the timeline of a program: when each statement begins and ends on each rank, and what it waits for.

The cost model that orders the candidates of `auto` simulates one call of the program. Nothing runs. A timeline has the
spans of the statements, the critical path, and the time in which each resource works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hostir.choice.cost import (
    CostBarrier,
    CostCopy,
    CostTask,
    CostTransfer,
    Nothing,
    Pause,
    Traffic,
    tasks_to_simulate,
)
from hostir.choice.decision import check_ranks, check_sizes
from hostir.choice.hardware import Hardware
from hostir.choice.platforms import Platform, planned
from hostir.choice.simulation import EAGER, Costs, HostCosts, Simulation, flops, start
from hostir.ir.machine import uncollected
from hostir.ir.op import Phase, Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import described, error, user_span
from hostir.kernels.matmul.tiles import Gemm
from hostir.knobs import KERNELS
from hostir.machines.trace import COMMUNICATION, Trace

SMS, OUT, IN, LINK, SIGNALS = "SMs", "copies out", "copies in", "collectives", "signals"
RESOURCES = (SMS, OUT, IN, LINK)
EPSILON = 1e-6
RESET = "reset of the flags"  # at the end of a call; it has no statement


@dataclass(frozen=True)
class PredictedSpan:
    """The time of one statement on one rank, in microseconds since the call was issued.

    Fields:
        rank: the rank.
        lane: its stream, or `communication`.
        statement: the text of the statement.
        rounds: the round of each loop around the statement, outermost first.
        begin, end: the times of its beginning and its end.
        waited: the part of this time in which it waits for flags or for other ranks.
        resource: what it uses: `SMs`, `copies out`, `copies in`, `collectives`, or `signals`, which use nothing.
    """

    rank: int
    lane: str
    statement: str
    rounds: tuple[int, ...]
    begin: float
    end: float
    waited: float
    resource: str

    @property
    def working(self) -> float:
        """The microseconds in which it does not wait."""
        return self.end - self.begin - self.waited

    def __str__(self) -> str:
        rounds = f" in round {', '.join(map(str, self.rounds))}" if self.rounds else ""
        return f"{self.statement}{rounds}"


@dataclass(frozen=True)
class PredictedTimeline:
    """The predicted timeline of one call of a program.

    Fields:
        program: the name of the program.
        machine: the machine for which it is predicted.
        kernels: the family of kernels.
        us: the microseconds of a call whose operations the host issues one by one, ahead of the device.
        host_us: the microseconds in which the host issues a call without a graph.
        ranks: the number of ranks.
        simulated: the spans of the ranks that were simulated, by their beginning: of rank 0 if all ranks do the same,
            else of all ranks.
        critical: the spans that determine the end of the call, from the first to the last. If all ranks do the same,
            they are spans of rank 0, which stand for those of the rank that is waited for.
    """

    program: str
    machine: str
    kernels: str
    us: float
    host_us: float
    ranks: int
    simulated: tuple[PredictedSpan, ...]
    critical: tuple[PredictedSpan, ...]

    @cached_property
    def alike(self) -> bool:
        """True if rank 0 was simulated for all ranks."""
        return self.ranks > 1 and not any(span.rank for span in self.simulated)

    @cached_property
    def spans(self) -> tuple[PredictedSpan, ...]:
        """The spans of all ranks, by their beginning."""
        if not self.alike:
            return self.simulated
        return tuple(replace(span, rank=rank) for span in self.simulated for rank in range(self.ranks))

    def of_rank(self, rank: int) -> tuple[PredictedSpan, ...]:
        """Return the spans of one rank, by their beginning."""
        if self.alike:
            return tuple(replace(span, rank=rank) for span in self.simulated)
        return tuple(span for span in self.simulated if span.rank == rank)

    def busy(self, rank: int) -> dict[str, float]:
        """Return the microseconds in which each resource of a rank works.

        Spans that overlap count once. A kernel that waits for flags counts for as long as it does not wait.
        """
        held: dict[str, float] = {}
        for resource in RESOURCES:
            spans = [span for span in self.of_rank(rank) if span.resource == resource]
            covered = sum(end - begin for begin, end in _union([(span.begin, span.end) for span in spans]))
            held[resource] = max(0.0, covered - sum(span.waited for span in spans))
        return held

    def exposed(self, rank: int) -> float:
        """Return the microseconds in which no computation of a rank makes progress."""
        return max(0.0, self.us - self.busy(rank)[SMS])

    def trace(self) -> Trace:
        """Return the timeline as a `hostir.Trace`, which writes Perfetto's format and pictures."""
        trace = Trace(f"{self.program}, predicted for {self.machine}: {self.us:.0f} us")
        for span in self.spans:
            trace.add(span.rank, span.lane, span.statement, span.begin / 1e6, span.end / 1e6, span.rounds)
        return trace

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as a JSON object."""
        fields = {name: value for name, value in vars(self).items() if isinstance(value, str | float | int)}
        spans = {
            name: [asdict(span) for span in each] for name, each in (("spans", self.spans), ("critical", self.critical))
        }
        return fields | spans | {"busy": {rank: self.busy(rank) for rank in range(self.ranks)}}


@uncollected()
def timeline(
    program: Program,
    *,
    machine: str,
    hosts: int | None = None,
    sizes: Mapping[str, int] | None = None,
    kernels: str | None = None,
) -> PredictedTimeline:
    """Predict when each statement of a host program begins and ends on a known machine. Nothing runs.

    The cost model that orders the candidates of `hi.compile` simulates one call on all ranks.

    Args:
        program: a host program.
        machine: a known machine with the number of GPUs in each host, such as `h100x8`.
        hosts: the number of hosts; by default as few as the program needs.
        sizes: values of the program's symbols.
        kernels: `aten`, `cublas` or `triton`. By default the knob HOSTIR_KERNELS decides, and `auto` takes the faster
            of `cublas` and `triton`.

    Raises HostIRError for an unknown machine, for a program that shares memory between several hosts, and for sizes
    that are missing or do not fit.
    """
    if not isinstance(program, Program):
        raise error(f"a timeline of {described(program)}", user_span(), expected="a host program: hi.lower(fusion)")
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion", user_span(), expected="a host program", hint="hi.lower(fusion)")
    platform = planned(program, machine, hosts)
    check_ranks(program, platform)
    if refusal := platform.unreachable(program):
        raise error(
            f"@{program.name} shares memory between ranks: {refusal}",
            user_span(),
            hint="the strategies 'hierarchical', 'pipeline' and 'sequential' use collectives between hosts",
        )
    bound = program.given_sizes(sizes)
    check_sizes(program, bound)
    family = KERNELS.get(kernels)
    families = ("cublas", "triton") if family == "auto" else (family,)
    tasks = tasks_to_simulate(program, bound, platform.hosts)
    simulated = [Simulated(tasks, platform.hardware, each) for each in families]
    fastest = min(simulated, key=lambda each: each.us)
    return fastest.timeline(program, platform)


def predict(
    program: Program, sizes: Mapping[str, int], platform: Platform, kernels: str = "cublas"
) -> PredictedTimeline:
    """Predict the timeline of a host program.

    Args:
        program: the host program.
        sizes: a value for each of its symbols.
        platform: the hosts of the ranks, and the constants of their GPUs.
        kernels: the family of kernels: `aten`, `cublas` or `triton`.

    Raises HostIRError if the sizes do not fit the program.
    """
    tasks = tasks_to_simulate(program, sizes, platform.hosts)
    return Simulated(tasks, platform.hardware, kernels).timeline(program, platform)


class Simulated:
    """A simulated call with one family of kernels.

    Fields:
        us: the microseconds of the call.
    """

    def __init__(self, tasks: Sequence[CostTask], hardware: Hardware, kernels: str) -> None:
        self.tasks, self.kernels = tasks, kernels
        self.costs = Costs(hardware, kernels, flops(tasks))
        self.simulation, self.offset = Simulation(tasks, self.costs), start(tasks, hardware, EAGER)
        self.us = self.simulation.run() + self.offset
        self.texts: dict[int, str] = {}  # by the id of a statement

    def timeline(self, program: Program, platform: Platform) -> PredictedTimeline:
        """Return the timeline of the call."""
        simulation, ended = self.simulation, self.simulation.ended
        shown = {task: self.span(task, program) for task in self.tasks if _is_shown(task) and task in ended}
        critical = [shown[task] for task in _critical(self.tasks, simulation, self.costs) if task in shown]
        return PredictedTimeline(
            program.name,
            replace(platform, ranks=program.ranks).gpus,
            self.kernels,
            self.us,
            HostCosts(self.costs).call(self.tasks),
            program.ranks,
            tuple(sorted(shown.values(), key=lambda s: (s.begin, s.rank))),
            tuple(critical),
        )

    def span(self, task: CostTask, program: Program) -> PredictedSpan:
        """Return the span of a task."""
        simulation, op = self.simulation, task.op
        rounds = () if op is None else tuple(op.place.rounds)
        lane = "caller" if op is None else COMMUNICATION if op.by_group else op.lane
        ready = simulation.ready.get(task, simulation.begun[task])
        begin, end = ready + self.offset, simulation.ended[task] + self.offset
        waited = max(0.0, end - begin - _alone(task, self.costs) - simulation.added.get(task, 0.0))
        waits = any(task.blocks) or bool(task.partners)
        text = RESET if op is None else self.text(op.place.statement, program)
        return PredictedSpan(task.rank, lane, text, rounds, begin, end, waited if waits else 0.0, _resource(task))

    def text(self, statement: Statement, program: Program) -> str:
        """Return the text of a statement, in one line."""
        if id(statement) not in self.texts:
            self.texts[id(statement)] = format_statement(statement, program).strip()
        return self.texts[id(statement)]


def _alone(task: CostTask, costs: Costs) -> float:
    """Return the microseconds of a task that never waits."""
    if any(task.blocks):
        return costs.by_blocks(task, 0.0, [0.0] * len(task.blocks))[0]
    return costs.alone(task)


def _is_shown(task: CostTask) -> bool:
    """Return True if a task does work that a statement asks for; False for waits and for flags within a kernel."""
    if isinstance(task.work, Nothing):
        return False
    return not (isinstance(task.work, Pause) and task.work.sender == "copies") and bool(task.launches or task.op)


def _resource(task: CostTask) -> str:
    work = task.work
    if isinstance(work, Gemm | Traffic):
        return SMS
    if isinstance(work, CostCopy):
        return OUT if work.to_peer else IN
    return LINK if isinstance(work, CostTransfer | CostBarrier) else SIGNALS


def _critical(tasks: Sequence[CostTask], simulation: Simulation, costs: Costs) -> list[CostTask]:
    """Return the tasks that determine the end of the call, the first one first.

    The walk goes backward from the task that ends last, always to what it waited for longest: the signal of a block
    that came late, the rank that came last to a collective, or the dependency that ended last.
    """
    raisers = {flag: task for task in tasks for flag in task.raises}
    task: CostTask | None = max(simulation.ended, key=lambda each: (simulation.ended[each], bool(each.launches)))
    path: dict[CostTask, None] = {}
    while task is not None and task not in path:
        path[task] = None
        signals = [signal for block in task.blocks for signal in block if signal in simulation.ended]
        latest = max(signals, key=simulation.ended.__getitem__, default=None)
        waited = simulation.ended[task] - simulation.begun[task] - _alone(task, costs) > EPSILON
        if latest is not None and waited and simulation.ended[latest] > simulation.begun[task]:
            task = latest
        elif task in raisers:
            task = raisers[task]
        elif task.partners:
            last = max(task.partners, key=lambda each: simulation.ready.get(each, 0.0))
            task = simulation.cause.get(last)
        else:
            task = simulation.cause.get(task)
    return [*path][::-1]


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return intervals that cover the same times, and do not overlap, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
