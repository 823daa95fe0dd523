"""cuBLAS divides K of these products: what a graph adds up is its own, whatever is replayed beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hostir.runtime.cuda import machine as cuda
from hostir.runtime.executor import Executor
from tests.gpu.one_device import NAN, alone

TIMES = 20  # products of a call
REPLAYS = 100
SHAPES = ((256, 64, 16, "f32"), (64, 257, 2, "bf16"))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Replay = Callable[[], object]


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    with torch.device("cuda"):
        yield torch.device("cuda")
    torch.cuda.synchronize()


def products(m: int, k: int, n: int, dtype: str, stream: str) -> Executor:
    """The same product again and again, on the caller's stream or on one of the program's."""
    body = f"""  %c: {dtype}[{m}, {n}] = allocate
  set_stream {stream}
  {"synchronize %user" if stream == "0" else ""}
  for %i in 0..{TIMES} {{ matmul %a, %b -> %c }}
  set_stream %user
  {"synchronize 0" if stream == "0" else ""}"""
    return Executor(alone(body, f"%a: {dtype}[{m}, {k}], %b: {dtype}[{k}, {n}]"), machine="cuda", kernels="aten")


def captured_by_the_caller(executors: list[Executor], operands: list[Matrices]) -> list[Replay]:
    """Both on the stream that torch captures on where it is given none."""
    graphs: list[Replay] = []
    for executor, (a, b, c) in zip(executors, operands, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executor(a, b, out=c)
        graphs.append(graph.replay)
    return graphs


def captured_by_itself(executors: list[Executor], operands: list[Matrices]) -> list[Replay]:
    """Both on one stream, as of 33 executors two have one."""
    ours = [executor._graphs for executor in executors]
    assert ours[0] is not None
    assert ours[1] is not None
    ours[1].__dict__["side"] = ours[0].side
    calls: list[Replay] = []
    for executor, (a, b, c) in zip(executors, operands, strict=True):
        calls.append(lambda executor=executor, a=a, b=b, c=c: executor(a, b, out=c))
        for _ in range(3):
            calls[-1]()
    assert [len(graphs.kept) for graphs in ours if graphs is not None] == [1, 1]
    return calls


def wrong(capture: Callable[..., list[Replay]], stream: str) -> int:
    """Of so many replays at once, those with other bits than a call has by itself."""
    executors = [products(*shape, stream) for shape in SHAPES]
    executors[1]._machine.streams[:] = executors[0]._machine.streams  # as of 33 executors two have the same
    operands: list[Matrices] = []
    for m, k, n, dtype in SHAPES:
        kind = DTYPES[dtype]
        operands.append((torch.randn(m, k).to(kind), torch.randn(k, n).to(kind), torch.empty(m, n, dtype=kind)))
    alone = [executor(a, b)[0] for executor, (a, b, _) in zip(executors, operands, strict=True)]
    replays = capture(executors, operands)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = 0
    for _ in range(REPLAYS):
        for *_, c in operands:
            c.fill_(NAN)
        torch.cuda.synchronize()
        for replay, own in zip(replays, streams, strict=True):
            with torch.cuda.stream(own):
                replay()
        torch.cuda.synchronize()
        found += any(not torch.equal(c, right) for (*_, c), right in zip(operands, alone, strict=True))
    return found


@pytest.mark.parametrize("stream", ["%user", "0"], ids=["callers stream", "own stream"])
@pytest.mark.parametrize("capture", [captured_by_the_caller, captured_by_itself], ids=["callers graph", "own graph"])
def test_graphs_captured_on_one_stream_and_replayed_at_once_do_not_take_each_others_sums(
    capture: Callable[..., list[Replay]], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong(capture, stream) == 0
    monkeypatch.setattr(cuda, "BY_CUBLAS", ())
    nothing = (
        "nothing is wrong without streams of their own: try other shapes, or do without hostir/runtime/cuda/graphs.py"
    )
    assert wrong(capture, stream) > 0, nothing
