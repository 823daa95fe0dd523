"""Jobs on two hosts: what crosses hosts and what must not, and what is said of a host that is lost.

The hosts are namespaces of this machine (tests/two_hosts.py). The ranks run tests/job/host_cases.py.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests import two_hosts
from tests.call.test_torchrun import environment, passed
from tests.conftest import NO_HOSTS

SCRIPT = Path(__file__).with_name("host_cases.py")
HEALTHY = [
    "every_pattern_is_right",
    "the_ranks_of_a_host_are_known",
    "memory_is_not_shared_across_hosts",
    "auto_takes_a_strategy_that_crosses_hosts",
    "other_hosts_than_stated_are_reported_once",
]
pytestmark = [pytest.mark.torchrun, pytest.mark.two_hosts, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if reason := two_hosts.why_not():
        pytest.skip(f"{NO_HOSTS}: {reason}")


def job(ranks: int, *cases: str, **env: str) -> subprocess.CompletedProcess[str]:
    return two_hosts.run(ranks, str(SCRIPT), *cases, env=environment(**env), timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_are_right_on_two_hosts_and_share_memory_only_inside_them(ranks: int) -> None:
    result = job(ranks, *HEALTHY)
    assert result.returncode == 0, result.stderr
    assert passed(result.stdout) == {(name, rank) for name in HEALTHY for rank in range(2 * ranks)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a_host_dies", r"rank [23] died: its process has ended \(on host second\)"),
        ("the_link_goes_down", r"rank [23] died: its host does not answer .* \(on host second\)"),
    ],
)
def test_a_lost_host_ends_every_rank_and_is_named(case: str, words: str) -> None:
    began = time.monotonic()
    result = job(2, case, HOSTIR_TIMEOUT="40", HOSTIR_KEEPALIVE="5")
    assert result.returncode != 0
    assert passed(result.stdout) == set()
    assert time.monotonic() - began < 100
    told = re.split(r"(?=error: rank \d)", result.stderr)  # by the watchdog, or in the traceback of a call
    for rank in (0, 1):
        assert any(text.startswith(f"error: rank {rank}") and re.search(words, text) for text in told), result.stderr


def test_all_processes_of_the_hosts_end_with_the_job() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        two_hosts.run(1, "-c", "import time; time.sleep(600)  # until the machine ends", env=environment(), timeout=3)
    time.sleep(0.5)
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not any(b"until the machine ends" in command for command in commands)
