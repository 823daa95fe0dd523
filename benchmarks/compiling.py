"""Measure the work before a program runs: lowering for 1000 ranks, `auto` on 8 ranks, and the first call with a new M.

    python -m benchmarks.compiling --out benchmarks/results/compiling

- *lower*: lower a fusion for 1000 ranks and prove the program, for each pattern and every strategy that can lower it.
- *auto*: choose for 8 H200 GPUs by the cost model: lower, prove and estimate all candidates.
- *new M*: the time of the first call with a new M, minus the time of a call with a known M. The difference is the time
  to make a plan. There are two gloo ranks and tiny tensors, and each time is the fastest of 20 calls.

Lowering and choosing are measured in CPU milliseconds. A new M is measured in wall clock milliseconds, because the
ranks wait for each other.
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


def fusion(pattern: Callable[..., hi.Fusion], **sizes: int) -> hi.Fusion:
    """Return the fusion of a pattern. Sizes that are not parameters of the pattern are ignored."""
    return pattern(**{name: n for name, n in sizes.items() if name in inspect.signature(pattern).parameters})


def cpu(work: Callable[[], Any]) -> float:
    """Run `work`, and return the CPU time that it takes in this process, in milliseconds."""
    begun = time.process_time()
    work()
    return round(1e3 * (time.process_time() - begun), 1)


def lowering() -> Iterator[Row]:
    hi.lower(patterns.mlp_2d(), "fused")  # imports modules that are imported at first use
    sizes = {"S": 4, "M": 4 * MANY, "K": 8 * MANY, "N": 8 * MANY, "H": 8 * MANY}
    for pattern in patterns.PATTERNS:
        for strategy in STRATEGIES:
            unlowered = fusion(pattern, ranks=MANY, **sizes)
            forget()
            try:
                ms = cpu(lambda unlowered=unlowered, strategy=strategy: hi.lower(unlowered, strategy))
            except HostIRError:  # the strategy cannot overlap this pattern
                continue
            yield {"what": "lower", "fusion": pattern.__name__, "how": strategy, "ms": ms}


def choosing() -> Iterator[Row]:
    decide(patterns.mlp(ranks=2).program(), reference(REFERENCE, 2), {})
    for pattern in patterns.PATTERNS:
        for slices in (4, 16):
            program = fusion(pattern, ranks=FEW, S=slices, **LARGE).program()
            forget()
            ms = cpu(lambda program=program: decide(program, reference(REFERENCE, FEW), {}))
            yield {"what": "auto", "fusion": pattern.__name__, "how": f"S={slices}", "ms": ms}


def mlp(ranks: int, slices: int) -> hi.Fusion:
    """Return the pattern `mlp` with M as a symbol."""
    with hi.Fusion("mlp") as mlp_fusion:
        x = hi.tensor("x", [slices, ranks, "M", 64], "f32")
        w1, w2 = hi.tensor("w1", [64, 128], "f32"), hi.tensor("w2", [128, 64], "f32")
        y = hi.gelu(x @ w1) @ w2
        mlp_fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    for tensor, axis in ((x, 1), (w1, 1), (w2, 0), (y, 1)):
        tensor.shard(axis, mesh)
    y.axis(0).parallelize(hi.ParallelType.Stream)
    return mlp_fusion


def calling(ranks: int) -> Iterator[Row]:
    """Yield the rows of *new M*, measured on this rank."""
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
    """Return the rows of `calling`, run on `count` processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        subprocess.run([*launcher, "-m", "benchmarks.compiling", "--as-rank", str(file)], check=True, timeout=600)
        rows: list[Row] = json.loads(file.read_text())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # programs with too many statements for a proof
    if options.as_rank:
        rows = list(calling(int(os.environ["WORLD_SIZE"])))
        if os.environ["RANK"] == "0":
            options.as_rank.write_text(json.dumps(rows))
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
