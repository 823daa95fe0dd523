"""Sessions of process groups: the members of a process group of the user run executors together.

The session of a group changes nothing that belongs to the process or to the job. It installs no signal handlers, and
adds no process group to torch's registry. It does not end the process, unless collectives that native code has issued
do not end (see `Watchdog.end_late`). Ranks outside the group do not notice it. Ranks are numbered as in the group.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from hostir.ir.source import described, error, user_span
from hostir.job.session import LOG, NO_MULTICAST, Session, detach, joined, launched, refuse_in_child
from hostir.job.watchdog import GuestWatchdog

KINDS = "a process group of torch's, its name, or a DeviceMesh of one dimension"
PARTING = 5.0  # seconds that a rank that leaves waits for ranks that may use its GPU's memory
_guests: dict[str, Guest] = {}  # by the names of their groups
_numbers: Counter[str] = Counter()  # the sessions so far by the name of their group: torch may use a name again
_opening = threading.RLock()


class Guest(Session):
    """This process as a rank of a process group that the user has created. `timeout` is the timeout of the group."""

    limit = GuestWatchdog.limit

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group: ProcessGroup | None = group  # None once this rank has left it
        self.name = group.group_name
        self.device = device
        self.rank, self.size = group.rank(), group.size()
        self.owner = False
        patience = _timeout(group, device)
        self.timeout = patience.total_seconds()
        self.exchanges = Counter()
        if device.type == "cuda":
            os.environ.update(NO_MULTICAST)
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        theirs = store.clone()  # a separate connection
        self.store = PrefixStore(f"hostir/{_numbers[self.name]}", theirs)
        _numbers[self.name] += 1
        self._share(GuestWatchdog, patience, lambda: self.group)
        theirs.set_timeout(patience)  # only now: connecting to the store may take longer than calls
        LOG.info("joined the group %s of %d ranks on %s", self.name, self.size, device)

    def check(self, where: str) -> None:
        """Raise an error if a rank of the group has died, or if the calls of the ranks differ.

        A waiting rank calls this; `where` says where it waits.
        """
        super().check(where)
        if lost := self.watchdog.loss():
            raise error(f"rank {self.rank} waits at {where}, and {lost}")

    def crossing(self) -> tuple[tuple[None, str], ...]:
        """Return notes for the error of a timeout. They name other groups that this rank uses on the same device.

        If ranks call two groups in different orders, calls of one group may wait for calls of the other. Return () if
        this rank uses no other group. Even then, ranks may wait for each other in a cycle that passes through groups
        without this rank.
        """
        others = [(name, guest) for name, guest in list(_guests.items()) if guest is not self]
        crossing = [
            f"'{name}'" for name, guest in others if guest.device == self.device and registered(name) is guest.group
        ]
        if not crossing:
            return ()
        groups = f"group{'s' * (len(crossing) > 1)} {', '.join(crossing)}"
        what = f"this rank, of group '{self.name}', has made executors of {groups}, too"
        return ((None, f"{what}: if ranks call the groups in different orders, their calls wait for each other"),)

    def leave(self, done: bool, wait: bool) -> None:
        """End this rank's session. The process group itself stays usable.

        Args:
            done: True if the session ends without a failure.
            wait: True to wait for the other ranks if their GPUs may still use this GPU's memory.
        """
        shared = self.device.type == "cuda" and self.groups.memory is not None and bool(self.groups.memory.met)
        self.part(done, PARTING, wait and shared)
        self.group = None
        LOG.info("left the group, %s", "done" if done else "after a failure")


def session_of(group: object = None, device: str | None = None) -> Session | None:
    """Return the session of a process group; open it on first use.

    Without a group, return the session of the job. Return None if no launcher such as torchrun has started a job.

    Args:
        group: a process group of torch, its name, or a DeviceMesh of one dimension.
        device: `cpu` or `cuda`. By default it is `cuda` for a group with an NCCL backend, else `cpu`.
    """
    if group is None:
        return joined(device) if launched() else None
    known = resolved(group)
    with _opening:
        _sweep()
        if known.group_name not in _guests:
            refuse_in_child()
            if not _guests:
                atexit.unregister(_leave)
                atexit.register(_leave)
            _guests[known.group_name] = Guest(known, _device(known, device))
        here = _guests[known.group_name]
    if device is not None and here.device.type != device:
        raise error(f"this process has joined the group with its {here.device}", expected=f"one device, {device}")
    return here


def resolved(group: object) -> ProcessGroup:
    """Return the process group for a `group=` argument. Raise a HostIRError if this process is not a member."""
    if not dist.is_initialized():
        raise error(f"group={described(group)}, and torch has no process groups here", user_span(), expected=KINDS)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        hint = "make executors on its members only: the others need do nothing"
        raise error("group= is a group that this process is not in", user_span(), expected=KINDS, hint=hint)
    named = group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            what = f"group= is a DeviceMesh of {group.ndim} dimensions"
            raise error(what, user_span(), expected=KINDS, hint="mesh['tp'] is one of its dimensions")
        named = group.get_group()
    if isinstance(named, ProcessGroup):
        named = named.group_name
    if not isinstance(named, str):
        raise error(f"group={described(group)}", user_span(), expected=KINDS)
    if (known := registered(named)) is None:
        hint = "it may have been destroyed, or this process is not in it"
        raise error(f"torch knows no group '{named}' in this process", user_span(), expected=KINDS, hint=hint)
    return known


def registered(name: Any) -> ProcessGroup | None:
    """Return the process group that torch has registered under a name, or None."""
    try:
        return _resolve_process_group(name)
    except (RuntimeError, ValueError):
        return None


def _device(group: ProcessGroup, device: str | None) -> torch.device:
    nccl = "nccl" in dist.get_backend_config(group)
    if device == "cpu" or (device is None and not (nccl and torch.cuda.is_available())):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise error("there is no CUDA GPU here", hint="machine='gloo' runs on CPUs")
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def _timeout(group: ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a process group.

    It is the timeout of the group's backend for `device`. If the group has no such backend, it is the timeout of
    another backend of the group, or torch's default.
    """
    for kind in (device, *group._device_types):
        try:
            return group._get_backend(kind).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.constants.default_pg_timeout


def _sweep() -> None:
    """Close the sessions of process groups that the user has destroyed."""
    for name, guest in list(_guests.items()):
        if registered(name) is not guest.group:
            _guests.pop(name).leave(done=True, wait=False)


def _leave() -> None:
    for name in list(_guests):
        _guests.pop(name).leave(done=not hasattr(sys, "last_type"), wait=True)


def _forked() -> None:
    """Detach a forked child process from the sessions of groups, because the child is no rank."""
    global _opening
    _opening = threading.RLock()
    for guest in _guests.values():
        detach(guest)
    _guests.clear()


os.register_at_fork(after_in_child=_forked)
