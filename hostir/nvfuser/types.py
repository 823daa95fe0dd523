"""Compute the types of the printed tensors of a dump: their meshes, sharded axes and partial sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hostir.ir.sizes import ONE, Size
from hostir.ir.source import Span, error
from hostir.ir.types import Axis, Factor, Mesh, TensorType
from hostir.nvfuser.axes import LogicalAxis, readings
from hostir.nvfuser.choosing import REDUCING, Axes, Computation
from hostir.nvfuser.equal_sizes import EqualSizes
from hostir.nvfuser.nodes import CommunicationNode, ComputeNode, Devices, Dump, IterDomain, TensorNode, ViewNode


@dataclass(frozen=True)
class Unprinted:
    """The distribution of a tensor over a mesh axis for which the dump prints no device axis.

    Fields:
        mark: the mesh axis.
        axis: the index of the tensor's axis that is sharded over the mesh axis; None if the tensor is a partial sum
            over the mesh axis.
    """

    mark: str
    axis: int | None


class Types:
    """Computes the types of printed tensors.

    Fields:
        sizes: the sizes that the dump forces to be equal.
        meshes: the mesh of each printed DeviceMesh. The key None stands for tensors that are printed without a mesh.
        partials: a map from the name of each partial sum to the mesh axes along which each rank holds one term.
        unprinted: the distributions that the dump does not print, by the name of the tensor.
        axes: the logical axes of each printed tensor.
    """

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
        """Return the name of the mesh axis for a device axis. `on` is x for deviceIdx.x, and y for deviceIdx.y."""
        axes = _letters(mesh)
        if on not in axes:
            expected = "deviceIdx.x" if on == "y" else "deviceIdx.x or deviceIdx.y"
            raise error(f"a mesh of {len(axes)} axes has no such axis", span, expected=expected)
        return axes[on]

    def logical(
        self, tensor: TensorNode, partial: Collection[str] | None = None
    ) -> tuple[list[LogicalAxis], tuple[str, ...]]:
        """Return the logical axes of a printed tensor, and the mesh axes over which the tensor is a partial sum.

        The logical axes include reduced axes. nvFuser prints a partial sum with an additional device axis, which holds
        its terms. Such a device axis is not among the returned axes. A program written by hand may lack the additional
        device axis (see `_unprinted`).

        Args:
            tensor: the printed tensor.
            partial: the mesh axes over which the tensor may be a partial sum. If it is None, the dump decides: a device
                axis holds the terms of a partial sum if it is marked `rf`, or if a later communication reduces it.
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
        """Return the type of a printed tensor.

        Args:
            tensor: the printed tensor.
            sliced: True if the value holds only the slice of the current round of a loop.
            partial: the mesh axes over which the tensor may be a partial sum (see `logical`).
        """
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
        """Return the axis of a tensor type for a logical axis of nvFuser.

        Args:
            group: the logical axis.
            mesh: the mesh of the tensor.
            sliced: True if the value holds only one slice. Then its stream axis has extent 1.
            unprinted: a mesh axis that shards the axis although the dump does not print this; empty if there is no such
                mesh axis.
        """
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
        """Raise a HostIRError if the extent of a device axis is not the number of devices along the mesh axis."""
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
        """Return a map from the name of each partial sum to the mesh axes along which each rank holds one term.

        The operand of a reducing communication is a partial sum. If this operand is a view or a copy of another tensor,
        the other tensor is a partial sum, too. But inputs, and views and copies of inputs, are never partial sums,
        because they hold the addends along an axis.
        """
        nodes = [n for n in dump.walk() if isinstance(n, (ViewNode, ComputeNode, CommunicationNode))]
        partials: dict[str, set[str]] = {}
        input_names = {t.name for t in dump.inputs}
        for node in nodes:
            if _same_elements(node) and node.tensors[0].name in input_names:
                input_names.add(node.out.name)
        for node in reversed(nodes):
            if isinstance(node, CommunicationNode) and node.type.text in REDUCING:
                partials.setdefault(node.x.name, set()).add(self.over(node))
            elif _same_elements(node) and node.out.name in partials:
                marks = partials[node.out.name]
                if isinstance(node, ViewNode) and node.over:
                    marks = marks - {self.mark(node.over, self.mesh(node.x), node.span)}
                partials.setdefault(node.tensors[0].name, set()).update(marks)
        return {name: marks for name, marks in partials.items() if name not in input_names}

    def _unprinted(self, dump: Dump) -> dict[str, Unprinted]:
        """Return the distributions for which the dump prints no device axis, by the name of the tensor.

        Programs written by hand, such as the programs of nvFuser's tutorial, print each tensor with the extents of one
        rank's part. A reducing communication then shows the sharding. If it sums the results of the ranks' matmuls, the
        contracted axis of the matmul is sharded over the ranks. The result of a ReduceScatter is sharded along its
        first axis.
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
    """Find tensors that are spread over the devices of a reducing communication without a printed device axis.

    Return a map from the name of each such tensor to the index of its sharded axis, or to None for a partial sum.

    The result is empty if the communication does not sum the result of a matmul. It is also empty if the contracted
    axis of the matmul cannot be traced back to inputs, or to tensors that are printed with a device axis.

    Args:
        node: the communication.
        makers: the node that makes each tensor, by the name of the tensor.
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
    """Return the pairs of axes that a computation matches. An axis is given as the name of its tensor and its index."""
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
    """Return a map from the letters of deviceIdx to mesh axes. x is the last axis of the mesh, y the axis before it."""
    return dict(zip(("x", "y"), reversed(mesh.axes), strict=False))


def _unprinted_devices(dump: Dump) -> Devices:
    """Return the devices for a dump that prints no mesh.

    These devices are the team of the dump's first communication. If the dump has no communication, the number of
    devices is the extent of the first device axis. If the dump has no device axis either, there is one device.
    """
    teams = [n.team for n in dump.walk() if isinstance(n, CommunicationNode)]
    device_axes = [d for t in dump.tensors() for d in t.domains if d.on in ("x", "y")]
    lengths = [n for d in device_axes if (n := d.extent.size.value) is not None]
    if not teams and lengths and lengths[0] > 1 << 16:
        message = f"a device axis of {lengths[0]}, and no mesh is printed"
        raise error(message, device_axes[0].span, hint="add (DeviceMesh{..})")
    return Devices((teams[0] if teams else tuple(range(lengths[0] if lengths else 1)),), False)
