"""Known machines: the constants of their GPUs for the cost model, and the measurements from which they come.

The constants of H200 were measured one by one:

- Peaks, tiles and `throttle` are fitted to matmuls that run alone, as benchmarks/matmul.py and
  benchmarks/allgather_matmul.py time them. The constants of the Triton matmul are in hostir/kernels/matmul/tiles.py.
- The constants of collectives are fitted to all-gathers that run alone, of 0.5 to 540 MB on 2, 4 and 8 ranks, and to
  benchmarks/patterns.py. That benchmark also shows how much slower a matmul is while a collective runs.
- `copy`, `link` and `signal` come from a chain of copies in a CUDA graph, each followed by a signal: a copy and its
  signal take 10.8 us for 2 MiB, 16.3 us for 4 MiB and 27.2 us for 8 MiB. `edge` comes from the first copy of the chain,
  which begins 10 us after the launch.
- `kernel_signal` comes from a chain in which kernels on another stream send the signals: every copy takes 3 us less.
- `poll` comes from fused calls. They take 4 to 21 us more than their first copy and their matmul together. With at most
  512 rows, they end 15 to 20 us later than one tile after the arrival of the last rows.
- `push` and `sm_rate` come from calls of the strategy `push` on 2 and 4 ranks, with 64 to 4096 rows.
- `host_lead` and `low_latency` are fitted to the results of benchmarks/allgather_matmul.py.
- Host times of operations are fitted to those of all candidates in benchmarks/results/2xH200, where native code issues
  most calls. The speeds of these hosts differ by a factor of two. Pipelines take about twice as long as these times
  predict, because Python issues collectives that run beside other work.

Then nine of them were fitted again, to all times of candidates on H200 that were known then, of all-gathers before
matmuls and of benchmarks/patterns.py: `tile` of both families of kernels, `collective`, `low_latency`, `crowded`,
`push`, `flag_wait`, `poll`, and `during_computation` of all-gathers. They moved by 4 to 27 %. A fit of all constants
brings 89 % of these estimates within 10 % instead of 85 %, but estimates of the programs in
tests/choice/peers_reduce_scatter.json get worse. None is fitted to the sums, the collectives alone and the fp8 matmuls
in benchmarks/results/2xH200: 71 % of these estimates are within 10 %.

The constants of H100 are fitted together to the times of the candidates of benchmarks/results/2xH100, with 1 to 16,384
rows. The fit minimizes the number of estimates for CUDA graphs that are off by more than 10 %, and the regret of the
choice. It keeps constants near their starting values if the times say little about them. Some constants always occur
together, such as `copy` and `signal`, and only their sum is known. If the same fit sees only half of the rows, 87 % of
the estimates of the other half are within 10 %.
`python -m benchmarks.regret` prints the time that is lost if the choice follows these estimates.

Nothing was measured on several hosts. The constants of NICs stand for hosts with one NIC of 400 Gb/s for each GPU, of
which NCCL uses nine tenths.

tests/choice/peers_reduce_scatter.json has the times of reduce-scatters and all-reduces after a matmul on 2 GPUs. No
constant is fitted to these times, but they decided which constants of H200 were fitted again. From 128 rows on,
estimates of NCCL after cuBLAS are 0.97 to 1.10 times the measured time. Some programs send each block as soon as it is
computed, and add up all blocks in one kernel. Nine of ten estimates of these programs are 0.95 to 1.08 times the
measured time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.source import did_you_mean, error
from hostir.ir.types import FLOATS, FP8
from hostir.kernels.matmul.estimate import TRITON, Rates
from hostir.kernels.matmul.tiles import Tile, candidates


@dataclass(frozen=True)
class Kernels:
    """A family of matmul kernels on one GPU: the tiles that it chooses from, and the speed of its kernels.

    Fields:
        tiles: the tiles of each dtype.
        rates: the rates of the kernels on this GPU at full clock.
        start: the microseconds that it takes to start and end a kernel.
        busy_sms: the number of SMs that a matmul loses while a collective runs, by the collective's name.
    """

    tiles: Mapping[str, tuple[Tile, ...]]
    rates: Rates
    start: float
    busy_sms: Mapping[str, int]


@dataclass(frozen=True)
class Hardware:
    """The constants of a GPU in a host with several GPUs. Times are in microseconds, rates in GB/s.

    Fields:
        throttle: the share of the peak that a call loses for each doubling of its work beyond 0.2 TFLOP, because power
            limits the clock.
        memory: the rate of kernels that are bound by memory, counting the bytes read and the bytes written.
        operands: the rate at which a matmul reads its operands from memory and writes its result.
        small_kernel: the time of a kernel that moves few bytes.
        during_matmul: the share of its rate that a kernel keeps beside a matmul if memory bounds it. It gets SMs
            as tiles of the matmul end, and hardly slows the matmul down.
        ending: the time that the last kernel of a call takes to end the call: two trips to memory and one to a peer.
        begin: the time from the launch of a call until its first task begins, if the call has a matmul. Its code and
            operands are not in caches yet. 0 if the `start` of each kernel includes it.
        collective: the fixed time of a collective.
        captured: the time by which a call with collectives begins later in a CUDA graph than if the host issues it.
        low_latency: the fixed time of a collective by a low-latency protocol. Such a protocol has a third of the rate.
        all_reduce: the time by which an all-reduce takes longer than another collective.
        rates: the rate of each collective, counting the bytes that leave a rank and half of the bytes that it keeps.
        during_computation: the share of the rate of each collective that is left while a computation runs.
        sending: the rate at which hostir's kernel `low_latency` sends to peers and sums.
        copy: the fixed time of a copy by a copy engine.
        link: the rate of copies to a peer.
        crowded: the share of `link` that is left while copies with several peers overlap.
        push: the fixed time of a kernel that copies on some SMs.
        sm_rate: the rate at which each SM of this kernel stores to a peer. All its SMs together reach at most `link`.
        during_push: the share of its rate that a matmul keeps if it starts while a kernel copies on some SMs.
        barrier: the time of a barrier across ranks.
        signal: the time of a signal to another rank.
        kernel_signal: the time from the end of a copy until a kernel on another stream has set the flag for the copy.
        raised: the time from the end of a block of a computation until a stream that waits for its flag goes on.
        edge: the time from the end of a task until the start of a task on another stream that waits for it.
        flag_wait: the time between two matmuls on a stream if the stream waits for a flag between them.
        poll: the time until a kernel that polls flags begins to multiply. It counts from the start of the kernel, or
            from the signal if the signal comes later.
        poll_started: the same for a kernel that has started before the blocks arrive.
        launch: the time in which the host issues one operation of each name, if no CUDA graph replays it. `flags` is
            the extra time of a Triton matmul that waits for flags. `call` is the fixed time of a call.
        host_lead: the host time that does not count, because the device is still busy with earlier work when a call
            begins. In benchmarks the earlier work is 90 us in which L2 is overwritten. The time that the device needs
            after the last launch is already subtracted.
        host_gpus: the number of GPUs in a host; 0 if a host can have any number of ranks.
        nic: the rate of a NIC in each direction. NICs connect hosts.
        nic_latency: the time that one step of a collective takes longer if it goes to another host.
        gpus_per_nic: the number of GPUs of a host that share one NIC; 0 if all of them share one.
        issued: the constants that differ, by name, if the host issues the operations one by one, ahead of the device,
            instead of replaying a CUDA graph.
        source: the origin of the constants.
    """

    name: str
    sms: int
    throttle: float
    memory: float
    operands: float
    small_kernel: float
    kernels: Mapping[str, Kernels]
    collective: float
    low_latency: float
    rates: Mapping[str, float]
    during_computation: Mapping[str, float]
    copy: float
    link: float
    crowded: float
    push: float
    sm_rate: float
    during_push: float
    barrier: float
    signal: float
    kernel_signal: float
    raised: float
    edge: float
    flag_wait: float
    poll: float
    poll_started: float
    launch: Mapping[str, float] = field(default_factory=dict)
    host_lead: float = 0.0
    sending: float = 360.0
    during_matmul: float = 0.5
    ending: float = 2.0
    begin: float = 0.0
    captured: float = 0.0
    all_reduce: float = 0.0
    host_gpus: int = 8
    nic: float = 45.0
    nic_latency: float = 6.0
    gpus_per_nic: int = 1
    issued: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    @property
    def on_streams(self) -> Hardware:
        """The constants for calls whose operations the host issues one by one."""
        return replace(self, **self.issued)  # type: ignore[arg-type]  # all of these fields are numbers

    def nic_share(self, ranks: int) -> float:
        """Return the rate of one rank between hosts, if `ranks` ranks of its host communicate at the same time."""
        return self.nic / min(self.gpus_per_nic or ranks, ranks)


LAUNCH = {
    "call": 22.0,
    "matmul": 8.0,
    "triton matmul": 5.0,
    "flags": 1.0,
    "compute": 5.0,
    "communicate": 24.0,
    "wait": 1.0,
    "synchronize": 2.5,
    "delay": 3.0,
    "copy": 4.5,
    "push": 5.0,
    "signal": 2.5,
    "barrier": 6.0,
    "allocate": 3.0,
    "view": 0.3,
    "stream": 0.2,
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
_GEMMS = (*(dtype for dtype in FLOATS if dtype not in FP8), "f8", "f8s")  # `Gemm`'s names of operand dtypes
# The peaks of fp8 operands were measured with the largest matmuls of benchmarks/results/fp8_matmul.md.
_CUBLAS_PEAK = {"bf16": 820.0, "f16": 820.0, "f32": 52.0, "f64": 60.0, "f8": 1560.0, "f8s": 1400.0}
H200 = Hardware(
    "h200",
    sms=132,
    throttle=0.045,
    memory=3300.0,
    operands=3300.0,
    small_kernel=3.0,
    kernels={
        "aten": Kernels(
            dict.fromkeys(_GEMMS, _CUBLAS_TILES),
            Rates({dtype: peak / 132 for dtype, peak in _CUBLAS_PEAK.items()}, tile=2.8),
            start=4.0,
            busy_sms={"allgather": 32, "reduce_scatter": 28, "allreduce": 28, "alltoall": 28},
        ),
        "triton": Kernels(
            {dtype: candidates(dtype) for dtype in _GEMMS if dtype != "f64"}
            | {"f64": _CUBLAS_TILES},  # ATen computes f64
            replace(TRITON, peak={**TRITON.peak, "f64": 60.0 / 132}, tile=3.0),
            start=4.0,
            busy_sms={"allgather": 12, "reduce_scatter": 48, "allreduce": 48, "alltoall": 48},
        ),
    },
    collective=22.5,
    low_latency=7.3,
    rates={"allgather": 375.0, "reduce_scatter": 360.0, "allreduce": 360.0, "alltoall": 360.0},
    during_computation={"allgather": 0.92, "reduce_scatter": 0.6, "allreduce": 0.6, "alltoall": 0.6},
    copy=3.5,
    link=365.0,
    crowded=0.58,
    push=7.7,
    sm_rate=25.0,
    during_push=0.88,
    barrier=5.0,
    signal=2.0,
    kernel_signal=2.5,
    raised=2.0,
    edge=5.0,
    flag_wait=3.6,
    poll=16.0,
    poll_started=6.0,
    launch=LAUNCH,
    host_lead=40.0,
    source="measured on 8 x H200 with NVLink 4, and partly fitted to calls",
)
# By family: the microseconds that a kernel takes to start and end, and a tile outside its K loop.
_START, _TILE_US = {"aten": 3.95, "triton": 3.53}, {"aten": 0.661, "triton": 1.32}
_BUSY = {"aten": (55, 48), "triton": (14, 68)}  # SMs during an all-gather, and during other collectives
H100 = replace(
    H200,
    name="h100",
    throttle=0.0416,
    memory=2220.0,
    operands=2620.0,
    small_kernel=4.56,
    kernels={
        family: replace(
            kernels,
            rates=replace(kernels.rates, tile=_TILE_US[family]),
            start=_START[family],
            busy_sms={name: _BUSY[family][name != "allgather"] for name in kernels.busy_sms},
        )
        for family, kernels in H200.kernels.items()
    },
    begin=6.27,
    ending=3.17,
    collective=23.6,
    captured=5.94,
    low_latency=7.36,
    all_reduce=4.41,
    rates={**H200.rates, "allgather": 375.0, "reduce_scatter": 362.0, "allreduce": 365.0},
    during_computation={"allgather": 0.833, "reduce_scatter": 0.7, "allreduce": 0.706, "alltoall": 0.7},
    sending=384.0,
    during_matmul=0.479,
    copy=12.7,
    link=402.0,
    crowded=0.62,
    push=6.22,
    sm_rate=24.5,
    during_push=0.856,
    barrier=5.41,
    signal=1.23,
    raised=8.38,
    edge=0.5,
    flag_wait=9.87,
    poll=7.14,
    poll_started=5.7,
    issued={
        "memory": 2900.0,
        "small_kernel": 3.6,
        "ending": 2.0,
        "copy": 7.0,
        "signal": 8.0,
        "poll": 4.0,
        "poll_started": 0.0,
        "edge": 3.0,
        "barrier": 9.0,
    },
    source="fitted to calls on 2 x H100 with NVLink 4",
)
_CPU_PEAK = {"bf16": 0.02, "f16": 0.02, "f32": 0.05, "f64": 0.025, "f8": 0.02, "f8s": 0.02}
_ON_CPU = {dtype: (Tile(1, 1, 1),) for dtype in _GEMMS}, Rates(_CPU_PEAK)
CPU = Hardware(
    "cpu",
    sms=1,
    throttle=0.0,
    memory=5.0,
    operands=5.0,
    small_kernel=3.0,
    kernels={
        "aten": Kernels(*_ON_CPU, start=10.0, busy_sms={}),
        "triton": Kernels(*_ON_CPU, start=1e4, busy_sms={}),
    },
    collective=300.0,
    low_latency=300.0,
    rates={"allgather": 1.0, "reduce_scatter": 0.5, "allreduce": 0.5, "alltoall": 1.0},
    during_computation={},
    copy=20.0,
    link=4.0,
    crowded=1.0,
    push=20.0,
    sm_rate=4.0,
    during_push=1.0,
    barrier=100.0,
    signal=20.0,
    kernel_signal=20.0,
    raised=20.0,
    edge=0.0,
    flag_wait=0.0,
    poll=0.0,
    poll_started=0.0,
    launch={},
    host_gpus=0,
    nic=1.0,
    nic_latency=100.0,
    gpus_per_nic=0,
    source="rough figures of a CPU, which nobody uses for its speed",
)
KNOWN = {h.name: h for h in (H200, H100, CPU)}
REFERENCE = H200


def hardware_of(gpu: str) -> Hardware | None:
    """Return the constants of a GPU, such as "NVIDIA H200"; None for an unknown GPU.

    `gpu` is the name that the driver reports.
    """
    return next((h for name, h in KNOWN.items() if name in gpu.lower()), None)


def parse_machine(text: str) -> tuple[Hardware, int | None]:
    """Parse a value of `--machine`, such as `h200x8`. Return the hardware and the number of ranks in each host.

    The number is None if the value has none.
    """
    name, _, count = text.lower().partition("x")
    if name not in KNOWN or (count and (not count.isdecimal() or int(count) < 1)):
        raise error(
            f"unknown machine '{text}'",
            expected=f"one of {', '.join(KNOWN)}, with the number of ranks if you like, such as h200x8",
            hint=did_you_mean(name, KNOWN),
        )
    return KNOWN[name], int(count) if count else None
