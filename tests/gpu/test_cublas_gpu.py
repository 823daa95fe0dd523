"""cuBLAS uses split-K for these products: graphs that replay at the same time must not share its workspace."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from hostir.call.executor import Executor
from hostir.kernels import aten
from hostir.machines.cuda import machine as cuda
from tests.gpu.one_device import NAN, alone

TIMES = 20  # products of a call
REPLAYS = 100
SHAPES = ((256, 64, 16, "f32"), (64, 257, 2, "bf16"))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Replay = Callable[[], object]


pytestmark = pytest.mark.usefixtures("on_gpu")


def products(m: int, k: int, n: int, dtype: str, stream: str) -> Executor:
    """Return an executor of repeated equal products, on the caller's stream or on a worker stream."""
    body = f"""  %c: {dtype}[{m}, {n}] = allocate
  set_stream {stream}
  {"synchronize %user" if stream == "0" else ""}
  for %i in 0..{TIMES} {{ matmul %a, %b -> %c }}
  set_stream %user
  {"synchronize 0" if stream == "0" else ""}"""
    return Executor(alone(body, f"%a: {dtype}[{m}, {k}], %b: {dtype}[{k}, {n}]"), machine="cuda", kernels="aten")


def captured_by_the_caller(executors: list[Executor], operands: list[Matrices]) -> list[Replay]:
    """Capture both calls on torch's default capture stream."""
    graphs: list[Replay] = []
    for executor, (a, b, c) in zip(executors, operands, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executor(a, b, out=c)
        graphs.append(graph.replay)
    return graphs


def captured_by_itself(executors: list[Executor], operands: list[Matrices]) -> list[Replay]:
    """Let both executors capture on one stream. Of 33 executors, two always share a stream."""
    captures = [executor._graphs for executor in executors]
    assert captures[0] is not None
    assert captures[1] is not None
    captures[1].__dict__["side"] = captures[0].side
    calls: list[Replay] = []
    for executor, (a, b, c) in zip(executors, operands, strict=True):
        calls.append(lambda executor=executor, a=a, b=b, c=c: executor(a, b, out=c))
        for _ in range(3):
            calls[-1]()
    assert [len(graphs.kept) for graphs in captures if graphs is not None] == [1, 1]
    return calls


def wrong(capture: Callable[..., list[Replay]], stream: str) -> int:
    """Return the number of concurrent replays whose bits differ from those of a single call."""
    executors = [products(*shape, stream) for shape in SHAPES]
    executors[1]._machine.streams[:] = executors[0]._machine.streams  # 33 executors always have two that share streams
    operands: list[Matrices] = []
    for m, k, n, dtype in SHAPES:
        torch_dtype = DTYPES[dtype]
        a, b = torch.randn(m, k).to(torch_dtype), torch.randn(k, n).to(torch_dtype)
        operands.append((a, b, torch.empty(m, n, dtype=torch_dtype)))
    expected = [executor(a, b)[0] for executor, (a, b, _) in zip(executors, operands, strict=True)]
    replays = capture(executors, operands)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    count = 0
    for _ in range(REPLAYS):
        for *_, c in operands:
            c.fill_(NAN)
        torch.cuda.synchronize()
        for replay, stream_of_replay in zip(replays, streams, strict=True):
            with torch.cuda.stream(stream_of_replay):
                replay()
        torch.cuda.synchronize()
        count += any(not torch.equal(c, right) for (*_, c), right in zip(operands, expected, strict=True))
    return count


@pytest.mark.parametrize("stream", ["%user", "0"], ids=["callers stream", "own stream"])
@pytest.mark.parametrize("capture", [captured_by_the_caller, captured_by_itself], ids=["callers graph", "own graph"])
def test_graphs_captured_on_one_stream_can_be_replayed_at_once(
    capture: Callable[..., list[Replay]], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong(capture, stream) == 0
    monkeypatch.setattr(cuda, "BY_CUBLAS", ())
    assert wrong(capture, stream) > 0, "these shapes need no separate workspaces; try other shapes"


def product(shape: tuple[int, int, int], dtype: str, times: int = 1) -> Executor:
    """Return an executor of a product, repeated `times` times, whose kernel native code may launch."""
    m, k, n = shape
    body = f"  %c: {dtype}[{m}, {n}] = allocate\n" + "  matmul %a, %b -> %c\n" * times
    program = alone(body, f"%a: {dtype}[{m}, {k}], %b: {dtype}[{k}, {n}]")
    executor = Executor(program, machine="cuda", kernels="aten")
    executor(*operands(shape, dtype))
    return executor


def operands(
    shape: tuple[int, int, int], dtype: str, columns: bool = False, offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random matrices. The left one begins `offset` bytes after an aligned address."""
    m, k, n = shape
    b = torch.randn(n, k).t() if columns else torch.randn(k, n)
    a = torch.empty(m * k + offset // 2, dtype=DTYPES[dtype])[offset // 2 :].view(m, k).copy_(torch.randn(m, k))
    return a, b.to(DTYPES[dtype])


@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", [(2048, 4096, 3584), (512, 4096, 1792), (8, 4096, 1792), (64, 256, 2), (100, 72, 36)])
def test_native_code_computes_the_bits_of_torch_for_any_addresses(
    shape: tuple[int, int, int], dtype: str, columns: bool, record_property: Callable[[str, object], None]
) -> None:
    executor, kept = product(shape, dtype), []
    for number in range(16):
        a, b = operands(shape, dtype, columns, offset=16 * (number // 4))
        (c,) = executor(a, b)
        expected = torch.empty_like(c)
        aten.matmul(expected, a, b)
        kept.append((a, b, c, expected))
    torch.cuda.synchronize()
    assert all(torch.equal(c, expected) for _, _, c, expected in kept)
    record_property("tape", executor.tape)
    print(shape, dtype, "by columns" if columns else "by rows", executor.tape)
    if shape[0] == 2048:
        assert "launch" in executor.tape
        assert "by Python" not in executor.tape


def test_products_on_two_streams_at_once_are_right_even_if_cublas_splits_their_sums() -> None:
    """Native code gives a kernel a workspace of the stream on which it runs."""
    made = ((256, 64, 16), "f16"), ((64, 257, 2), "bf16")
    executors, inputs = [product(*each, times=TIMES) for each in made], [operands(*each) for each in made]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = [executor(*each)[0].clone() for executor, each in zip(executors, inputs, strict=True)]
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        results = []
        for executor, each, stream in zip(executors, inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(executor(*each)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(c, right) for c, right in zip(results, expected, strict=True))


def test_recordings_leave_dropout_in_the_callers_graph_and_reserved_memory_as_they_are() -> None:
    x, graph = torch.ones(1 << 16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.nn.functional.dropout(x, 0.5)
    seen = []
    for n in range(8):
        shape = (2048, 1472 - 64 * n, 16384)  # ever smaller, so that torch's allocator finds memory for the operands
        executor = product(shape, "bf16")
        graph.replay()
        executor(*operands(shape, "bf16"))
        torch.cuda.synchronize()
        seen.append(y.clone())
        if n == 1:
            reserved = torch.cuda.memory_reserved()
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))
    assert torch.cuda.memory_reserved() - reserved < 64 << 20, "the same memory serves all recordings"


def test_two_threads_record_products_at_once() -> None:
    def work(n: int) -> bool:
        torch.set_default_device("cuda")
        shape, right = (2048 + 64 * n, 512, 4096), []
        with torch.cuda.stream(torch.cuda.Stream()):
            executor = product(shape, "bf16")
            for _ in range(6):
                a, b = operands(shape, "bf16")
                expected = torch.empty(shape[0], shape[2], dtype=a.dtype)
                aten.matmul(expected, a, b)
                right.append(torch.equal(executor(a, b)[0], expected))
        return all(right) and "launch" in executor.tape

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
