"""Programs on real gloo processes, one thread for each stream. The ranks run tests/call/torchrun_cases.py."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import Job, begin, free_port, launch
from tests.launch import environment as launched_environment

SCRIPT = Path(__file__).with_name("torchrun_cases.py")
ROOT = SCRIPT.parent.parent.parent
TWO = [
    "all_gather",
    "all_reduce_in_place",
    "reduce_scatter",
    "implementations_compute_what_plain_collectives_compute",
    "all_to_all",
    "every_pattern_in_f64",
    "fp8_products_by_every_strategy",
    "started_and_plain_calls_in_one_order",
    "messages",
    "many_calls_back_to_back",
    "one_sided_programs",
    "copies_and_a_matmul_that_waits",
    "blocks_with_completion_flags",
    "blocks_without_rows_between_blocks_with_rows",
    "rows_scattered_by_every_strategy",
    "calls_alternate_between_shapes_and_executors",
    "sizes_below_an_earlier_size_need_no_rendezvous",
    "growing_sizes_get_exactly_what_they_need_if_memory_is_short",
    "memory_of_earlier_sizes_is_freed_and_allocated_again",
    "the_latest_sizes_keep_their_memory",
    "many_executors_share_memory",
    "an_exchange_under_the_same_key_is_a_new_one",
    "log_messages_begin_with_the_rank",
    "later_calls_do_not_overwrite_a_symmetric_output",
    "results_are_written_into_out",
    "inputs_of_any_strides",
    "calls_without_rows_between_calls_with_rows",
    "racy_programs_are_refused",
    "ranks_with_different_symmetric_buffers_are_refused",
    "different_programs_are_refused",
    "different_sizes_are_refused",
    "new_sizes_are_compared_even_if_calls_are_not",
    "wrong_inputs_are_refused_everywhere",
    "a_program_for_more_ranks_is_refused",
]
FOUR = [
    "all_gather",
    "all_reduce_in_place",
    "reduce_scatter",
    "implementations_compute_what_plain_collectives_compute",
    "all_to_all",
    "devices_in_another_order",
    "two_mesh_axes",
    "transfers_between_meshes",
    "messages",
    "one_sided_programs",
    "copies_and_a_matmul_that_waits",
    "blocks_with_completion_flags",
    "blocks_within_teams_and_on_some_ranks",
    "blocks_without_rows_between_blocks_with_rows",
    "rows_scattered_by_every_strategy",
    "all_ranks_hold_the_same_bits_of_a_sum_under_random_delays",
    "calls_alternate_between_shapes_and_executors",
    "memory_of_earlier_sizes_is_freed_and_allocated_again",
    "the_latest_sizes_keep_their_memory",
    "many_executors_share_memory",
    "each_shape_gets_a_plan",
    "unsharded_tensors",
    "calls_without_rows_between_calls_with_rows",
    "a_trace_of_all_streams",
    "different_programs_are_refused",
]
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(120)]


def environment(**more: str) -> dict[str, str]:
    return launched_environment(**{"PYTHONWARNINGS": "error", **more})


def torchrun(case: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**environment(), "PYTHONWARNINGS": "default"}  # warnings of the launcher are no errors
    return subprocess.run(
        [*command, str(SCRIPT), case], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def started(rank: int, ranks: int, case: str, port: int, timeout: float) -> Job:
    """Start one rank without a launcher, because a launcher would end the other ranks itself."""
    job = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HOSTIR_TIMEOUT": str(timeout)}
    return begin(str(SCRIPT), case, env=environment(**job, **address))


def passed(output: str) -> set[tuple[str, int]]:
    return {(name, int(rank)) for name, rank in re.findall(r"PASS (\w+) (\d+)", output)}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_programs_give_the_unsharded_result_and_bad_calls_are_refused(ranks: int, cases: list[str]) -> None:
    result = launch(ranks, str(SCRIPT), *cases, env=environment(), timeout=100, finalize=True)
    assert result.returncode == 0, result.stderr
    assert passed(result.stdout) == {(name, rank) for name in cases for rank in range(ranks)}
    for name in ("all_gather", "copies_and_a_matmul_that_waits"):  # the second session repeats these
        assert result.stdout.count(f"PASS {name} ") == 2 * ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_work_after_a_call_that_failed_midway(ranks: int) -> None:
    cases = [
        "calls_work_after_a_call_that_failed_midway_on_one_rank",
        "ranks_that_meet_for_the_next_call_learn_of_a_failed_call",
    ]
    result = launch(ranks, str(SCRIPT), *cases, env=environment(), timeout=100)
    assert result.returncode == 0, result.stderr
    assert passed(result.stdout) == {(case, rank) for case in cases for rank in range(ranks)}


KILLED = {
    "a_peer_is_killed_before_its_signal": r"'wait_signal %there\[0\] >= 1', which waits for epoch 1 of call 3 of "
    r"flag %there\[0\]: the flag stands at epoch 1 of call 2",
    "a_peer_is_killed_before_its_block": r"'sum %sent axis 0 -> %c ready %there >= 1 from %r own %mine', which waits "
    r"for epoch 1 of call 3 of flag %there\[2\], for block 0 of source 1: the flag stands at epoch 1 of call 2",
    "a_peer_is_killed_before_its_barrier": r"'barrier of %x over didx', which waits for rank 1 in call 3",
}


@pytest.fixture(scope="module")
def absent() -> Iterator[dict[str, list[Job]]]:
    """Jobs without a launcher. Their ranks mostly wait, so they run side by side, and beside the first tests."""
    timeouts = {"a_rank_freezes": 6, "a_rank_makes_no_further_call": 12, **dict.fromkeys(KILLED, 6)}
    ports = {case: free_port() for case in timeouts}
    jobs = {case: [started(rank, 2, case, port, timeouts[case]) for rank in range(2)] for case, port in ports.items()}
    yield jobs
    for rank in (rank for ranks in jobs.values() for rank in ranks):
        rank.kill()
        rank.communicate()


@pytest.mark.alone
def test_a_statement_that_raises_ends_every_rank_and_all_name_the_statement(absent: dict[str, list[Job]]) -> None:
    begin = time.monotonic()
    result = torchrun("a_statement_raises")
    assert result.returncode != 0
    assert time.monotonic() - begin < 40
    statement = r"rank 1, 'matmul %g_i, %b -> %c_i' in round \d: RuntimeError: the floating point unit is on strike"
    assert re.search(rf"HostIRError: <text>:\d+:\d+: error: {statement}", result.stderr), result.stderr
    # The other rank raises when it learns of the failure, or when it finds the connection closed and reads the cause.
    reported = r"a call ended midway on another rank, and what rank 0 has issued may wait for its rest: "
    ended = r"error: rank 0 is ended at '.*' in round \d: "  # by the launcher
    assert re.search(rf"({reported}|{ended}|note: first, ){statement}", result.stderr)


@pytest.mark.alone
def test_a_killed_rank_ends_the_others_and_each_names_its_statement(absent: dict[str, list[Job]]) -> None:
    begin = time.monotonic()
    result = torchrun("a_rank_is_killed")
    assert result.returncode != 0
    assert time.monotonic() - begin < 40
    # Either the launcher's signal comes first, or gloo finds the connection closed.
    assert re.search(r"error: rank 0(,| is ended at) '%h = allgather .*' in round \d", result.stderr), result.stderr


@pytest.mark.alone
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("a_rank_freezes", r"it has stood still for \d+ s; HOSTIR_TIMEOUT sets how long it may"),  # it may continue
        ("a_rank_makes_no_further_call", r"it has stood still for \d+ s; HOSTIR_TIMEOUT sets how long it may"),
    ],
)
def test_an_absent_rank_ends_the_others_without_a_launcher(case: str, cause: str, absent: dict[str, list[Job]]) -> None:
    ranks = absent[case]
    _, stderr = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 1
    assert re.search(rf"error: rank 0 is ended at '%h = allgather .*' in round \d: {cause}", stderr), stderr
    if case == "a_rank_makes_no_further_call":
        _, stderr = ranks[1].communicate(timeout=30)
        assert ranks[1].returncode == 1
        assert re.search(r"error: rank 1 is ended between runs: rank 0, '%h = allgather", stderr), stderr


@pytest.mark.alone
@pytest.mark.parametrize("case", KILLED)
def test_killed_peers_end_those_that_wait_for_their_flags_without_a_launcher(
    case: str, absent: dict[str, list[Job]]
) -> None:
    rank, _ = absent[case]
    _, stderr = rank.communicate(timeout=60)
    assert rank.returncode == 1
    assert re.search(rf"error: rank 0 is ended at {KILLED[case]}: rank 1 died", stderr), stderr


@pytest.mark.slow
def test_a_teardown_that_never_ends_does_not_change_the_exit_code() -> None:
    code = (
        "import sys, threading, torch.distributed as dist\n"
        "from hostir.job import groups, session\n"
        "groups.PARTING = 0.2\n"
        "dist.destroy_process_group = threading.Event().wait\n"
        "with session.session('cpu'):\n    pass\n"
        "sys.exit(3)\n"
    )
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env = environment(**job, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ended = launch(0, "-c", code, env=env, timeout=60, finalize=True)
    assert ended.returncode == 3, ended.stderr
    assert "could not be destroyed" in ended.stderr
