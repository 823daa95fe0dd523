"""The example of generation: tokens and logits of several ranks equal those of one rank that has no cache."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import generate
from tests.launch import launch
from tests.pages import environment

SCRIPT = Path(generate.__file__)


def sequence(printed: str) -> list[int]:
    (numbers,) = re.findall(r": \[([\d, ]+)\]", printed)
    return [int(number) for number in numbers.split(",")]


def test_decoding_with_a_cache_gives_the_logits_of_the_complete_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    generate.main(["--compare", "--layers", "1", "--tokens", "6", "--batch", "3"])
    printed = capsys.readouterr().out
    assert "logits off one rank's by up to" in printed
    assert len(sequence(printed)) == 8 + 6


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ["--strategy", "push"]), (2, ["--strategy", "ring"]), (4, ["--dtype", "bf16"])],
    ids=["push", "ring", "bf16"],
)
def test_several_ranks_generate_what_one_rank_does(
    ranks: int, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--compare", "--layers", "1", "--tokens", "4", *options]
    done = launch(ranks, str(SCRIPT), *arguments, env=environment(), timeout=150)
    assert done.returncode == 0, done.stderr
    generate.main(arguments)
    alone = sequence(capsys.readouterr().out)
    assert sequence(done.stdout) == alone or "bf16" in options, "near ties may be rounded to another token"
