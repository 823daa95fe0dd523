"""End every rank when one of them is lost: no rank waits forever for a peer that died, raised or never arrived.

Each rank has a thread that checks for four events: a rank has died, a rank makes no more calls after a failure, a
communication of this rank makes no progress, or its device has reported an error. On any of them the thread prints one
diagnostic that names this rank, its current statement and the cause. Then it ends the process at once, because a thread
that is stuck in a collective cannot be stopped. Ranks notice a death by the connections of `hostir.job.links`, which
live as long as the processes. So a process that is busy, stopped or holds the GIL does not count as dead. A warm call
pays two comparisons: the thread reads the position of a run off its iterator.

The caller of a failed call gets an error, and may try again. If the call has failed on every rank, nothing else
happens. Otherwise each rank has HOSTIR_TIMEOUT seconds to make its next call. If a rank does not, all ranks end with
the message of the first failure.

A call is abandoned if it ends on a rank after peers may have noticed its beginning: they may wait for the rest. Then
each other rank raises an error, in the call under way or in its next call. Once all ranks have raised, their next calls
renew the shared state: see `Session.renew`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hostir.ir.source import Diagnostic, HostIRError

if TYPE_CHECKING:
    from hostir.plan.operations import Op
from hostir.job.links import Links, MisalignedError, RankEvent, headline

PERIOD = 0.5  # seconds between two checks
STILL = 0.1  # seconds that a run may stand still once another rank has abandoned a call
LAST_WORDS = 1.0  # seconds that a rank between runs has, once another has died, to end with an error of its own
RENEWAL = "results of earlier calls that were not waited for may be lost; the next call of each rank begins anew"
ASKED = b"!"  # what our handler of SIGTERM writes for the thread: no signal has this number


class Watched(Protocol):
    """The watchdog's view of a plan."""

    def in_flight(self) -> list[Op]:
        """Return the operations being executed, most informative first; an empty list while nothing runs."""

    def describe(self, op: Op) -> str:
        """Describe an operation in flight: the statement, its round, and what it waits for if known."""

    def progress(self) -> object:
        """Return a value that changes whenever the run progresses; None if that cannot be observed."""

    def reported_problem(self) -> str:
        """Return the device's error reports that no call has raised yet; empty if there was no report."""

    def give_up(self, problem: HostIRError) -> None:
        """Raise this error in the run under way, where it waits for a peer. Work on a device cannot be stopped."""


class Watchdog:
    """The thread of one rank.

    Args:
        store: a store of the run, by which ranks find each other.
        rank, size: this rank and how many there are.
        timeout: seconds that a communication may stand still.
        keepalive: seconds after which a host that does not answer counts as lost.
    """

    limit = "HOSTIR_TIMEOUT"  # what sets the timeout, for messages

    def __init__(self, store: Any, rank: int, size: int, timeout: float, keepalive: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.plan: Watched | None = None  # of the run under way, or of the last one
        self.replaced: list[Watched | None] = []  # during captures
        self.inspecting = threading.Lock()  # held while this thread uses a plan: it must not drop its last reference
        self.clock = 0.0  # seconds in which this thread could run: those in which the process was stopped do not count
        self.stood: tuple[object, float] = (None, 0.0)
        self.links = Links(store, rank, size, keepalive)
        self.everyone = set(range(size))
        self.known = 0  # events that were taken in
        self.died: RankEvent | None = None
        self.died_at = 0.0
        self.done: set[int] = set()
        self.first: RankEvent | None = None  # the failure that is not over yet
        self.failed: set[int] = set()  # ranks that have failed since
        self.away: set[int] = set()  # those that have not made another call since
        self.since = 0.0
        self.misaligned = ""  # the first report of calls that differ between ranks while one of them may run
        self.disturbed = False  # whether this rank's next call has more to do than run
        self.renewals = 0  # how often the ranks have renewed their shared state
        self.abandoned: RankEvent | None = None  # a call that a rank has abandoned since
        self.raised: HostIRError | None = None  # raised to this rank's caller, who may be printing it
        self.acknowledged = False  # whether the caller knows the error of the latest plan
        self.wake, self.signalled = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.signalled, False)
        self.closing = threading.Event()
        self.before = -1  # who else receives signals
        self.install_handler()
        self.thread = threading.Thread(target=self.watch, name="hostir watchdog", daemon=True)
        self.thread.start()

    def observe(self, plan: Watched, capturing: bool = False) -> None:
        """Watch a plan that runs now, or is captured to run later.

        The plan that it replaces is released on the caller's thread, and not during a capture: memory that the GPU
        shares with peers may be freed with it, for which the driver waits until the device is idle.
        """
        if plan is self.plan and (capturing or not self.replaced):
            return
        self.acknowledged = False
        with self.inspecting:
            replaced, self.plan = self.plan, plan
        if capturing:
            self.replaced.append(replaced)
        else:
            self.replaced.clear()

    def blame(self, failure: HostIRError, abandoned: bool = False) -> HostIRError:
        """Report this rank's failure to all ranks; return the error to raise, with a note if another rank failed first.

        `abandoned`: peers may wait for the rest of a call of this rank.
        """
        if isinstance(failure, MisalignedError):  # which all ranks know
            return failure
        what, self.raised = "abandoned" if abandoned else "failed", failure
        self.links.await_own(self.links.announce(what, headline(failure), self.renewals))
        self.learn()
        theirs = self.first is not None and self.first.rank != self.rank
        cause = self.first.words if theirs and self.first is not None else self.loss()
        if cause and cause not in failure.diagnostics[0].message:
            first, *rest = failure.diagnostics
            failure = HostIRError(replace(first, notes=(*first.notes, (None, f"first, {cause}"))), *rest)
        self.raised, self.acknowledged, self.disturbed = failure, True, True
        return failure

    def misalign(self, why: str) -> str:
        """Report to all ranks that one may run a call that another does not make; return the first such report."""
        self.links.await_all(self.links.announce("misaligned", why))
        self.learn()
        return self.misaligned or why

    def resume(self) -> None:
        """Report to all ranks that this one makes another call, if a failure is not over yet."""
        with self.links.changing:  # a report that has just come is for the next call
            self.disturbed, self.raised = bool(self.misaligned), None
        if self.first is not None:
            self.links.announce("back")

    def renewed(self) -> None:
        """Forget the call that was abandoned: the ranks have renewed their shared state."""
        with self.links.changing:
            self.renewals += 1
            if self.abandoned is not None and self.abandoned.renewals < self.renewals:
                self.abandoned = None

    def leave(self) -> None:
        """Report to all ranks that this one has made its last call: from here on its exit is no failure."""
        self.links.await_own(self.links.announce("done"))

    def close(self, done: bool = True) -> None:
        """End the thread and the connections.

        A rank that is not `done` is about to exit with an error, and SIGTERM must not interrupt its printing.
        """
        self.closing.set()
        os.write(self.signalled, b"\0")
        self.thread.join()
        self.restore_handlers(signal.SIG_DFL if done else lambda number, frame: None)
        self.plan = None  # a plan holds memory and process groups
        self.replaced.clear()
        self.drop()

    def drop(self) -> None:
        """Close this process's copies of pipes and connections, without a message to anyone."""
        self.links.close()
        os.close(self.wake)
        os.close(self.signalled)
        self.wake = self.signalled = -1

    def watch(self) -> None:
        last = time.monotonic()
        while not self.closing.is_set():
            self.links.serve(PERIOD if self.abandoned is None else STILL / 2, self.wake)
            heard = self.heard()
            if self.closing.is_set():
                return
            if ASKED in heard or (signal.SIGTERM in heard and signal.getsignal(signal.SIGTERM) == self.on_sigterm):
                if self.ends_by_itself():
                    return
                self.terminated()
            now = time.monotonic()
            self.clock += min(now - last, 2 * PERIOD)
            last = now
            self.learn()
            cause = self.cause()
            with self.inspecting:
                self.stop_misaligned()
                cause = cause or self.standstill() or self.reported()
                if not cause:
                    self.end_lost_run()
            if cause:
                if self.ends_by_itself():
                    return
                self.end(cause)

    def ends_by_itself(self) -> bool:
        """Return True if this rank ends within LAST_WORDS by an error that it raises: its traceback says more."""
        return self.raised is not None and self.closing.wait(LAST_WORDS)

    def learn(self) -> None:
        """Process new events of the ranks."""
        with self.links.changing:
            events = self.links.events[self.known :]
            self.known += len(events)
            for event in events:
                self.take(event)

    def take(self, event: RankEvent) -> None:
        if event.what == "died":
            self.died, self.died_at = (event, self.clock) if self.died is None else (self.died, self.died_at)
        elif event.what == "done":
            self.done.add(event.rank)
        elif event.what == "back":
            self.away.discard(event.rank)
        elif event.what == "misaligned":
            self.misaligned, self.disturbed = self.misaligned or event.words, True
        else:
            self.take_failure(event)
        if self.first is not None and (self.everyone <= self.failed | self.done or self.away <= self.done):
            self.first = None

    def take_failure(self, event: RankEvent) -> None:
        if event.what == "abandoned" and event.renewals >= self.renewals:
            if self.abandoned is None or self.abandoned.renewals < event.renewals:
                self.abandoned = event
            self.disturbed = True
        if self.first is not None:
            self.failed.add(event.rank)
            return
        self.first, self.since = event, self.clock
        self.failed, self.away = {event.rank}, set(self.everyone)
        self.disturbed = True

    def end_lost_run(self) -> None:
        """Raise in the run under way if it makes no progress and another rank has abandoned a call."""
        event, plan = self.abandoned, self.plan
        if event is None or event.rank == self.rank or plan is None or not plan.in_flight():
            return
        if self.clock - self.stood[1] >= STILL:
            plan.give_up(self.lost_call(event))

    def lost_call(self, event: RankEvent) -> HostIRError:
        """Return the error for a call that ended midway on another rank: this rank's calls may wait for its rest."""
        what = f"a call ended midway on another rank, and what rank {self.rank} has issued may wait for its rest"
        return HostIRError(Diagnostic(f"{what}: {event.words}", hint=RENEWAL))

    def cause(self) -> str:
        """Return the reason why this rank must end because of another rank; empty to continue."""
        overdue = self.first is not None and self.clock - self.since > self.timeout
        if self.first is not None and (overdue or self.died is not None):
            return self.first.words
        idle = self.misaligned or self.plan is None or not self.plan.in_flight()  # a misaligned run is stopped
        if idle and self.clock - self.died_at < LAST_WORDS:
            return ""
        lost = self.loss()
        return self.misaligned if lost and self.misaligned else lost

    def stop_misaligned(self) -> None:
        """Raise in the run under way if it may be one that another rank does not make."""
        if self.misaligned and self.plan is not None and (ops := self.plan.in_flight()):
            at = f"rank {self.rank} was at {self.plan.describe(ops[0])}"
            self.plan.give_up(MisalignedError(self.misaligned, at))

    def loss(self) -> str:
        """Return a message with the rank that has died and the evidence; empty if all ranks live."""
        return f"rank {self.died.rank} died: {self.died.words}" if self.died is not None else ""

    def standstill(self) -> str:
        plan = self.plan
        progress = plan.progress() if plan else None
        at_hand = (None if plan is None else weakref.ref(plan), progress)
        if progress is None or at_hand != self.stood[0]:
            self.stood = (at_hand, self.clock)
        if self.clock - self.stood[1] < self.timeout:
            return ""
        if words := self.misaligned or (self.first.words if self.first is not None else ""):
            return words
        what = f"has stood still for {self.clock - self.stood[1]:.0f} s; {self.limit} sets how long it may"
        at = "" if plan is None else plan.describe(plan.in_flight()[0])
        self.links.announce("failed", f"rank {self.rank}, {at}: {what}")
        return f"it {what}"

    def reported(self) -> str:
        """Return the device's error reports for this rank's run; empty if the caller already knows them."""
        problem = self.plan.reported_problem() if self.plan is not None and not self.acknowledged else ""
        if problem:
            self.links.announce("failed", problem)
        return problem

    def end(self, cause: str) -> None:
        """Print the diagnostic and end the process."""
        self.report(cause)
        os._exit(1)

    def report(self, cause: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self.diagnostic(cause)}\n")
        sys.stderr.flush()

    def diagnostic(self, cause: str) -> Diagnostic:
        """Return the diagnostic: this rank, the statement it is at, and the cause."""
        if self.raised is not None:
            return self.raised.diagnostics[0]
        plan = self.plan
        ops = plan.in_flight() if plan else []
        if plan is None or not ops:
            return Diagnostic(f"rank {self.rank} is ended between runs: {cause}")
        notes = tuple((op.place.statement.span, f"also at {plan.describe(op)}") for op in ops[1:])
        message = f"rank {self.rank} is ended at {plan.describe(ops[0])}: {cause}"
        return Diagnostic(message, ops[0].place.statement.span, notes=notes)

    def install_handler(self) -> None:
        """Make SIGTERM wake the thread, even while the main thread is stuck outside Python.

        A launcher sends it to the remaining ranks when one has ended. A handler of the user's, installed before or
        after, takes precedence; if it calls ours, the rank ends.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.on_sigterm)
        self.before = signal.set_wakeup_fd(self.signalled, warn_on_full_buffer=False)

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM if the user has no handler; the thread does the rest."""
        if self.signalled >= 0:
            os.write(self.signalled, ASKED)
            return
        signal.signal(number, signal.SIG_DFL)  # a handler of the user's has called ours when the session had ended
        os.kill(os.getpid(), number)

    def heard(self) -> bytes:
        """Return the received signals, and forward them to the file descriptor that the user had set before."""
        try:
            heard = os.read(self.wake, 64)
        except BlockingIOError:
            return b""
        if self.before >= 0:
            with contextlib.suppress(OSError):
                os.write(self.before, heard.translate(None, b"\0" + ASKED))
        return heard

    def restore_handlers(self, handler: Callable[[int, FrameType | None], object] | int = signal.SIG_DFL) -> None:
        """Undo `install_handler`, unless somebody else has replaced it since; SIGTERM gets `handler`."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self.on_sigterm:
            signal.signal(signal.SIGTERM, handler)
        now = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self.before if now == self.signalled else now, warn_on_full_buffer=False)

    def terminated(self) -> NoReturn:
        self.learn()
        words = self.first.words if self.first is not None else self.cause()
        self.report(words or "SIGTERM, which a launcher sends to all ranks when one of them has ended")
        os._exit(128 + signal.SIGTERM)

    def forget(self) -> None:
        """Release the rank's handlers, pipes and connections in a process that was forked from it."""
        self.before = -1
        self.restore_handlers()
        self.drop()


class GuestWatchdog(Watchdog):
    """The watchdog thread of one rank of a process group: it raises in a call, and never ends the process.

    It installs no signal handlers. A rank that makes no calls, or fails in a call, matters to the others only when they
    wait for it. The death of a rank ends the calls of all.
    """

    limit = "the group's timeout"
    gave_up = False  # a call of this rank: with others within it, none can follow

    def take(self, event: RankEvent) -> None:
        super().take(event)
        self.disturbed = self.disturbed or self.died is not None

    def resume(self) -> None:
        if lost := self.loss():
            raise HostIRError(Diagnostic(f"rank {self.rank} makes no more calls with its group: {lost}"))
        super().resume()

    def renewed(self) -> None:
        super().renewed()
        self.gave_up = False

    def cause(self) -> str:
        """Return nothing: only a call that stands still is ended because of another rank."""
        return ""

    def standstill(self) -> str:
        if self.gave_up:
            return ""
        problem = super().standstill()
        return self.loss() or problem if self.clock - self.stood[1] >= LAST_WORDS else problem

    def reported(self) -> str:
        """Return nothing: the next call raises what the device has reported."""
        return ""

    def end(self, cause: str) -> None:
        """Raise in the call under way."""
        plan, self.gave_up = self.plan, True
        if plan is not None and plan.in_flight():
            plan.give_up(HostIRError(Diagnostic(cause)))

    def install_handler(self) -> None:
        """Leave signals to the program."""

    def restore_handlers(self, handler: Callable[[int, FrameType | None], object] | int = signal.SIG_DFL) -> None:
        """Leave signals to the program."""
