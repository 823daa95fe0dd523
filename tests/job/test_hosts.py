"""The identity of a host: ranks share memory if they run under one kernel, in one namespace of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostir.job import hosts
from hostir.job.hosts import host_identity, ranks_by_host, ranks_text
from hostir.job.session import Session


def test_the_name_of_a_host_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_identity()
    monkeypatch.setattr("platform.node", lambda: "another name")
    assert host_identity() == before


def test_a_container_with_processes_of_its_own_is_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    container = tmp_path / "pid"
    container.symlink_to("pid:[1]")
    before = host_identity()
    monkeypatch.setattr(hosts, "PROCESSES", container)
    assert host_identity() == f"{before.split()[0]} pid:[1]"


def test_without_proc_the_name_identifies_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "BOOT", tmp_path / "missing")
    monkeypatch.setattr("platform.node", lambda: "laptop")
    assert host_identity() == "laptop"


def test_a_session_asks_the_other_ranks_once_for_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    job, asked = Session.__new__(Session), []

    def exchange(key: str, mine: str) -> list[str]:
        asked.append(key)
        return [mine, "another", mine]

    monkeypatch.setattr(job, "exchange", exchange, raising=False)
    assert job.hosts() == job.hosts() == ((0, 2), (1,))
    assert asked == ["the hosts"]


def test_ranks_are_grouped_by_host_in_the_order_of_ranks() -> None:
    assert ranks_by_host(["b", "a", "b", "a"]) == ((0, 2), (1, 3))
    assert [ranks_text(ranks) for ranks in ranks_by_host(["a", "b", "a"])] == ["ranks 0, 2", "rank 1"]
