"""Random one-sided programs on real GPUs, called in random forms, with random delays of ranks and statements:

    torchrun --standalone --nproc-per-node N tests/gpu/stress_onesided.py [MODE] [--seconds S] [--seed N] [--json FILE]

A pool of programs is drawn and compiled first: all one-sided strategies, ATen and Triton kernels, all dtypes, ragged
sizes, slices, one or two right sides, on all ranks or some. An iteration calls one or two programs, each on a separate
stream, 1 to 4 times in succession: eagerly, with `out=` so that the executor replays its graph, or by a graph of the
caller. Inputs are fresh and are overwritten after each call. Outputs hold NaN before a call, and symmetric buffers
before each batch of iterations. Nothing waits for the device within a batch.

Errors may be 1.1 times the error of torch's unfused gather and matmul (`stress_cases.share_of_allowed`). The same
inputs must give the same bits, replayed or not, and an all-reduce must give the same bits on all ranks. The ranks agree
on the verdict before they go on. A failure is printed with the command that repeats its iteration, and the exit code is
1. A hang ends within HOSTIR_TIMEOUT seconds with a diagnostic. tests/gpu/stress_lost.py tests lost ranks.

Mode `fused_pairs` runs two programs at once with kernels that hold SMs while they wait for peers. Mode `allreduces`
runs only all-reduces: in one step, in blocks, in two steps, in chunks, with and without products.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from hostir.ir.source import HostIRError
from hostir.job.session import Session, session
from tests.gpu import stress_cases as cases
from tests.gpu.stress_cases import Iteration, Job
from tests.gpu.stress_units import Delays, Parts, Streams, Unit

BATCH = 10  # iterations between two synchronisations with the device
PERIOD = 10.0  # seconds between two lines of progress
COMPILING = 600.0  # seconds for the first run of all programs


@dataclass
class Call:
    """A call that is issued or will be."""

    what: str
    size: int
    unsharded: Sequence[torch.Tensor]
    inputs: Parts
    outputs: Parts = ()


@dataclass
class Tally:
    """Counts so far, the same on every rank except `worst`."""

    iterations: int = 0
    calls: int = 0
    mismatches: int = 0
    hangs: int = 0
    sums: int = 0  # all-reduces that were compared between ranks
    worst: float = 0.0
    forms: Counter[str] = field(default_factory=Counter)

    def line(self, seed: int) -> str:
        counted = f"{self.iterations} iterations, {self.mismatches} mismatches, {self.hangs} hangs, seed {seed}"
        return f"{counted}, {self.sums} sums on all ranks"


class Stress:
    """One rank of a run."""

    def __init__(self, job: Session, chosen: Namespace) -> None:
        self.job = job
        self.chosen = chosen
        self.on_gpu = job.device.type == "cuda"
        self.forms = cases.GPU_FORMS if self.on_gpu else cases.CPU_FORMS
        self.delays = Delays(job.device)
        self.streams = Streams(job.device)
        kernels = ("aten", "triton") if self.on_gpu else ("aten",)
        self.configs = cases.pool(chosen.seed, job.size, chosen.pool, kernels, chosen.mode)
        self.units: dict[int, Unit] = {}
        self.ran: Sequence[int] = range(len(self.configs))  # programs that are used
        self.tally = Tally()
        self.verdicts: list[tuple[int, str, torch.Tensor]] = []  # of a batch: iteration, call, share of allowed error
        self.prints: list[tuple[int, str, torch.Tensor]] = []  # of a batch: iteration, call, hash of an all-reduce
        self.number = chosen.first

    # Running ------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run all iterations; raise HostIRError if one hangs or cannot run."""
        self.compile()
        begin = printed = time.monotonic()
        most = self.chosen.iterations
        over = False
        while not over:
            faulthandler.dump_traceback_later(self.job.timeout * 2 + 30, exit=True)
            last = self.number + BATCH if most is None else min(self.number + BATCH, self.chosen.first + most)
            used: set[int] = set()
            for number in range(self.number, last):
                self.number = number
                drawn = cases.iteration(self.chosen.seed, number, self.configs, self.forms, self.chosen.mode)
                self.iterate(number, drawn)
                used |= {job.config for job in drawn.jobs}
            self.number = last
            now = time.monotonic()
            over = self.settle(used, now - begin > self.chosen.seconds)
            over = over or (most is not None and self.number >= self.chosen.first + most)
            if now - printed > PERIOD:
                printed = now
                self.say(f"{now - begin:.0f} s: {self.tally.line(self.chosen.seed)}, {self.tally.calls} calls")
        faulthandler.cancel_dump_traceback_later()

    def compile(self) -> None:
        """Make the executors of all programs, or only of those that a few iterations use."""
        faulthandler.dump_traceback_later(COMPILING, exit=True)
        if self.chosen.iterations is not None and self.chosen.iterations <= BATCH:
            numbers = range(self.chosen.first, self.chosen.first + self.chosen.iterations)
            drawn = [cases.iteration(self.chosen.seed, n, self.configs, self.forms, self.chosen.mode) for n in numbers]
            self.ran = sorted({job.config for it in drawn for job in it.jobs})
        begin = time.monotonic()
        for i in self.ran:
            self.say(f"program {i}: {self.configs[i]}")
            self.units[i] = Unit(self.configs[i], self.job.rank, self.job.device, self.delays)
        self.say(f"{len(self.ran)} programs on {self.job.size} ranks are ready after {time.monotonic() - begin:.0f} s")

    def iterate(self, number: int, drawn: Iteration) -> None:
        """Issue one iteration and its checks."""
        work = [list(self.prepared(number, i, job)) for i, job in enumerate(drawn.jobs)]
        mine = Random(f"delays {self.chosen.seed} {number} {self.job.rank}")
        self.delays.random = mine if drawn.slow else None
        self.streams.fork()
        for step in range(max(map(len, work))):
            for i, job in enumerate(drawn.jobs):
                if step < len(work[i]):
                    self.issue(i, job, work[i][step], drawn, mine)
        self.delays.random = None
        self.streams.join()
        for job, calls in zip(drawn.jobs, work, strict=True):
            self.check(number, job, calls)
        self.tally.iterations += 1

    def prepared(self, number: int, which: int, job: Job) -> Iterator[Call]:
        """The calls of a job, with their inputs."""
        unit = self.units[job.config]
        for size in set(job.sizes):
            unit.prepare(job.form, size, job.slot)
        first: Call | None = None
        for i, size in enumerate(job.sizes):
            unsharded = unit.unsharded(size, cases.inputs_seed(self.chosen.seed, number, which, i))
            call = Call(f"call {i} {job.form}", size, unsharded, unit.parts(unsharded, size))
            first = first or call
            yield call
        if job.again and first is not None:
            yield Call("call 0 again", first.size, first.unsharded, unit.parts(first.unsharded, first.size))

    def issue(self, which: int, job: Job, call: Call, drawn: Iteration, mine: Random) -> None:
        unit = self.units[job.config]
        form = "eager" if call.what.endswith("again") else job.form
        with self.streams.on(which, drawn.priorities[which]):
            if drawn.late:
                self.delays.kernel(mine)
            call.outputs = unit.call(form, call.inputs, call.size, job.slot)
        self.tally.calls += 1
        self.tally.forms[form] += 1

    def check(self, number: int, job: Job, calls: Sequence[Call]) -> None:
        unit = self.units[job.config]
        for call in calls:
            share = unit.check(call.unsharded, call.size, call.outputs)
            self.verdicts.append((number, f"{call.what} of program {job.config}", share))
            if (bits := unit.prints(call.outputs)) is not None:
                self.prints.append((number, f"{call.what} of program {job.config}", bits))
        if job.again:
            bits = unit.compare(calls[0].outputs, calls[-1].outputs)
            self.verdicts.append((number, f"bits of {job.form} and eager of program {job.config}", bits))

    # Agreeing -----------------------------------------------------------------------------------------------------
    def settle(self, used: set[int], late: bool) -> bool:
        """Wait for a batch, and exchange its verdict and whether rank 0 wants to end."""
        for i in sorted(used):
            self.units[i].executor.synchronize()
        end = torch.tensor(float(late and self.job.rank == 0), dtype=torch.float64, device=self.job.device)
        prints = [bits for *_, bits in self.prints]
        lowest = [torch.where(bits.isinf(), bits, -bits) for bits in prints]  # negated; -inf without a result
        shares = torch.stack([*(share for *_, share in self.verdicts), *prints, *lowest, end])
        mine = shares.tolist()
        dist.all_reduce(shares, op=dist.ReduceOp.MAX)
        *everyones, over = shares.tolist()
        bad = self.judge(mine, everyones) | self.judge_bits(everyones[len(everyones) - 2 * len(prints) :])
        self.tally.mismatches += len(bad)
        self.verdicts.clear()
        self.prints.clear()
        for i in sorted(used):
            self.units[i].poison_shared()
        dist.all_reduce(torch.zeros(1, device=self.job.device))  # a barrier: all ranks have poisoned their buffers
        return bool(over)

    def judge(self, mine: Sequence[float], everyones: Sequence[float]) -> set[int]:
        """Return the iterations with a wrong result."""
        bad: set[int] = set()
        for (number, what, _), share, worst in zip(self.verdicts, mine, everyones, strict=False):
            self.tally.worst = max(self.tally.worst, worst if isfinite(worst) else 0.0)
            if worst > 1:
                bad.add(number)
            if share > 1:
                self.say_failed(number, f"{what}: {share:.2f} of what is allowed")
        return bad

    def judge_bits(self, hashes: Sequence[float]) -> set[int]:
        """Return the iterations with an all-reduce of different bits on two ranks.

        `hashes` holds the largest hashes over all ranks, then the negated smallest ones.
        """
        count, bad = len(self.prints), set[int]()
        for (number, what, _), largest, smallest in zip(self.prints, hashes[:count], hashes[count:], strict=True):
            if largest != -smallest:
                bad.add(number)
                self.say_failed(number, f"{what}: ranks hold different bits of a sum")
        self.tally.sums += count
        return bad

    # Saying -------------------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        if self.job.rank == 0:
            print(text, flush=True)

    def say_failed(self, number: int, what: str) -> None:
        drawn = cases.iteration(self.chosen.seed, number, self.configs, self.forms, self.chosen.mode)
        programs = "; ".join(f"program {job.config}: {self.configs[job.config]}" for job in drawn.jobs)
        again = cases.to_repeat(self.chosen, self.job.size, number)
        print(
            f"FAILED rank {self.job.rank}, iteration {number}, {what}\n  {drawn}\n  {programs}\n  {again}", flush=True
        )

    def figures(self, seconds: float) -> dict[str, object]:
        device = torch.cuda.get_device_name() if self.on_gpu else platform.machine()
        return {
            **{"ranks": self.job.size, "device": device, "torch": torch.__version__, "seconds": round(seconds, 1)},
            **{"mode": self.chosen.mode, "seed": self.chosen.seed, "first": self.chosen.first},
            **{"iterations": self.tally.iterations, "calls": self.tally.calls, "by_form": dict(self.tally.forms)},
            **{
                "sums_on_all_ranks": self.tally.sums,
                "mismatches": self.tally.mismatches,
                "hangs": self.tally.hangs,
                "worst_share": self.tally.worst,
            },
            "programs": [str(self.configs[i]) for i in self.ran],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the time is over and return the exit code."""
    chosen = cases.options(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("HOSTIR_TIMEOUT", "60")
    begin = time.monotonic()
    with session(chosen.device) as job:
        if job is None:
            sys.exit("start it with torchrun --nproc-per-node")
        stress = Stress(job, chosen)
        try:
            stress.run()
            stress.units.clear()  # graphs must be freed before the groups of the session
        except Exception as problem:
            stress.tally.hangs += isinstance(problem, HostIRError)
            stress.say_failed(stress.number, f"or another of its batch: {type(problem).__name__}: {problem}")
            raise
        finally:
            if chosen.json is not None and job.rank == 0:
                chosen.json.write_text(json.dumps(stress.figures(time.monotonic() - begin), indent=1) + "\n")
            stress.say(stress.tally.line(chosen.seed))
    return 1 if stress.tally.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
