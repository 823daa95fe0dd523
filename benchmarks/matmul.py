"""Compare hostir's Triton matmul with torch.matmul (cuBLAS) on one GPU: products of tensor-parallel Llama layers.

    python -m benchmarks.matmul --out benchmarks/results/matmul [--b both] [--fp8] [--sweep]

For each shape, the benchmark compares both results with float64. Then it times both matmuls in turn by CUDA events,
with random bfloat16 data and a flushed L2. A ratio above 1 means that cuBLAS is faster.

--fp8 measures fp8 matmuls at the widths of 70B, with tensor-wise, row-wise and block-wise scales. Tensor cores sum all
of K (fast) or 128 elements at a time. torch._scaled_mm takes the place of torch.matmul. If it does not run, there is no
ratio. With --sweep, all tiles of the table and some others are timed.

Without --fp8, --sweep measures only the matmuls after an all-gather. It compares the results of many more tiles with
float64: with and without split tiles, and with several group sizes and depths of the pipeline. It times all tiles
briefly, and the best of them again. This shows whether `choose` chooses a good tile. For the best tile, it also delays
the last of 8 blocks of rows, and measures how long the kernel runs after this block has arrived.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment, table, write
from hostir.choice.laps import L2_FLUSH
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul.estimate import choose
from hostir.kernels.matmul.matmul import matmul
from hostir.kernels.matmul.tiles import Gemm, Tile, candidates
from hostir.kernels.scaled import scaled_matmul
from hostir.kernels.scaled_library import scaled_by_library
from hostir.kernels.scales import scaled_matmul_reference

ROWS = (64, 512, 2048, 4096, 8192, 16384)
GATHER = ((1792, 4096), (3584, 8192), (6656, 16384))  # (N, K) of 8B, 70B and 405B layers over 8 ranks
REDUCE = tuple((K, N) for N, K in GATHER)  # before a reduce-scatter
BLOCKS = 8
HEAD_START = 400_000  # cycles the GPU sleeps before each run, so that launching from Python does not count
BRIEF = 5  # runs of each tile in a sweep; the best FINAL tiles are timed again
FINAL = 4
DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
FP8_WIDTHS = (GATHER[1], REDUCE[1])
FP8_ROWS = (2048, 4096, 8192, 16384)
FP8_WAYS = (("tensor", True), ("rows", True), ("rows", False), ("blocks", True))  # scales, and whether it is fast
# Tiles of a sweep that are not in the tables, with and without `fast`.
FP8_TILES = {
    "f8": (Tile(128, 128, 128, stages=6, warps=8), Tile(128, 256, 128, stages=3, warps=8, halves=True)),
    "f8s": (
        Tile(128, 256, 128, stages=4, warps=8, halves=True),
        Tile(64, 256, 128, stages=4, warps=8),
        Tile(128, 128, 128, stages=4, warps=8),
        Tile(128, 128, 128, stages=6, warps=4),
        Tile(128, 128, 64, stages=8, warps=8),
    ),
}
COLUMNS = ("b", "cublas_us", "ours_us", "ratio", "tflops", "tile")


class Clock:
    """Times pieces of GPU work in turn, so that clock drift affects all equally."""

    def __init__(self) -> None:
        self.flush = torch.empty(L2_FLUSH, dtype=torch.uint8, device="cuda")
        self.cycles = self._cycles()

    def medians(self, works: Sequence[Callable[[], object]], repeats: int, warm: int = 3) -> list[float]:
        """Return the median time of each of `works`, in microseconds."""
        for work in list(works) * warm:
            work()
        events = [[(event(), event()) for _ in range(repeats)] for _ in works]
        for i in range(repeats):
            for work, pairs in zip(works, events, strict=True):
                self.flush.zero_()
                torch.cuda._sleep(HEAD_START)
                start, end = pairs[i]
                start.record()
                work()
                end.record()
        torch.cuda.synchronize()
        return [median(pairs) for pairs in events]

    def tail(self, work: Callable[[ReadyFlags], object], late: float, repeats: int) -> float:
        """Return the median time from the arrival of the last of BLOCKS blocks to the end of the kernel.

        The last block arrives `late` microseconds after the kernel could start.
        """
        flags = torch.zeros(BLOCKS, dtype=torch.int32, device="cuda")
        epochs = torch.arange(repeats + 2, dtype=torch.int32).pin_memory()
        ready, side, pairs = ReadyFlags(flags, 0, no_timeouts(BLOCKS, "cuda")), torch.cuda.Stream(), []
        for epoch in range(1, repeats + 2):  # the first one compiles
            flags[:-1] = epoch
            self.flush.zero_()
            start, raised, end = event(), event(), event()
            torch.cuda._sleep(HEAD_START)
            start.record()
            side.wait_event(start)
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(late * self.cycles))
                flags[-1:].copy_(epochs[epoch : epoch + 1], non_blocking=True)
                raised.record()
            work(dataclasses.replace(ready, epoch=epoch))
            end.record()
            torch.cuda.synchronize()
            pairs.append((raised, end))
        if problem := timeout_error(ready.timeouts, 0, "flags"):
            raise problem
        return median(pairs[1:])

    def _cycles(self) -> float:
        """Return the number of cycles of `torch.cuda._sleep` in a microsecond."""
        pairs = [(event(), event()) for _ in range(5)]
        for start, end in pairs:
            start.record()
            torch.cuda._sleep(1_000_000)
            end.record()
        torch.cuda.synchronize()
        return 1_000_000 / median(pairs)


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def median(pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Return the median time between the two events of each pair, in microseconds."""
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


class Judge:
    """Compares results of a matmul with float64. They must be about as accurate as the result of cuBLAS."""

    def __init__(self, exact: torch.Tensor, cublas: torch.Tensor) -> None:
        self.exact = exact
        self.worst, self.mean = self._errors(cublas)

    def check(self, name: str, out: torch.Tensor, mean_too: float = 1.01) -> None:
        """End the program if `out` is wrong. Its mean error may be `mean_too` times the mean error of cuBLAS."""
        worst, mean = self._errors(out)
        if not (worst <= 1.1 * self.worst + 1e-6 and mean <= mean_too * self.mean + 1e-9):
            sys.exit(f"{name}: WRONG: error at most {worst}, on average {mean}; cuBLAS {self.worst}, {self.mean}")

    def _errors(self, out: torch.Tensor) -> tuple[float, float]:
        difference = (out.double() - self.exact).abs()
        return difference.max().item(), difference.mean().item()


def host_time(work: Callable[[], object], calls: int = 200) -> float:
    """Return the mean host time of `calls` calls in microseconds; the host does not wait for the GPU between them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def short(tile: Tile) -> str:
    return f"{tile.m}x{tile.n}x{tile.k} w{tile.warps} s{tile.stages} g{tile.group} k{tile.split}"


def variants(M: int, N: int, sms: int, *, descriptors: bool) -> list[Tile]:
    """Return the tiles of a sweep."""
    tiles = list(candidates("bf16", descriptors=descriptors))
    if descriptors:
        tiles += [
            Tile(128, 128, 64, stages=5, warps=8),
            Tile(64, 128, 64, stages=6, warps=4),
            Tile(64, 64, 128, stages=4, warps=4),
        ]
    large = [tile for tile in tiles if tile.m * tile.n >= 64 * 128] if M >= 2048 else tiles
    groups = (4, 8, 16) if M >= 2048 else (8,)
    tiles = [
        dataclasses.replace(t, group=g, split=n)
        for t in large
        for g in groups
        for n in (0, -(-M // t.m) * -(-N // t.n) % sms)
    ]
    return list(dict.fromkeys(dataclasses.replace(tile, rate=1.0) for tile in tiles))


def measure(M: int, N: int, K: int, major: str, clock: Clock, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time one shape. `b`, `[K, N]`, is stored by rows or by columns, as `major` says."""
    a = torch.randn(M, K, device="cuda").to(DTYPE)
    b = torch.randn(K, N, device="cuda").to(DTYPE)
    right = b if major == "row" else b.t().contiguous().t()
    theirs, out = (torch.full((M, N), float("nan"), dtype=DTYPE, device="cuda") for _ in range(2))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = dataclasses.replace(
        choose(Gemm(M, N, K, "bf16"), sms, candidates("bf16", descriptors=options.descriptors)), rate=1.0
    )
    tiles = [chosen, *(variants(M, N, sms, descriptors=options.descriptors) if options.sweep else ())]
    tiles = list(dict.fromkeys(tiles))

    def cublas() -> object:
        return torch.matmul(a, right, out=theirs)

    def ours(tile: Tile, ready: ReadyFlags | None = None) -> object:
        return matmul(a, right, out, use_descriptors=options.descriptors, tile=tile, ready=ready)

    cublas()
    judge = Judge(a.double() @ b.double(), theirs)
    compile_together([lambda tile=tile: ours(tile) for tile in tiles])
    for tile in tiles:
        for _ in range(2):  # the second call uses the counters that the first one left
            out.fill_(float("nan"))
            ours(tile)
            judge.check(f"{M},{N},{K} b by {major}s, {short(tile)}", out)
    del judge
    brief = []
    if options.sweep:
        brief = clock.medians([lambda tile=tile: ours(tile) for tile in tiles], BRIEF, warm=1)
        order = sorted(range(1, len(tiles)), key=brief.__getitem__)
        finalists = [chosen, *(tiles[i] for i in order[:FINAL])]
    else:
        finalists = [chosen]
    times = clock.medians([cublas, *(lambda tile=tile: ours(tile) for tile in finalists)], options.repeats)
    row: dict[str, Any] = {
        "M": M,
        "N": N,
        "K": K,
        "b": major,
        "cublas_us": round(times[0], 1),
        "ours_us": round(times[1], 1),
        "ratio": round(times[1] / times[0], 3),
        "tflops": round(2 * M * N * K / times[1] / 1e6),
        "tile": short(chosen),
        "path": "TMA descriptors" if options.descriptors else "pointers",
    }
    if not options.sweep:
        return row
    best = min(range(len(finalists)), key=lambda i: times[i + 1])
    row["best_tile"], row["best_ratio"] = short(finalists[best]), round(times[best + 1] / times[0], 3)
    row["finalists"] = {short(tile): round(t, 1) for tile, t in zip(finalists, times[1:], strict=True)}
    row["tiles"] = {short(tile): round(t, 1) for tile, t in zip(tiles, brief, strict=True)}
    if M >= 2048:
        row["tail_us"] = round(clock.tail(lambda ready: ours(finalists[best], ready), 1.5 * times[0], 7), 1)
    return row


def measure_scaled(
    M: int, N: int, K: int, scaled: str, fast: bool, clock: Clock, options: argparse.Namespace
) -> dict[str, Any]:
    """Check and time one fp8 matmul. `b` is stored by columns, because both kernels read it along K."""
    a, b = torch.randn(M, K, device="cuda").to(FP8), torch.randn(N, K, device="cuda").to(FP8).t()
    shapes = {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, K // 128), (K // 128, N // 128))}
    scales = [torch.rand(shape, device="cuda") + 0.5 for shape in shapes[scaled]]
    theirs, out = (torch.full((M, N), float("nan"), dtype=DTYPE, device="cuda") for _ in range(2))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    family = "f8" if fast and scaled != "blocks" else "f8s"
    chosen = choose(Gemm(M, N, K, family, result=2), sms, candidates(family, result=2))
    more = (*candidates(family, result=2), *FP8_TILES[family]) if options.sweep else ()
    tiles = [chosen, *(dataclasses.replace(tile, rate=1.0) for tile in more if scaled != "blocks" or tile.n <= 128)]
    of_columns = [scale.t().contiguous().t() for scale in scales]  # as cuBLAS reads scales of blocks, without a copy

    def library() -> object:
        if scaled != "blocks" and scaled_by_library(theirs, a, b, *scales, fast=fast):
            return theirs
        return torch._scaled_mm(a, b, *of_columns, out_dtype=DTYPE, out=theirs)

    def ours(tile: Tile) -> object:
        return scaled_matmul(out, a, b, *scales, fast=fast, tile=tile)

    exact = scaled_matmul_reference(a, b, *scales, None, torch.float64)
    peers = [library]
    try:
        library()
        judge = Judge(exact, theirs)
    except (RuntimeError, ValueError) as problem:
        print(f"torch has no product with scales of {scaled}: {str(problem).splitlines()[0]}", flush=True)
        peers, judge = [], Judge(exact, exact.to(DTYPE))
    compile_together([lambda tile=tile: ours(tile) for tile in tiles])
    for tile in tiles:
        out.fill_(float("nan"))
        ours(tile)
        judge.check(f"{M},{N},{K} scales of {scaled}, {short(tile)}", out, 1.1)
    del judge, exact
    brief = clock.medians([lambda tile=tile: ours(tile) for tile in tiles], BRIEF, warm=1) if options.sweep else [0.0]
    finalists = [tiles[i] for i in (0, *sorted(range(1, len(tiles)), key=brief.__getitem__)[:FINAL])]
    works = [*peers, *(lambda tile=tile: ours(tile) for tile in finalists)]
    times = clock.medians(works, options.repeats)
    first, times = times[: len(peers)], times[len(peers) :]
    row: dict[str, Any] = {
        "M": M,
        "N": N,
        "K": K,
        "b": f"{scaled}{' fast' if family == 'f8' else ''}",
        "cublas_us": round(first[0], 1) if first else None,
        "ours_us": round(times[0], 1),
        "ratio": round(times[0] / first[0], 3) if first else None,
        "tflops": round(2 * M * N * K / times[0] / 1e6),
        "tile": short(chosen),
    }
    if options.sweep:
        best = min(range(len(finalists)), key=times.__getitem__)
        row["best_tile"] = short(finalists[best])
        row["best_ratio"] = round(times[best] / (first or times)[0], 3)
        row["tiles"] = {short(tile): round(t, 1) for tile, t in zip(tiles, brief, strict=True)}
    return row


def compile_together(works: Sequence[Callable[[], object]]) -> None:
    """Run each piece of work once. The pieces run in threads, because compiling takes seconds."""
    with ThreadPoolExecutor(initializer=torch.cuda.synchronize) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
    torch.cuda.synchronize()


def as_table(rows: list[dict[str, object]]) -> str:
    """Return a table with a row for each shape and layout of b."""
    cells = [[f"{r['M']}, {r['N']}, {r['K']}", *(str(r[key]) for key in COLUMNS)] for r in rows]
    return table(["M, N, K", "b by", "cuBLAS us", "ours us", "ratio", "TFLOP/s", "tile"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON and a table")
    parser.add_argument("--b", choices=("row", "column", "both"), default="row", help="how b is stored")
    parser.add_argument("--fp8", action="store_true", help="products of 8-bit floats with scales")
    parser.add_argument("--sweep", action="store_true", help="time many tiles, not only the chosen one")
    parser.add_argument("--repeats", type=int, default=25, help="timed runs of each (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")

    began = time.perf_counter()
    options.descriptors = torch.cuda.get_device_capability() >= (9, 0)
    path = "TMA descriptors" if options.descriptors else "pointers"
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    print(f"{'M,N,K':>18} {'b by':>11} {'cuBLAS us':>10} {'ours us':>9} {'ratio':>6} {'TFLOP/s':>8}  tile", flush=True)
    clock = Clock()
    rows: list[dict[str, Any]] = []
    majors = ("row", "column") if options.b == "both" else (options.b,)
    works: list[Callable[[], dict[str, Any]]] = [
        partial(measure, M, N, K, major, clock, options)
        for N, K in (GATHER if options.sweep else (*GATHER, *REDUCE))
        for M in ROWS
        for major in majors
    ]
    if options.fp8:
        works = [
            partial(measure_scaled, M, N, K, *way, clock, options)
            for way in FP8_WAYS
            for N, K in FP8_WIDTHS
            for M in FP8_ROWS
        ]
    for work in works:
        rows.append(work())
        print(line(rows[-1]), flush=True)
    launch = host_times()
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    print(f"ratio: geometric mean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios)}")
    print("host time of a call, us: " + ", ".join(f"{name} {t}" for name, t in launch.items()))
    print(f"took {time.perf_counter() - began:.0f} s, path: {path}")
    if options.out:
        data = {"path": path, "repeats": options.repeats, "host": launch, "rows": rows}
        write(options.out, "hostir's Triton matmul against cuBLAS", as_table(rows), data)


def line(row: dict[str, Any]) -> str:
    best = f"   best {row['best_tile']} {row['best_ratio']}" if "best_tile" in row else ""
    late = f"   tail {row['tail_us']}" if "tail_us" in row else ""
    shape = f"{row['M']},{row['N']},{row['K']}"
    return (
        f"{shape:>18} {row['b']:>11} {row['cublas_us']!s:>10} {row['ours_us']:>9} "
        f"{row['ratio']!s:>6} {row['tflops']:>8}  {row['tile']}{best}{late}"
    )


def host_times() -> dict[str, float]:
    """Return the host time of a launch in microseconds, of hostir's kernels and of torch."""
    small = [torch.randn(256, 256, device="cuda").to(DTYPE) for _ in range(3)]
    others = [torch.empty_like(small[2]) for _ in range(3)]
    ready = ReadyFlags(torch.ones(4, dtype=torch.int32, device="cuda"), 1, no_timeouts(4, "cuda"))
    turns = itertools.cycle(others)
    shared = Tile(64, 64, 64, stages=4, warps=4, split=4)
    works: dict[str, Callable[[], object]] = {
        "torch.matmul": lambda: torch.matmul(*small[:2], out=small[2]),
        "ours": lambda: matmul(*small),
        "ours, with flags": lambda: matmul(*small, ready=ready),
        "ours, split tiles": lambda: matmul(*small, tile=shared),
        "ours, out changes": lambda: matmul(*small[:2], next(turns)),
    }
    for work in works.values():
        work()
    return {name: round(host_time(work), 1) for name, work in works.items()}


if __name__ == "__main__":
    main()
