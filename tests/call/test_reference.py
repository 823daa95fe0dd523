"""References: the result of a program on unsharded tensors."""

from __future__ import annotations

import pytest
import torch

from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import parse
from hostir.ir.source import HostIRError
from hostir.lower import lower
from tests.call.programs import AG_MATMUL, GRID, ROW_PARALLEL, TRANSFERS
from tests.call.whole import run_whole


def test_the_reference_of_a_host_program_is_the_unsharded_computation() -> None:
    program = parse(AG_MATMUL)
    a, b = random_inputs(program, {"M": 3, "K": 8, "N": 5})
    (c,) = reference(program, [a, b])
    assert c.dtype == torch.float64
    torch.testing.assert_close(c, a.double() @ b.double())


def test_partial_sums_are_added() -> None:
    program = parse(ROW_PARALLEL)
    inputs = random_inputs(program, {"K": 8})
    a, w, bias = (x.double() for x in inputs)
    c, d = reference(program, inputs)
    torch.testing.assert_close(c, a @ w.t() + bias)
    torch.testing.assert_close(d, a @ w.t())


def test_every_communication_copies() -> None:
    program = parse(TRANSFERS)
    inputs = random_inputs(program, {"K": 3})
    for output, expected in zip(reference(program, inputs), [inputs[i] for i in (0, 1, 0, 1, 2)], strict=True):
        torch.testing.assert_close(output, expected.double())


def test_the_declared_dtype_rounds_after_every_statement() -> None:
    program = parse(GRID)
    x, w, s = inputs = random_inputs(program, {"K": 8})
    y, z = reference(program, inputs, dtype=None)
    expected = (x * s) @ w
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(z, torch.nn.functional.silu(expected).float().sum(0).bfloat16(), rtol=0.02, atol=0.02)


def test_the_reference_of_a_fusion_allocates_every_result() -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0 1
fusion @f(%a: f32[(2@didx M/2), K], %w: f32[N, K], %bias: f32[N]) -> (%c, %d, %t) {
  %all: f32[M, K] = reshard %a
  %lin: f32[M, N] = linear %all, %w, %bias
  %act: f32[M, N] = gelu %lin
  %half: bf16[M, N] = cast %act to bf16
  %c: f32[M, N] = cast %half to f32
  %s: f32[N] = sum %act axis 0
  %d: f32[M, N] = mul %act, %s
  %r: f32[M, 2, N/2] = reshape %d
  %t: f32[N/2, M, 2] = permute %r (2, 0, 1)
}
""")
    inputs = random_inputs(program, {"M": 4, "K": 6, "N": 8})
    a, w, bias = (x.double() for x in inputs)
    c, d, t = reference(program, inputs)
    act = torch.nn.functional.gelu(a @ w.t() + bias)
    torch.testing.assert_close(c, act)  # in f64 a cast changes nothing
    torch.testing.assert_close(d, act * act.sum(0))
    torch.testing.assert_close(t, d.view(4, 2, 4).permute(2, 0, 1))
    rounded = reference(program, inputs, dtype=None)[0]
    torch.testing.assert_close(rounded, act.bfloat16().float(), rtol=0.01, atol=0.01)
    assert torch.equal(rounded, rounded.bfloat16().float())


def test_casts_to_and_from_f64_round_once() -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0 1
fusion @f(%a: f64[8@didx], %b: bf16[8@didx]) -> (%half, %wide, %s) {
  %half: bf16[8@didx] = cast %a to bf16
  %wide: f64[8@didx] = cast %b to f64
  %t: f64[8@didx] = add %a, %wide
  %s: f64[8] = reshard %t
}
""")
    a, b = inputs = random_inputs(program, {})
    assert a.dtype == torch.float64
    assert not torch.equal(a, a.float().double()), "random values that fit f32 would hide a rounding"
    for half, wide, s in (reference(program, inputs, dtype=None), run_whole(lower(program), inputs)):
        assert torch.equal(half, a.bfloat16())
        assert torch.equal(wide, b.double())
        assert torch.equal(s, a + b.double())


def test_a_program_in_f64_must_be_as_exact_as_f64() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0
fusion @f(%a: f64[64, 64], %b: f64[64, 64]) -> (%c) {
  %c: f64[64, 64] = matmul %a, %b
}
"""
    inputs = random_inputs(parse(text), {})
    plain, exact = reference(parse(text), inputs, dtype=None), reference(parse(text), inputs)
    rounded = [(inputs[0].float() @ inputs[1].float()).double()]
    assert [c.good for c in compare(parse(text), plain, plain, exact)] == [True]
    assert [c.good for c in compare(parse(text), rounded, plain, exact)] == [False]


def test_writing_views_of_views_reaches_the_buffer() -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0 1
program @views(%a: f32[8@didx, 6]) -> (%out) {
  %out: f32[8@didx, 6] = allocate
  for %i in 0..2 {
    %x = chunk %a[%i of 2]
    %y = chunk %out[%i of 2]
    for %j in 0..3 {
      %xt = permute %x (1, 0)
      %xj = chunk %xt[%j of 3]
      %yt = permute %y (1, 0)
      %yj = chunk %yt[%j of 3]
      add %xj, %xj -> %yj
    }
  }
}
""")
    (a,) = inputs = random_inputs(program, {})
    (out,) = reference(program, inputs)
    assert torch.equal(out, a.double() * 2)


def test_a_chunk_of_a_sharded_axis_takes_rows_of_every_rank() -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0 1
program @piece(%a: f32[8@didx]) -> (%x) {
  %x = chunk %a[1 of 2]
}
""")
    assert reference(program, [torch.arange(8.0)])[0].tolist() == [2, 3, 6, 7]


def test_freed_and_unwritten_buffers_are_nan() -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0
program @p(%a: f32[2]) -> (%a, %b) {
  %b: f32[2] = allocate
  free %a
}
""")
    a = torch.ones(2)
    assert all(x.isnan().all() for x in reference(program, [a]))
    assert torch.equal(a, torch.ones(2)), "the caller's tensor must not change"


def test_a_wrong_input_is_refused() -> None:
    with pytest.raises(HostIRError, match=r"input %b has shape \[7, 5\]"):
        reference(parse(AG_MATMUL), [torch.zeros(4, 4, 3, 8), torch.zeros(7, 5)])
