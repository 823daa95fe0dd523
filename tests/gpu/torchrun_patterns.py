"""Every pattern by every strategy on real ranks, eager and in a CUDA graph of the caller, compared with float64.

    torchrun --standalone --nproc-per-node 2 tests/gpu/torchrun_patterns.py [--seconds S] [--only REGEX] [--device cpu]

All dtypes and kernels, those with tensor cores first. The dtype of an fp8 product is the dtype of its result; fp8
products run with all granularities of scales, along each axis. It prints a line for each case, and at the end the
number of cases that did not run for lack of time. The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import torch

import hostir as hi
from hostir.call.bounds import bound, reductions
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.cli.run import copies
from hostir.ir.expert_ops import GroupedMatmul
from hostir.ir.source import HostIRError
from hostir.job.session import Session, session
from hostir.kernels.matmul.tiles import SCALE_BLOCK
from hostir.kernels.scales import flat_scales, of_blocks
from hostir.lower.strategies import strategies

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import patterns

CASES = {  # dtype, kernels, and True for real sizes
    "cuda": (("bf16", "aten", True), ("bf16", "triton", True), ("f32", "triton", True), ("f32", "aten", False)),
    "cpu": (("f32", "aten", False),),
}
REAL = {"M": 1024, "K": 512, "N": 768, "H": 1024}


def sizes_for(pattern: Callable[..., hi.Fusion], large: bool) -> dict[str, int]:
    """Return keyword arguments for a pattern: real sizes, or none for its small defaults."""
    names = names_of(pattern)
    return {n: v for n, v in REAL.items() if n in names} if large else {}


def names_of(pattern: Callable[..., hi.Fusion]) -> Sequence[str]:
    """Return the parameters of a pattern."""
    return [*inspect.signature(pattern).parameters]


def every_pattern() -> Iterator[tuple[str, Callable[..., hi.Fusion]]]:
    """Yield patterns by name; fp8 products with all granularities of scales, along each axis."""
    yield from ((pattern.__name__, pattern) for pattern in (*patterns.PATTERNS, *patterns.EXPERTS))
    for pattern in patterns.SCALED:
        for axis in (0, 1) if "axis" in names_of(pattern) else (None,):
            for scales in ("rows", "tensor", "blocks"):
                along = {} if axis is None else {"axis": axis}
                name = " ".join([pattern.__name__, scales, *(f"axis {n}" for n in along.values())])
                yield name, partial(pattern, scales=scales, **along)


def by_tensor_cores(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> torch.Tensor:
    """Compute an fp8 product by `torch._scaled_mm` without scales, and multiply by the scales in float32.

    Results in f32 are compared with this unfused computation. A tensor core of Hopper aligns the products of a step to
    the largest one and keeps about 13 bits below it, so the error of a sum is about 1e-4: far less than a rounding to
    bf16, and a thousand times a rounding to f32. With `fast` this holds for sums along all of K.
    """
    of_a, of_b = flat_scales(a, b, scale_a, scale_b)
    flat, along_k = a.reshape(-1, a.shape[-1]), b.t().contiguous().t()
    one = torch.ones((), device=a.device)
    block_wise = of_blocks((of_a, of_b), b.shape[1])
    length = SCALE_BLOCK if block_wise else a.shape[-1]
    total = torch.zeros(len(flat), b.shape[1], device=a.device)
    for step in range(a.shape[-1] // length):
        k = slice(step * length, (step + 1) * length)
        sums = torch._scaled_mm(
            *(flat[:, k].contiguous(), along_k[k].t().contiguous().t(), one, one),
            out_dtype=torch.float32,
            use_fast_accum=fast,
        )
        columns = of_b.repeat_interleave(SCALE_BLOCK, 1)[step, : b.shape[1]] if block_wise else of_b
        total += sums * (of_a[:, step, None] if block_wise else of_a) * columns
    return (total if bias is None else total + bias).to(dtype).view(*a.shape[:-1], b.shape[1])


def unfused(source: hi.Program, inputs: Sequence[torch.Tensor], kernels: str) -> tuple[torch.Tensor, ...]:
    """Compute unsharded outputs in the dtypes of the program; fp8 products by tensor cores if `kernels` use them."""
    if kernels == "aten" or not inputs[0].is_cuda:
        return reference(source, inputs, dtype=None)
    fast = any(getattr(s, "accumulate", "") for s in source.walk())
    exactly = partial(by_tensor_cores, fast=fast)
    with mock.patch("hostir.kernels.aten.scaled_matmul_reference", exactly):
        return reference(source, inputs, dtype=None)


def errors(
    joined: Session, program: hi.Program, outputs: tuple[torch.Tensor | None, ...], exact: tuple[torch.Tensor, ...]
) -> float:
    """Return the largest relative error of any output, over the parts of all ranks."""
    squares = torch.zeros(len(outputs), device=joined.device, dtype=torch.float64)
    for n, (value, part, true) in enumerate(zip(program.outputs, outputs, exact, strict=True)):
        mine = shard(true, value.tensor, joined.rank, {})
        if part is not None and mine is not None:
            squares[n] = torch.linalg.vector_norm(part.double() - mine) ** 2 / copies(value.tensor)
    torch.distributed.all_reduce(squares)
    norms = torch.stack([torch.linalg.vector_norm(true) for true in exact])
    return float((squares.sqrt() / norms).nan_to_num(nan=float("inf")).max())


def run_case(
    joined: Session, pattern: Callable[..., hi.Fusion], strategy: str, dtype: str, kernels: str, large: bool, seed: int
) -> tuple[str, str]:
    """Run one case: eager twice with fresh inputs, then captured, then replayed with fresh inputs.

    Return `ok` or `FAIL` with the errors, or `none` with the reason why the strategy refuses the pattern.
    """
    fusion = pattern(ranks=joined.size, dtype=dtype, **sizes_for(pattern, large))
    try:
        program = hi.lower(fusion, strategy)
    except HostIRError as refused:
        return "none", refused.diagnostics[0].message
    executor = hi.Executor(program, kernels=kernels)
    source, measured = fusion.program(), []

    def fresh(seed: int) -> tuple[list[torch.Tensor | None], tuple[torch.Tensor, ...], float]:
        inputs = random_inputs(source, {}, seed, joined.device)
        exact, plain = reference(source, inputs), unfused(source, inputs, kernels)
        most = max(bound(p, e, reductions(program, ring=True)) for p, e in zip(plain, exact, strict=True))
        return [shard(x, v.tensor, joined.rank, {}) for v, x in zip(program.inputs, inputs, strict=True)], exact, most

    for call_seed in (seed, 2):
        parts, exact, most = fresh(call_seed)
        measured.append((errors(joined, program, executor(*parts), exact), most))
    by_group = any(isinstance(s, GroupedMatmul) for s in source.walk())
    if joined.device.type == "cuda" and not (kernels == "aten" and by_group):  # ATen waits for the numbers of rows
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = executor(*parts)
        later, exact, most = fresh(3)
        for part, new in zip(parts, later, strict=True):
            if part is not None and new is not None:
                part.copy_(new)
        for out in captured:
            if out is not None:
                out.fill_(float("nan"))
        graph.replay()
        measured.append((errors(joined, program, captured, exact), most))
    return "ok" if all(e <= m for e, m in measured) else "FAIL", " ".join(f"{e:.1e}/{m:.1e}" for e, m in measured)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases and return the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    options.add_argument("--only", default="", help="run the cases whose line matches this regular expression")
    options.add_argument("--device", choices=CASES, default="cuda")
    chosen = options.parse_args(arguments)
    try:
        wanted = re.compile(chosen.only)
    except re.error as problem:
        options.error(f"--only {chosen.only!r} is not a regular expression: {problem}")
    begun, counts = time.monotonic(), Counter[str]()
    with session(chosen.device) as joined:
        assert joined
        seed = int(joined.exchange("seed", str(int(time.time())))[0])  # the same on all ranks
        for case, strategy, (name, pattern) in itertools.product(
            CASES[chosen.device], strategies(), [*every_pattern()]
        ):
            label = f"{name:37} {strategy:26} {case[0]:4} {case[1]:6}"
            if not wanted.search(label):
                continue
            if any(joined.exchange("over", "over" if time.monotonic() - begun > chosen.seconds else "")):
                counts["not run"] += 1
                continue
            verdict, text = run_case(joined, pattern, strategy, *case, seed)
            counts[verdict] += 1
            if joined.rank == 0:
                print(f"{verdict:4} {label} {text}", flush=True)
        if joined.rank == 0:
            numbers = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
            print(f"{numbers} on {joined.size} ranks, seed {seed}", flush=True)
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
