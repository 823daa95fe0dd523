"""hostir's Triton matmul against torch.matmul (cuBLAS) on one GPU: the local products of tensor-parallel Llama layers.

    python benchmarks/matmul.py --out benchmarks/results/matmul [--sweep]

For each shape it first holds both results against float64, then times them in turn, with random bfloat16 data and a
flushed L2, by CUDA events. A ratio above 1 means that cuBLAS is faster. --sweep also times every tile, which shows how
well `choose` chooses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import environment, table, write

from hostir.runtime.kernels.matmul import matmul
from hostir.runtime.kernels.tiles import Config, candidates, choose

ROWS = (512, 2048, 4096, 8192, 16384)
# (N, K) of 8B, 70B and 405B layers over 8 ranks: after an all-gather, then before a reduce-scatter.
WEIGHTS = ((1792, 4096), (3584, 8192), (6656, 16384), (4096, 1792), (8192, 3584), (16384, 6656))
L2_FLUSH = 256 << 20  # bytes written between two runs
HEAD_START = 400_000  # cycles the GPU sleeps before each run, so that launching from Python does not count
DTYPE = torch.bfloat16
COLUMNS = ("b", "cublas_us", "ours_us", "ratio", "tflops", "tile")


class Clock:
    """Times GPU work in turn with other GPU work, so that drifting clocks touch all alike."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(L2_FLUSH, dtype=torch.uint8, device="cuda")

    def medians(self, *works: Callable[[], object]) -> list[float]:
        """The median time of each of `works`, in microseconds."""
        for work in works * 3:
            work()
        events = [
            [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)]
            for _ in works
        ]
        for i in range(self.repeats):
            for work, pairs in zip(works, events, strict=True):
                self.flush.zero_()
                torch.cuda._sleep(HEAD_START)
                start, end = pairs[i]
                start.record()
                work()
                end.record()
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3 for pairs in events]


def check(name: str, out: torch.Tensor, cublas: torch.Tensor, exact: torch.Tensor) -> None:
    """End the program unless `out` is as accurate as cuBLAS's result (which may round once better by luck)."""
    ours, theirs = ((result.double() - exact).abs() for result in (out, cublas))
    worst, mean = ours.max().item(), ours.mean().item()
    if not (worst <= 1.1 * theirs.max().item() + 1e-6 and mean <= 1.01 * theirs.mean().item() + 1e-9):
        sys.exit(
            f"{name}: WRONG: error at most {worst}, on average {mean}; "
            f"cuBLAS {theirs.max().item()}, {theirs.mean().item()}"
        )


def host_time(work: Callable[[], object], calls: int = 200) -> float:
    """Microseconds of host time of one call, with the GPU far behind or idle."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def short(tile: Config) -> str:
    return f"{tile.m}x{tile.n}x{tile.k} w{tile.warps} s{tile.stages}"


def measure(M: int, N: int, K: int, clock: Clock, *, descriptors: bool, sweep: bool) -> list[dict[str, object]]:
    """Check and time one shape, for b `[K, N]` stored by rows and by columns."""
    a = torch.randn(M, K, device="cuda").to(DTYPE)
    b = torch.randn(K, N, device="cuda").to(DTYPE)
    exact = a.double() @ b.double()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = choose(M, N, K, DTYPE, sms, descriptors=descriptors)
    tiles = [chosen, *(tile for tile in candidates(DTYPE, descriptors=descriptors) if sweep and tile != chosen)]
    rows = []
    for major, right in (("row", b), ("column", b.t().contiguous().t())):
        outs = [torch.full((M, N), float("nan"), dtype=DTYPE, device="cuda") for _ in range(2)]

        def cublas(right: torch.Tensor = right, out: torch.Tensor = outs[0]) -> object:
            return torch.matmul(a, right, out=out)

        def ours(tile: Config, right: torch.Tensor = right, out: torch.Tensor = outs[1]) -> object:
            return matmul(a, right, out, use_descriptors=descriptors, config=tile)

        cublas()
        for tile in tiles:
            outs[1].fill_(float("nan"))
            ours(tile)
            check(f"{M},{N},{K} b by {major}s, {short(tile)}", outs[1], outs[0], exact)
        theirs, *times = clock.medians(cublas, *(lambda tile=tile: ours(tile) for tile in tiles))
        best = min(range(len(tiles)), key=times.__getitem__)
        rows.append(
            {
                "M": M,
                "N": N,
                "K": K,
                "b": major,
                "cublas_us": round(theirs, 1),
                "ours_us": round(times[0], 1),
                "ratio": round(times[0] / theirs, 3),
                "tflops": round(2 * M * N * K / times[0] / 1e6),
                "tile": short(chosen),
                "path": "TMA descriptors" if descriptors else "pointers",
                **(
                    {"tiles": {short(tile): round(t, 1) for tile, t in zip(tiles, times, strict=True)}} if sweep else {}
                ),
                **({"best_tile": short(tiles[best]), "best_ratio": round(times[best] / theirs, 3)} if sweep else {}),
            }
        )
    return rows


def as_table(rows: list[dict[str, object]]) -> str:
    """A row a shape and a layout of b."""
    cells = [[f"{r['M']}, {r['N']}, {r['K']}", *(str(r[key]) for key in COLUMNS)] for r in rows]
    return table(["M, N, K", "b by", "cuBLAS us", "ours us", "ratio", "TFLOP/s", "tile"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON and a table")
    parser.add_argument("--sweep", action="store_true", help="time every tile, not only the chosen one")
    parser.add_argument("--repeats", type=int, default=25, help="timed runs of each (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")

    began = time.perf_counter()
    descriptors = torch.cuda.get_device_capability() >= (9, 0)
    path = "TMA descriptors" if descriptors else "pointers"
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    print(f"{'M,N,K':>18} {'b by':>7} {'cuBLAS us':>10} {'ours us':>9} {'ratio':>6} {'TFLOP/s':>8}  tile", flush=True)
    clock = Clock(options.repeats)
    rows: list[dict[str, object]] = []
    for N, K in WEIGHTS:
        for M in ROWS:
            for row in measure(M, N, K, clock, descriptors=descriptors, sweep=options.sweep):
                rows.append(row)
                best = f"   best {row['best_tile']} {row['best_ratio']}" if options.sweep else ""
                print(
                    f"{f'{M},{N},{K}':>18} {row['b']:>7} {row['cublas_us']:>10} {row['ours_us']:>9} "
                    f"{row['ratio']:>6} {row['tflops']:>8}  {row['tile']}{best}",
                    flush=True,
                )
    small = [torch.randn(256, 256, device="cuda").to(DTYPE) for _ in range(3)]
    launch = {
        "ours_us": round(host_time(lambda: matmul(*small)), 1),
        "cublas_us": round(host_time(lambda: torch.matmul(*small[:2], out=small[2])), 1),
    }
    ratios = [float(str(row["ratio"])) for row in rows]
    print(f"ratio: geometric mean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios)}")
    print(f"host time of a call: ours {launch['ours_us']} us, torch.matmul {launch['cublas_us']} us")
    print(f"took {time.perf_counter() - began:.0f} s, path: {path}")
    if options.out:
        data = {"path": path, "repeats": options.repeats, "host": launch, "rows": rows}
        write(options.out, "hostir's Triton matmul against cuBLAS", as_table(rows), data)


if __name__ == "__main__":
    main()
