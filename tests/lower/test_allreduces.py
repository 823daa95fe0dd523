"""Allreduces by `ring`, `fused` and `push`: in one step, in two, in chunks; right under every schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.ir import HostIRError, Program, Statement, parse
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Synchronize
from hostir.ir.onesided_ops import Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.tensor_ops import Contraction, RmsNorm, Sum, TensorOp
from hostir.lower import Pass, passes_of, run_passes
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.fused import Fused, Pieces, Push
from hostir.lower.ring import Ring
from hostir.lower.strategies import EXPLICIT, FINISH
from hostir.runtime.sharding import random_inputs
from tests.lower.held import every_strategy, hold, one_sided, without_each
from tests.lower.scattered import scattered
from tests.mutation import convicted
from tests.runtime.whole import run_whole

Dtype = str
SMALL = AllReduceSteps(min_rows=1, min_bytes=1)  # blocks may be as small as they like
TWO = AllReduceSteps(extra_bytes=-1, chunks=2, min_rows=1, min_bytes=1)  # two steps wherever the ranks divide the rows
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
    """Return the fusion lowered with this pass in the middle."""
    return run_passes(fusion, [*EXPLICIT, form, *FINISH])


def matmul(shape: Sequence[int | str], ranks: int, dtype: Dtype = "f32", *, epilogue: bool = False) -> hi.Fusion:
    """A product that is summed over all ranks, on all ranks; perhaps with a bias, rows and an activation after it."""
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
def test_rows_of_every_layout_and_number_are_summed_up_on_all(layout: str, form: Pass, ranks: int) -> None:
    fusion = matmul(LAYOUTS[layout](ranks), ranks, epilogue=ranks == 3).program()
    program = lowered(fusion, form)
    assert not [s for s in program.walk() if isinstance(s, Communication)]
    hold(fusion, program, range(2))


@every_form
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_partial_sums_of_two_bytes_are_added_up_in_f32_with_the_same_bits_on_all_ranks(
    form: Pass, dtype: Dtype
) -> None:
    """The same bits in every run, on every schedule: a sum in another order of the ranks would differ."""
    ranks = 4
    fusion = matmul([2 * ranks], ranks, dtype).program()
    program = lowered(fusion, form)
    hold(fusion, program, range(1))
    inputs = random_inputs(fusion, {}, seed=1)
    (first,) = run_whole(program, inputs, seed=0)  # which raises where the copies of two ranks differ
    assert all(torch.equal(first, run_whole(program, inputs, seed=seed)[0]) for seed in range(1, 6))


def test_the_forms_differ_as_they_are_to() -> None:
    """The sum takes all rows, or those of a rank, or of a chunk; each once."""
    ranks = 4
    fusion = matmul([8 * ranks], ranks).program()
    sums = {name: [s for s in lowered(fusion, f).walk() if isinstance(s, Sum)] for name, f in FORMS.items()}
    rows = {name: found[0].out.tensor.local_shape[0].value for name, found in sums.items()}
    assert rows == {
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
    assert {name: found for name, found in raising.items() if found} == {
        "fused in blocks": [16],
        "fused in chunks": [4],
        "fused in chunks, one stream": [4],
    }


@every_form
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_elementwise_after_it_is_computed_with_the_sum(form: Pass, ranks: int) -> None:
    program = lowered(matmul([4 * ranks], ranks, epilogue=True).program(), form)
    sums = [s for s in program.walk() if isinstance(s, Sum)]
    assert sums
    assert all(s.addend is not None and s.activation == "gelu" for s in sums)
    words = {s.keyword() for s in program.walk() if isinstance(s, TensorOp)}
    assert words <= {"linear", "sum", "copy"}


@every_form
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_checker_reports_whatever_is_left_out(form: Pass, ranks: int) -> None:
    program = lowered(matmul([2 * ranks], ranks).program(), form)
    kinds: Counter[type[Statement]] = Counter()
    for missing, body in without_each(program.body):
        kinds[type(missing)] += 1
        found = [f for f in hi.check(program.with_body(body)) if f.level == "error"]
        assert found, f"'{missing.keyword()}' was left out unnoticed\n{program}"
    assert {Put, Signal} <= kinds.keys()
    assert kinds.keys() & {Barrier, Synchronize, WaitSignal, Get}
    if ranks in (2, 4):
        assert convicted(program, 2) == ""


@every_form
def test_random_fusions_give_the_unsharded_result(form: Pass) -> None:
    covered = 0
    for seed in range(9):
        ranks = 2 + seed % 3
        fusion = scattered(ranks, seed, to_all=True)
        try:
            program = lowered(fusion, form)
        except HostIRError as refused:
            if "lie over several axes of the mesh" not in str(refused):
                raise
            continue
        covered += 1
        assert one_sided(program)
        hold(fusion, program, range(seed, seed + 1))
    assert covered > 5


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_program_serves_every_number_of_rows(strategy: str, ranks: int) -> None:
    """The numbers of ranks and of chunks must divide the rows; `push` takes any number of rows."""
    fusion = matmul(["M"], ranks).program()
    program = hi.lower(fusion, strategy)
    for rows in (0, 12 * ranks, *((1, 7) if strategy == "push" else ())):
        hold(fusion, program, range(1), {"M": rows})


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_unknown_number_in_slices_of_known_number_are_cut_where_they_can_be(strategy: str, ranks: int) -> None:
    fusion = matmul([ranks, "M"], ranks).program()
    program = hi.lower(fusion, strategy)
    for rows in (0, 5):
        hold(fusion, program, range(1), {"M": rows})


def test_auto_takes_any_number_of_rows() -> None:
    fusion = matmul(["M"], 3).program()
    executor = hi.compile(fusion, machine="local")
    for rows in (1, 7, 48):
        x, w, bias = torch.randn(rows, 12), torch.randn(6, 12), torch.randn(6)
        rest = torch.zeros(rows, 6)
        (y,) = executor([*x.chunk(3, 1)], [*w.chunk(3, 1)], [bias] * 3, [rest] * 3)
        for each in y:
            torch.testing.assert_close(each, torch.nn.functional.linear(x, w, bias), rtol=1e-4, atol=1e-4)


NEXT = {
    "nothing": "",
    "all": """  %b: f32[12, 4] = add %c, %x
  %g: f32[12, 4] = silu %b
  %d: f32[12, 4] = rms_norm %g eps 1e-05 times %s
""",
}


@pytest.mark.parametrize("form", ["ring", "push in two steps", "fused in chunks"])
@pytest.mark.parametrize("between", NEXT)
def test_the_next_matmul_takes_the_rows_as_they_are_gathered(form: str, between: str) -> None:
    """Also after row-wise statements, which each rank computes on its local rows."""
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
    hold(fusion, program, range(3))
    assert convicted(program, 2) == ""


@every_form
def test_the_residual_and_its_norm_are_both_results(form: Pass) -> None:
    """On 3 ranks; the sum adds the residual, and the norm comes behind it."""
    fusion = patterns.attention_output(3, S=1, M=12, K=6, N=4).program()
    program = lowered(fusion, form)
    assert all(s.addend is not None for s in program.walk() if isinstance(s, Sum))
    hold(fusion, program, range(2))


@pytest.mark.parametrize(("of_a", "of_b"), [("[1, 1]", "[1, 1]"), ("[24, 1]", "[1, 4]")], ids=["tensor", "rows"])
def test_chunks_of_a_scaled_product_take_their_own_scales(of_a: str, of_b: str) -> None:
    text = f"""hostir 1
mesh @mesh [tp] = 0 1 2
fusion @scaled(%a: f8e4m3[24, 6@tp], %b: f8e4m3[6@tp, 4], %s: f32{of_a}, %t: f32{of_b}) -> (%y) {{
  %p: bf16[24, 4] partial(tp) = scaled_matmul %a, %b scaled %s, %t to bf16
  %y: bf16[24, 4] = allreduce %p over tp
}}
"""
    fusion = parse(text)
    for form in ("ring", "fused in chunks", "push"):
        hold(fusion, lowered(fusion, FORMS[form]), range(2))


@every_strategy
def test_an_allreduce_alone_holds_no_sm_while_copy_engines_send(strategy: str) -> None:
    fusion = patterns.all_reduce(3, M=6, N=4).program()
    program = hi.lower(fusion, strategy)
    chunked = lowered(fusion, Fused(2, Pieces(), TWO))
    for each, sends in ((program, strategy), (chunked, "fused")):
        (total,) = [s for s in each.walk() if isinstance(s, Sum)]
        assert (total.ready is None) == (sends != "push") == any(isinstance(s, WaitSignal) for s in each.walk())
        hold(fusion, each, range(2))
        assert [str(s) for s, body in without_each(each.body) if not hi.check(each.with_body(body))] == []
    assert convicted(chunked, 2) == ""


def test_ranks_that_are_alone_have_a_plain_matmul() -> None:
    for strategy in ("ring", "fused", "push"):
        program = hi.lower(patterns.row_parallel(ranks=1), strategy)
        assert [s.keyword() for s in program.walk()] == ["allocate", "matmul"]


def test_real_sizes_take_the_form_that_moves_them_soonest() -> None:
    def form(ranks: int, M: int | str) -> tuple[int, int, int]:
        """The copies in the text of `fused`, those of `push`, and the flags that the product of `fused` raises."""
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
    assert form(8, 8191)[1:] == (1, 16) or form(8, 8191)[1:] == (1, 0)  # the ranks do not divide them
    assert form(8, "M")[1] == 1


def test_the_text_of_chunks_is_a_page_and_one_rank_stands_for_all() -> None:
    program = lowered(matmul([32 * 8], 8).program(), FORMS["fused in chunks"])
    assert str(program).count("\n") <= 60
    from hostir.check.alike import alike

    assert alike(program, {}, 2) is not None
