"""Sessions of real processes: ranks connect, with and without the launcher's store, and connect again."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hostir.ir.source import HostIRError
from hostir.job import groups as process_groups
from hostir.job.groups import Groups
from hostir.job.session import Session, _connection, session
from tests.call.test_torchrun import ROOT, SCRIPT, environment
from tests.launch import Job, begin, free_port, launch

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(120)]
BEGIN = "import os, socket, sys, time\nfrom hostir.job.session import session\nRANK = int(os.environ['RANK'])\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": 0}, "unknown device 0"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"timeout": [1]}, r"timeout=\[1\]"),
        ({"timeout": -1}, "timeout=-1"),
    ],
)
def test_options_of_a_session_are_checked_outside_a_job_too(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HostIRError, match=message), session(**options):
        pytest.fail("the session began")


def test_threads_that_ask_for_the_groups_of_messages_at_once_get_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, gate = Groups(0, torch.device("cpu")), threading.Barrier(4)

    def slowly(*args: Any, **options: Any) -> Groups:
        time.sleep(0.1)
        return Groups(*args, **options)

    def ask(_: int) -> Groups:
        gate.wait()
        return groups.messages

    monkeypatch.setattr(process_groups, "Groups", slowly)
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(ask, range(4))
    assert all(other is first for other in others)
    assert groups.messages is first is not groups
    groups.end(done=True)
    assert groups.messages is not first


@contextmanager
def without_a_store(*command: str, ranks: Sequence[int] = (0, 1), timeout: float) -> Iterator[list[Job]]:
    """Start `ranks` of a job of two without a launcher, and so without its store; kill them at the end of the block."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HOSTIR_TIMEOUT": str(timeout)}
    started = []
    try:
        for rank in ranks:
            env = environment(**place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            started.append(begin(*command, env=env))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_ranks_whose_launcher_has_no_store_connect_and_connect_again() -> None:
    with without_a_store(str(SCRIPT), "all_gather", timeout=30) as ranks:
        for rank in ranks:
            stdout, stderr = rank.communicate(timeout=90)
            assert rank.returncode == 0, stderr
            assert stdout.count("PASS all_gather") == 2


def test_the_port_is_free_again_once_the_ranks_are_connected() -> None:
    code = "with session('cpu'):\n    if RANK == 0: socket.create_server(('', int(os.environ['MASTER_PORT']))).close()"
    with without_a_store("-c", BEGIN + code, timeout=30) as ranks:
        for rank in ranks:
            _, stderr = rank.communicate(timeout=90)
            assert rank.returncode == 0, stderr


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with pytest.raises(HostIRError, match=f"did not reach the store of the job within 1 s(.|\n)*at 127.0.0.1:{port}"):
        _connection("127.0.0.1", port, 1.0)


@pytest.mark.parametrize("number", [0, 1])  # rank 0 would hold the store, rank 1 would look for it
def test_a_rank_whose_peer_is_absent_names_the_number_of_ranks_and_the_address(number: int) -> None:
    with without_a_store(str(SCRIPT), "all_gather", ranks=[number], timeout=3) as (rank,):
        _, stderr = rank.communicate(timeout=60)
        assert rank.returncode == 1
        assert f"error: rank {number} did not meet all 2 ranks within 3 s" in stderr, stderr
        assert re.search(r"expected: all of them at 127\.0\.0\.1:\d+", stderr)


@pytest.mark.slow
def test_a_rank_that_is_absent_from_a_later_session_is_named() -> None:
    code = "with session('cpu'): pass\nif RANK == 1: time.sleep(60)\nwith session('cpu'): pass"
    with without_a_store("-c", BEGIN + code, timeout=5) as ranks:
        _, stderr = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 1
        assert "error: rank 0 waited 5 s for rank 1 at the start" in stderr, stderr


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_connect_again(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        BEGIN + "with session('cpu') as job:\n"
        "    job.groups.prepare([(0, 1)])\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)\n"
        "    print('connected again')"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**environment(), "PYTHONWARNINGS": "default"}  # warnings of the launcher are no errors
    ended = subprocess.run(
        [*command, "--max-restarts", "1", str(script)],
        **{"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 100, "check": False},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("connected again") == 2


MANY = """
import gc
import torch
from hostir.ir.source import HostIRError
from hostir.call.executor import Executor
from tests.call.torchrun_programs import ring

def resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

with session("cpu") as job:
    assert job.watchdog.late == job.groups.late, "the watchdog looks for collectives that do not end"
    counts = []
    for _ in range(20):
        mine = torch.randn(1, 8).bfloat16()
        (parts,) = Executor(ring("0 1"))(mine)
        assert torch.equal(parts[0], mine)
        counts.append(resources())
    deadline = time.monotonic() + 10
    while counts[-1] > counts[0] and time.monotonic() < deadline:
        time.sleep(0.01)  # the threads of an executor end when it has gone
        counts.append(resources())
assert counts[-1] <= counts[0], f"descriptors and threads: {counts}"

with session("cpu"):
    late = Executor(ring("0 1"))
    late(mine)
for call in (late, late.places):
    try:
        call(mine)
    except HostIRError as refusal:
        assert "is called after the end of its session" in str(refusal), refusal
    else:
        raise AssertionError("the call ran")
print("resources are shared")
"""


def test_executors_of_programs_with_messages_share_threads_and_connections_until_the_session_ends(
    tmp_path: Path,
) -> None:
    script = tmp_path / "many.py"
    script.write_text(BEGIN + MANY)
    ended = launch(2, str(script), env=environment(), timeout=100, finalize=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("resources are shared") == 2


def test_an_exchange_with_a_slightly_later_rank_sleeps_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(dict[str, bytes]):
        """A store that gets rank 1's part of an exchange at the fourth check."""

        checks = 0

        def set(self, key: str, value: str) -> None:
            self[key] = value.encode()

        def check(self, keys: list[str]) -> bool:
            self.checks += 1
            if self.checks == 4:
                self["what/1/1"] = b"theirs"
            return self.keys() >= set(keys)

    rank, pauses = object.__new__(Session), list[float]()
    rank.store, rank.exchanges, rank.rank, rank.size, rank.timeout = Store(), Counter(), 0, 2, 30.0
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert rank.exchange("what", "mine") == ["mine", "theirs"]
    assert sum(pauses) < 1e-3
