"""Random fusions of mixtures of experts: layouts of sources, index or not, products, gradients, and sums over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import hostir as hi
from hostir.ir import Program

K, EACH = 4, 2
LINE = ("D@tp", "3, D@tp", "D@tp, 2", "2*D@tp", "(2 D@tp)", "2, 2*D@tp")  # leading axes: the sources
GRID = ("2@dp, D@tp", "(2@dp D@tp)", "3, 2@dp, D@tp")


@dataclass
class Mixture:
    """A random fusion under construction.

    Fields:
        sharded, lead: the leading axes before and after the gather over the ranks.
        M, S: the number of tokens and the number of rows of a source.
        experts: the number of experts.
    """

    random: Random
    sharded: str
    lead: str
    M: str
    S: str
    experts: int
    dtype: str
    inputs: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def input(self, name: str, type: str) -> str:
        self.inputs.append(f"%{name}: {type}")
        return f"%{name}"

    def add(self, type: str, statement: str) -> str:
        self.body.append(f"  %v{len(self.body)}: {type} = {statement}")
        return f"%v{len(self.body) - 1}"

    def gathered(self, name: str, dtype: str, *axes: object) -> str:
        """Return an input with these axes for each source on all ranks: gathered, or given to all ranks."""
        rest = ", ".join(map(str, axes))
        if self.chance(0.5):
            return self.input(name, f"{dtype}[{self.lead}, {rest}]")
        return self.add(
            f"{dtype}[{self.lead}, {rest}]", f"reshard {self.input(name, f'{dtype}[{self.sharded}, {rest}]')}"
        )

    @property
    def sizes(self) -> str:
        """The extents of the leading axes."""
        return self.lead.replace("@dp", "")

    def matrices(self, name: str, rows: object, columns: object) -> str:
        return self.input(name, f"{self.dtype}[{self.experts}, {rows}, {columns}]")

    def product(self, rows: str, matrices: str, offsets: str, columns: object, more: str = "auto") -> str:
        lead = self.sizes if more == "auto" else self.lead
        return self.add(
            f"{self.dtype}[{lead}, {self.S}, {columns}] {more}", f"grouped_matmul {rows}, {matrices} by {offsets}"
        )


def mixture(ranks: int, seed: int, *, named: bool = False) -> Program:
    """Return tokens that are gathered over `ranks` ranks, on a mesh of one or two axes, and computed by experts.

    With `named` the number of tokens of a source is the symbol M.
    """
    random = Random(seed)
    grid = random.random() < 0.25
    layout = random.choice(GRID if grid else LINE).replace("2*D", str(2 * ranks)).replace("D", str(ranks))
    M, permuted = "M" if named else "3", random.random() < 0.7
    unsharded = layout.replace("@tp", "")
    if layout.startswith("(") and "@dp" not in layout:
        unsharded = str(2 * ranks)
    elif layout.startswith("(2@dp"):
        unsharded = f"{2 * ranks}@dp"
    S = f"{EACH}*{M}" if named and permuted else str(EACH * 3) if permuted else M
    of = Mixture(random, layout, unsharded, M, S, random.choice((1, 3, 5)), random.choice(("f32", "f32", "bf16")))
    outputs = _body(of, permuted, 2 * ranks)
    meshes = f"[dp, tp] = {_row(0, ranks)} {_row(ranks, ranks)}" if grid else f"[tp] = {_row(0, ranks)[1:-1]}"
    head = f"hostir 1\nmesh @mesh {meshes}\nfusion @mixture({', '.join(of.inputs)}) -> ({', '.join(outputs)}) {{"
    return hi.parse("\n".join([head, *of.body, "}\n"]))


def _body(of: Mixture, permuted: bool, wide: int) -> list[str]:
    """Add the inputs and statements of a mixture with `wide` hidden features; return the outputs."""
    x = of.input("x", f"{of.dtype}[{of.sharded}, {of.M}, {K}]")
    offsets = of.gathered("offsets", "i32", of.experts + 1)
    tokens = of.add(f"{of.dtype}[{of.lead}, {of.M}, {K}]", f"allgather {x} over tp")
    rows = tokens
    if permuted:
        order = of.gathered("order", "i32", of.S)
        rows = of.add(f"{of.dtype}[{of.sizes}, {of.S}, {K}] auto", f"permute_rows {tokens} by {order}")
    over = of.random.choice(("@tp", "@tp", ""))
    h = of.product(rows, of.matrices("gate", K, f"{wide}{over}"), offsets, wide)
    outputs = [h] if of.chance(0.2) else []
    type = f"{of.dtype}[{of.sizes}, {of.S}, {wide}] auto"
    if of.chance(0.5):
        up = of.product(rows, of.matrices("up", K, f"{wide}{over}"), offsets, wide)
        h = of.add(type, f"mul {of.add(type, f'silu {h}')}, {up}")
    outputs += [rows] if of.chance(0.2) else []
    if "," not in of.lead and of.chance(0.3):  # gradients of the first matrices
        outputs.append(of.add(f"{of.dtype}[{of.experts}, {K}, {wide}] auto", f"grouped_outer {rows}, {h} by {offsets}"))
    if over and of.chance(0.7):
        outputs.append(_down(of, h, offsets, permuted, wide))
    return outputs or [h]


def _down(of: Mixture, h: str, offsets: str, permuted: bool, wide: int) -> str:
    """Add the second product, whose sums over the ranks are scattered to the sources, or all-reduced."""
    down = of.matrices("down", f"{wide}@tp", K)
    combined = permuted and of.chance(0.7)
    scattered = of.chance(0.7)
    end = f"{of.dtype}[{of.sharded if scattered else of.lead}, {of.M if combined else of.S}, {K}]"
    if not combined:
        return of.add(end, f"grouped_matmul {h}, {down} by {offsets}")
    y = of.product(h, down, offsets, K, more="partial(tp)")
    places = of.gathered("places", "i32", of.M, EACH)
    weights = of.gathered("weights", of.random.choice(("f32", of.dtype)), of.M, EACH)
    return of.add(end, f"combine_rows {y} by {places} times {weights}")


def _row(first: int, ranks: int) -> str:
    return f"({' '.join(map(str, range(first, first + ranks)))})"
