"""Programs whose kernels are compiled without a GPU: all patterns with all strategies, and all rows of the benchmarks.

`examples.patterns` and the benchmarks themselves make the fusions and programs, without tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import hostir as hi
from benchmarks import (
    all_reduce_norm,
    allgather_matmul,
    arrivals,
    matmul_all_reduce,
    matmul_reduce_scatter,
    mlp,
    moe,
    reshard,
    scaled_matmul,
)
from benchmarks.scores import BENCHMARKS, LARGE, Row
from examples import patterns
from hostir.ir.comm_ops import LOW_LATENCY
from hostir.ir.source import HostIRError
from hostir.lower import STRATEGIES
from hostir.lower.strategies import BY
from hostir.torch.ops.all_gather_matmul import gather_fusion
from hostir.torch.ops.matmul_reduce_scatter import rows_fusion
from tests.gpu.torchrun_patterns import every_pattern, names_of, sizes_for

RANKS = (2, 8)
EMULATED = 8  # ranks of a job; each of two GPUs runs the part of one rank
# More worker streams change kernels only of strategies in which kernels signal while other streams copy.
STREAMS = [(s, n) for s, each in STRATEGIES.items() for n in each.stream_counts if n in (each.stream_counts[0], 2)]
STREAMS.append((BY[LOW_LATENCY], 1))
SCALES = (("rows", True), ("rows", False), ("tensor", True), ("blocks", False))  # and True if tensor cores add up
Source = Callable[[], hi.Fusion | hi.Program]


@dataclass(frozen=True)
class Case:
    """A program, with its kernels, its lowering and its sizes.

    Fields:
        name: a name that is the same in every run.
        source: makes a fusion; without a strategy, a host program.
        kernels: the policy of kernels, as in an executor.
        strategy, streams: how the fusion is lowered.
        columns: weights are stored by columns, like the weights of a linear layer.
        sizes: the values of its symbols.
    """

    name: str
    source: Source
    kernels: str
    strategy: str = ""
    streams: int = 1
    columns: bool = True
    sizes: tuple[tuple[str, int], ...] = ()

    def program(self) -> hi.Program | None:
        """The host program; None if the strategy does not lower the fusion."""
        source = self.source()
        if not self.strategy:
            assert isinstance(source, hi.Program)
            return source
        try:
            return hi.lower(source, self.strategy, self.streams)
        except HostIRError:
            return None


def lowered(
    name: str, source: Source, kernels: Sequence[str], strategies: Sequence[str] = (), **more: Any
) -> Iterator[Case]:
    """Yield a fusion with each of the strategies, by default with all strategies that load kernels of hostir."""
    once = functools.cache(source)
    for (strategy, streams), policy in itertools.product(STREAMS, kernels):
        if not strategies or strategy in strategies:
            how = f"{strategy}{' 2 streams' * (streams > 1)} {policy}"
            yield Case(f"{name}: {how}", once, policy, strategy, streams, **more)


def of_patterns() -> Iterator[Case]:
    """Yield every pattern twice: with the sizes of model layers, and with its small default sizes.

    TMA descriptors cannot describe all tensors of these patterns.
    """
    every = [*every_pattern(), *((pattern.__name__, pattern) for pattern in patterns.NORMED)]
    for (name, pattern), ranks, large in itertools.product(every, RANKS, (True, False)):
        of_8_bits = name.split()[0] in {pattern.__name__ for pattern in patterns.SCALED}
        small = {"M": 48 * ranks} if "M" in names_of(pattern) else {}
        for dtype in ("bf16", "f32") if large else ("f16",) if of_8_bits else ("f32",):
            source = partial(pattern, ranks=ranks, dtype=dtype, **(sizes_for(pattern, large=True) if large else small))
            what = f"{name} {dtype}{' large' * large} on {ranks}"
            yield from lowered(what, source, ("triton", "auto"), columns=of_8_bits)


def subject(benchmark: type[Any], row: Row, ranks: int, **fields: Any) -> Any:
    """Return the comparison of a benchmark on one row without tensors: it can only make fusions and programs."""
    comparison = object.__new__(benchmark)
    vars(comparison).update(row=row, ranks=ranks, dtype=torch.bfloat16, **fields)
    return comparison


def scaled(benchmark: type[Any], row: Row, ranks: int, scales: str, fast: bool, axis: int | None = None) -> Any:
    """Return the comparison of an fp8 benchmark on one row, without tensors."""
    groups = row.K // scaled_matmul.BLOCK if scales == "blocks" else 1
    columns = {"tensor": (1, 1), "rows": (1, row.N), "blocks": (groups, row.N // scaled_matmul.BLOCK)}[scales]
    lead = [row.M] if axis is None else [scaled_matmul.BATCH, row.M // scaled_matmul.BATCH]
    scaling = {"scales": scales, "fast": fast, "scale_b": SimpleNamespace(shape=columns)}
    return subject(benchmark, row, ranks, **scaling, batched=axis is not None, axis=axis or 0, lead=lead)


def subjects(name: str, row: Row, ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield all programs that a benchmark compares on a row, each with a few words that distinguish it."""
    plain = {
        "allgather": allgather_matmul.Operands,
        "reduce_scatter": matmul_reduce_scatter.Operands,
        "all_reduce": matmul_all_reduce.Operands,
        "decode": matmul_all_reduce.Decoder,
    }
    if name in plain:
        yield "", subject(plain[name], row, ranks)
    elif name == "mlp":
        yield "", subject(mlp.Operands, row, ranks, gated=False)
        yield " gated", subject(mlp.Operands, row, ranks, gated=True)
    elif name == "moe":
        _, part, *skewed = row.model.split("-")
        if part in ("gather", "scatter", "layer") and not skewed:  # the others have no fusion, or the same
            yield "", subject(moe.PARTS[part], row, ranks)
    elif name == "reshard":
        kinds = {"reduce_scatter": reshard.Scattered, "all_gather": reshard.Gathered, "all_reduce": reshard.Summed}
        rows = row.M if row.model == "all_reduce" else row.M // ranks
        yield "", subject(kinds[row.model], row, ranks, y=range(rows))
    elif name == "all_reduce_norm":
        for fp8 in (False, True):
            yield " fp8" * fp8, subject(all_reduce_norm.NormedSum, row, ranks, fp8=fp8)
    else:
        benchmark = scaled_matmul.Gathered if name == "scaled_gather" else scaled_matmul.Scattered
        for scales, fast in SCALES:
            yield f" {scales}{' fast' * fast}", scaled(benchmark, row, ranks, scales, fast)
        along = [scaled(benchmark, row, ranks, "rows", fast=True, axis=axis) for axis in (0, 1)]
        yield from ((f" axis {each.axis}", each) for each in along if each.lead[each.axis] % ranks == 0)


def of_rows() -> Iterator[Case]:
    """Yield the programs of every row of the benchmarks that lower fusions."""
    texts = {"departures", "torch_operators", "scaled_gather_emulated", "scaled_scatter_emulated"}
    for name, ranks in itertools.product([name for name in BENCHMARKS if name not in texts], RANKS):
        policies = ("triton", "aten") if name.startswith("scaled") else ("triton",)
        for row in BENCHMARKS[name].rows():
            if row.M % ranks and name not in ("all_reduce", "all_reduce_norm", "decode"):
                continue
            for words, each in subjects(name, row, ranks):
                what = f"{name} {row}{words} on {ranks}"
                yield from lowered(what, partial(each.fusion, 1), policies)
                for slices in (n for n in each.slices if row.M % (n * ranks) == 0):
                    sliced = f"{what} in {slices} slices"
                    yield from lowered(sliced, partial(each.fusion, slices), policies, ["pipeline"])


def of_emulated_rows() -> Iterator[Case]:
    """Yield programs with the sizes that a rank of 8 has, for two GPUs."""
    for model, M in itertools.product(("8B", "70B", "405B"), LARGE):
        gathered, scattered = BENCHMARKS["allgather"].row(model, M), BENCHMARKS["departures"].row(model, M)
        for way in arrivals.WAYS:
            yield text(f"arrivals {gathered}: {way.name}", way.kernels, arrivals.program_text(gathered, EMULATED, way))
        for departure in matmul_reduce_scatter.WAYS:
            program = matmul_reduce_scatter.program_text(scattered, EMULATED, departure, "bf16")
            yield text(f"departures {scattered}: {departure}", departure.kernels, program)
        for scales, fast in SCALES if model == "70B" else ():
            what = f"{model} M={M} {scales}{' fast' * fast}"
            left = scaled(scaled_matmul.EmulatedGathered, gathered, EMULATED, scales, fast)
            scaling = arrivals.Scaling(0 if scales == "tensor" else left.scale_b.shape[0], left.scale_b.shape, fast)
            for way in arrivals.WAYS:
                program = arrivals.program_text(gathered, EMULATED, way, scaling)
                yield text(f"scaled arrivals {what}: {way.name}", way.kernels, program)
            right = scaled(scaled_matmul.EmulatedScattered, scattered, EMULATED, scales, fast)
            for departure in matmul_reduce_scatter.WAYS:
                yield text(f"scaled departures {what}: {departure}", departure.kernels, right.program(departure))


def text(name: str, kernels: str, program: str) -> Case:
    """Return the case of a host program in text form."""
    return Case(name, functools.cache(partial(hi.parse, program)), kernels)


def of_operators() -> Iterator[Case]:
    """Yield programs of hostir.torch's functions, forward and backward. Their number of rows is a symbol."""
    for row, ranks in itertools.product(BENCHMARKS["torch_operators"].rows(), RANKS):
        if row.M % ranks:
            continue
        gathers, trained = "-gather" in row.model, row.model.endswith("-trained")
        products = [(gathers, row.K, row.N), *([(not gathers, row.N, row.K)] if trained else [])]
        for gather, K, N in products:
            if gather:
                source = partial(gather_fusion, ranks, "bf16", K, (N,), 0, 0, 0, trained, False)
            else:
                source = partial(rows_fusion, ranks, "bf16", K * ranks, N, 0, 0, "bf16")
            what = f"torch {row} {'gathers' if gather else 'scatters'} on {ranks}"
            yield from lowered(what, source, ["triton"], sizes=(("M", row.M),))


@functools.cache
def every_case() -> Sequence[Case]:
    """Return all cases."""
    return [*of_patterns(), *of_rows(), *of_emulated_rows(), *of_operators()]
