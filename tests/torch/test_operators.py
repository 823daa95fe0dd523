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
    "experts_match_a_mixture_on_one_rank_with_gradients",
    "modules_of_experts_train_like_on_one_rank",
    "a_style_shards_modules_of_experts",
    "experts_train_on_a_mesh_of_data_parallel_and_tensor_parallel_ranks",
}
QUICK = {  # `make test` runs these cases, on two ranks
    "calls_with_known_layouts_are_repeated_from_memory",
    "fused_matmul_reduce_scatter",
    "operands_have_any_layout",
    "low_contention_all_gather",
    "one_shot_and_two_shot_all_reduces",
    "unsupported_calls_run_in_torch_and_warn_once",
    "uninstalling_restores_torchs_operators",
    "fused_scaled_matmul_reduce_scatter",
    "wrong_scales_are_refused",
    "gradients_of_gathers_match_float64",
    "second_derivatives_are_refused",
    "results_are_written_to_out",
    "remembered_calls_take_few_calls_of_functions",
    "modules_match_unsharded_layers",
    "layers_in_fp8_multiply_fp8_numbers",
    "compiled_layers_in_fp8_quantize_by_aten_and_compute_what_eager_layers_do",
    "a_first_step_warns_once_at_the_line_of_the_user",
    "errors_in_plans_name_the_line_of_the_user_and_the_module",
    "mlps_of_dtensors_are_fused",
    "unfused_collectives_are_reported_with_a_reason",
    "layers_train_inside_checkpoints",
    "modules_of_experts_train_like_on_one_rank",
}
CASES = {s: re.findall(r"@case\ndef (\w+)\(", s.read_text(encoding="utf-8")) for s in SCRIPTS}
TIMEOUT = 280
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(TIMEOUT + 60)]


def names_of(script: Path, ranks: int, quick: bool) -> list[str]:
    """Return the cases that one job runs."""
    if quick:
        return [name for name in CASES[script] if name in QUICK] if ranks == 2 else []
    return [name for name in CASES[script] if (name not in QUICK if ranks == 2 else name in ON_FOUR)]


@cache
def done(script: Path, ranks: int, quick: bool) -> subprocess.CompletedProcess[str]:
    """Return the finished job that ran some cases of a script."""
    env = environment(SEED=str(random.randrange(10**6)))
    return launch(ranks, str(script), *names_of(script, ranks, quick), env=env, timeout=TIMEOUT)


def test_the_listed_cases_exist() -> None:
    assert {name for names in CASES.values() for name in names} >= ON_FOUR | QUICK


@pytest.mark.xdist_group("torch operators")
@pytest.mark.parametrize(
    ("script", "name", "ranks", "quick"),
    [
        pytest.param(script, name, ranks, quick, marks=() if quick else pytest.mark.slow)
        for ranks in (2, 4)
        for script in SCRIPTS
        for quick in (True, False)
        for name in names_of(script, ranks, quick)
    ],
)
def test_a_case_passes_on_every_rank(script: Path, name: str, ranks: int, quick: bool) -> None:
    job = done(script, ranks, quick)
    passed = {
        int(rank) for rank in re.findall(rf"PASS {name} (\d)", job.stdout)
    }  # lines of other ranks may be on the same line
    assert passed == set(range(ranks)), job.stdout[-2000:] + job.stderr[-6000:]
