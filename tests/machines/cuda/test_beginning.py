"""Credits on CUDA: the first stream that accesses a peer takes them, unless it may be blocked before."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.machines.cuda.credits import takes_credits_first
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram

NEXT = "(%r + 1) % 2 over x"
MATMUL = "matmul %full, %b -> %c ready %there >= 1 from %r own %a"
FORK = "set_stream 0   synchronize %user"


def recorded(*body: str) -> UnrolledProgram:
    lines = "\n".join(f"  {line}" for line in body)
    program = parse(f"""hostir 1
mesh @mesh [x] = 0 1
program @p(%a: f32[2@x, 8], %b: f32[8, 5]) -> (%c) streams 2 {{
  %user = current_stream
  %r = rank of %a over x
  %full: f32[2, 8] = allocate_symmetric
  %there: flag[2] = allocate_symmetric
  %own: flag[1] = allocate_symmetric
  %mine: f32[2@x, 8] = shard %full
  %c: f32[2, 5] = allocate
{lines}
}}
""")
    return unroll(program, 1, {}, [torch.zeros(1, 8), torch.zeros(8, 5)])


PUT, SIGNAL = f"put %a -> %mine at {NEXT}", f"signal %there[%r] = 1 at {NEXT} by 1 sms"
TELL = "set_stream 1   synchronize 0"
SELF = "signal %own[0] = 1 at %r over x"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ([FORK, PUT, TELL, SIGNAL], False),
        (["relu %b -> %b", FORK, PUT, TELL, SIGNAL, "set_stream %user", MATMUL], False),
        (["relu %b -> %b", FORK, PUT, "set_stream 1", SIGNAL, "set_stream %user", MATMUL], True),
        (
            ["relu %b -> %b", FORK, "set_stream 1   synchronize 0   set_stream 0", PUT, "set_stream 1", SIGNAL, MATMUL],
            True,
        ),
        ([FORK, SELF, PUT, "set_stream 1", SIGNAL, "set_stream %user", MATMUL], False),
        ([FORK, f"{SELF} by 1 sms", PUT, "set_stream 1", SIGNAL, "set_stream %user", MATMUL], True),
        ([FORK, f"{SELF} by 1 sms", PUT, "set_stream 1", SIGNAL], False),
    ],
    ids=[
        *("nothing before", "the second stream comes behind the first", "it does not", "it does, but too early"),
        *("a signal by the stream before", "one by a kernel", "one by a kernel, and none that takes the SMs"),
    ],
)
def test_the_callers_stream_takes_credits_if_another_stream_might_be_blocked_first(
    body: list[str], expected: bool
) -> None:
    assert takes_credits_first(recorded(*body)) == expected


def one_rank(program: Program) -> UnrolledProgram:
    parts = [torch.empty([n.bind({}) for n in v.tensor.local_shape]) for v in program.inputs]
    return unroll(program, 0, {}, parts)


@pytest.mark.parametrize("streams", [1, 2])
def test_in_fused_programs_the_stream_of_the_copies_takes_the_credits(streams: int) -> None:
    for fusion in (patterns.allgather_matmul_rows(), patterns.allgather_matmul(), patterns.mlp()):
        assert not takes_credits_first(one_rank(hi.lower(fusion, "fused", streams)))
