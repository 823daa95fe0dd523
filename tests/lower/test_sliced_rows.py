"""`pipeline` for ranks on several hosts: without a Stream axis, it cuts the rows of collectives in slices itself."""

from __future__ import annotations

import pytest

import hostir as hi
from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir.host_ops import For
from hostir.ir.program import Program, with_hosts
from hostir.lower.pipeline import MIN_ROWS, ROWS_STAY_WHOLE
from tests.call.whole import run_whole
from tests.judging.mutation import unreported

ROWS = 4 * MIN_ROWS
WAITS = ("delete wait", "delete fork", "delete join")  # other waits of streams only make products start later
FUSIONS = {
    "gathered": """(%x: f32[{m}@didx, 8], %w: f32[8, 16@didx]) -> (%h) {{
  %h: f32[{m}, 16@didx] = matmul %x, %w
}}""",
    "scattered": """(%g: f32[{m}, 16@didx], %w: f32[16@didx, 8]) -> (%y) {{
  %y: f32[{m}@didx, 8] = matmul %g, %w
}}""",
    "reduced": """(%g: f32[{m}, 16@didx], %w: f32[16@didx, 8]) -> (%y) {{
  %y: f32[{m}, 8] = matmul %g, %w
}}""",
    "mlp": """(%x: f32[{m}@didx, 8], %w1: f32[8, 16@didx], %w2: f32[16@didx, 8]) -> (%y) {{
  %h: f32[{m}, 16@didx] = matmul %x, %w1
  %g: f32[{m}, 16@didx] = gelu %h
  %y: f32[{m}@didx, 8] = matmul %g, %w2
}}""",
    "two": """(%x: f32[{m}@didx, 8], %w1: f32[8, 16@didx], %w2: f32[16@didx, 8]) -> (%h, %y) {{
  %h: f32[{m}, 16@didx] = matmul %x, %w1
  %z: f32[8, 16@didx] = permute %w2 (1, 0)
  %y: f32[{m}, 8] = linear %h, %z
}}""",
}


def fusion(name: str, ranks: int, hosts: int, rows: int | str) -> Program:
    m = rows if isinstance(rows, str) else rows * ranks
    body = FUSIONS[name].format(m=m)
    mesh = f"mesh @mesh [didx] = {' '.join(map(str, range(ranks)))} hosts {hosts}"
    return hi.parse(f"hostir 1\n{mesh}\nfusion @{name}{body}\n")


def rounds(program: Program) -> list[int]:
    """Return the numbers of slices of the loops in which collectives run."""
    loops = [s for s in program.body if isinstance(s, For) and any(each.keyword() == "wait" for each in s.body)]
    return [loop.count.value or 0 for loop in loops]


@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (4, 2)])
def test_rows_are_cut_in_slices_and_results_are_right_in_any_order(name: str, ranks: int, hosts: int) -> None:
    source = fusion(name, ranks, hosts, ROWS)
    program = hi.lower(source, "pipeline", 4)
    assert rounds(program) == [4], "one loop, also with two collectives"
    assert program.streams == 4
    assert "not overlapped" not in str(program)
    for seed in range(3):
        inputs = random_inputs(source, {}, seed=seed)
        plain, exact = reference(source, inputs, dtype=None), reference(source, inputs)
        assert all(c.good for c in compare(program, run_whole(program, inputs, seed=seed), plain, exact))


def test_the_number_of_slices_is_at_most_the_number_of_streams_and_divides_the_rows() -> None:
    counts = {
        (rows, streams): rounds(hi.lower(fusion("scattered", 2, 2, rows), "pipeline", streams))
        for rows, streams in ((ROWS, 2), (3 * MIN_ROWS, 4), (2 * MIN_ROWS, 4))
    }
    assert counts == {(ROWS, 2): [2], (3 * MIN_ROWS, 4): [3], (2 * MIN_ROWS, 4): [2]}


@pytest.mark.parametrize("rows", [MIN_ROWS, 2 * MIN_ROWS + 1])
def test_few_or_odd_rows_stay_whole_with_a_comment(rows: int) -> None:
    program = hi.lower(fusion("gathered", 2, 2, rows), "pipeline")
    assert rounds(program) == []
    assert ROWS_STAY_WHOLE in str(program)


def test_rows_that_another_mesh_axis_shards_are_cut_on_each_rank() -> None:
    source = hi.parse("""hostir 1
mesh @mesh [dp, tp] = (0 1) (2 3) hosts 2
fusion @f(%x: f32[1024@dp, 8@tp], %w: f32[8@tp, 16]) -> (%y) {
  %y: f32[1024@dp, 16] = matmul %x, %w
}
""")
    program = hi.lower(source, "pipeline", 4)
    assert rounds(program) == [4]
    inputs = random_inputs(source, {}, seed=1)
    plain, exact = reference(source, inputs, dtype=None), reference(source, inputs)
    assert all(c.good for c in compare(program, run_whole(program, inputs, seed=1), plain, exact))


def test_ranks_of_one_host_keep_their_rows_whole() -> None:
    program = hi.lower(with_hosts(fusion("gathered", 2, 2, ROWS), 1), "pipeline")
    assert rounds(program) == []


@pytest.mark.parametrize("name", FUSIONS)
def test_every_deleted_wait_is_reported(name: str) -> None:
    program = hi.lower(fusion(name, 2, 2, ROWS), "pipeline", 2)
    assert unreported(program, WAITS) == []
