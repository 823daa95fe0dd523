"""Sessions: this process as one rank of a torchrun job, with its device, process groups and watchdog.

    with hi.session():      # or nothing: the first executor opens one until the process ends
        outputs = Executor(program)(a_local, b)

A process group that the program has initialised itself is used and left as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from hostir.ir.source import HostIRError, check_known, error, logger
from hostir.job.agreement import Meetings
from hostir.job.calls import Calls
from hostir.job.groups import ANEW, Groups, world
from hostir.job.links import ALIKE, PAGE, MisalignedError, headline
from hostir.job.watchdog import Watchdog
from hostir.knobs import KEEPALIVE, TIMEOUT

# NVLink multicast stays off, in NCCL and in symmetric memory; each library reads its variable when it starts.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOG = logger(__name__)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MIN_PAUSE, MAX_PAUSE = 5e-5, 5e-3  # seconds between two polls for the other ranks, which mostly arrive together

_current: Session | None = None
_parents: Session | None = None  # of the rank that this process was forked from
_sessions = itertools.count()
_opening = threading.RLock()  # threads may make their first executors at once
_forking = threading.local()  # the signal mask of a thread that forks
begun = False  # whether this process has tried to meet others: errors from then on may be its own
# Addresses of job stores that the launcher does not provide, by the address where ranks meet; rank 0 has the server.
_servers: dict[tuple[str, str, str], tuple[str, int, Any]] = {}


def launched() -> bool:
    """Return True if a launcher such as torchrun started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


class Member(Protocol):
    """The methods of an executor that its session calls."""

    def _leave(self, reason: str) -> None:
        """Release the resources that the ranks share, and refuse further calls."""

    def _drop_stale(self) -> None:
        """Drop the plans whose symmetric memory was released."""

    def _renew(self) -> None:
        """Drop all plans, and agree anew on the next call of each kind."""


class Session:
    """This process as one of the ranks that run programs together: the object of `with hi.session() as job`.

    The ranks are all ranks of the job, or the members of a process group (`hostir.job.guest`).

    Fields:
        rank: of this process, from 0.
        size: the number of ranks.
        device: of this rank, a `torch.device`: `cpu`, or the GPU numbered by LOCAL_RANK.
        timeout: seconds that a rank waits for others before the job ends.
    """

    rank: int
    size: int
    store: Any
    watchdog: Watchdog
    limit = Watchdog.limit

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device = device
        self.timeout = timeout
        self.exchanges: Counter[str] = Counter()
        self.owner = not dist.is_initialized()
        os.environ.update(NO_MULTICAST)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher holds the store, from the start
        number = next(_sessions)
        if self.owner:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = _launchers_place() if agent else _met(self.rank, self.size, timeout, number)
            self.store = _part(_connection(host, port, timeout), "ranks", number)
            self.exchange("the start", "")  # a rank that never arrives would keep the groups waiting for half an hour
            groups = _part(_connection(host, port, default_pg_timeout.total_seconds()), "groups", number)
            bound = device if device.type == "cuda" else None  # a bound device connects its ranks at once
            # torch numbers groups from 0 again once all were destroyed, and would take addresses that are left for
            # theirs: so each session has a part of the store.
            dist.init_process_group(
                BACKENDS[device.type], store=groups, rank=self.rank, world_size=self.size, device_id=bound
            )
            _say_who_initialises(_too_late)
        else:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.store = _connect(timeout, number)
        self._share(Watchdog, default_pg_timeout)
        whose = "hostir's own" if self.owner else "the program's"
        LOG.info("joined a job of %d ranks on %s, in %s process group", self.size, device, whose)

    def _share(self, watchdog: type[Watchdog], patience: timedelta, whole: Callable[[], Any] = world) -> None:
        """Set up what the ranks share, once this one knows which it is and their store.

        Args:
            watchdog: what to do if a rank is lost.
            patience: the timeout of the process groups.
            whole: returns the registered process group of all ranks.
        """
        teams = PrefixStore("teams", self.store.clone())  # another connection: joining a group blocks one
        teams.set_timeout(patience)
        self.groups = Groups(self.rank, self.device, self.exchange, teams, patience, whole)
        report = lambda why: self.watchdog.misalign(why)  # noqa: E731  # there is no watchdog yet
        self.calls = Calls(self.store, self.rank, range(self.size), self.timeout, self.check_following, report)
        self.meetings = Meetings(self)
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()  # the executors that live
        self.first_store = self.store
        self.watchdog = watchdog(self.store, self.rank, self.size, self.timeout, KEEPALIVE.get())

    def exchange(self, key: str, mine: str, timeout: float | None = None, where: str = "") -> list[str]:
        """Return the texts of all ranks for this key, by rank. Using a key again starts another exchange.

        Raises HostIRError naming the ranks that do not arrive, and `where` they are missing; by default the key.
        """
        self.exchanges[key] += 1
        keys = [f"{key}/{self.exchanges[key]}/{rank}" for rank in range(self.size)]
        with self.asking(where or key):
            self.store.set(keys[self.rank], mine)
            self.wait(lambda ranks: self.store.check([keys[rank] for rank in ranks]), where or key, timeout)
            return [self.store.get(k).decode() for k in keys]

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        """Raise HostIRError if the store of the job cannot be reached."""
        try:
            yield
        except dist.DistError as problem:
            raise error(
                f"rank {self.rank} cannot ask the others at {where}: the store of the job is gone ({problem})",
                expected="rank 0, or the launcher that has the store, to live as long as the ranks",
            ) from problem

    def wait(
        self,
        arrived: Callable[[Sequence[int]], bool],
        where: str,
        timeout: float | None = None,
        note: Callable[[int], str] = lambda rank: "",
    ) -> None:
        """Poll until all ranks have arrived; raise HostIRError naming those that have not, each with its note.

        Raises the error for a call that another rank has abandoned, too: that rank does not arrive.
        """
        everyone, pause = range(self.size), MIN_PAUSE
        deadline = time.monotonic() + (timeout or self.timeout)
        while not arrived(everyone):
            if self.has_lost_call and not arrived(everyone):  # it may have arrived before it abandoned a call
                raise self.lost_call()
            self.check(where)
            if time.monotonic() > deadline:
                late = [rank for rank in everyone if not arrived([rank])]
                raise error(
                    f"rank {self.rank} waited {timeout or self.timeout:.0f} s for {_ranks(late)} at {where}",
                    expected=ALIKE,
                    hint=f"{PAGE}; {self.limit} sets how long one may wait for the others",
                    notes=(*((None, text) for rank in late if (text := note(rank))), *self.crossing()),
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    @property
    def symmetric_bytes(self) -> int:
        """The bytes of this rank's symmetric memory, which the executors of all programs share."""
        return self.groups.memory.bytes if self.groups.memory is not None else 0

    def check(self, where: str) -> None:
        """Raise if a rank for which this one waits is lost, or runs another call. The watchdog ends a job's ranks."""
        if not hasattr(self, "watchdog") or self.rank in self.watchdog.done:  # while the job begins, or ends
            return
        if self.watchdog.misaligned:
            raise MisalignedError(self.watchdog.misaligned, f"rank {self.rank} was at {where}")

    def check_following(self, where: str) -> None:
        """Raise as `check`, and if another rank has abandoned a call: it does not follow this rank's calls."""
        if self.has_lost_call:
            raise self.lost_call()
        self.check(where)

    # After a rank has abandoned a call, all ranks raise once. At their next calls they renew their shared state.
    #
    # A call is abandoned if it fails on a rank after peers may have noticed its beginning. The peers may wait for the
    # rest. Flags, process groups and counts of calls then disagree between ranks. So every rank raises an error to its
    # caller: the failing rank in that call, and the others in the call under way or in their next. At the first call
    # after the error, the ranks meet. By then every caller knows that results may be lost, so waits can be released.
    # When all devices are idle, symmetric memory and all counts get their first values again.

    @property
    def has_lost_call(self) -> bool:
        """True if another rank has abandoned a call, and this rank's caller does not know yet."""
        watchdog = vars(self).get("watchdog")  # it is missing while the session begins
        return watchdog is not None and watchdog.abandoned is not None and not self.groups.abandoned

    def lost_call(self) -> HostIRError:
        """Return the error that tells this rank's caller that another rank has abandoned a call; to be raised."""
        event = self.watchdog.abandoned
        assert event is not None
        self.groups.abandoned = event.words
        return self.watchdog.blame(self.watchdog.lost_call(event), abandoned=True)

    def renew(self) -> None:
        """Meet all ranks, and reset their shared state, once each has raised an error for an abandoned call.

        If ranks do not come, or a device does not become idle, raises HostIRError, and this rank makes no more calls.
        After any other exception no rank makes more calls.
        """
        if broken := self.groups.broken:
            raise error(f"rank {self.rank} makes no more calls: {broken}", hint=ANEW)
        where, memory = f"the first call after one that ended midway ({self.groups.abandoned})", self.groups.memory
        mine = self.calls.number, self.meetings.number, memory.meetings if memory is not None else 0
        try:
            texts = self.exchange("renewal", json.dumps(mine), where=where)
            numbers = [max(each) for each in zip(*map(json.loads, texts), strict=True)]
            self.store = PrefixStore(f"renewal {self.watchdog.renewals}", self.first_store)
            self.exchanges.clear()
            self.calls.restart(self.store, numbers[0])
            self.meetings.restart(numbers[1])
            if memory is not None:
                memory.meetings = numbers[2]
            self.watchdog.renewed()  # first: from then on, a thread that looks sees no lost call
            self.groups.renew(min(self.timeout, TIMEOUT.get()))
            for member in list(self.members):
                member._renew()
        except HostIRError as problem:
            self.groups.broken = self.groups.broken or headline(problem)
            raise
        except BaseException as problem:  # the shared state is renewed only in part
            self.calls.end(f"rank {self.rank} did not begin anew after a call that ended midway: {headline(problem)}")
            raise
        LOG.info("renewed what the ranks share, after a call that ended midway")

    def crossing(self) -> tuple[tuple[None, str], ...]:
        """Return a note for an error of waiting too long, if calls of other groups may wait for this rank's."""
        return ()

    def first(self, what: str) -> bool:
        """Return True on the first rank that asks with this text: for messages that one rank prints for all."""
        with contextlib.suppress(RuntimeError):  # the store may have gone
            return bool(self.first_store.add(f"said/{what}", 1) == 1)
        return True

    def close(self, done: bool, timeout: float | None = None) -> None:
        """Leave the job. A rank that is `done` waits for the others; one that failed does not."""
        global _current
        if _current is not self:
            return
        _current = None
        self.part(done, timeout)
        if self.owner:
            _say_who_initialises(_torchs_own)
        LOG.info("left the job, %s", "done" if done else "after a failure")

    def part(self, done: bool, timeout: float | None, wait: bool = True) -> None:
        """Part from the other ranks; `wait` for them if this one is `done`."""
        for member in list(self.members):  # their graphs go before the groups and the memory that they launch work on
            member._leave("its session has ended")
        if done and self.groups.memory is not None:
            self.groups.memory.sharing.synchronize()  # peers may still use this rank's
        if done:
            self.watchdog.leave()
        if done and wait:
            with contextlib.suppress(Exception):  # rank 0 may be gone already, and the store with it
                self.exchange("the end", "", timeout)
        self.watchdog.close(done)
        self.groups.end(done and not self.watchdog.misaligned, default=self.owner)  # peers may be within a call
        # Closes the connections: executors may outlive the session.
        self.store = self.first_store = self.calls.store = None


_torchs_own = dist.init_process_group


def _too_late(*arguments: Any, **options: Any) -> None:
    """Refuse `init_process_group`, which this replaces once hostir has initialised torch's groups itself."""
    raise error(
        "hostir has initialised torch's process group itself, when the session began with the first executor",
        expected="dist.init_process_group before the first executor or session: hostir uses that group",
        hint="or leave it out: torch.distributed works, with all ranks in the default group",
    )


def _say_who_initialises(function: Any) -> None:
    for module in (dist, dist.distributed_c10d):
        vars(module)["init_process_group"] = function


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def session(
    device: str | None = None, timeout: float | None = None
) -> contextlib.AbstractContextManager[Session | None]:
    """Joins the job that torchrun started, and leaves it at the end of the `with`: docs/sessions.md.

    Gives the `hi.Session`; None outside torchrun, where executors simulate their ranks. Inside another session, gives
    that one. Leaving waits for the other ranks, unless an exception ends the block. Raises HostIRError where ranks do
    not come, there is no such device, and in a process that was forked from a rank.

    Args:
        device: `cpu` or `cuda`; by default CUDA if torch sees a GPU.
        timeout: seconds that a rank waits for others; see the knob HOSTIR_TIMEOUT.
    """
    return _session(_known_device(device), TIMEOUT.get(timeout))


@contextlib.contextmanager
def _session(device: str, timeout: float) -> Iterator[Session | None]:
    if _current is not None or not launched():
        yield _current
        return
    refuse_in_child()
    opened = _open(device, timeout)
    try:
        yield opened
    except BaseException:
        opened.close(done=False)
        raise
    opened.close(done=True)


def joined(device: str | None = None) -> Session:
    """Return this process's session; without a session, open one until the process ends."""
    with _opening:
        if _current is None:
            refuse_in_child()
            _open(_known_device(device), TIMEOUT.get())
            atexit.register(_leave)
        here = _current
    assert here is not None
    if device is not None and here.device.type != device:
        raise error(f"this process has joined the job with its {here.device}", expected=f"one session, on {device}")
    return here


def _leave() -> None:
    if _current is not None:
        _current.close(done=not hasattr(sys, "last_type"), timeout=5.0)


def _forks() -> None:
    """Block SIGTERM during a fork until the child is ready for it: Python's handlers would miss an earlier one."""
    if _current is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _has_forked() -> None:
    if (mask := vars(_forking).pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forked() -> None:
    """Detach a forked child from the rank: it does not act for the rank."""
    global _current, _opening
    _opening = threading.RLock()  # a thread of the parent may have held the old one
    if _current is not None:
        detach(_current)
        _current = None
    atexit.unregister(_leave)
    _has_forked()


os.register_at_fork(before=_forks, after_in_parent=_has_forked, after_in_child=_forked)


def detach(left: Session) -> None:
    """Release the rank's resources in a process that was forked from it; that process cannot begin a session."""
    global _parents
    left.watchdog.forget()
    for kept in (left, dist.group.WORLD):  # never destroyed: gloo would join threads that are not here
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _parents = left


def refuse_in_child() -> None:
    """Raise in a process that was forked from a rank."""
    if _parents is not None:
        raise forked_from(_parents.rank)


def forked_from(rank: int) -> HostIRError:
    """Return the error for using in a forked child what only the rank itself can use."""
    return error(
        f"this process was forked from rank {rank} after that had made its first executor, and is no rank",
        expected="calls from the rank's own process: its threads, connections and GPU do not come along",
        hint="start workers before the first executor, or by multiprocessing's 'spawn'; "
        "here, machine='local' runs on simulated ranks",
    )


def _known_device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_known("device", device, BACKENDS)
    return device


def _open(kind: str, timeout: float) -> Session:
    global _current, begun
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if kind == "cuda" and not torch.cuda.is_available():
        raise error(
            "there is no CUDA GPU here",
            hint="run on CPUs, with gloo: machine='gloo' in Python, --device cpu on the command line",
        )
    begun = True
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise error(
            f"rank {os.environ['RANK']} is number {local_rank} on its host, which has {torch.cuda.device_count()} GPUs",
            hint="start one process a GPU",
        )
    where = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    _current = Session(where, timeout)
    return _current


def _launchers_place() -> tuple[str, int]:
    """Return the host and port at which the launcher lets ranks meet. Raises HostIRError if they are not set."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise error("this rank does not know where to meet the others", expected="MASTER_ADDR and MASTER_PORT")
    return host, int(port)


def _met(rank: int, size: int, timeout: float, number: int) -> tuple[str, int]:
    """Return the address of rank 0's store for all sessions of this process, as the launcher has none.

    The ranks meet at the launcher's address, rank 0 posts the address of its own store, and the first address is free
    again: others of the program may use it, and ranks that are early for a later session do not meet a closing store.
    """
    host, port = _launchers_place()
    key = host, str(port), os.environ["WORLD_SIZE"]
    if key not in _servers:
        patience = timedelta(seconds=timeout)
        try:
            place = TCPStore(
                host, port, is_master=rank == 0, wait_for_workers=False, timeout=patience, multi_tenant=True
            )
            meeting = _part(place, "meeting", number)
            if rank == 0:
                server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                meeting.set("port", str(server.port))
                meeting.wait([f"read/{other}" for other in range(1, size)], patience)
                _servers[key] = host, server.port, server
            else:
                _servers[key] = host, int(meeting.get("port")), None
                meeting.set(f"read/{rank}", "")
        except dist.DistError as problem:
            raise error(
                f"rank {rank} did not meet all {size} ranks within {timeout:.0f} s: {problem}",
                expected=f"all of them at {host}:{port}",
                hint="HOSTIR_TIMEOUT sets how long a rank may wait for the others",
            ) from problem
    return _servers[key][:2]


def _connection(host: str, port: int, seconds: float) -> Any:
    """Connect to a store of the job, with a timeout for keys."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _connect(timeout: float, number: int) -> Any:
    """Connect to the store of groups that the program has made, over an own connection if its address is known."""
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        store = _connection(*_launchers_place(), timeout)
    else:
        store = dist.distributed_c10d._get_default_store()
    return _part(store, "ranks", number)


def _part(store: Any, what: str, number: int) -> Any:
    """Return this session's part of a store: a launcher keeps its store when it restarts failed ranks."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "job"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"hostir/{'/'.join(job)}/{what}/{number}", store)
