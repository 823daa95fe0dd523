"""Find the collectives in two levels that move rows, and the turns in which they run; for `hierarchical`.

A turn handles the rows that the ranks of one host have in one slice. The rows of an axis are seen as
`[hosts, ranks of a host, slices, rows]`. If a rank's rows lie in separate pieces, as `[pieces, hosts, ranks of a host,
rows]`, each piece is a slice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hostir.ir.comm_ops import AllGather, AllReduce, Communication, ReduceScatter
from hostir.ir.op import Statement, Value
from hostir.ir.program import Program
from hostir.ir.sharding import is_multiple
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.tensor_ops import Binary, Contraction, Linear, Matmul, RmsNorm, Sum, Unary
from hostir.ir.types import Axis, TensorType
from hostir.lower.allreduces import AllReduceSteps, fits_chunks
from hostir.lower.fused import product_in_chunks
from hostir.lower.levels import is_between_hosts, is_inside_host
from hostir.lower.pipeline import with_reasons
from hostir.lower.propagate import operands_of, result_of, users_of
from hostir.lower.rows import RowCollective
from hostir.lower.slices import SlicedGroup, SlicePlace, operand_places, result_place, why_not

MAX_PIECES = 16  # each piece of a rank's rows is a slice
IN_TURNS = Matmul | Linear | Binary | Unary | RmsNorm  # the computations that run turn by turn, except sums


@dataclass(frozen=True)
class Places:
    """The places of hosts, of the ranks of a host, and of slices in one tensor.

    `ranks` is None if a host has one rank of each team.
    """

    hosts: SlicePlace
    ranks: SlicePlace | None
    slices: SlicePlace

    @property
    def all(self) -> tuple[SlicePlace, ...]:
        return (self.hosts, self.slices) if self.ranks is None else (self.hosts, self.ranks, self.slices)

    @staticmethod
    def of(places: Collection[SlicePlace]) -> Places:
        """Return the places from the order of `all`."""
        hosts, *ranks, slices = places
        return Places(hosts, ranks[0] if ranks else None, slices)

    def split(self, type: TensorType) -> SplitAxes:
        """Return the axes of a tensor with the three places as separate axes.

        What is left of an axis of rows is left out if its extent is 1, unless a turn would have no axis of rows.
        """
        axes, at = list[Axis](), dict[SlicePlace, int]()
        for k, axis in enumerate(type.host().axes):
            done = ONE
            places = sorted((place for place in self.all if place.axis == k), key=lambda place: place.outer.value or 0)
            for place in places:
                if place.outer != done:
                    axes.append(Axis.of(place.outer / done))
                at[place] = len(axes)
                axes.append(Axis.of(place.count))
                done = place.outer * place.count
            rest = axis.extent / done
            if not places:
                axes.append(axis)
            elif not rest.is_one or (self.ranks is None and k == self.hosts.axis):
                axes.append(Axis.of(rest))
        return SplitAxes(tuple(axes), at[self.hosts], None if self.ranks is None else at[self.ranks], at[self.slices])


@dataclass(frozen=True)
class SplitAxes:
    """The axes of a tensor if hosts, ranks of a host and slices are separate axes, and the positions of these axes."""

    axes: tuple[Axis, ...]
    hosts: int
    ranks: int | None
    slices: int

    @property
    def order(self) -> tuple[int, ...]:
        """The positions of the axes in another order: hosts, ranks of a host, slices, and then the other axes."""
        levels = [k for k in (self.hosts, self.ranks, self.slices) if k is not None]
        return (*levels, *(k for k in range(len(self.axes)) if k not in levels))

    @property
    def ranks_in_turn(self) -> int | None:
        """The position of the ranks of a host in the axes without hosts and slices."""
        return None if self.ranks is None else self.ranks - sum(k < self.ranks for k in (self.hosts, self.slices))


@dataclass(frozen=True)
class Pair:
    """A collective of rows in two levels.

    Fields:
        between: the collective between hosts.
        inside: the collective inside each host; None if a host has one rank of each team.
        places: the places of hosts, ranks and slices in the unsharded rows.
    """

    between: RowCollective
    inside: RowCollective | None
    places: Places

    @property
    def gathers(self) -> bool:
        return isinstance(self.between, AllGather)

    @property
    def statements(self) -> tuple[RowCollective, ...]:
        """The collectives in the order of the program."""
        if self.inside is None:
            return (self.between,)
        return (self.between, self.inside) if self.gathers else (self.inside, self.between)

    @property
    def x(self) -> Value:
        return self.statements[0].x

    @property
    def out(self) -> Value:
        return self.statements[-1].out

    @property
    def rows(self) -> Value:
        """The rows of all ranks: the gathered tensor, or the partial sum."""
        return self.out if self.gathers else self.x

    @property
    def split(self) -> SplitAxes:
        return self.places.split(self.rows.tensor)

    @property
    def levels(self) -> tuple[Axis, ...]:
        """The axes of the rows in the order of `SplitAxes.order`, unsharded."""
        return tuple(self.split.axes[k] for k in self.split.order)

    def sharded(self, axes: Sequence[Axis], *, hosts: bool) -> tuple[Axis, ...]:
        """Return axes in the order of `levels`, with the ranks of a host sharded.

        With `hosts`, the axes begin with the hosts, which are sharded, too. Otherwise they begin with the ranks.
        """
        overs = [self.between.over] if hosts else []
        overs += [] if self.inside is None else [self.inside.over]
        return tuple(Axis.of(axis.extent, over) for axis, over in zip(axes, overs, strict=False)) + tuple(
            axes[len(overs) :]
        )


@dataclass
class TurnGroup(SlicedGroup):
    """Computations that run turn by turn, with the collectives that bring their rows and take their sums.

    Fields:
        gather: the all-gather of the rows, if any.
        scatters: the reduce-scatters of the sums.
        levels: the places of hosts, ranks and slices in each tensor, by name.
    """

    gather: Pair | None = None
    scatters: list[Pair] = field(default_factory=list)
    levels: dict[str, Places] = field(default_factory=dict)

    def put(self, s: Statement, levels: Mapping[str, Places], *, first: bool = False) -> None:
        """Add a statement, with the places in its tensors."""
        self.statements.insert(0 if first else len(self.statements), s)
        self.levels |= levels
        self.places |= {name: places.hosts for name, places in levels.items()}

    def put_scatter(self, pair: Pair) -> None:
        """Add a reduce-scatter."""
        self.scatters.append(pair)
        for s in pair.statements:
            self.put(s, {pair.rows.name: pair.places})

    @property
    def pairs(self) -> list[Pair]:
        return [*([self.gather] if self.gather else []), *self.scatters]


@dataclass
class Reduced(SlicedGroup):
    """An all-reduce in three steps that runs in chunks, with the product of its rows if it runs in chunks as well.

    Fields:
        reduce: the all-reduce over the ranks of a host, with the result of all three steps.
        hosts: the mesh axis of the all-reduce between hosts.
        chunks: the number of chunks.
        product: the product that makes the rows, if it runs in chunks; else None.
    """

    reduce: AllReduce = field(kw_only=True)
    hosts: str = field(kw_only=True)
    chunks: int = field(kw_only=True)
    product: Contraction | None = field(kw_only=True)


@dataclass(frozen=True)
class Moves:
    """The collectives of a program in two levels, and the reasons why other communications do not overlap.

    Fields:
        pairs: the all-gathers and reduce-scatters of rows.
        sums: the all-reduces.
        reasons: for the name of the result of another communication, the reason why it does not overlap.
    """

    program: Program
    pairs: tuple[Pair, ...]
    sums: tuple[Reduced, ...]
    reasons: Mapping[str, str]

    @staticmethod
    def of(program: Program, slices: int) -> Moves:
        """Return the collectives of a program in two levels, cut in at most `slices` slices."""
        users, outputs = users_of(program), {v.name for v in program.outputs}
        pairs, sums, taken, reasons = list[Pair](), list[Reduced](), set[str](), dict[str, str]()

        def only_user(s: Communication) -> Statement | None:
            using = users.get(s.out.name, [])
            return using[0] if len(using) == 1 and s.out.name not in outputs else None

        for s in program.body:
            if not isinstance(s, Communication) or s.out.name in taken:
                continue
            chain = [s, only_user(s)]
            if isinstance(chain[1], Communication):
                chain.append(only_user(chain[1]))
            if (found := _all_reduce(chain, program, slices)) is not None:
                sums.append(found)
                taken |= {each.out.name for each in chain if isinstance(each, Communication)}
                continue
            pair = _pair(s, chain[1], program, slices)
            if isinstance(pair, Pair):
                pairs.append(pair)
                taken |= {each.out.name for each in pair.statements}
            else:
                reasons[s.out.name] = pair
        return Moves(program, tuple(pairs), tuple(sums), reasons)

    def noted(self, strategy: str) -> Program:
        """Return the program with a comment on each communication that does not overlap.

        Raise HostIRError if the program has communications and none of them overlaps.
        """
        if self.pairs or self.sums or not self.reasons:
            return with_reasons(self.program, self.reasons)
        s = next(s for s in self.program.body if result_of(s).name in self.reasons)
        raise s.fail(
            f"'{strategy}' cannot overlap the {s.keyword()}: {self.reasons[result_of(s).name]}",
            expected="an allgather or a reduce_scatter of rows, or an allreduce, over ranks of several hosts",
            hint="use 'pipeline', which slices any communication along a Stream axis, or 'sequential'",
        )

    def groups(self) -> list[TurnGroup]:
        """Return a group for each all-gather and reduce-scatter, with the computations that run turn by turn.

        A reduce-scatter joins the group of an all-gather that computes its rows in the same turns.
        """
        after = self._after()
        groups: list[TurnGroup] = []
        taken: set[str] = set()
        for pair in self.pairs:
            if pair.gathers:
                groups.append(self._from(pair, after, taken))
                taken |= {result_of(s).name for s in groups[-1].statements}
        for pair in self.pairs:
            if pair.gathers:
                continue
            fits = [
                g for g in groups if g.levels.get(pair.rows.name) == pair.places and g.gather and _alike(g.gather, pair)
            ]
            if fits:
                fits[0].put_scatter(pair)
            else:
                groups.append(self._for(pair, taken))
                taken |= {result_of(s).name for s in groups[-1].statements}
        return groups

    def _after(self) -> dict[str, int]:
        """Return, for the name of each value, the index of the last all-gather that it depends on, or -1."""
        number = {pair.out.name: n for n, pair in enumerate(p for p in self.pairs if p.gathers)}
        after: dict[str, int] = {}
        for s in self.program.body:
            reads = (after.get(v.name, -1) for v in operands_of(s))
            after[result_of(s).name] = max([number.get(result_of(s).name, -1), *reads])
        return after

    def _from(self, pair: Pair, after: Mapping[str, int], taken: Collection[str]) -> TurnGroup:
        """Return the group of an all-gather, with the computations that can run turn by turn on its rows.

        `taken` has the results of statements of other groups.
        """
        group = TurnGroup(gather=pair)
        for move in pair.statements:
            group.put(move, {pair.out.name: pair.places})
        inside, late = {pair.out.name}, {n for n, latest in after.items() if latest >= after[pair.out.name]}
        for s in self.program.body:
            source = next((v for v in operands_of(s) if v.name in inside), None)
            if source is None or not _runs_in_turns(s) or result_of(s).name in taken:
                continue
            levels = _levels_from(s, source, group.levels[source.name])
            unsliced = any(v.name in inside and v.name not in levels for v in operands_of(s))
            waits = any(v.name in late - inside for v in operands_of(s))
            if levels and not unsliced and not waits and _fits(group, levels):
                group.put(s, levels)
                inside.add(result_of(s).name)
        return group

    def _for(self, pair: Pair, taken: Collection[str]) -> TurnGroup:
        """Return the group of a reduce-scatter, with the computations that can make its rows turn by turn."""
        group, overs = TurnGroup(levels={pair.rows.name: pair.places}), {s.over for s in pair.statements}
        for s in reversed(self.program.body):
            name = result_of(s).name
            if name not in group.levels or name in taken or not _runs_in_turns(s):
                continue
            levels = _levels_of(s, group.levels[name])
            if overs <= {*result_of(s).tensor.partial} and levels and _fits(group, levels):
                group.put(s, levels, first=True)
        group.put_scatter(pair)
        return group


def _runs_in_turns(s: Statement) -> bool:
    return isinstance(s, IN_TURNS) and not isinstance(s, Sum)


def _alike(one: Pair, other: Pair) -> bool:
    """Return True if two collectives are over the same ranks on both levels."""
    overs = [(pair.between.mesh, pair.between.over, pair.inside and pair.inside.over) for pair in (one, other)]
    return overs[0] == overs[1]


def _fits(group: TurnGroup, levels: Mapping[str, Places]) -> bool:
    """Return True if the group has no other places in these tensors."""
    return all(group.levels.get(name, places) == places for name, places in levels.items())


def _levels_from(s: Statement, operand: Value, places: Places) -> dict[str, Places]:
    """Return the places in the tensors of a computation, given those in an operand; empty if it has no turns."""
    results = [result_place(s, operand, place) for place in places.all]
    if any(place is None for place in results):
        return {}
    return _levels_of(s, Places.of([place for place in results if place is not None]))


def _levels_of(s: Statement, places: Places) -> dict[str, Places]:
    """Return the places in the tensors of a computation, given those in its result; empty if it has no turns."""
    operands = [operand_places(s, place) for place in places.all]
    sliced = {name for each in operands for name in each}
    if any(each.keys() != sliced for each in operands) or not sliced:
        return {}
    if any(why_not(s, place, each) for place, each in zip(places.all, operands, strict=True)):
        return {}
    return {name: Places.of([each[name] for each in operands]) for name in sliced} | {result_of(s).name: places}


def _pair(s: Communication, user: Statement | None, program: Program, slices: int) -> Pair | str:
    """Return the pair that begins with a communication, or the reason why it does not overlap."""
    if not isinstance(s, RowCollective | AllReduce):
        return "only allgathers, reduce_scatters and allreduces have two levels"
    if isinstance(s, AllReduce):
        return "an allreduce overlaps only if its teams have several ranks on each host, and these divide its rows"
    between: RowCollective = s
    inside: RowCollective | None = None
    if isinstance(s, AllGather) and isinstance(user, AllGather) and is_inside_host(user, program):
        inside = user
    elif isinstance(s, ReduceScatter) and isinstance(user, ReduceScatter) and is_inside_host(s, program):
        between, inside = user, s
    if not is_between_hosts(between, program):
        return "its ranks share a host, and no collective between hosts belongs to it"
    places = _places(between, inside, slices)
    return places if isinstance(places, str) else Pair(between, inside, places)


def _places(between: RowCollective, inside: RowCollective | None, slices: int) -> Places | str:
    """Return the places of hosts, ranks and slices in the unsharded rows, or the reason why there are none."""
    gathers = isinstance(between, AllGather)
    shard = between.x.tensor.host() if gathers else between.out.tensor.host()
    last = inside or between
    full = last.out.tensor.host() if gathers else last.x.tensor.host()
    hosts = _place(shard, between.over, between.mesh.size(between.over))
    ranks = None if inside is None else _place(shard, inside.over, inside.mesh.size(inside.over))
    inner = ranks or hosts
    if inner.axis == len(full.axes) - 1:
        return "it moves the last axis, of which every row has a part on each rank"
    if any(full.axes[k].marks for k in {hosts.axis, inner.axis}):
        return f"the rows are also sharded over {', '.join(full.axes[hosts.axis].marks or full.axes[inner.axis].marks)}"
    if ranks is not None and not _follows(full, hosts, ranks):
        return "the ranks of a host have no rows side by side"
    cut = _slices(full, hosts, inner, slices)
    return cut if isinstance(cut, str) else Places(hosts, ranks, cut)


def _place(shard: TensorType, mark: str, count: int) -> SlicePlace:
    """Return the place of the ranks along a mesh axis in a sharded tensor."""
    k = shard.axis_on(mark)
    assert k is not None
    factors = shard.axes[k].factors
    at = next(n for n, factor in enumerate(factors) if factor.on == mark)
    return SlicePlace(k, product([factor.extent for factor in factors[:at]]), Size(count))


def _follows(full: TensorType, hosts: SlicePlace, ranks: SlicePlace) -> bool:
    """Return True if the ranks of a host come directly inside the hosts: no other rows lie between them."""
    if hosts.axis == ranks.axis:
        return ranks.outer == hosts.outer * hosts.count
    ends = full.axes[hosts.axis].extent == hosts.outer * hosts.count
    between = all(size.is_one for size in full.shape[hosts.axis + 1 : ranks.axis])
    return ends and between and ranks.outer.is_one and hosts.axis < ranks.axis


def _slices(full: TensorType, hosts: SlicePlace, inner: SlicePlace, most: int) -> SlicePlace | str:
    """Return the place of at most `most` slices in the rows, or the reason why there is none.

    `inner` is the place of the ranks of a host, or of the hosts if a host has one rank. If rows lie outside the hosts,
    a rank's rows lie in pieces, and each piece is a slice. Otherwise slices cut the first axis of a rank's rows.
    """
    outside = [(k, size) for k, size in enumerate(full.local_shape[: hosts.axis]) if not size.is_one]
    outside += [] if hosts.outer.is_one else [(hosts.axis, hosts.outer)]
    if outside:
        (k, pieces), *others = outside
        if others or pieces.value is None or pieces.value > MAX_PIECES or (k != hosts.axis and full.axes[k].marks):
            return "a rank's rows lie in too many pieces"
        return SlicePlace(k, ONE, pieces)
    rest = full.axes[inner.axis].extent / (inner.outer * inner.count)
    last = len(full.axes) - 1
    inside = [(k, size) for k, size in enumerate(full.local_shape) if inner.axis < k < last and not size.is_one]
    if not rest.is_one or not inside:
        return SlicePlace(inner.axis, inner.outer * inner.count, _count(rest, most))
    k, size = inside[0]
    return SlicePlace(k, ONE, Size(1) if full.axes[k].marks else _count(size, most))


def _count(rows: Size, most: int) -> Size:
    """Return the largest number of slices up to `most` that divides the rows; at most 2 if their number is unknown."""
    most = most if rows.value is not None else min(most, 2)
    return Size(next(n for n in range(most, 0, -1) if is_multiple(rows, Size(n))))


def _all_reduce(chain: list[Statement | None], program: Program, chunks: int) -> Reduced | None:
    """Return the all-reduce in chunks that consists of three collectives in a row; None if it does not fit."""
    if len(chain) < 3:
        return None
    scatter, reduce, gather = chain
    if not isinstance(scatter, ReduceScatter) or not isinstance(reduce, AllReduce) or not isinstance(gather, AllGather):
        return None
    if not is_inside_host(scatter, program) or not is_between_hosts(reduce, program) or gather.over != scatter.over:
        return None
    whole = AllReduce(scatter.x, gather.out, over=scatter.over, span=scatter.span)
    if not fits_chunks(whole):
        return None
    count = AllReduceSteps(chunks=chunks, min_rows=1, min_bytes=1).chunks_of(whole)
    product = product_in_chunks(whole, program, count)
    statements: list[Statement] = [*([product] if product else []), scatter, reduce, gather]
    return Reduced(statements, reduce=whole, hosts=reduce.over, chunks=count, product=product)
