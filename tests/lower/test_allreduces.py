"""All-reduces by `ring`, `fused` and `push`, in one step, two steps or chunks: correct in every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.random import random_inputs
from hostir.check.one_rank.alike import alike
from hostir.ir import Program, parse
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Synchronize
from hostir.ir.onesided_ops import Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.tensor_ops import Contraction, RmsNorm, Sum, TensorOp
from hostir.lower import Pass, passes_of, run_passes
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.fused import Fused, Push
from hostir.lower.ring import Ring
from hostir.lower.scatters import Pieces
from hostir.lower.strategies import EXPLICIT, FINISH
from tests.call.whole import planned
from tests.judging.simulated import failure_of
from tests.lower.held import (
    assert_correct,
    assert_each_statement_is_needed,
    every_strategy,
    lowerable,
    one_sided,
    without_each,
)
from tests.lower.scattered import scattered

Dtype = str
SMALL = AllReduceSteps(min_rows=1, min_bytes=1)  # blocks of any size
TWO = AllReduceSteps(extra_bytes=-1, chunks=2, min_rows=1, min_bytes=1)  # two steps whenever the ranks divide the rows
FORMS: dict[str, Pass] = {
    "ring": Ring(2),
    "fused": Fused(2),
    "fused in blocks": Fused(2, Pieces(), SMALL),
    "fused in chunks": Fused(2, Pieces(), TWO),
    "fused in chunks, one stream": Fused(1, Pieces(), TWO),
    "push": Push(),
    "push in two steps": Push(TWO),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=[*FORMS])


def lowered(fusion: Program, form: Pass) -> Program:
    """Return the fusion lowered with `form` as the pass of its strategy."""
    return run_passes(fusion, [*EXPLICIT, form, *FINISH])


def matmul(shape: Sequence[int | str], ranks: int, dtype: Dtype = "f32", *, epilogue: bool = False) -> hi.Fusion:
    """Return a row-parallel linear layer with an all-reduce, and a bias, or an addend and an activation."""
    with hi.Fusion("reduced") as fusion:
        x, w = hi.tensor("x", [*shape, 4 * ranks], dtype), hi.tensor("w", [6, 4 * ranks], dtype)
        bias, rest = hi.tensor("bias", [6], dtype), hi.tensor("rest", [*shape, 6], dtype)
        y = hi.gelu(hi.linear(x, w) + rest) if epilogue else hi.linear(x, w, bias)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(len(shape), mesh)
    w.shard(1, mesh)
    y.set_device_mesh(mesh)
    return fusion


LAYOUTS: dict[str, Callable[[int], list[int]]] = {
    "rows": lambda ranks: [4 * ranks],
    "one row": lambda ranks: [1],
    "rows that the ranks do not divide": lambda ranks: [4 * ranks + 1],
    "batch of one": lambda ranks: [1, 4 * ranks],
    "sequence": lambda ranks: [3, 2 * ranks],
}


@every_form
@pytest.mark.parametrize(
    ("layout", "ranks"), [*((layout, 3) for layout in LAYOUTS), ("rows", 2), ("rows", 8), ("one row", 8)]
)
def test_rows_of_every_layout_and_number_are_summed_on_all_ranks(layout: str, form: Pass, ranks: int) -> None:
    fusion = matmul(LAYOUTS[layout](ranks), ranks, epilogue=ranks == 3).program()
    program = lowered(fusion, form)
    assert not [s for s in program.walk() if isinstance(s, Communication)]
    assert_correct(fusion, program, range(2))


@every_form
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_partial_sums_are_added_in_f32_with_the_same_bits_on_all_ranks(form: Pass, dtype: Dtype) -> None:
    """Equal bits in every run and schedule: a sum in another order of ranks would differ."""
    ranks = 4
    fusion = matmul([2 * ranks], ranks, dtype).program()
    program = lowered(fusion, form)
    assert_correct(fusion, program, range(1))
    inputs = random_inputs(fusion, {}, seed=1)
    (first,), *others = map(planned(program, inputs), range(6))  # which raises if the results of two ranks differ
    assert all(torch.equal(first, other) for (other,) in others)


def test_each_form_sums_its_number_of_rows_and_raises_its_number_of_flags() -> None:
    ranks = 4
    fusion = matmul([8 * ranks], ranks).program()
    sums = {name: [s for s in lowered(fusion, f).walk() if isinstance(s, Sum)] for name, f in FORMS.items()}
    assert {name: first.out.tensor.local_shape[0].value for name, (first, *_) in sums.items()} == {
        "ring": 8,
        "fused": 32,
        "fused in blocks": 32,
        "fused in chunks": 4,
        "fused in chunks, one stream": 4,
        "push": 32,
        "push in two steps": 8,
    }
    raising = {
        name: [s.done.tensor.shape[0].value for s in lowered(fusion, f).walk() if isinstance(s, Contraction) and s.done]
        for name, f in FORMS.items()
    }
    assert {name: flags for name, flags in raising.items() if flags} == {
        "fused in blocks": [16],
        "fused in chunks": [4],
        "fused in chunks, one stream": [4],
    }


@every_form
@pytest.mark.parametrize("ranks", [2, 3])
def test_elementwise_statements_after_an_allreduce_are_computed_with_the_sum(form: Pass, ranks: int) -> None:
    program = lowered(matmul([4 * ranks], ranks, epilogue=True).program(), form)
    sums = [s for s in program.walk() if isinstance(s, Sum)]
    assert sums
    assert all(s.addend is not None and s.activation == "gelu" for s in sums)
    words = {s.keyword() for s in program.walk() if isinstance(s, TensorOp)}
    assert words <= {"linear", "sum", "copy"}


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_checker_reports_every_statement_left_out(form: Pass, ranks: int) -> None:
    program = lowered(matmul([2 * ranks], ranks).program(), form)
    types = assert_each_statement_is_needed(program)
    assert {Put, Signal} <= types
    assert types & {Barrier, Synchronize, WaitSignal, Get}
    if ranks in (2, 4):
        assert failure_of(program, 2) == ""


@pytest.mark.slow
@every_form
def test_random_fusions_give_the_unsharded_result(form: Pass) -> None:
    fusions = (scattered(2 + seed % 3, seed, to_all=True) for seed in range(9))
    programs = list(lowerable(fusions, lambda _, fusion: lowered(fusion, form)))
    for seed, fusion, program in programs:
        assert_correct(fusion, program, range(seed, seed + 1))
    assert len(programs) > 5


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_program_serves_any_number_of_rows(strategy: str, ranks: int) -> None:
    """The numbers of ranks and of chunks must divide the rows; `push` takes any number of rows."""
    fusion = matmul(["M"], ranks).program()
    program = hi.lower(fusion, strategy)
    for rows in (0, 12 * ranks, *((1, 7) if strategy == "push" else ())):
        assert_correct(fusion, program, range(1), {"M": rows})


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_known_number_of_slices_with_a_symbolic_number_of_rows_is_cut(strategy: str, ranks: int) -> None:
    fusion = matmul([ranks, "M"], ranks).program()
    program = hi.lower(fusion, strategy)
    for rows in (0, 5):
        assert_correct(fusion, program, range(1), {"M": rows})


def test_auto_accepts_any_number_of_rows() -> None:
    fusion = matmul(["M"], 3).program()
    executor = hi.compile(fusion, machine="local")
    for rows in (1, 7, 48):
        x, w, bias = torch.randn(rows, 12), torch.randn(6, 12), torch.randn(6)
        rest = torch.zeros(rows, 6)
        (y,) = executor([*x.chunk(3, 1)], [*w.chunk(3, 1)], [bias] * 3, [rest] * 3)
        for result in y:
            torch.testing.assert_close(result, torch.nn.functional.linear(x, w, bias), rtol=1e-4, atol=1e-4)


NEXT = {
    "nothing": "",
    "all": """  %b: f32[12, 4] = add %c, %x
  %g: f32[12, 4] = silu %b
  %d: f32[12, 4] = rms_norm %g eps 1e-05 times %s
""",
}


@pytest.mark.parametrize("form", ["ring", "push in two steps", "fused in chunks"])
@pytest.mark.parametrize("between", NEXT)
def test_the_next_matmul_waits_for_the_gathered_rows_by_blocks(form: str, between: str) -> None:
    """Row-wise statements in between are computed by each rank on its local rows."""
    text = f"""hostir 1
mesh @mesh [tp] = 0 1 2
fusion @stack(%a: f32[12, 6@tp], %b0: f32[6@tp, 4], %x: f32[12, 4], %s: f32[4], %w: f32[4, 5]) -> (%y) {{
  %p: f32[12, 4] partial(tp) = matmul %a, %b0
  %c: f32[12, 4] = allreduce %p over tp
{NEXT[between]}  %y: f32[12, 5] = matmul {"%d" if between == "all" else "%c"}, %w
}}
"""
    fusion = parse(text)
    program = lowered(fusion, FORMS[form])
    waiting = [s for s in program.walk() if isinstance(s, Contraction) and s.ready is not None]
    assert len(waiting) == (form != "ring")
    norms = [s.out.tensor.local_shape[0].value for s in program.walk() if isinstance(s, RmsNorm)]
    assert norms == [4] * (between == "all")
    assert_correct(fusion, program, range(3))
    assert failure_of(program, 2) == ""


@every_form
def test_the_residual_and_its_norm_can_both_be_outputs(form: Pass) -> None:
    """The sum adds the residual, and the norm comes after it."""
    fusion = patterns.attention_output(3, S=1, M=12, K=6, N=4).program()
    program = lowered(fusion, form)
    assert all(s.addend is not None for s in program.walk() if isinstance(s, Sum))
    assert_correct(fusion, program, range(2))


@pytest.mark.parametrize(("of_a", "of_b"), [("[1, 1]", "[1, 1]"), ("[24, 1]", "[1, 4]")], ids=["tensor", "rows"])
def test_each_chunk_of_a_scaled_product_uses_the_scales_of_its_rows(of_a: str, of_b: str) -> None:
    text = f"""hostir 1
mesh @mesh [tp] = 0 1 2
fusion @scaled(%a: f8e4m3[24, 6@tp], %b: f8e4m3[6@tp, 4], %s: f32{of_a}, %t: f32{of_b}) -> (%y) {{
  %p: bf16[24, 4] partial(tp) = scaled_matmul %a, %b scaled %s, %t to bf16
  %y: bf16[24, 4] = allreduce %p over tp
}}
"""
    fusion = parse(text)
    for form in ("ring", "fused in chunks", "push"):
        assert_correct(fusion, lowered(fusion, FORMS[form]), range(2))


@every_strategy
def test_an_allreduce_without_a_matmul_holds_no_sm_during_copies(strategy: str) -> None:
    fusion = patterns.all_reduce(3, M=6, N=4).program()
    program = hi.lower(fusion, strategy)
    chunked = lowered(fusion, Fused(2, Pieces(), TWO))
    for form, sends in ((program, strategy), (chunked, "fused")):
        (total,) = [s for s in form.walk() if isinstance(s, Sum)]
        assert (total.ready is None) == (sends != "push") == any(isinstance(s, WaitSignal) for s in form.walk())
        assert_correct(fusion, form, range(2))
        assert [str(s) for s, body in without_each(form.body) if not hi.check(form.with_body(body))] == []
    assert failure_of(chunked, 2) == ""


def test_the_number_of_steps_and_blocks_follows_from_the_size() -> None:
    def form(ranks: int, M: int | str) -> tuple[int, int, int]:
        """Return the number of copies in `fused` and in `push`, and of flags that the product in `fused` raises."""
        with hi.Fusion("decode") as fusion:
            a, b = hi.tensor("a", [M, 28672], "bf16"), hi.tensor("b", [28672, 8192], "bf16")
            c = a @ b
            fusion.output(c)
        mesh = hi.DeviceMesh(range(ranks))
        a.shard(1, mesh)
        b.shard(0, mesh)
        c.set_device_mesh(mesh)
        fused, push = (run_passes(fusion.program(), passes_of(s, 2)) for s in ("fused", "push"))
        done = [s.done.tensor.shape[0].value or 0 for s in fused.walk() if isinstance(s, Contraction) and s.done]
        return len(one_sided(fused)), len(one_sided(push)), (done or [0])[0]

    assert form(2, 16) == (1, 1, 0)
    assert form(2, 8192) == (1, 1, 16)  # blocks of 8 MiB
    assert form(8, 16) == (1, 1, 0)
    assert form(8, 512)[1:] == (2, 8)  # in two steps
    assert form(8, 8192)[2] == 8
    assert form(8, 8191)[1:] == (1, 16) or form(8, 8191)[1:] == (1, 0)  # 8 ranks do not divide the rows
    assert form(8, "M")[1] == 1


def test_the_text_in_chunks_fits_on_a_page_and_one_rank_stands_for_all() -> None:
    program = lowered(matmul([32 * 8], 8).program(), FORMS["fused in chunks"])
    assert str(program).count("\n") <= 60
    assert alike(program, {}, 2) is not None
