"""Allreduces in one-sided form: in one step, or in two steps.

In one step, every rank sends its complete partial sum to all other ranks, and adds up the partial sums of all ranks
(`hostir/lower/scatters.py`). Two steps are a reduce_scatter of rows and an allgather: each rank adds up its share of
the rows, then sends this sum to all ranks. With R ranks, two steps move 2 / R of the bytes that one step moves. But the
second step must wait for the first, and the number of ranks must divide the rows. In one step, all ranks add in the
same order. In two steps, each sum is computed by one rank, for all ranks. So in both forms, all ranks get the same bits
in every run.

Two steps are lowered in one of two ways. Either two collectives replace the allreduce, and are lowered like other
collectives (`in_two_steps`). Or the rows are cut into chunks: one chunk is gathered while the product of the next chunk
runs (`hostir/lower/chunks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather, AllReduce, ReduceScatter
from hostir.ir.op import Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import product
from hostir.ir.tensor_ops import ACTIVATIONS, Add, RmsNorm, Unary
from hostir.ir.types import Axis, Factor, TensorType
from hostir.ir.view_ops import Shard
from hostir.lower.propagate import result_of, users_of


@dataclass(frozen=True)
class AllReduceSteps:
    """Chooses the number of steps of an allreduce, and the number of blocks or chunks into which its rows are cut.

    Fields:
        extra_bytes: an allreduce takes one step only if a rank then sends at most this many bytes more than in two
            steps. Sending this many bytes takes about as long as a second step.
        blocks: the maximum number of blocks of a product's rows in one step. Each block is sent as soon as it has been
            computed.
        chunks: the maximum number of chunks of rows in two steps.
        min_rows, min_bytes: a block or a chunk has at least this many rows and this many bytes.
    """

    extra_bytes: int = 3 << 20
    blocks: int = 16
    chunks: int = 4
    min_rows: int = 256  # two tiles
    min_bytes: int = 4 << 20

    def one(self, s: AllReduce, *, unknown: bool) -> bool:
        """Return True if an allreduce takes one step.

        It takes one step if there are two ranks, if the number of ranks divides no axis of its rows, or if its tensor
        is small. If the size of the tensor is known only at a call, return `unknown` unless one of the first two
        conditions holds.
        """
        ranks, size = s.mesh.size(s.over), _bytes(s)
        if shared_axis(s) is None or ranks == 2:
            return True
        return unknown if size is None else (ranks - 1) * (ranks - 2) * size <= ranks * self.extra_bytes

    def blocks_of(self, s: AllReduce) -> int:
        """Return the number of blocks into which the rows of a product are cut for an allreduce in one step."""
        return self._parts(s, self.blocks, 1)

    def chunks_of(self, s: AllReduce) -> int:
        """Return the number of chunks into which the rows are cut for an allreduce in two steps."""
        return self._parts(s, self.chunks, s.mesh.size(s.over))

    def _parts(self, s: AllReduce, most: int, ranks: int) -> int:
        k, size = rows_axis(s), _bytes(s)
        if k is None:
            return 1
        extent, rows = s.x.tensor.local_shape[k].value, product(s.x.tensor.local_shape[:-1]).value
        if size is None or rows is None:  # the number must divide the rows of every call
            most = min(most, 2 if ranks > 1 else 4)
        else:
            most = min(most, rows // self.min_rows, size // self.min_bytes)
        fits = (n for n in range(most, 1, -1) if extent is None or extent % (n * ranks) == 0)
        return next(fits, 1)


def _bytes(s: AllReduce) -> int | None:
    count = product(s.x.tensor.local_shape).value
    return None if count is None else count * s.x.tensor.dtype.bytes


def rows_axis(s: AllReduce) -> int | None:
    """Return the position of the axis that is cut into blocks or chunks of rows; None if there is no such axis.

    This is the first axis that has more than one element on a rank. If it is sharded or is the last axis, return None.
    """
    axes = zip(s.out.tensor.host().axes[:-1], s.x.tensor.local_shape, strict=False)
    first = next((k for k, (_, size) in enumerate(axes) if not size.is_one), None)
    return None if first is None or s.out.tensor.host().axes[first].marks else first


def shared_axis(s: AllReduce) -> int | None:
    """Return the position of the first axis of rows that the number of ranks divides; None if there is no such axis.

    Sharded axes and axes of extent 1 are left out. A symbolic extent counts as divisible. But the search ends at a
    sharded axis of symbolic extent.
    """
    ranks = s.mesh.size(s.over)
    for k, axis in enumerate(s.out.tensor.host().axes[:-1]):
        if not axis.marks and not axis.extent.is_one and (axis.extent.value is None or axis.extent.value % ranks == 0):
            return k
        if axis.extent.value is None:  # the number of blocks outside the shared axis must be known
            return None
    return None


def fits_chunks(s: AllReduce) -> bool:
    """Return True if an allreduce can run in contiguous chunks of rows.

    The axis that the ranks share must then be the outermost axis with more than one element.
    """
    return shared_axis(s) is not None and shared_axis(s) == rows_axis(s)


def in_two_steps(program: Program, wanted: Callable[[AllReduce], bool]) -> tuple[Program, frozenset[str]]:
    """Replace the `wanted` allreduces by a reduce_scatter of rows and an allgather.

    If an addition, an activation or a norm of rows follows an allreduce, each rank computes it on its rows, before the
    allgather. Return the new program and the names of the gathered tensors.
    """
    steps = _TwoSteps(program)
    for s in program.body:
        if result_of(s).name in steps.moved:
            continue
        if isinstance(s, AllReduce) and wanted(s):
            steps.replace(s)
        else:
            steps.body.append(s)
        steps.defined.add(result_of(s).name)
    return program.with_body(steps.body), frozenset(steps.gathered)


class _TwoSteps:
    """Builds the body of a program in which two collectives replace each chosen allreduce."""

    def __init__(self, program: Program) -> None:
        self.names, self.users = Names.of(program), users_of(program)
        self.outputs = {v.name for v in program.outputs}
        self.body: list[Statement] = []
        self.defined = {v.name for v in program.inputs}
        self.moved: set[str] = set()  # results of statements that now run before an allgather
        self.gathered: set[str] = set()

    def replace(self, s: AllReduce) -> None:
        """Append to the body the reduce_scatter and the allgather that replace an allreduce.

        Some statements after the allreduce can run on the rows of one rank. Append them between the two collectives.
        """
        k, type = shared_axis(s), s.out.tensor.host()
        assert k is not None
        axis = Axis((Factor(type.axes[k].extent, s.over),))
        share = type.with_axes(axis if j == k else a for j, a in enumerate(type.axes))

        def rows(value: Value) -> Value:
            return Value(self.names.fresh(f"{value.name}_rows"), share, s.span)

        result, mine = s.out, rows(s.out)
        scatter = ReduceScatter(s.x, mine, over=s.over, span=s.span)
        after: list[Statement] = []
        replaced = [result]
        user = self._only_user(result)
        if isinstance(user, Add) and user.out.tensor.host() == type and user.x != user.y:
            other = user.y if user.x == result else user.x
            way = self._added(other, type, k)
            if way == "rows":
                other = self._shared(other, rows(other), user)
            if way:
                result, total = user.out, rows(user.out)
                after.append(Add(out=total, x=mine, y=other, span=user.span))
                replaced.append(result)
                mine, user = total, self._only_user(result)
        if isinstance(user, Unary) and user.keyword() in ACTIVATIONS:
            result, applied = user.out, rows(user.out)
            after.append(replace(user, x=mine, out=applied))
            replaced.append(result)
            mine, user = applied, self._only_user(result)
        if isinstance(user, RmsNorm) and user.x == result and (user.weight is None or self._known(user.weight)):
            result, normed = user.out, rows(user.out)
            after.append(replace(user, x=mine, out=normed))
            mine = normed
            replaced.append(result)
        self.moved |= {v.name for v in replaced}
        self.gathered.add(result.name)
        self.body += [scatter, *after, AllGather(mine, result, over=s.over, span=s.span)]

    def _known(self, value: Value) -> bool:
        """Return True if a tensor is an input, or if a statement before the allreduce computes it."""
        return value.name in self.defined

    def _added(self, other: Value, type: TensorType, k: int) -> str:
        """Return the part of `other` that is added to the rows of one rank.

        `all` stands for the complete tensor, and `rows` for the rows of this rank. An empty string says that `other`
        cannot be added between the reduce_scatter and the allgather.
        """
        if not self._known(other):
            return ""
        at = k - (len(type.axes) - len(other.tensor.axes))
        if at < 0 or other.tensor.axes[at].extent.is_one:
            return "all"
        alike = other.tensor.host() == type and all(a.extent.is_one for a in type.axes[:k])
        return "rows" if alike else ""

    def _shared(self, value: Value, rows: Value, user: Statement) -> Value:
        """Insert a view of this rank's rows of `value`, directly after the statement that defines `value`.

        The result of the view is `rows`. Return it.
        """
        positions = [n for n, s in enumerate(self.body, 1) if result_of(s) == value]
        self.body.insert(positions[0] if positions else 0, Shard(value, rows, span=user.span))
        return rows

    def _only_user(self, value: Value) -> Statement | None:
        users = self.users.get(value.name, [])
        return users[0] if len(users) == 1 and value.name not in self.outputs else None
