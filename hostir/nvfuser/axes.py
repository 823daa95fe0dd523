"""Find the axes and types of a dump: the logical axes that printed IterDomains form, and their sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from itertools import product as product_of

from hostir.ir import tensor_ops as ops
from hostir.ir.host_ops import Chunk, For
from hostir.ir.op import Phase, Statement, Value
from hostir.ir.program import Program, rewrite
from hostir.ir.sharding import CONTRACTED
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.source import Span, error
from hostir.ir.tensor_ops import Binary, TensorOp
from hostir.ir.types import STREAM, Axis, Factor, Mesh, TensorType
from hostir.ir.view_ops import ViewStatement
from hostir.nvfuser.parse import (
    CommunicationNode,
    ComputeNode,
    Devices,
    Dump,
    IterDomain,
    LoopNode,
    Node,
    TensorNode,
    ViewNode,
)

# From printed axes to logical ones ------------------------------------------------------------------------------------
# From printed axes of an nvFuser dump to ours: which IterDomains make one logical axis, and which sizes are equal.


@dataclass(frozen=True)
class LogicalAxis:
    """A logical axis: one IterDomain, or the IterDomains that it was split into, outermost first."""

    domains: tuple[IterDomain, ...]

    @property
    def first(self) -> IterDomain:
        """The outermost IterDomain."""
        return self.domains[0]

    @cached_property
    def extent(self) -> Size:
        """The extent of the logical axis."""
        return product(d.extent.size for d in self.domains)

    @property
    def reduced(self) -> bool:
        """True if the axis was summed away."""
        return self.first.kind == "r"

    @property
    def device(self) -> str:
        """x or y if the unsplit axis is a device axis, else empty."""
        return self.first.on if len(self.domains) == 1 and self.first.on in ("x", "y") else ""


def readings(tensor: TensorNode, alone: Collection[str] = (), *, split: bool = False) -> list[tuple[LogicalAxis, ...]]:
    """Return the ways to read the printed axes of a tensor as logical axes, the likeliest first.

    nvFuser prints the axes of the loop domain. An axis of extent ceilDiv(N, D) is the inner part of a split of N. Its
    outer part is an axis of extent D to the left: directly beside it; or anywhere, if it is on devices or streams,
    which nvFuser moves to the front. If N is a number, nvFuser prints the quotient. Then an axis on devices or streams
    may be the outer part of any axis of known extent to the right, or a separate axis. Results of an rfactor or a
    reshape (marked `rf`) are not split.

    Args:
        tensor: the tensor as printed.
        alone: x or y if such an axis is not part of a split because it holds the parts of a partial sum.
        split: whether a device axis is more likely part of a split than a separate axis.
    """
    domains = tensor.domains
    parallel = [(d.kind, d.on) for d in domains if d.on]
    if len(set(parallel)) < len(parallel):
        return [tuple(LogicalAxis((d,)) for d in domains)]  # no valid layout: reported when its type is needed
    outer = {k for k, d in enumerate(domains) if not d.rfactor and (d.kind == "r" or d.on not in alone)}
    splits = list(islice(_splits(domains, outer, 0, ()), _MAX_SPLITS))
    splits.sort(key=lambda parts: _unlikelihood(domains, parts, split))
    missing = _missing(domains, splits[0])
    likely = [parts for parts in splits if _missing(domains, parts) == missing][:_MAX_READINGS]
    return [_grouped(domains, parts) for parts in likely]


_MAX_SPLITS = 512  # the most readings tried for one tensor; real tensors have a few
_MAX_READINGS = 48
Split = tuple[tuple[int, ...], ...]  # for each printed axis, the places of its outer parts, outermost first


def _splits(domains: Sequence[IterDomain], outer: Collection[int], place: int, split: Split) -> Iterator[Split]:
    """Yield every assignment of outer parts, taken from `outer`, to the axes from `place` on."""
    if place == len(domains):
        yield split
        return
    taken = {k for outers in split for k in outers}
    free = [k for k, outers in enumerate(split) if k in outer and k not in taken and not outers]
    for outers in _outer_parts(domains, place, free):
        yield from _splits(domains, outer, place + 1, (*split, outers))


def _outer_parts(domains: Sequence[IterDomain], place: int, free: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield the outer parts that an axis may have among the free axes to its left; no outer parts come last."""
    inner = domains[place]
    same = [k for k in free if domains[k].kind == inner.kind]
    if inner.extent.splits and not inner.rfactor:
        yield from _chains(domains, inner.extent.splits, place, same)
    elif not inner.on and not inner.rfactor and inner.extent.size.value is not None:
        folded = [k for k in same if domains[k].on and domains[k].extent.size.value is not None]
        for count in range(len(folded), 0, -1):
            yield from combinations(sorted(folded, key=lambda k: domains[k].number), count)
    yield ()


def _chains(
    domains: Sequence[IterDomain], extents: Sequence[Size], right: int, free: Collection[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the free axes with these extents left of `right`: adjacent ones, or those on devices or streams."""
    if not extents:
        yield ()
        return
    for k in free:
        if domains[k].extent.size == extents[-1] and (domains[k].on or k == right - 1):
            for outers in _chains(domains, extents[:-1], k, [other for other in free if other != k]):
                yield (*outers, k)


def _missing(domains: Sequence[IterDomain], split: Split) -> int:
    """Return the number of splits whose outer parts are missing, for example because one index of them was selected."""
    return sum(bool(d.extent.splits) and not outers for d, outers in zip(domains, split, strict=True))


def _unlikelihood(domains: Sequence[IterDomain], split: Split, split_devices: bool) -> tuple[int, ...]:
    """Return a sort key: the evidence against a reading, the strongest first.

    nvFuser gives the two parts of a split consecutive numbers, higher than those of all earlier axes.
    """
    numbers = [d.number for d in domains]
    inner_of = {outer: inner for inner, outers in enumerate(split) for outer in outers}
    against = 0
    if numbers != sorted(numbers):
        for k, domain in enumerate(domains):
            if domain.on and domain.number + 1 in numbers[k + 1 :]:
                against += inner_of.get(k) != numbers.index(domain.number + 1)
    order = [domains[outer].number for outers in split for outer in outers]
    return (
        _missing(domains, split),
        against,
        sum((split_devices or d.on == "stream") != (k in inner_of) for k, d in enumerate(domains) if d.on),
        sum(a > b for a, b in combinations(order, 2)),
        sum(inner - outer for outer, inner in inner_of.items()),
    )


def _grouped(domains: Sequence[IterDomain], split: Split) -> tuple[LogicalAxis, ...]:
    taken = {outer for outers in split for outer in outers}
    return tuple(
        LogicalAxis((*(domains[k] for k in outers), domains[place]))
        for place, outers in enumerate(split)
        if place not in taken
    )


class EqualSizes:
    """A union-find over products of symbols: sizes that a dump forces to be equal under different names."""

    def __init__(self, symbols: Iterable[str]) -> None:
        self.order = {name: k for k, name in enumerate(symbols)}
        self.known: dict[str, Size] = {}  # the size that a symbol equals, in canonical symbols

    def resolve(self, size: Size) -> Size:
        result = Size(size.num, size.den)
        for name, power in size.symbols:
            meaning = self.known.get(name, Size(symbols=((name, 1),)))
            for _ in range(abs(power)):
                result = result * meaning if power > 0 else result / meaning
        return result

    def equal(self, a: Size, b: Size) -> bool:
        """Make two sizes equal by defining the symbol that appeared last; return False if they cannot be equal."""
        ratio = self.resolve(a) / self.resolve(b)
        free = [(self.order[name], name, power) for name, power in ratio.symbols if abs(power) == 1]
        if not ratio.symbols:
            return ratio.is_one
        if not free:
            return True
        _, name, power = max(free)
        symbol = Size(symbols=((name, 1),))
        meaning = symbol / ratio if power == 1 else symbol * ratio
        if not meaning.symbols and meaning.den != 1:
            return False
        self.known[name] = meaning
        self.known = {n: self.resolve(m) for n, m in self.known.items()}
        return True

    def canonical(self, type: TensorType) -> TensorType:
        """Return the type in canonical symbols, its axes in normal form."""
        return replace(type, axes=tuple(self._axis(axis) for axis in type.axes))

    def _axis(self, axis: Axis) -> Axis:
        return Axis(tuple(Factor(self.resolve(f.extent), f.on) for f in axis.factors)).normal()

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Return each symbol that equals another size, with that size, in the order in which they first appear."""
        return tuple((name, str(self.known[name])) for name in self.order if name in self.known)


# Sizes that must be equal ---------------------------------------------------------------------------------------------
# The sizes that statements force to be equal, and the program in which equal sizes have one name.

SizeUse = tuple[Size, object, int]  # a size, the tensor that has it, and in which axis


def equate(sizes: EqualSizes, pairs: Iterable[tuple[SizeUse, SizeUse]], span: Span | None) -> None:
    """Make the sizes of each pair equal; raise if they cannot be equal."""
    for (a, a_name, a_axis), (b, b_name, b_axis) in pairs:
        if not sizes.equal(a, b):
            a, b = sizes.resolve(a), sizes.resolve(b)
            message = f"sizes do not fit: {a_name} has {a} in axis {a_axis}, {b_name} has {b} in axis {b_axis}"
            raise error(message, span, expected="equal sizes")


def pairwise(a: TensorType, a_name: object, b: TensorType, b_name: object) -> Iterator[tuple[SizeUse, SizeUse]]:
    """Yield the axes of two tensors of one shape in pairs.

    No pairs if their numbers of axes differ, which other checks report.
    """
    if len(a.axes) == len(b.axes):
        for k, (one, other) in enumerate(zip(a.shape, b.shape, strict=True)):
            yield (one, a_name, k), (other, b_name, k)


def computed(s: TensorOp) -> Iterator[tuple[SizeUse, SizeUse]]:
    """Yield the pairs of axes whose sizes a computation forces to be equal: the pairs matched by its maps."""
    shape = s.out.tensor.shape
    contracted: list[SizeUse] = []
    for operand, map in zip(s.operands, maps_of(s), strict=True):
        if len(map) != len(operand.tensor.axes) or max(map, default=0) >= len(shape):
            continue
        for k, (size, to) in enumerate(zip(operand.tensor.shape, map, strict=True)):
            if to == CONTRACTED:
                contracted.append((size, operand, k))
            elif not (isinstance(s, Binary) and size.is_one):
                yield (size, operand, k), (shape[to], s.out, to)
    for place in contracted[1:]:
        yield contracted[0], place


def maps_of(s: TensorOp) -> tuple[tuple[int, ...], ...]:
    """Return the maps of a computation while equal sizes may still have several names."""
    if not isinstance(s, Binary):
        return s.maps()
    axes = range(len(s.out.tensor.axes))  # its own maps ask for sizes that are known to align
    return tuple(tuple(axes[len(axes) - len(v.tensor.axes) :]) for v in s.operands)


def with_canonical_sizes(program: Program, sizes: EqualSizes) -> Program:
    """Return the program with each size in its canonical symbols; result types of views are inferred anew."""
    env = {v.name: _canonical(v, sizes) for v in program.inputs}
    for s in program.walk():
        defined = s.defines(Phase.HOST)
        if defined is None:
            continue
        env[defined.name] = _canonical(defined, sizes)
        if isinstance(s, ViewStatement) and isinstance(type := _sized(s.rename(env), sizes).infer(), TensorType):
            env[defined.name] = replace(defined, type=type)
    body = rewrite((s.rename(env) for s in program.body), lambda s: [_sized(s, sizes)])
    return replace(
        program,
        inputs=tuple(env[v.name] for v in program.inputs),
        outputs=tuple(env[v.name] for v in program.outputs),
        body=body,
    )


def _canonical(value: Value, sizes: EqualSizes) -> Value:
    if not isinstance(value.type, TensorType):
        return value
    type = sizes.canonical(value.type)
    for factor in (f for axis in type.axes for f in axis.factors):
        part = type.local_factor(factor)
        if not part.symbols and part.den != 1:
            where = f" over {factor.on}" if factor.on else ""
            raise error(f"{value.name} has an axis of {factor.extent}{where}, which does not divide", value.span)
    return replace(value, type=type)


def _sized(s: Statement, sizes: EqualSizes) -> Statement:
    """Return a statement with the sizes in its fields in canonical symbols."""
    return replace(s, count=sizes.resolve(s.count)) if isinstance(s, (For, Chunk)) else s


# The reading that fits all statements ---------------------------------------------------------------------------------
# Choosing the logical axes of each printed tensor so that its statements fit.
#
# If extents are numbers, a printed tensor may have several readings (see `readings`). A statement fits only some of
# them: a weight has two axes, an allreduce keeps the shape, a piece has the axes of its tensor. Readings that do not
# fit a statement are dropped until nothing changes. If several are left, the first printed tensor takes its likeliest
# reading, then the next tensor, and so on.

UNARY: dict[str, type[ops.Unary]] = {"relu": ops.Relu, "gelu": ops.Gelu, "silu": ops.Silu, "copy": ops.DenseCopy}
BINARY: dict[str, type[ops.Binary]] = {"add": ops.Add, "mul": ops.Mul}
REDUCING = ("Allreduce", "ReduceScatter")
BETWEEN_RANKS = ("Allgather", *REDUCING, "AllToAll")


def operation(node: ComputeNode, out: Value, operands: Iterable[Value]) -> ops.TensorOp:
    """Return the statement of a computation. It must not be a sum, whose axis is not known yet."""
    first, *rest = operands
    if node.op == "matmul":
        return ops.Matmul(out, first, rest[0])
    if node.op == "linear":
        return ops.Linear(out, first, *rest)
    if node.op in BINARY:
        return BINARY[node.op](out, first, rest[0])
    return ops.Cast(out, first, node.dtype) if node.op == "cast" else UNARY[node.op](out, first)


def _splits_devices(dump: Dump) -> bool:
    """Return True if device axes come from splits.

    nvFuser either splits axes for streams and devices, and takes slices with ShardByStream or implicitly; or it has a
    separate axis for each, and takes slices with a select.
    """
    views = [node for node in dump.walk() if isinstance(node, ViewNode)]
    cut = {(n.out if n.op == "chunk" else n.x).name for n in views if n.op in ("select", "chunk")}
    return any(d.on == "stream" for t in dump.tensors() if t.name not in cut for d in t.domains)


@dataclass(frozen=True)
class Reading:
    """One reading of a tensor: its logical axes, and the axes that were not reduced."""

    groups: tuple[LogicalAxis, ...]
    axes: tuple[LogicalAxis, ...]  # without device axes that hold the parts of a partial sum
    kept: tuple[LogicalAxis, ...]

    @cached_property
    def sliced(self) -> bool:
        return any(d.on == STREAM for group in self.kept for d in group.domains)


Readings = dict[TensorNode, list[Reading]]
Chosen = dict[TensorNode, Reading]


@dataclass(frozen=True)
class Rule:
    """A constraint between the readings of two tensors."""

    tensors: tuple[TensorNode, ...]
    fits: Callable[[Reading, Reading], bool]

    def fitting(self, left: Readings) -> list[Chosen]:
        """Return the pairs of readings that fit each other."""
        a, b = self.tensors
        pairs = product_of(left[a], left[b]) if a != b else zip(left[a], left[a], strict=True)
        return [{a: one, b: other} for one, other in pairs if self.fits(one, other)]


@dataclass(frozen=True)
class Computation:
    """A constraint from a computation: matched axes have the same devices and the same slicing by loops."""

    node: ComputeNode
    looped: bool

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return self.node.tensors

    def fitting(self, left: Readings) -> list[Chosen]:
        """Return the choices of a reading for each tensor that fit each other."""
        tensors = tuple(dict.fromkeys(self.node.tensors))
        choices: list[Chosen] = []
        for ranks in product_of(*(dict.fromkeys(len(r.kept) for r in left[tensor]) for tensor in tensors)):
            rank = dict(zip(tensors, ranks, strict=True))
            meeting = self.meeting(rank)
            chosen: list[Chosen] = [{}] if meeting is not None else []
            for tensor in tensors:
                room = [reading for reading in left[tensor] if len(reading.kept) == rank[tensor]]
                pairs = [pair for pair in meeting or () if pair[0][0] == tensor or pair[1][0] == tensor]
                longer = ({**choice, tensor: reading} for choice in chosen for reading in room)
                chosen = [choice for choice in longer if all(self.meet(choice, *pair) for pair in pairs)]
            choices += chosen
        return choices

    def meeting(
        self, rank: Mapping[TensorNode, int]
    ) -> list[tuple[tuple[TensorNode, int], tuple[TensorNode, int]]] | None:
        """Return the matched pairs of axes for each tensor's number of axes; None if these numbers do not fit."""
        values = {
            Value(f"T{n}", TensorType(tensor.dtype, tuple(Axis.of(f"i{n}_{k}") for k in range(rank[tensor])))): tensor
            for n, tensor in enumerate(self.node.tensors)
        }
        *operands, out = values
        statement = operation(self.node, out, operands)
        maps = maps_of(statement)
        if [len(map) for map in maps] != [len(value.tensor.axes) for value in operands]:
            return None
        if {to for map in maps for to in map if to != CONTRACTED} != set(range(len(out.tensor.axes))):
            return None
        of: dict[object, TensorNode] = dict(list(values.items()))
        return [((of[a], j), (of[b], k)) for (_, a, j), (_, b, k) in computed(statement)]

    def meet(self, chosen: Chosen, a: tuple[TensorNode, int], b: tuple[TensorNode, int]) -> bool:
        if a[0] not in chosen or b[0] not in chosen:
            return True
        one, other = chosen[a[0]], chosen[b[0]]
        if self.node.op in BINARY and one.kept[a[1]].extent.is_one:
            return True
        moving = () if self.looped and one.sliced and other.sliced else (STREAM,)
        return _alike([one.kept[a[1]]], [other.kept[b[1]]], moving)


class Axes:
    """Chooses a reading for each tensor of a dump.

    Args:
        dump: the dump.
        parts: by the name of a tensor, the device axes, x or y, that hold the parts of a partial sum.
        over: the device axis along which the team of a communication lies.
    """

    def __init__(
        self, dump: Dump, parts: Mapping[str, Collection[str]], over: Callable[[CommunicationNode], str]
    ) -> None:
        self.parts = parts
        self.over = over
        self.split = _splits_devices(dump)
        self.left = {tensor: self._readings(tensor) for tensor in (*dump.tensors(), *dump.outputs)}
        if any(len(found) > 1 for found in self.left.values()):
            self._choose([*self._prints(), *self._rules(dump.body, looped=False)])

    def groups(self, tensor: TensorNode) -> tuple[LogicalAxis, ...]:
        """Return the logical axes of a printed tensor, including those that hold the parts of a partial sum."""
        return self.left[tensor][0].groups

    def _readings(self, tensor: TensorNode) -> list[Reading]:
        parts, found = self.parts.get(tensor.name, ()), []
        for groups in readings(tensor, parts, split=self.split):
            axes = tuple(g for g in groups if g.reduced or not (g.device and (g.device in parts or g.first.rfactor)))
            found.append(Reading(groups, axes, tuple(g for g in axes if not g.reduced)))
        return found

    # Choosing ----------------------------------------------------------------------------------------------------
    def _choose(self, rules: Iterable[Rule | Computation]) -> None:
        """Choose readings that all rules allow.

        A rule without fitting readings is an error, reported when it is read.
        """
        rules = [rule for rule in rules if rule.fitting(self.left)]
        self.left = _pruned(self.left, rules, self.left) or self.left
        for tensor in self.left:
            chosen = self.left[tensor]
            trials = (_pruned({**self.left, tensor: [reading]}, rules, [tensor]) for reading in chosen)
            if len(chosen) > 1:
                self.left = next((left for left in trials if left), {**self.left, tensor: chosen[:1]})

    # Rules -------------------------------------------------------------------------------------------------------
    def _prints(self) -> Iterator[Rule]:
        """Yield rules for tensors that are printed several times, with and without a reduced axis."""
        first: dict[str, TensorNode] = {}
        for tensor in self.left:
            if first.setdefault(tensor.name, tensor) is not tensor:
                yield Rule((first[tensor.name], tensor), lambda a, b: _alike(a.kept, b.kept))

    def _rules(self, body: Iterable[Node], *, looped: bool) -> Iterator[Rule | Computation]:
        for node in body:
            match node:
                case LoopNode():
                    yield from self._rules(node.body, looped=True)
                case ComputeNode(op="sum"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.axes))
                case ComputeNode(op="copy"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
                case ComputeNode():
                    yield Computation(node, looped)
                case ViewNode(op="select"):
                    yield _selection(node)
                case ViewNode(op="chunk"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept, (STREAM,)))
                case ViewNode(op="as_partial" | "dense"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
                case ViewNode(op="permute"):
                    yield Rule(node.tensors, lambda x, out: len(x.kept) == len(out.kept))
                case CommunicationNode():
                    yield self._communication(node)

    def _communication(self, node: CommunicationNode) -> Rule:
        """Return the rule of a communication: it keeps the shape, and moves only axes over its team's devices."""
        if node.type.text not in BETWEEN_RANKS:
            return Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
        over = self.over(node)

        def fits(x: Reading, out: Reading) -> bool:
            rest = [g for g in x.groups if g.device != over and g in x.kept]
            if node.type.text in REDUCING:  # either x is a partial sum, or an input that holds summands side by side
                return len(rest) < len(x.groups) and _alike(rest, out.kept, (STREAM, over))
            return _alike(x.kept, out.kept, (STREAM, over))

        return Rule(node.tensors, fits)


def _selection(node: ViewNode) -> Rule:
    """Return the rule of a select: it removes one axis, which is not split."""

    def fits(x: Reading, out: Reading) -> bool:
        rest = [g for g in x.kept if not (node.axis and [d.number for d in g.domains] == [node.axis.number])]
        return len(rest) == len(x.kept) - 1 and _alike(rest, out.kept)

    return Rule(node.tensors, fits)


def _alike(a: Sequence[LogicalAxis], b: Sequence[LogicalAxis], moving: Collection[str] | None = None) -> bool:
    """Return True if axes may have equal extents and, given `moving`, lie on the same devices apart from those."""
    return len(a) == len(b) and all(
        (bool((ratio := one.extent / other.extent).symbols) or ratio.is_one)
        and (moving is None or _marks(one, moving) == _marks(other, moving))
        for one, other in zip(a, b, strict=True)
    )


def _marks(group: LogicalAxis, without: Collection[str]) -> list[str]:
    return [d.on for d in group.domains if d.on and d.on not in without]


def _pruned(left: Readings, rules: Sequence[Rule | Computation], changed: Collection[TensorNode]) -> Readings | None:
    """Return the readings that all rules leave after some tensors' readings changed.

    None if a tensor has no reading.
    """
    left, of = dict(left), defaultdict(list)
    for n, rule in enumerate(rules):
        for tensor in dict.fromkeys(rule.tensors):
            of[tensor].append(n)
    todo = dict.fromkeys(n for tensor in changed for n in of[tensor])
    while todo:
        rule = rules[next(iter(todo))]
        del todo[next(iter(todo))]
        fitting = rule.fitting(left)
        if not fitting:
            return None
        for tensor in fitting[0]:
            room = [r for r in left[tensor] if any(choice[tensor] is r for choice in fitting)]
            if len(room) < len(left[tensor]):
                left[tensor] = room
                todo |= dict.fromkeys(of[tensor])
    return left


# Types ----------------------------------------------------------------------------------------------------------------
# The types behind the printed tensors of an nvFuser dump: meshes, axes on devices, partial sums.


@dataclass(frozen=True)
class Unprinted:
    """A mesh axis that a tensor lies on, although the dump prints no device axis for it.

    Fields:
        mark: the mesh axis.
        axis: the axis of the tensor that lies on it; None if the tensor is a partial sum over it.
    """

    mark: str
    axis: int | None


class Types:
    """Computes the types of printed tensors; records in `sizes` the sizes that the types force to be equal."""

    def __init__(self, dump: Dump) -> None:
        self.sizes = EqualSizes(dump.symbols)
        self.meshes: dict[Devices | None, Mesh] = {}
        printed = [t.devices for t in dump.tensors() if t.devices]
        for devices in dict.fromkeys(printed or [_unprinted_devices(dump)]):
            self.meshes[devices] = _mesh(devices, len(self.meshes))
        self.meshes[None] = next(iter(self.meshes.values()))
        self.partials = self._partials(dump)
        self.unprinted = self._unprinted(dump)
        letters = {axis: letter for mesh in self.meshes.values() for letter, axis in _letters(mesh).items()}
        parts = {name: {letters[mark] for mark in marks} for name, marks in self.partials.items()}
        self.axes = Axes(dump, parts, lambda node: letters[self.over(node)])

    def mesh(self, tensor: TensorNode) -> Mesh:
        return self.meshes[tensor.devices]

    def mark(self, on: str, mesh: Mesh, span: Span) -> str:
        """Return the mesh axis that deviceIdx.x or deviceIdx.y stands for."""
        axes = _letters(mesh)
        if on not in axes:
            expected = "deviceIdx.x" if on == "y" else "deviceIdx.x or deviceIdx.y"
            raise error(f"a mesh of {len(axes)} axes has no such axis", span, expected=expected)
        return axes[on]

    def logical(
        self, tensor: TensorNode, partial: Collection[str] | None = None
    ) -> tuple[list[LogicalAxis], tuple[str, ...]]:
        """Return the logical axes, reduced ones included, and the mesh axes over which the tensor is a partial sum.

        nvFuser prints a partial sum with an additional axis, on the devices that hold its parts: `partial` names the
        mesh axes. If it is None, they are the axis that a matmul leaves (marked `rf`), and an axis that is reduced
        later. A program written by hand may print no such axis: see `_unprinted`.
        """
        mesh, kept, over = self.mesh(tensor), [], []
        if (hidden := self.unprinted.get(tensor.name)) and hidden.axis is None:
            over.append(hidden.mark)
        for group in self.axes.groups(tensor):
            first = group.first
            mark = self.mark(first.on, mesh, first.span) if group.device and not group.reduced else ""
            known = self.partials.get(tensor.name, ()) if partial is None else partial
            if mark and (mark in known or (partial is None and first.rfactor)):
                self.devices_fit(first, mesh)
                over.append(mark)
            else:
                kept.append(group)
        return kept, tuple(sorted(over))

    def type_of(self, tensor: TensorNode, *, sliced: bool, partial: Collection[str] | None = None) -> TensorType:
        """Return the type of a printed tensor. If `sliced`, it holds one round's slice of its Stream axis."""
        mesh = self.mesh(tensor)
        kept, over = self.logical(tensor, partial)
        hidden = self.unprinted.get(tensor.name)
        axes = tuple(
            self.axis(group, mesh, sliced, hidden.mark if hidden and hidden.axis == k else "")
            for k, group in enumerate(group for group in kept if not group.reduced)
        )
        if len(streams := [d for group in kept for d in group.domains if d.on == "stream"]) > 1:
            raise error(f"{tensor.name} has {len(streams)} streamIdx axes", streams[1].span, expected="at most one")
        marks = [*over, *(m for axis in axes for m in axis.marks)]
        if twice := next((m for m in marks if marks.count(m) > 1), None):
            expected = "each mesh axis at most once"
            raise error(f"two axes of {tensor.name} lie on {twice}", tensor.span, expected=expected)
        return TensorType(tensor.dtype, axes, mesh, over)

    def axis(self, group: LogicalAxis, mesh: Mesh, sliced: bool, unprinted: str = "") -> Axis:
        """Return the axis of a logical axis; `unprinted`: the mesh axis that it lies on, if that is not printed."""
        factors = []
        for domain in group.domains:
            on = self.mark(domain.on, mesh, domain.span) if domain.on in ("x", "y") else None
            if on:
                self.devices_fit(domain, mesh)
            factors.append(Factor(ONE if sliced and domain.on == "stream" else domain.extent.size, on))
        if unprinted:
            factors.insert(len(factors) - 1, Factor(Size(mesh.size(unprinted)), unprinted))
        return Axis(tuple(factors)).normal()

    def devices_fit(self, domain: IterDomain, mesh: Mesh) -> None:
        """Check that a device axis has as many entries as its mesh axis has devices."""
        devices = mesh.size(self.mark(domain.on, mesh, domain.span))
        if not self.sizes.equal(domain.extent.size, Size(devices)):
            message = f"{devices} devices cannot hold an axis of {domain.extent.size}, one entry each"
            raise error(message, domain.span, expected=f"an extent of {devices}")

    def over(self, node: CommunicationNode) -> str:
        """Return the mesh axis along which the team of a collective lies."""
        mesh = self.mesh(node.x)
        along = [axis for axis in reversed(mesh.axes) if node.team in mesh.teams(axis)]
        if not along:
            teams = ", ".join(f"({' '.join(map(str, team))})" for axis in mesh.axes for team in mesh.teams(axis)[:1])
            devices = " ".join(map(str, node.team))
            raise error(f"the team ({devices}) is no row or column of the mesh", node.span, expected=f"such as {teams}")
        used = {self.mark(d.on, mesh, d.span) for t in node.tensors for d in t.domains if d.on in ("x", "y")}
        return next((axis for axis in along if axis in used), along[0])

    def _partials(self, dump: Dump) -> dict[str, set[str]]:
        """Return the tensors that hold partial sums, with the mesh axes, traced back from reducing communications.

        Inputs, and their views and copies, are never partial sums: their device axis stores the addends explicitly.
        """
        nodes = [n for n in dump.walk() if isinstance(n, (ViewNode, ComputeNode, CommunicationNode))]
        partials: dict[str, set[str]] = {}
        given = {t.name for t in dump.inputs}
        for node in nodes:
            if _same_elements(node) and node.tensors[0].name in given:
                given.add(node.out.name)
        for node in reversed(nodes):
            if isinstance(node, CommunicationNode) and node.type.text in REDUCING:
                partials.setdefault(node.x.name, set()).add(self.over(node))
            elif _same_elements(node) and node.out.name in partials:
                marks = partials[node.out.name]
                if isinstance(node, ViewNode) and node.over:
                    marks = marks - {self.mark(node.over, self.mesh(node.x), node.span)}
                partials.setdefault(node.tensors[0].name, set()).update(marks)
        return {name: marks for name, marks in partials.items() if name not in given}

    def _unprinted(self, dump: Dump) -> dict[str, Unprinted]:
        """Return the tensors that lie on a mesh axis although the dump prints no device axis for it, by name.

        Programs written by hand, such as those of nvFuser's tutorial, print each tensor with the extents that one rank
        holds. A reducing communication says what the ranks hold: the sum over ranks of their products is one product,
        with a contracted axis that lies on the devices. The result of a ReduceScatter has its first axis there.
        """
        devices = {(t.name, d.on) for t in (*dump.tensors(), *dump.outputs) for d in t.domains if d.on in ("x", "y")}
        makers = {n.out.name: n for n in dump.walk() if isinstance(n, (ViewNode, ComputeNode, CommunicationNode))}
        unprinted: dict[str, Unprinted] = {}
        for node in dump.walk():
            if isinstance(node, CommunicationNode) and node.type.text in REDUCING:
                mark = self.over(node)
                letter = next(letter for letter, axis in _letters(self.mesh(node.x)).items() if axis == mark)
                printed = {name for name, on in devices if on == letter}
                axes = _unprinted_axes(node, makers, printed)
                unprinted |= {name: Unprinted(mark, axis) for name, axis in axes.items()}
        return unprinted


def _unprinted_axes(
    node: CommunicationNode, makers: Mapping[str, ViewNode | ComputeNode | CommunicationNode], printed: set[str]
) -> dict[str, int | None]:
    """Return the axes on the devices that a communication sums over, by tensor; None stands for a partial sum.

    Empty unless it sums products whose contracted axis can be traced to inputs, or to operands with a printed axis.

    Args:
        node: the communication.
        makers: the node that makes each tensor, by name.
        printed: the names of the tensors that are printed with an axis on these devices.
    """
    axes: dict[str, int | None] = {}
    name, product = node.x.name, makers.get(node.x.name)
    while product is not None and _same_elements(product) and name not in axes:
        axes[name] = None
        name = product.tensors[0].name
        product = makers.get(name)
    axes[name] = None
    if not isinstance(product, ComputeNode) or product.op not in ("matmul", "linear") or printed & axes.keys():
        return {}
    todo = [place for pair in _matched_axes(product) if name not in dict(pair) for place in pair]
    todo += [(node.out.name, 0)] * (node.type.text == "ReduceScatter")
    while todo:
        name, axis = todo.pop()
        maker = makers.get(name)
        if name in printed or axes.get(name, -1) == axis:
            continue
        if name in axes or (maker is not node and isinstance(maker, (ViewNode, CommunicationNode))):
            return {}
        axes[name] = axis
        if isinstance(maker, ComputeNode):
            matched = [place for pair in _matched_axes(maker) if (name, axis) in pair for place in pair]
            if not matched:
                return {}
            todo += matched
    return axes


def _matched_axes(node: ComputeNode) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the pairs of axes that a computation matches: the names of tensors, and places among their axes."""
    if node.op == "sum":
        return []
    rank = {tensor: sum(not group.reduced for group in readings(tensor)[0]) for tensor in node.tensors}
    pairs = Computation(node, looped=False).meeting(rank) or []
    return [((a.name, j), (b.name, k)) for (a, j), (b, k) in pairs]


def _same_elements(node: ViewNode | ComputeNode | CommunicationNode) -> bool:
    return isinstance(node, ViewNode) or (isinstance(node, ComputeNode) and node.op in ("copy", "cast"))


def _mesh(devices: Devices, index: int) -> Mesh:
    rows = devices.rows
    name = f"mesh_{index}" if index else "mesh"
    flat = tuple(d for row in rows for d in row)
    if devices.grid:
        return Mesh(name, ("didy", "didx"), (len(rows), len(rows[0])), flat)
    return Mesh(name, ("didx",), (len(flat),), flat)


def _letters(mesh: Mesh) -> dict[str, str]:
    """Return the axes of a mesh by their letter in deviceIdx."""
    return dict(zip(("x", "y"), reversed(mesh.axes), strict=False))


def _unprinted_devices(dump: Dump) -> Devices:
    """Return the devices of a dump without meshes: the first team that communicates, else by a device axis's extent."""
    teams = [n.team for n in dump.walk() if isinstance(n, CommunicationNode)]
    device_axes = [d for t in dump.tensors() for d in t.domains if d.on in ("x", "y")]
    lengths = [n for d in device_axes if (n := d.extent.size.value) is not None]
    if not teams and lengths and lengths[0] > 1 << 16:
        message = f"a device axis of {lengths[0]}, and no mesh is printed"
        raise error(message, device_axes[0].span, hint="add (DeviceMesh{..})")
    return Devices((teams[0] if teams else tuple(range(lengths[0] if lengths else 1)),), False)
