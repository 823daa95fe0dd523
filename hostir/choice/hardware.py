"""What machines are known to do: constants of the cost model, each with where it comes from.

All of H200 were measured there. Peaks, tiles and what limits the clock are fitted to matmuls alone, as
benchmarks/matmul.py and benchmarks/allgather_matmul.py time them; how much of the peak each Triton tile reaches stands
in hostir/runtime/kernels/tiles.py as well. Collectives are fitted to all-gathers alone, of 0.5 to 540 MB on 2, 4 and 8
ranks, and to benchmarks/patterns.py, which also gave what a matmul loses beside one. `copy`, `link` and `signal` come
from a chain of copies, each with a signal, in a CUDA graph: 10.8 us for 2 MiB, 16.3 for 4, 27.2 for 8; `teller` from
copies whose signals are kernels' on another stream, which take 3 us less each; `edge` from the first copy of the chain,
which begins 10 us after the launch; `look` from fused calls, which take 4 to 21 us more than their own copy and their
matmul, and end, of 512 rows and fewer, 15 to 20 us later than the last rows and one tile explain; `push` and `stores`
from calls of the strategy `push` on 2 and 4 ranks, of 64 to 4096 rows. Host times are fitted to what
benchmarks/allgather_matmul.py recorded, together with `ahead` and `quick`: of hosts that have nothing else to do. They
vary by a factor of three, from row to row and from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.source import did_you_mean, error


@dataclass(frozen=True)
class Tile:
    """An output tile of a matmul kernel: its rows and columns, and how much of the peak its inner loop reaches.

    `fed` is the share where rows come while the kernel runs, if it differs.
    """

    rows: int
    columns: int
    share: float
    fed: float | None = None


@dataclass(frozen=True)
class Kernels:
    """A family of matmul kernels: the tiles that it chooses from, and microseconds to start one and to end it.

    `peak` is in TFLOP/s, by dtype, before power limits it; `each` is what a tile takes besides its arithmetic, to fill
    its pipeline and to store. `beside` is how many SMs it loses while a collective of a kind runs. `split` is what a
    tile of a thin last wave takes besides when it is split along K: once, for each part, and for 128 x 256 elements;
    None where none is split.
    """

    tiles: tuple[Tile, ...]
    start: float
    beside: Mapping[str, int]
    peak: Mapping[str, float]
    each: float = 0.0
    split: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Hardware:
    """A GPU among others of one host. Times are in microseconds, rates in GB/s.

    Fields:
        throttle: what each doubling of a call's work beyond 0.2 TFLOP takes off the peak, as power limits the clock.
        memory: bytes read and written by what is bound by memory.
        collective: what one of them costs, whatever it moves; `quick` where it moves little, at a third of the rate.
        rates: of each kind of collective, of the bytes that leave a rank and half of those that it keeps.
        hidden: the part of that rate which is left beside a computation.
        copy: what one copy costs; `link` its rate to a peer; `crowd` what is left of that where copies overlap.
        push: what a kernel costs that copies on some SMs; `stores` its rate to a peer of each SM, no more than `link`;
            `pushed` what is left of the rate of a matmul that starts beside it.
        barrier, signal: across ranks.
        teller: from the end of a copy until a kernel on another stream has raised a flag behind it.
        edge: from the end of something to the begin of what waits for it on another stream.
        turn: from the end of a matmul until the next of its stream, which a flag is waited for in between.
        look: what a kernel that looks for signals takes from its start, or from the signal, until it multiplies.
        launch: host time of issuing one of each kind, where no CUDA graph replays them; `flags` is what it takes a
            Triton matmul besides to wait for them, `call` what it takes a call besides. `ahead` is how much of all that
            passes while the device is busy with something before the call, such as the 90 us of a benchmark that writes
            all of L2, less what the device has to do after it.
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
    teller: float
    edge: float
    turn: float
    look: float
    launch: Mapping[str, float] = field(default_factory=dict)
    ahead: float = 0.0
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

H200 = Hardware(
    "h200",
    sms=132,
    throttle=0.045,
    memory=3300.0,
    kernels={
        "aten": Kernels(
            (
                Tile(128, 256, 1.0),
                Tile(256, 128, 1.0),
                Tile(128, 192, 0.93),
                Tile(128, 128, 1.0),
                Tile(64, 256, 0.7),
                Tile(64, 128, 0.81),
                Tile(64, 64, 0.51),
            ),
            start=4.0,
            beside={"allgather": 32, "reduce_scatter": 28, "allreduce": 28, "alltoall": 28},
            peak={"bf16": 820.0, "f16": 820.0, "f32": 52.0},
            each=2.7,
        ),
        "triton": Kernels(
            (
                Tile(128, 256, 1.0),
                Tile(128, 128, 0.95, fed=0.86),
                Tile(64, 256, 0.9),
                Tile(64, 128, 0.77, fed=0.78),
                Tile(64, 64, 0.53, fed=0.55),
            ),
            start=4.0,
            beside={"allgather": 12, "reduce_scatter": 48, "allreduce": 48, "alltoall": 48},
            peak={"bf16": 820.0, "f16": 820.0, "f32": 14.0},
            each=2.7,
            split=(3.0, 2.0, 3.0),
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
    teller=2.5,
    edge=5.0,
    turn=3.0,
    look=15.0,
    launch=LAUNCH,
    ahead=40.0,
    source="measured on 8 x H200 with NVLink 4",
)
H100 = replace(H200, name="h100", memory=2400.0, source="those of H200, with the memory of H100")
CPU_PEAK = {"bf16": 0.02, "f16": 0.02, "f32": 0.05}
CPU = Hardware(
    "cpu",
    sms=1,
    throttle=0.0,
    memory=5.0,
    kernels={
        "aten": Kernels((Tile(1, 1, 1.0),), 10.0, {}, CPU_PEAK),
        "triton": Kernels((Tile(1, 1, 1.0),), 1e4, {}, CPU_PEAK),
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
    teller=20.0,
    edge=0.0,
    turn=0.0,
    look=0.0,
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
