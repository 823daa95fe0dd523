"""Connections between watchdogs: ranks notice that one of them has ended, and report events to all others.

Rank 0 listens, and every other rank connects to it. The kernel keeps a connection open as long as the process lives,
busy, stopped or holding the GIL as it may be, and closes it however the process ends. A host that is lost with its
processes leaves the connection open; then the kernel's own probes (TCP keepalive), which need no process to answer
them, go unanswered for HOSTIR_KEEPALIVE seconds.

A rank sends its events to rank 0, which puts the events of all ranks in one order and sends them to everyone, the
sender included. So all ranks see the same events in the same order, sooner or later.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hostir.ir.source import Diagnostic, HostIRError

LONGEST = 4000  # characters of an event's words
ALIKE = "the same calls, in the same order, on every rank"
PAGE = "docs/calls.md says what the ranks of a job must do alike"
PATIENCE = 3.0  # seconds that a rank waits for rank 0 to return its event
CONNECTING = 2.0  # seconds that an attempt may take
TRYING = 10.0  # seconds of failed attempts after which a warning is printed
PAUSE = 0.02  # seconds between two attempts, or polls


class MisalignedError(HostIRError):
    """Raised on every rank once one may run a call that another does not make: no later call could line up."""

    def __init__(self, why: str, *notes: str, hint: str = PAGE) -> None:
        super().__init__(Diagnostic(why, None, ALIKE, hint, tuple((None, note) for note in notes)))


class RankEvent(NamedTuple):
    """An event of a rank.

    It `failed`, `abandoned` a call, came `back` to calls, is `done`, `died`, or found calls `misaligned`: a rank may
    run one that another does not make.

    Fields:
        words: details.
        renewals: for `abandoned`, how often the ranks had renewed their shared state before.
    """

    what: str
    rank: int
    words: str = ""
    renewals: int = 0


class Link:
    """One connection, and the received part of its next line."""

    def __init__(self, to: socket.socket, keepalive: float) -> None:
        self.socket = to
        self.rank = -1  # until it has sent its rank
        self.rest = b""
        to.setblocking(False)
        _keep_alive(to, keepalive)

    def send(self, *lines: Sequence[object]) -> None:
        with contextlib.suppress(OSError):  # who has ended is noticed where lines are received
            self.socket.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())

    def receive(self) -> tuple[list[bytes], str]:
        """Return the lines received so far, and the reason why no more follow; empty while the connection is open."""
        ended = ""
        try:
            while True:
                got = self.socket.recv(1 << 16)
                if not got:
                    ended = "its process has ended"
                    break
                self.rest += got
        except BlockingIOError:
            pass
        except ConnectionResetError:
            ended = "its process has ended"
        except OSError as problem:
            ended = f"its host does not answer ({problem.strerror or problem}); HOSTIR_KEEPALIVE sets how long it may"
        *lines, self.rest = self.rest.split(b"\n")
        return lines, ended


class Links:
    """One rank's connections.

    Args:
        store: a store of the run, which has rank 0's address.
        rank, size: this rank and how many there are.
        keepalive: seconds after which a host that does not answer counts as lost.

    Fields:
        events: all events so far, in the same order on every rank.
    """

    def __init__(self, store: Any, rank: int, size: int, keepalive: float) -> None:
        self.store, self.rank, self.size, self.keepalive = store, rank, size, keepalive
        self.events: list[RankEvent] = []
        self.unsent: list[RankEvent] = []  # until this rank is linked
        self.links: list[Link] = []
        self.linked = size == 1
        self.vain = 0.0  # when the first attempt to connect failed
        self.listener: socket.socket | None = None
        self.changing = threading.RLock()  # held by the rank's own thread or its watchdog's
        self.token = secrets.token_hex()
        self.poller = select.poll()
        if size > 1 and rank == 0:
            self.listen(size)

    def listen(self, size: int) -> None:
        self.listener = _listener(size)
        self.listener.setblocking(False)
        self.poller.register(self.listener, select.POLLIN)
        first = os.environ.get("MASTER_ADDR") if os.environ.get("RANK", "0") == "0" else None  # else another host's
        hosts = [host for host in (first, socket.gethostname()) if host]
        self.store.set("links", json.dumps([hosts, self.listener.getsockname()[1], self.token]))
        self.linked = True

    def serve(self, seconds: float, alarm: int) -> None:
        """Wait up to `seconds` for an event, or until `alarm` is readable."""
        if not self.linked:
            self.connect()
            seconds = min(seconds, PAUSE) if not self.linked else seconds
        self.poller.register(alarm, select.POLLIN)
        self.poller.poll(1000 * seconds)
        self.pump()

    def pump(self) -> None:
        """Process all that was received so far."""
        with self.changing:
            if self.listener is not None:
                self.accept(self.listener)
            for link in list(self.links):
                lines, ended = link.receive()
                try:
                    for line in lines:
                        self.take(link, json.loads(line))
                except (ValueError, TypeError, IndexError):
                    self.drop(link, "")  # not one of our ranks
                if ended:
                    self.drop(link, ended)

    def announce(self, what: str, words: str = "", renewals: int = 0) -> RankEvent:
        """Send all ranks an event of this one."""
        event = RankEvent(what, self.rank, words[:LONGEST], renewals)
        self.pump()
        with self.changing:
            if self.rank == 0 or (self.linked and not self.links):  # without rank 0 only this one hears of it
                self.spread(event)
            elif self.linked:
                self.links[0].send(event)
            else:
                self.unsent.append(event)
        return event

    def await_all(self, event: RankEvent) -> None:
        """Wait briefly until every rank is connected and can get this event, and this one has received it."""
        deadline = time.monotonic() + PATIENCE
        while not self.complete() and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self.pump()
        self.await_own(event)

    def complete(self) -> bool:
        """Return True if this rank is connected to rank 0; on rank 0, if all others are connected to it."""
        with self.changing:
            return self.linked and (self.rank > 0 or sum(link.rank >= 0 for link in self.links) >= self.size - 1)

    def await_own(self, event: RankEvent) -> None:
        """Wait briefly until this rank has received its own event, and so all that came before."""
        deadline = time.monotonic() + PATIENCE
        while self.linked and event not in self.events and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self.pump()

    def close(self) -> None:
        """Close this process's copies of the connections; those of the process it was forked from stay open."""
        for each in (self.listener, *(link.socket for link in self.links)):
            if each is not None:
                each.close()
        self.listener, self.links, self.store = None, [], None

    def connect(self) -> None:
        """Connect to rank 0, if it can be reached yet."""
        try:
            if not self.store.check(["links"]):
                return
            hosts, port, token = json.loads(self.store.get("links"))
        except RuntimeError:
            return  # the store has gone: whoever waits for it gets an error
        for host in hosts:
            with contextlib.suppress(OSError):
                link = Link(socket.create_connection((host, port), CONNECTING), self.keepalive)
                with self.changing:
                    link.send((token, self.rank), *self.unsent)
                    self.unsent.clear()
                    self.add(link, 0)
                    self.linked = True
                return
        now = time.monotonic()
        self.vain = self.vain or now
        if 0 < self.vain < now - TRYING:
            self.vain = math.inf
            print(
                f"warning: Rank {self.rank} cannot connect to rank 0 at {' or '.join(hosts)}, port {port}.\n"
                "  hint: open that port; until then the ranks notice that one has ended only when another has stood "
                "still for HOSTIR_TIMEOUT seconds",
                file=sys.stderr,
                flush=True,
            )

    def accept(self, listener: socket.socket) -> None:
        """Accept new connections. Their first line will say which rank it is."""
        with contextlib.suppress(OSError):
            while True:
                self.add(Link(listener.accept()[0], self.keepalive), -1)

    def add(self, link: Link, rank: int) -> None:
        link.rank = rank
        self.links.append(link)
        self.poller.register(link.socket, select.POLLIN)

    def take(self, link: Link, line: list[Any]) -> None:
        """Process a line: rank 0 receives each rank's greeting and events, the others receive what it forwards."""
        if self.rank:
            self.events.append(RankEvent(*line))
        elif link.rank >= 0:
            self.spread(RankEvent(*line))
        elif line[0] == self.token:  # which strangers do not have
            link.rank = int(line[1])
            link.send(*self.events)
        else:
            raise ValueError(line)

    def drop(self, link: Link, why: str) -> None:
        if link not in self.links:
            return
        self.links.remove(link)
        self.poller.unregister(link.socket)
        link.socket.close()
        if link.rank >= 0 and RankEvent("done", link.rank) not in self.events:
            self.spread(RankEvent("died", link.rank, why))

    def spread(self, event: RankEvent) -> None:
        """Record an event; rank 0 also sends it to all others."""
        self.events.append(event)
        if self.rank == 0:
            for link in self.links:
                if link.rank >= 0:
                    link.send(event)


def _listener(size: int) -> socket.socket:
    with contextlib.suppress(OSError):
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=size, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=size)


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Make the kernel probe the peer, and close the connection after so many seconds without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 4
    wait = max(1, round(seconds / (probes + 1)))
    for name, value in {
        "TCP_KEEPIDLE": wait,
        "TCP_KEEPINTVL": wait,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": round(1000 * seconds),
    }.items():
        if hasattr(socket, name):  # macOS has some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class AlikeError(HostIRError):
    """Raised on every rank, in the same call, once the ranks have met and one of them cannot go on: no rank waits."""


def headline(failure: BaseException) -> str:
    """Return the first line of an error, for messages of other ranks; of a foreign one, its type and words."""
    if not isinstance(failure, HostIRError):
        return f"{type(failure).__name__}{': ' * bool(str(failure))}{failure}"
    diagnostic = failure.diagnostics[0]
    return f"{diagnostic.message} ({diagnostic.span})" if diagnostic.span else diagnostic.message
