"""Ends every rank when one of them is lost: no rank waits for ever for a peer that died, raised, or never came.

Each rank has a thread that talks to the run's store over a connection of its own, so that it is never behind a
collective. It tells that the rank lives, and looks for four things: a failure that another rank published, a rank whose
heartbeat has stopped, a communication of this rank's that stands still, and what its device has reported. On any of
them it prints one diagnostic that names this rank, the statement it is at and the cause, and ends the process at once,
since a thread stuck in a collective cannot be asked to stop. The hot path pays one comparison a call: where a run
stands is read off its iterator.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hostir.ir.source import Diagnostic, HostIRError

if TYPE_CHECKING:
    from hostir.runtime.plan import Op

PERIOD = 0.5  # seconds between two heartbeats
STALE = 10.0  # seconds without one after which a rank counts as dead, unless the timeout is shorter


class Watched(Protocol):
    """A plan, as the watchdog sees it."""

    def in_flight(self) -> list[Op]:
        """The operations being executed, the most telling first; none while nothing runs."""

    def describe(self, op: Op) -> str:
        """An operation in flight: the statement, its round, and what it waits for where that is known."""

    def progress(self) -> object:
        """Changes whenever the run gets on; None where standing still cannot be told from here."""

    def ailment(self) -> str:
        """What the device has reported that no call has raised yet; empty while all is well."""


class Watchdog:
    """The thread of one rank.

    Args:
        store: a store of the run with this rank's own connection; keys are used as they are.
        rank, size: this rank and how many there are.
        timeout: seconds that a communication may stand still.
        hosts: whether the store lives in this process.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, hosts: bool) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timeout
        self.hosts = hosts
        self.stale = min(STALE, timeout / 2)
        self.plan: Watched | None = None  # of the run under way, or of the last one
        self.replaced: list[Watched | None] = []  # during captures
        self.looking = threading.Lock()  # held while this thread has a plan at hand: it must not be the last that has
        self.others = [r for r in range(size) if r != rank]
        self.beats: dict[int, tuple[bytes, float]] = {}  # of each rank: its heartbeat, and when it last changed
        self.stood: tuple[object, float] = (None, time.monotonic())
        self.wake, self.signalled = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.signalled, False)
        self.closing = threading.Event()
        self.leaving = False  # once all ranks are done, the store may go before this thread does
        self.ours = False
        self.raised: HostIRError | None = None  # what this rank's caller was told, and may be printing
        self.release = self.hear_signals()
        self.store.add(f"beat/{rank}", 1)
        self.thread = threading.Thread(target=self.watch, name="hostir watchdog", daemon=True)
        self.thread.start()

    def look_at(self, plan: Watched, capturing: bool = False) -> None:
        """What runs now, or is captured to run later.

        The plan that it replaces, if nobody else has it, goes on the caller's thread, and not during a capture: memory
        that the GPU shares with peers may go with it, for which the driver waits until the device is idle.
        """
        if plan is self.plan and (capturing or not self.replaced):
            return
        with self.looking:
            replaced, self.plan = self.plan, plan
        if capturing:
            self.replaced.append(replaced)
        else:
            self.replaced.clear()

    def blame(self, failure: HostIRError) -> HostIRError:
        """Tells all ranks of this one's failure; where another failed first, says so in the error that it returns."""
        self.publish(headline(failure))
        cause = ""
        with contextlib.suppress(Exception):
            cause = self.failure()
        if cause:
            first, *rest = failure.diagnostics
            failure = HostIRError(replace(first, notes=(*first.notes, (None, f"first, {cause}"))), *rest)
        self.raised = failure
        return failure

    def publish(self, what: str) -> None:
        """Tells all ranks that this one failed; the first failure of a run is the one they name."""
        with contextlib.suppress(Exception):  # without the store nobody can be told
            self.store.compare_set("failure", "", f"{self.rank} {what}")

    def close(self, done: bool) -> None:
        """Ends the thread. Where the rank is `done`, its silence from here on is no sign of death.

        A rank that is not is on its way out with an error to print, and SIGTERM shall not come in between.
        """
        self.leaving = True
        if done:
            with contextlib.suppress(Exception):
                self.store.set(f"done/{self.rank}", "1")
        self.closing.set()
        os.write(self.signalled, b"\0")
        self.thread.join()
        self.release(done)
        os.close(self.wake)
        os.close(self.signalled)
        if not done:
            self.linger()

    # Watching -----------------------------------------------------------------------------------------------------
    def watch(self) -> None:
        while not self.closing.is_set():
            heard = os.read(self.wake, 64) if select.select([self.wake], [], [], PERIOD)[0] else b""
            if self.closing.is_set():
                return
            if signal.SIGTERM in heard:
                self.terminated()
            try:
                self.store.add(f"beat/{self.rank}", 1)
                cause = self.failure() or self.death()
            except Exception as problem:
                if not self.leaving:
                    self.end(f"the store of the run is gone ({_first_line(problem)}): rank 0 or its launcher died")
                return
            with self.looking:
                cause = cause or self.standstill() or self.reported()
            if cause:
                self.end(cause)

    def failure(self) -> str:
        """What another rank published; this rank's own failure is raised to its caller."""
        if not self.store.check(["failure"]):
            return ""
        rank, what = self.store.get("failure").decode().split(" ", 1)
        return "" if int(rank) == self.rank else what

    def death(self) -> str:
        now = time.monotonic()
        for rank in self.others:
            key = f"beat/{rank}"
            beat = self.store.get(key) if self.store.check([key]) else b""
            last, since = self.beats.setdefault(rank, (beat, now))
            if beat != last:
                self.beats[rank] = (beat, now)
            elif beat and now - since > self.stale and not self.store.check([f"done/{rank}"]):
                return f"rank {rank} died: no sign of life for {now - since:.0f} s"
        return ""

    def standstill(self) -> str:
        plan = self.plan
        progress = plan.progress() if plan else None
        now = time.monotonic()
        at_hand = (None if plan is None else weakref.ref(plan), progress)
        if progress is None or at_hand != self.stood[0]:
            self.stood = (at_hand, now)
        if now - self.stood[1] < self.timeout:
            return ""
        what = f"has stood still for {now - self.stood[1]:.0f} s; HOSTIR_TIMEOUT sets how long it may"
        at = "" if plan is None else plan.describe(plan.in_flight()[0])
        self.publish(f"rank {self.rank}, {at}: {what}")
        return f"it {what}"

    def reported(self) -> str:
        """What the device has told of this rank's run; what its caller was told already is the caller's."""
        found = self.plan.ailment() if self.plan is not None and self.raised is None else ""
        if found:
            self.publish(found)
        return found

    # Ending -------------------------------------------------------------------------------------------------------
    def end(self, cause: str) -> NoReturn:
        """Prints the diagnostic and ends the process."""
        self.report(cause)
        self.linger()
        os._exit(1)

    def linger(self) -> None:
        """Leaves the others time to read why, where the store goes with this process."""
        if self.hosts:
            time.sleep(3 * PERIOD)

    def report(self, cause: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self.diagnostic(cause)}\n")
        sys.stderr.flush()

    def diagnostic(self, cause: str) -> Diagnostic:
        """This rank, the statement it is at, and the cause."""
        if self.raised is not None:
            return self.raised.diagnostics[0]
        plan = self.plan
        ops = plan.in_flight() if plan else []
        if plan is None or not ops:
            return Diagnostic(f"rank {self.rank} is ended between runs: {cause}")
        notes = tuple((op.place.statement.span, f"also at {plan.describe(op)}") for op in ops[1:])
        message = f"rank {self.rank} is ended at {plan.describe(ops[0])}: {cause}"
        return Diagnostic(message, ops[0].place.statement.span, notes=notes)

    # Signals ------------------------------------------------------------------------------------------------------
    def hear_signals(self) -> Callable[[bool], None]:
        """Has SIGTERM wake the thread, even while the main thread is stuck outside Python.

        A launcher sends it to the ranks that are left when one has ended. A handler of the user's stays in charge.
        Returns what undoes this; told False, it leaves the process deaf to the signal.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda restore: None
        self.ours = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self.ours:
            signal.signal(signal.SIGTERM, lambda *_: None)
        before = signal.set_wakeup_fd(self.signalled, warn_on_full_buffer=False)

        def release(restore: bool) -> None:
            signal.set_wakeup_fd(before)
            if self.ours and restore:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        return release

    def terminated(self) -> None:
        cause = ""
        with contextlib.suppress(Exception):
            cause = self.failure()
        self.report(cause or "SIGTERM, which a launcher sends to all ranks when one of them has ended")
        if self.ours:
            os._exit(128 + signal.SIGTERM)


def headline(failure: HostIRError) -> str:
    """An error in one line, for other ranks to name."""
    diagnostic = failure.diagnostics[0]
    return f"{diagnostic.message} ({diagnostic.span})" if diagnostic.span else diagnostic.message


def _first_line(problem: BaseException) -> str:
    return str(problem).split("\n", 1)[0] or type(problem).__name__
