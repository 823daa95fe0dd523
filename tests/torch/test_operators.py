"""torch's operators run by hostir, on real processes with gloo. The ranks run tests/torch/operator_cases.py."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import launch

SCRIPT = Path(__file__).with_name("operator_cases.py")
ROOT = SCRIPT.parents[2]
CASES = re.findall(r"@case\ndef (\w+)\(", SCRIPT.read_text(encoding="utf-8"))
TIMEOUT = 200
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 60)]


@pytest.fixture(scope="module", params=[2, 4])
def job(request: pytest.FixtureRequest) -> tuple[int, subprocess.CompletedProcess[str]]:
    ranks: int = request.param
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SEED": str(random.randrange(10**6))}
    return ranks, launch(ranks, str(SCRIPT), *CASES, env=env, timeout=TIMEOUT)


@pytest.mark.xdist_group("torch operators")
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(name: str, job: tuple[int, subprocess.CompletedProcess[str]]) -> None:
    ranks, done = job
    passed = {f"PASS {name} {rank}" for rank in range(ranks)}
    assert passed <= set(done.stdout.splitlines()), done.stdout[-2000:] + done.stderr[-6000:]
