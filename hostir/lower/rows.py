"""Allgathers and reduce_scatters of rows, and how the shards lie in them; for `ring`, `fused` and `push`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather, Collective, Communication, ReduceScatter
from hostir.ir.op import Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size, product
from hostir.ir.tensor_ops import Contraction, Linear, Matmul, Reshape
from hostir.ir.types import Axis
from hostir.lower.host import isolate
from hostir.lower.pipeline import with_reasons
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import SlicePlace

SLICES = (4, 2)  # into how many slices the rows may be cut whose columns are gathered

# Which they are -------------------------------------------------------------------------------------------------------

RowCollective = AllGather | ReduceScatter


@dataclass(frozen=True)
class RowCollectives:
    """The collectives of a program that move whole rows, and reasons why its other communications are not overlapped.

    Matmuls read the rows of an allgather; those of a reduce_scatter are sums of products.
    """

    program: Program
    moves: tuple[RowCollective, ...]
    reasons: Mapping[str, str]  # by the result of a communication

    @staticmethod
    def of(program: Program, strategy: str) -> RowCollectives:
        moves = [s for s in program.body if isinstance(s, Communication) and not _of_one_rank(s)]
        reasons = {s.out.name: why for s in moves if (why := _why_whole(s, program, strategy))}
        rows = [s for s in moves if isinstance(s, RowCollective) and s.out.name not in reasons]
        return RowCollectives(program, tuple(rows), reasons)

    @property
    def gathers(self) -> list[AllGather]:
        return [s for s in self.moves if isinstance(s, AllGather)]

    @property
    def scatters(self) -> list[ReduceScatter]:
        return [s for s in self.moves if isinstance(s, ReduceScatter)]

    def ordered(self, program: Program) -> frozenset[tuple[str, str]]:
        """Return the teams, by mesh and axis, whose flags order calls of this program with the same collectives."""
        return frozenset((s.mesh.name, s.over) for s in self.moves if self._orders_calls(s, program))

    def _orders_calls(self, s: RowCollective, program: Program) -> bool:
        """Whether the flags of a team's collectives order its calls, so that buffers need no barrier to be used again.

        Every rank waits for blocks of every other in each of them. If the last one sums up what a product makes after
        all gathered rows have been read, then whoever has its sum knows that the others have read these rows; and who
        has the first gathered rows of the next call knows that the others have their sums.
        """
        team = [other for other in self.moves if (other.mesh, other.over) == (s.mesh, s.over)]
        last = product_of_rows(program, team[-1]) if isinstance(team[-1], ReduceScatter) else None
        if last is None or not isinstance(team[0], AllGather) or first_matmul(program, team[0]) is None:
            return False
        body = program.body
        readers = [user for move in team if isinstance(move, AllGather) for user in users(program, move.out)]
        return all(body.index(reader) < body.index(last) for reader in readers)

    def only(self, fits: Callable[[RowCollective], bool], why_not: str) -> RowCollectives:
        """Keep the collectives that fit; the others get `why_not` as their reason."""
        out = {s.out.name: why_not for s in self.moves if not fits(s)}
        moves = tuple(s for s in self.moves if s.out.name not in out)
        return RowCollectives(self.program, moves, {**self.reasons, **out})

    def noted(self, strategy: str) -> RowCollectives:
        """Write the reasons into the program; raise if it communicates but moves no rows."""
        if self.moves or not self.reasons:
            return replace(self, program=with_reasons(self.program, self.reasons))
        s = next(s for s in self.program.body if result_of(s).name in self.reasons)
        raise s.fail(
            f"'{strategy}' cannot overlap the {s.keyword()}: {self.reasons[result_of(s).name]}",
            expected="an allgather of the rows of a matmul's left side, or a reduce_scatter of rows",
            hint="use 'pipeline', which slices any communication along a Stream axis, or 'sequential'",
        )

    def with_block_axes(self, wanted: Callable[[RowCollective], bool]) -> RowCollectives:
        """Rewrite the collectives that want block axes, and the matmuls of gathered rows, to tensors that have them."""
        names = Names.of(self.program)
        full: dict[str, Value] = {}  # by what was gathered: the same with block axes
        body: list[Statement] = []
        moves: list[RowCollective] = []
        for s in self.program.body:
            if isinstance(s, RowCollective) and s in self.moves:
                if not wanted(s):
                    moves.append(s)
                    body.append(s)
                    continue
                axes = block_axes(s)
                shard = _like(shard_of(s), axes, names)
                whole = _like(full_of(s), tuple(a.without(s.over) for a in axes), names)
                if isinstance(s, ReduceScatter):
                    moves.append(replace(s, x=whole, out=shard))
                    body += [Reshape(s.x, whole, span=s.span), moves[-1], Reshape(shard, s.out, span=s.span)]
                    continue
                full[s.out.name] = whole
                moves.append(replace(s, x=shard, out=whole))
                body += [Reshape(s.x, shard, span=s.span), moves[-1]]
                body += [Reshape(whole, s.out, span=s.span)] if wanted_otherwise(self.program, s.out) else []
            elif isinstance(s, (Matmul, Linear)) and s.a.name in full and reads_rows(s, s.a):
                a = full[s.a.name]
                out = _like(s.out, (*a.tensor.axes[:-1], s.out.tensor.axes[-1]), names)
                body += [replace(s, a=a, out=out), Reshape(out, s.out, span=s.span)]
            else:
                body.append(s)
        return replace(self, program=self.program.with_body(body), moves=tuple(moves))


def _like(value: Value, axes: tuple[Axis, ...], names: Names) -> Value:
    return Value(names.fresh(f"{value.name}_blocks"), value.tensor.host().with_axes(axes), value.span)


def _of_one_rank(s: Communication) -> bool:
    """Whether a collective has one rank only: there is nothing to overlap, and it needs no reason."""
    return isinstance(s, Collective) and s.mesh.size(s.over) == 1


def _why_whole(s: Communication, program: Program, strategy: str) -> str:
    if not isinstance(s, RowCollective):
        return f"{strategy} handles only allgathers and reduce_scatters of rows"
    columns = by_columns(s)
    if isinstance(s, ReduceScatter):
        return f"it scatters the last axis of {s.x}, which no product alone makes" if columns else ""
    if not users(program, s.out):
        return f"it gathers the last axis of {s.x}, of which every row has a part on each rank" if columns else ""
    if not any(reads_rows(user, s.out) for user in program.body):
        return f"no matmul has {s.out} as its left side"
    if first_matmul(program, s) is None:
        return f"every matmul with {s.out} as its left side needs it for its right side too"
    if columns and strategy == "push":
        return f"it gathers the axis that the matmul sums over, and only copy engines take parts of the rows of {s.out}"
    if columns and row_slices(s) == 1:
        return f"it gathers the axis that the matmul sums over, and the rows of {s.out} are not known to be even"
    return ""


def by_columns(s: RowCollective) -> bool:
    """Whether each rank has a part of the last axis."""
    return shard_of(s).tensor.axis_on(s.over) == len(s.out.tensor.axes) - 1


def row_slices(s: AllGather) -> int:
    """Return the number of slices of rows in which a gather of columns can run; 1 if none is known to divide them."""
    first = s.out.tensor.host().axes[0]
    return 1 if first.marks else next((n for n in SLICES if (first.extent / n).whole), 1)


def users(program: Program, value: Value) -> list[Statement]:
    """Return the statements that read a value."""
    return [s for s in program.body if any(v.name == value.name for v in operands_of(s))]


def reads_rows(s: Statement, rows: Value) -> bool:
    """Whether a matmul reads a tensor as its left side, and nowhere else."""
    reads = [v.name for v in operands_of(s)]
    return isinstance(s, (Matmul, Linear)) and s.a.name == rows.name and reads.count(rows.name) == 1


def first_matmul(program: Program, s: AllGather) -> Statement | None:
    """Return the first matmul that reads the rows as its left side, and nothing else that depends on them."""
    after: set[str] = set()  # computed from the rows
    for user in program.body:
        reads = [v.name for v in operands_of(user)]
        if reads_rows(user, s.out) and after.isdisjoint(reads):
            return user
        if s.out.name in reads or not after.isdisjoint(reads):
            after.add(result_of(user).name)
    return None


def wanted_otherwise(program: Program, rows: Value) -> bool:
    """Whether a tensor is an output, or read by anything but matmuls that have it as their left side."""
    return rows in program.outputs or not all(reads_rows(s, rows) for s in users(program, rows))


def product_of_rows(program: Program, s: ReduceScatter) -> Contraction | None:
    """Return the product whose rows a reduce_scatter sums up, perhaps seen with other axes of rows; else None."""
    maker = maker_of_rows(program, s)
    return maker if isinstance(maker, Contraction) else None


def maker_of_rows(program: Program, s: ReduceScatter) -> Statement | None:
    """Return the statement that makes the rows that a reduce_scatter sums up; None if they are an input."""
    made = {result_of(other).name: other for other in program.body}
    maker = made.get(s.x.name)
    while isinstance(maker, Reshape) and maker.x.tensor.shape[-1] == maker.out.tensor.shape[-1]:
        maker = made.get(maker.x.name)
    return maker


# How the shards lie ---------------------------------------------------------------------------------------------------


def shard_of(s: RowCollective) -> Value:
    """Return the tensor of which each rank has its shard."""
    return s.x if isinstance(s, AllGather) else s.out


def full_of(s: RowCollective) -> Value:
    """Return the tensor that each rank has whole, or a partial sum of all of it."""
    return s.out if isinstance(s, AllGather) else s.x


def shard_place(s: RowCollective) -> SlicePlace:
    """Return where one rank's shard lies in the full tensor."""
    type = shard_of(s).tensor
    k = type.axis_on(s.over)
    assert k is not None
    factors = type.host().axes[k].factors
    at = next(n for n, factor in enumerate(factors) if factor.on == s.over)
    return SlicePlace(k, product([f.extent for f in factors[:at]]), Size(s.mesh.size(s.over)))


def piece_axis(s: RowCollective) -> int:
    """Return the axis in which a rank's rows can be cut: the sharded one, or one inside if a rank has one element."""
    k, shape = shard_place(s).axis, shard_of(s).tensor.local_shape
    return next((j for j in range(k, len(shape) - 1) if not shape[j].is_one), k)


def long_axes(s: RowCollective) -> list[int]:
    """Return the axes outside the sharded one of which a rank has more than one element."""
    k = shard_place(s).axis
    return [j for j, size in enumerate(shard_of(s).tensor.local_shape[:k]) if not size.is_one]


def shard_in_pieces(s: RowCollective) -> bool:
    """Whether a shard is several blocks of one axis."""
    return not shard_place(s).blocks_outside(full_of(s).tensor).is_one


def block_axes(s: RowCollective) -> tuple[Axis, ...]:
    """Return the axes of the shard as `[blocks, ranks, ..., K]`, with the ranks as an axis of their own."""
    axes = isolate(shard_of(s).tensor, s.over)
    at = next(n for n, axis in enumerate(axes) if s.over in axis.marks)
    blocks = Axis(tuple(f for axis in axes[:at] for f in axis.factors)).normal()
    return (blocks, *axes[at:])
