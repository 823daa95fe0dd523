"""Random fusions with matmuls of gathered rows: layouts of the rows, other operands, other readers of the rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from random import Random

import hostir as hi
from hostir.ir import Program

LINE = {  # the type of x on D ranks, and its gathered type
    "[D@tp, 2, 4]": "[D, 2, 4]",
    "[3*D@tp, 4]": "[3*D, 4]",
    "[3, D@tp, 2, 4]": "[3, D, 2, 4]",
    "[2, 3*D@tp, 4]": "[2, 3*D, 4]",
    "[2, 3, D@tp, 4]": "[2, 3, D, 4]",
    "[(2 3*D@tp), 4]": "[6*D, 4]",
    "[2, (3 2*D@tp), 4]": "[2, 6*D, 4]",
}
GRID = {  # the same on a mesh of 2 x D
    "[2@dp, 3, D@tp, 2, 4]": "[2@dp, 3, D, 2, 4]",
    "[4@dp, D@tp, 2, 4]": "[4@dp, D, 2, 4]",
    "[(2@dp 3*D@tp), 4]": "[6*D@dp, 4]",
    "[(D@tp 4@dp), 4]": "[(D 4@dp), 4]",
    "[3, 2@dp, D@tp, 4]": "[3, 2@dp, D, 4]",
    "[3, 4@dp, D@tp, 4]": "[3, 4@dp, D, 4]",
    "[(3 4@dp), D@tp, 4]": "[(3 4@dp), D, 4]",
}
NAMED_LINE = {  # with a named number of rows
    "[M@tp, 4]": "[M, 4]",
    "[D@tp, M, 4]": "[D, M, 4]",
    "[D@tp, M/D, 4]": "[D, M/D, 4]",
    "[3, M@tp, 4]": "[3, M, 4]",
    "[M, 3*D@tp, 4]": "[M, 3*D, 4]",
    "[(2 M@tp), 4]": "[2*M, 4]",
}
NAMED_GRID = {
    "[2@dp, M@tp, 4]": "[2@dp, M, 4]",
    "[M@dp, D@tp, 4]": "[M@dp, D, 4]",
    "[(2@dp M@tp), 4]": "[2*M@dp, 4]",
    "[M, 4@dp, D@tp, 4]": "[M, 4@dp, D, 4]",
}
Shape = list[int | str]


@dataclass
class Text:
    """A random fusion under construction; a result added by its shape gets its sharding from its operands."""

    random: Random
    inputs: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def input(self, type: str) -> str:
        self.inputs.append(f"%in{len(self.inputs)}: f32{type}")
        return f"%in{len(self.inputs) - 1}"

    def add(self, shape: Shape | str, statement: str) -> str:
        type = shape if isinstance(shape, str) else f"{written(shape)} auto"
        self.body.append(f"  %v{len(self.body)}: f32{type} = {statement}")
        return f"%v{len(self.body) - 1}"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def multiplied(self, full: str, rows: Shape, columns: int) -> str:
        over = self.random.choice(["", "@tp"])
        shape = [*rows, columns]
        if self.chance(0.5):
            return self.add(shape, f"matmul {full}, {self.input(f'[4, {columns}{over}]')}")
        bias = f", {self.input(f'[{columns}{over}]')}" if self.chance(0.5) else ""
        return self.add(shape, f"linear {full}, {self.input(f'[{columns}{over}, 4]')}{bias}")


def gathered(ranks: int, seed: int, *, named: bool = False) -> Program:
    """Return an all-gather of rows over `ranks` ranks, on a mesh of one or two axes, and random readers of the rows.

    With `named` the number of rows contains the symbol M.
    """
    text = Text(Random(seed))
    grid, columns = text.chance(0.4), 2 * ranks
    layouts = (NAMED_GRID if grid else NAMED_LINE) if named else (GRID if grid else LINE)
    sharded, unsharded = (counted(t, ranks) for t in text.random.choice([*layouts.items()]))
    *rows, _ = shape_of(unsharded)
    x = text.input(sharded)
    if text.chance(0.3):
        x = text.add(sharded, f"relu {x}")
    text.body.append(f"  %full: f32{unsharded} = allgather {x} over tp")
    outputs = [text.add([*rows, 4], "relu %full")] if text.chance(0.15) else []
    outputs += [text.multiplied("%full", rows, columns) for _ in range(text.random.choice([1, 1, 2, 3]))]
    if text.chance(0.4):
        outputs[-1] = text.add([*rows, columns], f"gelu {outputs[-1]}")
    if text.chance(0.3):
        outputs[-1] = text.add([*rows, columns], f"add {outputs[-1]}, {text.input(written([*rows, columns]))}")
    if text.chance(0.3):
        outputs.append("%full")
    if text.chance(0.3):
        outputs.append(text.add([*rows, 6], f"matmul {outputs[0]}, {text.input(f'[{last(text, outputs[0])}, 6]')}"))
    meshes = f"[dp, tp] = {row(0, ranks)} {row(ranks, ranks)}" if grid else f"[tp] = {row(0, ranks)[1:-1]}"
    head = f"hostir 1\nmesh @mesh {meshes}\nfusion @gathered({', '.join(text.inputs)}) -> ({', '.join(outputs)}) {{"
    return hi.parse("\n".join([head, *text.body, "}\n"]))


def last(text: Text, value: str) -> int:
    line = next(line for line in text.body if line.startswith(f"  {value}:"))
    return int(shape_of(re.findall(r"\[.*?\]", line)[0])[-1])


def row(first: int, ranks: int) -> str:
    return f"({' '.join(map(str, range(first, first + ranks)))})"


def counted(type: str, ranks: int) -> str:
    type = re.sub(r"(\d+)\*D", lambda m: str(int(m[1]) * ranks), type)
    return re.sub(r"D", str(ranks), type)


def shape_of(type: str) -> Shape:
    """Return the extents of the axes; symbolic extents stay strings."""
    axes = [re.sub(r"@\w+", "", axis) for axis in type.strip("[]").split(", ")]
    return [axis if "M" in axis else prod(map(int, re.findall(r"\d+", axis))) for axis in axes]


def written(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
