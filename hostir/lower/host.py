"""Build host programs: streams, buffers, positions of ranks, names, and the layouts that communications need."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from hostir.ir.comm_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Communication,
    Gather,
    ReduceScatter,
    Scatter,
    SendRecv,
)
from hostir.ir.host_ops import Allocate, AsPartial, CurrentStream, Wait
from hostir.ir.onesided_ops import Rank
from hostir.ir.op import Bin, Expr, Lit, Phase, Ref, Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sharding import leads
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import DenseCopy
from hostir.ir.types import Axis, Factor, Kind, TensorType
from hostir.ir.view_ops import Permute, Reshape, ViewStatement
from hostir.lower.propagate import keeps_dense, result_of, splits_only, users_of


@dataclass(frozen=True)
class Front:
    """A view of a tensor in which the communicated axis is outermost.

    The view first splits axes of the tensor, and then permutes them. `split` is the type of the tensor after the split,
    and `order` is the permutation. Communications need dense buffers. So the tensor is copied if the permutation
    changes the order of the elements.
    """

    split: TensorType
    order: tuple[int, ...]

    @property
    def type(self) -> TensorType:
        return self.split.with_axes(self.split.axes[i] for i in self.order)


def isolate(type: TensorType, mark: str) -> tuple[Axis, ...]:
    """Return the axes of a tensor after a split of the axis that is sharded over the mesh axis `mark`.

    The ranks become a separate axis. Each factor outside or inside the ranks also becomes a separate axis.
    """
    assert type.mesh
    ranks = Size(type.mesh.size(mark))
    axes: list[Axis] = []
    for axis in type.host().axes:
        if mark not in axis.marks:
            axes.append(axis)
            continue
        for factor in axis.factors:
            if factor.on != mark:
                axes.append(Axis((factor,)))
                continue
            axes.append(Axis((Factor(ranks, mark),)))
            if factor.extent != ranks:
                axes.append(Axis.of(factor.extent / ranks))
    return tuple(axes)


def fronts(s: Communication, x: TensorType, out: TensorType) -> tuple[Front, Front] | None:
    """Return views of `x` and `out` in which the communicated axis is outermost; None if it already is outermost."""
    if isinstance(s, (AllReduce, Broadcast, SendRecv)):
        return None
    if isinstance(s, AllToAll):
        return _exchange(s.over, x, out)
    sharded = x if isinstance(s, (AllGather, Gather)) else out
    assert isinstance(s, (AllGather, ReduceScatter, Gather, Scatter))
    assert sharded.mesh
    mark = s.over if isinstance(s, Collective) else next(m for a in sharded.host().axes for m in a.marks)
    if leads(sharded, mark):
        return None
    axes = isolate(sharded, mark)
    at = next(i for i, a in enumerate(axes) if mark in a.marks)
    order = (at, *(i for i in range(len(axes)) if i != at))
    bare = tuple(a.without(mark) for a in axes)
    left, right = (axes, bare) if sharded is x else (bare, axes)
    return Front(x.with_axes(left), order), Front(out.with_axes(right), order)


def _exchange(mark: str, x: TensorType, out: TensorType) -> tuple[Front, Front]:
    """Return the view of `x` and the view of `out` for an alltoall over D ranks.

    `x` is `[.., A@m, .., B, ..]`, and its view is `[D, A@m, rest]`. `out` is `[.., A, .., B@m, ..]`, and its view is
    `[D@m, A, rest]`. In both views, axis B is split into D and B/D, and D becomes the outermost axis. `rest` has B/D
    and the other axes.
    """
    a = x.axis_on(mark)
    assert a is not None
    axes = isolate(out, mark)
    ranks = next(i for i, axis in enumerate(axes) if axis.marks == (mark,))
    before = out.axis_on(mark)
    assert before is not None
    from_a = a if a < before else a + len(axes) - len(out.axes)
    order = (ranks, from_a, *(i for i in range(len(axes)) if i not in (ranks, from_a)))
    left = tuple(x.axes[a] if i == from_a else axis.without(mark) for i, axis in enumerate(axes))
    return Front(x.with_axes(left), order), Front(out.with_axes(axes), order)


class Team:
    """The team of a collective, with expressions for the positions of this rank and of its peers in the team."""

    def __init__(self, host: Host, s: Collective, of: Value) -> None:
        self.over, self.ranks = s.over, s.mesh.size(s.over)
        self.rank = Ref(Value(host.names.fresh("r"), Kind.INDEX))
        # True if nothing more is needed to order this call after the last one: flags do it, or a barrier was added.
        self.past_last_call = (s.mesh.name, s.over) in host.ordered
        host.body.append(Rank(self.rank.value, of, s.over, span=s.span))

    def peer(self, offset: Expr) -> Expr:
        """Return the position of the rank that comes `offset` positions after this rank, modulo the number of ranks."""
        return modulo(Bin("+", self.rank, offset), self.ranks)


def modulo(expr: Expr, ranks: int) -> Expr:
    """Return the expression `expr % ranks`, for positions and stream numbers that wrap around."""
    return Bin("%", expr, Lit(ranks))


class Scope:
    """The statements of a body under construction. The body belongs to a program or to a loop.

    The methods append statements, together with the buffers, views and copies that these statements need.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.body: list[Statement] = []
        self.dense: set[str] = set()  # values that are contiguous on each rank

    @abstractmethod
    def scratch(self, name: str, type: TensorType, like: Value) -> Value:
        """Append the allocation of a dense buffer of a type; return the buffer.

        Errors about the buffer point at the place of `like` in the source.
        """

    def add(self, s: Statement) -> None:
        """Append a statement. Before it, append copies or views of operands that need another memory layout."""
        if isinstance(s, ViewStatement):
            self.view(s)
        elif isinstance(s, Communication):
            self.communicate(s)
        else:
            self.body.append(s)

    def view(self, s: ViewStatement) -> Value:
        """Append a view, and return its result.

        If the view is a reshape that needs a dense operand, first append a dense copy.
        """
        if isinstance(s, Reshape) and s.x.name not in self.dense and not splits_only(s):
            dense = self.scratch(f"{s.x.name}_dense", s.x.tensor, s.x)
            note = f"copy: {s.x} does not lie in one piece, as a reshape that merges axes needs it to"
            self.body.append(DenseCopy(out=dense, x=s.x, span=s.span, note=note))
            s = replace(s, x=dense)
        self.body.append(s)
        if s.x.name in self.dense and keeps_dense(s):
            self.dense.add(s.out.name)
        return s.out

    def see(self, value: Value, front: Front) -> Value:
        """Append the views of `front`; return their result, a view of `value` with the communicated axis outermost."""
        if front.split.axes != value.tensor.axes:
            split = Value(self.names.fresh(f"{value.name}_split"), front.split, value.span)
            value = self.view(Reshape(value, split, span=value.span))
        if front.order != tuple(range(len(front.order))):
            turned = Value(self.names.fresh(f"{value.name}_front"), front.type, value.span)
            value = self.view(Permute(value, turned, front.order, span=value.span))
        return value

    def communicate(self, s: Communication) -> None:
        """Append a communication and the wait for it. Also append the views and copies that its memory layout needs."""
        x, out = s.x, s.out
        if seen := fronts(s, x.tensor, out.tensor):
            x, out = self.see(x, seen[0]), self.see(out, seen[1])
        x = self.packed(x, s)
        target = out if out.name in self.dense else self.scratch(f"{s.out.name}_packed", out.tensor, out)
        handle = Value(self.names.fresh(f"{s.out.name}_ready"), Kind.HANDLE, s.span)
        self.body += [replace(s, x=x, out=target, handle=handle), Wait(handle, span=s.span)]
        if target is not out:
            self.body.append(DenseCopy(out=out, x=target, span=s.span, note=_why(s, s.out)))

    def packed(self, x: Value, s: Communication) -> Value:
        """Return the operand `x` of a communication if it is dense.

        Otherwise append a dense copy, and return the copy.
        """
        if x.name in self.dense:
            return x
        dense = self.scratch(f"{s.x.name}_packed", x.tensor, x)
        self.body.append(DenseCopy(out=dense, x=x, span=s.span, note=_why(s, s.x)))
        return dense


def _why(s: Communication, operand: Value) -> str:
    return f"copy: {s.keyword()} moves dense buffers, and {operand} does not lie so"


class Host(Scope):
    """Builds the host program of a fusion.

    The builder holds the statements outside loops, and the buffers of all statements.
    """

    def __init__(self, program: Program, ordered: Collection[tuple[str, str]] = ()) -> None:
        super().__init__(Names.of(program))
        self.program = program
        self.ordered = ordered  # teams, as (mesh, axis), that need no barrier between two calls
        self.values = {v.name: replace(v, type=v.tensor.host()) for v in program.inputs}
        self.dense |= self.values.keys()
        self.users = users_of(program)
        self.outputs = {v.name for v in program.outputs}
        self.teams: dict[tuple[str, str], Team] = {}
        self.folded: set[str] = set()  # results of statements that have become a part of another statement
        self.apart: set[str] = set()  # results of allreduces that do not share memory with their operand
        self.forked = False  # True once a copy stream waits for the caller's stream

    @cached_property
    def user(self) -> Ref:
        """The caller's stream. The first use puts a `current_stream` statement at the beginning of the program."""
        stream = Value(self.names.fresh("user"), Kind.STREAM)
        self.body.insert(0, CurrentStream(stream))
        return Ref(stream)

    def team(self, s: Collective, of: Value | None = None) -> Team:
        """Return the team of a collective. `of` is a tensor on the same mesh, by default the collective's operand."""
        key = s.mesh.name, s.over
        if key not in self.teams:
            self.teams[key] = Team(self, s, of or self.values[s.x.name])
        return self.teams[key]

    def index(self, name: str) -> Ref:
        """Return a new loop index. A later loop may use the same name for its index."""
        index = Ref(Value(self.names.fresh(name), Kind.INDEX))
        self.names.taken.discard(index.value.name)
        return index

    def add_unsliced(self, s: Statement) -> None:
        """Append a statement of the fusion outside any loop. Its result is a new buffer, or a view."""
        out = result_of(s)
        if out.name in self.folded:
            return
        if isinstance(s, ViewStatement):
            self.values[out.name] = replace(out, type=out.tensor.host())
        self.destination(out)
        self.add(s.rename(self.values))

    def destination(self, out: Value) -> Value:
        """Return the buffer of a result. The first use allocates it."""
        if out.name not in self.values:
            self.values[out.name] = self.buffer(out)
        return self.values[out.name]

    def scratch(self, name: str, type: TensorType, like: Value) -> Value:
        buffer = Value(self.names.fresh(name), type, like.span)
        self.body.append(Allocate(buffer, span=like.span))
        self.dense.add(buffer.name)
        return buffer

    def buffer(self, value: Value) -> Value:
        """Append the allocation of a buffer for a value; return the buffer.

        If only an allreduce reads the value, use the memory of the allreduce's result instead of a new buffer.
        """
        host = replace(value, type=value.tensor.host())
        self.dense.add(host.name)
        reduce = self.only_reduced(value)
        if reduce is None:
            self.body.append(Allocate(host, span=value.span))
            return host
        self.body.append(AsPartial(self.destination(reduce.out), host, reduce.over, span=value.span))
        return host

    def finished(self, streams: int = 0) -> Program:
        """Return the host program, after every statement of the fusion has been added."""
        inputs, outputs = (tuple(self.values[v.name] for v in vs) for vs in (self.program.inputs, self.program.outputs))
        body = tuple(self.body)
        return Program(self.program.name, Phase.HOST, self.program.meshes, inputs, outputs, body, streams)

    def used_outside(self, value: Value, inside: Collection[str]) -> bool:
        """Return True if a value is an output, or if a statement outside a loop reads it.

        `inside` holds the names of the results of the statements in the loop.
        """
        users = self.users.get(value.name, [])
        return value.name in self.outputs or any(result_of(u).name not in inside for u in users)

    def only_reduced(self, value: Value) -> AllReduce | None:
        """Return the allreduce that is the only reader of a value, if it may run in place; else None."""
        user = self.only_user(value)
        return user if isinstance(user, AllReduce) and user.out.name not in self.apart else None

    def only_user(self, value: Value) -> Statement | None:
        """Return the only statement that reads a value.

        Return None if the value is an output, or if no statement or several statements read it.
        """
        users = self.users.get(value.name, [])
        return users[0] if len(users) == 1 and value.name not in self.outputs else None
