"""Sessions: this process as one rank of a torchrun job, with its device, process groups and watchdog.

    with hi.session():
        outputs = Executor(program)(a_local, b)

Without the `with`, the first executor opens a session that lasts until the process ends. If the user has initialised
torch's process group, the session uses this group and does not destroy it.
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
from hostir.job.hosts import host_identity, ranks_by_host, ranks_text
from hostir.job.links import ALIKE, PAGE, MisalignedError, headline
from hostir.job.watchdog import Watchdog
from hostir.knobs import KEEPALIVE, TIMEOUT, set_by_launcher

# NVLink multicast stays off, in NCCL and in symmetric memory; each library reads its variable when it starts.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOG = logger(__name__)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LONGER = "HOSTIR_TIMEOUT sets how long a rank may wait for the others"
MIN_PAUSE, MAX_PAUSE = 5e-5, 5e-3  # seconds between two polls for other ranks; most ranks arrive together

_current: Session | None = None
_parents: Session | None = None  # the session of the rank from which this process was forked
_sessions = itertools.count()
_opening = threading.RLock()  # several threads may make their first executors at the same time
_forking = threading.local()  # the signal mask of a thread that forks
begun = False  # True once this process has tried to meet other ranks: later errors may differ from rank to rank
# Stores of jobs for which the launcher provides none: host, port and, on rank 0, the server. The key is the address at
# which the ranks meet, and the number of ranks.
_servers: dict[tuple[str, str, str], tuple[str, int, Any]] = {}


def launched() -> bool:
    """Return True if a launcher such as torchrun started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


class Member(Protocol):
    """The methods of an executor that its session calls."""

    def _leave(self, reason: str) -> None:
        """Release the resources that the executor shares with other ranks, and refuse further calls for this reason."""

    def _drop_stale(self) -> None:
        """Drop the plans that use released symmetric memory."""

    def _renew(self) -> None:
        """Drop all plans, so that the ranks agree again on the next call with each kind of sizes."""


class Session:
    """This process as one of the ranks that run programs together.

    `with hi.session() as job` gives a session of all ranks of the job. The session of an executor with `group=` has the
    members of this process group as its ranks.

    Fields:
        rank: the number of this rank, from 0.
        size: the number of ranks.
        device: the `torch.device` of this rank: `cpu`, or the GPU with the number in LOCAL_RANK.
        timeout: the seconds that a rank waits for other ranks before it gives up.
    """

    rank: int
    size: int
    store: Any
    watchdog: Watchdog
    limit = Watchdog.limit
    _hosts: tuple[tuple[int, ...], ...] = ()

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device = device
        self.timeout = timeout
        self.exchanges: Counter[str] = Counter()
        self.owner = not dist.is_initialized()
        os.environ.update(NO_MULTICAST)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher provides a store
        number = next(_sessions)
        if self.owner:
            self.rank, self.size = set_by_launcher("RANK", 0), set_by_launcher("WORLD_SIZE", 1)
            host, port = _launchers_place() if agent else _met(self.rank, self.size, timeout, number)
            self.store = _part(_connection(host, port, timeout), "ranks", number)
            self.exchange("the start", "")  # otherwise the groups wait half an hour for a rank that never arrives
            groups = _part(_connection(host, port, default_pg_timeout.total_seconds()), "groups", number)
            bound = device if device.type == "cuda" else None  # a bound device connects its ranks at once
            # When all groups are destroyed, torch numbers new groups from 0 again. It would then read addresses that
            # the old groups have left in the store. So each session has a separate part of the store.
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

    def _share(self, watchdog: type[Watchdog], patience: timedelta, all_ranks: Callable[[], Any] = world) -> None:
        """Set up the state that the ranks share. `rank`, `size` and `store` must be set.

        Args:
            watchdog: the class of the watchdog.
            patience: the timeout of the process groups.
            all_ranks: returns the registered process group of all ranks.
        """
        teams = PrefixStore("teams", self.store.clone())  # a separate connection: joining a group blocks it
        teams.set_timeout(patience)
        self.groups = Groups(self.rank, self.device, self.exchange, teams, patience, all_ranks)
        if self.owner:
            self.groups.destroyer.start()
        report = lambda why: self.watchdog.misalign(why)  # noqa: E731  # the watchdog does not exist yet
        self.calls = Calls(self.store, self.rank, range(self.size), self.timeout, self.check_following, report)
        self.meetings = Meetings(self)
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()  # the executors of this session
        self.first_store = self.store
        self.watchdog = watchdog(self.store, self.rank, self.size, self.timeout, KEEPALIVE.get())
        self.watchdog.late = self.groups.late

    def exchange(self, key: str, mine: str, timeout: float | None = None, where: str = "") -> list[str]:
        """Post this rank's text under a key, wait for all ranks, and return the texts of all ranks, by rank.

        A second use of a key is a separate exchange. Raise a HostIRError that names the ranks that do not arrive. Once
        all ranks have arrived, they have read the texts of the previous exchange with this key. So each rank deletes
        its previous text.

        Args:
            key: the name of the exchange.
            mine: the text of this rank.
            timeout: the seconds to wait; by default the timeout of the session.
            where: a description of the exchange for messages; by default the key.
        """
        self.exchanges[key] += 1
        number = self.exchanges[key]
        keys = [f"{key}/{number}/{rank}" for rank in range(self.size)]
        with self.asking(where or key):
            self.store.set(keys[self.rank], mine)
            self.wait(lambda ranks: self.store.check([keys[rank] for rank in ranks]), where or key, timeout)
            if number > 1:
                self.store.delete_key(f"{key}/{number - 1}/{self.rank}")
            return [self.store.get(k).decode() for k in keys]

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host. Ranks of one host can access each other's memory.

        All ranks make the first call of this together. Later calls wait for no other rank.
        """
        if not self._hosts:
            self._hosts = ranks_by_host(self.exchange("the hosts", host_identity()))
        return self._hosts

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        """Return a context manager. Inside it, a failure of the job's store raises a HostIRError that names `where`."""
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
        """Poll until all ranks have arrived. Raise a HostIRError that names the ranks that do not arrive in time.

        After that, this rank is connected to rank 0, so that the other ranks notice if it dies. If it cannot connect,
        it goes on nevertheless.

        If another rank has abandoned a call, it does not arrive. Then raise the error about the abandoned call.

        Args:
            arrived: returns True if all the given ranks have arrived.
            where: a description of the place where this rank waits, for messages.
            timeout: the seconds to wait; by default the timeout of the session.
            note: returns a note for the message about a rank that has not arrived; empty for no note.
        """
        everyone, pause = range(self.size), MIN_PAUSE
        deadline = time.monotonic() + (timeout or self.timeout)
        while not arrived(everyone):
            if self.has_lost_call and not arrived(everyone):  # the rank may have arrived before it abandoned a call
                raise self.lost_call()
            self.check(where)
            if time.monotonic() > deadline:
                late = [rank for rank in everyone if not arrived([rank])]
                raise error(
                    f"rank {self.rank} waited {timeout or self.timeout:.0f} s for {ranks_text(late)} at {where}",
                    expected=ALIKE,
                    hint=f"{PAGE}; {self.limit} sets how long one may wait for the others",
                    notes=(*((None, text) for rank in late if (text := note(rank))), *self.crossing()),
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
        if hasattr(self, "watchdog"):  # it is missing while the session begins
            self.watchdog.links.await_link()

    @property
    def symmetric_bytes(self) -> int:
        """The number of bytes of this rank's symmetric memory, for the executors of all programs together."""
        return self.groups.memory.bytes if self.groups.memory is not None else 0

    def check(self, where: str) -> None:
        """Raise an error if the calls of the ranks differ. A waiting rank calls this; `where` says where it waits.

        In a session of a process group, also raise an error if a rank has died. In a session of the job, the death of a
        rank raises no error here, because the watchdog ends this process.
        """
        if not hasattr(self, "watchdog") or self.rank in self.watchdog.done:  # while the job begins, or ends
            return
        if self.watchdog.misaligned:
            raise MisalignedError(self.watchdog.misaligned, f"rank {self.rank} was at {where}")

    def check_following(self, where: str) -> None:
        """Raise an error if `check` raises an error, or if another rank has abandoned a call.

        A rank that has abandoned a call does not make the calls that this rank waits for.
        """
        if self.has_lost_call:
            raise self.lost_call()
        self.check(where)

    # After a rank has abandoned a call, every rank raises an error once. Then the ranks renew their shared state.
    #
    # A call is abandoned if it fails on a rank after peers may have noticed its beginning. The peers may wait for the
    # rest of the call. After that, flags, process groups and counts of calls differ between ranks. So every rank raises
    # an error to its caller: the failing rank in this call, and the other ranks in their current or next call. At their
    # first calls after the error, the ranks meet. By then every caller knows that results may be lost, so the ranks can
    # end everything that waits. When all devices are idle, symmetric memory and all counts get their first values.

    @property
    def has_lost_call(self) -> bool:
        """True if another rank has abandoned a call, and this rank has not raised an error about it yet."""
        watchdog = vars(self).get("watchdog")  # it is missing while the session begins
        return watchdog is not None and watchdog.abandoned is not None and not self.groups.abandoned

    def lost_call(self) -> HostIRError:
        """Return the error that another rank has abandoned a call. The caller of this method must raise it."""
        event = self.watchdog.abandoned
        assert event is not None
        self.groups.abandoned = event.words
        return self.watchdog.blame(self.watchdog.lost_call(event), abandoned=True)

    def renew(self) -> None:
        """Meet all ranks and reset their shared state, after every rank has raised an error for an abandoned call.

        If a rank does not come, or if a device does not become idle, raise a HostIRError. Then this rank makes no more
        calls. After any other exception, no rank makes more calls.
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
            self.watchdog.renewed()  # first, so that no thread sees the lost call any more
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
        """Return notes for the error of a timeout. They name other groups for which this rank may wait."""
        return ()

    def first(self, what: str) -> bool:
        """Return True on the first rank that calls this with the text `what`.

        This rank then prints a message for all ranks.
        """
        with contextlib.suppress(RuntimeError):  # the store may be gone
            return bool(self.first_store.add(f"said/{what}", 1) == 1)
        return True

    def close(self, done: bool, timeout: float | None = None) -> None:
        """End the session, if it is the current session of the job.

        If `done` is True, wait for the other ranks, at most `timeout` seconds. `done` is False after a failure.
        """
        global _current
        if _current is not self:
            return
        _current = None
        self.part(done, timeout)
        if self.owner:
            _say_who_initialises(_torchs_own)
        LOG.info("left the job, %s", "done" if done else "after a failure")

    def part(self, done: bool, timeout: float | None, wait: bool = True) -> None:
        """Release everything that this rank shares with the other ranks.

        Args:
            done: True if the session ends without a failure.
            timeout: the seconds to wait for the other ranks; by default the timeout of the session.
            wait: True to wait for the other ranks. It has no effect if `done` is False.
        """
        for member in list(self.members):  # drops CUDA graphs before the groups and the memory that they use
            member._leave("its session has ended")
        if done and self.groups.memory is not None:
            self.groups.memory.sharing.synchronize()  # peers may still use this rank's memory
        if done:
            self.watchdog.leave()
        if done and wait:
            with contextlib.suppress(Exception):  # rank 0 may be gone already, and its store with it
                self.exchange("the end", "", timeout)
        self.watchdog.close(done)
        # If the calls of the ranks differ, peers may be inside a call, and destroying the groups might wait for them.
        self.groups.end(done and not self.watchdog.misaligned, default=self.owner)
        # This closes the connections even if executors outlive the session.
        self.store = self.first_store = self.calls.store = None


_torchs_own = dist.init_process_group


def _too_late(*arguments: Any, **options: Any) -> None:
    """Raise an error in place of `init_process_group`, because hostir has initialised torch's process group itself."""
    raise error(
        "hostir has initialised torch's process group itself, when the session began with the first executor",
        expected="dist.init_process_group before the first executor or session: hostir uses that group",
        hint="or leave it out: torch.distributed works, with all ranks in the default group",
    )


def _say_who_initialises(function: Any) -> None:
    for module in (dist, dist.distributed_c10d):
        vars(module)["init_process_group"] = function


def session(
    device: str | None = None, timeout: float | None = None
) -> contextlib.AbstractContextManager[Session | None]:
    """Return a context manager that joins the job that torchrun started, and leaves it at the end of the `with`.

    The `with` gives the `hi.Session`. Inside another session, it gives that session. Outside torchrun it gives None,
    and executors simulate their ranks. At the end of the block, the rank waits for the other ranks, unless an exception
    has ended the block. See docs/sessions.md.

    Raises HostIRError if ranks do not come, if there is no such device, or in a process that was forked from a rank.

    Args:
        device: `cpu` or `cuda`. By default it is `cuda` if torch sees a GPU.
        timeout: the seconds that a rank waits for other ranks. The default is the knob HOSTIR_TIMEOUT.
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
    """Return the open session of this process, or open a session that lasts until the process ends."""
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
    """Block SIGTERM during a fork. Otherwise the child would miss a SIGTERM that comes before its handlers are set."""
    if _current is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _has_forked() -> None:
    if (mask := vars(_forking).pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forked() -> None:
    """Detach a forked child process from the session, because the child is no rank."""
    global _current, _opening
    _opening = threading.RLock()  # a thread of the parent may have held the old one
    if _current is not None:
        detach(_current)
        _current = None
    atexit.unregister(_leave)
    _has_forked()


os.register_at_fork(before=_forks, after_in_parent=_has_forked, after_in_child=_forked)


def detach(left: Session) -> None:
    """Release the resources of a session in a forked child process. The child cannot open a session."""
    global _parents
    left.watchdog.forget()
    for kept in (left, dist.group.WORLD):  # never destroyed: gloo would join threads that the child does not have
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _parents = left


def refuse_in_child() -> None:
    """Raise an error if this process was forked from a rank."""
    if _parents is not None:
        raise forked_from(_parents.rank)


def forked_from(rank: int) -> HostIRError:
    """Return the error for a forked child process that acts as if it were the rank."""
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
    local_rank = set_by_launcher("LOCAL_RANK", set_by_launcher("RANK", 0))
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
    """Return MASTER_ADDR and MASTER_PORT, where the ranks meet. Raise a HostIRError if they are not set."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise error("this rank does not know where to meet the others", expected="MASTER_ADDR and MASTER_PORT")
    return host, int(port)


def _met(rank: int, size: int, timeout: float, number: int) -> tuple[str, int]:
    """Return the host and port of a store for all sessions of this process. Rank 0 runs the store.

    This store is used if the launcher provides no store. The ranks first meet at the launcher's address. There rank 0
    posts the address of its store. Then the launcher's address is free again, and other code can use it. A rank that is
    early for the next session does not reach a store that is about to close.

    Args:
        rank: this rank.
        size: the number of ranks.
        timeout: the seconds to wait for other ranks.
        number: the number of this session in this process.
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
                hint=LONGER,
            ) from problem
    return _servers[key][:2]


def _connection(host: str, port: int, seconds: float) -> Any:
    """Return a new connection to the store at an address. Reading a missing key waits at most `seconds`."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except dist.DistError as problem:
        raise error(
            f"this process did not reach the store of the job within {seconds:.0f} s: {problem}",
            expected=f"a store at {host}:{port}",
            hint=LONGER,
        ) from problem


def _connect(timeout: float, number: int) -> Any:
    """Return this session's part of the store of a process group that the user has initialised.

    If the launcher's address is known, this is a new connection. Otherwise it is torch's connection.
    """
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        store = _connection(*_launchers_place(), timeout)
    else:
        store = dist.distributed_c10d._get_default_store()
    return _part(store, "ranks", number)


def _part(store: Any, what: str, number: int) -> Any:
    """Return a part of a store for one purpose (`what`) of session `number`.

    A launcher that restarts failed ranks keeps its store. So each restart uses a separate part, too.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID", "job"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"hostir/{'/'.join(job)}/{what}/{number}", store)
