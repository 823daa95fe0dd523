"""TCP connections between the watchdogs of all ranks: ranks report events, and notice that a rank has ended.

Rank 0 listens, and every other rank connects to it. The operating system keeps a connection open as long as the process
lives, even if the process is busy, stopped or holds the GIL. It closes the connection when the process ends in any way.
If a host is lost, its connections stay open. Then the probes of TCP keepalive get no answer for HOSTIR_KEEPALIVE
seconds, and the host counts as lost. A process need not do anything to answer such a probe.

A rank sends its events to rank 0. Rank 0 puts the events of all ranks in one order and sends them to all ranks,
including the sender. So all ranks receive the same events in the same order.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hostir.ir.source import Diagnostic, HostIRError

LONGEST = 4000  # the most characters in the words of an event
ALIKE = "the same calls, in the same order, on every rank"
PAGE = "docs/calls.md says what the ranks of a job must do alike"
PATIENCE = 3.0  # seconds that a rank waits for rank 0 to return its event
CONNECTING = 2.0  # seconds that an attempt to connect may take
TRYING = 10.0  # seconds of failed attempts after which a warning is printed
PAUSE = 0.02  # seconds between two attempts, or polls


class MisalignedError(HostIRError):
    """Raised on every rank if a rank may run a call that another rank does not make. Then no later call can match."""

    def __init__(self, why: str, *notes: str, hint: str = PAGE) -> None:
        super().__init__(Diagnostic(why, None, ALIKE, hint, tuple((None, note) for note in notes)))


class RankEvent(NamedTuple):
    """An event that a rank reports to all ranks.

    Fields:
        what: the type of the event.
            `failed`: a call of the rank has failed.
            `abandoned`: a call of the rank has failed, and peers may already have noticed its beginning.
            `back`: the rank makes calls again after a failure.
            `done`: the rank has made its last call.
            `died`: the process of the rank has ended, or its host is lost.
            `misaligned`: the rank reports that some rank may run a call that another rank does not make.
        rank: the rank.
        words: details, for messages.
        renewals: for a failure, the number of times that the ranks had renewed their shared state before the call.
    """

    what: str
    rank: int
    words: str = ""
    renewals: int = 0


class Link:
    """A connection to one rank. Messages are lines of JSON.

    Fields:
        socket: the socket.
        rank: the number of the rank at the other end; -1 until that rank has sent its number.
        host: the name of that rank's host; empty until it is known.
        rest: the received part of a line that is not complete yet.
    """

    def __init__(self, to: socket.socket, keepalive: float) -> None:
        self.socket = to
        self.rank = -1
        self.host = ""
        self.rest = b""
        to.setblocking(False)
        _keep_alive(to, keepalive)

    def send(self, *lines: Sequence[object]) -> None:
        with contextlib.suppress(OSError):  # `receive` notices that the other rank has ended
            self.socket.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())

    def receive(self) -> tuple[list[bytes], str]:
        """Return the complete lines that have arrived, and the reason why no more lines can arrive.

        The reason is empty while the connection is open.
        """
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
    """The connections of one rank: from rank 0 to all other ranks, or from another rank to rank 0.

    Args:
        store: a store that all ranks share. Rank 0 writes its address to the store.
        rank: this rank.
        size: the number of ranks.
        keepalive: seconds after which a host that does not answer counts as lost.

    Fields:
        events: all events so far, in the same order on every rank.
        unsent: events of this rank that wait for a connection.
        announced: the number of events that this rank has reported.
        links: the open connections.
        linked: True if this rank has connected to rank 0; always True on rank 0.
        patient: False once `await_link` has given up.
        vain: the time of the first failed attempt to connect to rank 0. It is 0 if no attempt has failed, and infinite
            after the warning about failed attempts.
        listener: the socket on which rank 0 listens; None on other ranks.
        changing: a lock that a thread holds while it changes the state.
        token: a secret of rank 0. A rank that connects sends it to show that it belongs to the job.
        poller: waits for data on any connection.
    """

    def __init__(self, store: Any, rank: int, size: int, keepalive: float) -> None:
        self.store, self.rank, self.size, self.keepalive = store, rank, size, keepalive
        self.events: list[RankEvent] = []
        self.unsent: list[RankEvent] = []
        self.announced = 0
        self.links: list[Link] = []
        self.linked = size == 1
        self.patient = True
        self.vain = 0.0
        self.listener: socket.socket | None = None
        self.changing = threading.RLock()
        self.token = secrets.token_hex()
        self.poller = select.poll()
        if size > 1 and rank == 0:
            self.listen(size)

    def listen(self, size: int) -> None:
        self.listener = _listener(size)
        self.listener.setblocking(False)
        self.poller.register(self.listener, select.POLLIN)
        # MASTER_ADDR is the address of this host only if this is rank 0 of the job.
        first = os.environ.get("MASTER_ADDR") if os.environ.get("RANK", "0") == "0" else None
        hosts = [host for host in (first, socket.gethostname()) if host]
        self.store.set("links", json.dumps([hosts, self.listener.getsockname()[1], self.token, platform.node()]))
        self.linked = True

    def serve(self, seconds: float, alarm: int) -> None:
        """Wait for data from other ranks and process it. Wait at most `seconds`, or until `alarm` is readable.

        `alarm` is a file descriptor. If this rank is not connected yet, try to connect first.
        """
        if not self.linked:
            self.connect()
            seconds = min(seconds, PAUSE) if not self.linked else seconds
        self.poller.register(alarm, select.POLLIN)
        self.poller.poll(1000 * seconds)
        self.pump()

    def pump(self) -> None:
        """Accept new connections and process all lines that have arrived, without waiting."""
        with self.changing:
            if self.listener is not None:
                self.accept(self.listener)
            for link in list(self.links):
                lines, ended = link.receive()
                try:
                    for line in lines:
                        self.take(link, json.loads(line))
                except (ValueError, TypeError, IndexError):
                    self.drop(link, "")  # the other end is no rank of this job
                if ended:
                    self.drop(link, ended)

    def announce(self, what: str, words: str = "", renewals: int = 0) -> None:
        """Report an event of this rank to all ranks."""
        event = RankEvent(what, self.rank, words[:LONGEST], renewals)
        self.pump()
        with self.changing:
            self.announced += 1
            if self.rank == 0 or (self.linked and not self.links):  # rank 0 has ended: only this rank gets the event
                self.spread(event)
            elif self.linked:
                self.links[0].send(event)
            else:
                self.unsent.append(event)

    def await_all(self) -> None:
        """Wait until all ranks are connected, and then until this rank has received all its events from rank 0.

        Rank 0 waits for the connections of all ranks; another rank waits only for its connection. The wait for the
        connections and the wait for the events take at most PATIENCE seconds each.
        """
        deadline = time.monotonic() + PATIENCE
        while not self.complete() and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self.pump()
        self.await_own()

    def complete(self) -> bool:
        """Return True if this rank is connected to rank 0. On rank 0, return True if all other ranks are connected."""
        with self.changing:
            return self.linked and (self.rank > 0 or sum(link.rank >= 0 for link in self.links) >= self.size - 1)

    def await_link(self) -> None:
        """Wait until this rank is connected to rank 0. Without the connection, nobody notices if this rank dies.

        Rank 0 must have joined the job. Give up after PATIENCE seconds, or if an attempt to connect has failed. Then
        later calls do not wait.
        """
        deadline = time.monotonic() + (PATIENCE if self.patient else 0.0)
        while not self.linked and not self.vain and time.monotonic() < deadline:
            time.sleep(PAUSE / 10)
        self.patient = self.patient and self.linked  # later waits would not end otherwise

    def await_own(self) -> None:
        """Wait until this rank has received all its events from rank 0. Then it has received all earlier events, too.

        Give up after PATIENCE seconds, or if rank 0 has ended.
        """
        deadline = time.monotonic() + PATIENCE
        while self.linked and self.links and self.received < self.announced and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self.pump()

    @property
    def received(self) -> int:
        """The number of this rank's events that have come back from rank 0. Events may be equal."""
        return sum(event.rank == self.rank and event.what != "died" for event in self.events)

    def close(self) -> None:
        """Close the connections of this process. If it is a forked child, the connections of its parent stay open."""
        for each in (self.listener, *(link.socket for link in self.links)):
            if each is not None:
                each.close()
        self.listener, self.links, self.store = None, [], None

    def connect(self) -> None:
        """Try to connect to rank 0. If this fails for TRYING seconds, print a warning once."""
        try:
            if not self.store.check(["links"]):
                return
            hosts, port, token, name = json.loads(self.store.get("links"))
        except RuntimeError:
            return  # the store is gone: the thread that makes calls gets an error when it uses the store
        for host in hosts:
            with contextlib.suppress(OSError):
                link = Link(socket.create_connection((host, port), CONNECTING), self.keepalive)
                with self.changing:
                    link.send((token, self.rank, platform.node()), *self.unsent)
                    link.host = name
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
        """Accept new connections. The first line that arrives over a connection names the rank at the other end."""
        with contextlib.suppress(OSError):
            while True:
                self.add(Link(listener.accept()[0], self.keepalive), -1)

    def add(self, link: Link, rank: int) -> None:
        link.rank = rank
        self.links.append(link)
        self.poller.register(link.socket, select.POLLIN)

    def take(self, link: Link, line: list[Any]) -> None:
        """Process a line that has arrived over a connection.

        On rank 0, the first line of each connection holds the token, the number of the other rank and the name of its
        host. All later lines hold events of that rank. The other ranks receive the events that rank 0 forwards. Raise a
        ValueError if the first line on rank 0 does not have the right token.
        """
        if self.rank:
            self.events.append(RankEvent(*line))
        elif link.rank >= 0:
            self.spread(RankEvent(*line))
        elif line[0] == self.token:
            link.rank, link.host = int(line[1]), str(line[2])
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
            self.spread(RankEvent("died", link.rank, self.on_host(link, why)))

    def on_host(self, link: Link, why: str) -> str:
        """Return the reason why a rank counts as dead, with the name of its host if the ranks are on several hosts."""
        hosts = {each.host for each in (*self.links, link)} | {platform.node()}
        return f"{why} (on host {link.host})" if len(hosts - {""}) > 1 else why

    def spread(self, event: RankEvent) -> None:
        """Record an event. If this rank is rank 0, also send the event to all other ranks."""
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
    """Turn on TCP keepalive: the operating system closes the connection after `seconds` without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 4
    wait = max(1, round(seconds / (probes + 1)))
    for name, value in {
        "TCP_KEEPIDLE": wait,
        "TCP_KEEPINTVL": wait,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": round(1000 * seconds),
    }.items():
        if hasattr(socket, name):  # macOS lacks some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class AlikeError(HostIRError):
    """Raised on every rank in the same call if a rank cannot continue after the ranks have met.

    Because every rank raises it, no rank waits for another.
    """


def headline(failure: BaseException) -> str:
    """Return an error as one line, for messages on other ranks.

    For a HostIRError, this is the message and the place of its first diagnostic. For other exceptions, it is the type
    and the text.
    """
    if not isinstance(failure, HostIRError):
        return f"{type(failure).__name__}{': ' * bool(str(failure))}{failure}"
    diagnostic = failure.diagnostics[0]
    return f"{diagnostic.message} ({diagnostic.span})" if diagnostic.span else diagnostic.message
