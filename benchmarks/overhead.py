"""Compare hostir's time on the host with the same torch calls written by hand.

The benchmark measures:

- issuing the statements of a pipeline;
- an all-gather + matmul of few rows;
- a matmul with each collective, called without `out=`;
- a call that is replayed from a CUDA graph;
- layers and torch's operators on few rows, without and with gradients, compiled by torch, and on new numbers of
  tokens;
- parsing, lowering and verifying.

    python -m benchmarks.overhead                                                        parse, lower, verify only
    torchrun --standalone --nproc-per-node 2 -m benchmarks.overhead --out benchmarks/results/overhead
    torchrun --standalone --nproc-per-node 1 -m benchmarks.overhead --out benchmarks/results/overhead_1      on one GPU

The pipeline is an all-gather + matmul on tiny tensors, so that only issuing takes time. The version by hand is a Python
loop with the same selects, collectives, waits, matmuls, stream switches and events. To compare with a replayed call,
the version by hand is captured in a CUDA graph, and its `replay()` is timed. Calls of hostir and calls by hand take
turns, because the speed of a host changes within seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.harness import graphed, synchronize, table, write
from benchmarks.torch_operators import ByHand, Gathering, Scattering
from examples import patterns
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.check import verify
from hostir.ir import parse
from hostir.job.session import Session, session
from hostir.torch import column_parallel_linear, install, row_parallel_linear
from tests.counting import calls_of

SLICES, STREAMS = 8, 4
ALONE = f"""hostir 1
mesh @mesh [didx] = RANKS
program @alone(%a: bf16[{SLICES}, 1, 16, 64], %b: bf16[64, 64]) -> (%c) streams {STREAMS} {{
  %user = current_stream
  %c: bf16[{SLICES}, 1, 16, 64] = allocate
  for %s in 0..{STREAMS} {{ set_stream %s   synchronize %user }}
  for %i in 0..{SLICES} {{
    set_stream %i % {STREAMS}
    %a_i = select %a[%i]
    %c_i = select %c[%i]
    matmul %a_i, %b -> %c_i
  }}
  set_stream %user
  for %s in 0..{STREAMS} {{ synchronize %s }}
}}
"""


def timed(work: Callable[[], Any], repeats: int, settle: Callable[[], Any]) -> float:
    """Return the median host time of a call in microseconds. `settle` waits for the device between two calls."""
    return in_turn([work], repeats, settle)[0]


def in_turn(works: Sequence[Callable[[], Any]], repeats: int, settle: Callable[[], Any]) -> list[float]:
    """Return the median host time of a call of each function in microseconds. Calls of the functions take turns.

    If there are several, each is called twice in its turn, and the second call counts, as in `Clock.host`.
    """
    times: list[list[float]] = [[] for _ in works]
    for n in range(repeats + 5):
        for work, taken in zip(works, times, strict=True):
            for last in (False, True) if len(works) > 1 else (True,):
                settle()
                begun = time.perf_counter()
                work()
                if last and n >= 5:
                    taken.append((time.perf_counter() - begun) * 1e6)
    settle()
    return [statistics.median(taken) for taken in times]


def by_hand(a: torch.Tensor, b: torch.Tensor, streams: list[torch.cuda.Stream], ranks: int, group: Any) -> torch.Tensor:
    """Run the pipeline as one would write it by hand with torch."""
    user = torch.cuda.current_stream()
    full = torch.empty(SLICES, ranks, a.shape[2], a.shape[3], dtype=a.dtype, device=a.device)
    c = torch.empty(SLICES, ranks, a.shape[2], b.shape[1], dtype=a.dtype, device=a.device)
    for stream in streams:
        stream.wait_stream(user)
    for i in range(SLICES):
        torch.cuda.set_stream(streams[i % STREAMS])
        full_i = full.select(0, i)
        work = dist.all_gather_into_tensor(full_i, a.select(0, i), group=group, async_op=True)
        work.wait()
        torch.cuda._sleep(10_000)  # as the program's 'delay 5 us'
        torch.matmul(full_i, b, out=c.select(0, i))
    torch.cuda.set_stream(user)
    for stream in streams:
        user.wait_stream(stream)
    return c


def issuing(joined: Session, repeats: int) -> dict[str, Any]:
    """Return the host time of one call of the pipeline, by hostir and by hand."""
    ranks, device = joined.size, joined.device
    program = hi.lower(
        patterns.allgather_matmul(ranks=ranks, S=SLICES, M=SLICES * ranks * 16, K=64, N=64, dtype="bf16"),
        streams=STREAMS,
    )
    a = torch.randn(SLICES, 1, 16, 64, device=device, dtype=torch.bfloat16)
    b = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    executor = hi.Executor(program, kernels="aten")
    streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    group = dist.new_group(list(range(ranks)))
    settle = partial(torch.cuda.synchronize, device)
    with torch.no_grad():
        works = (lambda: executor(a, b)), (lambda: by_hand(a, b, streams, ranks, group))
        ours, hand = in_turn(works, 5 * repeats, settle)
    statements = sum(len(s.body) * s.count.bind({}) if hasattr(s, "body") else 1 for s in program.body)
    return {
        "what": f"pipeline, {statements} statements issued",
        "ours us": ours,
        "by hand us": hand,
        "ratio": ours / hand,
    }


def gathering(joined: Session, repeats: int) -> list[dict[str, Any]]:
    """Return host times of an all-gather + matmul with `out=`, issued and replayed, by each strategy and by hand."""
    ranks, device, (M, N, K) = joined.size, joined.device, (512, 1792, 4096)
    fusion = patterns.allgather_matmul(ranks=ranks, S=1, M=M, K=K, N=N, dtype="bf16")
    a = torch.randn(1, 1, M // ranks, K, device=device).bfloat16()
    b = torch.randn(K, N, device=device).bfloat16()
    full, c = (
        torch.empty(M, K, device=device).bfloat16(),
        torch.empty(1, ranks, M // ranks, N, device=device).bfloat16(),
    )
    settle = partial(torch.cuda.synchronize, device)

    def hand() -> None:
        dist.all_gather_into_tensor(full, a.view(-1, K))
        torch.mm(full, b, out=c.view(M, N))

    results = []
    works = {"issued": hand, "replayed": graphed(hand)}
    for strategy in ("sequential", "fused", "push"):
        for mode, graphs in (("issued", False), ("replayed", True)):
            executor = hi.Executor(hi.lower(fusion, strategy), graphs=graphs)
            for _ in range(4):
                executor(a, b, out=c)
            if graphs and executor.graph_refusal is not None:
                continue
            ours, by_hand = in_turn((partial(executor, a, b, out=c), works[mode]), repeats, settle)
            title = f"all-gather + matmul, {strategy}, {mode}"
            results.append({"what": title, "ours us": ours, "by hand us": by_hand, "ratio": ours / by_hand})
            settle()
            dist.barrier()  # no rank frees symmetric memory while others use it
    return results


def eager(joined: Session, repeats: int) -> list[dict[str, Any]]:
    """Return host times of calls without `out=`, by strategy and by hand. Results are dropped, or all are kept.

    If results are dropped, torch's allocator uses their addresses again. If results are kept, no address repeats.
    """
    ranks, (M, N, K) = joined.size, (2048, 3584, 4096)
    settle, kept = partial(torch.cuda.synchronize, joined.device), list[Any]()

    def call(work: Callable[..., Any], keep: Callable[[Any], Any], parts: Sequence[torch.Tensor]) -> None:
        keep(work(*parts))

    def gathered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        full = a.new_empty(M, K)
        dist.all_gather_into_tensor(full, a.view(-1, K))
        return full @ b

    def scattered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a.new_empty(M // ranks, N)
        dist.reduce_scatter_tensor(y, a.view(M, -1) @ b)
        return y

    def reduced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a.view(M, -1) @ b
        dist.all_reduce(y)
        return y

    results = []
    for what, pattern, hand, one_sided in (
        ("all-gather + matmul", patterns.allgather_matmul, gathered, ("fused", "push")),
        ("matmul + reduce-scatter", patterns.row_parallel_scattered, scattered, ("fused", "push")),
        ("matmul + all-reduce", patterns.row_parallel, reduced, ("fused", "push")),
    ):
        fusion = pattern(ranks=ranks, S=1, M=M, K=K, N=N, dtype="bf16")
        program = hi.lower(fusion, "sequential")
        unsharded = random_inputs(program, {}, seed=0)
        parts = [
            part.to(joined.device)
            for x, value in zip(unsharded, program.inputs, strict=True)
            if (part := shard(x, value.tensor, joined.rank, {})) is not None
        ]

        for strategy in ("sequential", *one_sided):
            executor = hi.Executor(hi.lower(fusion, strategy))
            for title, keep in (("dropped", lambda y: None), ("kept", kept.append)):
                works = [partial(call, work, keep, parts) for work in (executor, hand)]
                in_turn(works, repeats, settle)  # torch's allocator gets the memory from CUDA
                kept.clear()
                ours, by_hand = in_turn(works, repeats, settle)
                kept.clear()
                row = {"what": f"{what}, {strategy}, results {title}", "ours us": ours, "by hand us": by_hand}
                counts = {"calls": calls_of(partial(executor, *parts)), "hand calls": calls_of(partial(hand, *parts))}
                results.append({**row, "ratio": ours / by_hand, **counts})
            settle()
            dist.barrier()  # no rank frees symmetric memory while others use it
    return results


def alone_by_hand(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, streams: list[torch.cuda.Stream]) -> None:
    """Run `ALONE` as one would write it by hand with torch."""
    user = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(user)
    for i in range(SLICES):
        torch.cuda.set_stream(streams[i % STREAMS])
        torch.matmul(a.select(0, i), b, out=c.select(0, i))
    torch.cuda.set_stream(user)
    for stream in streams:
        user.wait_stream(stream)


def alone(joined: Session, repeats: int) -> list[dict[str, Any]]:
    """Return host times of a call without communication, with `out=`: issued, and replayed from a CUDA graph."""
    device = joined.device
    program = parse(ALONE.replace("RANKS", " ".join(map(str, range(joined.size)))))
    a = torch.randn(SLICES, 1, 16, 64, device=device, dtype=torch.bfloat16)
    b = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    c = torch.empty(SLICES, 1, 16, 64, device=device, dtype=torch.bfloat16)
    settle = partial(torch.cuda.synchronize, device)
    hand = partial(alone_by_hand, a, b, c, [torch.cuda.Stream(device) for _ in range(STREAMS)])
    works = {"issued": hand, "replayed": graphed(hand)}
    results = []
    for mode, graphs in (("issued", False), ("replayed", True)):
        executor = hi.Executor(program, kernels="aten", graphs=graphs)
        for _ in range(3):
            executor(a, b, out=c)
        ours, by_hand = in_turn((partial(executor, a, b, out=c), works[mode]), repeats, settle)
        title = f"{SLICES} matmuls on {STREAMS} streams, {mode}"
        results.append({"what": title, "ours us": ours, "by hand us": by_hand, "ratio": ours / by_hand})
    return results


def layers(joined: Session, repeats: int) -> list[dict[str, Any]]:
    """Return host times of layers and of torch's operators on few rows, without and with gradients, and by hand.

    The trials of candidates have ended before a call is timed. Calls that are compiled by torch have no gradients.
    `calls` and `hand calls` are the numbers of functions that one call takes, also functions of the interpreter. A
    compiled call runs some 110 functions of torch besides those of the operator. So the operator is also called alone,
    as a compiled graph calls it.
    """
    ranks, device, (M, N, K), way = joined.size, joined.device, (64, 256, 256), ByHand()
    world, settle = dist.group.WORLD, partial(synchronize, device)
    assert world is not None

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16().requires_grad_()

    def gathered(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, world.group_name)[1][0]

    def scattered(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, world.group_name)

    def trained(layer: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
        torch.autograd.grad(layer(x, weight), (x, weight), dy)

    compile_, group, ops = partial(torch.compile, fullgraph=True), world.group_name, torch.ops.hostir
    operators = {
        "column_parallel_linear": lambda x, w: ops.all_gather_matmul.default(x, [w], 0, group, False, True)[1][0],
        "row_parallel_linear": lambda x, w: ops.matmul_reduce_scatter.default(x, w, "sum", 0, group, True),
    }
    weight, results = leaf(N, K), list[dict[str, Any]]()
    gathers = (leaf(M // ranks, K), leaf(M, N).detach(), lambda x, w: Gathering.apply(x, w, way))
    scatters = (leaf(M, K), leaf(M // ranks, N).detach(), lambda x, w: Scattering.apply(x, w, way))
    for name, layer, (x, dy, hand) in (
        ("column_parallel_linear", lambda x, w: column_parallel_linear(x, w, world), gathers),
        ("fused_all_gather_matmul", gathered, gathers),
        ("row_parallel_linear", lambda x, w: row_parallel_linear(x, w, world), scatters),
        ("fused_matmul_reduce_scatter", scattered, scatters),
    ):
        modes = [("no gradients", layer), ("recorded", layer), ("with backward", layer), ("compiled", compile_(layer))]
        modes += [("its operator in a compiled graph", operators[name])] if name in operators else []
        for mode, called in modes:
            wrapped = partial(trained, dy=dy) if mode == "with backward" else lambda layer, x, w: layer(x, w)
            with torch.set_grad_enabled(mode in ("recorded", "with backward")):
                call = partial(wrapped, called, x, weight)
                call()
                ours, by_hand = in_turn((call, partial(wrapped, hand, x, weight)), repeats, settle)
                row = {"what": f"{name}, {mode}", "ours us": ours, "by hand us": by_hand, "ratio": ours / by_hand}
                # Autograd's thread of the GPU calls functions, too, which are not counted.
                counts = {"calls": calls_of(call), "hand calls": calls_of(partial(wrapped, hand, x, weight))}
                results.append(row if mode == "with backward" else row | counts)
    return results


def new_tokens(joined: Session, repeats: int) -> list[dict[str, Any]]:
    """Return host times of calls with new numbers of tokens. Each number is smaller than the numbers before it."""
    ranks, device, world = joined.size, joined.device, dist.group.WORLD
    assert world is not None
    up, down = (torch.randn(256, 256, device=device).bfloat16() for _ in range(2))
    results = []
    for strategy in ("auto", "ring", "fused", "push"):
        with install(strategy=strategy), torch.no_grad():
            for layer, weight in ((column_parallel_linear, up), (row_parallel_linear, down)):
                rows = 1 if layer is column_parallel_linear else ranks
                xs = [torch.randn(rows * n, 256, device=device).bfloat16() for n in range(repeats + 10, 2, -1)]
                calls = (partial(layer, x, weight, world) for x in xs)
                new = timed(lambda: next(calls)(), repeats, partial(synchronize, device))  # noqa: B023  # called here
                results.append({"what": f"{layer.__name__}, {strategy}, of a new number of tokens", "ours us": new})
    return results


def compiling(repeats: int) -> list[dict[str, Any]]:
    """Return the times to import, build, lower, print, parse and verify."""
    fusion = patterns.allgather_matmul()
    program = hi.lower(fusion)
    text = str(program)
    steps = {
        "build the fusion": patterns.allgather_matmul,
        "lower it": lambda: hi.lower(fusion),
        "print": lambda: str(program),
        "parse": lambda: parse(text),
        "verify": lambda: verify(program),
    }
    fresh = "import time; t = time.process_time(); import hostir.ir; print(time.process_time() - t)"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", fresh]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=variables) for _ in range(5)]
    imported = {"what": "import hostir.ir", "ours us": min(float(run.stdout) for run in runs) * 1e6}
    return [imported, *({"what": name, "ours us": timed(work, repeats, lambda: None)} for name, work in steps.items())]


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print and write a table on rank 0. Each part is written as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with session() as joined:

        def add(rows: list[dict[str, Any]]) -> None:
            results.extend(rows)
            if options.out and (joined is None or joined.rank == 0):
                write(options.out, "What hostir costs on the host", report(results), {"results": results})

        add(compiling(options.repeats))
        if joined is not None and joined.device.type == "cuda":
            add([issuing(joined, options.repeats)])
            with torch.no_grad():
                add(gathering(joined, options.repeats))
                add(eager(joined, options.repeats))
                add(alone(joined, options.repeats))
            with install(strict=True):
                add(layers(joined, options.repeats))
            add(new_tokens(joined, options.repeats))
        if joined is None or joined.rank == 0:
            print(report(results), flush=True)


def report(results: list[dict[str, Any]]) -> str:
    """Return a table with a line for each result."""
    return table(
        ["what", "hostir us", "by hand us", "ratio", "function calls", "by hand"],
        [
            [
                f["what"],
                f"{f['ours us']:.0f}",
                f"{f['by hand us']:.0f}" if "ratio" in f else "",
                f"{f['ratio']:.3f}" if "ratio" in f else "",
                str(f.get("calls", "")),
                str(f.get("hand calls", "")),
            ]
            for f in results
        ],
    )


if __name__ == "__main__":
    main()
