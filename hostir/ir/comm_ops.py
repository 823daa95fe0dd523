"""Define communication statements. They change how a tensor is spread over ranks, but not the unsharded tensor.

The types of the operand `x` and the result `out` determine which parts move between ranks. In a fusion, a communication
defines its result. In a host program, it writes a buffer and defines a handle. A later statement waits for the handle:

    %h = allgather %x -> %y over didx
    wait %h
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from hostir.ir.machine import Exchange, Move, meshes_of
from hostir.ir.op import BOTH, DefineIf, Name, Phase, Read, Shape, Statement, Value, Write, statement
from hostir.ir.sharding import Mark, flat_marks, leads
from hostir.ir.sizes import Division, Size, product
from hostir.ir.source import did_you_mean
from hostir.ir.types import FP8, Axis, Mesh, TensorType

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Reshard(Statement):
    """An explicit change of sharding in a fusion; lowering turns it into communications.

    Example: %y: f32[16, 32] = reshard %x: f32[16@didx, 32]
    """

    syntax = "{out} = reshard {x}"
    explicit = False
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.FUSION})
    x: Read
    out: Write

    def verify(self) -> None:
        x, out = self.x.tensor, self.out.tensor
        if x.dtype != out.dtype or x.shape != out.shape:
            raise self.fail(
                f"reshard changes where {self.x} lies, not its type: {x} to {out}", expected=f"{x.dtype}, same sizes"
            )

    def evaluate(self, frame: Frame) -> None:
        frame[self.out] = frame[self.x]


def elements(*values: Value) -> tuple[Shape, ...]:
    """Return one shape `(n,)` for each tensor, where n is the number of elements that one rank holds."""
    return tuple((product(value.tensor.local_shape),) for value in values)


BY = "<? by {by}?>"  # the clause of host programs that names an implementation
UNIT = 16  # bytes: the kernels for symmetric memory take vectors of this size
BY_NCCL = "leave out 'by': NCCL runs the collective without this limit"
LOW_LATENCY, ONE_SHOT, TWO_SHOT, COPY_ENGINE = "low_latency", "one_shot", "two_shot", "copy_engine"
WORKSPACE, SLOTS = "(workspace)", "(slots)"  # names of the symmetric buffers of implementations


@dataclass(frozen=True, eq=False, repr=False)
class Communication(Statement):
    """The base class of communications.

    In a host program, `x` and `out` are dense, and the axis whose sharding changes is outermost. Lowering ensures both.
    In a fusion, the sharding of any axis may change, and a communication has no handle.
    """

    phases: ClassVar[frozenset[Phase]] = BOTH
    transfers: ClassVar[bool] = True
    collective: ClassVar[bool] = True
    uncut: ClassVar[bool] = True

    x: Read
    out: Write
    handle: DefineIf = None

    @classmethod
    def form(cls, phase: Phase) -> str:
        if phase is Phase.HOST:
            return cls.syntax
        return "{out} = " + cls.syntax.removesuffix(BY).replace("{handle} = ", "").replace(" -> {out}", "")

    @property
    def needs_dense(self) -> bool:
        return True

    @property
    def compared(self) -> tuple[Shape, ...]:
        return elements(self.x, self.out)

    @property
    def meshes(self) -> tuple[Mesh | None, ...]:
        return meshes_of([self.x, self.out])

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        devices = sorted({device for mesh in self.meshes if mesh for device in mesh.devices})
        return tuple(dict.fromkeys(tuple(sorted(self.exchange(device).team)) for device in devices))

    def exchange(self, rank: int) -> Exchange:
        """Return the `Exchange` of `rank`: the team of the rank, and the messages that the rank sends and receives."""
        raise AssertionError(type(self).__name__)

    def verify(self) -> None:
        x, out = self.x.tensor, self.out.tensor
        if x.dtype != out.dtype or product(x.shape) != product(out.shape):
            raise self.fail(
                f"{self.keyword()} moves elements and keeps them: {x} to {out}", expected="equal dtypes and sizes"
            )

    def evaluate(self, frame: Frame) -> None:
        if not frame.here(*self.meshes):
            return
        if frame[self.out] is None and frame.here(self.out.tensor.mesh):
            frame[self.out] = frame.machine.allocate(frame.shape(self.out.tensor), self.out.tensor.dtype)
        if frame.empty(self.out):
            return
        rank = frame.machine.rank
        exchange = Exchange(self.keyword(), ()) if rank is None else self.exchange(rank)
        handle = frame.machine.communicate(exchange, frame[self.x], frame[self.out])
        if self.handle is None:
            frame.machine.wait(handle)
        else:
            frame[self.handle] = handle


@dataclass(frozen=True, eq=False, repr=False)
class Collective(Communication):
    """The base class of communications among the ranks along one mesh axis."""

    over: Name = ""

    @property
    def compared(self) -> tuple[Shape, ...]:
        return self.x.tensor.local_shape, self.out.tensor.local_shape

    @property
    def addends(self) -> int:
        summed = self.over in self.x.tensor.partial and self.over not in self.out.tensor.partial
        return self.mesh.size(self.over) if summed else 0

    @property
    def mesh(self) -> Mesh:
        mesh = self.x.tensor.mesh
        if mesh is None or mesh != self.out.tensor.mesh or self.over not in mesh.axes:
            known = mesh.axes if mesh else ()
            expected, hint = f"one of: {', '.join(known) or 'none'}", did_you_mean(self.over, known)
            raise self.fail(
                f"no mesh axis '{self.over}' shared by {self.x} and {self.out}", expected=expected, hint=hint
            )
        return mesh

    def exchange(self, rank: int) -> Exchange:
        return Exchange(self.keyword(), self.mesh.team(rank, self.over))

    def verify(self) -> None:
        super().verify()
        if self.mesh and not self.fits(self.x.tensor, self.out.tensor):
            raise self.fail(
                f"{self.keyword()} over {self.over} does not lead from {self.x.tensor} to {self.out.tensor}",
                expected=self.rule.format(over=self.over),
            )

    def _outermost(self, type: TensorType) -> bool:
        return self.handle is None or leads(type, self.over)

    rule: ClassVar[str] = ""

    def fits(self, x: TensorType, out: TensorType) -> bool:
        raise AssertionError(type(self).__name__)


def _marks(type: TensorType) -> list[str]:
    return [m for axis in type.axes for m in axis.marks]


def _unmarked(type: TensorType, mark: str) -> TensorType:
    return type.with_axes(axis.without(mark) for axis in type.axes)


@dataclass(frozen=True, eq=False, repr=False)
class Implemented(Collective):
    """The base class of collectives that symmetric memory can run, too.

    Fields:
        by: the implementation on CUDA, in a host program. By default NCCL runs the collective. The meaning is the same.
    """

    by: Name = field(default="", kw_only=True)

    implementations: ClassVar[tuple[str, ...]] = ()  # the values of `by`
    low_latency_dtypes: ClassVar[tuple[str, ...]] = ("bf16", "f16", "f32")

    def exchange(self, rank: int) -> Exchange:
        return replace(super().exchange(rank), by=self.by)

    @property
    def workspace(self) -> Value | None:
        if self.by == LOW_LATENCY:  # two slots for each rank
            slots = Axis.of(2 * self.mesh.size(self.over))
            return Value(SLOTS, self.piece.with_axes((slots, *self.piece.axes)))
        return replace(self.x, name=WORKSPACE) if self.by else None

    @property
    def piece(self) -> TensorType:
        """The type of the tensor that one rank sends to another. Kernels sum or move it in units of UNIT bytes."""
        return self.x.tensor

    @property
    def units(self) -> Size:
        return product(self.piece.local_shape) * self.piece.dtype.bytes / UNIT

    def divisions(self) -> Iterator[Division]:
        yield from super().divisions()
        if self.by in (LOW_LATENCY, ONE_SHOT, TWO_SHOT):
            yield Division(self.units, f"'{self.keyword()} by {self.by}' takes {UNIT} bytes at a time", self.span)

    def verify(self) -> None:
        super().verify()
        self.verify_by()

    def verify_by(self) -> None:
        """Raise HostIRError if the implementation `by` cannot run this collective."""
        if not self.by:
            return
        phrase = f"{self.keyword()} by {self.by}"
        if self.by not in self.implementations or self.handle is None:
            names = ", ".join(self.implementations) if self.handle else "no 'by' in a fusion"
            raise self.fail(
                f"there is no '{phrase}'",
                expected=f"one of: {names}" if self.handle else names,
                hint=did_you_mean(self.by, self.implementations) if self.handle else "",
            )
        devices, ranks = self.mesh.devices, self.mesh.size(self.over)
        if len(devices) != ranks or devices != tuple(sorted(devices)):
            expected = f"a mesh whose only axis of several ranks is {self.over}, with the ranks in ascending order"
            raise self.fail(f"{phrase} over {self.over} of mesh {self.mesh}", expected=expected, hint=BY_NCCL)
        if self.by == COPY_ENGINE:
            return
        dtypes = self.low_latency_dtypes if self.by == LOW_LATENCY else ("bf16", "f32")
        if self.x.tensor.dtype.name not in dtypes:
            raise self.fail(f"{phrase} of {self.x.tensor.dtype}", expected=" or ".join(dtypes), hint=BY_NCCL)
        if not self.units.divisible_by(1):
            what = f"{self.units * UNIT} bytes on each rank, which {UNIT} does not divide"
            raise self.fail(f"{phrase} of {what}", expected=f"a multiple of {UNIT} bytes", hint=BY_NCCL)


def check_team(s: Statement, ranks: int) -> None:
    """Raise HostIRError if a collective needs the symmetric memory of a team that is not the complete program.

    `ranks` is the number of ranks of the program.
    """
    if s.workspace is not None and s.teams != (tuple(range(ranks)),):
        raise s.fail(
            f"'{s.keyword()} ... by' among ranks {' '.join(map(str, s.teams[0]))}",
            expected=f"all {ranks} ranks of the program",
            hint=BY_NCCL,
        )


@statement
@dataclass(frozen=True, eq=False, repr=False)
class AllGather(Implemented):
    """All-gather: every rank gets the parts of all ranks, in the order of the ranks.

    On CUDA, `by low_latency` is a kernel of hostir that sends this rank's part to all peers, without flags: see
    `hostir.kernels.low_latency`. It takes bf16, f16, f32 and fp8, and a multiple of 16 bytes from each rank. The NaN
    whose bits are all ones arrives as another NaN. With `by copy_engine`, copy engines copy the parts of peers. SMs
    only wait and copy within the GPU. Both use symmetric memory: the team is all ranks of the program, on one host.

    Example: %h = allgather %x: f32[8@didx, 16, 32] -> %y: f32[8, 16, 32] over didx by low_latency
    """

    syntax = "{handle} = allgather {x} -> {out} over {over}" + BY
    implementations = (LOW_LATENCY, COPY_ENGINE)
    low_latency_dtypes = (*Implemented.low_latency_dtypes, *FP8)
    rule = "x with its outermost axis on {over}, and out the same without it"

    def fits(self, x: TensorType, out: TensorType) -> bool:
        return self._outermost(x) and self.over in _marks(x) and _unmarked(x, self.over).host() == out.host()


@statement
@dataclass(frozen=True, eq=False, repr=False)
class AllReduce(Implemented):
    """All-reduce: every rank gets the sum of all partial sums. `x` and `out` may be the same memory.

    With `by low_latency`, a kernel of hostir computes the sum on CUDA. Every rank sends its summands to all ranks, and
    no flags are needed: see `hostir.kernels.low_latency`. With `by one_shot` or `by two_shot`, a kernel of torch's
    symmetric memory computes the sum. With `one_shot`, every rank reads the summands of all ranks. With `two_shot`,
    every rank first sums one part of the elements, and then reads the sums of the other ranks.

    All three need bf16 or f32, a multiple of 16 bytes on each rank, and the symmetric memory of all ranks of the
    program. So the ranks are on one host, and the team is all ranks. `low_latency` also takes f16.

    Example: %h = allreduce %x: f32[16, 32] partial(didx) -> %y: f32[16, 32] over didx by low_latency
    """

    syntax = "{handle} = allreduce {x} -> {out} over {over}" + BY
    implementations = (LOW_LATENCY, ONE_SHOT, TWO_SHOT)
    rule = "x a partial sum over {over}, and out the same without it"

    def in_place(self, operand: int) -> bool:
        return True

    def fits(self, x: TensorType, out: TensorType) -> bool:
        return self.over in x.partial and _summed(x, self.over).host() == out.host()


def _summed(type: TensorType, mark: str) -> TensorType:
    return replace(type, partial=tuple(m for m in type.partial if m != mark))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class ReduceScatter(Implemented):
    """Reduce-scatter: each rank gets its block of the sum of all partial sums.

    With `by low_latency`, a kernel of hostir computes the sum on CUDA: every rank sends each rank the summands of its
    block. With `by one_shot`, a kernel of torch's symmetric memory computes the sum: every rank reads the summands of
    its block from all ranks. `one_shot` needs 2, 4 or 8 ranks. Both need a multiple of 16 bytes in the block of each
    rank. The other conditions are the same as for `allreduce`.

    Example: %h = reduce_scatter %x: f32[8, 16, 32] partial(didx) -> %y: f32[8@didx, 16, 32] over didx by one_shot
    """

    syntax = "{handle} = reduce_scatter {x} -> {out} over {over}" + BY
    rule = "x a partial sum over {over}, and out summed with its outermost axis on {over}"
    implementations = (LOW_LATENCY, ONE_SHOT)

    @property
    def piece(self) -> TensorType:
        return self.out.tensor

    def verify_by(self) -> None:
        super().verify_by()
        if self.by == ONE_SHOT and (ranks := self.mesh.size(self.over)) not in (1, 2, 4, 8):
            raise self.fail(
                f"reduce_scatter by {self.by} among {ranks} ranks", expected="2, 4 or 8 ranks", hint=BY_NCCL
            )

    def fits(self, x: TensorType, out: TensorType) -> bool:
        summed = _summed(x, self.over).host()
        moved = self.over in x.partial and self.over in _marks(out)
        return moved and self._outermost(out) and summed == _unmarked(out, self.over).host()


@statement
@dataclass(frozen=True, eq=False, repr=False)
class AllToAll(Collective):
    """All-to-all: the sharding moves from one axis to another. Each rank sends one block to each rank.

    In a host program `x` is `[D, A@over, ...]` and `out` is `[D@over, A, ...]`, where D is the number of ranks.

    Example: %h = alltoall %x: f32[8, 16@didx, 4] -> %y: f32[8@didx, 16, 4] over didx
    """

    syntax = "{handle} = alltoall {x} -> {out} over {over}"
    rule = "x = [D, A@{over}, ...] and out = [D@{over}, A, ...]"

    def fits(self, x: TensorType, out: TensorType) -> bool:
        if _unmarked(x, self.over).host() != _unmarked(out, self.over).host() or x.axis_on(self.over) is None:
            return False
        if self.handle is None:
            return out.axis_on(self.over) not in (None, x.axis_on(self.over))
        ranks = Size(self.mesh.size(self.over))
        before = [outer for mark, outer, _ in flat_marks(x) if mark == self.over]
        return leads(out, self.over) and before == [ranks] and x.axes[0].extent == ranks


@dataclass(frozen=True, eq=False, repr=False)
class Transfer(Communication):
    """The base class of communications between two meshes."""

    def exchange(self, rank: int) -> Exchange:
        return self._exchanges.get(rank) or Exchange(self.keyword(), self._team, ())

    @cached_property
    def _team(self) -> tuple[int, ...]:
        return tuple(sorted({device for mesh in self._meshes for device in mesh.devices}))

    @cached_property
    def _exchanges(self) -> dict[int, Exchange]:
        """A map from a rank to its `Exchange`. It contains every rank that sends or receives a message."""
        moves: dict[int, list[Move]] = {}
        for move in self.moves(*self._meshes):
            for rank in {move.source, move.target}:
                moves.setdefault(rank, []).append(move)
        return {rank: Exchange(self.keyword(), self._team, tuple(its)) for rank, its in moves.items()}

    @property
    def _meshes(self) -> tuple[Mesh, Mesh]:
        source, target = self.x.tensor.mesh, self.out.tensor.mesh
        if source is None or target is None:
            raise self.fail(
                f"{self.keyword()} needs a mesh on both sides", hint="write the mesh in both tensors' types"
            )
        return source, target

    def moves(self, source: Mesh, target: Mesh) -> tuple[Move, ...]:
        """Return the messages of all ranks; `source` is the mesh of `x`, and `target` the mesh of `out`."""
        raise AssertionError(type(self).__name__)

    def verify(self) -> None:
        super().verify()
        source, target = self._meshes
        x, out = flat_marks(self.x.tensor), flat_marks(self.out.tensor)
        if not self.agrees(x, out, source, target):
            start, end = f"{self.x.tensor} on @{source.name}", f"{self.out.tensor} on @{target.name}"
            raise self.fail(f"{self.keyword()} does not lead from {start} to {end}", expected=self.rule)

    def sharded(self, type: TensorType, marks: tuple[Mark, ...]) -> bool:
        """Return True if a tensor is sharded along exactly one axis, over a mesh of one axis.

        In a host program, the sharded axis must also be outermost. `marks` are the `flat_marks` of `type`.
        """
        one = len(marks) == 1 and type.mesh is not None and len(type.mesh.axes) == 1
        return one and (self.handle is None or leads(type, type.mesh.axes[0] if type.mesh else ""))

    rule: ClassVar[str] = ""

    def agrees(self, x: tuple[Mark, ...], out: tuple[Mark, ...], source: Mesh, target: Mesh) -> bool:
        raise AssertionError(type(self).__name__)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Broadcast(Transfer):
    """The first device of the mesh of `x` sends its copy of the tensor to every device of the mesh of `out`.

    Example: %h = broadcast %x: f32[16, 32] -> %y: f32[16, 32] on @other
    """

    syntax = "{handle} = broadcast {x} -> {out}"
    rule = "both sides replicated"

    def agrees(self, x: tuple[Mark, ...], out: tuple[Mark, ...], source: Mesh, target: Mesh) -> bool:
        return not x and not out

    def moves(self, source: Mesh, target: Mesh) -> tuple[Move, ...]:
        return tuple(Move(source.devices[0], d, (0, 1), (0, 1)) for d in target.devices)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Gather(Transfer):
    """Every device of the mesh of `out` gets all parts of a tensor that is sharded over the mesh of `x`.

    Example: %h = gather %x: f32[8@didx, 32] -> %y: f32[8, 32] on @other
    """

    syntax = "{handle} = gather {x} -> {out}"
    rule = "x with its outermost axis over a mesh of one axis, out replicated"

    def agrees(self, x: tuple[Mark, ...], out: tuple[Mark, ...], source: Mesh, target: Mesh) -> bool:
        return not out and self.sharded(self.x.tensor, x)

    def moves(self, source: Mesh, target: Mesh) -> tuple[Move, ...]:
        n = len(source.devices)
        return tuple(Move(s, d, (0, 1), (i, n)) for d in target.devices for i, s in enumerate(source.devices))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Scatter(Transfer):
    """One device of the mesh of `x` sends each device of the mesh of `out` its part.

    The sender is the first device of the mesh of `x` that is in both meshes. If no device is in both meshes, the sender
    is the first device of the mesh of `x`.

    Example: %h = scatter %x: f32[8, 32] -> %y: f32[8@didx, 32] on @other
    """

    syntax = "{handle} = scatter {x} -> {out}"
    rule = "x replicated, out with its outermost axis over a mesh of one axis"

    def agrees(self, x: tuple[Mark, ...], out: tuple[Mark, ...], source: Mesh, target: Mesh) -> bool:
        return not x and self.sharded(self.out.tensor, out)

    def moves(self, source: Mesh, target: Mesh) -> tuple[Move, ...]:
        root = next((d for d in source.devices if d in target.devices), source.devices[0])
        n = len(target.devices)
        return tuple(Move(root, d, (i, n), (0, 1)) for i, d in enumerate(target.devices))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class SendRecv(Transfer):
    """Each device of the mesh of `x` sends its part to the device at the same position in the mesh of `out`.

    Example: %h = sendrecv %x: f32[8@didx, 32] -> %y: f32[8@didx, 32] on @other
    """

    syntax = "{handle} = sendrecv {x} -> {out}"
    rule = "equal sharding over meshes of equal shape"

    def agrees(self, x: tuple[Mark, ...], out: tuple[Mark, ...], source: Mesh, target: Mesh) -> bool:
        def places(marks: tuple[Mark, ...], mesh: Mesh) -> list[tuple[int, Size]]:
            return [(mesh.axes.index(mark), outer) for mark, outer, _ in marks]  # the names of the axes may differ

        return source.shape == target.shape and places(x, source) == places(out, target)

    def moves(self, source: Mesh, target: Mesh) -> tuple[Move, ...]:
        pairs = zip(source.devices, target.devices, strict=True)
        return tuple(Move(s, d, (0, 1), (0, 1)) for s, d in pairs)
