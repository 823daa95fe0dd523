"""Cases that every rank of tests/call/test_torchrun.py runs: `torchrun_cases.py NAME ...` runs the named cases.

A case that succeeds prints `PASS name rank`. Every call gets new random inputs. Allocated memory holds NaN until it is
written. Results are compared with the same computation on unsharded tensors in float64.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product as product_of
from pathlib import Path
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir import kernels
from hostir.call.bounds import bound, reductions
from hostir.call.executor import Executor, run
from hostir.call.local import rehearse
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.types import FLOATS, FP8
from hostir.job import symmetric
from hostir.job.agreement import Meetings
from hostir.job.links import Links
from hostir.job.session import joined, session
from hostir.kernels.dtypes import TORCH
from hostir.lower import STRATEGIES
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.fused import Fused, Push
from hostir.lower.ring import Ring
from hostir.lower.strategies import EXPLICIT, FINISH, lower, run_passes
from hostir.machines.gloo.machine import GlooPlan
from hostir.machines.trace import Trace
from tests import symbolic
from tests.call import programs as by_blocks
from tests.call import torchrun_programs as programs
from tests.call.torchrun_programs import RANKS, SIZE
from tests.gpu.stress_units import Delays

RANK = int(os.environ["RANK"])
SEED = 1000 * int(os.environ.get("MASTER_PORT", "1"))  # different in every job
CASES: dict[str, Callable[[], None]] = {}
COMPUTED = [name for name in FLOATS if name not in FP8]  # dtypes of all kernels; fp8 needs kernels that take scales
Reference = Callable[..., tuple[torch.Tensor, ...]]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def error_of(output: torch.Tensor, exact: torch.Tensor) -> float:
    return float((output.double() - exact).abs().max())


def check(program: Program, reference: Reference, calls: int = 3, **sizes: int) -> None:
    """Compare each call's results with float64. The error may be 1.1 times the error of torch on unsharded tensors."""
    executor = Executor(program)
    for call in range(calls):
        inputs = random_inputs(program, sizes, seed=SEED + call)
        parts = [shard(x, v.tensor, RANK, sizes) for x, v in zip(inputs, program.inputs, strict=True)]
        outputs = executor(*parts)
        exact, plain = reference(*[x.double() for x in inputs]), reference(*inputs)
        for value, output, exact_whole, torch_whole in zip(program.outputs, outputs, exact, plain, strict=True):
            exact_part = shard(exact_whole, value.tensor, RANK, sizes)
            if exact_part is None:
                assert output is None, value
                continue
            torch_part = shard(torch_whole, value.tensor, RANK, sizes)
            assert output is not None
            assert torch_part is not None
            assert output.dtype == TORCH[value.tensor.dtype.name]
            slack = (1e-14 if output.dtype == torch.float64 else 1e-6) * float(exact_part.abs().max())
            assert error_of(output, exact_part) <= 1.1 * error_of(torch_part, exact_part) + slack, value
    assert len(executor.plans) == 1


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (a @ b,)


def product_by_ranks(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the sum of the ranks' products. Each is computed in f32 or better, as hostir does, and rounded once.

    torch's products of f16 tensors are less exact by default, and a less exact one can be lucky in its rounding:
    once in 300 calls the largest error of 3,072 sums was then less than 1/1.1 of hostir's.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    parts = [x.to(wide) @ y.to(wide) for x, y in zip(a.chunk(SIZE, -1), b.chunk(SIZE, 0), strict=True)]
    return (torch.stack([part.to(a.dtype) for part in parts]).sum(0),)


def contains(text: str, *pieces: str) -> None:
    assert not [piece for piece in pieces if piece not in text], text


def refusal(function: Callable[[], object]) -> str:
    """Return the message of the HostIRError that a function must raise."""
    try:
        function()
    except HostIRError as problem:
        return str(problem)
    raise AssertionError("no HostIRError was raised")


@case
def all_gather() -> None:
    for dtype in COMPUTED:
        check(programs.ag_matmul(dtype=dtype), product, M=5)


@case
def every_pattern_in_f64() -> None:
    for pattern in symbolic.PATTERNS:
        if pattern is patterns.moe_layer_fp8:  # a product of fp8 matrices has no f64
            continue
        for source, p in symbolic.lowered(pattern, SIZE, "f64"):
            inputs = random_inputs(p, {"M": 48}, seed=SEED)
            results = Executor(p, sizes={"M": 48})(
                *[shard(x, v.tensor, RANK, {"M": 48}) for x, v in zip(inputs, p.inputs, strict=True)]
            )
            for x, v, exact in zip(results, p.outputs, reference(source, inputs, {"M": 48}), strict=True):
                mine = shard(exact, v.tensor, RANK, {"M": 48})
                assert (x is None) == (mine is None)
                if x is not None and mine is not None:
                    assert x.dtype == torch.float64
                    assert error_of(x, mine) <= 1e-14 * float(exact.abs().max()), p.name


@case
def fp8_products_by_every_strategy() -> None:
    """Lower every pattern with every strategy; scales are per tensor, per row and per block in turn."""
    for n, (pattern, strategy) in enumerate(product_of(patterns.SCALED, STRATEGIES)):
        source = pattern(SIZE, scales=("tensor", "rows", "blocks")[n % 3]).program()
        p = lower(source, strategy)
        inputs = random_inputs(source, {}, seed=SEED + n)
        results = Executor(p)(*[shard(x, v.tensor, RANK, {}) for x, v in zip(inputs, p.inputs, strict=True)])
        both = zip(reference(source, inputs, dtype=None), reference(source, inputs), strict=True)
        for x, v, (plain, exact) in zip(results, p.outputs, both, strict=True):
            mine = shard(exact, v.tensor, RANK, {})
            assert x is not None
            assert mine is not None
            most = bound(plain, exact, reductions(p, ring=True)) * float(exact.double().norm())
            assert float((x.double() - mine).norm()) <= most, f"{p.name} by {strategy}"


@case
def started_and_plain_calls_in_one_order() -> None:
    executor = Executor(programs.row_parallel("f32"))
    for call in range(4):
        inputs = random_inputs(executor.program, {}, seed=SEED + call)
        parts = [shard(x, v.tensor, RANK, {}) for x, v in zip(inputs, executor.program.inputs, strict=True)]
        started, (plain,) = executor.start(*parts), executor(*parts)
        time.sleep(0.01 if call % SIZE == RANK else 0)
        assert torch.equal(started.wait()[0], plain)
        torch.testing.assert_close(plain, product_by_ranks(*inputs)[0])


@case
def all_reduce_in_place() -> None:
    for dtype in COMPUTED:
        check(programs.row_parallel(dtype), product_by_ranks)


@case
def reduce_scatter() -> None:
    for dtype in COMPUTED:
        check(programs.row_scattered(dtype), lambda a, b: 2 * product_by_ranks(a, b))


@case
def implementations_compute_what_plain_collectives_compute() -> None:
    """The results have the same bits, and the ranks meet for the workspace."""
    x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(SEED + RANK))
    w = torch.randn(16, 24, generator=torch.Generator().manual_seed(SEED + SIZE + RANK))
    for by, plain, inputs in (
        ("one_shot", programs.row_parallel("f32"), (x, w)),
        ("two_shot", programs.row_parallel("bf16"), (x.bfloat16(), w.bfloat16())),
        ("one_shot", programs.row_scattered("f32"), (x[:, None].expand(4, SIZE, 16, 16).contiguous(), w)),
        ("low_latency", programs.ag_matmul(), parts_of("bf16", m=5)),
        ("copy_engine", programs.ag_matmul(), parts_of("bf16", m=5)),
    ):
        executors = [Executor(program) for program in (plain, programs.implemented(plain, by))]
        for _ in range(2):
            results = [executor(*inputs) for executor in executors]
            assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), by
        assert executors[0].symmetric_bytes == 0
        assert executors[1].symmetric_bytes > 0


@case
def all_to_all() -> None:
    check(programs.swap(), lambda x: (x,))


@case
def devices_in_another_order() -> None:
    order = "3 1 0 2"
    check(programs.ag_matmul(order), product, M=3)
    check(programs.row_scattered("bf16", order), lambda a, b: 2 * product_by_ranks(a, b))
    check(programs.swap(order), lambda x: (x,))


@case
def two_mesh_axes() -> None:
    check(parse(programs.GRID), lambda a, b: (a @ b, a @ b))


@case
def transfers_between_meshes() -> None:
    check(parse(programs.TRANSFERS), lambda whole, parts: (whole, parts, whole, parts, whole, parts))


@case
def messages() -> None:
    for mesh in (RANKS, " ".join(reversed(RANKS.split()))):
        check(programs.ring(mesh), lambda x: (torch.stack([x.roll(step, 0) for step in range(SIZE)]),), M=40)
        check(programs.late_message(mesh), lambda x: (torch.cat([x[1:2], x[1:]]), x))


@case
def many_calls_back_to_back() -> None:
    check(programs.ag_matmul(), product, calls=60, M=2)


@case
def an_exchange_under_the_same_key_is_a_new_one() -> None:
    for turn in range(3):
        assert joined().exchange("a test", f"{RANK} {turn}") == [f"{rank} {turn}" for rank in range(SIZE)]


@case
def log_messages_begin_with_the_rank() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hostir").addHandler(handler)
    logging.getLogger("hostir").setLevel(logging.INFO)
    program = programs.ag_matmul(dtype="f32")
    a, b = random_inputs(program, {"M": 3})
    part = shard(a, program.inputs[0].tensor, RANK, {"M": 3})
    executor = Executor(program)
    for _ in range(3):
        executor(part, b)
    planned = [text for text in messages if text.startswith(f"rank {RANK}: @{program.name}: planned for M=3 in ")]
    assert len(planned) == 1, messages
    assert all(text.startswith(f"rank {RANK}: ") for text in messages)
    logging.getLogger("hostir").removeHandler(handler)


@case
def each_shape_gets_a_plan() -> None:
    program = programs.ag_matmul(dtype="f32")
    executor = Executor(program)
    for m in (3, 7, 3, 1):
        a, b = random_inputs(program, {"M": m})
        (c,) = executor(shard(a, program.inputs[0].tensor, RANK, {"M": m}), b)
        assert torch.allclose(c, a @ b, atol=1e-4)
    assert len(executor.plans) == 3


@case
def unsharded_tensors() -> None:
    program = programs.row_scattered("f32")
    a, b = random_inputs(program, {})
    c, d = run(program, a, b)
    assert torch.allclose(c, a @ b, atol=1e-4)
    assert torch.allclose(d, a @ b, atol=1e-4)


@case
def a_trace_of_all_streams() -> None:
    program = programs.ag_matmul()
    trace = Trace()
    a, b = random_inputs(program, {"M": 2})
    Executor(program, trace=trace)(shard(a, program.inputs[0].tensor, RANK, {"M": 2}), b)
    assert sorted(e.rounds for e in trace.events if e.keyword == "allgather") == [(0,), (1,), (2,), (3,)]
    assert {e.stream for e in trace.events if e.keyword == "matmul"} == {"stream 0", "stream 1"}
    assert all(e.rank == RANK and e.start <= e.end for e in trace.events)


@case
def different_programs_are_refused() -> None:
    mine = "f16" if RANK else "bf16"
    message = refusal(lambda: Executor(programs.ag_matmul(dtype=mine))(*parts_of(mine)))
    contains(message, "the calls of the ranks do not line up: ", "@ag_matmul with M=2 (its text has digest ")


@case
def different_sizes_are_refused() -> None:
    message = refusal(lambda: Executor(programs.ag_matmul())(*parts_of("bf16", m=2 + RANK)))
    contains(message, "the calls of the ranks do not line up: ", "calls @ag_matmul with M=", "M=2", "M=3")


@case
def new_sizes_are_compared_even_if_calls_are_not() -> None:
    """The rank that comes later compares new sizes, and no rank waits, as on CUDA.

    The ranks only ask for places (`Executor.places`), so no call runs.
    """
    executor, calls = Executor(programs.ag_matmul()), joined().calls
    report, calls.report = calls.report, lambda why: why  # a report would stop all further calls on every rank
    executor(*parts_of("bf16"))
    executor._compare = executor._agreement.compare = False

    def refusals(**sizes: int) -> list[str]:
        """Return each rank's error message; empty texts for ranks without an error."""
        try:
            executor.places(*parts_of("bf16", **sizes))
            message = ""
        except HostIRError as problem:
            message = str(problem)
        calls.broken = ""
        return joined().exchange("refusals", message)

    assert refusals(m=9) == [""] * SIZE
    late = [text for text in refusals(m=4 + RANK) if text]
    assert len(late) == SIZE - 1
    contains(late[0], "the calls of the ranks do not line up: ", "with M=4", "with M=5", "HOSTIR_COMPARE_CALLS")
    calls.went(1)
    assert refusals(m=12) == [""] * SIZE
    calls.went(RANK)  # a call with known sizes
    late = [text for text in refusals(m=13) if text]
    assert len(late) == SIZE - 1
    contains(late[0], "have made other calls before their call 2")
    calls.report = report


@case
def wrong_inputs_are_refused_everywhere() -> None:
    executor = Executor(programs.ag_matmul())
    a, b = parts_of("bf16")
    message = refusal(lambda: executor(a, b[:, :8] if RANK == 1 else b))
    if RANK == 1:
        contains(message, "%b has shape [32, 8]", "[32, 24]")
    else:
        contains(message, "because rank 1 does not", "%b has shape [32, 8]")
    executor(a, b)  # the refused call has issued nothing, so later calls work
    contains(refusal(lambda: executor(a)), "was given 1 input\n")
    contains(refusal(lambda: executor(a, b.float())), "dtype torch.float32")
    contains(refusal(lambda: executor(torch.stack([a, a], -1)[..., 0], b)), "allgather sends is not dense")
    executor(a, b)


@case
def a_program_for_more_ranks_is_refused() -> None:
    message = refusal(lambda: Executor(programs.ag_matmul("0 1 2")))
    contains(message, f"rank {RANK}: @ag_matmul runs on 3 ranks, and there are {SIZE}", "--nproc-per-node 3")


@case
def one_sided_programs() -> None:
    """Results equal the results of simulated ranks bit for bit, in every call."""
    texts = sorted(Path(__file__).parent.parent.joinpath("cases", "onesided").glob("*.hir"))
    ours = [p for p in (parse(path.read_text(), str(path)) for path in texts) if p.ranks == SIZE]
    assert len(ours) >= 4
    for program in ours:
        executor = Executor(program)
        calls = [random_inputs(program, {}, seed=SEED + call) for call in range(16)]
        expected = rehearse(program, calls, {}).run()
        for inputs, right in zip(calls, expected, strict=True):
            results = executor(*[shard(x, v.tensor, RANK, {}) for x, v in zip(inputs, program.inputs, strict=True)])
            assert all(torch.equal(y, parts[RANK]) for y, parts in zip(results, right, strict=True)), program.name


@case
def copies_and_a_matmul_that_waits() -> None:
    for dtype in COMPUTED:
        check(programs.pulled(dtype=dtype), product, calls=10, M=5)
    check(programs.pulled(" ".join(reversed(RANKS.split()))), product, M=2)


@case
def blocks_with_completion_flags() -> None:
    """Results equal the results of simulated ranks bit for bit, in every call."""
    for dtype in COMPUTED:
        as_simulated(by_blocks.scattered(RANKS, dtype, pieces=3), product)
    as_simulated(by_blocks.scattered(" ".join(reversed(RANKS.split())), "bf16", pieces=1), product)
    as_simulated(by_blocks.scattered_slices(RANKS, "bf16"), product)
    as_simulated(by_blocks.summed_everywhere(RANKS, "f16"), product)
    for flags in ({2: 3, 4: 6}[SIZE], 1):
        as_simulated(by_blocks.passed_on(RANKS, "bf16", flags), lambda a, b: ((a @ b).clamp_min(0),))


@case
def blocks_within_teams_and_on_some_ranks() -> None:
    teams = "[dp, tp] = (0 2) (3 1)"
    as_simulated(by_blocks.scattered("0 1").replace("[didx] = 0 1", teams).replace("didx", "tp"), product, 20)
    as_simulated(by_blocks.scattered("3 1", "bf16", m=5), product, 20)


@case
def blocks_without_rows_between_blocks_with_rows() -> None:
    for text in (by_blocks.scattered(RANKS), by_blocks.scattered_slices(RANKS), by_blocks.summed_everywhere(RANKS)):
        program = parse(text)
        executor = Executor(program)
        for call, m in enumerate((0, 3, 0, 0, 3, 1)):
            inputs = random_inputs(program, {"M": m}, seed=SEED + call)
            parts = [shard(x, v.tensor, RANK, {"M": m}) for x, v in zip(inputs, program.inputs, strict=True)]
            (result,), (a, b) = executor(*parts), inputs
            torch.testing.assert_close(result, shard(a @ b, program.outputs[0].tensor, RANK, {"M": m}))


@case
def rows_scattered_by_every_strategy() -> None:
    """With or without gathered rows, in every dtype: results equal simulated ranks, and are near the exact result."""
    both = patterns.row_parallel_scattered, patterns.mlp
    for n, dtype in enumerate(COMPUTED):
        pattern = both[(n + SIZE // 2) % 2]  # the other one on another number of ranks
        fusion = pattern(SIZE, S=2, M=4 * SIZE, K=4 * SIZE, dtype=dtype).program()

        def exact(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(reference(fusion, [x.to(TORCH[dtype]) for x in inputs]))  # noqa: B023

        for strategy in ("ring", "fused", "push"):
            as_simulated(str(lower(fusion, strategy)), exact, count=3)


@case
def all_ranks_hold_the_same_bits_of_a_sum_under_random_delays() -> None:
    """Run a thousand all-reduces in every form, with random delays before calls and statements."""
    small = AllReduceSteps(min_rows=1, min_bytes=1)
    two = AllReduceSteps(extra_bytes=-1, min_rows=1, min_bytes=1)
    forms = (Ring(2), Fused(2), Fused(2, steps=small), Fused(2, steps=two), Push(), Push(two))
    sizes = {"M": 4 * SIZE, "dtype": "bf16"}
    fusions = (patterns.row_parallel_bias(SIZE, S=1, K=4 * SIZE, N=8, **sizes), patterns.all_reduce(SIZE, N=8, **sizes))
    delays, late, drawn = Delays(torch.device("cpu")), random.Random(SEED + RANK), 2
    ways: list[tuple[Executor, list[list[torch.Tensor | None]], list[list[torch.Tensor]]]] = []
    for fusion in (f.program() for f in fusions):
        inputs = [random_inputs(fusion, {}, seed=SEED + call) for call in range(drawn)]
        shards = [[shard(x, v.tensor, RANK, {}) for x, v in zip(xs, fusion.inputs, strict=True)] for xs in inputs]
        for form in forms:
            executor = Executor(run_passes(fusion, [*EXPLICIT, form, *FINISH]))
            results = [[x for x in executor(*each) if x is not None] for each in shards]
            for xs, (y,) in zip(inputs, results, strict=True):
                torch.testing.assert_close(y, reference(fusion, xs)[0].to(y.dtype), rtol=0.02, atol=0.05)
            delays.into(executor.plans.values())
            ways.append((executor, shards, results))
    delays.random = late
    for call in range(1000):
        executor, shards, results = ways[call % len(ways)]
        time.sleep(late.random() * 3e-4 if late.random() < 0.1 else 0)
        (y,) = executor(*shards[call % drawn])
        assert y is not None
        results[call % drawn].append(y)
    bits = torch.stack([y for *_, results in ways for ys in results for y in ys]).view(torch.int16).int()
    largest, smallest = bits.clone(), bits.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN)
    assert torch.equal(largest, smallest), "two ranks hold different bits"
    for *_, results in ways:
        assert all(torch.equal(y, ys[0]) for ys in results for y in ys), "two calls with the same inputs"


def as_simulated(text: str, reference: Reference, count: int = 4) -> None:
    """Compare calls bit for bit with simulated ranks, and approximately with a reference in float64."""
    program, sizes = parse(text), {"M": 5} if "M" in text else {}
    executor, calls = Executor(program), [random_inputs(program, sizes, seed=SEED + call) for call in range(count)]
    for call, (inputs, (right,)) in enumerate(zip(calls, rehearse(program, calls, sizes).run(), strict=True)):
        time.sleep(0.01 if call % SIZE == RANK else 0)
        (result,) = executor(*[shard(x, v.tensor, RANK, sizes) for x, v in zip(inputs, program.inputs, strict=True)])
        if right[RANK] is None:
            assert result is None
            continue
        mine = shard(reference(*[x.double() for x in inputs])[0], program.outputs[0].tensor, RANK, sizes)
        assert result is not None
        assert mine is not None
        assert torch.equal(result, right[RANK]), program.name
        assert error_of(result, mine) <= 8 * torch.finfo(result.dtype).eps * float(mine.abs().max()), program.name


@case
def calls_alternate_between_shapes_and_executors() -> None:
    """The epochs of flags rise from call to call, in all plans and executors together."""
    program = programs.pulled(dtype="f32")
    executors = [Executor(program), Executor(program)]
    for call, m in enumerate((3, 7, 3, 3, 1, 7, 1, 3) * 3):
        a, b = random_inputs(program, {"M": m}, seed=SEED + call)
        (c,) = executors[call > 9 and call % 3 == 0](shard(a, program.inputs[0].tensor, RANK, {"M": m}), b)
        assert torch.allclose(c, a @ b, atol=1e-4)
    assert [len(executor.plans) for executor in executors] == [3, 3]


@case
def many_executors_share_memory() -> None:
    """Call 80 executors of equal programs, as 80 layers of a model do, from three threads in turn."""
    program, other = programs.pulled(dtype="f32"), programs.pulled(dtype="bf16")
    layers = [Executor(replace(program)) for _ in range(80)]
    apart = Executor(other)

    def call(layer: int, turn: int, m: int) -> None:
        p, executor = (other, apart) if layer == 80 else (program, layers[layer])
        a, b = random_inputs(p, {"M": m}, seed=1000 * os.getppid() + 100 * turn + layer)
        (c,) = executor(shard(a, p.inputs[0].tensor, RANK, {"M": m}), b)
        torch.testing.assert_close(c, a @ b, atol=1e-3 if p is program else 0.1, rtol=1e-2)

    for layer in range(81):
        call(layer, 0, 3)
    for turn, (layer, m) in enumerate(((79, 3), (0, 7), (80, 3), (41, 7), (0, 3), (80, 7), (79, 7))):
        call(layer, 1 + turn, m)
    met = joined().groups.memory.met
    mine = [memory for (digest, _), memory in met.items() if digest == program.digest]
    assert len(mine) == 2, list(met)  # for 3 rows, and for more
    assert {id(plan.memory) for layer in layers for plan in layer.plans.values()} == set(map(id, mine))
    failures: list[BaseException] = []

    def many(first: int) -> None:
        try:
            for turn in range(8):
                call(first + 3 * turn, 50 + turn, (3, 7)[turn % 2])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=many, args=[first]) for first in (0, 1, 2)]
    for thread in threads:
        thread.start()
        thread.join()
    if failures:
        raise failures[0]
    layers.clear()
    mine.clear()
    for m in (8, 13):  # each needs new memory; the watchdog holds the latest plan
        gc.collect()
        call(80, 60, m)
    assert program.digest not in {digest for digest, _ in met}, "a rendezvous frees memory that no plan uses"


@case
def sizes_below_an_earlier_size_need_no_rendezvous() -> None:
    """Sizes share memory: ranks meet only for a size that is too large. Each rank is late in turn."""
    Executor(parse(programs.GATHERED))  # starts a session with symmetric memory
    met, groups = joined().groups.memory.met, joined().groups
    meetings: list[str] = []
    meet, exchange = Meetings.meet, groups.memory.exchange
    Meetings.meet = lambda self, call, where, *rest: meetings.append(where) or meet(self, call, where, *rest)
    groups.memory.exchange = lambda key, mine: meetings.append(key) or exchange(key, mine)
    one, mlp = patterns.allgather_matmul, patterns.mlp
    for pattern, strategy in ((one, "pipeline"), (one, "ring"), (mlp, "fused"), (mlp, "push")):
        fusion = pattern(SIZE, S=2, M="M", K=4 * SIZE)  # type: ignore[arg-type]
        program = parse(str(lower(fusion, strategy)).replace(f"@{pattern.__name__}", "@new_sizes"))
        executor, largest, held = Executor(program), 40, 0
        for call in range(16):
            step = largest if call == 0 else 60 if call == 11 else random.Random(SEED + call).randrange(2, largest)
            sizes, before = {"M": 2 * SIZE * step}, len(meetings)
            inputs = random_inputs(program, sizes, seed=SEED + call)
            time.sleep(0.003 if call % SIZE == RANK else 0)
            (result,) = executor(
                *[shard(x, v.tensor, RANK, sizes) for x, v in zip(inputs, program.inputs, strict=True)]
            )
            mine = shard(reference(fusion.program(), inputs)[0], program.outputs[0].tensor, RANK, sizes)
            torch.testing.assert_close(result, mine.to(result.dtype), rtol=1e-4, atol=1e-4)
            memories = [memory for (digest, _), memory in met.items() if digest == program.digest]
            assert len(memories) == (strategy != "pipeline") * (1 if call < 11 else 2), (
                "memory that is too small stays for the plans that use it"
            )
            if not memories:
                assert (len(meetings) > before) == (call == 0), meetings[before:]
                continue
            assert (len(meetings) > before) == (call in (0, 11)), meetings[before:]
            held = groups.memory.bytes if call in (0, 11) else held
            assert groups.memory.bytes == held
        for call, rank in ((0, SIZE - 1), (1, 0)):  # this rank's tensors have other strides, so it makes a new plan
            inputs = random_inputs(program, {"M": 2 * SIZE}, seed=SEED + call)
            parts = [shard(x, v.tensor, RANK, {"M": 2 * SIZE}) for x, v in zip(inputs, program.inputs, strict=True)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", hi.FallbackWarning)  # the tensors are copied
                (result,) = executor(*(x.repeat_interleave(2, 0)[::2] if rank == RANK else x for x in parts))
            mine = shard(reference(fusion.program(), inputs)[0], program.outputs[0].tensor, RANK, {"M": 2 * SIZE})
            torch.testing.assert_close(result, mine.to(result.dtype), rtol=1e-4, atol=1e-4)
    Meetings.meet, groups.memory.exchange = meet, exchange


@case
def growing_sizes_get_exactly_what_they_need_if_memory_is_short() -> None:
    """Limit the last rank's memory: first to less than the usual spare room, then to less than the call needs."""
    program = parse(str(programs.pulled(dtype="f32")).replace("@pulled", "@growing"))
    executor, memory, limit = Executor(program), joined().groups.memory, resource.RLIMIT_FSIZE
    free, first = resource.getrlimit(limit), 0

    def taken() -> int:
        """Return the bytes of symmetric memory that `program` holds here. Others may release theirs at any meeting."""
        mine = [of for (digest, _), of in memory.met.items() if digest == program.digest]
        return sum(of.offers[RANK].bytes for of in mine)

    for m, most, refused in (
        (8, -1, False),
        (64, 10, False),
        (512, 60, True),
    ):  # `most`: in units of the first size's memory
        inputs, before, meetings = random_inputs(program, {"M": m}, seed=SEED + m), taken(), memory.meetings
        if RANK == SIZE - 1 and first:
            resource.setrlimit(limit, (most * first, free[1]))
        try:
            with pytest.raises(HostIRError, match="cannot share memory") if refused else contextlib.nullcontext():
                (c,) = executor(shard(inputs[0], program.inputs[0].tensor, RANK, {"M": m}), inputs[1])
                torch.testing.assert_close(c, inputs[0] @ inputs[1])
        finally:
            resource.setrlimit(limit, free)
        first = first or taken() - before
        assert memory.meetings - meetings == (1 if m == 8 else 2)
        assert taken() - before < (1 if refused else 8.1 * first), "memory has grown by more than the call needs"


@case
def memory_of_earlier_sizes_is_freed_and_allocated_again() -> None:
    """Only the latest size keeps its memory. Without a proof, sizes share no memory."""
    program = parse(str(programs.pulled(dtype="f32")).replace("@pulled", "@roomy"))  # no other case runs this program
    executor = Executor(program, check=False)
    kept, symmetric.KEPT_BYTES = symmetric.KEPT_BYTES, 1
    for call, m in enumerate((3, 7, 3, 3, 1, 7)):
        a, b = random_inputs(program, {"M": m}, seed=SEED + call)
        (c,) = executor(shard(a, program.inputs[0].tensor, RANK, {"M": m}), b)
        assert torch.allclose(c, a @ b, atol=1e-4)
        assert len(executor.plans) == 1
    symmetric.KEPT_BYTES = kept


@case
def the_latest_sizes_keep_their_memory() -> None:
    program = parse(str(programs.pulled(dtype="f32")).replace("@pulled", "@recent"))
    executor, met = Executor(program, check=False), joined().groups.memory.met
    kept = symmetric.KEPT_BYTES
    for m in (4, 5, 4, 1):
        if m == 1:
            held = [memory.offers[RANK].bytes for (digest, _), memory in met.items() if digest == program.digest]
            symmetric.KEPT_BYTES = sum(held)
        a, b = random_inputs(program, {"M": m}, seed=SEED + m)
        (c,) = executor(shard(a, program.inputs[0].tensor, RANK, {"M": m}), b)
        assert torch.allclose(c, a @ b, atol=1e-4)
    assert {sizes for digest, sizes in met if digest == program.digest} == {(("M", 4),), (("M", 1),)}
    symmetric.KEPT_BYTES = kept


@case
def later_calls_do_not_overwrite_a_symmetric_output() -> None:
    program = parse(programs.GATHERED)
    executor = Executor(program)
    calls = [random_inputs(program, {}, seed=SEED + call)[0] for call in range(4)]
    results = [executor(shard(x, program.inputs[0].tensor, RANK, {}))[0] for x in calls]
    assert all(torch.equal(y, x) for y, x in zip(results, calls, strict=True))


@case
def results_are_written_into_out() -> None:
    for program, sizes in ((parse(programs.GATHERED), {}), (programs.ag_matmul(), {"M": 2})):
        executor, outs = Executor(program), [torch.empty(0)] * 2
        for call in range(4):
            inputs = random_inputs(program, sizes, seed=SEED + call)
            parts = [shard(x, v.tensor, RANK, sizes) for x, v in zip(inputs, program.inputs, strict=True)]
            (fresh,) = executor(*parts)
            outs[call % 2] = torch.full_like(fresh, float("nan"))
            (result,) = executor(*parts, out=outs[call % 2])
            assert result is outs[call % 2]
            assert torch.equal(result, fresh)
        assert "is None" in refusal(lambda executor=executor, parts=parts: executor(*parts, out=[None]))


def check_patterns(calls: Sequence[tuple[int, Callable[[torch.Tensor], torch.Tensor] | None]]) -> None:
    """Call some patterns with every lowering. The last two calls use `out=`.

    Args:
        calls: for each call, the number of rows and a function that changes the layout of the inputs.
    """
    chosen = patterns.allgather_matmul, patterns.row_parallel, patterns.mlp, patterns.gather, symbolic.weight_gradient
    for pattern in chosen:
        for source, p in symbolic.lowered(pattern, SIZE):
            executor = Executor(p)
            for number, (m, layout) in enumerate(calls):
                inputs = random_inputs(p, {"M": m}, seed=SEED + number)
                parts = [shard(x, v.tensor, RANK, {"M": m}) for x, v in zip(inputs, p.inputs, strict=True)]
                exact = [
                    shard(x, v.tensor, RANK, {"M": m})
                    for x, v in zip(reference(source, inputs, {"M": m}), p.outputs, strict=True)
                ]
                out = [None if x is None else torch.full_like(x, float("nan"), dtype=torch.float32) for x in exact]
                laid_out = [x if x is None or layout is None else layout(x) for x in parts]
                results = executor(*laid_out, out=out) if number >= len(calls) - 2 else executor(*laid_out)
                for x, true in zip(results, exact, strict=True):
                    assert (x is None) == (true is None)
                    if x is not None and true is not None:
                        torch.testing.assert_close(x.double(), true, rtol=1e-4, atol=1e-4)


@case
def inputs_of_any_strides() -> None:
    *layouts, _ = symbolic.LAYOUTS  # the last one expands the input, which changes its values
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_patterns([(48, layout) for layout in layouts])
    texts = [str(w.message) for w in caught]
    assert all("Every call of @" in text and RANK == 0 for text in texts)
    assert len(texts) == len(set(texts))
    assert bool(texts) == (RANK == 0)


@case
def calls_without_rows_between_calls_with_rows() -> None:
    check_patterns([(0, None), (48, None), (0, None), (48, None), (0, None)])


@case
def racy_programs_are_refused() -> None:
    text = str(programs.pulled()).replace("  barrier of %a over didx\n", "")
    executor, (a, b) = Executor(parse(text)), parts_of("bf16")
    for _ in range(2):  # the sizes come from the inputs of the call
        contains(refusal(lambda: executor(a[:3], b)), "race on %full")
    contains(refusal(lambda: Executor(parse(text.replace("M", "6")))), "race on %full")


@case
def ranks_with_different_symmetric_buffers_are_refused() -> None:
    """Every rank raises the same message."""
    x = torch.zeros(2)
    odd = "if %r == 1 { %odd: f32[1] = allocate_symmetric }  if %r == 0 { %odd: f32[3] = allocate_symmetric }"
    message = refusal(lambda: Executor(programs.met(odd), check=False)(x))
    contains(message, "%odd is f32[3] on rank 0 and f32[1] on rank 1")
    alone = "if %r == 0 { %own: f32[2] = allocate_symmetric   put %x -> %own at 1 over didx }"
    message = refusal(lambda: Executor(programs.met(alone), check=False)(x))
    contains(message, "rank 1 has no %own, which rank 0 names there")
    message = refusal(lambda: Executor(programs.met("if %r == 1 { barrier of %x over didx }"), check=False)(x))
    contains(message, "ranks 0 and 1 differ in how many barriers they come to in a call")
    here = symmetric.host_identity
    symmetric.host_identity = lambda: f"host {RANK}"
    new = Executor(programs.pulled(), check=False)  # without a proof it shares no memory with other sizes
    message = refusal(lambda: new(*[x[:3] if x.ndim == 4 else x for x in parts_of("bf16")]))
    summed = Executor(programs.implemented(programs.row_parallel("f32"), "one_shot"))
    elsewhere = refusal(lambda: summed(torch.zeros(4, 16, 16), torch.zeros(16, 24)))
    symmetric.host_identity = here
    contains(elsewhere, "ranks 0 and 1 of @row_parallel run on different hosts, which share no memory")
    there = "ranks 0 and 1 of @pulled run on different hosts, which share no memory"
    contains(message, there, "rank 0: ", "rank 1: ", "lower it by 'hierarchical'")


def parts_of(dtype: str, m: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1, m, 32).to(TORCH[dtype]), torch.randn(32, 24).to(TORCH[dtype])


class InjectedError(Exception):
    """The error of a step that a test makes fail."""


def fail() -> None:
    raise InjectedError("on strike")


class Shared:
    """Two executors of equal programs. Their results are compared bit for bit with simulated ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.executors = [Executor(parse(str(program))) for _ in range(2)]
        drawn = [random_inputs(program, {}, seed=SEED + number) for number in range(5)]
        self.inputs = [[shard(x, v.tensor, RANK, {}) for x, v in zip(xs, program.inputs, strict=True)] for xs in drawn]
        self.expected = rehearse(program, drawn, {}, "aten").run()
        self.call(0)
        self.call(1)

    def call(self, number: int) -> None:
        mine, expected = self.inputs[number % 5], self.expected[number % 5]  # neighbouring calls have other inputs
        for out, parts in zip(self.executors[number % 2](*mine), expected, strict=True):
            assert torch.equal(out, parts[RANK]), (out, parts[RANK])

    def lanes(self) -> list[Any]:
        (plan,) = self.executors[0].plans.values()
        assert isinstance(plan, GlooPlan)
        return [lane for key, lane in plan.lanes.items() if isinstance(key, int)]


@case
def calls_work_after_a_call_that_failed_midway_on_one_rank() -> None:
    """Let each statement fail in turn: each rank gets one error, and later calls of all executors are right."""
    other = Executor(programs.ag_matmul(dtype="f32"))
    layers = [
        Shared(lower(pattern(SIZE, 1, 4 * SIZE, 8 * SIZE, 6), strategy))
        for pattern in (patterns.allgather_matmul_rows, patterns.row_parallel)
        for strategy in ("ring", "fused", "push", "pipeline")
    ]
    number = 0
    for layer in layers:
        layer.call(number)
        for lane, steps in enumerate([len(lane.steps) for lane in layer.lanes()]):
            for k in range(lane, steps, SIZE + SIZE // 4):
                number += 2
                joined().exchange("no rank is in a call", "")
                if number // 2 % SIZE == RANK:
                    layer.lanes()[lane].steps[k] = fail
                    message = refusal(lambda: layer.call(number))  # noqa: B023
                    contains(message, f"rank {RANK}, '", "InjectedError: on strike")
                else:
                    try:
                        layer.call(number)
                    except HostIRError as problem:
                        message = str(problem)
                    else:  # this rank's call has ended before it learns of the failure
                        message = refusal(lambda: layer.call(number + 1))  # noqa: B023
                    contains(message, "a call ended midway on another rank", "InjectedError: on strike")
                for turn in range(2):
                    layer.call(number + turn)
                    other(*parts_of("f32"))
                    layers[number // 2 % len(layers)].call(number + turn + 1)


@case
def ranks_that_meet_for_the_next_call_learn_of_a_failed_call() -> None:
    """Rank 0 fails in a call that the others have ended. They meet for the first call of another executor."""
    program = lower(patterns.allgather_matmul_rows(SIZE, 1, 4 * SIZE, 8, 6), "ring")
    layer = Shared(program)
    for number in range(2):
        if RANK == 0:
            last = layer.lanes()[0]
            last.add(last.ops[-1], lambda: time.sleep(1.0))
            last.add(last.ops[-1], fail)
            message = refusal(lambda: layer.call(0))
        else:
            layer.call(0)
            began = time.monotonic()
            message = refusal(lambda: Shared(parse(str(program).replace("program @allgather", "program @other"))))
            assert 0.1 < time.monotonic() - began < 10, message
            contains(message, "a call ended midway on another rank")
        contains(message, "InjectedError: on strike")
        layer.call(number)
        layer.call(number + 1)


def before_the_seventh_matmul_of_rank_1(action: Callable[[], object]) -> None:
    """Call `ag_matmul` repeatedly; rank 1 runs `action` in its second call, before the third of four matmuls."""
    calls = 0
    matmul = kernels.aten.KERNELS["matmul"]

    def counted(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if RANK == 1 and calls == 7:
            action()
        matmul(out, a, b)

    kernels.aten.KERNELS["matmul"] = counted
    executor = Executor(programs.ag_matmul())
    while True:
        executor(*parts_of("bf16"))


@case
def a_statement_raises() -> None:
    def failing() -> None:
        raise RuntimeError("the floating point unit is on strike")

    before_the_seventh_matmul_of_rank_1(failing)


@case
def a_rank_is_killed() -> None:
    before_the_seventh_matmul_of_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


@case
def a_rank_freezes() -> None:
    before_the_seventh_matmul_of_rank_1(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@case
def a_rank_makes_no_further_call() -> None:
    executor = Executor(programs.ag_matmul())
    executor(*parts_of("bf16"))
    if RANK == 1:
        time.sleep(600)
    executor(*parts_of("bf16"))


def before_the_third_call_of_rank_1(
    program: Program, action: Callable[[], object], *inputs: torch.Tensor | None
) -> None:
    """Call a program repeatedly; rank 1 runs `action` before its third call."""
    executor = Executor(program, check=False)
    for call in range(100):
        if RANK == 1 and call == 2:
            action()
        executor(*(inputs or (torch.randn(2),)))


@case
def a_peer_is_killed_before_its_signal() -> None:
    before_the_third_call_of_rank_1(programs.met(""), lambda: os.kill(os.getpid(), signal.SIGKILL))


@case
def a_peer_is_killed_before_its_block() -> None:
    program = parse(by_blocks.scattered(RANKS))
    inputs = random_inputs(program, {"M": 3}, seed=SEED)
    parts = [shard(x, v.tensor, RANK, {"M": 3}) for x, v in zip(inputs, program.inputs, strict=True)]
    before_the_third_call_of_rank_1(program, lambda: os.kill(os.getpid(), signal.SIGKILL), *parts)


@case
def a_peer_is_killed_before_its_barrier() -> None:
    before_the_third_call_of_rank_1(
        programs.met("barrier of %x over didx"), lambda: os.kill(os.getpid(), signal.SIGKILL)
    )


def connect_late() -> None:
    """Let this rank's watchdog take longer to connect than the three short calls of the cases above take."""
    connect = Links.connect

    def late(links: Links) -> None:
        time.sleep(1)
        connect(links)

    Links.connect = late  # type: ignore[method-assign]


def main() -> None:
    if sys.argv[1].startswith("a_peer_is_killed"):
        connect_late()
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    repeated = [name for name in sys.argv[1:] if name in ("all_gather", "copies_and_a_matmul_that_waits")]
    for names in (sys.argv[1:], repeated):  # the second session opens all connections again
        with session("cpu"):
            for name in names:
                CASES[name]()
                print(f"PASS {name} {RANK}", flush=True)
            assert joined().rank == RANK


if __name__ == "__main__":
    main()
