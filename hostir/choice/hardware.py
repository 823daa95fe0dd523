"""Known machines: the constants of their GPUs for the cost model, and the measurements that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.source import did_you_mean, error
from hostir.ir.types import DTYPES, FP8
from hostir.runtime.kernels.tiles import TRITON, Rates, Tile, candidates

# Constants of the cost model for known machines, and the measurements that they come from.
#
# All of H200 were measured there, one by one. Peaks, tiles and what limits the clock are fitted to matmuls alone, as
# benchmarks/matmul.py and benchmarks/allgather_matmul.py time them; those of Triton stand in
# hostir/runtime/kernels/tiles.py. Collectives are fitted to all-gathers alone, of 0.5 to 540 MB on 2,
# 4 and 8 ranks, and to benchmarks/patterns.py, which also gave what a matmul loses beside one. `copy`, `link` and
# `signal` come from a chain of copies, each with a signal, in a CUDA graph: 10.8 us for 2 MiB, 16.3 for 4, 27.2 for 8;
# `kernel_signal` from copies whose signals are kernels' on another stream, which take 3 us less each; `edge` from the
# first copy of the chain, which begins 10 us after the launch; `poll` from fused calls, which take 4 to 21 us more than
# their own copy and their matmul, and end, of 512 rows and fewer, 15 to 20 us later than the last rows and one tile
# explain;
# `push` and `stores` from calls of the strategy `push` on 2 and 4 ranks, of 64 to 4096 rows. Host times are fitted to
# what benchmarks/allgather_matmul.py recorded, as are `host_lead` and `quick`: of hosts that have nothing else to do.
# They vary by a factor of three, from row to row and from run to run.
#
# Those of H100 are fitted all at once, by coordinate descent, to what the candidates of benchmarks/results/2xH100 took in
# CUDA graphs, of 64 to 16,384 rows: the mean square of log(estimate / time), where candidates near the fastest of their
# row count most. `python -m benchmarks.regret` prints what the choice by these estimates loses.
#
# tests/choice/peers_reduce_scatter.json has what reduce-scatters and all-reduces took behind a matmul on 2 GPUs: the
# constants are not fitted to it. Estimates of NCCL behind cuBLAS are 0.99 to 1.08 of it from 128 rows on; those of
# blocks sent as they are done, and added by one kernel, 0.96 to 1.08 in nine rows of ten.


@dataclass(frozen=True)
class Kernels:
    """A family of matmul kernels: the tiles that it chooses from, and how fast it is with them.

    Fields:
        tiles: by dtype.
        rates: of the kernels on this GPU, before power limits them.
        start: microseconds to start and end a kernel.
        busy_sms: how many SMs it loses while a collective of a kind runs.
    """

    tiles: Mapping[str, tuple[Tile, ...]]
    rates: Rates
    start: float
    busy_sms: Mapping[str, int]


@dataclass(frozen=True)
class Hardware:
    """The constants of a GPU among others of one host. Times are in microseconds, rates in GB/s.

    Fields:
        throttle: the loss of peak for each doubling of a call's work beyond 0.2 TFLOP, as power limits the clock.
        memory: rate of kernels that are bound by memory, in bytes read and written.
        collective: fixed cost of a collective; `quick` that of a low-latency one, at a third of the rate.
        rates: of each kind of collective, of the bytes that leave a rank and half of those that it keeps.
        hidden: the share of that rate which is left beside a computation.
        copy: fixed cost of a copy; `link` its rate to a peer; `crowd` the share of that left when copies overlap.
        push: fixed cost of a kernel that copies on some SMs; `stores` the rate to a peer of each SM, at most `link` in
            all; `pushed` the share of its rate that a matmul keeps which starts beside such a kernel.
        barrier, signal: across ranks.
        kernel_signal: from the end of a copy until a kernel on another stream has set the flag after it.
        edge: from the end of a task until a task on another stream starts that waits for it.
        turn: from the end of a matmul to the start of the next on its stream, with a wait for a flag in between.
        poll: from a kernel's start, or from a signal, until a kernel that polls flags multiplies.
        launch: host time of issuing one of each kind, if no CUDA graph replays them; `flags` is what waiting for flags
            adds to a Triton matmul, `call` the fixed cost of a call. `host_lead` is how much of that passes while the
            device is busy with earlier work, such as the 90 us of a benchmark that writes all of L2, less what the
            device has to do after it.
    """

    name: str
    sms: int
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
    push: float
    stores: float
    pushed: float
    barrier: float
    signal: float
    kernel_signal: float
    edge: float
    turn: float
    poll: float
    launch: Mapping[str, float] = field(default_factory=dict)
    host_lead: float = 0.0
    source: str = ""


LAUNCH = {
    "call": 30.0,
    "matmul": 32.0,
    "triton matmul": 6.0,
    "flags": 2.0,
    "compute": 8.0,
    "communicate": 32.0,
    "wait": 3.5,
    "synchronize": 3.0,
    "delay": 5.5,
    "copy": 8.5,
    "push": 4.0,
    "signal": 5.5,
    "barrier": 5.5,
    "allocate": 3.0,
    "view": 1.0,
    "stream": 0.7,
}

_CUBLAS_TILES = (
    Tile(128, 256),
    Tile(256, 128),
    Tile(128, 192, rate=0.93),
    Tile(128, 128),
    Tile(64, 256, rate=0.7),
    Tile(64, 128, rate=0.81),
    Tile(64, 64, rate=0.51),
)
_GEMMS = (*(dtype for dtype in DTYPES if dtype not in FP8), "f8", "f8s")  # as `Gemm` names dtypes of operands
# Of fp8 operands as measured for the largest products of benchmarks/results/fp8_matmul.md.
_CUBLAS_PEAK = {"bf16": 820.0, "f16": 820.0, "f32": 52.0, "f64": 60.0, "f8": 1560.0, "f8s": 1400.0}
H200 = Hardware(
    "h200",
    sms=132,
    throttle=0.045,
    memory=3300.0,
    kernels={
        "aten": Kernels(
            dict.fromkeys(_GEMMS, _CUBLAS_TILES),
            Rates({dtype: peak / 132 for dtype, peak in _CUBLAS_PEAK.items()}, tile=2.7),
            start=4.0,
            busy_sms={"allgather": 32, "reduce_scatter": 28, "allreduce": 28, "alltoall": 28},
        ),
        "triton": Kernels(
            {dtype: candidates(dtype) for dtype in _GEMMS if dtype != "f64"}
            | {"f64": _CUBLAS_TILES},  # which ATen runs
            replace(TRITON, peak={**TRITON.peak, "f64": 60.0 / 132}),
            start=4.0,
            busy_sms={"allgather": 12, "reduce_scatter": 48, "allreduce": 48, "alltoall": 48},
        ),
    },
    collective=21.0,
    quick=10.0,
    rates={"allgather": 375.0, "reduce_scatter": 360.0, "allreduce": 360.0, "alltoall": 360.0},
    hidden={"allgather": 1.0, "reduce_scatter": 0.6, "allreduce": 0.6, "alltoall": 0.6},
    copy=3.5,
    link=365.0,
    crowd=0.66,
    push=7.0,
    stores=25.0,
    pushed=0.88,
    barrier=5.0,
    signal=2.0,
    kernel_signal=2.5,
    edge=5.0,
    turn=3.0,
    poll=15.0,
    launch=LAUNCH,
    host_lead=40.0,
    source="measured on 8 x H200 with NVLink 4",
)
_STARTS, _TILE_US = {"aten": 10.0, "triton": 6.5}, {"aten": 1.2, "triton": 1.3}
H100 = replace(
    H200,
    name="h100",
    throttle=0.023,
    memory=2150.0,
    kernels={
        family: replace(kernels, rates=replace(kernels.rates, tile=_TILE_US[family]), start=_STARTS[family])
        for family, kernels in H200.kernels.items()
    },
    collective=28.0,
    quick=12.5,
    rates={**H200.rates, "allgather": 378.0, "reduce_scatter": 352.0},
    copy=8.5,
    link=408.0,
    push=9.0,
    stores=28.0,
    barrier=5.6,
    signal=7.0,
    edge=2.8,
    turn=5.2,
    poll=11.0,
    source="fitted to calls on 2 x H100 with NVLink 4",
)
_CPU_PEAK = {"bf16": 0.02, "f16": 0.02, "f32": 0.05, "f64": 0.025, "f8": 0.02, "f8s": 0.02}
_ON_CPU = {dtype: (Tile(1, 1, 1),) for dtype in _GEMMS}, Rates(_CPU_PEAK)
CPU = Hardware(
    "cpu",
    sms=1,
    throttle=0.0,
    memory=5.0,
    kernels={
        "aten": Kernels(*_ON_CPU, start=10.0, busy_sms={}),
        "triton": Kernels(*_ON_CPU, start=1e4, busy_sms={}),
    },
    collective=300.0,
    quick=300.0,
    rates={"allgather": 1.0, "reduce_scatter": 0.5, "allreduce": 0.5, "alltoall": 1.0},
    hidden={},
    copy=20.0,
    link=4.0,
    crowd=1.0,
    push=20.0,
    stores=4.0,
    pushed=1.0,
    barrier=100.0,
    signal=20.0,
    kernel_signal=20.0,
    edge=0.0,
    turn=0.0,
    poll=0.0,
    launch={},
    source="rough figures of a CPU, which nobody takes for speed",
)
KNOWN = {h.name: h for h in (H200, H100, CPU)}
REFERENCE = H200


def hardware_of(gpu: str) -> Hardware | None:
    """Return the constants of a GPU by its driver's name for it, such as "NVIDIA H200"; None if unknown."""
    return next((h for name, h in KNOWN.items() if name in gpu.lower()), None)


def named(text: str) -> tuple[Hardware, int | None]:
    """Return the machine that `--machine` names: `h200x8`, or `h200` for as many ranks as the program has."""
    name, _, count = text.lower().partition("x")
    if name not in KNOWN or (count and (not count.isdecimal() or int(count) < 1)):
        raise error(
            f"unknown machine '{text}'",
            expected=f"one of {', '.join(KNOWN)}, with the number of ranks if you like, such as h200x8",
            hint=did_you_mean(name, KNOWN),
        )
    return KNOWN[name], int(count) if count else None
