"""This process as one rank of a torchrun job: its device, its process groups, its watchdog.

    with hostir.runtime.session.session():      # or nothing: the first executor opens one until the process ends
        outputs = Executor(program)(a_local, b)

A process group that the program has initialised itself is used and left as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hostir.ir.source import error
from hostir.knobs import TIMEOUT
from hostir.runtime.graphs import Graphs
from hostir.runtime.watchdog import STALE, Watchdog

# NVLink multicast stays off, in NCCL and in symmetric memory; each library reads its variable when it starts.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
PARTING = 10.0  # seconds that destroying the process groups may take

_current: Session | None = None
_sessions = itertools.count()
_meeting: Any = None  # the store by which groups connect; where the launcher has none, rank 0 is its server


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


@dataclass
class Groups:
    """The process groups of this process, one for each team. Ranks make them in the same order."""

    rank: int
    device: torch.device
    made: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """What a group is made with. NCCL's kernels come first where blocks of two kernels wait for an SM."""
        if self.device.type != "cuda":
            return {"backend": BACKENDS[self.device.type]}
        return {"backend": "nccl", "pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)}

    def prepare(self, teams: Sequence[tuple[int, ...]]) -> None:
        """Makes the groups that are missing; on CUDA it also connects them, which a graph capture could not."""
        new = [team for team in teams if team not in self.made]
        for team in new:
            self.made[team] = dist.new_group(list(team), **self.options)
        if self.device.type != "cuda":
            return
        for team in new:
            if self.rank in team:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.made[team])
        if new:
            torch.cuda.synchronize(self.device)

    def of(self, team: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        """A team's group, and its ranks in the order in which the group numbers them."""
        members = tuple(sorted(team))
        return self.made[members], members


class Session:
    """One rank: `rank` of `size`, its `device`, and what it shares with the others."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device = device
        self.timeout = timeout
        self.told: Counter[str] = Counter()
        self.owner = not dist.is_initialized()
        os.environ.update(NO_MULTICAST)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher holds the store, from the start
        number = next(_sessions)
        if self.owner and agent:  # a rank that never comes would keep init_process_group waiting for half an hour
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.store = _connect(number)
            self.exchange("the start", "")
        if self.owner:
            _initialise(device, number, timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = _connect(number)
        self.groups = Groups(self.rank, device)
        self.executors = itertools.count()
        self.graphs: weakref.WeakSet[Graphs] = weakref.WeakSet()  # of the executors that live
        self.watchdog = Watchdog(self.store, self.rank, self.size, timeout, hosts=self.rank == 0 and not agent)

    def tell(self, key: str, mine: str) -> str:
        """Gives this rank's part of an exchange without waiting for the others'; returns where the store has it.

        What is told again under the same key is another exchange.
        """
        self.told[key] += 1
        place = f"{key}/{self.told[key]}"
        self.store.set(f"{place}/{self.rank}", mine)
        return place

    def exchange(self, key: str, mine: str, timeout: float | None = None) -> list[str]:
        """What every rank gave for this key, by rank. Raises HostIRError naming the ranks that do not come."""
        place = self.tell(key, mine)
        deadline = time.monotonic() + (timeout or self.timeout)
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                late = [rank for rank, k in enumerate(keys) if not self.store.check([k])]
                raise error(
                    f"rank {self.rank} waited {timeout or self.timeout:.0f} s for {_ranks(late)} at {key}",
                    expected="every rank to make the same calls in the same order",
                    hint="HOSTIR_TIMEOUT sets how long a rank may wait for the others",
                )
            time.sleep(0.005)
        return [self.store.get(k).decode() for k in keys]

    def close(self, done: bool, timeout: float | None = None) -> None:
        """Leaves the job. A rank that is `done` waits for the others; one that failed does not."""
        global _current
        if _current is not self:
            return
        _current = None
        for graphs in list(self.graphs):  # before the groups and the shared memory that they launch work on
            graphs.release("its session has ended")
        self.watchdog.leaving = done
        if done:
            with contextlib.suppress(Exception):  # rank 0 may be gone already, and the store with it
                self.exchange("the end", "", timeout)
        self.watchdog.close(done)
        self.groups.made.clear()
        if self.owner and done:
            _destroy()


def _initialise(device: torch.device, number: int, timeout: float) -> None:
    """Makes the default process group, in a part of the job's store that no session before has written to.

    torch numbers groups from 0 again once all were destroyed, and would take the addresses that are left for theirs.
    The store is kept: a rank that has left a session before the others would meet a server that is about to go.
    """
    global _meeting
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _meeting is None:
        try:
            _meeting, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except dist.DistError as problem:
            raise error(
                f"rank {rank} did not meet all {size} ranks within {timeout:.0f} s: {problem}",
                expected=f"all of them at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
                hint="HOSTIR_TIMEOUT sets how long a rank may wait for the others",
            ) from problem
        _meeting.set_timeout(default_pg_timeout)
    bound = device if device.type == "cuda" else None  # a bound device connects its ranks at once
    apart = _part(_meeting, "groups", number)
    dist.init_process_group(BACKENDS[device.type], store=apart, rank=rank, world_size=size, device_id=bound)


def _destroy() -> None:
    """Destroys the process groups; NCCL never comes back from that while a CUDA graph of its kernels is alive."""
    over = threading.Thread(target=dist.destroy_process_group, daemon=True)
    over.start()
    over.join(PARTING)
    if over.is_alive():
        print(
            "hostir: the process groups could not be destroyed, probably for a CUDA graph that is still alive; "
            "leaving them. Delete the graphs before the session ends.",
            file=sys.stderr,
            flush=True,
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def session(device: str | None = None, timeout: float | None = None) -> Iterator[Session | None]:
    """Joins the job that torchrun started, on `device` ("cpu" or "cuda"; left out: CUDA where there is any).

    Gives None outside torchrun, where executors simulate their ranks. Inside another session, gives that one.
    `timeout` is in seconds; see the knob HOSTIR_TIMEOUT.
    """
    if _current is not None or not launched():
        yield _current
        return
    opened = _open(device, timeout)
    try:
        yield opened
    except BaseException:
        opened.close(done=False)
        raise
    opened.close(done=True)


def joined(device: str | None = None) -> Session:
    """The session of this process; opened until the process ends where there is none."""
    if _current is None:
        atexit.register(_leave, _open(device, None))
    here = _current
    assert here is not None
    if device is not None and here.device.type != device:
        raise error(f"this process has joined the job with its {here.device}", expected=f"one session, on {device}")
    return here


def _leave(opened: Session) -> None:
    opened.close(done=not hasattr(sys, "last_type"), timeout=5.0)


def _open(device: str | None, timeout: float | None) -> Session:
    global _current
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in BACKENDS:
        raise error(f"unknown device '{kind}'", expected=f"one of: {', '.join(BACKENDS)}")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if kind == "cuda" and not torch.cuda.is_available():
        raise error("there is no CUDA GPU here", hint="--device cpu runs the same ranks with gloo")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise error(
            f"rank {os.environ['RANK']} is number {local_rank} on its host, which has {torch.cuda.device_count()} GPUs",
            hint="start one process a GPU: --nproc-per-node",
        )
    where = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    _current = Session(where, TIMEOUT.get(timeout))
    return _current


def _connect(number: int) -> Any:
    """The job's store, over a connection of our own where its address is known."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        patience = timedelta(seconds=STALE)
        store: Any = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
    else:
        store = dist.distributed_c10d._get_default_store()
    return _part(store, "ranks", number)


def _part(store: Any, what: str, number: int) -> Any:
    """What of a store is for this session only: a launcher keeps its store when it starts the ranks of a job again."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "job"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"hostir/{'/'.join(job)}/{what}/{number}", store)
