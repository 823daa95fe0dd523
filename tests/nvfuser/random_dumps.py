"""Random dumps in the spelling of nvFuser: a product of two matrices whose axes lie on devices and streams.

A dump is printed from drawn axes and their splits, as nvFuser prints it: the quotient of a number is printed as a
number. The reader recovers the splits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

DEVICES = 2
MESH = f" (DeviceMesh{{{' '.join(map(str, range(DEVICES)))}}})"
STREAM, DEVICE = "streamIdx", "deviceIdx.x"


@dataclass(frozen=True)
class Axis:
    """A logical axis: its extent, its symbol if any, and its splits (parallel type, count), outermost first."""

    extent: int
    symbol: str = ""
    splits: tuple[tuple[str, int], ...] = ()
    letter: str = "i"
    rf: str = ""

    def without(self, on: str) -> Axis:
        return Axis(self.extent, self.symbol, tuple(s for s in self.splits if s[0] != on), self.letter, self.rf)

    def summed(self) -> Axis:
        return Axis(self.extent, self.symbol, self.splits, "r")


@dataclass
class Dump:
    """A dump with its meaning: which product it computes, the shapes of its inputs, and its sizes."""

    linear: bool
    text: str = ""
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # unsharded shapes of the two inputs
    sizes: dict[str, int] = field(default_factory=dict)

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ (b.t() if self.linear else b)


class _Printer:
    """Prints tensors. Axes are numbered before the parts of splits, or everything is numbered in printed order.

    Axes on devices and streams may be moved to the front, device axes first or last.
    """

    def __init__(self, draw: random.Random) -> None:
        self.in_order = draw.random() < 0.5
        self.to_the_front = draw.random() < 0.8
        self.devices_first = draw.random() < 0.5
        self.numbers = 0

    def tensor(self, name: str, axes: list[Axis], mesh: str = MESH) -> str:
        front: list[tuple[str, int, str]] = []
        body: list[tuple[str, int, str]] = []
        numbers = [self.number() for _ in axes]
        for axis, number in zip(axes, numbers, strict=True):
            extent, rest, outer = axis.symbol or str(axis.extent), axis.extent, []
            for on, count in axis.splits:
                outer.append((f"{axis.letter}{on}", self.number(), f"{{{count}}}{axis.rf}"))
                number, rest = self.number(), rest // count
                extent = f"( ceilDiv({extent}, {count}) )" if axis.symbol else str(rest)
            split_by_rfactor = axis.rf and axis.splits  # an rfactor on devices makes a separate axis
            inner = outer.pop() if split_by_rfactor else (f"{axis.letter}S", number, f"{{{extent}}}{axis.rf}")
            (front if self.to_the_front else body).extend(outer)
            (front if split_by_rfactor and self.to_the_front else body).append(inner)
        front.sort(key=lambda domain: ("device" in domain[0]) != self.devices_first)
        domains = [(head, self.number() if self.in_order else n, tail) for head, n, tail in [*front, *body]]
        return f"{name}_float[{', '.join(f'{head}{n}{tail}' for head, n, tail in domains)}]{mesh}"

    def number(self) -> int:
        self.numbers += 1
        return self.numbers - 1


def random_dump(seed: int) -> Dump:
    """Return the dump of a seed: a local product, a row-parallel product, or a product of gathered rows."""
    draw = random.Random(seed)
    printer, dump = _Printer(draw), Dump(draw.random() < 0.5)
    slices, pattern = (
        draw.choice([2, 3, 4]),
        draw.choice(["local", "local", "allreduce", "reduce_scatter", "allgather"]),
    )
    on_stream = draw.choice(["M", "N"]) if pattern == "local" else "M"
    on_devices = draw.choice(["", "M", "N"]) if pattern == "local" else "M" if pattern == "allgather" else "K"
    # If neither numbers nor extents show which split is outside, the printed order does.
    stream_outside = pattern != "local" or (not printer.devices_first if printer.in_order else draw.random() < 0.5)
    if pattern != "local" and printer.in_order:
        printer.devices_first = False
    mesh = MESH if on_devices else ""

    def axis(n: int, name: str) -> Axis:
        splits = [(STREAM, slices)] * (name == on_stream) + [(DEVICE, DEVICES)] * (name == on_devices)
        extent, symbol = slices * DEVICES * draw.choice([1, 2, 3]), draw.choice(["", f"i{2 * n}"])
        dump.sizes |= {symbol: extent} if symbol else {}
        return Axis(extent, symbol, tuple(splits if stream_outside else splits[::-1]))

    m, n, k = (axis(n, name) for n, name in enumerate("MNK"))
    right = [n, k] if dump.linear else [k, n]
    body: list[str] = []
    explicit = draw.random() < 0.6

    def sliced(name: str, tensor: str, axes: list[Axis]) -> str:
        if not explicit or STREAM not in tensor:
            return tensor
        body.append(f"{(view := printer.tensor(name, axes, mesh))} = ShardByStream({tensor}, stream_index=i9)")
        return view

    def communicate(collective: str, x: str, out: str) -> None:
        body.append(f"Communication 7 (type={collective}, team=(0 1), input={x}, output={out}, backend=NCCL)")
        body.append("Wait(Communication 7)")

    a, b = printer.tensor("T0_g", [m, k], mesh), printer.tensor("T1_g", right, mesh)
    rows, columns = m, n
    if pattern == "reduce_scatter":
        rows = Axis(m.extent, m.symbol, (*m.splits, (DEVICE, DEVICES)))
    elif pattern == "allgather":
        rows = m.without(DEVICE)
    summed = [k.summed()] if on_devices != "K" and draw.random() < 0.5 else []
    c = printer.tensor("T2_g", [rows, columns, *summed], mesh)
    left, product = sliced("T3_l", a, [m, k]), c
    if pattern == "allgather":
        gathered = printer.tensor("T4_g", [rows, k])
        body.append(f"{gathered} = ALLOCATE(mem_type=global, zero_init=false)")
        communicate("Allgather", left, gathered)
        left = gathered
    if on_devices == "K":
        parts = Axis(DEVICES, "", ((DEVICE, DEVICES),), "i", "rf")
        rest = Axis(k.extent // DEVICES, k.symbol and f"( ceilDiv({k.symbol}, {DEVICES}) )", (), "r", "rf")
        product = printer.tensor("T4_g", [parts, m, n, *([rest] if draw.random() < 0.5 else [])])
        body += [f"{product} = ALLOCATE(mem_type=global, zero_init=false)"] if draw.random() < 0.8 else []
    weight = sliced("T5_l", b, right)
    out = sliced("T6_l", c, [rows, columns])
    product = out if on_devices != "K" else product
    body.append(f"{product}\n       = {'linear' if dump.linear else 'matmul'}({left},\n                {weight})")
    if on_devices == "K":
        communicate("Allreduce" if pattern == "allreduce" else "ReduceScatter", product, out)
        body += [f"Deallocate {{\n      {product}\n    }}"] if draw.random() < 0.5 else []
    before = [f"{c} = ALLOCATE(mem_type=global, zero_init=false)"] if explicit or draw.random() < 0.5 else []
    after: list[str] = []
    if draw.random() < 0.7:
        before.append("Stream 0x5a = GetCurrentStream()")
        body = ["SetCurrentStream(Stream i9)", "Synchronize(Stream 0x5a)", *body]
        after = ["SetCurrentStream(Stream 0x5a)", f"FOR i9 from 0 to {slices}:", "  Synchronize(Stream i9)"]
    lines = [*before, f"FOR i9 from 0 to {slices}:", *(f"  {line}" for line in body), *after]
    inside = "\n".join(f"  {line}" for line in lines)
    dump.text = f"%HostIrContainer {{ ({a}, {b}) -> ({c}) :\n{inside}\n}} // %HostIrContainer\n"
    dump.shapes = [(m.extent, k.extent), (right[0].extent, right[1].extent)]
    return dump
