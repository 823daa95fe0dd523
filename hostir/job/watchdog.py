"""The watchdog: end every rank when one of them is lost, so that no rank waits forever for a peer.

Each rank has a watchdog thread. It checks for five events:
- A rank has died.
- A rank makes no more calls after a failure.
- A communication of this rank makes no progress.
- The device of this rank has reported an error.
- A collective that native code has issued does not end.

If one of them occurs, the thread prints one diagnostic that names this rank, its current statement and the cause. Then
it ends the process at once, because a thread that is stuck in a collective cannot be stopped.

Ranks notice the death of a process when its connections close (see `hostir.job.links`). So a process that is busy,
stopped or holds the GIL does not count as dead. A call with a plan does two comparisons for the watchdog. The watchdog
thread reads the current operation of a run from the iterator of the run.

If a call fails, its caller gets an error and may try again. If the call has failed on every rank, nothing else happens.
Otherwise each rank has HOSTIR_TIMEOUT seconds to make its next call. If a rank does not make it, all ranks end with the
message of the first failure.

A call is abandoned if it fails on a rank after peers may have noticed its beginning. The peers may wait for the rest of
the call. So each other rank raises an error in its current call or in its next call. When all ranks have raised, their
next calls renew the shared state (see `Session.renew`).
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
from hostir.job.links import PAUSE, Links, MisalignedError, RankEvent, headline

PERIOD = 0.5  # seconds between two checks
STILL = 0.1  # seconds that a run may make no progress after another rank has abandoned a call
LOSS = 0.5  # after a call was abandoned, the seconds that a rank waits to hear that another rank has died
LAST_WORDS = 1.0  # after a rank has died, the seconds that a rank between runs has to end by an error that it raises
RENEWAL = "results of earlier calls that were not waited for may be lost; the next call of each rank begins anew"
ASKED = b"!"  # the byte that our SIGTERM handler writes to wake the thread; no signal has this number


def say(diagnostic: Diagnostic) -> None:
    """Print the last message of this process. If a pipe is closed because nobody reads it, print nothing there."""
    for each in (sys.stdout.flush, lambda: sys.stderr.write(f"{diagnostic}\n"), sys.stderr.flush):
        with contextlib.suppress(OSError, ValueError):
            each()


class Watched(Protocol):
    """The methods of a plan that the watchdog uses."""

    def in_flight(self) -> list[Op]:
        """Return the operations that run now, the most informative first. The list is empty while no run is active."""

    def describe(self, op: Op) -> str:
        """Return a text about an operation in flight: its statement, its round, and, if known, what it waits for."""

    def progress(self) -> object:
        """Return a value that changes whenever the run makes progress; return None if progress cannot be observed."""

    def reported_problem(self) -> str:
        """Return the errors that the device has reported, as text; empty if there are no such errors.

        Errors that a call has already raised are left out.
        """

    def give_up(self, problem: HostIRError) -> None:
        """Raise this error in the current run, at the place where the run waits for a peer.

        Work on a device cannot be stopped.
        """


class Watchdog:
    """The watchdog of one rank, with its thread.

    Args:
        store: a store that all ranks share. It holds the address of rank 0.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds that a communication may make no progress.
        keepalive: seconds after which a host that does not answer counts as lost.

    Fields:
        plan: the plan of the current run, or of the latest run.
        replaced: the plans that `observe` has replaced during captures. They are not released yet.
        inspecting: a lock that the watchdog thread holds while it uses a plan.
        clock: the number of seconds in which this thread could run. Time in which the process was stopped does not
            count.
        stood: the latest progress of a run, and the clock at that moment.
        links: the connections to the other ranks.
        everyone: all ranks.
        known: the number of events that were processed.
        died: the event of the first rank that died.
        died_at: the clock when the event `died` was processed.
        done: the ranks that have made their last call.
        first: the first failure of a call; None once all ranks have failed or have made another call.
        failed: the ranks that have failed since the first failure.
        away: the ranks that have not made another call since the first failure.
        since: the clock at the first failure.
        misaligned: the first report that the calls of the ranks differ; else empty.
        disturbed: True if this rank's next call must handle an event before it runs.
        renewals: the number of times that the ranks have renewed their shared state.
        abandoned: the event of a rank that has abandoned a call since the latest renewal.
        raised: the error that this rank has raised to its caller. The caller may still be printing the error.
        acknowledged: True if the caller knows the error of the latest plan.
        wake, signalled: the ends of a pipe that wakes the thread.
        closing: set when the thread has to end.
        before: the file descriptor to which the user wants signals to be written; -1 without one.
        late: returns a text about collectives on the device that have not ended in time. The text is empty if all end
            in time.
    """

    limit = "HOSTIR_TIMEOUT"  # the name of the setting of the timeout, for messages

    def __init__(self, store: Any, rank: int, size: int, timeout: float, keepalive: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.plan: Watched | None = None
        self.replaced: list[Watched | None] = []
        self.inspecting = threading.Lock()  # the watchdog's thread must not drop the last reference to a plan
        self.clock = 0.0
        self.stood: tuple[object, float] = (None, 0.0)
        self.links = Links(store, rank, size, keepalive)
        self.everyone = set(range(size))
        self.known = 0
        self.died: RankEvent | None = None
        self.died_at = 0.0
        self.done: set[int] = set()
        self.first: RankEvent | None = None
        self.failed: set[int] = set()
        self.away: set[int] = set()
        self.since = 0.0
        self.misaligned = ""
        self.disturbed = False
        self.renewals = 0
        self.abandoned: RankEvent | None = None
        self.raised: HostIRError | None = None
        self.acknowledged = False
        self.wake, self.signalled = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.signalled, False)
        self.closing = threading.Event()
        self.late: Callable[[], str] = str
        self.before = -1
        self.install_handler()
        self.thread = threading.Thread(target=self.watch, name="hostir watchdog", daemon=True)
        self.thread.start()

    def observe(self, plan: Watched, capturing: bool = False) -> None:
        """Watch a plan that runs now, or that is captured into a CUDA graph (`capturing`).

        The previously watched plan is released in the calling thread, but not during a capture. Memory that the GPU
        shares with peers may be freed with the plan, and then the driver waits until the device is idle.
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

    def unwatch(self) -> None:
        """Stop watching the latest plan, so that it can be destroyed. When this is called, no call of the plan runs."""
        with self.inspecting:
            self.plan = None
        self.replaced.clear()

    def blame(self, failure: HostIRError, abandoned: bool = False) -> HostIRError:
        """Report a failure of this rank to all ranks; return the error to raise.

        If another rank has failed before or has died, the error gets a note about this. `abandoned` is True if peers
        may wait for the rest of this rank's call. Then the failure may come from the death of a rank, and this rank
        waits a moment to hear of it: a lost connection is noticed before the end of a process. It does not wait if the
        call has failed on all ranks.
        """
        if isinstance(failure, MisalignedError):  # all ranks know it already
            return failure
        what, self.raised = "abandoned" if abandoned else "failed", failure
        self.links.announce(what, headline(failure), self.renewals)
        self.links.await_own()
        self.learn()
        heard_by = time.monotonic() + LOSS
        while abandoned and self.first is not None and self.died is None and time.monotonic() < heard_by:
            time.sleep(PAUSE)
            self.links.pump()
            self.learn()
        failure = self.noted(failure)
        self.raised, self.acknowledged, self.disturbed = failure, True, True
        return failure

    def noted(self, failure: HostIRError) -> HostIRError:
        """Return an error of this rank with notes about the rank that has died, and about another rank's failure."""
        theirs = self.first if self.first is not None and self.first.rank != self.rank else None
        ended = theirs is not None and self.died is not None and theirs.rank == self.died.rank  # its failure ended it
        causes = ("" if ended else self.loss(), theirs.words if theirs is not None else "")
        first, *rest = failure.diagnostics
        notes = tuple((None, f"first, {cause}") for cause in causes if cause and cause not in first.message)
        new = tuple(note for note in notes if note not in first.notes)
        return HostIRError(replace(first, notes=(*first.notes, *new)), *rest) if new else failure

    def misalign(self, why: str) -> str:
        """Report to all ranks that a rank may run a call that another rank does not make, with the reason.

        Return the first reason that any rank has reported.
        """
        self.links.announce("misaligned", why)
        self.links.await_all()
        self.learn()
        return self.misaligned or why

    def resume(self) -> None:
        """Begin the next call after a failure: report to all ranks that this rank makes calls again."""
        with self.links.changing:  # an event that arrives now is for the call after this one
            self.disturbed, self.raised = bool(self.misaligned), None
        if self.first is not None:
            self.links.announce("back")

    def renewed(self) -> None:
        """Forget the abandoned call and earlier failures, because all ranks have met since then."""
        with self.links.changing:
            self.renewals += 1
            if self.first is not None and self.first.renewals < self.renewals:
                self.first = None
            if self.abandoned is not None and self.abandoned.renewals < self.renewals:
                self.abandoned = None

    def leave(self) -> None:
        """Report to all ranks that this rank has made its last call. After that, its exit is no failure."""
        self.links.announce("done")
        self.links.await_own()

    def close(self, done: bool = True) -> None:
        """End the thread and close the connections.

        `done` is False if this rank is about to exit with an error. Then SIGTERM must not interrupt the printing of the
        error.
        """
        self.closing.set()
        os.write(self.signalled, b"\0")
        self.thread.join()
        self.restore_handlers(signal.SIG_DFL if done else lambda number, frame: None)
        self.plan = None  # a plan holds memory and process groups
        self.replaced.clear()
        self.drop()

    def drop(self) -> None:
        """Close the pipe and the connections of this process, without a message to other ranks."""
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
            if late := self.late():
                self.end_late(late)

    def ends_by_itself(self) -> bool:
        """Wait up to LAST_WORDS seconds for this rank to end by an error that it has raised; return True if it ends.

        Return False at once if this rank has raised no error. The traceback of the error says more than the watchdog's
        message.
        """
        return self.raised is not None and self.closing.wait(LAST_WORDS)

    def learn(self) -> None:
        """Process the new events of all ranks."""
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
        if event.renewals < self.renewals:
            return  # since then every rank has made a call
        if event.what == "abandoned":
            if self.abandoned is None or self.abandoned.renewals < event.renewals:
                self.abandoned = event
            self.disturbed = True
        if self.first is not None and self.first.renewals >= event.renewals:  # else every rank has made a call since
            self.failed.add(event.rank)
            return
        self.first, self.since = event, self.clock
        self.failed, self.away = {event.rank}, set(self.everyone)
        self.disturbed = True

    def end_lost_run(self) -> None:
        """Raise an error in the current run if it makes no progress and another rank has abandoned a call."""
        event, plan = self.abandoned, self.plan
        if event is None or event.rank == self.rank or plan is None or not plan.in_flight():
            return
        if self.clock - self.stood[1] >= STILL:
            plan.give_up(self.lost_call(event))

    def lost_call(self, event: RankEvent) -> HostIRError:
        """Return the error for this rank's caller about a call that has ended midway on another rank."""
        what = f"a call ended midway on another rank, and what rank {self.rank} has issued may wait for its rest"
        return HostIRError(Diagnostic(f"{what}: {event.words}", hint=RENEWAL))

    def cause(self) -> str:
        """Return the reason why this rank must end because of another rank; empty if it need not end."""
        overdue = self.first is not None and self.clock - self.since > self.timeout
        if self.first is not None and (overdue or self.died is not None):
            follows = self.died is None or self.died.rank == self.first.rank  # the failure has ended that rank
            return self.first.words if follows else f"{self.first.words}; {self.loss()}"
        idle = self.misaligned or self.plan is None or not self.plan.in_flight()  # `stop_misaligned` stops the run
        if idle and self.clock - self.died_at < LAST_WORDS:
            return ""
        lost = self.loss()
        return self.misaligned if lost and self.misaligned else lost

    def stop_misaligned(self) -> None:
        """Raise an error in the current run if the calls of the ranks differ."""
        if self.misaligned and self.plan is not None and (ops := self.plan.in_flight()):
            at = f"rank {self.rank} was at {self.plan.describe(ops[0])}"
            self.plan.give_up(MisalignedError(self.misaligned, at))

    def loss(self) -> str:
        """Return a message with the rank that has died and the evidence for it; empty if no rank has died."""
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
        self.links.announce("failed", f"rank {self.rank}, {at}: {what}", self.renewals)
        return f"it {what}"

    def reported(self) -> str:
        """Return the errors that this rank's device has reported; empty if the caller already knows them."""
        problem = self.plan.reported_problem() if self.plan is not None and not self.acknowledged else ""
        if problem:
            self.links.announce("failed", problem, self.renewals)
        return problem

    def end_late(self, late: str) -> None:
        """Print which collectives on the device do not end (`late`), and end the process.

        A host that waits for the device would wait for ever. So the process of a guest ends, too. torch's watchdog does
        the same.
        """
        try:
            self.links.announce("failed", f"rank {self.rank}: {late}", self.renewals)
            hint = "another rank may have stopped or make other calls, a link may be broken, or the device has failed"
            say(Diagnostic(f"rank {self.rank} is ended: {late}", hint=hint))
        finally:
            os._exit(1)

    def end(self, cause: str) -> None:
        """Print the diagnostic with this cause, and end the process."""
        try:
            self.report(cause)
        finally:
            os._exit(1)

    def report(self, cause: str) -> None:
        say(self.diagnostic(cause))

    def diagnostic(self, cause: str) -> Diagnostic:
        """Return the diagnostic that names this rank, its current statement and the cause."""
        if self.raised is not None:
            return self.noted(self.raised).diagnostics[0]
        plan = self.plan
        ops = plan.in_flight() if plan else []
        if plan is None or not ops:
            return Diagnostic(f"rank {self.rank} is ended between runs: {cause}")
        notes = tuple((op.place.statement.span, f"also at {plan.describe(op)}") for op in ops[1:])
        message = f"rank {self.rank} is ended at {plan.describe(ops[0])}: {cause}"
        return Diagnostic(message, ops[0].place.statement.span, notes=notes)

    def install_handler(self) -> None:
        """Install a handler so that SIGTERM wakes the watchdog thread, even if the main thread is stuck outside Python.

        When a rank has ended, a launcher sends SIGTERM to the other ranks. If the user installs a handler, earlier or
        later, only the user's handler is called. If the user's handler calls this handler, this rank ends.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.on_sigterm)
        self.before = signal.set_wakeup_fd(self.signalled, warn_on_full_buffer=False)

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: wake the watchdog thread, which ends the process."""
        if self.signalled >= 0:
            os.write(self.signalled, ASKED)
            return
        signal.signal(number, signal.SIG_DFL)  # the session has ended, and a handler of the user has called ours
        os.kill(os.getpid(), number)

    def heard(self) -> bytes:
        """Return the numbers of the received signals as bytes.

        Forward them to the file descriptor that the user has set for signals, if there is one.
        """
        try:
            heard = os.read(self.wake, 64)
        except BlockingIOError:
            return b""
        if self.before >= 0:
            with contextlib.suppress(OSError):
                os.write(self.before, heard.translate(None, b"\0" + ASKED))
        return heard

    def restore_handlers(self, handler: Callable[[int, FrameType | None], object] | int = signal.SIG_DFL) -> None:
        """Undo `install_handler`, and install `handler` for SIGTERM. Keep handlers that others have installed since."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self.on_sigterm:
            signal.signal(signal.SIGTERM, handler)
        now = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self.before if now == self.signalled else now, warn_on_full_buffer=False)

    def terminated(self) -> NoReturn:
        try:
            self.learn()
            words = self.cause() or (self.first.words if self.first is not None else "")
            self.report(words or "SIGTERM, which a launcher sends to all ranks when one of them has ended")
        finally:
            os._exit(128 + signal.SIGTERM)

    def forget(self) -> None:
        """Release the handlers, the pipe and the connections in a child process that was forked from the rank."""
        self.before = -1
        self.restore_handlers()
        self.drop()


class GuestWatchdog(Watchdog):
    """The watchdog of one rank of a process group. It raises errors in calls, and does not end the process.

    The exception is a collective on the device that does not end: see `end_late`.

    It installs no signal handlers. If a rank makes no calls, or fails in a call, the other ranks get an error only when
    they wait for this rank. If a rank dies, no rank of the group can make more calls.

    Fields:
        gave_up: True if the watchdog has raised an error in a call of this rank. Other ranks may still be in this call.
    """

    limit = "the group's timeout"
    gave_up = False

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
        """Return an empty text, because the failure of another rank does not end this rank.

        Only a call that makes no progress is ended.
        """
        return ""

    def standstill(self) -> str:
        if self.gave_up:
            return ""
        problem = super().standstill()
        return self.loss() or problem if self.clock - self.stood[1] >= LAST_WORDS else problem

    def reported(self) -> str:
        """Return an empty text. The next call raises the errors that the device has reported."""
        return ""

    def end(self, cause: str) -> None:
        """Raise an error with this cause in the current call, if there is one."""
        plan, self.gave_up = self.plan, True
        if plan is not None and plan.in_flight():
            plan.give_up(HostIRError(Diagnostic(cause)))

    def install_handler(self) -> None:
        """Install nothing: signals belong to the user's program."""

    def restore_handlers(self, handler: Callable[[int, FrameType | None], object] | int = signal.SIG_DFL) -> None:
        """Restore nothing: signals belong to the user's program."""
