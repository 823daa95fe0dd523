"""Programs in which two ranks emulate more ranks; measuring them needs GPUs."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from benchmarks.arrivals import WAYS, Way, parse_options, program_text, report
from benchmarks.scores import Row
from hostir.call.local import run_local

ROW = Row("8B", 32, 6, 8)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_rank_multiplies_its_own_rows_and_the_peers_rows_in_all_other_places(way: Way, ranks: int) -> None:
    program = hi.parse(program_text(ROW, ranks, way))
    assert hi.check(program, calls=2) == []
    m = ROW.M // ranks
    a, b = torch.randn(1, 2, m, ROW.K).bfloat16(), torch.randn(ROW.K, ROW.N).bfloat16()
    (outputs,) = run_local(program, [a, b], seed=ranks)
    for rank, c in enumerate(outputs):
        places = [a[0, rank if place == rank else 1 - rank] for place in range(ranks)]
        assert c is not None
        torch.testing.assert_close(c[0].float(), torch.stack(places).float() @ b.float(), rtol=0.02, atol=0.02)


def test_a_table_has_the_required_score_on_8_ranks_only() -> None:
    times = {"gemm": 44.0, "copies": 70.0, **{way.name: 100.0 for way in WAYS}}
    row = {"model": "8B", "M": 2048, "N": 1792, "K": 4096, "times": times, "score": 0.7}
    row |= {"best": WAYS[0].name, "host_us": {way.name: 30.0 for way in WAYS[1:]} | {WAYS[0].name: 20.0}}
    eight, four = (report([{**row, "ranks": ranks}]).splitlines()[-1] for ranks in (8, 4))
    assert eight.endswith("| 20 | 0.70 | 0.68 |")
    assert four.endswith("| 20 | 0.70 | - |")


def test_rows_and_ranks_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options(["--rows", "8B:2048", "--ranks", "4"])
    assert (options.ranks, [str(row) for row in options.rows]) == (4, ["8B M=2048"])
    with pytest.raises(SystemExit):
        parse_options(["--rows", "9B"])
    assert "--rows" in capsys.readouterr().err
