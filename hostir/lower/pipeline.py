"""Passes `sequential` and `pipeline`. `sequential` runs every statement unsliced. `pipeline` runs statements in a loop.

The loop has one round for each slice along the Stream axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import (
    LOW_LATENCY,
    AllGather,
    AllReduce,
    Communication,
    Implemented,
    ReduceScatter,
    check_team,
)
from hostir.ir.host_ops import For
from hostir.ir.op import REGISTRY, Ref, Statement, Value
from hostir.ir.program import Program, rewrite, stated_hosts
from hostir.ir.sizes import Size
from hostir.ir.source import HostIRError, error
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.types import STREAM, Axis, Factor, Kind
from hostir.lower import Pass
from hostir.lower.host import Host
from hostir.lower.loops import Slices
from hostir.lower.propagate import operands_of, result_of, stream_place
from hostir.lower.slices import SlicedGroup, SlicePlace, operand_places, result_place, schedule, why_not

NOT_OVERLAPPED = "not overlapped"  # begins the comment of a communication that is not sliced
NO_STREAM_AXIS = "no tensor has a Stream axis to slice it along, so 'pipeline' does the same as 'sequential'"
NOT_SLICED = "no Stream axis slices it"
MIN_ROWS = 128  # rows of a slice that the pass chooses: a tile of a matmul
ROWS_STAY_WHOLE = f"its rows are not a known number that divides into slices of at least {MIN_ROWS} rows"


@dataclass(frozen=True)
class Sequential(Pass):
    """Runs each communication and each computation unsliced, in program order, on the caller's stream.

    `by` names the implementation of all collectives that it can run. NCCL runs the other collectives.
    """

    name = "sequential"
    by: str = ""

    def run(self, program: Program) -> Program:
        return implemented(program, self.by) if self.by else build(program, [])


def implemented(program: Program, by: str) -> Program:
    """Return the sequential program of a fusion, in which the implementation `by` runs all collectives that it can run.

    NCCL runs an all-gather that `low_latency` can run for some sizes only, if another collective fits all sizes. Raise
    HostIRError if the implementation can run no collective.
    """

    def tried(s: Statement) -> Statement | HostIRError:
        """Return a collective with the implementation, the reason why it cannot run there, or another statement."""
        if not isinstance(s, Implemented) or by not in s.implementations:
            return s
        try:
            changed = replace(s, by=by, handle=s.handle or Value("h", Kind.HANDLE))
            check_team(changed, program.ranks)
            changed.verify()
        except HostIRError as refusal:
            return refusal
        return changed

    builder = Host(program)
    # An operand in a buffer of its own may be computed in symmetric memory.
    reduces = (s for s in program.body if isinstance(s, AllReduce))
    if by != LOW_LATENCY:
        builder.apart |= {s.out.name for s in reduces if not isinstance(tried(s), HostIRError)}
    for s in program.body:
        builder.add_unsliced(s)
    sequential = builder.finished()
    refusals = [refusal for s in sequential.walk() if isinstance(refusal := tried(s), HostIRError)]

    possible = [s for s in map(tried, sequential.walk()) if isinstance(s, Implemented) and s.by == LOW_LATENCY]
    some_for_all = any(s.units.is_integer for s in possible)

    def change(s: Statement) -> tuple[Statement, ...]:
        changed = tried(s)
        if isinstance(changed, HostIRError):
            return (s,)
        # A gather that fits only some sizes would limit the sizes of the whole program.
        limits = some_for_all and isinstance(changed, AllGather) and not changed.units.is_integer
        return (s,) if limits else (changed,)

    changed = sequential.with_body(rewrite(sequential.body, change))
    if changed == sequential:
        names = " or ".join(name for name, s in REGISTRY.items() if by in getattr(s, "implementations", ()))
        none = error(f"@{program.name} has no collective that {by} can run", expected=f"a fusion with {names}")
        raise (*refusals, none)[0]
    return changed


@dataclass(frozen=True)
class Pipeline(Pass):
    """Makes a loop over the slices of the Stream axis: each round selects, communicates and computes one slice.

    It generalises nvFuser's collective-based pipeline (its pull request 3606, later its StreamParallelType pass): all
    statements that can be sliced along the Stream axis run in one loop. A communication outside of all loops gets a
    comment with the reason.

    If ranks are on several hosts, and no tensor has a Stream axis, the pass chooses one for each communication of rows:
    see `with_slices`. There are then at most `slices` slices.
    """

    name = "pipeline"
    slices: int = 4

    def run(self, program: Program) -> Program:
        stated = any(annotated(program))
        if stated_hosts(program) > 1 and not stated:
            program = with_slices(program, self.slices)
        sliced = groups(program)
        for group in sliced:
            if group.left_out and not group.communicates:  # a loop without communication would hide nothing
                raise next(iter(group.left_out.values()))
        loops = [group for group in sliced if group.communicates]
        in_loops = {result_of(s).name for group in loops for s in group.statements}
        communications = {result_of(s).name for s in program.body if isinstance(s, Communication)}
        by_itself = stated_hosts(program) > 1 and not stated
        why_whole = ROWS_STAY_WHOLE if by_itself else NOT_SLICED if sliced else NO_STREAM_AXIS
        reasons = dict.fromkeys(communications - in_loops, why_whole)
        reasons |= {name: why.diagnostics[0].message for group in sliced for name, why in group.left_out.items()}
        return build(with_reasons(program, reasons), loops)


def with_slices(program: Program, most: int) -> Program:
    """Return the fusion with a Stream part in the rows that its communications move.

    The rows of an allgather or a reduce_scatter are those of a rank, and the rows of an allreduce are those of its
    first axis. Their innermost factor is cut into the largest number of slices, at most `most`, that divides it and
    leaves MIN_ROWS rows to each slice. Rows stay whole if there is no such number, if their number is a symbol, or if
    they are the last axis. A communication that a loop of an earlier one contains is not cut again. The mesh decides,
    not the team: rows that move inside a host are cut, too.
    """
    for s in program.body:
        if not isinstance(s, AllGather | ReduceScatter | AllReduce):
            continue
        cut = _cut(program, result_of(s).name, most)
        if cut is None or any(result_of(s).name in group.places for group in groups(program)):
            continue
        try:
            looped = {result_of(each).name for group in groups(cut) for each in group.statements}
        except HostIRError:  # its slices do not fit those of another loop
            continue
        if result_of(s).name in looped:
            program = cut
    return program


def _cut(program: Program, name: str, most: int) -> Program | None:
    """Return the fusion with a Stream part in the rows of the communication with result `name`; None if none fits."""
    s = next(s for s in program.body if result_of(s).name == name)
    assert isinstance(s, AllGather | ReduceScatter | AllReduce)
    rows = s.x if isinstance(s, AllGather) else s.out
    axes = rows.tensor.axes
    k = rows.tensor.axis_on(s.over) if not isinstance(s, AllReduce) else 0
    if k is None or k == len(axes) - 1:
        return None
    *outer, inner = axes[k].factors
    if inner.on is not None:  # the rows of all ranks along this mesh axis
        ranks = Size(s.mesh.size(inner.on))
        outer, inner = [*outer, Factor(ranks, inner.on)], Factor(inner.extent / ranks)
    extent = inner.extent.value
    if extent is None:
        return None
    count = next((n for n in range(most, 1, -1) if extent % n == 0 and extent >= n * MIN_ROWS), 1)
    if count == 1:
        return None
    axis = Axis((*outer, Factor(Size(count), STREAM), Factor(inner.extent / count)))
    split = [axis if i == k else old for i, old in enumerate(rows.tensor.axes)]
    value = replace(rows, type=rows.tensor.with_axes(split))
    values = {rows.name: value}
    inputs, outputs = (tuple(values.get(v.name, v) for v in vs) for vs in (program.inputs, program.outputs))
    return replace(program, inputs=inputs, outputs=outputs, body=tuple(s.rename(values) for s in program.body))


def with_reasons(program: Program, reasons: Mapping[str, str]) -> Program:
    """Return the program with a comment on each communication that cannot overlap.

    `reasons` maps the name of a communication's result to the reason.
    """
    body = (
        replace(s, note=f"{NOT_OVERLAPPED}: {reasons[name]}") if (name := result_of(s).name) in reasons else s
        for s in program.body
    )
    return program.with_body(body)


def build(program: Program, loops: list[SlicedGroup]) -> Program:
    """Return the host program that runs the groups `loops` in loops, and the rest of the fusion unsliced."""
    host = Host(program)
    for step in schedule(program.body, loops):
        if isinstance(step, SlicedGroup):
            host.body.append(loop(host, step))
        else:
            host.add_unsliced(step)
    return host.finished()


def loop(host: Host, group: SlicedGroup) -> For:
    """Return the loop that runs a group slice by slice."""
    index = Value(host.names.fresh("i"), Kind.INDEX)
    slices = Slices(host, group, Ref(index), index.name)
    for s in group.statements:
        slices.statement(s)
    return For(index, group.count, tuple(slices.body), span=group.statements[0].span)


def annotated(program: Program) -> Iterator[tuple[Statement | None, Value, SlicePlace]]:
    """Yield a tuple for each tensor with a Stream factor: its statement, the tensor, and the place of its slices.

    The statement is the one that defines the tensor; None for an input.
    """
    for s, value in [*((None, v) for v in program.inputs), *((s, result_of(s)) for s in program.body)]:
        parts = [(k, stream_place(a)) for k, a in enumerate(value.tensor.axes)]
        places = [SlicePlace(k, *p) for k, p in parts if p]
        if len(places) > 1 or sum(f.on == STREAM for a in value.tensor.axes for f in a.factors) > 1:
            raise error(f"{value} has two Stream axes", s.span if s else value.span, expected="one axis to slice")
        if places:
            yield s, value, places[0]


def _refusal(s: Statement, reason: str) -> HostIRError:
    hint = (
        "put the Stream part inside the sharded one: in Python t.split(0, ranks), t.split(1, S), and Stream on axis 1; "
        "in a text as in '(4@didx 2@stream 8)'"
    )
    return s.fail(f"the pipeline cannot slice {s.keyword()}: {reason}", hint=hint)


def groups(program: Program) -> list[SlicedGroup]:
    """Return the groups of statements that loops run slice by slice.

    There is one group for each tensor with a Stream axis, unless an earlier group already slices the tensor.
    """
    collected = _Groups(program)
    for s, value, place in annotated(program):
        if not any(value.name in group.places for group in collected.groups):
            collected.groups.append(collected.group(s, value, place))
    return collected.groups


class _Groups:
    """Collects groups of statements, one for each loop; a statement is in at most one group."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.producer = {result_of(s).name: s for s in program.body}
        self.taken: set[str] = set()  # results of the statements that are in groups
        self.groups: list[SlicedGroup] = []

    def group(self, s: Statement | None, value: Value, place: SlicePlace) -> SlicedGroup:
        """Return the group of a tensor with a Stream axis; `s` is the statement that defines the tensor, if any."""
        group = SlicedGroup()
        if s is not None:
            self.add_with_producers(s, place, group, required=True)
        else:
            group.places[value.name] = place
        self.add_users(group, seed=value)
        _remove_prerequisites(self.program, group)
        computations = (s for s in group.statements if isinstance(s, TensorOp))
        if any(s.keeps_axis(group.places[s.out.name].axis) for s in computations):
            group.keep_axes()
        order = {result_of(s).name: n for n, s in enumerate(self.program.body)}
        group.statements.sort(key=lambda s: order[result_of(s).name])
        return group

    def joins(self, s: Statement, place: SlicePlace, group: SlicedGroup, required: bool = False) -> bool:
        """Add a statement to a group if it can be sliced at `place`; return True if it was added.

        If the statement is `required` and cannot be sliced, raise HostIRError.
        """
        places = operand_places(s, place)
        if reason := why_not(s, place, places):
            refusal = _refusal(s, reason)
            if required:
                raise refusal
            group.left_out |= {s.out.name: refusal} if isinstance(s, Communication) else {}
            return False
        if group.conflicts({**places, result_of(s).name: place}):
            return False
        group.add(s, place, places)
        self.taken.add(result_of(s).name)
        return True

    def add_with_producers(self, s: Statement, place: SlicePlace, group: SlicedGroup, required: bool = False) -> None:
        """Add a statement to a group if it can be sliced.

        Then do the same with the statements that produce its operands.
        """
        if result_of(s).name in self.taken or not self.joins(s, place, group, required):
            return
        for name, at in operand_places(s, place).items():
            if name in self.producer:
                self.add_with_producers(self.producer[name], at, group)

    def add_users(self, group: SlicedGroup, seed: Value) -> None:
        """Add to the group those readers of its results that can be sliced.

        `seed` is the tensor with the Stream axis. A reader that cannot be sliced stays outside the loop, and its result
        is available only after the loop. So the readers of this result stay outside, too.
        """
        outside: set[str] = set()  # values that are computed from the loop's results outside it, so after the loop
        inside = {result_of(s).name for s in group.statements}
        for s in self.program.body:
            name, reads = result_of(s).name, operands_of(s)
            sliced = [v for v in reads if v.name in inside or (v.name == seed.name and not inside)]
            late = any(v.name in outside for v in reads)
            if name in inside or not (sliced or late):
                continue
            place = result_place(s, sliced[0], group.places[sliced[0].name]) if sliced else None
            if not late and place is None and sliced[0].name == seed.name and not group.statements:
                raise s.fail(
                    f"the pipeline cannot slice {s.keyword()}: it sums over the Stream axis of {seed}",
                    hint="put Stream on an axis that the result keeps",
                )
            fits = not late and place is not None and name not in self.taken and self.joins(s, place, group)
            (inside if fits else outside).add(name)


def _remove_prerequisites(program: Program, group: SlicedGroup) -> None:
    """Remove from a group the statements that must be complete before the loop can run.

    There are two cases for such a statement S. Another statement of the group reads the unsliced result of S. Or a
    statement outside the group needs the result of S, and the group needs the result of that outside statement.
    """
    while True:
        inside = {result_of(s).name for s in group.statements}
        unsliced = {
            v.name
            for s in group.statements
            for v in operands_of(s)
            if v.name in inside and v.name not in operand_places(s, group.places[result_of(s).name])
        }
        feeds: dict[str, set[str]] = {}  # for each value computed outside the loop: the loop's results that it needs
        early = set(unsliced)
        for s in program.body:
            name, reads = result_of(s).name, [v.name for v in operands_of(s)]
            if name in inside:
                early |= {need for r in reads for need in feeds.get(r, ())}
            else:
                feeds[name] = {n for r in reads for n in ({r} if r in inside else feeds.get(r, set()))}
        if not early:
            return
        group.statements = [s for s in group.statements if result_of(s).name not in early]
