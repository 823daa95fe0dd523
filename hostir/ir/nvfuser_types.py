"""The types behind the printed tensors of an nvFuser dump: meshes, what lies on devices, what is a partial sum."""

from __future__ import annotations

from collections.abc import Collection

from hostir.ir.nvfuser_axes import REDUCING, Axes
from hostir.ir.nvfuser_layout import Group, Sizes
from hostir.ir.nvfuser_syntax import CommunicationNode, ComputeNode, Devices, Dump, IterDomain, Tensor, ViewNode
from hostir.ir.sizes import ONE, Size
from hostir.ir.source import Span, error
from hostir.ir.types import Axis, Factor, Mesh, TensorType


class Types:
    """Gives printed tensors their types, and notes in `sizes` what these force to be equal."""

    def __init__(self, dump: Dump) -> None:
        self.sizes = Sizes(dump.symbols)
        self.meshes: dict[Devices | None, Mesh] = {}
        printed = [t.devices for t in dump.tensors() if t.devices]
        for devices in dict.fromkeys(printed or [_unprinted_devices(dump)]):
            self.meshes[devices] = _mesh(devices, len(self.meshes))
        self.meshes[None] = next(iter(self.meshes.values()))
        self.partials = self._partials(dump)
        letters = {axis: letter for mesh in self.meshes.values() for letter, axis in _letters(mesh).items()}
        parts = {name: {letters[mark] for mark in marks} for name, marks in self.partials.items()}
        self.axes = Axes(dump, parts, lambda node: letters[self.over(node)])

    def mesh(self, tensor: Tensor) -> Mesh:
        return self.meshes[tensor.devices]

    def mark(self, on: str, mesh: Mesh, span: Span) -> str:
        """The mesh axis that is deviceIdx.x or deviceIdx.y."""
        axes = _letters(mesh)
        if on not in axes:
            expected = "deviceIdx.x" if on == "y" else "deviceIdx.x or deviceIdx.y"
            raise error(f"a mesh of {len(axes)} axes has no such axis", span, expected=expected)
        return axes[on]

    def logical(self, tensor: Tensor, partial: Collection[str] | None = None) -> tuple[list[Group], tuple[str, ...]]:
        """The logical axes, reduced ones included, and the mesh axes over which the tensor is a partial sum.

        nvFuser prints a partial sum with one more axis, on the devices that hold its parts: `partial` says over which
        mesh axes. Where it is None, the axis that a matmul leaves (marked `rf`) counts, and one that is reduced later.
        """
        mesh, kept, over = self.mesh(tensor), [], []
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

    def type_of(self, tensor: Tensor, *, sliced: bool, partial: Collection[str] | None = None) -> TensorType:
        """The type of a printed tensor. Where it is `sliced`, it holds one round's slice of its Stream axis."""
        mesh = self.mesh(tensor)
        kept, over = self.logical(tensor, partial)
        axes = tuple(self.axis(group, mesh, sliced) for group in kept if not group.reduced)
        if len(streams := [d for group in kept for d in group.domains if d.on == "stream"]) > 1:
            raise error(f"{tensor.name} has {len(streams)} streamIdx axes", streams[1].span, expected="at most one")
        marks = [*over, *(m for axis in axes for m in axis.marks)]
        if twice := next((m for m in marks if marks.count(m) > 1), None):
            expected = "each mesh axis at most once"
            raise error(f"two axes of {tensor.name} lie on {twice}", tensor.span, expected=expected)
        return TensorType(tensor.dtype, axes, mesh, over)

    def axis(self, group: Group, mesh: Mesh, sliced: bool) -> Axis:
        factors = []
        for domain in group.domains:
            on = self.mark(domain.on, mesh, domain.span) if domain.on in ("x", "y") else None
            if on:
                self.devices_fit(domain, mesh)
            factors.append(Factor(ONE if sliced and domain.on == "stream" else domain.extent.size, on))
        return Axis(tuple(factors)).normal()

    def devices_fit(self, domain: IterDomain, mesh: Mesh) -> None:
        """A device axis has as many entries as its mesh axis has devices."""
        devices = mesh.size(self.mark(domain.on, mesh, domain.span))
        if not self.sizes.equal(domain.extent.size, Size(devices)):
            message = f"{devices} devices cannot hold an axis of {domain.extent.size}, one entry each"
            raise error(message, domain.span, expected=f"an extent of {devices}")

    def over(self, node: CommunicationNode) -> str:
        """The mesh axis along which the team of a collective lies."""
        mesh = self.mesh(node.x)
        along = [axis for axis in reversed(mesh.axes) if node.team in mesh.teams(axis)]
        if not along:
            teams = ", ".join(f"({' '.join(map(str, team))})" for axis in mesh.axes for team in mesh.teams(axis)[:1])
            given = " ".join(map(str, node.team))
            raise error(f"the team ({given}) is no row or column of the mesh", node.span, expected=f"such as {teams}")
        used = {self.mark(d.on, mesh, d.span) for t in node.tensors for d in t.domains if d.on in ("x", "y")}
        return next((axis for axis in along if axis in used), along[0])

    def _partials(self, dump: Dump) -> dict[str, set[str]]:
        """The tensors that hold partial sums, with the mesh axes: what leads to a reducing communication, backwards.

        Inputs, and their views and copies, do not: a device axis of theirs holds summands side by side.
        """
        nodes = [n for n in dump.walk() if isinstance(n, (ViewNode, ComputeNode, CommunicationNode))]
        found: dict[str, set[str]] = {}
        given = {t.name for t in dump.inputs}
        for node in nodes:
            if _same_elements(node) and node.tensors[0].name in given:
                given.add(node.out.name)
        for node in reversed(nodes):
            if isinstance(node, CommunicationNode) and node.type.text in REDUCING:
                found.setdefault(node.x.name, set()).add(self.over(node))
            elif _same_elements(node) and node.out.name in found:
                marks = found[node.out.name]
                if isinstance(node, ViewNode) and node.over:
                    marks = marks - {self.mark(node.over, self.mesh(node.x), node.span)}
                found.setdefault(node.tensors[0].name, set()).update(marks)
        return {name: marks for name, marks in found.items() if name not in given}


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
    """The axes of a mesh by their letter in deviceIdx."""
    return dict(zip(("x", "y"), reversed(mesh.axes), strict=False))


def _unprinted_devices(dump: Dump) -> Devices:
    """Where a dump prints no mesh: the first team that communicates, else as many devices as a device axis is long."""
    teams = [n.team for n in dump.walk() if isinstance(n, CommunicationNode)]
    device_axes = [d for t in dump.tensors() for d in t.domains if d.on in ("x", "y")]
    lengths = [n for d in device_axes if (n := d.extent.size.value) is not None]
    if not teams and lengths and lengths[0] > 1 << 16:
        message = f"a device axis of {lengths[0]}, and no mesh is printed"
        raise error(message, device_axes[0].span, hint="add (DeviceMesh{..})")
    return Devices((teams[0] if teams else tuple(range(lengths[0] if lengths else 1)),), False)
