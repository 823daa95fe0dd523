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
ON_TWO = set(
    """
operands_of_any_layout a_sequence_is_copied_at_most_once_and_the_text_says_where
micro_pipeline_all_gather_matmul micro_pipeline_matmul_reduce_scatter graphs_of_the_micro_pipeline_pass
other_numbers_of_rows_make_no_other_program what_hostir_lacks_goes_to_torch_and_says_so_once
wrong_arguments_are_refused_in_torchs_words it_comes_off_again
biases_result_scales_and_dtypes wrong_scales_are_refused
weights_say_in_which_dtype_their_gradients_are gathers_and_scatters_of_a_backward_run_beside_its_matmuls
gradcheck second_derivatives_are_refused operators_are_what_tracers_take_them_for
new_numbers_of_tokens_take_no_more_memory gradients_of_sums_on_all_ranks_need_no_communication
sums_on_all_ranks_go_where_the_caller_says_and_are_what_tracers_take_them_for
a_gathered_tensor_that_nobody_uses_is_not_scattered results_go_where_the_caller_says modes_of_torch
what_is_no_call_is_refused calls_pass_by_the_dispatcher_where_it_has_nothing_to_add torch_compile_breaks_no_graph
one_gather_serves_several_layers what_styles_cannot_do_is_torchs_and_said
calls_that_do_not_fit_are_torchs_and_said modules_compile_copy_and_recompute
""".split()
)  # they are about no number of ranks
CASES = {s: re.findall(r"@case\ndef (\w+)\(", s.read_text(encoding="utf-8")) for s in SCRIPTS}
TIMEOUT = 280
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 60)]


@cache
def done(script: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """The job of all cases of a script."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SEED": str(random.randrange(10**6))}
    names = [name for name in CASES[script] if runs(script, name, ranks)]
    return launch(ranks, str(script), *names, env=env, timeout=TIMEOUT)


def runs(script: Path, name: str, ranks: int) -> bool:
    """Whether a case runs on so many ranks."""
    return ranks == 2 or (script.stem != "overlap_cases" and name not in ON_TWO)


def test_the_cases_of_two_ranks_exist() -> None:
    assert {name for names in CASES.values() for name in names} >= ON_TWO


@pytest.mark.xdist_group("torch operators")
@pytest.mark.parametrize(
    ("script", "name", "ranks"),
    [(s, name, n) for n in (2, 4) for s in SCRIPTS for name in CASES[s] if runs(s, name, n)],
)
def test_on_ranks(script: Path, name: str, ranks: int) -> None:
    job = done(script, ranks)
    passed = {f"PASS {name} {rank}" for rank in range(ranks)}
    assert passed <= set(job.stdout.splitlines()), job.stdout[-2000:] + job.stderr[-6000:]
