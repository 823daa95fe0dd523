"""Define the tensors of a fusion. Users annotate them with their sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hostir.dsl.mesh import DeviceMesh, ParallelType
from hostir.ir.sizes import Size
from hostir.ir.source import Span, described, error, user_span
from hostir.ir.types import STREAM, Axis, DType, Factor

SizeLike = int | str | Size


class Owner(Protocol):
    """The attributes and methods of a fusion that its tensors use."""

    name: str

    def size(self, extent: SizeLike, span: Span | None) -> Size:
        """Return `extent` as a size. Raise if it has a symbol that does not occur in the shape of any input."""


class TensorShape(tuple[Size, ...]):
    """The sizes of a tensor's axes. The repr has the form that programs use, such as `[M, 8]`."""

    def __repr__(self) -> str:
        return f"[{', '.join(map(str, self))}]"


@dataclass
class LoopAxis:
    """An axis of a tensor, as `Tensor.axis` returns it. An axis that was split is replaced by its two parts."""

    tensor: Tensor
    position: int

    def parallelize(self, on: ParallelType | str) -> None:
        """Shard the axis over a mesh axis in equal contiguous blocks, or slice it for streams.

        `on` is the name of a mesh axis or a `hi.ParallelType`. With `Stream`, each index of the axis is a slice.

        Raises HostIRError in these cases: the tensor has no mesh yet; the mesh has no such axis; the number of ranks
        does not divide the axis; the axis is parallelized already; another axis of the tensor is on the same mesh axis;
        the tensor is a partial sum over the mesh axis.
        """
        self.tensor._mark(self.position, on, user_span())


class Tensor:
    """A tensor of a fusion: an input or a result, with the splits and the sharding of its axes.

    `x @ y`, `x + y` and `x * y` are `hi.matmul`, `hi.add` and `hi.mul`. `x - y` and `-x` work, too. `x / 3` multiplies
    by 1/3. One operand of `+`, `-` and `*` may be a number.

    If a tensor has a mesh, its axes declare its sharding. The sharding of a tensor without a mesh is inferred from the
    inputs.

    Fields:
        name: the name in the program's text, without `%`.
        dtype: the element type. `str(t.dtype)` is its name, such as `bf16`.
        shape: the shape of the unsharded tensor; splits do not change it.
        mesh: the `hi.DeviceMesh`; None until it is set.
        partial_over: the mesh axes over which each rank holds one term of a sum.
    """

    operators: ClassVar[Mapping[str, Callable[[Any, Any], Tensor]]]  # set by `hostir.dsl.functions`, which imports this
    __array_ufunc__ = None  # makes numpy use the operators below, which explain the mistake

    def __init__(self, fusion: Owner, name: str, dtype: DType, shape: Sequence[Size], span: Span | None) -> None:
        self.fusion = fusion
        self.name = name
        self.dtype = dtype
        self.shape = TensorShape(shape)
        self.span = span
        self.mesh: DeviceMesh | None = None
        self._loop = [(k, Factor(size)) for k, size in enumerate(shape)]
        self.partial_over: tuple[str, ...] = ()

    def axis(self, position: int) -> LoopAxis:
        """Return the axis at a position, for example to shard it: `t.axis(0).parallelize(hi.ParallelType.DIDx)`.

        An axis that was split is replaced by its two parts, which have new positions. A negative position
        counts from the end. Raises HostIRError if there is no such axis.
        """
        self._loop_at(position, user_span())
        return LoopAxis(self, position % len(self._loop))

    def set_device_mesh(self, mesh: DeviceMesh) -> None:
        """Put the tensor on a mesh. From then on its axes declare its sharding, and the sharding is no longer inferred.

        An axis that is not parallelized is not sharded. Raises HostIRError if an earlier annotation of the tensor does
        not fit the mesh. It does not fit if it names an axis that the mesh does not have, or if the number of ranks
        does not divide the tensor axis.
        """
        span = user_span()
        if not isinstance(mesh, DeviceMesh):
            raise error(f"not a mesh: {described(mesh)}", span, expected="a hi.DeviceMesh")
        for _, factor in self._loop:
            if factor.on and factor.on != STREAM:
                if factor.on not in mesh.names:
                    lies = f"%{self.name} lies on {factor.on}"
                    raise error(
                        f"{lies}, which the mesh does not have", span, expected=f"a mesh with an axis {factor.on}"
                    )
                self._check_extent(factor.extent, factor.on, mesh, span)
        if missing := [name for name in self.partial_over if name not in mesh.names]:
            what = f"%{self.name} is a partial sum over {missing[0]}, which the mesh does not have"
            raise error(what, span, expected=f"a mesh with an axis {missing[0]}")
        self.mesh = mesh

    def split(self, position: int, outer: SizeLike) -> None:
        """Split an axis of size E into two axes: an outer axis of size `outer`, and an inner axis of size E / outer.

        The positions of all axes after the split axis increase by one. `shape` does not change. Raises HostIRError if
        `outer` does not divide E, and if the axis is parallelized already.
        """
        span = user_span()
        k, factor = self._loop_at(position, span)
        size = self.fusion.size(outer, span)
        if factor.on:
            already = f"axis {position} of %{self.name} already lies on {factor.on}"
            raise error(already, span, hint="split first, then parallelize")
        if not factor.extent.divisible_by(size):
            raise error(f"{size} does not divide axis {position} of %{self.name}, which is {factor.extent}", span)
        at = position % len(self._loop)
        self._loop[at : at + 1] = [(k, Factor(size)), (k, Factor(factor.extent / size))]

    def shard(self, axis: int, mesh: DeviceMesh, on: ParallelType | str = ParallelType.DIDx) -> Tensor:
        """Shard an axis over the mesh in equal contiguous blocks, and return the tensor.

        `t.shard(axis, mesh, on)` calls `t.set_device_mesh(mesh)` and `t.axis(axis).parallelize(on)`, and raises their
        errors. If the axis has E elements, rank r of n ranks holds the elements from r * E/n up to (r + 1) * E/n.
        """
        self.set_device_mesh(mesh)
        self._mark(axis, on, user_span())
        return self

    def partial(self, mesh: DeviceMesh, on: ParallelType | str = ParallelType.DIDx) -> Tensor:
        """Declare that the tensor is a sum, and that each rank along a mesh axis holds one term; return the tensor.

        Each term has the shape of the tensor, or of a rank's part if axes are sharded over another mesh axis. If
        `hi.reshard` makes the tensor replicated, it is an all-reduce. If it makes the tensor sharded over `on`, it is a
        reduce-scatter. If a computation needs the sum, lowering adds up the terms before this computation.

        This sets the mesh, and raises the errors of `set_device_mesh`. It also raises HostIRError if the mesh has no
        axis `on`, or if an axis of the tensor is sharded over `on`.
        """
        self.set_device_mesh(mesh)
        span = user_span()
        if on is ParallelType.Stream:
            raise error("Stream is no mesh axis, over which to sum", span, expected="DIDx, DIDy or the name of an axis")
        name = mesh.axis_name(on, span)
        if any(factor.on == name for _, factor in self._loop):
            raise error(f"an axis of %{self.name} lies on {name}, over which it cannot be a sum as well", span)
        self.partial_over = tuple(sorted({*self.partial_over, name}))
        return self

    def _loop_at(self, position: int, span: Span | None) -> tuple[int, Factor]:
        count = len(self._loop)
        is_integer = isinstance(position, int) and not isinstance(position, bool)
        if not is_integer or not -count <= position < count:
            expected = f"an axis from 0 to {count - 1}" if count else "a tensor with axes"
            raise error(f"%{self.name} has no axis {described(position)}", span, expected=expected)
        return self._loop[position]

    def _check_extent(self, extent: Size, name: str, mesh: DeviceMesh, span: Span | None) -> None:
        ranks = mesh.ranks(name)
        if not extent.divisible_by(ranks):
            raise error(
                f"the mesh's {ranks} ranks do not divide an axis of {extent} in %{self.name}",
                span,
                expected=f"a multiple of {ranks}",
                hint="change the mesh, or pad the axis",
            )

    def _mark(self, position: int, on: ParallelType | str, span: Span | None) -> None:
        k, factor = self._loop_at(position, span)
        if on is ParallelType.Stream:
            name = STREAM
        elif self.mesh is None:
            raise error(f"%{self.name} has no mesh yet", span, hint=f"{self.name}.set_device_mesh(mesh) first")
        else:
            name = self.mesh.axis_name(on, span)
            self._check_extent(factor.extent, name, self.mesh, span)
        if name in self.partial_over:
            raise error(f"%{self.name} is a partial sum over {name}, on which none of its axes can lie", span)
        if factor.on == name:
            return
        if factor.on:
            raise error(f"axis {position} of %{self.name} already lies on {factor.on}", span)
        if any(f.on == name for _, f in self._loop):
            hint = "a loop slices one axis" if name == STREAM else "use a mesh of two axes, or shard only one"
            raise error(f"two axes of %{self.name} on {name}", span, expected=f"at most one axis on {name}", hint=hint)
        self._loop[position] = (k, Factor(factor.extent, name))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of `shape`, each with its sharding. An axis that was split is the product of its parts."""
        return tuple(Axis(tuple(f for j, f in self._loop if j == k)) for k in range(len(self.shape)))

    def __matmul__(self, other: Any) -> Tensor:
        return _operate("@", self, other)

    def __add__(self, other: Any) -> Tensor:
        return _operate("+", self, other)

    def __mul__(self, other: Any) -> Tensor:
        return _operate("*", self, other)

    def __sub__(self, other: Any) -> Tensor:
        return _operate("-", self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return _operate("/", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return _operate("@", other, self)

    def __radd__(self, other: Any) -> Tensor:
        return _operate("+", other, self)

    def __rmul__(self, other: Any) -> Tensor:
        return _operate("*", other, self)

    def __rsub__(self, other: Any) -> Tensor:
        return _operate("-", other, self)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _operate("/", other, self)

    def __neg__(self) -> Tensor:
        return _operate("*", self, -1)

    def __repr__(self) -> str:
        partial = f" partial({', '.join(self.partial_over)})" if self.partial_over else ""
        return f"%{self.name}: {self.dtype}[{', '.join(map(str, self.axes))}]{partial}"


def _operate(operator: str, *operands: Any) -> Tensor:
    """Add the statements for an arithmetic operator, such as `+`, to the fusion, and return their result."""
    return Tensor.operators[operator](*operands)
