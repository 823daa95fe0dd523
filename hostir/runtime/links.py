"""Connections by which ranks notice that one of them has ended, and tell all others what happened to them.

Rank 0 listens, and every other rank connects to it. The kernel keeps a connection open as long as the process lives,
busy, stopped or holding the GIL as it may be, and closes it however the process ends. A host that is lost with its
processes leaves the connection open; then the kernel's own probes (TCP keepalive), which need no process to answer
them, go unanswered for HOSTIR_KEEPALIVE seconds.

What a rank tells goes to rank 0, which puts what all ranks tell in one order and sends that to everyone, the teller
too. So all ranks know the same, sooner or later.
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

LONGEST = 4000  # characters of what a rank tells
PATIENCE = 1.0  # seconds that a rank waits until rank 0 has sent what it told
CONNECTING = 2.0  # seconds that an attempt may take
TRYING = 10.0  # seconds of vain attempts after which that is said
PERIOD = 0.02  # seconds between two attempts, or looks


class Event(NamedTuple):
    """What happened to a rank: it `failed`, came `back` to calls, is `done`, or `died`; more in words."""

    what: str
    rank: int
    words: str = ""


class Link:
    """One connection, and what has come of its next line."""

    def __init__(self, to: socket.socket, keepalive: float) -> None:
        self.socket = to
        self.rank = -1  # until it has said which it is
        self.rest = b""
        to.setblocking(False)
        _keep_alive(to, keepalive)

    def send(self, *lines: Sequence[object]) -> None:
        with contextlib.suppress(OSError):  # who has ended is noticed where lines are received
            self.socket.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())

    def receive(self) -> tuple[list[bytes], str]:
        """The lines that have come; and why no others will, empty while they may."""
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
    """What one rank has of them.

    Args:
        store: of the run: by it the others find rank 0.
        rank, size: this rank and how many there are.
        keepalive: seconds after which a host that does not answer counts as lost.

    Fields:
        events: what has happened, in the same order on every rank; it only grows.
    """

    def __init__(self, store: Any, rank: int, size: int, keepalive: float) -> None:
        self.store, self.rank, self.keepalive = store, rank, keepalive
        self.events: list[Event] = []
        self.untold: list[Event] = []  # until this rank is linked
        self.links: list[Link] = []
        self.linked = size == 1
        self.vain = 0.0  # when the first attempt to connect failed
        self.listener: socket.socket | None = None
        self.changing = threading.RLock()  # both the rank's own thread and its watchdog's come here
        self.token = secrets.token_hex()
        self.poller = select.poll()
        if size > 1 and rank == 0:
            self.listen(size)

    def listen(self, size: int) -> None:
        self.listener = _listener(size)
        self.listener.setblocking(False)
        self.poller.register(self.listener, select.POLLIN)
        hosts = [host for host in (os.environ.get("MASTER_ADDR"), socket.gethostname()) if host]
        self.store.set("links", json.dumps([hosts, self.listener.getsockname()[1], self.token]))
        self.linked = True

    def serve(self, seconds: float, alarm: int) -> None:
        """Waits so long for something to happen, or until there is something to read from `alarm`."""
        if not self.linked:
            self.connect()
            seconds = min(seconds, PERIOD) if not self.linked else seconds
        self.poller.register(alarm, select.POLLIN)
        self.poller.poll(1000 * seconds)
        self.pump()

    def pump(self) -> None:
        """Takes in what has come by now."""
        with self.changing:
            if self.listener is not None:
                self.accept(self.listener)
            for link in list(self.links):
                lines, ended = link.receive()
                try:
                    for line in lines:
                        self.take(link, json.loads(line))
                except (ValueError, TypeError, IndexError):
                    self.drop(link, "")  # a stranger
                if ended:
                    self.drop(link, ended)

    def tell(self, what: str, words: str = "") -> Event:
        """Tells all ranks what happened to this one."""
        event = Event(what, self.rank, words[:LONGEST])
        self.pump()
        with self.changing:
            if self.rank == 0 or (self.linked and not self.links):  # where rank 0 has gone, this one tells itself
                self.spread(event)
            elif self.linked:
                self.links[0].send(event)
            else:
                self.untold.append(event)
        return event

    def hear(self, event: Event) -> None:
        """Waits a moment until this rank has heard what it told, and with it all that came before."""
        deadline = time.monotonic() + PATIENCE
        while self.linked and event not in self.events and time.monotonic() < deadline:
            time.sleep(PERIOD)
            self.pump()

    def close(self) -> None:
        """Closes what this process has of the connections; those of one that it was forked from stay open."""
        for each in (self.listener, *(link.socket for link in self.links)):
            if each is not None:
                each.close()
        self.listener, self.links = None, []

    # Connecting ---------------------------------------------------------------------------------------------------
    def connect(self) -> None:
        """Connects to rank 0, if that can be reached yet."""
        try:
            if not self.store.check(["links"]):
                return
            hosts, port, token = json.loads(self.store.get("links"))
        except RuntimeError:
            return  # the store has gone: who waits for it is told
        for host in hosts:
            with contextlib.suppress(OSError):
                link = Link(socket.create_connection((host, port), CONNECTING), self.keepalive)
                with self.changing:
                    link.send((token, self.rank), *self.untold)
                    self.untold.clear()
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
        """Takes in who has connected. Who that is, the first line will tell."""
        with contextlib.suppress(OSError):
            while True:
                self.add(Link(listener.accept()[0], self.keepalive), -1)

    def add(self, link: Link, rank: int) -> None:
        link.rank = rank
        self.links.append(link)
        self.poller.register(link.socket, select.POLLIN)

    def take(self, link: Link, line: list[Any]) -> None:
        """Takes a line: rank 0 hears first who there is, then what others tell; these hear what all have told."""
        if self.rank:
            self.events.append(Event(*line))
        elif link.rank >= 0:
            self.spread(Event(*line))
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
        if link.rank >= 0 and Event("done", link.rank) not in self.events:
            self.spread(Event("died", link.rank, why))

    def spread(self, event: Event) -> None:
        """Notes an event, and on rank 0 sends it to all others."""
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
    """Has the kernel probe the other end, and give it up after so many seconds without an answer."""
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
