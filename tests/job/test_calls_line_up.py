"""Ranks must make the same calls in the same order; an error names the calls that differ."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch import environment, launch

SCRIPT = Path(__file__).with_name("misaligned_calls.py")
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(120)]


def ranks(*case: str) -> subprocess.CompletedProcess[str]:
    return launch(2, str(SCRIPT), *case, env=environment(HOSTIR_TIMEOUT="20"), timeout=100)


AG = "rank 0 calls @ag with M=8, rank 1 with M=12|rank 1 calls @ag with M=12, rank 0 with M=8"
ORDER = "rank 0 calls @ag with M=8, rank 1 @sum with M=4|rank 1 calls @sum with M=4, rank 0 @ag with M=8"
ANOTHER = "calls @ag with M=8 by the executor first called in call [01], rank . with M=8 by the executor first called"
MISSED = "rank 0 calls @alone with M=12 after 2 calls of its executor, rank 1 with M=12 after 1 calls"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("different_known_sizes", AG),
        ("different_new_sizes", AG),
        ("a_different_order", ORDER),
        ("a_different_executor", ANOTHER),
        ("a_call_refused_while_the_other_rank_ran_it", MISSED),
        ("wrong_inputs", "rank 1 does not run @ag: input %x has shape|because rank 1 does not: input %x has shape"),
    ],
)
def test_different_calls_are_named_at_once(case: str, message: str) -> None:
    begun = time.monotonic()
    job = ranks(case)
    assert job.returncode
    assert re.search(message, job.stderr), job.stderr
    assert not re.search(r"agreement \d", job.stderr)
    assert time.monotonic() - begun < 18  # before the timeout of 20 seconds


APART = "the calls of the ranks do not line up: "
KNOWN = [("GATHER", "job"), ("GATHER", "group"), ("PUT", "job"), ("PUT", "group")]


@pytest.mark.parametrize(
    ("case", "message", "times"),
    [(("known_sizes", *where, "8", "12"), APART, 4) for where in KNOWN]
    + [
        (("rank_0_has_ended_its_call",), APART, 3),
        (("a_backward_pass_fails_on_one_rank",), APART, 2),
        (("operators_of_one_program",), APART, 2),
        (("a_rank_in_its_call_exits_before_the_other",), APART, 2),
        (("rank_1_refuses_its_input",), "rank 1 does not run @ag: input %x of rank 1 has dtype", 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_every_rank_raises_the_same_message_while_one_is_in_a_call(
    case: tuple[str, ...], message: str, times: int
) -> None:
    job = ranks(*case)
    assert not job.returncode, job.stderr
    messages = re.findall("SAID (.*)", job.stdout)
    assert messages[0].startswith(message)
    assert messages == [messages[0]] * times


@pytest.mark.parametrize(
    "case", ["many_calls", "calls_refused_by_one_rank_are_made_again", "calls_refused_by_one_rank_and_by_all"]
)
def test_results_are_right_if_one_rank_is_several_calls_ahead(case: str) -> None:
    job = ranks(case)
    assert not job.returncode, job.stderr
