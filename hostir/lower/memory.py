"""Passes `free` and `tidy`: buffers end after their last use, and what nobody uses goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from hostir.ir import Program, Statement, Value
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Allocate, CurrentStream, For, FreeBuffer, SetStream, Synchronize, Wait
from hostir.ir.op import Codec
from hostir.ir.program import rewrite
from hostir.ir.values import Ref
from hostir.ir.view_ops import ViewOp
from hostir.lower.passes import Pass


@dataclass(frozen=True)
class FreeBuffers(Pass):
    """Frees every buffer that no output looks at after the last statement that touches it, on the caller's stream."""

    name = "free"

    def run(self, program: Program) -> Program:
        roots = _roots(program)
        kept = {roots.get(v.name, v.name) for v in program.outputs}
        buffers = {s.out.name: s.out for s in program.body if isinstance(s, Allocate) and s.out.name not in kept}
        last: dict[str, int] = {}
        flying: dict[str, Communication] = {}  # a communication touches its buffers until it is waited for
        for n, s in enumerate(program.body):
            if isinstance(s, Communication) and s.handle:
                flying[s.handle.name] = s
            for name in _touched(flying[s.handle.name] if isinstance(s, Wait) else s):
                last[roots.get(name, name)] = n
        settled = _settled(program.body)
        after: dict[int, list[Value]] = {}
        for name, value in buffers.items():
            after.setdefault(settled.index(True, last.get(name, 0)), []).append(value)
        body: list[Statement] = []
        for n, s in enumerate(program.body):
            body += [s, *(FreeBuffer(v) for v in after.get(n, ()))]
        return program.with_body(body)


def _roots(program: Program) -> dict[str, str]:
    """For every view, the buffer or input it looks at."""
    roots: dict[str, str] = {}
    for s in program.walk():
        if isinstance(s, ViewOp):
            roots[s.out.name] = roots.get(s.x.name, s.x.name)
    return roots


def _touched(s: Statement) -> Iterable[str]:
    for v in s.values(Codec.READ, Codec.WRITE, Codec.ALIAS):
        yield v.name
    for body in s.bodies:
        for inner in body:
            yield from _touched(inner)


def _settled(body: tuple[Statement, ...]) -> list[bool]:
    """For each place in the body, whether behind it the caller's stream is current and has joined all workers."""
    settled: list[bool] = []
    away = flying = False
    for s in body:
        inner = _kinds(s)
        if isinstance(s, SetStream) or SetStream in inner:
            away = not (isinstance(s, SetStream) and isinstance(s.stream, Ref))
        if not away and inner == {Synchronize}:
            flying = False
        flying |= away and not inner <= {SetStream, Synchronize}
        settled.append(not away and not flying)
    return settled


def _kinds(s: Statement) -> set[type[Statement]]:
    """The kinds of statements that it is or holds."""
    return {type(inner) for body in s.bodies for inner in body} or {type(s)}


@dataclass(frozen=True)
class Tidy(Pass):
    """Drops views that nobody uses, and takes the same view once."""

    name = "tidy"

    def run(self, program: Program) -> Program:
        body, renamed = _once(program.body, {})
        program = replace(program, body=body, outputs=tuple(renamed.get(v.name, v) for v in program.outputs))
        while True:
            used = {v.name for s in program.walk() for v in s.uses(program.phase)} | {v.name for v in program.outputs}
            kept = rewrite(program.body, partial(_unless_idle, used))
            if kept == program.body:
                return program
            program = program.with_body(kept)


def _unless_idle(used: set[str], s: Statement) -> tuple[Statement, ...]:
    return () if isinstance(s, (ViewOp, CurrentStream)) and s.out.name not in used else (s,)


def _once(body: tuple[Statement, ...], outer: dict[Statement, Value]) -> tuple[tuple[Statement, ...], dict[str, Value]]:
    """The body with repeated views taken once, and the names that went with their replacements."""
    seen, renamed, kept = dict(outer), dict[str, Value](), list[Statement]()
    for s in body:
        s = s.rename(renamed)
        if isinstance(s, For):
            inner, _ = _once(s.body, seen)
            s = replace(s, body=inner)
        if isinstance(s, ViewOp):
            key = replace(s, out=replace(s.out, name="_"))
            if key in seen:
                renamed[s.out.name] = seen[key]
                continue
            seen[key] = s.out
        kept.append(s)
    return tuple(kept), renamed
