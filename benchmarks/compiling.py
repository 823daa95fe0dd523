"""What one waits for before a program runs: lowering for 1000 ranks, `auto` on 8 ranks, and each new M of an executor.

    python -m benchmarks.compiling --out benchmarks/results/compiling

- *lower*: a fusion for 1000 ranks, with the proof of what comes out; each pattern by every strategy that can lower it.
- *auto*: the choice for 8 H200, from the cost model: all candidates lowered, proved and estimated.
- *new M*: the first call with an M that an executor has not met, less a call with one that it has: two gloo ranks, tiny
  tensors, the quickest of 20 each, so that making a plan is all that takes time.

Lowering and choosing are milliseconds of the CPU, a new M milliseconds of the clock, as it waits for the other rank.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hostir as hi
from benchmarks.harness import table, write
from examples import patterns
from hostir.check import forget
from hostir.choice.decision import decide
from hostir.choice.hardware import REFERENCE
from hostir.choice.platforms import reference
from hostir.ir import HostIRError
from hostir.lower.strategies import STRATEGIES

MANY, FEW = 1000, 8
LARGE = {"M": 65536, "K": 8192, "N": 8192, "H": 32768}
PARTS = ("lower", "auto", "new M")
NEW, REPEATS = 20, 20
Row = dict[str, Any]


def fusion(pattern: Callable[..., hi.Fusion], **given: int) -> hi.Fusion:
    """A pattern with those of these parameters that it has."""
    return pattern(**{name: n for name, n in given.items() if name in inspect.signature(pattern).parameters})


def cpu(work: Callable[[], Any]) -> float:
    """Milliseconds of the CPU that some work takes of this process."""
    begun = time.process_time()
    work()
    return round(1e3 * (time.process_time() - begun), 1)


def lowering() -> Iterator[Row]:
    hi.lower(patterns.mlp_2d(), "fused")  # loads what is loaded when it is first used
    sizes = {"S": 4, "M": 4 * MANY, "K": 8 * MANY, "N": 8 * MANY, "H": 8 * MANY}
    for pattern in patterns.PATTERNS:
        for strategy in STRATEGIES:
            made = fusion(pattern, ranks=MANY, **sizes)
            forget()
            try:
                took = cpu(lambda made=made, strategy=strategy: hi.lower(made, strategy))
            except HostIRError:  # it cannot overlap this
                continue
            yield {"what": "lower", "fusion": pattern.__name__, "how": strategy, "ms": took}


def choosing() -> Iterator[Row]:
    decide(patterns.mlp(ranks=2).program(), reference(REFERENCE, 2), {})
    for pattern in patterns.PATTERNS:
        for slices in (4, 16):
            program = fusion(pattern, ranks=FEW, S=slices, **LARGE).program()
            forget()
            took = cpu(lambda program=program: decide(program, reference(REFERENCE, FEW), {}))
            yield {"what": "auto", "fusion": pattern.__name__, "how": f"S={slices}", "ms": took}


def mlp(ranks: int, slices: int) -> hi.Fusion:
    """The pattern `mlp` with M as a symbol."""
    with hi.Fusion("mlp") as made:
        x = hi.tensor("x", [slices, ranks, "M", 64], "f32")
        w1, w2 = hi.tensor("w1", [64, 128], "f32"), hi.tensor("w2", [128, 64], "f32")
        y = hi.gelu(x @ w1) @ w2
        made.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    for tensor, axis in ((x, 1), (w1, 1), (w2, 0), (y, 1)):
        tensor.shard(axis, mesh)
    y.axis(0).parallelize(hi.ParallelType.Stream)
    return made


def calling(ranks: int) -> Iterator[Row]:
    """New M, as one of the ranks."""
    torch.set_num_threads(1)
    for slices, strategy in [*((4, strategy) for strategy in STRATEGIES), (32, "pipeline")]:
        executor = hi.Executor(hi.lower(mlp(ranks, slices), strategy))
        weights = torch.randn(64, 128 // ranks), torch.randn(128 // ranks, 64)

        def call(m: int, executor: hi.Executor = executor, slices: int = slices, weights: Any = weights) -> float:
            x = torch.randn(slices, 1, m, 64)
            begun = time.perf_counter()
            executor(x, *weights)
            return 1e3 * (time.perf_counter() - begun)

        call(8)
        known = min(call(8) for _ in range(REPEATS))
        new = min(call(16 + 4 * i) for i in range(NEW))
        yield {"what": "new M", "fusion": "mlp", "how": f"{strategy}, S={slices}", "ms": round(new - known, 1)}


def on_ranks(count: int) -> list[Row]:
    """The rows of `calling`, by so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        subprocess.run([*launcher, "-m", "benchmarks.compiling", "--as-rank", str(found)], check=True, timeout=600)
        rows: list[Row] = json.loads(found.read_text())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # programs that have too many statements to be proved
    if options.as_rank:
        found = list(calling(int(os.environ["WORLD_SIZE"])))
        if os.environ["RANK"] == "0":
            options.as_rank.write_text(json.dumps(found))
        return
    parts: dict[str, Callable[[], list[Row]]] = {
        "lower": lambda: list(lowering()),
        "auto": lambda: list(choosing()),
        "new M": lambda: on_ranks(2),
    }
    rows = [row for part in options.part or PARTS for row in parts[part]()]
    text = table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    most = {part: max(row["ms"] for row in rows if row["what"] == part) for part in options.part or PARTS}
    text += "\n\nMost: " + ", ".join(f"{part} {ms:.0f} ms" for part, ms in most.items())
    print(text)
    if options.out:
        write(options.out, "What one waits for before a program runs", text, {"rows": rows, "most": most})


if __name__ == "__main__":
    main()
