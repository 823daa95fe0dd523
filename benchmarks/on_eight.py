"""Run all benchmarks and tests that need several GPUs, the most important first, in one process group and one log.

    torchrun --standalone --nproc-per-node 8 --max-restarts 9 -m benchmarks.on_eight --out results/on_eight
    torchrun --standalone --nproc-per-node 8 --max-restarts 9 -m benchmarks.on_eight --out results/on_eight --only lost
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 -m benchmarks.on_eight \\
        --out benchmarks/results/2xH100 --only tables --rows 70B,8B
    torchrun --standalone --nproc-per-node 2 -m benchmarks.on_eight --out tiny --device cpu --shrink 64

Each part has a time limit, and no part begins with less than a minute left. `--only` names the parts to run, so that a
second call can run the rest. `tables` stands for all parts that compare times, and `tests` for all other parts. A part
writes its tables to OUT as soon as they are ready. The outcomes go to OUT/on_eight.json, and a copy of rank 0's output
goes to OUT/on_eight.log. Name the folder of results after the machine's GPUs, so that results of other machines are
kept.

If a part raises an exception, it has failed, and the next part begins. If a part hangs, the processes end one minute
after its limit: with `--max-restarts` torchrun restarts them, and they go on with the next part. Without restarts, the
exit code is 1 if a part failed.
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
LEAST = 60.0  # seconds that must be left for a part to begin
OVERRUN = 60.0  # seconds that a part may exceed its limit: a row that has begun is measured to its end
ROW = 30  # seconds after which no more candidates of a row are made
RUNNING = "running"  # the outcome of a part that has not ended
TUNED = ("allgather_matmul", "row_parallel_scattered", "row_parallel", "mlp")
MODELS = "70B,8B,405B"
EMULATED = 8  # ranks; 2 GPUs emulate two of them
TRIED = "DTensor eager;hostir eager"  # ways that need no compiler


@dataclass(frozen=True)
class Job:
    """Arguments of a part: the session, the command line, and the seconds that the part may take."""

    joined: Session
    arguments: argparse.Namespace
    seconds: float

    @property
    def tiny(self) -> bool:
        """True for a trial run with shrunk sizes."""
        return self.arguments.shrink > 1


@dataclass(frozen=True)
class Part:
    """A benchmark or test to run.

    Fields:
        name: its name for `--only`.
        seconds: its time limit.
        run: runs it on every rank; returns True if it succeeded.
        table: True if it compares times and writes a table.
    """

    name: str
    seconds: float
    run: Callable[[Job], bool]
    table: bool = False


# The parts --------------------------------------------------------------------------------------------------------
def compared(
    job: Job, *, module: str, benchmark: str, rows: str = "", file: str = "", options: Sequence[str] = ()
) -> bool:
    """Run a benchmark that compares candidates, on as many of its rows as the time allows.

    Args:
        benchmark: its name in `BENCHMARKS`. Rows of the command line that this benchmark does not have are ignored.
        rows: the rows to measure if the command line names no row of this benchmark; empty for all rows.
        file: the name of its results; by default the name of the module.
    """
    chosen = job.arguments
    named = [row for row in chosen.rows.split(",") if known(row, benchmark)]
    arguments = ["--out", str(chosen.out / (file or module)), "--device", chosen.device, "--row-seconds", str(ROW)]
    arguments += ["--budget", str(job.seconds), "--rows", ",".join(named) or rows, *options]
    if job.tiny:
        arguments += ["--layers", "3"] if benchmark == "decode" else []
        arguments += ["--shrink", str(chosen.shrink), "--repeats", "2"]
    importlib.import_module(f"benchmarks.{module}").main(arguments)
    return True


def known(row: str, benchmark: str) -> bool:
    try:
        return bool(BENCHMARKS[benchmark].select(row))
    except ValueError:
        return False


def patterns(job: Job) -> bool:
    """Compare the results of every pattern by every strategy, eager and in a graph, with float64."""
    from tests.gpu import torchrun_patterns

    return torchrun_patterns.main(["--device", job.arguments.device, "--seconds", str(job.seconds)]) == 0


def stress(job: Job) -> bool:
    """Run random one-sided programs with random delays, including all-reduces."""
    from tests.gpu import stress_onesided

    short = ["--seconds", "1", "--pool", "4"] if job.tiny else ["--seconds", "60"]
    return stress_onesided.main(["--device", job.arguments.device, *short]) == 0


def tune(job: Job) -> bool:
    """Run `hostir tune` and `hostir explain` on the patterns of layers."""
    patterns = (f"{ROOT}/examples/patterns.py:{name}" for name in (TUNED[:1] if job.tiny else TUNED))
    commands = (
        [name, pattern, "--device", job.arguments.device] for pattern in patterns for name in ("tune", "explain")
    )
    return sum(hostir.__main__.main(command) for command in commands) == 0


def lost(job: Job) -> bool:
    """Test jobs in which a rank dies or does not come."""
    cases = ["killed_eager"] if job.tiny else []
    options = ["--device", job.arguments.device, "--folder", str(job.arguments.out / "lost")]
    script = str(ROOT / "tests/gpu/stress_lost.py")
    return apart(job, "lost", [script, "--ranks", str(job.joined.size), *options, *cases])


def overhead(job: Job) -> bool:
    """Measure the host time of hostir's calls."""
    importlib.import_module("benchmarks.overhead").main(
        ["--out", str(job.arguments.out / "overhead"), *(["--repeats", "2"] if job.tiny else [])]
    )
    return True


def model(job: Job, *, module: str, sizes: Sequence[str], tiny: Sequence[str]) -> bool:
    """Run a benchmark of models in a job of its own. `tiny` are the options for a trial run, instead of `sizes`."""
    chosen = job.arguments
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.joined.size)]
    options = ["--out", str(chosen.out / module), "--device", chosen.device, "--shrink", str(chosen.shrink)]
    return apart(job, module, [*torchrun, "-m", f"benchmarks.{module}", *options, *(tiny if job.tiny else sizes)])


def timeline(job: Job) -> bool:
    """Compare predicted timelines with measured ones; a trial run compares two. They are for two ranks."""
    chosen = job.arguments
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.timeline"]
    options = ["--out", str(chosen.out / "timeline"), "--device", chosen.device, *(["--first", "2"] * job.tiny)]
    return apart(job, "timeline", [*torchrun, *options])


def apart(job: Job, name: str, command: Sequence[str]) -> bool:
    """On rank 0, run a Python command in a separate process, which starts ranks; return True if it succeeded."""
    problem = ""
    if job.joined.rank == 0:
        launchers = re.compile("(TORCHELASTIC_|GROUP_|ROLE_|MASTER_|LOCAL_|RANK$|WORLD_SIZE$)")  # of this job
        variables = {name: value for name, value in os.environ.items() if not launchers.match(name)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        with subprocess.Popen([sys.executable, *command], env=variables, text=True, **pipes) as process:
            ends = threading.Timer(job.seconds, os.killpg, (process.pid, signal.SIGKILL))
            ends.start()
            for line in process.stdout or ():
                print(line, end="", flush=True)
            ends.cancel()
        problem = f"exit code {process.returncode}" if process.returncode else ""
    return not job.joined.exchange(f"on_eight, {name}", problem, job.seconds + LEAST)[0]


def comparison(name: str, seconds: float, module: str, benchmark: str, **options: Any) -> Part:
    return Part(name, seconds, functools.partial(compared, module=module, benchmark=benchmark, **options), table=True)


LLAMA_BLOCK = functools.partial(
    model,
    module="llama_block",
    sizes=["--models", "70B,8B", "--tokens", "8192"],
    tiny=["--models", "8B", "--tokens", "64", "--repeats", "1", "--ways", TRIED],
)
TRAIN = functools.partial(
    model,
    module="train",
    sizes=["--models", "70B"],
    tiny=["--models", "8B", "--tokens", "64", "--layers", "1", "--steps", "1", "--ways", TRIED],
)
GENERATE = functools.partial(
    model,
    module="generate",
    sizes=["--models", "70B"],
    tiny=["--models", "8B", "--batches", "1", "--layers", "1", "--context", "16", "--repeats", "1"],
)
PARTS = (
    Part("llama_block", 270, LLAMA_BLOCK, table=True),
    Part("train", 240, TRAIN, table=True),
    Part("generate", 150, GENERATE, table=True),
    comparison("reduce_scatter", 90, "matmul_reduce_scatter", "reduce_scatter", rows=MODELS),
    comparison("all_gather", 90, "allgather_matmul", "allgather", rows=MODELS),
    comparison("all_reduce", 75, "matmul_all_reduce", "all_reduce", rows=MODELS),
    Part("overhead", 50, overhead, table=True),
    comparison("mlp", 45, "mlp", "mlp", rows=MODELS),
    comparison("moe", 90, "moe", "moe"),
    comparison("torch_operators", 120, "torch_operators", "torch_operators"),
    comparison("scaled", 60, "scaled_matmul", "scaled_gather", options=["--side", "gather"], rows="70B"),
    comparison(
        *("scaled_scatter", 50, "scaled_matmul", "scaled_scatter"),
        options=["--side", "scatter"],
        file="scaled_matmul_scatter",
        rows="70B",
    ),
    comparison("alone", 45, "reshard", "reshard"),
    comparison("norm", 45, "all_reduce_norm", "all_reduce_norm"),
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
    Part("timeline", 100, timeline, table=True),
    Part("stress", 120, stress),
    Part("patterns", 90, patterns),
    Part("tune", 90, tune),
    Part("lost", 240, lost),
)
SETS = {
    "tables": [part.name for part in PARTS if part.table],
    "tests": [part.name for part in PARTS if not part.table],
}


# Running the parts ------------------------------------------------------------------------------------------------
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
    """Return a context manager. Inside it, the output of rank 0 is also written to the log."""
    if joined.rank:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / "on_eight.log").open("a") as log, redirect_stdout(Tee(sys.stdout, log)):
        yield


def earlier(joined: Session, arguments: argparse.Namespace) -> tuple[float, dict[str, str]]:
    """Return the time at which this call began, in seconds since the epoch, and the outcomes of earlier calls."""
    file = arguments.out / "on_eight.json"
    text = file.read_text() if joined.rank == 0 and file.exists() else "{}"
    data = json.loads(joined.exchange("on_eight, earlier", text, LEAST)[0])
    outcomes: dict[str, str] = data.get("parts", {})
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return time.time(), {name: outcome for name, outcome in outcomes.items() if name not in arguments.only}
    died = "FAILED: it hung, or a process died: see the log"
    return data["begun"], {name: died if outcome == RUNNING else outcome for name, outcome in outcomes.items()}


def run_all(joined: Session, arguments: argparse.Namespace) -> dict[str, str]:
    """Run the requested parts; return the outcome of each."""
    begun, outcomes = earlier(joined, arguments)

    def record(part: Part, text: str) -> None:
        outcomes[part.name] = text
        if joined.rank == 0:
            print(f"on_eight: {part.name}: {text}", flush=True)
            header = {"environment": environment(), "ranks": joined.size, "device": arguments.device, "begun": begun}
            (arguments.out / "on_eight.json").write_text(json.dumps({**header, "parts": outcomes}, indent=1) + "\n")

    for part in PARTS:
        if part.name not in arguments.only or part.name in outcomes:
            continue
        left = arguments.seconds - (time.time() - begun)
        late = "late" if left < min(LEAST, arguments.seconds) else ""
        if any(joined.exchange(f"on_eight, {part.name}", late, LEAST)):
            record(part, "no time left")
            continue
        record(part, RUNNING)
        record(part, outcome(part, Job(joined, arguments, min(part.seconds, left))))
    return {name: text for name, text in outcomes.items() if name in arguments.only}


def outcome(part: Part, job: Job) -> str:
    """Run a part on all ranks, and return its outcome. End the process if the part hangs."""
    begun = time.monotonic()
    ends = threading.Timer(job.seconds + OVERRUN, end, (part, job))
    ends.daemon = True
    ends.start()
    try:
        problem = "" if part.run(job) else "FAILED"
    except (Exception, SystemExit) as raised:
        problem = f"FAILED: {type(raised).__name__}: {next(iter(str(raised).splitlines()), '')}"
    faulthandler.cancel_dump_traceback_later()  # the part's own alarm
    problems = job.joined.exchange(f"on_eight, after {part.name}", problem, job.seconds + 2 * OVERRUN)
    ends.cancel()
    return f"{next(filter(None, problems), 'ok')}, {time.monotonic() - begun:.0f} s"


def end(part: Part, job: Job) -> None:
    """End this process, and write a traceback of each of its threads to the log."""
    with (job.arguments.out / "on_eight.log").open("a") as log:
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
    """Parse the command line."""
    names = [part.name for part in PARTS]

    def part_names(text: str) -> list[str]:
        chosen = [name for each in text.split(",") for name in SETS.get(each, [each])]
        if unknown := set(chosen) - set(names):
            known = ", ".join([*names, *SETS])
            raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}: there are {known}")
        return chosen

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for tables, figures and the log")
    parser.add_argument(
        "--only", type=part_names, default=names, help=f"parts such as stress,tables of {', '.join([*names, *SETS])}"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="time limit of all parts together (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", default="", help="rows such as 8B:2048,70B; a comparison that has none of them measures all its rows"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a trial run")
    parser.add_argument("--shrink", type=int, default=1, help="divide all extents of rows by this (%(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the parts and return the exit code."""
    arguments = options()
    os.environ.setdefault("HOSTIR_TIMEOUT", "60")
    with session(arguments.device) as joined:
        if joined is None:
            sys.exit("start it with torchrun, one process a GPU")
        with logged(joined, arguments.out):
            outcomes = run_all(joined, arguments)
    starts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    failed = any(text.startswith("FAILED") for text in outcomes.values())
    return int(failed and starts[0] == starts[1])  # before the last start, 1 would make torchrun restart the processes


if __name__ == "__main__":
    sys.exit(main())
