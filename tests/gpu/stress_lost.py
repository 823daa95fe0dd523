"""Test that ranks end soon, with a diagnostic, if another rank dies or stalls in the middle of one-sided calls.

    python tests/gpu/stress_lost.py --ranks N [--device cpu] [CASE ...]

It starts the ranks itself, because a launcher would end the other ranks; all on one GPU if there are fewer GPUs than
ranks. `killed_eager`, `killed_replayed`: rank 1 kills itself between two statements of a call, or during a replay; each
other rank must end within 30 s with a diagnostic that names its statement. `stalled_ring`, `stalled_fused` and
`stalled_spinning` (a waiting kernel): rank 1 skips a call; the others must end within HOSTIR_TIMEOUT seconds and 10
more, naming the rank, the statement, and the flag or barrier. `killed_nccl`, `stalled_nccl`: the same with a collective
of NCCL, which native code calls. `killed_low_latency`, `killed_low_latency_replayed`, `stalled_low_latency`: the same
with an all-gather by `low_latency`, whose kernel waits for the rows of rank 1. `stalled_one_shot`: the same with a
kernel of torch's, which waits for ever. Processes with such kernels get 10 s more, because the operating system ends
them. The exit code is 1 if a rank does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are not installed

from tests.gpu import on_one_gpu
from tests.gpu.stress_cases import LOW_LATENCY
from tests.launch import free_port

if TYPE_CHECKING:
    from tests.gpu.stress_units import Unit

ROOT = Path(__file__).parents[2]
AT = 20  # the call in which rank 1 dies, or which it skips
MOST = 30.0  # seconds in which the others must end after a death
LATE = 10.0  # seconds in which the others must end after the timeout
ALARM = 10.0  # seconds after which a process is ended that cannot exit, because a kernel of its GPU does not end
STARTING = 240.0  # seconds until rank 1 must reach its last call
TIMEOUT = 40.0  # longer than a kernel polls flags, which is about 20 s
STATEMENT = r"error: rank {rank}(?: is ended at|,| stands at| is ended:) '[^'\n]+'"
FLAG = r"flag|barrier|for rank 1"


@dataclass(frozen=True)
class Case:
    strategy: str
    kernels: str
    killed: bool
    replayed: bool = False
    reduced: bool = False  # a product is summed, instead of a gathered tensor multiplied
    endless: bool = False  # the kernel that waits does not end

    @property
    def most(self) -> float:
        """The seconds in which the others must end."""
        return MOST if self.killed else TIMEOUT + LATE + ALARM * self.endless


CASES = {
    "killed_eager": Case("fused", "triton", killed=True),
    "killed_replayed": Case("fused", "triton", killed=True, replayed=True),
    "stalled_ring": Case("ring", "aten", killed=False),
    "stalled_fused": Case("fused", "aten", killed=False),
    "stalled_spinning": Case("fused", "triton", killed=False),
    "killed_nccl": Case("sequential", "aten", killed=True),
    "stalled_nccl": Case("sequential", "aten", killed=False),
    "killed_low_latency": Case(LOW_LATENCY, "triton", killed=True),
    "killed_low_latency_replayed": Case(LOW_LATENCY, "triton", killed=True, replayed=True),
    "stalled_low_latency": Case(LOW_LATENCY, "triton", killed=False, endless=True),
    "stalled_one_shot": Case("sequential by one_shot", "triton", killed=False, reduced=True, endless=True),
}


def rank_of(case: Case, device: str) -> None:
    """Call until rank 1 is lost, and then until this process ends."""
    from hostir.job.session import session
    from tests.gpu.stress_cases import Config, Product
    from tests.gpu.stress_units import Delays, Unit

    with session(device) as job:
        assert job is not None
        kernels = case.kernels if device == "cuda" else "aten"
        mesh, sides = tuple(range(job.size)), (Product(256, linear=False, bias=False, split=False),)
        config = Config(case.strategy, kernels, "bf16", mesh, 2, (64, 64), 512, sides, kept=False, priorities=(0,) * 8)
        config = replace(config, reduced=case.reduced)
        unit = Unit(config, job.rank, job.device, Delays(job.device))
        form = "out" if case.replayed else "eager"
        for call in range(100 * AT):
            if job.rank == 1 and call == AT:
                lose(unit, case, form)
            unit.call(form, unit.parts(unit.unsharded(0, call), 0), 0, 0)
            if call % 4 == 0 or call >= AT:
                unit.executor.synchronize()


def lose(unit: Unit, case: Case, form: str) -> None:
    """Stall, or die in the middle of a call, on rank 1."""
    print("LOST", flush=True)
    if not case.killed:
        time.sleep(10 * TIMEOUT)
    if unit.device.type == "cuda":
        from hostir.machines.cuda.machine import CudaPlan

        torch.cuda._sleep(100_000_000)  # about 50 ms: the device still works when the process dies
        for plan in [] if case.replayed else unit.executor.plans.values():
            assert isinstance(plan, CudaPlan)
            plan.steps[len(plan.steps) // 2] = die
        unit.call(form, unit.parts(unit.unsharded(0, AT), 0), 0, 0)
    die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Ended:
    """The end of a rank: seconds after the loss (negative if it had to be killed), exit code, and output."""

    rank: int
    seconds: float
    code: int
    output: str

    def fault(self, case: Case) -> str:
        """Return the error of this end, or ""."""
        if self.seconds < 0 or self.seconds > case.most:
            return f"did not end within {case.most:.0f} s"
        if self.code == 0:
            return "ended as if all were well"
        named = re.search(STATEMENT.format(rank=self.rank), self.output)
        if not named:
            return "does not name its statement"
        what, words = "flag", FLAG
        if case.strategy.startswith("sequential"):
            what, words = "collective", "allreduce" if case.reduced else "allgather"
        if not case.killed and not re.search(words, self.output[named.start() :]):
            return f"does not name the {what}"
        return ""


def start(name: str, rank: int, ranks: int, port: int, device: str, folder: Path) -> subprocess.Popen[bytes]:
    job = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    if device == "cuda" and torch.cuda.device_count() < ranks:
        job |= on_one_gpu.environment(rank)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HOSTIR_TIMEOUT": f"{TIMEOUT:g}"}
    command = [sys.executable, __file__, "--ranks", str(ranks), "--device", device, name]
    output = (folder / f"{name}.{rank}").open("wb")
    with output:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **job, **where}, stdout=output, stderr=subprocess.STDOUT
        )


def watch(name: str, ranks: int, device: str, folder: Path) -> list[Ended]:
    """Start a case, wait until all ranks except rank 1 have ended, and kill the rest."""
    case, port = CASES[name], free_port()
    jobs = [start(name, rank, ranks, port, device, folder) for rank in range(ranks)]
    try:
        lost = loss(folder / f"{name}.1", jobs[1])
        ended: dict[int, float] = {}
        while len(ended) < ranks - 1 and time.monotonic() - lost < case.most + 30:
            for rank, job in enumerate(jobs):
                if rank != 1 and rank not in ended and job.poll() is not None:
                    ended[rank] = time.monotonic() - lost
            time.sleep(0.05)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    texts = {rank: (folder / f"{name}.{rank}").read_text(errors="replace") for rank in range(ranks)}
    return [Ended(r, ended.get(r, -1.0), jobs[r].returncode, texts[r]) for r in range(ranks) if r != 1]


def loss(output: Path, job: subprocess.Popen[bytes]) -> float:
    """Wait for the loss of rank 1 and return its time."""
    begin = time.monotonic()
    while "LOST" not in output.read_text(errors="replace"):
        if job.poll() is not None or time.monotonic() - begin > STARTING:
            raise SystemExit(f"rank 1 did not reach call {AT}:\n{output.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)
    return time.monotonic()


def report(name: str, ended: Sequence[Ended]) -> bool:
    """Print how each rank ended; return True if all ended as they should."""
    faults = 0
    for it in ended:
        fault = it.fault(CASES[name])
        faults += bool(fault)
        error = re.search(r"error: .*", it.output)
        text = error[0] if error else it.output[-500:]
        print(f"{name}: rank {it.rank} ended after {it.seconds:.1f} s, code {it.code}: {text}", flush=True)
        if fault:
            print(f"FAILED {name}: rank {it.rank} {fault}; the end of its output:\n{it.output[-3000:]}", flush=True)
    return not faults


def main() -> int:
    """Run one rank if the process was started as a rank, else start and watch the ranks; return the exit code."""
    parser = argparse.ArgumentParser(description="How the other ranks end when one is lost.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("lost"), help="folder for the output of the ranks")
    parser.add_argument("--json", type=Path, default=None, help="file for the times")
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if "RANK" in os.environ:
        rank_of(CASES[chosen.cases[0]], chosen.device)
        return 0
    chosen.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Ended]] = {}
    good = []
    for name in chosen.cases or CASES:
        results[name] = watch(name, chosen.ranks, chosen.device, chosen.folder)
        good.append(report(name, results[name]))
    if chosen.json is not None:
        figures = {name: {it.rank: round(it.seconds, 1) for it in ended} for name, ended in results.items()}
        chosen.json.write_text(json.dumps({"ranks": chosen.ranks, "seconds": figures}, indent=1) + "\n")
    print(f"{sum(good)} of {len(good)} cases ended as they should on {chosen.ranks} ranks", flush=True)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
