"""Find the collectives of a program that move rows, and the layout of their shards; for `ring`, `fused` and `push`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather, AllReduce, Collective, Communication, ReduceScatter
from hostir.ir.expert_ops import GroupedMatmul
from hostir.ir.op import Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.scaled_ops import ScaledMatmul, Scaling
from hostir.ir.sizes import Size, product
from hostir.ir.tensor_ops import ByBlocks, Contraction, TensorOp
from hostir.ir.types import INTEGERS, Axis
from hostir.ir.view_ops import Reshape
from hostir.lower.allreduces import in_two_steps
from hostir.lower.host import isolate
from hostir.lower.pipeline import with_reasons
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import SlicePlace, operand_places, result_place, why_not

SLICES = (4, 2)  # if columns are gathered: the numbers of slices into which rows may be cut, best first

RowCollective = AllGather | ReduceScatter


@dataclass(frozen=True)
class RowCollectives:
    """The collectives of a program that move rows, and the reasons why other communications do not overlap.

    Matmuls read the rows of an allgather. The rows of a reduce_scatter are sums of products. The property `scales`
    lists the allgathers of scales of gathered rows. Each scaled matmul that reads such scales also reads the rows that
    they belong to.

    Fields:
        moves: the allgathers and reduce_scatters of rows.
        reduces: the allreduces that run in one step, or in chunks.
        regathered: the names of results of allgathers that are the second step of an allreduce.
        reasons: a map from the name of a communication's result to the reason why the communication does not overlap.
    """

    program: Program
    moves: tuple[RowCollective, ...]
    reduces: tuple[AllReduce, ...]
    regathered: frozenset[str]
    reasons: Mapping[str, str]

    @staticmethod
    def of(program: Program, strategy: str, two_steps: Callable[[AllReduce], bool]) -> RowCollectives:
        """Return the row collectives of a program.

        `two_steps` returns True for an allreduce that is to be replaced by a reduce_scatter and an allgather.
        """
        program = _with_reshapes_last(program)
        program, regathered = in_two_steps(program, lambda s: not _left_collective(s) and two_steps(s))
        moves = [s for s in program.body if isinstance(s, Communication) and not _of_one_rank(s)]
        reasons = {
            s.out.name: why
            for s in moves
            if s.out.name not in regathered and (why := _why_not_overlapped(s, program, strategy))
        }
        rows = [s for s in moves if isinstance(s, RowCollective) and s.out.name not in reasons]
        reduces = [s for s in moves if isinstance(s, AllReduce) and s.out.name not in reasons]
        return RowCollectives(program, tuple(rows), tuple(reduces), regathered, reasons)

    @property
    def gathers(self) -> list[AllGather]:
        return [s for s in self.moves if isinstance(s, AllGather)]

    @property
    def scales(self) -> list[AllGather]:
        return [s for s in self.program.body if isinstance(s, AllGather) and s not in self.moves and self._go_along(s)]

    def _go_along(self, s: AllGather) -> bool:
        """Return True if the gathered tensor has readers, and all use it as the scales of gathered rows.

        The tensor may also be an output.
        """
        if not users(self.program, s.out) or _of_one_rank(s):
            return False
        return all(self._scales_of(user, s) is not None for user in users(self.program, s.out))

    def _scales_of(self, user: Statement, s: AllGather) -> AllGather | None:
        """Return the allgather of the rows that `user` multiplies.

        Return None if `s` is not the allgather of the scales of these rows.
        """
        scale = user.scale_of_rows if isinstance(user, ByBlocks) else None
        if not isinstance(user, ByBlocks) or scale is None or scale.name != s.out.name:
            return None
        gather = next((g for g in self.gathers if g.out.name == user.rows.name), None)
        if gather is None or [v.name for v in operands_of(user)].count(s.out.name) != 1:
            return None
        alike = gather.over == s.over and gather.x.tensor.mesh == s.x.tensor.mesh
        same = gather.x.tensor.host().axes[:-1] == s.x.tensor.host().axes[:-1]
        before = _needed_for(self.program, s)
        return gather if alike and same and gather.out.name not in before else None

    def with_scales_first(self) -> RowCollectives:
        """Return the collectives in a new order: the scales of rows are gathered before these rows are gathered."""
        rows = self
        for scale in self.scales:
            body = rows.program.body
            gathers = {g.out.name for user in users(rows.program, scale.out) if (g := rows._scales_of(user, scale))}
            start, end = next(n for n, s in enumerate(body) if result_of(s).name in gathers), body.index(scale)
            if end < start:
                continue
            needed = _needed_for(rows.program, scale) | {scale.out.name}
            early = [s for s in body[start : end + 1] if result_of(s).name in needed]
            late = [s for s in body[start : end + 1] if result_of(s).name not in needed]
            rows = replace(rows, program=rows.program.with_body([*body[:start], *early, *late, *body[end + 1 :]]))
        return rows

    @property
    def scatters(self) -> list[ReduceScatter]:
        return [s for s in self.moves if isinstance(s, ReduceScatter)]

    def ordered(self, program: Program, gathering: Collection[AllReduce] = ()) -> frozenset[tuple[str, str]]:
        """Return the teams that need no barrier between two calls in a row, because their flags order these calls.

        A team is a pair: the name of the mesh, and the name of the mesh axis. `gathering` holds the allreduces that end
        with an allgather.
        """
        teams = {(s.mesh.name, s.over) for s in (*self.moves, *self.reduces)}
        return frozenset(team for team in teams if self._orders_calls(*team, program, gathering))

    def _orders_calls(self, mesh: str, over: str, program: Program, gathering: Collection[AllReduce]) -> bool:
        """Return True if the flags of a team's collectives order two calls in a row.

        Then the calls need no barrier between them. The reason is as follows. In each collective, every rank waits for
        blocks of every other rank. Suppose that the first collective gathers rows, and that the last one sums up a
        product that runs after all gathered rows have been read. A rank that has its sum then knows that the other
        ranks have read the rows of this call. A rank that has the first gathered rows of the next call knows that the
        other ranks have their sums of this call.

        If gathered rows are an output and have no other reader, they count as read at the end of the call. Only after
        that does a rank send its first rows of the next call. In the next call, other ranks overwrite the buffer of the
        output after their first matmul, and this matmul has waited for these first rows.

        The same argument holds if the first collective is a sum and the last one gathers.
        """
        every = {s.out.name for s in (*self.moves, *self.reduces) if (s.mesh.name, s.over) == (mesh, over)}
        body = program.body
        team = [s for s in body if isinstance(s, RowCollective | AllReduce) and s.out.name in every]
        first, last = team[0], team[-1]
        if not isinstance(first, AllGather) and (isinstance(last, AllGather) or last in gathering):
            return True
        maker = product_of_rows(program, last) if isinstance(last, ReduceScatter) else None
        if maker is None or not isinstance(first, AllGather) or first_matmul(program, first) is None:
            return False
        readers = [user for move in team if isinstance(move, AllGather) for user in users(program, move.out)]
        sums = any(isinstance(s, AllReduce) for s in team)
        return not sums and all(body.index(reader) < body.index(maker) for reader in readers)

    def only(self, fits: Callable[[RowCollective], bool], why_not: str) -> RowCollectives:
        """Return only the collectives for which `fits` returns True.

        The others do not overlap, and their reason is `why_not`.
        """
        out = {s.out.name: why_not for s in self.moves if not fits(s)}
        moves = tuple(s for s in self.moves if s.out.name not in out)
        return replace(self, moves=moves, reasons={**self.reasons, **out})

    def noted(self, strategy: str) -> RowCollectives:
        """Return the collectives with a comment in the program on each communication that does not overlap.

        Raise HostIRError if the program has communications and none of them overlaps.
        """
        if self.moves or self.reduces or not self.reasons:
            along = {s.out.name for s in self.scales}
            reasons = {name: why for name, why in self.reasons.items() if name not in along}
            return replace(self, program=with_reasons(self.program, reasons))
        s = next(s for s in self.program.body if result_of(s).name in self.reasons)
        raise s.fail(
            f"'{strategy}' cannot overlap the {s.keyword()}: {self.reasons[result_of(s).name]}",
            expected="an allgather of the rows of a matmul's left side, a reduce_scatter of rows, or an allreduce",
            hint="use 'pipeline', which slices any communication along a Stream axis, or 'sequential'",
        )

    def with_block_axes(self, wanted: Callable[[RowCollective], bool]) -> RowCollectives:
        """Return the collectives with their tensors reshaped to have block axes, `[blocks, ranks, ..., K]`.

        Only the collectives for which `wanted` returns True are changed. Matmuls of their gathered rows get the same
        axes. Further reshapes restore the old axes of results.
        """
        names = Names.of(self.program)
        full: dict[str, Value] = {}  # by the name of gathered rows or scales: the tensor with block axes
        body: list[Statement] = []
        moves: list[RowCollective] = []
        scales = self.scales
        for s in self.program.body:
            if isinstance(s, RowCollective) and (s in self.moves or s in scales):
                if not wanted(s):
                    moves += [s] if s in self.moves else []
                    body.append(s)
                    continue
                axes = block_axes(s)
                shard = _like(shard_of(s), axes, names)
                full_value = _like(full_of(s), tuple(a.without(s.over) for a in axes), names)
                if isinstance(s, ReduceScatter):
                    moves.append(replace(s, x=full_value, out=shard))
                    body += [Reshape(s.x, full_value, span=s.span), moves[-1], Reshape(shard, s.out, span=s.span)]
                    continue
                full[s.out.name] = full_value
                cut = replace(s, x=shard, out=full_value)
                moves += [cut] if s in self.moves else []
                body += [Reshape(s.x, shard, span=s.span), cut]
                readers = users(self.program, s.out)
                if s in scales:
                    otherwise = not all(isinstance(reader, Contraction) for reader in readers)
                else:
                    otherwise = not all(reads_rows(reader, s.out) for reader in readers)
                    otherwise |= s.out in self.program.outputs
                body += [Reshape(full_value, s.out, span=s.span)] if otherwise else []
            elif isinstance(s, Contraction) and s.a.name in full and reads_rows(s, s.a):
                a = full[s.a.name]
                out = _like(s.out, (*a.tensor.axes[:-1], s.out.tensor.axes[-1]), names)
                if isinstance(s, ScaledMatmul) and s.scaling is not Scaling.TENSOR:
                    if s.scale_a.name not in full:
                        axes = (*a.tensor.axes[:-1], s.scale_a.tensor.axes[-1])
                        full[s.scale_a.name] = _like(s.scale_a, axes, names)
                        body.append(Reshape(s.scale_a, full[s.scale_a.name], span=s.span))
                    s = replace(s, scale_a=full[s.scale_a.name])
                body += [replace(s, a=a, out=out), Reshape(out, s.out, span=s.span)]
            else:
                body.append(s)
        return replace(self, program=self.program.with_body(body), moves=tuple(moves))

    def with_products_in_blocks(self) -> RowCollectives:
        """Return the collectives with some products changed, so that the results of these products have block axes.

        A product is changed if its only reader is a reshape to the block axes of a reduce_scatter.
        """
        program, names = self.program, Names.of(self.program)
        makers = {result_of(s).name: s for s in program.body}
        views = {s.x.name: makers.get(s.x.name) for s in self.scatters}
        alone = [v for v in views.values() if isinstance(v, Reshape) and users(program, v.x) == [v]]
        wanted = {v.x.name: v.out for v in alone if v.x.tensor.shape[-1] == v.out.tensor.shape[-1]}
        body: list[Statement] = []
        for s in program.body:
            rows = wanted.get(result_of(s).name)
            if rows is None or not isinstance(s, Contraction) or s.out in program.outputs:
                body.append(s)
                continue
            a = seen_from(s.a, makers)
            if isinstance(makers.get(a.name), AllGather):
                body.append(s)
                continue
            lead = rows.tensor.host().axes[:-1]

            def seen(x: Value, lead: tuple[Axis, ...] = lead) -> Value:
                view = Reshape(x, _like(x, (*lead, x.tensor.host().axes[-1]), names), span=x.span)
                body.append(view)
                return view.out

            moved = replace(s, a=seen(a), out=rows)
            if isinstance(moved, ScaledMatmul) and moved.scaling is not Scaling.TENSOR:
                moved = replace(moved, scale_a=seen(seen_from(moved.scale_a, makers)))
            body.append(moved)
            makers[rows.name] = moved
        return replace(self, program=program.with_body(_without_idle_views(program, body)))


def _with_reshapes_last(program: Program) -> Program:
    """Return the program with reshapes of gathered rows moved behind the matmuls that read them.

    Matmuls then read the rows as they are gathered, so that they can wait for the blocks. A matmul takes rows with any
    number of axes.
    """
    names = Names.of(program)
    makers = {result_of(s).name: s for s in program.body}
    body: list[Statement] = []
    for s in program.body:
        a = seen_from(s.a, makers) if isinstance(s, Contraction) else None
        if a is None or not isinstance(s, Contraction) or not isinstance(makers.get(a.name), AllGather) or a == s.a:
            body.append(s)
            continue
        out = _like(s.out, (*a.tensor.host().axes[:-1], s.out.tensor.host().axes[-1]), names)
        moved = replace(s, a=a, out=out)
        if isinstance(moved, ScaledMatmul) and moved.scaling is not Scaling.TENSOR:
            scale = seen_from(moved.scale_a, makers)
            if scale.tensor.shape[:-1] != a.tensor.shape[:-1]:
                axes = (*a.tensor.host().axes[:-1], moved.scale_a.tensor.host().axes[-1])
                scale = _like(moved.scale_a, axes, names)
                body.append(Reshape(moved.scale_a, scale, span=s.span))
            moved = replace(moved, scale_a=scale)
        body += [moved, Reshape(out, s.out, span=s.span)]
    return program.with_body(_without_idle_views(program, body))


def _without_idle_views(program: Program, body: list[Statement]) -> Iterator[Statement]:
    """Yield the statements of `body` without useless reshapes.

    A reshape is useless if nothing reads its result, or if another statement of `body` now computes this result.
    """
    read = {v.name for s in body for v in operands_of(s)} | {v.name for v in program.outputs}
    computed = {result_of(s).name for s in body if not isinstance(s, Reshape)}
    for s in body:
        if not isinstance(s, Reshape) or (s.out.name in read and s.out.name not in computed):
            yield s


def seen_from(rows: Value, makers: Mapping[str, Statement]) -> Value:
    """Return the tensor that `rows` is a reshape of, directly or through further reshapes.

    Only reshapes that keep the last axis count. Without such a reshape, the result is `rows` itself. `makers` maps the
    name of each tensor to the statement that computes it.
    """
    maker = makers.get(rows.name)
    while isinstance(maker, Reshape) and maker.x.tensor.host().axes[-1] == maker.out.tensor.host().axes[-1]:
        rows = maker.x
        maker = makers.get(rows.name)
    return rows


def _like(value: Value, axes: tuple[Axis, ...], names: Names) -> Value:
    return Value(names.fresh(f"{value.name}_blocks"), value.tensor.host().with_axes(axes), value.span)


def _of_one_rank(s: Communication) -> bool:
    """Return True if a collective has only one rank, so that there is nothing to overlap."""
    return isinstance(s, Collective) and s.mesh.size(s.over) == 1


def _left_collective(s: AllReduce) -> bool:
    """Return True if an allreduce stays a collective.

    It does so if it has a single rank, or if its tensor has no axes.
    """
    return _of_one_rank(s) or not s.x.tensor.axes


def _why_not_overlapped(s: Communication, program: Program, strategy: str) -> str:
    if isinstance(s, AllReduce):
        return f"{s.x} has no axes" if _left_collective(s) else ""
    if not isinstance(s, RowCollective):
        return f"{strategy} handles only allgathers and reduce_scatters of rows, and allreduces"
    columns = by_columns(s)
    if isinstance(s, ReduceScatter):
        return f"it scatters the last axis of {s.x}, which no product alone makes" if columns else ""
    if not users(program, s.out):
        return f"it gathers the last axis of {s.x}, of which every row has a part on each rank" if columns else ""
    if s.x.tensor.dtype.name in INTEGERS:
        return "it gathers indices"
    if not columns and strategy == "ring" and multiplied_in_turn(program, s):
        return ""
    if not any(waits_for_rows(user, s) for user in program.body):
        return f"no matmul has {s.out} as its left side"
    if first_matmul(program, s) is None:
        return f"every matmul with {s.out} as its left side needs it for its right side too"
    if columns and any(isinstance(user, ScaledMatmul) for user in users(program, s.out)):
        return "it gathers the axis that a scaled matmul sums over"
    if columns and strategy == "push":
        return f"it gathers the axis that the matmul sums over, and only copy engines take parts of the rows of {s.out}"
    if columns and shard_in_pieces(s):
        return f"it gathers the axis that the matmul sums over, of which each rank has several parts in {s.x}"
    if columns and row_slices(s) == 1:
        return f"it gathers the axis that the matmul sums over, and the rows of {s.out} are not known to be even"
    return ""


def by_columns(s: RowCollective) -> bool:
    """Return True if a collective gathers or scatters the last axis. It then moves columns, not rows."""
    return shard_of(s).tensor.axis_on(s.over) == len(s.out.tensor.axes) - 1


def row_slices(s: AllGather) -> int:
    """Return the number of slices into which a gather of columns cuts the rows.

    It is 1 if no number in SLICES divides the rows.
    """
    first = s.out.tensor.host().axes[0]
    return 1 if first.marks else next((n for n in SLICES if (first.extent / n).is_integer), 1)


def users(program: Program, value: Value) -> list[Statement]:
    """Return the statements that read or view a value."""
    return [s for s in program.body if any(v.name == value.name for v in operands_of(s))]


def _needed_for(program: Program, s: Statement) -> set[str]:
    """Return the names of all values that a statement depends on."""
    needed = {v.name for v in operands_of(s)}
    for other in reversed(program.body):
        needed |= {v.name for v in operands_of(other)} if result_of(other).name in needed else set()
    return needed


def reads_rows(s: Statement, rows: Value) -> bool:
    """Return True if a matmul reads a tensor as its left operand, and as no other operand."""
    reads = [v.name for v in operands_of(s)]
    return isinstance(s, Contraction) and s.a.name == rows.name and reads.count(rows.name) == 1


def waits_for_rows(s: Statement, gather: AllGather) -> bool:
    """Return True if a product can wait for gathered rows, which are its left operand and no other operand.

    A grouped matmul waits for complete sources, so the gathered axis must be one of them.
    """
    rows = gather.out
    if isinstance(s, GroupedMatmul):
        sources = len(rows.tensor.axes) - 2
        return s.x.name == rows.name != s.w.name and shard_place(gather).axis < sources
    return reads_rows(s, rows)


def multiplied_in_turn(program: Program, s: AllGather) -> bool:
    """Return True if a product can be computed shard by shard from gathered rows, or from what is computed from them.

    The rows, or what is computed from them, are the left side of the product.
    """
    places = {s.out.name: shard_place(s)}
    for user in program.body:
        source = next((v for v in operands_of(user) if v.name in places), None)
        if source is None or not isinstance(user, TensorOp):
            continue
        place = result_place(user, source, places[source.name])
        if place is None or why_not(user, place, operand_places(user, place)):
            continue
        if user.contracts and source == user.operands[0]:
            return True
        places[user.out.name] = place
    return False


def first_matmul(program: Program, s: AllGather) -> Statement | None:
    """Return the first matmul that reads gathered rows as its left operand, and no other operand computed from them.

    Return None if there is no such matmul.
    """
    after: set[str] = set()  # computed from the rows
    for user in program.body:
        reads = [v.name for v in operands_of(user)]
        if waits_for_rows(user, s) and after.isdisjoint(reads):
            return user
        if s.out.name in reads or not after.isdisjoint(reads):
            after.add(result_of(user).name)
    return None


def wanted_otherwise(program: Program, gather: AllGather) -> bool:
    """Return True if gathered rows are an output, or are read by a statement that is not a product of these rows."""
    rows = gather.out
    return rows in program.outputs or not all(waits_for_rows(s, gather) for s in users(program, rows))


def product_of_rows(program: Program, s: ReduceScatter | AllReduce) -> Contraction | None:
    """Return the product that computes the rows that a collective sums up; None if no product computes them.

    Reshapes of rows may come between the product and the collective.
    """
    maker = maker_of_rows(program, s)
    return maker if isinstance(maker, Contraction) else None


def maker_of_rows(program: Program, s: ReduceScatter | AllReduce) -> Statement | None:
    """Return the statement that computes the rows that a collective sums up; None if the rows are an input.

    Reshapes of rows may come between this statement and the collective.
    """
    makers = {result_of(other).name: other for other in program.body}
    maker = makers.get(s.x.name)
    while isinstance(maker, Reshape) and maker.x.tensor.shape[-1] == maker.out.tensor.shape[-1]:
        maker = makers.get(maker.x.name)
    return maker


def shard_of(s: RowCollective) -> Value:
    """Return the operand or the result of a collective: the one that is sharded over its ranks."""
    return s.x if isinstance(s, AllGather) else s.out


def full_of(s: RowCollective) -> Value:
    """Return the operand or the result of a collective: the one that is not sharded over its ranks.

    This is the gathered tensor, or the partial sum.
    """
    return s.out if isinstance(s, AllGather) else s.x


def shard_place(s: RowCollective) -> SlicePlace:
    """Return the place of the shards in the full tensor: one slice for each rank."""
    type = shard_of(s).tensor
    k = type.axis_on(s.over)
    assert k is not None
    factors = type.host().axes[k].factors
    at = next(n for n, factor in enumerate(factors) if factor.on == s.over)
    return SlicePlace(k, product([f.extent for f in factors[:at]]), Size(s.mesh.size(s.over)))


def piece_axis(s: RowCollective) -> int:
    """Return the axis along which a rank's rows can be cut into pieces.

    The search begins at the sharded axis, and leaves out the last axis. The result is the first axis with more than one
    element on a rank. If there is no such axis, it is the sharded axis.
    """
    k, shape = shard_place(s).axis, shard_of(s).tensor.local_shape
    return next((j for j in range(k, len(shape) - 1) if not shape[j].is_one), k)


def long_axes(s: RowCollective) -> list[int]:
    """Return the positions of the axes outside the sharded axis that have more than one element on a rank."""
    k = shard_place(s).axis
    return [j for j, size in enumerate(shard_of(s).tensor.local_shape[:k]) if not size.is_one]


def shard_in_pieces(s: RowCollective) -> bool:
    """Return True if a rank's shard is several separate blocks of the sharded axis."""
    return not shard_place(s).blocks_outside(full_of(s).tensor).is_one


def block_axes(s: RowCollective) -> tuple[Axis, ...]:
    """Return the axes of the sharded tensor as `[blocks, ranks, ..., K]`, with the ranks as a separate axis."""
    axes = isolate(shard_of(s).tensor, s.over)
    at = next(n for n, axis in enumerate(axes) if s.over in axis.marks)
    blocks = Axis(tuple(f for axis in axes[:at] for f in axis.factors)).normal()
    return (blocks, *axes[at:])
