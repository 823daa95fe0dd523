"""The host program of a fusion while it is built: statements outside loops, and the buffers of all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hostir.ir import Phase, Program, Statement, TensorType, Value
from hostir.ir.comm_ops import AllReduce, Communication
from hostir.ir.host_ops import Allocate, AsPartial
from hostir.ir.op import Codec
from hostir.ir.program import Names
from hostir.ir.view_ops import ViewOp
from hostir.lower.scope import Scope
from hostir.lower.sharding import result_of


class Host(Scope):
    """Builds the host program of a fusion."""

    def __init__(self, program: Program) -> None:
        super().__init__(Names.of(program))
        self.program = program
        self.values = {v.name: replace(v, type=v.tensor.host()) for v in program.inputs}
        self.dense |= self.values.keys()
        self.users: dict[str, list[Statement]] = {}
        for s in program.body:
            for v in s.values(Codec.READ, Codec.ALIAS):
                self.users.setdefault(v.name, []).append(s)
        self.outputs = {v.name for v in program.outputs}

    def whole(self, s: Statement) -> None:
        """A statement outside any loop: its result is a buffer of its own, or a view."""
        out = result_of(s)
        if isinstance(s, ViewOp):
            self.values[out.name] = replace(out, type=out.tensor.host())
            moved = s.rename(self.values)
            assert isinstance(moved, ViewOp)
            self.view(moved)
            return
        self.destination(out)
        moved = s.rename(self.values)
        if isinstance(moved, Communication):
            self.communicate(moved)
        else:
            self.body.append(moved)

    def destination(self, out: Value) -> Value:
        """The buffer of a result, made where it has none."""
        if out.name not in self.values:
            self.values[out.name] = self.buffer(out)
        return self.values[out.name]

    def scratch(self, wish: str, type: TensorType, like: Value) -> Value:
        buffer = Value(self.names.fresh(wish), type, like.span)
        self.body.append(Allocate(buffer, span=like.span))
        self.dense.add(buffer.name)
        return buffer

    def buffer(self, value: Value) -> Value:
        """A buffer for a value; for what only an allreduce reads, the buffer that the allreduce fills."""
        host = replace(value, type=value.tensor.host())
        self.dense.add(host.name)
        reduce = self.only_reduced(value)
        if reduce is None:
            self.body.append(Allocate(host, span=value.span))
            return host
        self.body.append(AsPartial(self.destination(reduce.out), host, reduce.over, span=value.span))
        return host

    def finished(self, streams: int = 0) -> Program:
        """The host program, once every statement of the fusion has been added."""
        inputs, outputs = (tuple(self.values[v.name] for v in vs) for vs in (self.program.inputs, self.program.outputs))
        body = tuple(self.body)
        return Program(self.program.name, Phase.HOST, self.program.meshes, inputs, outputs, body, streams)

    def used_outside(self, value: Value, inside: Collection[str]) -> bool:
        """Whether a value is an output, or read by a statement whose result is not among these."""
        users = self.users.get(value.name, [])
        return value.name in self.outputs or any(result_of(u).name not in inside for u in users)

    def only_reduced(self, value: Value) -> AllReduce | None:
        """The allreduce that is the one user of a value."""
        users = self.users.get(value.name, [])
        lone = users[0] if len(users) == 1 and value.name not in self.outputs else None
        return lone if isinstance(lone, AllReduce) else None
