"""Jobs of several ranks on GPUs, one GPU a rank; all ranks share one GPU if there are too few (`on_one_gpu.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import environment

TESTS = Path(__file__).parents[1]
JOBS = {
    "collectives": ("gpu/torchrun_gpu.py",),
    "patterns": ("gpu/torchrun_patterns.py", "--seconds", "300"),
    "operators": ("torch/operator_cases.py",),
    "layers": ("torch/layer_cases.py",),
    "memory": ("gpu/stress_memory.py", "--steps", "300"),
    "trials": ("gpu/trials_gpu.py",),
    "stress": ("gpu/stress_onesided.py", "--seconds", "15"),
}


def launch(ranks: int) -> list[str]:
    if torch.cuda.device_count() < ranks:
        return [sys.executable, str(TESTS / "gpu/on_one_gpu.py"), "--ranks", str(ranks)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("job", JOBS)
def test_every_case_of_a_job_passes(job: str, ranks: int) -> None:
    script, *arguments = JOBS[job]
    command = [*launch(ranks), str(TESTS / script), *arguments]
    ran = subprocess.run(
        command, env=environment(DEVICE="cuda"), capture_output=True, text=True, timeout=390, check=False
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]


@pytest.mark.timeout(400)
def test_other_ranks_end_when_one_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "gpu/stress_lost.py"), "--ranks", "2", "--folder", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
