"""torch.compile of a function that calls an executor: it compiles the code around the call, and nothing of hostir."""

from __future__ import annotations

import torch

import hostir as hi

PROGRAM = """hostir 1
mesh @mesh [didx] = 0
program @relu(%x: f32[M, 8]) -> (%y) {
  %y: f32[M, 8] = allocate
  relu %x -> %y
}
"""


def test_torch_compile_leaves_a_call_alone() -> None:
    from torch._dynamo.utils import counters

    executor = hi.Executor(hi.parse(PROGRAM), machine="gloo")

    def around(x: torch.Tensor) -> torch.Tensor:
        (y,) = executor(x * 2)
        return y + 1

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(around, backend="eager", dynamic=True)
    for rows in (4, 4, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), (x * 2).relu() + 1)
    (why,) = counters["graph_break"]
    assert "an executor runs a program that hostir has compiled" in why
    assert counters["stats"]["unique_graphs"] == 2 == counters["frames"]["ok"] == counters["frames"]["total"]
    torch._dynamo.reset()
