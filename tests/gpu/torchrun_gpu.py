"""Every collective on real GPUs, one process a GPU:

    python -m torch.distributed.run --standalone --nproc-per-node N tests/gpu/torchrun_gpu.py [CASE ...]

It prints one line for each case, and exits with 1 if one fails; `sizes` runs as often as it is named. Each case runs
with ATen and Triton kernels: first as successive calls without synchronisation, with random delays of ranks, then
captured into a CUDA graph and replayed. Inputs are fresh each time. Memory holds NaN before eager calls, and outputs
before replays. Results are compared with float64 on unsharded tensors: the norm of the error may be 1.1 times the error
of the same parts computed and reduced by torch, plus half a unit of f32.

`killed` runs no cases: rank 1 kills itself in a run, and every other rank must end within HOSTIR_TIMEOUT seconds with a
diagnostic that names its statement.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are not installed

import hostir as hi
from examples import patterns
from hostir.call.bounds import relative_error
from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir.program import Program
from hostir.ir.types import DTYPES, FP8, bind_shape
from hostir.job import symmetric
from hostir.job.session import joined, session
from hostir.kernels.dtypes import TORCH
from hostir.machines import pushes
from tests.call import torchrun_programs as programs
from tests.call.torchrun_cases import RANK, Reference, product
from tests.call.torchrun_programs import GRID, RANKS, SIZE, TRANSFERS

CALLS = 6
ROWS = f"""hostir 1
mesh @mesh [didx] = {RANKS}
fusion @rows(%a: bf16[M@didx, 8192], %b: bf16[8192, 256]) -> (%c) {{
  %full: bf16[M, 8192] = allgather %a over didx
  %c: bf16[M, 256] auto = matmul %full, %b
}}
"""
SUMS = f"""hostir 1
mesh @mesh [didx] = {RANKS}
fusion @sums(%x: bf16[M, 4096] partial(didx)) -> (%y) {{
  %y: bf16[M, 4096] = reshard %x
}}
"""
SUMS_IN_PARTS = f"""hostir 1
mesh @mesh [didx] = {RANKS}
fusion @sums(%x: bf16[{SIZE}, M, 4096] partial(didx), %w: f32[M, 32] partial(didx)) -> (%y, %z) {{
  %s: bf16[{SIZE}@didx, M, 4096] = reshard %x
  %y: bf16[{SIZE}, M, 4096] = reshard %s
  %z: f32[M, 32] = reshard %w
}}
"""
PARTS = f"""hostir 1
mesh @mesh [didx] = {RANKS}
fusion @parts(%x: {{dtype}}[M@didx, 4096]) -> (%y) {{{{
  %y: {{dtype}}[M, 4096] = reshard %x
}}}}
"""
NAN = float("nan")
Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """A program, its function of unsharded tensors, and torch's function of the parts (None if it has no error)."""

    name: str
    program: Program
    exact: Reference
    by_torch: Callable[..., Tensors] | None = None
    m: int = 64

    @property
    def sizes(self) -> dict[str, int]:
        return {"M": self.m} if "M" in self.program.size_names else {}


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' products by NCCL."""
    partial = a @ b
    dist.all_reduce(partial)
    return partial


def summed_and_scattered(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    total = summed(a, b)
    return total[:, RANK : RANK + 1], total


def twice(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return 2 * product(a, b)


def normed(fp8: bool) -> Reference:
    """Return what follows a product that is summed over the ranks: a residual, a norm, and perhaps a quantization."""

    def following(total: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        added = total + r
        rows = torch.nn.functional.rms_norm(added, added.shape[-1:], w, 1e-6)
        if not fp8:
            return rows, added
        exact = rows.dtype == torch.float64  # an exact result is not rounded
        wide = rows if exact else rows.float()
        scales = wide.abs().amax(-1, keepdim=True) / 448
        quotients = wide / scales
        return quotients if exact else quotients.to(torch.float8_e4m3fn), scales, added

    return following


def normed_sums() -> list[Case]:
    """Return sums with a residual and a norm. With Triton's kernels, one kernel carries them out."""
    every = []
    for dtype, columns, scattered, fp8 in itertools.product(
        ("f32", "f16", "bf16"), (136, 4096), (False, True), (False, True)
    ):
        following = normed(fp8)

        def exact(*x: torch.Tensor, following: Reference = following) -> tuple[torch.Tensor, ...]:
            return following(x[0] @ x[1], *x[2:])

        def by_torch(
            *x: torch.Tensor, following: Reference = following, scattered: bool = scattered
        ) -> tuple[torch.Tensor, ...]:
            total = summed(*x[:2])
            return following(total.chunk(SIZE)[RANK] if scattered else total, *x[2:])

        program = programs.residual_norm(dtype, columns, scattered=scattered, fp8=fp8)
        name = f"residual and norm {dtype} {columns}{' scattered' * scattered}{' fp8' * fp8}"
        # A scale has the error of a row's largest element: only with many rows are errors of scales alike.
        every.append(Case(name, program, exact, by_torch, m=(512 if fp8 else 16) * SIZE))
    return every


def cases() -> list[Case]:
    every = normed_sums()
    for dtype in [name for name in DTYPES if name not in FP8 and TORCH[name].is_floating_point]:
        every += [
            Case(f"all_gather {dtype}", programs.ag_matmul(dtype=dtype), product),
            Case(f"all_gather ragged {dtype}", programs.ag_matmul(dtype=dtype), product, m=5),
            Case(f"all_reduce {dtype}", programs.row_parallel(dtype), product, lambda a, b: (summed(a, b),)),
            Case(f"reduce_scatter {dtype}", programs.row_scattered(dtype), twice, summed_and_scattered),
        ]
    for dtype in ("f32", "bf16"):
        reduced, scattered = programs.row_parallel(dtype), programs.row_scattered(dtype)
        gathered = programs.ag_matmul(dtype=dtype)
        copied = programs.implemented(gathered, "copy_engine")
        every += [
            Case(f"by low_latency, gathered {dtype}", programs.implemented(gathered, "low_latency"), product),
            Case(f"by copy_engine {dtype}", copied, product),
            Case(f"by copy_engine ragged {dtype}", copied, product, m=5),
        ]
        for by in ("low_latency", "one_shot", "two_shot"):
            case = Case(f"by {by} {dtype}", programs.implemented(reduced, by), product, lambda a, b: (summed(a, b),))
            every.append(case)
        low_latency = programs.implemented(scattered, "low_latency")
        every.append(Case(f"by low_latency, scattered {dtype}", low_latency, twice, summed_and_scattered))
        if SIZE in (2, 4, 8):
            one_shot = programs.implemented(scattered, "one_shot")
            every.append(Case(f"by one_shot, scattered {dtype}", one_shot, twice, summed_and_scattered))
    for dtype in FP8:
        program = hi.lower(hi.parse(PARTS.format(dtype=dtype)), "sequential by low_latency")
        every += [Case(f"by low_latency, gathered {dtype}, M = {m}", program, lambda x: (x,), m=m) for m in (64, 2048)]
    backwards = " ".join(map(str, reversed(range(SIZE))))
    every += [
        Case("all_to_all", programs.swap(), lambda x: (x,)),
        Case("all_gather backwards", programs.ag_matmul(backwards), product),
        Case("all_to_all backwards", programs.swap(backwards), lambda x: (x,)),
        Case("reduce_scatter backwards", programs.row_scattered("f32", backwards), twice),
    ]
    if SIZE == 4:
        every += [
            Case("two mesh axes", programs.parse(GRID), twice),
            Case("transfers", programs.parse(TRANSFERS), lambda root, parts: 3 * (root, parts)),
        ]
    return every


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    blocks = [torch.full((1 << n,), NAN, device="cuda") for n in range(7, 24) for _ in range(3)]
    del blocks


def parts_of(case: Case, unsharded: Sequence[torch.Tensor]) -> Tensors:
    return [shard(x, v.tensor, RANK, case.sizes) for x, v in zip(unsharded, case.program.inputs, strict=True)]


def fresh(case: Case, seed: int) -> list[torch.Tensor]:
    return [x.cuda() for x in random_inputs(case.program, case.sizes, seed)]


def fresh_on_gpu(case: Case, seed: int) -> list[torch.Tensor]:
    """Return inputs that the GPU draws, the same on every rank; the CPU would be slow."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(bind_shape(v.tensor.shape, case.sizes), TORCH[v.tensor.dtype.name]) for v in case.program.inputs]
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape, dtype in shapes]


def check(case: Case, unsharded: Sequence[torch.Tensor], outputs: Tensors) -> float:
    """Return the largest error as a share of the allowed error; it never raises, so that ranks stay in step."""
    exact = case.exact(*[x.double() for x in unsharded])
    plain = case.exact(*unsharded)
    parts = parts_of(case, unsharded)
    torchs = case.by_torch(*parts) if case.by_torch else [None] * len(outputs)
    worst = 0.0
    for value, result, true, other, theirs in zip(case.program.outputs, outputs, exact, plain, torchs, strict=True):
        mine = shard(true, value.tensor, RANK, case.sizes)
        if mine is None or result is None:
            worst = worst if mine is None and result is None else inf
            continue
        plain_part = theirs if theirs is not None else shard(other, value.tensor, RANK, case.sizes)
        assert plain_part is not None
        slack = torch.finfo(torch.float32).eps / 2  # for another order of summation
        allowed = 1.1 * relative_error(plain_part, mine) + slack
        share = relative_error(result, mine) / allowed
        worst = max(worst, share if isfinite(share) else inf)
    return worst


def eager(case: Case, executor: Executor) -> float:
    runs = []
    for call in range(CALLS):
        unsharded = fresh(case, seed=1000 + call)
        parts = parts_of(case, unsharded)
        poison()
        torch.cuda._sleep(random.randrange(20_000_000))  # up to 10 ms, different on each rank
        runs.append((unsharded, executor(*parts)))
    return max(check(case, unsharded, outputs) for unsharded, outputs in runs)


def captured(case: Case, executor: Executor) -> float:
    parts = parts_of(case, fresh(case, seed=1))
    executor(*parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = executor(*parts)
    worst = 0.0
    for call in range(CALLS):
        unsharded = fresh(case, seed=2000 + call)
        for part, new in zip(parts, parts_of(case, unsharded), strict=True):
            if part is not None and new is not None:
                part.copy_(new)
        for out in outputs:
            if out is not None:
                out.fill_(NAN)
        torch.cuda._sleep(random.randrange(20_000_000))
        graph.replay()
        worst = max(worst, check(case, unsharded, outputs))
    return worst


def everywhere(good: bool) -> bool:
    """Return True if `good` is true on all ranks."""
    flag = torch.tensor([float(good)], device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def ran(case: Case, kernels: str) -> bool:
    """Run a case and print its line."""
    failure, worst = "", 0.0
    try:
        executor = Executor(case.program, kernels=kernels)
        worst = eager(case, executor)
        worst = max(worst, captured(case, executor))
    except Exception as problem:
        failure = f"FAILED {case.name}, {kernels}, rank {RANK}: {problem}"
        traceback.print_exc()
    if failure:
        print(failure, flush=True)
    good = everywhere(not failure and worst <= 1)
    if worst > 1:
        print(f"rank {RANK}: {case.name}, {kernels}: {worst:.2f} of the allowed error", flush=True)
    if RANK == 0:
        print(f"{'ok    ' if good else 'FAILED'} {case.name}, {kernels}: {worst:.2f} of the allowed error", flush=True)
    return good


def sizes_take_turns() -> bool:
    """Call with more sizes than there is room for: results are correct, and no memory is lost."""
    program = hi.lower(hi.parse(ROWS), "fused")
    executor, free = Executor(program, kernels="triton"), list[int]()
    kept, symmetric.KEPT_BYTES = symmetric.KEPT_BYTES, SIZE * (40 << 20)
    worst = 0.0
    turns = (1024, 2048, 512, 2048, 1024, 1536, 512, 1024, 2048, 512)
    for call, m in enumerate(turns * 3):
        case = Case("sizes", program, product, m=m * SIZE)
        unsharded = fresh_on_gpu(case, seed=3000 + call)
        parts = parts_of(case, unsharded)
        outs = [torch.full_like(x, NAN) for x in executor(*parts)]
        for _ in range(4):  # the last are replayed
            executor(*parts, out=outs)
        worst = max(worst, check(case, unsharded, outs))
        assert executor.graph_refusal is None
        assert len(memories(program)) <= 3
        del parts, outs, unsharded
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(free_bytes())
    symmetric.KEPT_BYTES = kept
    # In the first turn, ranges of sizes are new. Free memory varies with the sizes, by 100 MiB.
    more = [after - before for before, after in zip(free[len(turns) :], free[2 * len(turns) :], strict=False)]
    good = everywhere(worst <= 1 and max(more) >= -(16 << 20))
    if RANK == 0:
        numbers = f"{worst:.2f} of the allowed error, MiB more that are free: {[each >> 20 for each in more]}"
        print(f"{'ok    ' if good else 'FAILED'} sizes take turns: {numbers}", flush=True)
    return good


def free_bytes() -> int:
    """Return the free memory of this rank's GPU. If ranks share it, what this rank holds counts, with a minus sign."""
    if "NCCL_HOSTID" not in os.environ:
        return torch.cuda.mem_get_info()[0]
    memory = joined().groups.memory
    return -torch.cuda.memory_reserved() - (0 if memory is None else memory.bytes)


def modes_take_turns(strategy: str, kernels: str) -> bool:
    """Call in torch's inference mode and outside, with other defaults: results are correct, and calls are replayed."""
    program, worst = hi.lower(hi.parse(ROWS), strategy), 0.0
    executor, case = Executor(program, kernels=kernels), Case("modes", program, product, m=512 * SIZE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            for call, inference in enumerate((True, False, True, False)):
                unsharded = fresh(case, seed=4000 + call)
                with torch.inference_mode(inference), torch.no_grad():
                    parts = parts_of(case, unsharded)
                    outs = [torch.full_like(x, NAN) for x in executor(*parts)]
                    for _ in range(4):  # the last are replayed
                        executor(*parts, out=outs)
                    worst = max(worst, check(case, unsharded, outs))
    finally:
        torch.set_default_dtype(torch.float32)
    good = everywhere(worst <= 1 and "a capture failed" not in str(executor.graph_refusal))
    if RANK == 0:
        label = f"{strategy}, {kernels}: {worst:.2f} of the allowed error"
        print(f"{'ok    ' if good else 'FAILED'} modes take turns, {label}", flush=True)
    return good


def in_order(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in float32 in the order of the ranks, rounded once."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


def thousand_calls(in_parts: bool, calls: int = 1000) -> bool:
    """Make all-reduces by two executors on two streams, with random delays: the bits are of a sum in rank order.

    With `in_parts`, a reduce-scatter and an all-gather compute a sum, and an all-reduce another one in f32.
    """
    program = hi.lower(hi.parse(SUMS_IN_PARTS if in_parts else SUMS), "sequential by low_latency")
    executors, streams = (
        [Executor(program, kernels="triton") for _ in range(2)],
        [torch.cuda.Stream() for _ in range(2)],
    )
    torch.cuda.synchronize()
    wrong = []
    for call in range(calls):
        drawn, generator = random.Random(call), torch.Generator("cuda").manual_seed(call)  # the same on all ranks
        m = drawn.choice((1, 16, 64, 512))
        with torch.cuda.stream(drawn.choice(streams)):
            shapes = [(SIZE, m, 4096), (m, 32)] if in_parts else [(m, 4096)]
            data = [[torch.randn(shape, generator=generator, device="cuda") for _ in range(SIZE)] for shape in shapes]
            data[0] = [x.bfloat16() for x in data[0]]
            if random.random() < 0.2:
                torch.cuda._sleep(random.randrange(5_000_000))  # up to 2.5 ms, different on each rank
            results = drawn.choice(executors)(*(xs[RANK] for xs in data))
            wrong += [(y != in_order(xs)).any() for y, xs in zip(results, data, strict=True)]
    torch.cuda.synchronize()
    failed = sum(map(bool, wrong))
    good = everywhere(failed == 0)
    if failed:
        print(f"rank {RANK}: {failed} of {calls} results have other bits", flush=True)
    if RANK == 0:
        kind = "calls with sums in parts" if in_parts else "sums"
        print(f"{'ok    ' if good else 'FAILED'} {calls} {kind} by low_latency, with random delays", flush=True)
    return good


def memories(program: Program) -> list[symmetric.SharedMemory]:
    """Return the symmetric memory of a program, one for each of its sizes."""
    memory = joined().groups.memory
    assert memory is not None
    return [shared for (digest, _), shared in memory.met.items() if digest == program.digest]


def layers_share_memory(strategy: str, layers: int = 80) -> bool:
    """Call executors of one program on several streams, and two in a graph: they share the memory of one."""
    program, worst = hi.lower(hi.parse(ROWS), strategy), 0.0
    case = Case("layers", program, product, m=512 * SIZE)
    executors = [Executor(hi.parse(str(program)), kernels="triton") for _ in range(layers)]
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(3)]
    inputs = [fresh(case, seed=5000 + call) for call in range(4)]
    parts = [parts_of(case, unsharded) for unsharded in inputs]
    torch.cuda.synchronize()
    for turn in range(2):
        runs = []
        for layer, executor in enumerate(executors):
            torch.cuda._sleep(random.randrange(200_000))
            with torch.cuda.stream(streams[random.randrange(3)]):
                runs.append((layer, executor(*parts[(layer + turn) % 4])))
        torch.cuda.synchronize()
        worst = max(worst, *(check(case, inputs[(layer + turn) % 4], outs) for layer, outs in runs[::7]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side = streams[0]
        side.wait_stream(torch.cuda.current_stream())
        captured = [executors[0](*parts[0])]
        with torch.cuda.stream(side):
            captured.append(executors[1](*parts[1]))
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(CALLS):
        for outs in captured:
            for out in outs:
                out.fill_(NAN)
        torch.cuda._sleep(random.randrange(20_000_000))
        graph.replay()
        worst = max(worst, *(check(case, inputs[n], outs) for n, outs in enumerate(captured)))
    assert torch.cuda.current_stream() == main
    good = everywhere(worst <= 1 and len(memories(program)) == 1)
    if RANK == 0:
        print(f"{'ok    ' if good else 'FAILED'} layers, {strategy}: {worst:.2f} of the allowed error", flush=True)
    return good


def decoder(m: int, strategy: str, kernels: str, layers: int = 8) -> bool:
    """Run layers of an MLP on few rows in one CUDA graph: the bits equal those of eager calls on all ranks.

    With `push` and Triton, products of few rows also have the same bits if another kernel copies them.
    """
    columns, hidden = 512, 256
    fusion = patterns.mlp_replicated(SIZE, 1, m, columns, hidden * SIZE, "bf16")
    program = hi.lower(fusion, strategy)
    torch.manual_seed(m)  # the same x and the same unsharded weights on every rank
    unsharded = [
        (torch.randn(columns, hidden * SIZE) / columns**0.5, 0.1 * torch.randn(hidden * SIZE, columns) / hidden**0.5)
        for _ in range(layers)
    ]
    weights = [
        (w1.chunk(SIZE, 1)[RANK].cuda().bfloat16().t().contiguous().t(), w2.chunk(SIZE)[RANK].cuda().bfloat16())
        for w1, w2 in unsharded
    ]
    x, *outs = torch.empty(3, m, columns, device="cuda", dtype=torch.bfloat16)

    def run(executor: Executor) -> torch.Tensor:
        last = x
        for layer, pair in enumerate(weights):
            (last,) = executor(last, *pair, out=(outs[layer % 2],))
        return last

    def theirs() -> torch.Tensor:
        last = x
        for w1, w2 in weights:
            part = torch.nn.functional.gelu(last @ w1) @ w2
            dist.all_reduce(part)
            last = last + part
        return last

    executor, not_pushed = Executor(program, kernels=kernels), Executor(program, kernels=kernels)
    rows, pushes.MAX_PUSHED_ROWS = pushes.MAX_PUSHED_ROWS, 0
    run(not_pushed)  # makes its plan
    pushes.MAX_PUSHED_ROWS = rows
    run(executor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = run(executor)
    alike, ours, allowed = True, 0.0, 0.0  # squares of errors over all calls
    for call in range(CALLS):
        x.copy_(torch.randn(m, columns, generator=torch.Generator().manual_seed(call)))
        results = []
        for call_once in (lambda: run(executor), lambda: run(not_pushed), lambda: graph.replay() or last):
            for out in outs:
                out.fill_(NAN)
            torch.cuda._sleep(random.randrange(20_000_000))
            results.append(call_once().clone())
        everyone = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(everyone, results[0])
        alike = alike and all(torch.equal(results[0], other) for other in (*results[1:], *everyone))
        exact = x.double()
        for w1, w2 in unsharded:
            w1, w2 = (w.cuda().bfloat16().double() for w in (w1, w2))
            exact = exact + torch.nn.functional.gelu(exact @ w1) @ w2
        ours += relative_error(results[0], exact) ** 2
        allowed += (1.1 * relative_error(theirs(), exact)) ** 2
    worst = (ours / allowed) ** 0.5
    good = everywhere(alike and worst <= 1)
    if RANK == 0:
        bits = "equal" if alike else "different"
        label = f"{strategy}, {kernels}, {m} rows: {worst:.2f} of the allowed error, {bits} bits"
        print(f"{'ok    ' if good else 'FAILED'} decoder, {label}", flush=True)
    return good


def native(kind: str) -> bool:
    """Return True if native code calls NCCL and cuBLAS, on two streams, and gives the bits that torch's calls give."""
    program = hi.lower(
        {
            "allgather": lambda: patterns.allgather_matmul(SIZE, S=1, M=512 * SIZE, K=1024, N=768, dtype="bf16"),
            "reduce_scatter": lambda: patterns.row_parallel_scattered(
                SIZE, S=1, M=512 * SIZE, K=1024 * SIZE, N=768, dtype="bf16"
            ),
            "allreduce": lambda: patterns.row_parallel(SIZE, S=1, M=64, K=1024 * SIZE, N=768, dtype="bf16"),
        }[kind](),
        "sequential",
    )
    case = Case(kind, program, product)
    with hi.knobs.scope(native=False):
        by_torch = Executor(program)
    executor, alike, streams = Executor(program), True, (torch.cuda.default_stream(), torch.cuda.Stream())
    for call in range(20 * CALLS):
        parts = parts_of(case, fresh_on_gpu(case, call))
        poison()
        streams[call % 2].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[call % 2]):
            torch.cuda._sleep(random.randrange(2_000_000))
            (ours,), (theirs,) = executor(*parts), by_torch(*parts)
            alike = alike and torch.equal(ours, theirs)
    torch.cuda.synchronize()
    lines = executor.tape.splitlines()
    watched = executor._machine.groups.native.streams
    numbers = [watched[stream.cuda_stream].memory[:2].tolist() for stream in streams if stream.cuda_stream in watched]
    counted = len(numbers) == 2 and all(begun == ended > 0 for begun, ended in numbers)
    native_only = any(" by NCCL, " in line for line in lines) and not any("by Python" in line for line in lines)
    good = everywhere(alike and counted and native_only)
    if RANK == 0:
        bits = "equal" if alike else "different"
        print(f"{'ok    ' if good else 'FAILED'} native {kind}: {bits} bits, begun and ended {numbers}", flush=True)
        print("\n".join(lines), flush=True)
    return good


def killed() -> None:
    executor = Executor(programs.ag_matmul())
    parts = parts_of(Case("killed", executor.program, product), fresh(Case("killed", executor.program, product), 0))
    for call in range(1000):
        if RANK == 1 and call == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        executor(*parts)
        torch.cuda.synchronize()
        time.sleep(0.01)


def main() -> None:
    random.seed(RANK)
    wanted = sys.argv[1:]
    with session("cuda"):
        assert joined().rank == RANK
        if wanted == ["killed"]:
            killed()
        chosen = [case for case in cases() if not wanted or any(case.name.startswith(name) for name in wanted)]
        results = [ran(case, kernels) for case in chosen for kernels in ("aten", "triton")]
        results += [sizes_take_turns() for _ in range(wanted.count("sizes") if wanted else 1)]
        if not wanted or "sums" in wanted:
            results += [thousand_calls(in_parts) for in_parts in (False, True)]
        if not wanted or "layers" in wanted:
            results += [layers_share_memory(strategy) for strategy in ("ring", "fused", "push")]
        if not wanted or "decoder" in wanted:
            results += [decoder(m, "push", kernels) for m in (1, 16, 64) for kernels in ("aten", "triton")]
            others = ("ring", "fused", *(f"sequential by {by}" for by in ("low_latency", "one_shot", "two_shot")))
            results += [decoder(16, strategy, "triton") for strategy in others]
        if not wanted or "native" in wanted:
            results += [native(kind) for kind in ("allgather", "reduce_scatter", "allreduce")]
        if not wanted or "modes" in wanted:
            gathers = ("ring", "fused", "push", "sequential by low_latency", "sequential by copy_engine")
            results += [modes_take_turns(s, k) for s in gathers for k in ("aten", "triton")]
    with session("cuda"):  # a second session connects again
        again = [*chosen[:1], Case("copies", hi.lower(hi.parse(ROWS), "fused"), product, m=512 * SIZE)]
        results += [ran(case, "triton") for case in again]
        if RANK == 0:
            print(f"{sum(results)} of {len(results)} cases passed on {SIZE} GPUs", flush=True)
    sys.exit(not all(results) or not results)


if __name__ == "__main__":
    main()
