"""Soak test: two ranks call executors for minutes, while their processes fork and use signals, threads and pools.

    python -m benchmarks.soak --seconds 600 --out benchmarks/results/soak
    python -m benchmarks.soak --seconds 20 --hold 2                            a first look

On each rank, two threads call one program each. Each program has a separate process group. The sizes and inputs are
different in every call, and every result is compared with a reference. Sometimes a call is refused on both ranks, and
they go on. Meanwhile the main thread runs pools and data loaders, forks children that exit or are killed, holds the
GIL, computes in threads, starts processes, and gets signals. Some of its signal handlers are installed before the first
executor, and some after it. The two ranks do these things in different orders.

Every rank prints how often it did each thing. The exit code is 0 if all ranks finished and all results were right. The
job takes `--seconds` seconds, or up to two minutes longer.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hostir as hi
from benchmarks.harness import table, write
from examples import patterns
from hostir.call.bounds import bound, reductions, relative_error
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.session import session
from tests.launch import launch

RANKS = 2
ROWS = (0, 4, 8, 12, 64, 256, 1024)
REFUSED = 0.05  # share of calls with refused inputs
ROUND = 10  # calls between two agreements on whether to go on
PATIENCE = 60.0  # seconds that anything other than a call may take
GRACE = 120.0  # seconds that a job may take in addition to `--seconds`
GOING = """hostir 1
mesh @mesh [didx] = 0 1
program @going_NAME(%mine: f32[1] partial(didx)) -> (%all) {
  %all: f32[1] = allocate
  %h = allreduce %mine -> %all over didx
  wait %h
}
"""


# Calls ------------------------------------------------------------------------------------------------------------
class Caller(threading.Thread):
    """A thread that calls one program in a group again and again, until the ranks agree to stop.

    Fields:
        counts: the numbers of calls and of refused calls.
        problem: a traceback; empty if nothing went wrong.
    """

    def __init__(self, name: str, fusion: Program, strategy: str, rank: int, until: float, group: Any = None) -> None:
        super().__init__(name=f"calls {name}")
        self.group = group
        self.program_name, self.rank, self.until = name, rank, until
        self.fusion, self.program = fusion, hi.lower(fusion, strategy)
        self.odd = ["of a dtype", "of a shape", *(["of odd rows"] if name == "reduced" else [])]
        self.counts: Counter[str] = Counter()
        self.problem = ""

    def run(self) -> None:
        try:
            programs = self.program, hi.parse(GOING.replace("NAME", self.program_name))
            executor, going = [hi.Executor(program, group=self.group) for program in programs]
            first = 0
            while not self.agreed(going, first):
                for number in range(first, first + ROUND):
                    self.call(executor, number)
                first += ROUND
        except BaseException:
            self.problem = f"{self.name}: {traceback.format_exc()}"

    def agreed(self, going: hi.Executor, number: int) -> bool:
        """Return True if the time of any rank is up. An all-reduce makes the answer the same on all ranks."""
        (all,) = going(torch.tensor([float(time.monotonic() > self.until)]))
        return number > 0 and bool(all.item())

    def call(self, executor: hi.Executor, number: int) -> None:
        """Draw the inputs of a call from its number, so that all ranks have the same; call, and compare the result."""
        random = Random(f"{self.program_name} {number}")
        sizes = {"M": random.choice(ROWS)}
        inputs = random_inputs(self.fusion, sizes, number)
        ends = zip(self.program.inputs, inputs, strict=True)
        parts = [shard(x, v.tensor, self.rank, sizes) for v, x in ends]
        if random.random() < REFUSED:
            self.refused(executor, parts, random.choice(self.odd))
        outputs = executor(*parts)
        plain, exact = reference(self.fusion, inputs, sizes, None), reference(self.fusion, inputs, sizes)
        for value, got, p, e in zip(self.program.outputs, outputs, plain, exact, strict=True):
            mine, error = shard(e, value.tensor, self.rank, sizes), bound(p, e, reductions(self.program))
            if mine is None or got.shape != mine.shape or not relative_error(got, mine) <= error:
                raise AssertionError(f"call {number}, M={sizes['M']}: {value} is wrong: {got}, expected {mine}")
        self.counts[f"calls {self.program_name}"] += 1

    def refused(self, executor: hi.Executor, parts: Sequence[torch.Tensor | None], why: str) -> None:
        """Make a call that every rank must refuse. `why` says what is wrong with its first input."""
        x, *rest = [part for part in parts if part is not None]
        odd = {"of a dtype": x.double(), "of a shape": x[:, :-1], "of odd rows": x.new_zeros(3, x.shape[1])}[why]
        try:
            executor(odd, *rest)
        except HostIRError:
            self.counts[f"refused inputs {why}"] += 1
            return
        raise AssertionError(f"an input {why} is not refused")


# Beside the calls -----------------------------------------------------------------------------------------------
def doubled(x: int) -> int:
    return 2 * x


class Beside:
    """The activities of a rank's main thread. An activity raises an exception if its result is wrong."""

    def __init__(self, rank: int, hold: float) -> None:
        self.rank, self.hold, self.process_id = rank, hold, os.getpid()
        self.random = Random(rank)
        self.counts: Counter[str] = Counter()
        self.heard: Counter[int] = Counter()
        self.turns: list[Callable[[], None]] = []

    def turn(self) -> None:
        """Do the next activity. Each round does all of them, in a new random order."""
        if not self.turns:
            every = [self.pool, self.loader, self.child_exits, self.child_is_killed, self.child_kills_itself]
            every += [self.holds_the_gil, self.pickles, self.computes, self.process, *[self.signals] * 3]
            self.turns = self.random.sample(every, len(every))
        todo = self.turns.pop()
        todo()
        self.counts[todo.__name__.replace("_", " ")] += 1
        time.sleep(self.random.random())

    def pool(self) -> None:
        fork = multiprocessing.get_context("fork")
        with fork.Pool(
            2, signal.signal, (signal.SIGTERM, signal.SIG_DFL)
        ) as pool:  # Pool ends its processes by SIGTERM
            assert pool.map_async(doubled, range(20)).get(PATIENCE) == [2 * x for x in range(20)]

    def loader(self) -> None:
        loaded = DataLoader(
            list(range(32)), batch_size=8, num_workers=2, timeout=PATIENCE, multiprocessing_context="fork"
        )
        assert torch.cat(list(loaded)).tolist() == list(range(32))

    def child_exits(self) -> None:
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE))
            sys.exit(7)  # with Python's normal shutdown
        code = self.end_of(child)
        assert code == 7, code

    def child_is_killed(self) -> None:
        by = self.random.choice((signal.SIGTERM, signal.SIGKILL, signal.SIGABRT))
        child = os.fork()
        if not child:
            time.sleep(PATIENCE)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, by)
        assert self.end_of(child) in (-by, 128 + by)

    def child_kills_itself(self) -> None:
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE))
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert self.end_of(child) == -signal.SIGUSR1

    def end_of(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def holds_the_gil(self) -> None:
        ctypes.PyDLL(None).usleep(int(1e6 * self.hold))

    def pickles(self) -> None:
        many = [(n, str(n)) for n in range(300_000)]
        assert pickle.loads(pickle.dumps(many)) == many

    def computes(self) -> None:
        def multiply() -> None:
            x = torch.randn(200, 200, dtype=torch.float64)
            equal.append(bool(torch.allclose((x @ x.T).trace(), x.square().sum())))

        equal: list[bool] = []
        threads = [threading.Thread(target=multiply) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert equal == [True] * 4, equal

    def process(self) -> None:
        echo = subprocess.run(["echo", "here"], capture_output=True, text=True, check=True, timeout=PATIENCE)
        assert echo.stdout == "here\n"

    # Signals
    def handle(self, *numbers: int) -> None:
        for number in numbers:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Count a signal.

        A forked child inherits this handler, and exits here. Otherwise a pool would wait for its workers forever.
        """
        if os.getpid() != self.process_id:
            os._exit(128 + number)
        self.heard[number] += 1

    def signals(self) -> None:
        """Send a signal from this process or another, and wait for it; sometimes install its handler again before."""
        number = self.random.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
        if self.random.random() < 0.3:
            self.handle(number)
        before, last = self.heard[number], time.monotonic() + PATIENCE
        if self.random.random() < 0.5:
            os.kill(os.getpid(), number)
        else:
            subprocess.run(["kill", f"-{int(number)}", str(os.getpid())], check=True, timeout=PATIENCE)
        while self.heard[number] == before and time.monotonic() < last:
            time.sleep(0.01)
        assert self.heard[number] == before + 1, f"signal {number} came {self.heard[number] - before} times"


# A job ------------------------------------------------------------------------------------------------------------
def too_late() -> None:
    """End a rank that hangs.

    `faulthandler.dump_traceback_later` is no alternative: with it, forked children of the rank could not exit.
    """
    faulthandler.dump_traceback()
    os._exit(1)


def on_this_rank(seconds: float, hold: float) -> int:
    """Run the calls and the activities of this rank; end the process with 1 if something goes wrong."""
    late = threading.Timer(seconds + GRACE, too_late)
    late.daemon = True
    late.start()
    torch.set_num_threads(1)
    rank, until = int(os.environ["RANK"]), time.monotonic() + seconds
    beside = Beside(rank, hold)
    before, after = (signal.SIGTERM, signal.SIGUSR1), (signal.SIGINT, signal.SIGUSR2)
    beside.handle(*(before if rank else after))
    first = patterns.allgather_matmul_rows(ranks=RANKS, S=2, M="M", K=16, N=8).program()
    second = patterns.row_parallel(ranks=RANKS, S=2, M="M", K=16, N=8).program()
    with session("cpu"):
        callers = [
            Caller(name, fusion, strategy, rank, until, dist.new_group(range(RANKS), timeout=timedelta(seconds=60)))
            for name, fusion, strategy in (("gathered", first, "push"), ("reduced", second, "pipeline"))
        ]
        for caller in callers:
            caller.start()
        beside.handle(*(after if rank else before))
        problem = ""
        while any(caller.is_alive() for caller in callers) and not problem:
            try:
                beside.turn()
            except Exception:
                problem = traceback.format_exc()
            problem = problem or "".join(caller.problem for caller in callers)
        if problem:
            print(f"rank {rank}: {problem}", file=sys.stderr, flush=True)
            os._exit(1)
    counts = sum((caller.counts for caller in callers), beside.counts)
    counts |= {f"signal {signal.Signals(number).name}": count for number, count in beside.heard.items()}
    os.write(1, f"COUNTS {json.dumps([rank, counts])}\n".encode())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, and print the counts of each rank; return 1 if the job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--hold", type=float, default=12.0, help="seconds that the GIL is held")
    parser.add_argument("--out", type=Path, help="write .json and .md files with this name")
    parser.add_argument("--on-this-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.on_this_rank:
        return on_this_rank(options.seconds, options.hold)
    command = [
        "-m",
        "benchmarks.soak",
        "--on-this-rank",
        "--seconds",
        str(options.seconds),
        "--hold",
        str(options.hold),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    begun = time.monotonic()
    try:
        job = launch(RANKS, *command, env=env, timeout=options.seconds + 2 * GRACE)
    except subprocess.TimeoutExpired as hung:
        printed, errors = ((text or b"").decode() for text in (hung.stdout, hung.stderr))
        job = subprocess.CompletedProcess(command, 1, printed, errors + "the job hangs\n")
    counts = dict(json.loads(line.removeprefix("COUNTS ")) for line in job.stdout.splitlines() if "COUNTS" in line)
    ranks = sorted(counts)
    names = sorted({name for by_name in counts.values() for name in by_name})
    rows = [[name, *(str(counts[rank].get(name, 0)) for rank in ranks)] for name in names]
    text = table(["what", *(f"rank {rank}" for rank in ranks)], rows)
    ended = f"{len(counts)} of {RANKS} ranks came to the end, after {time.monotonic() - begun:.0f} s"
    ended += f"; exit code {job.returncode}"
    print(f"{text}\n\n{ended}")
    if options.out:
        data = {"seconds": options.seconds, "hold": options.hold, "exit_code": job.returncode, "counts": counts}
        write(options.out, "Two ranks beside pools, forks, signals and threads", f"{text}\n\n{ended}.", data)
    print(job.stderr, file=sys.stderr, end="")
    return int(job.returncode != 0 or len(counts) != RANKS)


if __name__ == "__main__":
    raise SystemExit(main())
