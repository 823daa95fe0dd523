"""The identity of a host: ranks share memory if they run under one kernel, in one namespace of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostir.choice.platforms import platform_here
from hostir.job import hosts
from hostir.job.hosts import host_identity, ranks_by_host, ranks_text


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


def test_the_choice_uses_the_same_identity_as_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = iter("aab")
    monkeypatch.setattr("hostir.choice.platforms.host_identity", lambda: next(identities))
    assert platform_here("gloo", 3).link == "several hosts"


def test_ranks_are_grouped_by_host_in_the_order_of_ranks() -> None:
    assert ranks_by_host(["b", "a", "b", "a"]) == ((0, 2), (1, 3))
    assert [ranks_text(ranks) for ranks in ranks_by_host(["a", "b", "a"])] == ["ranks 0, 2", "rank 1"]
