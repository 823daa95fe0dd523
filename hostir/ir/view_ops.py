"""Define view statements of fusions and host programs. The result is the same memory with another shape or type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hostir.ir.op import BOTH, Alias, Define, Ints, Phase, Shape, Statement, ViewStrides, statement
from hostir.ir.sharding import flat_marks, leads
from hostir.ir.sizes import product
from hostir.ir.source import described
from hostir.ir.types import TensorType

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


@dataclass(frozen=True, eq=False, repr=False)
class ViewStatement(Statement):
    """The base class of views: the result is the same memory with another shape or type."""

    phases: ClassVar[frozenset[Phase]] = BOTH
    on_host: ClassVar[bool] = True
    uncut: ClassVar[bool] = True

    x: Alias
    out: Define

    def view(self, frame: Frame, x: Any) -> Any:
        """Return the handle of the view. `x` is the machine's handle of the operand."""
        raise AssertionError(type(self).__name__)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.out.tensor.mesh):
            frame[self.out] = self.view(frame, frame[self.x])


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Reshape(ViewStatement):
    """The same elements in another shape. No element may move to another rank.

    Example: %y: f32[8@didx, 4, 32] = reshape %x: f32[32@didx, 32]
    """

    syntax = "{out} = reshape {x}"

    def verify(self) -> None:
        old, new = self.x.tensor, self.out.tensor
        if old.dtype != new.dtype:
            raise self.fail(f"reshape cannot change {old.dtype} to {new.dtype}", hint="use cast")
        if product(old.shape) != product(new.shape):
            raise self.fail(f"{self.x} has {product(old.shape)} elements, {self.out} has {product(new.shape)}")

    def verify_layout(self) -> None:
        old, new = self.x.tensor, self.out.tensor
        if old.mesh and new.mesh and flat_marks(old) != flat_marks(new):
            raise self.fail(
                f"reshape would move elements between ranks: {old} to {new}",
                expected="every sharded axis to keep the elements of each rank",
                hint="change the sharding first, or split the sharded axis so that its outer part has the mesh's size",
            )

    def strides(self, of: ViewStrides) -> Shape:
        return of.reshaped(self.out.tensor.local_shape)

    def view(self, frame: Frame, x: Any) -> Any:
        return frame.machine.reshape(x, frame.shape(self.out.tensor))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Permute(ViewStatement):
    """Permutes the axes: axis `i` of the result is axis `axes[i]` of `x`.

    Example: %y: f32[32, 16] = permute %x: f32[16, 32] (1, 0)
    """

    syntax = "{out} = permute {x} {axes}"
    axes: Ints

    def infer(self) -> TensorType:
        type = self.x.tensor
        if sorted(self.axes) != list(range(len(type.axes))):
            raise self.fail(
                f"{described(self.axes)} is not an order of the {len(type.axes)} axes of {self.x}",
                expected=f"each of {tuple(range(len(type.axes)))} once",
            )
        return type.with_axes(type.axes[i] for i in self.axes)

    def verify(self) -> None:
        self.infer()

    def strides(self, of: ViewStrides) -> Shape:
        return of.permuted(self.axes)

    def view(self, frame: Frame, x: Any) -> Any:
        return frame.machine.permute(x, self.axes)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Shard(ViewStatement):
    """Shards a replicated tensor without communication: each rank takes a view of its block.

    Example: %y: f32[8@didx, 32] = shard %x: f32[8, 32]
    """

    syntax = "{out} = shard {x}"

    def _moved(self) -> list[tuple[int, str]]:
        """Return a pair for each axis that becomes sharded: the index of the axis, and the mesh axis that shards it."""
        pairs = zip(self.x.tensor.axes, self.out.tensor.host().axes, strict=True)
        return [(k, mark) for k, (old, new) in enumerate(pairs) for mark in new.marks if mark not in old.marks]

    def verify(self) -> None:
        old, new = self.x.tensor, self.out.tensor
        for value in (self.x, self.out):
            if value.tensor.mesh is None:
                raise self.fail(
                    f"{value} is 'auto': it has no mesh yet to be sharded over",
                    expected="both types of a shard written out",
                    hint=f"remove 'auto' from the type of {value}",
                )
        if (
            len(old.axes) != len(new.axes)
            or old.dtype != new.dtype
            or old.mesh != new.mesh
            or old.partial != new.partial
        ):
            raise self.fail(f"shard keeps everything but the sharding: {old} to {new}")
        marks = [mark for _, mark in self._moved()]
        if not marks or new.with_axes(a.without(*marks) for a in new.axes).host() != old.host():
            raise self.fail(f"shard only spreads replicated axes: {old} to {new}")
        for k, mark in self._moved():
            if not leads(new, mark, [new.host().axes[k]]):
                raise self.fail(
                    f"the blocks of a rank are not contiguous in {new.axes[k]}",
                    hint="reshape first, so that the blocks over the ranks become a separate axis",
                )

    def strides(self, of: ViewStrides) -> Shape:
        return of.same()

    def view(self, frame: Frame, x: Any) -> Any:
        mesh, rank = self.out.tensor.mesh, frame.machine.rank
        if rank is None or mesh is None:
            return x
        for k, mark in self._moved():
            x = frame.machine.chunk(x, k, 1, mesh.size(mark), frame.place(mesh, mark))
        return x
