"""Random programs that the checker accepts, on real GPUs with one slow rank, compared with simulated ranks.

    python tests/gpu/torchrun_random.py --draw 200 --folder build/random                  draws programs
    torchrun --standalone --nproc-per-node 2 tests/gpu/torchrun_random.py --folder build/random --calls 50

Drawing takes a fraction of a second for each program and no GPU. The calls of a program follow each other without a
pause: the caller overwrites inputs and outputs with NaN on its stream. New memory holds NaN. It prints a line for each
program that goes wrong, and a summary.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # lazy loading waits for the device, which waits for other ranks
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hostir as hi
from hostir.call.local import rehearse
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.job.session import Session, session

NAN = float("nan")
CLOSE = 2e-2  # relative to the largest element; stale or undefined data differ by far more
Parts = list[torch.Tensor | None]


def slowed(text: str, random: Random, ranks: int) -> str:
    """Return the program with delays on one rank."""
    slow, lines, known = random.randrange(ranks), list[str](), False
    for line in text.splitlines():
        lines.append(line)
        known = known or "%r = rank of" in line
        if known and line.strip() and not line.rstrip().endswith(("{", "}")) and random.random() < 0.15:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}if %r == {slow} {{ delay {random.choice((50, 300, 1000))} us }}")
    return "\n".join(lines) + "\n"


def drawn(count: int, ranks: int, first: int) -> Iterator[tuple[int, str]]:
    """Yield random programs that the checker accepts, with one slow rank."""
    from tests.judging.random_programs import accepted, loosened

    seed = first
    while count:
        program = loosened(seed, ranks)
        if program is not None:
            text = slowed(str(program), Random(seed), ranks)
            if accepted(hi.parse(text, f"seed_{seed}.hir")):
                yield seed, text
                count -= 1
        seed += 1


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    for elements in (128, 1 << 12, 1 << 16, 1 << 20):
        blocks = [torch.full((elements,), NAN, device=device) for _ in range(8)]
        del blocks


def wrong(joined: Session, program: hi.Program, calls: int, seed: int) -> str:
    """Return the difference between the calls of a program and simulated ranks, or ""."""
    inputs = [random_inputs(program, {}, seed=1_000_003 * seed + call) for call in range(min(calls, 8))]
    truth = rehearse(program, inputs, {}, "aten").run(0)
    pairs = list(zip(program.inputs, range(len(program.inputs)), strict=True))
    parts: list[Parts] = [[shard(x[n], v.tensor, joined.rank, {}) for v, n in pairs] for x in inputs]
    fresh_parts = [[None if x is None else x.to(joined.device) for x in call] for call in parts]
    executor = hi.Executor(program, kernels="aten" if seed % 2 else "auto")
    arguments: Parts = [None if x is None else x.clone() for x in fresh_parts[0]]
    poison(joined.device)
    executor(*arguments)  # loads kernels
    executor.synchronize()
    bad = torch.zeros((), dtype=torch.int64, device=joined.device)
    expected = [[x[joined.rank] for x in call] for call in truth]
    exact = [[None if x is None else x.to(joined.device) for x in call] for call in expected]
    for call in range(calls):
        n = call % len(inputs)
        for x, fresh in zip(arguments, fresh_parts[n], strict=True):
            if x is not None and fresh is not None:
                x.copy_(fresh)
        outputs = executor(*arguments)
        for out, true in zip(outputs, exact[n], strict=True):
            if out is not None and true is not None:
                bad += ~((out - true).abs() <= CLOSE * true.abs().max()).all()  # also for NaN
        for x in (*arguments, *outputs):
            if x is not None:
                x.fill_(NAN)
    executor.synchronize()
    return f"{int(bad)} outputs of {calls} calls differ" if int(bad) else ""


def main() -> int:
    """Draw programs, or run the programs of a folder; return 1 if one goes wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--draw", type=int, default=0, help="draw this many programs and end")
    options.add_argument("--first", type=int, default=0, help="the first seed to draw")
    options.add_argument("--ranks", type=int, default=2, help="the ranks of drawn programs")
    options.add_argument("--calls", type=int, default=50)
    chosen = options.parse_args()
    if chosen.draw:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        for seed, text in drawn(chosen.draw, chosen.ranks, chosen.first):
            (chosen.folder / f"seed_{seed}.hir").write_text(text)
        return 0
    failed, ran = 0, 0
    torch.backends.cuda.matmul.allow_tf32 = False
    with session("cuda", 20.0) as joined:
        assert joined is not None
        for seed, path in enumerate(sorted(chosen.folder.glob("*.hir"))):
            program = hi.parse(path.read_text(), path.name)
            if program.ranks != joined.size:
                continue
            ran += 1
            if error := wrong(joined, program, chosen.calls, seed):
                failed += 1
                print(f"rank {joined.rank}: {path.name}: {error}", flush=True)
        print(f"rank {joined.rank}: {ran} programs, {chosen.calls} calls each, {failed} wrong", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
