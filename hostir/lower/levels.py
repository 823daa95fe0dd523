"""Pass `levels`: split each collective over ranks of several hosts into one between hosts and one inside each host.

The mesh axis of such a collective becomes two axes: the hosts, and the ranks of a host. An all-gather goes between
hosts first, so that each row crosses a NIC once for each host. A reduce-scatter goes inside hosts first, so that only
sums cross a NIC. An all-reduce becomes a reduce-scatter inside hosts, an all-reduce between hosts, and an all-gather
inside hosts. A program whose mesh already has an axis for hosts keeps its mesh, and its collectives get this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather, AllReduce, Broadcast, Collective, Communication, ReduceScatter
from hostir.ir.op import Statement, Value
from hostir.ir.program import Names, Program, stated_hosts
from hostir.ir.sizes import Size
from hostir.ir.source import error
from hostir.ir.types import Axis, Factor, Mesh, TensorType
from hostir.lower import Pass
from hostir.lower.allreduces import shared_axis
from hostir.lower.propagate import users_of


@dataclass(frozen=True)
class Levels(Pass):
    """Splits each collective over ranks of several hosts into a collective between hosts and one inside each host."""

    name = "levels"

    def run(self, program: Program) -> Program:
        if stated_hosts(program) < 2:
            raise error(
                f"the meshes of @{program.name} state no hosts, so no collective has two levels",
                next((s.span for s in program.body if isinstance(s, Collective)), None),
                expected="a mesh on several hosts, such as hi.DeviceMesh(range(4), hosts=2)",
            )
        names = Names.of(program)
        return _in_order(_with_split_axes(program, names), names)


def hosts_along(mesh: Mesh, over: str, ranks: int) -> int:
    """Return the number of hosts on which each team along a mesh axis lies.

    Ranks fill the hosts of the mesh in order, equally many on each. `ranks` is the number of ranks of the program.

    Raises HostIRError unless each team has equally many ranks on each of its hosts, one host after another.
    """
    in_host = ranks // mesh.hosts
    spans = []
    for team in mesh.teams(over):
        hosts = [rank // in_host for rank in team]
        different = list(dict.fromkeys(hosts))
        spans.append(len(different))
        if [host for host in different for _ in range(len(team) // len(different))] != hosts:
            raise error(
                f"ranks {' '.join(map(str, team))} along {over} lie on hosts {' '.join(map(str, hosts))}",
                None,
                expected="equally many ranks on each host, and the ranks of a host side by side",
                hint="let the innermost axes of the mesh be the ranks of one host",
            )
    if len(set(spans)) > 1:
        raise error(f"some teams along {over} lie on {min(spans)} hosts, and some on {max(spans)}", None)
    return spans[0]


def is_between_hosts(s: Collective, program: Program) -> bool:
    """Return True if the teams of a collective have one rank on each of several hosts."""
    return s.mesh.size(s.over) == hosts_along(s.mesh, s.over, program.ranks) > 1


def is_inside_host(s: Collective, program: Program) -> bool:
    """Return True if the ranks of each team of a collective share a host."""
    return hosts_along(s.mesh, s.over, program.ranks) == 1


def _with_split_axes(program: Program, names: Names) -> Program:
    """Return the program with two mesh axes, hosts and ranks of a host, instead of each axis that has both."""
    meshes: dict[str, Mesh] = {}
    outer: dict[tuple[str, str], tuple[str, int]] = {}  # for each split axis of a mesh: the axis of hosts, its extent
    for mesh in program.meshes:
        axes, shape = list[str](), list[int]()
        for axis, size in zip(mesh.axes, mesh.shape, strict=True):
            hosts = hosts_along(mesh, axis, program.ranks)
            if 1 < hosts < size:
                name = Names(mesh.axes).fresh(f"{axis}_hosts")
                outer[mesh.name, axis] = name, hosts
                axes.append(name)
                shape.append(hosts)
                size //= hosts
            axes.append(axis)
            shape.append(size)
        meshes[mesh.name] = replace(mesh, axes=tuple(axes), shape=tuple(shape))
    if not outer:
        return program
    every = [*program.inputs, *(v for s in program.body for v in s.named)]
    values = {v.name: replace(v, type=_split(v.tensor, meshes, outer)) for v in every}
    body: list[Statement] = []
    for s in program.body:
        if isinstance(s, Communication) and not _can_be_split(s, outer):
            raise s.fail(
                f"'{s.keyword()}' moves rows between ranks of several hosts, and has no form in two levels",
                expected="an allgather, a reduce_scatter or an allreduce",
                hint="use 'pipeline', which slices any communication along a Stream axis, or 'sequential'",
            )
        renamed = s.rename(values)
        if isinstance(s, Collective) and isinstance(renamed, Collective) and (s.mesh.name, s.over) in outer:
            body += _in_two(renamed, outer[s.mesh.name, s.over][0], s.over, names)
        else:
            body.append(renamed)
    inputs, outputs = (tuple(values[v.name] for v in vs) for vs in (program.inputs, program.outputs))
    split = tuple(meshes[mesh.name] for mesh in program.meshes)
    return replace(program, meshes=split, inputs=inputs, outputs=outputs, body=tuple(body))


def _can_be_split(s: Communication, outer: Mapping[tuple[str, str], object]) -> bool:
    """Return True if a communication is correct after the split of mesh axes, as it is or as two collectives."""
    if isinstance(s, AllGather | ReduceScatter | AllReduce | Broadcast):
        return True
    marks = [(v.tensor.mesh, m) for v in (s.x, s.out) for axis in v.tensor.axes for m in axis.marks]
    return not any(mesh is not None and (mesh.name, mark) in outer for mesh, mark in marks)


def _split(
    type: TensorType, meshes: Mapping[str, Mesh], outer: Mapping[tuple[str, str], tuple[str, int]]
) -> TensorType:
    """Return a type on the new meshes: a factor on a split axis becomes one on the hosts and one inside them."""
    if type.mesh is None:
        return type
    name = type.mesh.name

    def factors(factor: Factor) -> Iterator[Factor]:
        if factor.on is None or (name, factor.on) not in outer:
            yield factor
            return
        axis, hosts = outer[name, factor.on]
        yield from (Factor(Size(hosts), axis), Factor(factor.extent / hosts, factor.on))

    axes = tuple(Axis(tuple(new for old in axis.factors for new in factors(old))) for axis in type.axes)
    hosts = [outer[name, mark][0] for mark in type.partial if (name, mark) in outer]
    return replace(type, axes=axes, mesh=meshes[name], partial=tuple(sorted((*type.partial, *hosts))))


def _in_two(s: Collective, hosts: str, inside: str, names: Names) -> list[Statement]:
    """Return the collectives that replace one over the ranks of two mesh axes: `hosts`, and `inside` each host.

    The axes of the operand and of the result are already split.
    """

    def value(suffix: str, type: TensorType) -> Value:
        return Value(names.fresh(f"{s.out.name}_{suffix}"), type, s.span)

    x, out = s.x.tensor, s.out.tensor
    if isinstance(s, AllGather):
        part = value("inside", x.with_axes(axis.without(hosts) for axis in x.axes))
        return [replace(s, out=part, over=hosts), replace(s, x=part, over=inside)]
    if isinstance(s, ReduceScatter):
        addend = replace(out.with_axes(axis.without(hosts) for axis in out.axes), partial=x.partial)
        part = value("inside", _reduced(addend, inside))
        return [replace(s, out=part, over=inside), replace(s, x=part, over=hosts)]
    assert isinstance(s, AllReduce)
    k = shared_axis(replace(s, over=inside))
    if k is None:
        part = value("inside", _reduced(x, inside))
        return [replace(s, out=part, over=inside), replace(s, x=part, over=hosts)]
    shared = Axis((Factor(out.host().axes[k].extent, inside),))
    rows = out.host().with_axes(shared if i == k else axis for i, axis in enumerate(out.host().axes))
    part, total = value("inside", replace(rows, partial=_reduced(x, inside).partial)), value("rows", rows)
    return [
        ReduceScatter(s.x, part, over=inside, span=s.span),
        AllReduce(part, total, over=hosts, span=s.span),
        AllGather(total, s.out, over=inside, span=s.span),
    ]


def _reduced(type: TensorType, over: str) -> TensorType:
    return replace(type, partial=tuple(mark for mark in type.partial if mark != over))


def _in_order(program: Program, names: Names) -> Program:
    """Return the program with each pair of collectives between hosts and inside hosts in the order of this pass."""
    users, outputs = users_of(program), {v.name for v in program.outputs}
    body: dict[int, list[Statement]] = {id(s): [s] for s in program.body}
    for s in program.body:
        using = users.get(s.out.name, []) if isinstance(s, Collective) else []
        if not isinstance(s, Collective) or len(using) != 1 or s.out.name in outputs or body[id(s)] != [s]:
            continue
        user = using[0]
        pair = _levels(s, user, program)
        if pair is None or not isinstance(user, Collective):
            continue
        hosts, inside = pair
        wrong = hosts if isinstance(s, ReduceScatter) else inside
        if s.over == wrong or isinstance(s, AllReduce):
            body[id(s)] = []
            body[id(user)] = _in_two(replace(s, out=user.out), hosts, inside, names)
    return program.with_body(new for s in program.body for new in body[id(s)])


def _levels(s: Collective, user: Statement, program: Program) -> tuple[str, str] | None:
    """Return the mesh axis between hosts and the mesh axis inside hosts of two collectives, one after the other.

    Return None if they are not the same collective on two levels, of the same axis of the tensor.
    """
    if type(user) is not type(s) or not isinstance(user, Collective) or user.mesh != s.mesh:
        return None
    between = [c.over for c in (s, user) if is_between_hosts(c, program)]
    inside = [c.over for c in (s, user) if is_inside_host(c, program)]
    sharded = s.x.tensor if isinstance(s, AllGather) else user.out.tensor
    if len(between) != 1 or len(inside) != 1:
        return None
    if not isinstance(s, AllReduce) and sharded.axis_on(s.over) != sharded.axis_on(user.over):
        return None
    return between[0], inside[0]
