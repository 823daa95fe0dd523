"""Operators, layers and passes for torch on processes with gloo, which run the scripts `*_cases.py`."""

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
NAMES = ("operator", "scaled", "layer", "stack", "module", "style", "overlap", "training", "expert")
SCRIPTS = [HERE / f"{name}_cases.py" for name in NAMES]
ON_FOUR = {  # the other cases do not depend on the number of ranks, and run on two only
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fused_matmul_reduce_scatter_bfloat16_custom_reduce",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "fused_all_gather_scaled_matmul",
    "fused_scaled_matmul_reduce_scatter",
    "rows_may_be_flattened_before_a_scatter",
    "gradients_of_gathers_match_float64",
    "gradients_of_scatters_match_float64",
    "gradients_of_collectives_match_float64",
    "all_reduces_give_equal_bits_on_all_ranks",
    "sums_with_residuals_and_norms_match_separate_functions",
    "gradients_of_sums_with_residuals_and_norms_match_float64",
    "groups_with_different_calls_run_side_by_side",
    "random_stacks_of_layers_are_as_accurate_as_by_dtensor",
    "styles_match_torchs_styles",
    "modules_match_unsharded_layers",
    "replicated_inputs_and_outputs_need_all_reduces",
    "attention_and_gated_mlp_gather_once",
    "layers_in_fp8_multiply_fp8_numbers",
    "modules_can_be_combined_with_fully_shard",
    "a_checkpoint_can_be_loaded_by_another_number_of_ranks",
    "mlps_of_dtensors_are_fused",
    "all_reduces_of_dtensors_are_fused",
    "few_summed_rows_are_fused_with_their_residual_and_norm",
    "several_gathers_of_one_graph_are_fused",
    "the_pass_trains_beside_fully_shard",
    "the_pass_adds_gradients_of_micro_batches",
    "experts_match_a_mixture_on_one_rank_with_gradients",
    "modules_of_experts_train_like_on_one_rank",
    "a_style_shards_modules_of_experts",
    "experts_train_on_a_mesh_of_data_parallel_and_tensor_parallel_ranks",
}
CASES = {s: re.findall(r"@case\ndef (\w+)\(", s.read_text(encoding="utf-8")) for s in SCRIPTS}
TIMEOUT = 280
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 60)]


@cache
def done(script: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """Return the finished job that ran all cases of a script."""
    env = environment(SEED=str(random.randrange(10**6)))
    names = [name for name in CASES[script] if ranks == 2 or name in ON_FOUR]
    return launch(ranks, str(script), *names, env=env, timeout=TIMEOUT)


def test_the_cases_listed_for_four_ranks_exist() -> None:
    assert {name for names in CASES.values() for name in names} >= ON_FOUR


@pytest.mark.xdist_group("torch operators")
@pytest.mark.parametrize(
    ("script", "name", "ranks"),
    [(s, name, n) for n in (2, 4) for s in SCRIPTS for name in CASES[s] if n == 2 or name in ON_FOUR],
)
def test_a_case_passes_on_every_rank(script: Path, name: str, ranks: int) -> None:
    job = done(script, ranks)
    passed = {
        int(rank) for rank in re.findall(rf"PASS {name} (\d)", job.stdout)
    }  # lines of other ranks may be on the same line
    assert passed == set(range(ranks)), job.stdout[-2000:] + job.stderr[-6000:]
