"""Equality of programs up to the names of values, meshes, mesh axes and the program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hostir.ir.host_ops import For
from hostir.ir.op import Phase, Statement, Value
from hostir.ir.program import Program
from hostir.ir.types import Axis, Factor, Mesh, TensorType


def same_up_to_names(a: Program, b: Program) -> bool:
    """Return True if two programs differ in names only. Names of sizes must be equal, because users bind them."""
    return with_plain_names(a) == with_plain_names(b)


def with_plain_names(program: Program) -> Program:
    """Return the program with values v0, v1, ... and meshes m0, m1, ... in the order of their first use.

    The last mesh axis becomes x, and the axis before it y. Meshes without tensors are dropped.
    """
    return _Renamer(program.phase).program(program)


class _Renamer:
    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.meshes: dict[Mesh, Mesh] = {}
        self.count = 0

    def program(self, program: Program) -> Program:
        scope: dict[str, Value] = {}
        inputs = tuple(self.define(v, scope) for v in program.inputs)
        body = self.block(program.body, scope)
        outputs = tuple(scope[v.name] for v in program.outputs)
        meshes = tuple(self.meshes.values())
        return replace(program, name="p", meshes=meshes, inputs=inputs, outputs=outputs, body=body)

    def block(self, body: Iterable[Statement], scope: dict[str, Value]) -> tuple[Statement, ...]:
        return tuple(self.statement(s, scope) for s in body)

    def statement(self, s: Statement, scope: dict[str, Value]) -> Statement:
        over = getattr(s, "over", None)
        mesh = next((v.tensor.mesh for v in s.named if isinstance(v.type, TensorType)), None)
        inner = dict(scope) if s.bodies else scope
        if defined := s.defines(self.phase):
            self.define(defined, inner)
        changes: dict[str, Any] = {"over": self.mark(mesh, over)} if over else {}
        if not isinstance(s, For):
            return replace(s.rename(inner), **changes)
        return replace(s, index=inner[s.index.name], body=self.block(s.body, inner))

    def define(self, value: Value, scope: dict[str, Value]) -> Value:
        type = self.type(value.type) if isinstance(value.type, TensorType) else value.type
        scope[value.name] = Value(f"v{self.count}", type)
        self.count += 1
        return scope[value.name]

    def type(self, type: TensorType) -> TensorType:
        axes = tuple(
            Axis(tuple(Factor(f.extent, self.mark(type.mesh, f.on) if f.on else None) for f in axis.factors))
            for axis in type.axes
        )
        partial = tuple(sorted(self.mark(type.mesh, mark) for mark in type.partial))
        return replace(type, axes=axes, mesh=self.mesh(type.mesh) if type.mesh else None, partial=partial)

    def mesh(self, mesh: Mesh) -> Mesh:
        if mesh not in self.meshes:
            plain = Mesh(f"m{len(self.meshes)}", ("y", "x")[-len(mesh.axes) :], mesh.shape, mesh.devices)
            self.meshes[mesh] = plain
        return self.meshes[mesh]

    def mark(self, mesh: Mesh | None, mark: str) -> str:
        return self.mesh(mesh).axes[mesh.axes.index(mark)] if mesh and mark in mesh.axes else mark
