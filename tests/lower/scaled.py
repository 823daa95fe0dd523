"""Random fusions of fp8 products: granularity of scales, layouts of rows, collectives, and surrounding statements."""

from __future__ import annotations

from random import Random

import hostir as hi
from hostir.ir import Program

NARROW = ("f8e4m3", "f8e4m3", "f8e5m2")


def scaled(ranks: int, seed: int, *, named: bool = False) -> Program:
    """Return a fusion on `ranks` ranks: gathered rows with their scales, or scattered sums over parts of K."""
    random = Random(seed)
    M = "M" if named else str(3 * ranks)
    scales = random.choice(("tensor", "rows", "blocks"))
    rows, axis = random.choice((([M], 0), (["2", M], 1), ([M, "2"], 0), (["3", M, "2"], 1)))
    gathered = random.random() < 0.6
    make = _gathered if gathered else _scattered
    inputs, body, outputs = make(random, ranks, rows, axis, scales)
    mesh = " ".join(map(str, range(ranks)))
    head = f"hostir 1\nmesh @mesh [tp] = {mesh}\nfusion @scaled({', '.join(inputs)}) -> ({', '.join(outputs)}) {{"
    return hi.parse("\n".join([head, *(f"  {line}" for line in body), "}\n"]))


def _on(sizes: list[str], axis: int, mark: str = "@tp") -> list[str]:
    return [f"{size}{mark}" if k == axis else size for k, size in enumerate(sizes)]


def _type(dtype: str, *sizes: str | int) -> str:
    return f"{dtype}[{', '.join(map(str, sizes))}]"


def _right(random: Random, i: int, K: int, N: int, scales: str, over: str = "") -> list[str]:
    """Return the right operand and its scales; `over` shards the columns."""
    of_b = {"tensor": (1, 1), "rows": (1, f"{N}{over}"), "blocks": (K // 128, f"{N // 128}{over}")}[scales]
    return [f"%b{i}: {_type(random.choice(NARROW), K, f'{N}{over}')}", f"%t{i}: {_type('f32', *of_b)}"]


def _gathered(
    random: Random, ranks: int, rows: list[str], axis: int, scales: str
) -> tuple[list[str], list[str], list[str]]:
    K, N, narrow, last = 128 * random.choice((1, 2)), 128 * ranks, random.choice(NARROW), {"tensor": 1, "rows": 1}
    groups = last.get(scales, K // 128)
    sharded, body = _on(rows, axis), list[str]()
    of_rows = ["1"] * len(rows) if scales == "tensor" else rows
    if random.random() < 0.4:  # each rank quantizes its own rows
        inputs = [f"%x: {_type(random.choice(('bf16', 'f32', 'f16')), *sharded, K)}"]
        each = " each 128" if scales == "blocks" else ""
        body.append(f"%s0: {_type('f32', *sharded, groups)} = row_scales %x to {narrow}{each}")
        if scales == "tensor":
            body.append(f"%s: {_type('f32', *of_rows, 1)} = largest %s0")
        body.append(
            f"%a: {_type(narrow, *sharded, K)} = quantize %x by {'%s' if scales == 'tensor' else '%s0'} to {narrow}"
        )
        of_a = "%s" if scales == "tensor" else "%s0"
    else:
        of_shard = _on(of_rows, axis) if scales != "tensor" and random.random() < 0.7 else of_rows
        inputs, of_a = [f"%a: {_type(narrow, *sharded, K)}", f"%s: {_type('f32', *of_shard, groups)}"], "%s"
    body.append(f"%full: {_type(narrow, *rows, K)} = reshard %a")
    a, lead = "%full", rows
    if len(rows) > 1 and random.random() < 0.5:
        lead = ["*".join(rows)]
        body.append(f"%flat: {_type(narrow, *lead, K)} auto = reshape %full")
        if scales != "tensor":
            body.append(f"%sf: {_type('f32', *rows, groups)} = reshard {of_a}")
            body.append(f"%flat_s: {_type('f32', *lead, groups)} auto = reshape %sf")
            of_a = "%flat_s"
        a = "%flat"
    outputs = []
    for i in range(random.choice((1, 1, 2, 3))):
        over, dtype = random.choice(("", "@tp")), random.choice(("bf16", "f16", "f32"))
        inputs += _right(random, i, K, N, scales, over)
        plus = ""
        if random.random() < 0.4:
            inputs.append(f"%bias{i}: {_type(dtype, f'{N}{over}')}")
            plus = f" plus %bias{i}"
        fast = random.choice(("", " accumulate fast"))
        product = f"scaled_matmul {a}, %b{i} scaled {of_a}, %t{i}{plus} to {dtype}{fast}"
        body.append(f"%c{i}: {_type(dtype, *lead, N)} auto = {product}")
        outputs.append(f"%c{i}")
        if lead != rows:
            body.append(f"%y{i}: {_type(dtype, *rows, N)} auto = reshape %c{i}")
            outputs[-1] = f"%y{i}"
        if random.random() < 0.3:
            body.append(f"%z{i}: {_type(dtype, *rows, N)} auto = gelu {outputs[-1]}")
            outputs[-1] = f"%z{i}"
    if random.random() < 0.2:
        outputs.append("%full")
    return inputs, body, outputs


def _scattered(
    random: Random, ranks: int, rows: list[str], axis: int, scales: str
) -> tuple[list[str], list[str], list[str]]:
    K, N, dtype = 128 * ranks * random.choice((1, 2)), 128, random.choice(("bf16", "f32"))
    of_rows = ["1"] * len(rows) if scales == "tensor" else rows
    local = scales != "blocks" and random.random() < 0.6  # each rank has scales for its part of K
    groups = f"{ranks}@tp" if local else "1" if scales != "blocks" else f"{K // 128}@tp"
    columns = {"tensor": 1, "rows": N, "blocks": N // 128}[scales]
    inputs = [
        f"%a: {_type(random.choice(NARROW), *rows, f'{K}@tp')}",
        f"%s: {_type('f32', *of_rows, groups)}",
        f"%b: {_type(random.choice(NARROW), f'{K}@tp', N)}",
        f"%t: {_type('f32', groups, columns)}",
    ]
    plus, body, a, of_a, lead = "", list[str](), "%a", "%s", rows
    if random.random() < 0.4:
        inputs.append(f"%bias: {_type(dtype, N)}{random.choice(('', ' partial(tp)'))}")
        plus = " plus %bias"
    flat = len(rows) > 1 and random.random() < 0.5
    narrow = inputs[0].split(": ")[1].split("[")[0]
    if flat:
        lead = ["*".join(rows)]
        body.append(f"%flat: {_type(narrow, *lead, K)} auto = reshape %a")
        a = "%flat"
        if scales != "tensor":
            body.append(f"%flat_s: {_type('f32', *lead, groups.removesuffix('@tp'))} auto = reshape %s")
            of_a = "%flat_s"
    part = _type(dtype, *_on(rows, axis), N)
    product = f"%c: {_type(dtype, *lead, N)} auto" if flat else f"%c: {part}"
    body.append(f"{product} = scaled_matmul {a}, %b scaled {of_a}, %t{plus} to {dtype}")
    if flat:
        body.append(f"%y: {part} = reshape %c")
    last = "%y" if flat else "%c"
    if random.random() < 0.3:
        body.append(f"%z: {part} = silu {last}")
        last = "%z"
    return inputs, body, [last]
