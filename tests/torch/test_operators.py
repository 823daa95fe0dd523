"""torch's operators run by hostir, and its layers, on processes with gloo, which run the scripts of cases here."""

from __future__ import annotations

import random
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.launch import environment, launch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = [HERE / f"{name}_cases.py" for name in ("operator", "scaled", "layer", "stack", "module", "style", "overlap")]
ON_FOUR = {  # the others are about no number of ranks, and run on two
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fused_matmul_reduce_scatter_bfloat16_custom_reduce",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "fused_all_gather_scaled_matmul",
    "fused_scaled_matmul_reduce_scatter",
    "reshape_scaled_matmul_reshape_and_scatter",
    "gradients_of_a_gather",
    "gradients_of_a_scatter",
    "gradients_of_collectives",
    "sums_on_all_ranks",
    "groups_side_by_side",
    "random_stacks_of_layers_are_as_exact_as_those_of_dtensor",
    "styles_are_torchs",
    "modules_compute_what_whole_layers_do",
    "replicated_ends_are_all_reduces",
    "attention_and_gated_mlp_gather_once",
    "layers_in_fp8_multiply_rounded_numbers",
    "fully_shard_and_checkpoints",
    "a_checkpoint_of_some_ranks_is_loaded_by_others",
}
CASES = {s: re.findall(r"@case\ndef (\w+)\(", s.read_text(encoding="utf-8")) for s in SCRIPTS}
TIMEOUT = 280
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 60)]


@cache
def done(script: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """The job of all cases of a script."""
    env = environment(SEED=str(random.randrange(10**6)))
    names = [name for name in CASES[script] if ranks == 2 or name in ON_FOUR]
    return launch(ranks, str(script), *names, env=env, timeout=TIMEOUT)


def test_the_cases_of_four_ranks_exist() -> None:
    assert {name for names in CASES.values() for name in names} >= ON_FOUR


@pytest.mark.xdist_group("torch operators")
@pytest.mark.parametrize(
    ("script", "name", "ranks"),
    [(s, name, n) for n in (2, 4) for s in SCRIPTS for name in CASES[s] if n == 2 or name in ON_FOUR],
)
def test_on_ranks(script: Path, name: str, ranks: int) -> None:
    job = done(script, ranks)
    passed = {int(rank) for rank in re.findall(rf"PASS {name} (\d)", job.stdout)}  # others' lines may run into it
    assert passed == set(range(ranks)), job.stdout[-2000:] + job.stderr[-6000:]
