"""Random fusions with reduce-scatters of rows: layouts and producers of the rows."""

from __future__ import annotations

from random import Random

import hostir as hi
from hostir.ir import Program
from tests.lower.gathered import GRID, LINE, NAMED_GRID, NAMED_LINE, Text, counted, row, shape_of

ELEMENTWISE = ("gelu {}", "silu {}", "relu {}", "scale {} by -0.5", "offset {} by 2.0")


def scattered(ranks: int, seed: int, *, named: bool = False, to_all: bool = False) -> Program:
    """Return a reduce-scatter of rows over `ranks` ranks, on a mesh of one or two axes, with random neighbours.

    With `to_all` it is an all-reduce. The rows are an input, a product, or a sum of two products. Their operand may be
    gathered before. A bias, an activation or an addition may come after. With `named` the number of rows contains M.
    """
    text = Text(Random(seed))
    grid, k = text.chance(0.5), 2 * ranks
    both = grid and text.chance(0.4)  # gathered over one axis of the mesh, scattered over the other
    of_grid, of_line = (NAMED_GRID, NAMED_LINE) if named else (GRID, LINE)
    layouts = of_grid if grid and not both else of_line
    sharded, unsharded = (counted(t, ranks) for t in text.random.choice([*layouts.items()]))
    rows = unsharded.removesuffix(", 4]")
    if both and (even := _even(rows)):
        full = text.add(f"{rows}, {k}@tp]", f"allgather {text.input(f'{even}, {k}@tp]')} over dp")
        part = text.add(f"{unsharded} partial(tp)", _product(text, full, k))
    elif text.chance(0.15):
        part = text.input(f"{unsharded} partial(tp)")
    else:
        part = text.add(f"{unsharded} partial(tp)", _product(text, _left_side(text, sharded, rows, k), k))
    if text.chance(0.2):
        other = text.add(f"{unsharded} partial(tp)", _product(text, text.input(f"{rows}, {k}@tp]"), k))
        part = text.add(f"{unsharded} partial(tp)", f"add {part}, {other}")
    if to_all:
        sharded = unsharded
    reduced = f"{'allreduce' if to_all else 'reduce_scatter'} {part} over tp"
    out = text.add(sharded, reduced)
    if text.chance(0.3):
        out = text.add(sharded, f"add {out}, {text.input('[4]')}")
    if text.chance(0.3):
        out = text.add(sharded, text.random.choice(ELEMENTWISE).format(out))
    if text.chance(0.3):
        out = text.add(sharded, f"add {out}, {text.input(sharded)}")
    outputs = [out]
    if text.chance(0.2):
        outputs.append(text.add(sharded, reduced))
    if text.chance(0.2):
        outputs.append(text.add([*shape_of(unsharded)[:-1], 6], f"matmul {out}, {text.input('[4, 6]')}"))
    if text.chance(0.3):
        outputs.append(text.add(sharded, f"rms_norm {out} eps 1e-05 times {text.input('[4]')}"))
    meshes = f"[dp, tp] = {row(0, ranks)} {row(ranks, ranks)}" if grid else f"[tp] = {row(0, ranks)[1:-1]}"
    head = f"hostir 1\nmesh @mesh {meshes}\nfusion @scattered({', '.join(text.inputs)}) -> ({', '.join(outputs)}) {{"
    return hi.parse("\n".join([head, *text.body, "}\n"]))


def _even(rows: str) -> str | None:
    """Shard the last axis of an even size over two ranks; return None if there is no such axis."""
    axes = rows.removeprefix("[").split(", ")
    even = [k for k, axis in enumerate(axes) if axis.isdecimal() and int(axis) % 2 == 0]
    return f"[{', '.join(f'{axis}@dp' if k == even[-1] else axis for k, axis in enumerate(axes))}" if even else None


def _left_side(text: Text, sharded: str, rows: str, k: int) -> str:
    """Return the left operand of a product with a sharded contraction: an input, or a product of gathered rows."""
    if text.chance(0.6):
        return text.input(f"{rows}, {k}@tp]")
    full = text.add(f"{rows}, 4]", f"allgather {text.input(sharded)} over tp")
    hidden = text.add(f"{rows}, {k}@tp]", f"matmul {full}, {text.input(f'[4, {k}@tp]')}")
    return text.add(f"{rows}, {k}@tp]", f"gelu {hidden}") if text.chance(0.5) else hidden


def _product(text: Text, x: str, k: int) -> str:
    if text.chance(0.5):
        return f"matmul {x}, {text.input(f'[{k}@tp, 4]')}"
    return f"linear {x}, {text.input(f'[4, {k}@tp]')}"
