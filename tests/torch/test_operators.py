"""torch's operators run by hostir, and its layers, on processes with gloo, which run the scripts of cases here."""

from __future__ import annotations

import os
import random
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.launch import launch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = [HERE / f"{name}_cases.py" for name in ("operator", "scaled", "layer", "stack", "module", "overlap")]
CASES = {s: re.findall(r"@case\ndef (\w+)\(", s.read_text(encoding="utf-8")) for s in SCRIPTS}
TIMEOUT = 280
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 60)]


@cache
def done(script: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """The job of all cases of a script."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SEED": str(random.randrange(10**6))}
    return launch(ranks, str(script), *CASES[script], env=env, timeout=TIMEOUT)


@pytest.mark.xdist_group("torch operators")
@pytest.mark.parametrize(
    ("script", "name", "ranks"),
    [(s, name, n) for n in (2, 4) for s in SCRIPTS for name in CASES[s] if n == 2 or s.stem != "overlap_cases"],
)
def test_on_ranks(script: Path, name: str, ranks: int) -> None:
    job = done(script, ranks)
    passed = {f"PASS {name} {rank}" for rank in range(ranks)}
    assert passed <= set(job.stdout.splitlines()), job.stdout[-2000:] + job.stderr[-6000:]
