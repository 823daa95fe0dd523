"""Turn the nodes of a dump into a host program, statement by statement."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hostir.ir import comm_ops as comm
from hostir.ir import host_ops as host
from hostir.ir import tensor_ops as ops
from hostir.ir import view_ops as views
from hostir.ir.op import Phase, Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import Diagnostic, Span, did_you_mean, error
from hostir.ir.types import Kind, TensorType
from hostir.nvfuser.builder import Builder
from hostir.nvfuser.choosing import REDUCING, operation
from hostir.nvfuser.equal_sizes import computed, equate, maps_of, pairwise, with_canonical_sizes
from hostir.nvfuser.nodes import (
    AllocateNode,
    CommunicationNode,
    ComputeNode,
    DeallocateNode,
    DelayNode,
    Dump,
    LoopNode,
    Node,
    StreamNode,
    TensorNode,
    ViewNode,
    WaitNode,
    walk,
)
from hostir.nvfuser.tokens import Token

COLLECTIVES: dict[str, type[comm.Collective]] = {
    "Allgather": comm.AllGather,
    "Allreduce": comm.AllReduce,
    "ReduceScatter": comm.ReduceScatter,
    "AllToAll": comm.AllToAll,
}
TRANSFERS: dict[str, type[comm.Transfer]] = {
    "Broadcast": comm.Broadcast,
    "Gather": comm.Gather,
    "Scatter": comm.Scatter,
    "SendRecv": comm.SendRecv,
}
V = TypeVar("V", bound=views.ViewStatement)


class DumpReader(Builder):
    """Translates one dump into a host program, node by node.

    Fields:
        dump: the dump.
        file: the name of the dump's file.
        selected: the selects so far, by the names of their results.
        transfers: the roots with which each transfer so far was printed. The key of a transfer consists of its type,
            the name of its operand and the name of its result.
        merged: the numbers of printed communications that were merged into an earlier communication.
        uses: the number of times that the dump names each tensor.
    """

    def __init__(self, dump: Dump, file: str) -> None:
        super().__init__(dump)
        self.dump = dump
        self.file = file
        self.selected: dict[str, host.Select] = {}
        self.transfers: dict[tuple[str, str, str], set[str]] = {}
        self.merged: set[str] = set()
        self.uses = Counter(t.name for t in (*dump.tensors(), *dump.outputs))

    def program(self) -> tuple[Program, list[Diagnostic]]:
        inputs = tuple(self.bind(t, self.types.type_of(t, sliced=False)) for t in self.dump.inputs)
        for node in self.dump.body:
            self.node(node)
        warnings: list[Diagnostic] = []
        outputs = tuple(v for t in self.dump.outputs if (v := self.output(t, warnings)))
        self.free_the_rest(outputs)
        meshes = tuple(dict.fromkeys(self.types.meshes.values()))
        name = re.sub(r"\W+", "_", Path(self.file).stem, flags=re.ASCII).strip("_") or "dump"
        name = name if name[0].isalpha() else f"dump_{name}"
        sizes = self.types.sizes
        program = Program(
            name, Phase.HOST, meshes, inputs, outputs, tuple(self.body), self.streams.count, sizes.aliases
        )
        return with_canonical_sizes(program, sizes), warnings

    def output(self, tensor: TensorNode, warnings: list[Diagnostic]) -> Value | None:
        """Return the value of a printed output. If the output is only in a loop, add a warning and return None.

        Raise HostIRError if the dump never computes the output.
        """
        if tensor.name in self.scope:
            return self.scope[tensor.name]
        if not any(tensor.name == t.name for n in self.dump.walk() for t in n.tensors):
            hint = "drop it from the list of outputs"
            raise error(f"the output {tensor.name} is never computed", tensor.span, hint=hint)
        message = f"the output {tensor.name} exists in the rounds of a loop only, so it is dropped"
        hint = "nvFuser lists views that a loop makes among the outputs; list the tensor that they show to keep it"
        warnings.append(Diagnostic(message, tensor.span, hint=hint, level="warning"))
        return None

    def node(self, node: Node) -> None:
        match node:
            case LoopNode():
                self.loop(node)
            case StreamNode():
                self.stream(node)
            case AllocateNode(out=out):
                if node.always or out.name not in self.scope:
                    self.allocate(out)
            case DeallocateNode(x=x):
                self.emit(host.FreeBuffer(self.tensor(x)), node.span)
            case ViewNode(op="select"):
                self.select(node, self.tensor(node.x))
            case ViewNode(op="chunk"):
                self.chunk(node, self.tensor(node.x))
            case ViewNode():
                self.view(node)
            case ComputeNode():
                self.compute(node)
            case CommunicationNode():
                self.communication(node)
            case DelayNode(microseconds=microseconds):
                self.emit(host.Delay(microseconds), node.span)
            case WaitNode(number=number):
                self.wait(number, node.span)

    def stream(self, node: StreamNode) -> None:
        if node.verb == "get":
            if not isinstance(node.stream, Token):
                raise error("the current stream needs a name", node.span, expected="such as Stream 0")
            value = self.define(f"Stream {node.stream.text}", "stream", Kind.STREAM, node.span)
            self.emit(host.CurrentStream(value), node.span)
            return
        stream = self.streams.of(node.stream, self.scope, self.loops)
        self.emit(host.SetStream(stream) if node.verb == "set" else host.Synchronize(stream), node.span)

    def loop(self, node: LoopNode) -> None:
        if not self.loops:
            self.preallocate(node)
        outer, body = dict(self.scope), self.body
        name = node.index.text.replace(".", "_")
        index = self.define(f"index {node.index.text}", name, Kind.INDEX, node.index.span)
        self.loops[index] = node.count.size
        self.body = []
        self.owned.append({})
        for inner in node.body:
            self.node(inner)
        self.free_the_rest()
        del self.loops[index]
        loop = host.For(index, node.count.size, tuple(self.body))
        self.scope, self.body = outer, body
        self.emit(loop, node.span)

    def preallocate(self, loop: LoopNode) -> None:
        """Allocate, before a loop, the tensors that the loop writes slice by slice and that are also used outside it.

        Views are left out. Tensors that the dump allocates inside the loop are left out, too.
        """
        inside = list(walk(loop.body))
        uses = Counter(t.name for node in inside for t in node.tensors)
        allocated = {node.out.name for node in inside if isinstance(node, (AllocateNode, ViewNode))}
        for node in inside:
            if isinstance(node, (ComputeNode, CommunicationNode)) and node.out.name not in {*allocated, *self.scope}:
                sliced = any(d.on == "stream" and d.iter_type != "r" for d in node.out.domains)
                if sliced and self.uses[node.out.name] > uses[node.out.name]:
                    self.allocate(node.out)

    def view(self, node: ViewNode) -> None:
        x = self.operand(node.x)
        over = self.types.mark(node.over, self.types.mesh(node.x), node.span) if node.over else ""
        partial = (*x.tensor.partial, over)
        out = self.operand(node.out) if node.out.name in self.scope else None
        printed = self.types.type_of(node.out, sliced=self.sliced(node.out), partial=partial)
        target = self.bind(node.out, printed) if out is None else self.temporary(node.out, printed)
        view: views.ViewStatement = views.Reshape(x, target)
        if node.op == "permute":
            view = views.Permute(x, target, self.order(node))
        elif node.op == "dense":
            view = host.Dense(x, target)
        elif over:
            view = host.AsPartial(x, target, over)
        self.emit(self.inferred(view, node), node.span)
        if out is not None:  # the view is written to existing memory
            self.same_shape(out, target, node.span)
            self.emit(ops.DenseCopy(out, target), node.span)

    def inferred(self, view: V, node: ViewNode) -> V:
        """Return the view with the type that its operand implies.

        Raise if the shape of this type is not the printed shape.
        """
        printed, name = view.out.tensor, node.out.name
        view = replace(view, span=node.span)
        type = view.infer()
        if not isinstance(type, TensorType):
            return view
        if len(type.axes) != len(printed.axes):
            message = f"{name} is printed with {len(printed.axes)} axes, but {view.keyword()} gives {len(type.axes)}"
            raise error(message, node.out.span)
        pairs = pairwise(type, f"{view.keyword()} of {node.x.name}", printed, name)
        equate(self.types.sizes, pairs, node.span)
        out = replace(view.out, type=type)
        if self.scope.get(name) == view.out:
            self.scope[name] = out
        return replace(view, out=out)

    def select(self, node: ViewNode, x: Value) -> None:
        assert node.axis is not None
        assert node.index is not None
        kept = [g for g in self.types.logical(node.x, x.tensor.partial)[0] if not g.reduced]
        axis = next((k for k, g in enumerate(kept) if node.axis.number in [d.number for d in g.domains]), None)
        if axis is None or len(kept[axis].domains) > 1:
            raise error(f"the selected axis is not one of the axes of {node.x.name}", node.axis.span)
        index = self.streams.index(node.index, self.scope)
        before = self.scope.get(node.out.name)
        old = self.selected.get(before.name) if before else None
        if old and (old.x, old.axis, old.index) == (x, axis, index):
            return  # nvFuser may print the same select several times
        printed = self.types.type_of(node.out, sliced=self.sliced(node.out), partial=x.tensor.partial)
        view = self.inferred(host.Select(x, self.bind(node.out, printed), index, axis), node)
        self.selected[view.out.name] = view
        self.emit(view, node.span)

    def chunk(self, node: ViewNode, x: Value) -> None:
        assert node.index is not None
        cut = self.cut(node.out, x) or self.cut(node.x, x)
        if cut is None:
            raise error(f"neither {node.x.name} nor {node.out.name} has a streamIdx axis", node.span)
        axis, count = cut
        printed = self.types.type_of(node.out, sliced=True, partial=x.tensor.partial)
        view = host.Chunk(x, self.bind(node.out, printed), self.streams.index(node.index, self.scope), count, axis)
        self.unsliced.discard(view.out.name)
        self.emit(self.inferred(view, node), node.span)

    def order(self, node: ViewNode) -> tuple[int, ...]:
        """Return the order of the axes in a permute: for each axis of the result, the index of the operand's axis.

        The order follows from the printed numbers of the result's axes, because nvFuser assigns these numbers in the
        order of the operand's axes.
        """
        numbers = [min(d.number for d in g.domains) for g in self.types.logical(node.out)[0] if not g.reduced]
        return tuple(sorted(numbers).index(n) for n in numbers)

    def compute(self, node: ComputeNode) -> None:
        if node.op == "copy" and self.shards(node):
            return
        out = self.destination(node.out)
        statement = self.computation(node, out, [self.tensor(t) for t in node.operands])
        cut = self.cut(node.out, out) if self.loops else None
        if cut:
            statement = self.computation(node, out, self.slices(node, statement, *cut))
        equate(self.types.sizes, computed(statement), node.span)
        self.emit(statement, node.span)

    def computation(self, node: ComputeNode, out: Value, operands: Sequence[Value]) -> ops.TensorOp:
        if node.op == "sum":
            return ops.Sum(out, operands[0], self.summed(node, operands[0], out))
        return operation(node, out, operands)

    def slices(self, node: ComputeNode, unsliced: ops.TensorOp, axis: int, count: Size) -> list[Value]:
        """Return the operands with which a computation computes one slice of its result.

        An operand that has the sliced axis is replaced by its slice.

        Args:
            node: the printed computation.
            unsliced: the computation of the complete result.
            axis: the axis of the result that is cut into slices.
            count: the number of slices.
        """
        operands = []
        for tensor, value, map in zip(node.operands, unsliced.operands, maps_of(unsliced), strict=True):
            sliced = [k for k, to in enumerate(map[: len(value.tensor.axes)]) if to == axis]
            spread = sliced and value.tensor.shape[sliced[0]].is_one
            operands.append(self.slice(value, sliced[0], count, tensor) if sliced and not spread else value)
        return operands

    def shards(self, node: ComputeNode) -> bool:
        """If a printed `Set` shards its operand, translate it to a `shard`, and return True. Otherwise return False.

        A `Set` shards its operand if the result is sharded over devices over which the operand is not sharded.
        """
        x = self.tensor(node.operands[0])
        out = self.operand(node.out) if node.out.name in self.scope else None
        type = out.tensor if out else self.type_of(node.out)
        if type.mesh != x.tensor.mesh or not _marks(type) - _marks(x.tensor):
            return False
        x = self.operand(node.operands[0])
        target = self.temporary(node.out, type) if out else self.bind(node.out, type)
        self.same_shape(x, target, node.span)
        self.emit(views.Shard(x, target), node.span)
        if out:
            self.emit(ops.DenseCopy(out, target), node.span)
        return True

    def summed(self, node: ComputeNode, x: Value, out: Value) -> int:
        """Return the index of the axis that a reduction sums over. The printed result shows it as a reduced axis."""
        kept, _ = self.types.logical(node.out, out.tensor.partial)
        reduced = [k for k, group in enumerate(kept) if group.reduced]
        if len(reduced) != 1 or len(kept) != len(x.tensor.axes):
            expected = (
                f"the {len(x.tensor.axes)} axes of {node.operands[0].name} in {node.out.name}, one of them reduced"
            )
            raise error(f"this reduction sums {len(reduced)} axes", node.span, expected=expected)
        axis = self.types.axis(kept[reduced[0]], self.types.mesh(node.out), sliced=self.sliced(node.out))
        summand = ((x.tensor.shape[reduced[0]], x, reduced[0]), (axis.extent, node.out.name, reduced[0]))
        equate(self.types.sizes, [summand], node.span)
        return reduced[0]

    def communication(self, node: CommunicationNode) -> None:
        communication, x = node.type.text, self.operand(node.x)
        key = f"Communication {node.number}"
        if communication in TRANSFERS:
            out = self.destination(node.out)
            part = self.merges(node, x, out)
            self.same_shape(x, out, node.span)
            if not part:
                handle = self.define(key, f"h{node.number}", Kind.HANDLE, node.span)
                self.emit(TRANSFERS[communication](x, out, handle), node.span)
            return
        if communication not in COLLECTIVES:
            known = (*COLLECTIVES, *TRANSFERS)
            hint = (
                "reduce to every rank (Allreduce)" if communication == "Reduce" else did_you_mean(communication, known)
            )
            message = f"a communication of type {communication} has no meaning here"
            raise error(message, node.type.span, expected=f"one of: {', '.join(known)}", hint=hint)
        over = self.types.over(node)
        if communication in REDUCING and over not in x.tensor.partial:
            x = self.summand(x, over, node)
        out = self.destination(node.out)
        self.same_shape(x, out, node.span)
        handle = self.define(key, f"h{node.number}", Kind.HANDLE, node.span)
        self.emit(COLLECTIVES[communication](x, out, handle, over), node.span)

    def summand(self, x: Value, over: str, node: CommunicationNode) -> Value:
        """Convert the operand of a reducing communication to a partial sum, and return the partial sum.

        The operand `x` holds the addends along a device axis. nvFuser's communications accept such an operand, but
        hostir's communications do not. So this method appends a `sum` over the device axis to the program. On each
        rank, this axis has one entry. The result of the `sum` is a partial sum over the mesh axis `over`.
        """
        axis = x.tensor.axis_on(over)
        if axis is None:
            hint = "a reducing communication starts from a tensor with one axis on the devices of its team"
            raise error(f"{node.x.name} holds nothing to sum over {over}", node.x.span, hint=hint)
        axes = tuple(a for k, a in enumerate(x.tensor.axes) if k != axis)
        type = replace(x.tensor, axes=axes, partial=tuple(sorted((*x.tensor.partial, over))))
        sum = self.temporary(node.x, type)
        self.emit(host.Allocate(sum), node.span)
        self.emit(ops.Sum(sum, x, axis), node.span)
        return sum

    def merges(self, node: CommunicationNode, x: Value, out: Value) -> bool:
        """Return True if a printed transfer belongs to a statement that an earlier printed transfer has added.

        nvFuser prints one Gather for each receiver, and one SendRecv for each pair of devices. In a host program, one
        statement represents all of them.

        Raise HostIRError if a host program cannot express a transfer with this root or this team.
        """
        communication, source, target = node.type.text, self.types.mesh(node.x), self.types.mesh(node.out)
        common = [d for d in source.devices if d in target.devices]
        roots = {
            "Broadcast": source.devices[:1],
            "Scatter": tuple([*common, *source.devices][:1]),
            "Gather": target.devices,
            "SendRecv": source.devices,
        }[communication]
        if not set(node.team) <= {*source.devices, *target.devices}:
            raise error("the team has devices that neither mesh has", node.span)
        if node.root is None:
            return False
        digits = node.root.text if isinstance(node.root, Token) and node.root.text.isdecimal() else ""
        root = int(digits) if digits else -1
        if root not in roots and not (0 <= root < len(node.team) and node.team[root] in roots):
            hint = "a root that changes from round to round, as in nvFuser's broadcast pipelines, has no meaning here"
            expected = f"root={' or '.join(map(str, roots))}"
            raise error(f"{communication} from this root has no meaning here", node.span, expected=expected, hint=hint)
        seen = self.transfers.setdefault((communication, x.name, out.name), set())
        part = bool(seen) and digits not in seen and communication in ("Gather", "SendRecv")
        seen.add(digits)
        if part:
            self.merged.add(node.number)
        return part

    def wait(self, number: str, span: Span) -> None:
        handle = self.scope.get(f"Communication {number}")
        if handle is not None:
            self.emit(host.Wait(handle), span)
        elif number not in self.merged:
            hint = "a communication is waited for in the round that starts it"
            raise error(f"Communication {number} is not in flight here", span, hint=hint)


def _marks(type: TensorType) -> set[str]:
    return {mark for axis in type.axes for mark in axis.marks}
