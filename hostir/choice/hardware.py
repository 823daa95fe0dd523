"""Known machines: the constants of their GPUs for the cost model, and the measurements from which they come.

H100 and H200 have the same SMs and the same links, and their constants differ only in the rates of memory. They are
fitted together to the times of all candidates on 2 GPUs in benchmarks/results, with 1 to 32,768 rows. The fit minimizes
the number of estimates for CUDA graphs that are off by more than 10 %, and the regret of the choice. Constants about
which the times say little stay near their starting values. Tables on 4 and 8 GPUs, and old ones, count half.

92 % of the estimates for the tables in benchmarks/results/2xH100 and 2xH200 are within 10 % of the time. Those in
2xH200 were recorded after the fit, mostly of rows that had been measured before on other days: 91 % are within 10 %.
A fit that sees only the tables in these two folders predicts 88 % of the times in the older tables. Two tables of H200
for the same rows, made on different days, agree within 10 % in 97 % of the times. All-gathers by `low_latency` have the
rate of sums. It was fitted before any such all-gather was measured. On 8 ranks, sums were only emulated: see
tests/choice/test_recorded.py. `python -m benchmarks.regret` prints the shares of each table, and the time that is lost
if the choice follows the estimates.

Not fitted are `kernel_signal`, which was measured by a chain of copies in which kernels on another stream send the
signals, the constants of all-to-alls, and `busy_sms`. Host times of operations are fitted to those of all candidates in
benchmarks/results/2xH200, where native code issues most calls. The speeds of these hosts differ by a factor of two.
Pipelines take about twice as long as these times predict, because Python issues collectives that run beside other work.
The constants of the Triton matmul are in hostir/kernels/matmul/tiles.py.

Nothing was measured on several hosts. The constants of NICs stand for hosts with one NIC of 400 Gb/s for each GPU, of
which NCCL uses nine tenths.
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
        throttle: the share of the peak that a call loses for each doubling of its work beyond 0.03 TFLOP, because power
            limits the clock.
        memory: the rate of kernels that are bound by memory, counting the bytes read and the bytes written.
        operands: the rate at which a matmul reads its operands from memory and writes its result.
        dirty: the bytes that earlier work has left in L2 and not in memory when a call begins. A matmul writes them to
            memory while it loads its operands.
        small_kernel: the time of a kernel that moves few bytes.
        during_matmul: the share of its rate that a kernel keeps beside a matmul if memory bounds it. It gets SMs
            as tiles of the matmul end, and hardly slows the matmul down.
        ending: the time that the last kernel of a call takes to end the call: two trips to memory and one to a peer.
        begin: the time from the launch of a call until its first task begins.
        first_matmul: the time by which the first matmul of a call takes longer: its code and its operands are not in
            caches yet.
        collective: the fixed time of a collective.
        captured: the time by which a call with a matmul and collectives of NCCL begins later in a CUDA graph than if
            the host issues it.
        low_latency: the fixed time of a collective by NCCL's protocols of low latency.
        low_latency_step: the time by which such a collective takes longer if it moves more than 64 KB.
        all_reduce: the time by which an all-reduce takes longer than another collective by the protocol of high rate.
        behind: the time by which a collective takes longer if a matmul is the last task that it waits for.
        rates: the rate of each collective, counting the bytes that leave a rank and half of the bytes that it keeps.
        during_computation: the share of the rate of each collective that is left while a computation runs.
        sending: the rate at which the kernel `low_latency` sends to peers, while it adds up or stores what arrives.
        copy: the fixed time of a copy by a copy engine.
        waited: the time by which such a copy takes longer if its stream waits for a flag or for another stream.
        link: the rate of copies to a peer.
        crowded: the share of `link` that is left while copies with several peers overlap.
        push: the fixed time of a kernel that copies on some SMs.
        sm_rate: the rate at which each SM of this kernel stores to a peer. All its SMs together reach at most `link`.
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
    dirty: float = 0.0
    low_latency_step: float = 0.0
    begin: float = 0.0
    first_matmul: float = 0.0
    captured: float = 0.0
    all_reduce: float = 0.0
    behind: float = 0.0
    waited: float = 0.0
    sending: float = 360.0
    during_matmul: float = 0.5
    ending: float = 2.0
    host_gpus: int = 8
    nic: float = 45.0
    nic_latency: float = 6.0
    gpus_per_nic: int = 1
    source: str = ""

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
    Tile(64, 128, rate=0.765),
    Tile(64, 64, rate=0.738),
)
_GEMMS = (*(dtype for dtype in FLOATS if dtype not in FP8), "f8", "f8s")  # `Gemm`'s names of operand dtypes
# TFLOP/s of calls that are too short for a power limit.
_CUBLAS_PEAK = {"bf16": 907.0, "f16": 907.0, "f32": 57.5, "f64": 66.4, "f8": 1730.0, "f8s": 1550.0}
H200 = Hardware(
    "h200",
    sms=132,
    throttle=0.0345,
    memory=3800.0,
    operands=3660.0,
    dirty=25.2e6,
    small_kernel=5.75,
    kernels={
        "aten": Kernels(
            dict.fromkeys(_GEMMS, _CUBLAS_TILES),
            Rates({dtype: peak / 132 for dtype, peak in _CUBLAS_PEAK.items()}, tile=1.17),
            start=2.73,
            busy_sms={"allgather": 55, "reduce_scatter": 48, "allreduce": 48, "alltoall": 48},
        ),
        "triton": Kernels(
            {dtype: candidates(dtype) for dtype in _GEMMS if dtype != "f64"}
            | {"f64": _CUBLAS_TILES},  # ATen computes f64
            replace(replace(TRITON, peak={**TRITON.peak, "f64": 60.0 / 132}).scaled(1.1), tile=1.45),
            start=2.83,
            busy_sms={"allgather": 14, "reduce_scatter": 68, "allreduce": 68, "alltoall": 68},
        ),
    },
    collective=22.2,
    low_latency=5.05,
    low_latency_step=2.61,
    rates={
        "allgather": 349.0,
        "reduce_scatter": 379.0,
        "allreduce": 395.0,
        "alltoall": 360.0,
    },
    during_computation={
        "allgather": 0.755,
        "reduce_scatter": 0.663,
        "allreduce": 0.65,
        "alltoall": 0.738,
    },
    copy=6.42,
    link=361.0,
    crowded=0.64,
    push=5.8,
    sm_rate=21.4,
    barrier=5.45,
    signal=1.9,
    kernel_signal=2.5,
    raised=10.5,
    edge=1.05,
    flag_wait=10.4,
    poll=9.21,
    poll_started=3.37,
    launch=LAUNCH,
    host_lead=40.0,
    begin=3.33,
    first_matmul=0.734,
    captured=5.77,
    all_reduce=5.03,
    behind=4.53,
    waited=4.98,
    sending=328.0,
    during_matmul=0.35,
    ending=4.46,
    source="fitted to calls on 2 x H100 and 2 x H200 with NVLink 4",
)
H100 = replace(H200, name="h100", memory=2650.0, operands=2760.0)
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
