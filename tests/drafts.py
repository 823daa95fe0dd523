"""The text of a random program while it is drawn: the buffers that it may use, and what each of them holds so far."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

LARGE = 384  # rows of the square that keeps one rank busy


@dataclass
class Block:
    """A loop or a condition: `head { body }`."""

    head: str
    body: list[Node]


Node = str | Block


def lines(nodes: list[Node], depth: int = 1) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield "  " * depth + node
        else:
            yield "  " * depth + node.head + " {"
            yield from lines(node.body, depth + 1)
            yield "  " * depth + "}"


INPUTS = {
    "%x": "part",
    "%w": "whole",
    "%v": "part of the other",
    "%z": "whole at the root",
    "%xs": "parts",
}
BUFFERS = {
    "%p0": "part",
    "%p1": "part",
    "%sp": "part",
    "%t0": "whole",
    "%t1": "whole",
    "%s0": "whole",
    "%s1": "whole",
    "%q0": "part of the other",
    "%u0": "whole of the other",
    "%z0": "whole at the root",
    "%a0": "sent",
    "%b0": "received",
    "%ys": "wholes",
}
SYMMETRIC = ("%sp", "%s0", "%s1")


@dataclass
class Draft:
    """A program under construction.

    Fields:
        whole, part: for each mesh the buffers of which every rank holds all rows, or one; those that hold something.
        flags: rows of flags, and how often each was used.
        body: the statements so far.
    """

    random: Random
    ranks: int
    streams: int
    columns: int
    root: int
    rounds: int
    flipped: bool
    body: list[Node] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    defined: dict[str, set[str]] = field(default_factory=dict)
    count: int = 0
    epochs: int = 0

    # Names and types ----------------------------------------------------------------------------------------------
    @property
    def types(self) -> dict[str, str]:
        R, D, N = self.ranks, self.columns, self.rounds
        return {
            "part": f"f32[{R}@didx, {D}]",
            "whole": f"f32[{R}, {D}]",
            "part of the other": f"f32[{R}@didx, {D}] on @other",
            "whole of the other": f"f32[{R}, {D}] on @other",
            "whole at the root": f"f32[{R}, {D}] on @root",
            "sent": f"f32[{R}, {R}@didx, {D}]",
            "received": f"f32[{R}@didx, {R}, {D}]",
            "parts": f"f32[{N}, {R}@didx, {D}]",
            "wholes": f"f32[{N}, {R}, {D}]",
        }

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"%{stem}{self.count}"

    def readable(self, kind: str) -> list[str]:
        given = [name for name, k in INPUTS.items() if k == kind]
        return given + sorted(self.defined.get(kind, ()))

    def read(self, kind: str) -> str:
        return self.random.choice(self.readable(kind))

    def write(self, kind: str, *but: str, symmetric: bool | None = None) -> str:
        """A buffer to be written as a whole."""
        names = [name for name, k in BUFFERS.items() if k == kind and name not in but]
        if symmetric is not None:
            names = [name for name in names if (name in SYMMETRIC) == symmetric]
        out = self.random.choice(names)
        self.defined.setdefault(kind, set()).add(out)
        return out

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def stream(self) -> str:
        return self.random.choice([*map(str, range(self.streams)), "%user"])

    def peer(self, step: int = 1) -> str:
        return f"(%r + {step}) % {self.ranks}"

    def text(self, name: str) -> str:
        """The whole program; it gives every buffer that holds something."""
        inside = "\n".join(lines(self.body))
        order = list(range(self.ranks))[:: -1 if self.flipped else 1]

        def used(name: str) -> bool:
            return re.search(rf"{name}\b", inside) is not None

        inputs = [f"{n}: {self.types[k]}" for n, k in INPUTS.items() if n == "%x" or used(n)]
        if used("%k"):
            inputs.append(f"%k: f32[{self.columns}, {self.columns}]")
        if used("%large"):
            inputs.append(f"%large: f32[{LARGE}, {LARGE}]")
        buffers = {n: k for n, k in BUFFERS.items() if used(n)}
        outputs = [n for n, k in buffers.items() if n in self.defined.get(k, ())]
        heads = ["%user = current_stream", "%r = rank of %x over didx"]
        for n, k in buffers.items():
            heads.append(f"{n}: {self.types[k]} = allocate{'_symmetric' if n in SYMMETRIC else ''}")
        heads += self.heads
        if used("%f"):
            heads.append("%f: flag[1] = allocate_symmetric")
        frees = [f"free {n}" for n in buffers if n not in outputs and n not in SYMMETRIC]
        return f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, order))}
mesh @other [didx] = {" ".join(map(str, reversed(order)))}
mesh @root [didx] = {self.root}
program @{name}({", ".join(inputs)}) -> ({", ".join(outputs)}) streams {self.streams} {{
{chr(10).join(heads)}
{inside}
{chr(10).join(frees)}
}}
"""

    # Statements ---------------------------------------------------------------------------------------------------
    def add(self, *nodes: Node) -> None:
        self.body += nodes

    def fence(self) -> None:
        """All that came before on any stream of any rank comes before what follows on the caller's stream."""
        self.add("set_stream %user", *(f"synchronize {s}" for s in range(self.streams)), "barrier of %x over didx")

    def turn(self) -> str:
        """Goes on with another stream, which waits for the caller's."""
        stream = self.stream()
        if stream != "%user":
            self.add(f"set_stream {stream}", "synchronize %user")
        return stream

    def elementwise(self, x: str, out: str) -> str:
        return f"{self.random.choice(('gelu', 'silu', 'copy'))} {x} -> {out}"

    def wait(self, handle: str, comes: str) -> None:
        """A communication that is waited for at once, by each rank in a branch of its own perhaps."""
        branches = self.chance(0.1)
        waits = [Block(f"if %r == {r}", [f"wait {handle}"]) for r in range(self.ranks)] if branches else []
        self.add(f"{handle} = {comes}", *(waits or [f"wait {handle}"]))
