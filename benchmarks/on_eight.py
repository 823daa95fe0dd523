"""All that several GPUs are wanted for, the most valuable first, in one process group and one log.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.on_eight --out results/on_eight --seconds 540
    torchrun --standalone --nproc-per-node 8 -m benchmarks.on_eight --out results/on_eight --only stress,lost
    torchrun --standalone --nproc-per-node 2 -m benchmarks.on_eight --out tiny --device cpu --shrink 64 --rows 8B:2048

Each part has its own time limit, and none begins with less than a minute left; `--only` names those that are wanted,
so that a second call does the rest. Every part's tables go to OUT as soon as it has them, its outcome into
OUT/on_eight.json, and what it prints into OUT/on_eight.log as well. Exits with 1 where a part found something wrong.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import Any, TextIO

import hostir.__main__
from benchmarks.harness import environment
from hostir.runtime.session import Session, session

ROOT = Path(__file__).parents[1]
LEAST = 60.0  # seconds; no part begins with fewer left
OTHER_ROWS = ("reshard", "torch_operators")  # than the layers of models
TUNED = ("allgather_matmul", "row_parallel_scattered", "mlp")


@dataclass(frozen=True)
class Job:
    """What every part is given: the session, the command line, and the seconds that the part may take."""

    joined: Session
    given: argparse.Namespace
    seconds: float


@dataclass(frozen=True)
class Part:
    """Something to run.

    Fields:
        name: what `--only` calls it.
        seconds: its time limit.
        run: runs it on every rank; gives whether all was well.
        on_cpu: whether it runs on CPU processes.
    """

    name: str
    seconds: float
    run: Callable[[Job], bool]
    on_cpu: bool = True


# The parts --------------------------------------------------------------------------------------------------------
def compared(job: Job, *, module: str, options: Sequence[str] = ()) -> bool:
    """A benchmark that compares candidates, all its rows as far as there is time."""
    given = job.given
    arguments = ["--out", str(given.out / module), "--device", given.device, "--budget", str(job.seconds), *options]
    if given.shrink > 1:
        arguments += ["--shrink", str(given.shrink), "--repeats", "2"]
    if given.rows and module not in OTHER_ROWS:
        arguments += ["--rows", given.rows]
    importlib.import_module(f"benchmarks.{module}").main(arguments)
    return True


def patterns(job: Job) -> bool:
    """Every pattern eager and in a graph, held against float64."""
    from tests.gpu import torchrun_patterns

    return torchrun_patterns.main() == 0


def stress(job: Job) -> bool:
    """Random one-sided programs with random delays."""
    from tests.gpu import stress_onesided

    short = ["--seconds", "2", "--pool", "4"] if job.given.shrink > 1 else ["--seconds", "60"]
    return stress_onesided.main(["--device", job.given.device, *short]) == 0


def tune(job: Job) -> bool:
    """Measures what `auto` chooses among for patterns of the layers, then explains it."""
    codes = []
    for pattern in TUNED:
        command = [f"{ROOT}/examples/patterns.py:{pattern}", "--device", job.given.device]
        codes.append(hostir.__main__.main(["tune", *command]))
        if job.joined.rank == 0:
            codes.append(hostir.__main__.main(["explain", *command]))
    return not any(codes)


def lost(job: Job) -> bool:
    """A rank that dies or stays away."""
    cases = ["killed_eager"] if job.given.shrink > 1 else []
    where = ["--device", job.given.device, "--folder", str(job.given.out / "lost")]
    script = str(ROOT / "tests/gpu/stress_lost.py")
    return apart(job, "lost", [script, "--ranks", str(job.joined.size), *where, *cases])


def llama_block(job: Job) -> bool:
    """A block of Llama-3, forward and backward, by torch's ways and ours."""
    given = job.given
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.joined.size)]
    options = ["--out", str(given.out / "llama_block"), "--device", given.device, "--shrink", str(given.shrink)]
    tiny = ["--models", "8B", "--tokens", "2048", "--repeats", "2"] if given.shrink > 1 else []
    return apart(job, "llama_block", [*torchrun, "-m", "benchmarks.llama_block", *options, *tiny])


def apart(job: Job, name: str, command: Sequence[str]) -> bool:
    """Let rank 0 run Python in a process of its own, which starts ranks; return whether it ended well."""
    problem = ""
    if job.joined.rank == 0:
        launchers = re.compile("(TORCHELASTIC_|GROUP_|ROLE_|MASTER_|LOCAL_|RANK$|WORLD_SIZE$)")  # of this job
        variables = {name: value for name, value in os.environ.items() if not launchers.match(name)}
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        with subprocess.Popen([sys.executable, *command], env=variables, text=True, **how) as process:
            ends = threading.Timer(job.seconds, os.killpg, (process.pid, signal.SIGKILL))
            ends.start()
            for line in process.stdout or ():
                print(line, end="", flush=True)
            ends.cancel()
        problem = f"exit code {process.returncode}" if process.returncode else ""
    return not job.joined.exchange(f"on_eight, {name}", problem, job.seconds + LEAST)[0]


PARTS = (
    Part("reduce_scatter", 150, functools.partial(compared, module="matmul_reduce_scatter")),
    Part("all_gather", 120, functools.partial(compared, module="allgather_matmul")),
    Part("mlp", 60, functools.partial(compared, module="mlp")),
    Part("reshard", 40, functools.partial(compared, module="reshard")),
    Part("torch_operators", 90, functools.partial(compared, module="torch_operators")),
    Part("patterns", 60, patterns, on_cpu=False),
    Part("stress", 90, stress),
    Part("tune", 60, tune, on_cpu=False),
    Part("llama_block", 150, llama_block),
    Part("lost", 240, lost),
)


# In turn ----------------------------------------------------------------------------------------------------------
class Tee(TextIOBase):
    """Writes to two streams."""

    def __init__(self, *streams: TextIO) -> None:
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
            stream.flush()
        return len(text)


@contextmanager
def logged(joined: Session, out: Path) -> Iterator[None]:
    """What rank 0 prints goes to the log as well."""
    if joined.rank:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / "on_eight.log").open("a") as log, redirect_stdout(Tee(sys.stdout, log)):
        yield


def run_all(joined: Session, given: argparse.Namespace) -> dict[str, str]:
    """Run the parts that are wanted; return the outcome of each."""
    begun = time.monotonic()
    outcomes: dict[str, str] = {}
    for part in PARTS:
        if part.name not in given.only:
            continue
        left = given.seconds - (time.monotonic() - begun)
        late = "late" if left < min(LEAST, given.seconds) else ""
        if any(joined.exchange(f"on_eight, {part.name}", late, LEAST)):
            outcomes[part.name] = "no time left"
        elif given.device == "cpu" and not part.on_cpu:
            outcomes[part.name] = "needs GPUs"
        else:
            outcomes[part.name] = outcome(part, Job(joined, given, min(part.seconds, left)))
        if joined.rank == 0:
            print(f"on_eight: {part.name}: {outcomes[part.name]}", flush=True)
            data = {"environment": environment(), "ranks": joined.size, "device": given.device, "parts": outcomes}
            (given.out / "on_eight.json").write_text(json.dumps(data, indent=1) + "\n")
    return outcomes


def outcome(part: Part, job: Job) -> str:
    """Run a part; return how it went, as all ranks say."""
    begun = time.monotonic()
    try:
        problem = "" if part.run(job) else "FAILED"
    except (Exception, SystemExit) as raised:
        problem = f"FAILED: {type(raised).__name__}: {next(iter(str(raised).splitlines()), '')}"
    said = job.joined.exchange(f"on_eight, after {part.name}", problem, 5 * LEAST)
    return f"{next(filter(None, said), 'ok')}, {time.monotonic() - begun:.0f} s"


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    names = [part.name for part in PARTS]

    def some(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}: there are {', '.join(names)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for tables, figures and the log")
    parser.add_argument("--only", type=some, default=names, help=f"parts such as stress,lost of {','.join(names)}")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts (default: %(default)s)")
    parser.add_argument("--rows", default="", help="of the comparisons, such as 8B:2048 (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    parser.add_argument("--shrink", type=int, default=1, help="divide all extents of rows by this (%(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the parts and returns the exit code."""
    given = options()
    os.environ.setdefault("HOSTIR_TIMEOUT", "60")
    with session(given.device) as joined:
        if joined is None:
            sys.exit("start it with torchrun, one process a GPU")
        with logged(joined, given.out):
            outcomes = run_all(joined, given)
    return int(any(text.startswith("FAILED") for text in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
