"""Links carry events between ranks: all ranks get them in one order, learn of deaths at once, and refuse strangers."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hostir.job.links import Links, RankEvent


class Store:
    """A key-value store in this process."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def get(self, key: str) -> bytes:
        return self.held[key].encode()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ranks(store: Store) -> Iterator[list[Links]]:
    alarm, end = os.pipe()
    links = [Links(store, rank, 3, 10.0) for rank in range(3)]
    for each in links:
        each.serve(0.0, alarm)
    yield links
    for each in links:
        each.close()
    os.close(alarm)
    os.close(end)


def until(links: list[Links], true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        for each in links:
            each.pump()
    assert true(), [each.events for each in links]


def test_all_ranks_receive_the_same_events_in_the_same_order(ranks: list[Links]) -> None:
    for turn in range(20):
        ranks[turn % 3].announce("failed", str(turn))
    until(ranks, lambda: all(len(each.events) == 20 for each in ranks))
    assert ranks[0].events == ranks[1].events == ranks[2].events


def test_a_rank_waits_for_each_of_its_equal_events(ranks: list[Links]) -> None:
    def forward() -> None:
        while len(ranks[0].events) < 5:
            time.sleep(1e-3)
            ranks[0].pump()

    forwarding = threading.Thread(target=forward, daemon=True)
    forwarding.start()
    for number in range(1, 6):
        ranks[1].announce("failed", "why")
        ranks[1].await_own()
        assert ranks[1].events.count(RankEvent("failed", 1, "why")) == number
    forwarding.join()


def test_a_rank_whose_connection_ends_has_died_unless_it_was_done(ranks: list[Links]) -> None:
    ranks[1].announce("done")
    ranks[1].close()
    ranks[2].close()
    until(ranks[:1], lambda: len(ranks[0].events) == 2)
    assert set(ranks[0].events) == {RankEvent("done", 1), RankEvent("died", 2, "its process has ended")}


def test_a_rank_that_has_died_is_named_with_its_host_if_there_are_several(ranks: list[Links]) -> None:
    until(ranks, lambda: any(link.rank == 2 for link in ranks[0].links))
    next(link for link in ranks[0].links if link.rank == 2).host = "second"
    ranks[2].close()
    until(ranks[:2], lambda: all(each.events for each in ranks[:2]))
    assert ranks[1].events == [RankEvent("died", 2, "its process has ended (on host second)")]


def test_all_ranks_notice_the_death_of_rank_0_and_receive_its_last_event(ranks: list[Links]) -> None:
    ranks[0].pump()
    ranks[0].announce("failed", "why")
    ranks[0].close()
    until(ranks[1:], lambda: all(len(each.events) == 2 for each in ranks[1:]))
    for each in ranks[1:]:
        assert each.events == [RankEvent("failed", 0, "why"), RankEvent("died", 0, "its process has ended")]
    ranks[1].announce("back")
    assert ranks[1].events[-1] == RankEvent("back", 1), "after the death of rank 0, a rank receives its own events"


def test_a_rank_that_connects_later_receives_earlier_events(store: Store) -> None:
    alarm, end = os.pipe()
    first, last = Links(store, 0, 2, 10.0), Links(store, 1, 2, 10.0)
    first.announce("failed", "early")
    last.announce("failed", "before it was linked")
    last.serve(0.0, alarm)
    until([first, last], lambda: len(last.events) == 2)
    assert first.events == last.events
    for one in (first, last):
        one.close()
    os.close(alarm)
    os.close(end)


def test_a_rank_waits_for_its_connection_but_not_after_an_attempt_has_failed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm, end = os.pipe()
    first, last = Links(store, 0, 2, 10.0), Links(store, 1, 2, 10.0)
    late = threading.Timer(0.2, last.serve, (0.0, alarm))
    late.start()
    last.await_link()
    assert last.linked
    late.join()
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = server.getsockname()[1]
    store.set("links", json.dumps([["127.0.0.1"], unused, "token", "host"]))
    lost = Links(store, 1, 2, 10.0)
    lost.serve(0.0, alarm)
    begin = time.monotonic()
    lost.await_link()
    assert not lost.linked
    slow = Links(Store(), 1, 2, 10.0)  # no attempt has failed yet, as nobody knows the address
    monkeypatch.setattr("hostir.job.links.PATIENCE", 0.2)
    slow.await_link()
    assert 0.2 <= time.monotonic() - begin < 1
    begin = time.monotonic()
    slow.await_link()
    assert time.monotonic() - begin < 0.1, "it waits once"
    for one in (first, last, lost, slow):
        one.close()
    os.close(alarm)
    os.close(end)


def test_a_report_for_all_waits_for_a_rank_that_connects_late(store: Store) -> None:
    """Without the wait, this rank could raise and end before the other has connected, and the other would hang."""
    alarm, end = os.pipe()
    first, last = Links(store, 0, 2, 10.0), Links(store, 1, 2, 10.0)
    late = threading.Timer(0.2, last.serve, (0.0, alarm))
    late.start()
    first.announce("misaligned", "why")
    first.await_all()
    assert [link.rank for link in first.links] == [1]
    until([first, last], lambda: last.events == [RankEvent("misaligned", 0, "why")])
    late.join()
    for one in (first, last):
        one.close()
    os.close(alarm)
    os.close(end)


def test_the_operating_system_probes_connections_for_the_timeout(ranks: list[Links]) -> None:
    ranks[0].pump()
    for link in (*ranks[0].links, *ranks[1].links):
        assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        idle, between, probes = (
            link.socket.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + between * probes == 10


def test_a_rank_that_cannot_connect_says_so_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hostir.job.links.TRYING", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    store.set("links", json.dumps([["127.0.0.1"], port, "token", "host"]))
    lost = Links(store, 1, 2, 10.0)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        lost.connect()
        time.sleep(0.01)
    stderr = capsys.readouterr().err
    assert stderr.count("Rank 1 cannot connect to rank 0 at 127.0.0.1") == 1


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\n\n", b'["guess", 1]\n', b"7\n", b"\xff\n", b"", b"[]\n{}\n"])
def test_connections_without_the_token_are_closed(greeting: bytes, store: Store, ranks: list[Links]) -> None:
    _, port, *_ = json.loads(store.get("links"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            ranks[0].pump()
        assert stranger.recv(10) == b""
    ranks[2].announce("back")
    until(ranks, lambda: all(each.events == [RankEvent("back", 2)] for each in ranks))
