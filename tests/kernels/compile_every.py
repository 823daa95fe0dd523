"""Compile and check every kernel that the plans of all patterns and benchmarks load on a Hopper GPU. Needs no GPU.

    python -m tests.kernels.compile_every [--jobs N] [--cases WORDS]

Binds the plans of rank 0. Plans of other ranks differ only in the source of a sum that own rows replace. Prints kernels
that do not fit, and exits with 1 if there is one. `make kernels` runs it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.kernels.cases import Case, every_case
from tests.kernels.hopper import REGISTERS, SHARED_MEMORY, Kernel, counted, hopper, inputs_of

CHUNK = 60  # cases that a process binds at a time
# The most bytes of spilled registers of a thread. Spills are after the pipeline, where a tile is stored. Kernels with
# several loops (for own rows, early tiles, unsplit tiles and split tiles) spill most.
SPILLS, SPILLS_OF_SEVERAL_LOOPS = 128, 512


def kernels_of(cases: Sequence[Case]) -> dict[str, tuple[Case, Kernel]]:
    """Return the kernels that rank 0 loads for these cases, by key, each with the first case that loads it."""
    kernels_by_key: dict[str, tuple[Case, Kernel]] = {}
    with hopper() as gpu:
        for case in cases:
            program, sizes = case.program(), dict(case.sizes)
            if program is None:
                continue
            gpu.plan(program, 0, case.kernels, inputs_of(program, 0, case.columns, sizes), sizes)
            kernels_by_key |= {key: (case, kernel) for key, kernel in gpu.kernels.items() if key not in kernels_by_key}
    return kernels_by_key


@dataclass(frozen=True)
class Outcome:
    """The result of compiling a kernel: bytes of shared memory, bytes of spilled registers, and its faults."""

    kernel: str
    shared: int
    spilled: int
    faults: tuple[str, ...]


def outcome(kernel: Kernel) -> Outcome:
    """Compile a kernel and check that a program fits on an SM, and needs no more memory than its tile's estimate."""
    with counted():
        metadata = kernel.compiled().metadata
    settings = kernel.settings
    several = kernel.is_matmul and settings.OWN and settings.EARLY and settings.SPLIT
    registers = metadata.registers * 32 * metadata.num_warps
    most = {
        "bytes of shared memory": (metadata.shared, SHARED_MEMORY),
        "bytes of shared memory by the estimate of its tile": (metadata.shared, kernel.estimate),
        "registers": (registers, REGISTERS),
        "bytes of spilled registers": (metadata.spilled, SPILLS_OF_SEVERAL_LOOPS if several else SPILLS),
    }
    faults = (f"{taken} instead of at most {limit} {what}" for what, (taken, limit) in most.items() if taken > limit)
    return Outcome(str(kernel), metadata.shared, metadata.spilled, tuple(faults))


def collected(numbers: Sequence[int]) -> list[tuple[str, Kernel]]:
    """Return the kernels of some cases, by their indices, each with the name of a case that loads it."""
    return [(case.name, kernel) for case, kernel in kernels_of([every_case()[n] for n in numbers]).values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile all kernels and return the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    options.add_argument("--cases", default="", help="only those with these words in their names, such as '70B M=4096'")
    parsed = options.parse_args(arguments)
    begun, wanted = time.monotonic(), [n for n, case in enumerate(every_case()) if parsed.cases in case.name]
    with ProcessPoolExecutor(parsed.jobs, multiprocessing.get_context("spawn")) as pool:
        kernels: dict[str, tuple[str, Kernel]] = {}
        for each in pool.map(collected, (wanted[i : i + CHUNK] for i in range(0, len(wanted), CHUNK))):
            kernels |= {kernel.key: (name, kernel) for name, kernel in each if kernel.key not in kernels}
        names = Counter(kernel.name for _, kernel in kernels.values())
        kinds = ", ".join(f"{count} {name}" for name, count in names.most_common())
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"{len(wanted)} programs load {len(kernels)} different kernels: {kinds}; {took}", flush=True)
        failed, spilled = 0, Counter[int]()
        outcomes = pool.map(outcome, [kernel for _, kernel in kernels.values()], chunksize=4)
        for (name, _), result in zip(kernels.values(), outcomes, strict=True):
            spilled[result.spilled] += 1
            failed += bool(result.faults)
            for fault in result.faults:
                print(f"{name}: {result.kernel}: {fault}", flush=True)
    spills = ", ".join(f"{count} of {size} bytes" for size, count in sorted(spilled.items()) if size)
    print(
        f"{failed} of {len(kernels)} kernels do not fit; spills: {spills or 'none'}; {time.monotonic() - begun:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
