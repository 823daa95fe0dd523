"""All that several GPUs are wanted for, the most valuable first, in one process group and one log.

    torchrun --standalone --nproc-per-node 8 --max-restarts 9 -m benchmarks.on_eight --out results/on_eight
    torchrun --standalone --nproc-per-node 8 --max-restarts 9 -m benchmarks.on_eight --out results/on_eight --only lost
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 -m benchmarks.on_eight \\
        --out benchmarks/results/2xH100 --only tables --rows 70B,8B
    torchrun --standalone --nproc-per-node 2 -m benchmarks.on_eight --out tiny --device cpu --shrink 64

Each part has its own time limit, and none begins with less than a minute left. `--only` names those that are wanted, so
that a second call does the rest: `tables` are all parts that compare times, `tests` all others. Every part's tables go
to OUT as soon as it has them, the outcome of each into OUT/on_eight.json, and what rank 0 prints into OUT/on_eight.log
as well. The folder of a machine's results is called after its GPUs, so that those of another stay.

A part that raises has failed, and the next one begins. One that has not ended a minute after its limit, because a
kernel hangs, ends the processes: with `--max-restarts` torchrun starts them anew, and they go on with the next part.
Without it, exits with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from benchmarks.scores import BENCHMARKS
from hostir.job.session import Session, session

ROOT = Path(__file__).parents[1]
LEAST = 60.0  # seconds; no part begins with fewer left
OVERRUN = 60.0  # seconds that a part may take longer than its limit: a row that has begun is measured to its end
ROW = 30  # seconds after which no further candidate of a row is made
RUNNING = "running"  # the outcome of a part that has not ended
TUNED = ("allgather_matmul", "row_parallel_scattered", "row_parallel", "mlp")
MODELS = "70B,8B,405B"
EMULATED = 8  # ranks, of which 2 GPUs stand for one each
TRIED = "DTensor eager;hostir eager"  # what runs without a compiler


@dataclass(frozen=True)
class Job:
    """What every part is given: the session, the command line, and the seconds that the part may take."""

    joined: Session
    given: argparse.Namespace
    seconds: float

    @property
    def tiny(self) -> bool:
        """Whether it is only tried."""
        return self.given.shrink > 1


@dataclass(frozen=True)
class Part:
    """Something to run.

    Fields:
        name: what `--only` calls it.
        seconds: its time limit.
        run: runs it on every rank; gives whether all was well.
        table: True if it compares times, and writes a table of them.
    """

    name: str
    seconds: float
    run: Callable[[Job], bool]
    table: bool = False


# The parts --------------------------------------------------------------------------------------------------------
def compared(job: Job, *, module: str, kind: str, rows: str = "", file: str = "", options: Sequence[str] = ()) -> bool:
    """A benchmark that compares candidates, all its rows as far as there is time.

    Args:
        kind: of its rows, in `BENCHMARKS`; of those that the command line names it takes the ones that there are.
        rows: where the command line names none of them; empty for all.
        file: what it writes, if not called as the module.
    """
    given = job.given
    named = [row for row in given.rows.split(",") if known(row, kind)]
    arguments = ["--out", str(given.out / (file or module)), "--device", given.device, "--row-seconds", str(ROW)]
    arguments += ["--budget", str(job.seconds), "--rows", ",".join(named) or rows, *options]
    if job.tiny:
        arguments += ["--layers", "3"] if kind == "decode" else []
        arguments += ["--shrink", str(given.shrink), "--repeats", "2"]
    importlib.import_module(f"benchmarks.{module}").main(arguments)
    return True


def known(row: str, kind: str) -> bool:
    try:
        return bool(BENCHMARKS[kind].select(row))
    except ValueError:
        return False


def patterns(job: Job) -> bool:
    """Every pattern by every strategy, eager and in a graph, held against float64."""
    from tests.gpu import torchrun_patterns

    return torchrun_patterns.main(["--device", job.given.device, "--seconds", str(job.seconds)]) == 0


def stress(job: Job) -> bool:
    """Random one-sided programs with random delays, all-reduces among them."""
    from tests.gpu import stress_onesided

    short = ["--seconds", "1", "--pool", "4"] if job.tiny else ["--seconds", "60"]
    return stress_onesided.main(["--device", job.given.device, *short]) == 0


def tune(job: Job) -> bool:
    """Measures what `auto` chooses among for patterns of the layers, then explains it."""
    patterns = (f"{ROOT}/examples/patterns.py:{name}" for name in (TUNED[:1] if job.tiny else TUNED))
    commands = ([what, pattern, "--device", job.given.device] for pattern in patterns for what in ("tune", "explain"))
    return sum(hostir.__main__.main(command) for command in commands) == 0


def lost(job: Job) -> bool:
    """A rank that dies or stays away."""
    cases = ["killed_eager"] if job.tiny else []
    where = ["--device", job.given.device, "--folder", str(job.given.out / "lost")]
    script = str(ROOT / "tests/gpu/stress_lost.py")
    return apart(job, "lost", [script, "--ranks", str(job.joined.size), *where, *cases])


def overhead(job: Job) -> bool:
    """What hostir costs on the host."""
    importlib.import_module("benchmarks.overhead").main(
        ["--out", str(job.given.out / "overhead"), *(["--repeats", "2"] if job.tiny else [])]
    )
    return True


def llama_block(job: Job) -> bool:
    """A block of Llama-3, forward and backward, by torch's ways and ours."""
    given = job.given
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.joined.size)]
    options = ["--out", str(given.out / "llama_block"), "--device", given.device, "--shrink", str(given.shrink)]
    tiny = ["--models", "8B", "--tokens", "64", "--repeats", "1", "--ways", TRIED]
    sizes = tiny if job.tiny else ["--models", "70B,8B", "--tokens", "8192"]
    return apart(job, "llama_block", [*torchrun, "-m", "benchmarks.llama_block", *options, *sizes])


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


def comparison(name: str, seconds: float, module: str, kind: str, **more: Any) -> Part:
    return Part(name, seconds, functools.partial(compared, module=module, kind=kind, **more), table=True)


PARTS = (
    Part("llama_block", 270, llama_block, table=True),
    comparison("reduce_scatter", 90, "matmul_reduce_scatter", "reduce_scatter", rows=MODELS),
    comparison("all_gather", 90, "allgather_matmul", "allgather", rows=MODELS),
    comparison("all_reduce", 75, "matmul_all_reduce", "all_reduce", rows=MODELS),
    Part("overhead", 50, overhead, table=True),
    comparison("mlp", 45, "mlp", "mlp", rows=MODELS),
    comparison("torch_operators", 120, "torch_operators", "torch_operators"),
    comparison("scaled", 60, "scaled_matmul", "scaled_gather", options=["--side", "gather"], rows="70B"),
    comparison(
        *("scaled_scatter", 50, "scaled_matmul", "scaled_scatter"),
        options=["--side", "scatter"],
        file="scaled_matmul_scatter",
        rows="70B",
    ),
    comparison("alone", 45, "reshard", "reshard"),
    comparison("decode", 60, "matmul_all_reduce", "decode", options=["--decode"], file="decode"),
    comparison(
        *("departures", 45, "matmul_reduce_scatter", "departures"),
        options=["--as-rank-of", str(EMULATED)],
        rows="70B,8B",
    ),
    comparison(
        *("scaled_departures", 45, "scaled_matmul", "scaled_gather_emulated"),
        options=["--as-rank-of", str(EMULATED)],
        rows="70B",
    ),
    Part("stress", 120, stress),
    Part("patterns", 90, patterns),
    Part("tune", 90, tune),
    Part("lost", 240, lost),
)
SETS = {
    "tables": [part.name for part in PARTS if part.table],
    "tests": [part.name for part in PARTS if not part.table],
}


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


def earlier(joined: Session, given: argparse.Namespace) -> tuple[float, dict[str, str]]:
    """When this call began, in seconds since the epoch, and the outcomes that are known."""
    kept = given.out / "on_eight.json"
    text = kept.read_text() if joined.rank == 0 and kept.exists() else "{}"
    data = json.loads(joined.exchange("on_eight, earlier", text, LEAST)[0])
    outcomes: dict[str, str] = data.get("parts", {})
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return time.time(), {name: how for name, how in outcomes.items() if name not in given.only}
    died = "FAILED: it hung, or a process died: see the log"
    return data["begun"], {name: died if how == RUNNING else how for name, how in outcomes.items()}


def run_all(joined: Session, given: argparse.Namespace) -> dict[str, str]:
    """Run the parts that are wanted; return the outcome of each."""
    begun, outcomes = earlier(joined, given)

    def record(part: Part, how: str) -> None:
        outcomes[part.name] = how
        if joined.rank == 0:
            print(f"on_eight: {part.name}: {how}", flush=True)
            around = {"environment": environment(), "ranks": joined.size, "device": given.device, "begun": begun}
            (given.out / "on_eight.json").write_text(json.dumps({**around, "parts": outcomes}, indent=1) + "\n")

    for part in PARTS:
        if part.name not in given.only or part.name in outcomes:
            continue
        left = given.seconds - (time.time() - begun)
        late = "late" if left < min(LEAST, given.seconds) else ""
        if any(joined.exchange(f"on_eight, {part.name}", late, LEAST)):
            record(part, "no time left")
            continue
        record(part, RUNNING)
        record(part, outcome(part, Job(joined, given, min(part.seconds, left))))
    return {name: how for name, how in outcomes.items() if name in given.only}


def outcome(part: Part, job: Job) -> str:
    """Run a part; return how it went, as all ranks say. Ends the process if it hangs."""
    begun = time.monotonic()
    ends = threading.Timer(job.seconds + OVERRUN, end, (part, job))
    ends.daemon = True
    ends.start()
    try:
        problem = "" if part.run(job) else "FAILED"
    except (Exception, SystemExit) as raised:
        problem = f"FAILED: {type(raised).__name__}: {next(iter(str(raised).splitlines()), '')}"
    faulthandler.cancel_dump_traceback_later()  # the part's own alarm
    said = job.joined.exchange(f"on_eight, after {part.name}", problem, job.seconds + 2 * OVERRUN)
    ends.cancel()
    return f"{next(filter(None, said), 'ok')}, {time.monotonic() - begun:.0f} s"


def end(part: Part, job: Job) -> None:
    """End this process, and say where each of its threads is."""
    with (job.given.out / "on_eight.log").open("a") as log:
        late = job.seconds + OVERRUN
        print(
            f"on_eight: {part.name}: rank {job.joined.rank} hangs: not done after {late:.0f} s, at",
            file=log,
            flush=True,
        )
        faulthandler.dump_traceback(log)
    os._exit(1)


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    names = [part.name for part in PARTS]

    def some(text: str) -> list[str]:
        chosen = [name for each in text.split(",") for name in SETS.get(each, [each])]
        if unknown := set(chosen) - set(names):
            known = ", ".join([*names, *SETS])
            raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}: there are {known}")
        return chosen

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for tables, figures and the log")
    parser.add_argument(
        "--only", type=some, default=names, help=f"parts such as stress,tables of {', '.join([*names, *SETS])}"
    )
    parser.add_argument("--seconds", type=float, default=540, help="for all parts (default: %(default)s)")
    parser.add_argument("--rows", default="", help="such as 8B:2048,70B; comparisons that know none of them take all")
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
    starts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    failed = any(text.startswith("FAILED") for text in outcomes.values())
    return int(failed and starts[0] == starts[1])  # or torchrun would start it anew


if __name__ == "__main__":
    sys.exit(main())
