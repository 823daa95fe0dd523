"""What machines are known to do: constants of the cost model, each with where it comes from.

`benchmarks/matmul.py` gave the figures of matmuls, and `benchmarks/patterns.py` those of collectives; what a matmul
loses beside a collective, and what launches take, is fitted to the rows of the latter and of tests/choice/peers.json.
Figures of copies come from a copy-engine all-gather of 8 MiB a shard from 7 peers in a CUDA graph: 303 GB/s with one
copy a shard, 268 with two, 211 with four, 160 with eight, which is 347 GB/s and 3.5 us a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.source import did_you_mean, error


@dataclass(frozen=True)
class Tile:
    """An output tile of a matmul kernel: its rows and columns, and how much of the peak its inner loop reaches."""

    rows: int
    columns: int
    share: float


@dataclass(frozen=True)
class Kernels:
    """A family of matmul kernels: the tiles that it chooses from, and microseconds to start one and to end it.

    `beside` is how many SMs it loses while a collective of a kind runs.
    """

    tiles: tuple[Tile, ...]
    start: float
    beside: Mapping[str, int]


@dataclass(frozen=True)
class Hardware:
    """A GPU among others of one host. Times are in microseconds, rates in GB/s, peaks in TFLOP/s.

    Fields:
        peak: of matmuls, by dtype, before power limits it.
        throttle: what each doubling of a call's work beyond 1 TFLOP takes off the peak: the chip gets warm.
        memory: bytes read and written by what is bound by memory.
        collective: what one of them costs, whatever it moves; `quick` where it moves little, at half the rate.
        rates: of each kind of collective, of the bytes that leave a rank.
        hidden: the part of that rate which is left beside a computation.
        copy: what one copy costs; `link` its rate to a peer; `crowd` what is left of that where copies overlap.
        barrier, signal: across ranks.
        launch: host time of issuing one of each kind, where no CUDA graph replays them; `ahead` is how long before the
            device the host comes to a call, when it has nothing else to do.
    """

    name: str
    sms: int
    peak: Mapping[str, float]
    throttle: float
    memory: float
    kernels: Mapping[str, Kernels]
    collective: float
    quick: float
    rates: Mapping[str, float]
    hidden: Mapping[str, float]
    copy: float
    link: float
    crowd: float
    barrier: float
    signal: float
    launch: Mapping[str, float] = field(default_factory=dict)
    ahead: float = 0.0
    source: str = ""


LAUNCH = {
    "matmul": 20.0,
    "triton matmul": 190.0,
    "compute": 8.0,
    "communicate": 35.0,
    "wait": 4.0,
    "synchronize": 5.0,
    "delay": 5.0,
    "copy": 8.0,
    "signal": 6.0,
    "barrier": 8.0,
    "allocate": 4.0,
    "view": 3.0,
    "stream": 1.0,
}

H200 = Hardware(
    "h200",
    sms=132,
    peak={"bf16": 790.0, "f16": 790.0, "f32": 50.0},
    throttle=0.05,
    memory=3300.0,
    kernels={
        "aten": Kernels(
            (
                Tile(128, 256, 1.0),
                Tile(256, 128, 1.0),
                Tile(128, 192, 0.93),
                Tile(128, 128, 1.0),
                Tile(64, 256, 0.7),
                Tile(64, 128, 0.9),
            ),
            start=4.0,
            beside={"allgather": 32, "reduce_scatter": 28, "allreduce": 28, "alltoall": 28},
        ),
        "triton": Kernels(
            (Tile(128, 256, 0.96), Tile(128, 128, 0.86), Tile(64, 128, 0.67)),
            start=4.0,
            beside={"allgather": 12, "reduce_scatter": 48, "allreduce": 48, "alltoall": 48},
        ),
    },
    collective=35.0,
    quick=18.0,
    rates={"allgather": 350.0, "reduce_scatter": 335.0, "allreduce": 335.0, "alltoall": 335.0},
    hidden={"allgather": 1.0, "reduce_scatter": 0.6, "allreduce": 0.6, "alltoall": 0.6},
    copy=3.5,
    link=347.0,
    crowd=0.7,
    barrier=5.0,
    signal=2.0,
    launch=LAUNCH,
    ahead=90.0,
    source="measured on 8 x H200 with NVLink 4",
)
H100 = replace(H200, name="h100", memory=2400.0, source="those of H200, with the memory of H100")
CPU = Hardware(
    "cpu",
    sms=1,
    peak={"bf16": 0.02, "f16": 0.02, "f32": 0.05},
    throttle=0.0,
    memory=5.0,
    kernels={
        "aten": Kernels((Tile(1, 1, 1.0),), start=10.0, beside={}),
        "triton": Kernels((Tile(1, 1, 1.0),), 1e4, {}),
    },
    collective=300.0,
    quick=300.0,
    rates={"allgather": 1.0, "reduce_scatter": 0.5, "allreduce": 0.5, "alltoall": 1.0},
    hidden={},
    copy=20.0,
    link=4.0,
    crowd=1.0,
    barrier=100.0,
    signal=20.0,
    launch={},
    source="rough figures of a CPU, which nobody takes for speed",
)
KNOWN = {h.name: h for h in (H200, H100, CPU)}
REFERENCE = H200


def hardware_of(gpu: str) -> Hardware | None:
    """The constants of a GPU by the name that its driver gives it, such as "NVIDIA H200"; None for an unknown one."""
    return next((h for name, h in KNOWN.items() if name in gpu.lower()), None)


def named(text: str) -> tuple[Hardware, int | None]:
    """The machine that `--machine` names: `h200x8`, or `h200` for as many ranks as the program has."""
    name, _, count = text.lower().partition("x")
    if name not in KNOWN or (count and (not count.isdecimal() or int(count) < 1)):
        raise error(
            f"unknown machine '{text}'",
            expected=f"one of {', '.join(KNOWN)}, with the number of ranks if you like, such as h200x8",
            hint=did_you_mean(name, KNOWN),
        )
    return KNOWN[name], int(count) if count else None
