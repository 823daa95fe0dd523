"""Hosts: which ranks of a job can access each other's memory.

A host here is one running kernel with one namespace of processes. Two containers on a machine are two hosts, unless
they share this namespace, because neither can open the memory of the other's processes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

BOOT, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def host_identity() -> str:
    """Return an identity of the host of this process. Ranks share memory if and only if their identities are equal.

    The identity consists of the kernel's boot id and the namespace of processes. Without /proc it is the host's name.
    """
    try:
        return f"{BOOT.read_text().strip()} {os.readlink(PROCESSES)}"
    except OSError:  # not Linux, or a /proc without these files
        return platform.node()


def ranks_by_host(identities: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, given the host identity of each rank. Hosts are in the order of their ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def equal_hosts(ranks: int, hosts: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host if `hosts` hosts have equally many consecutive ranks, as under torchrun."""
    return tuple(tuple(range(first, first + ranks // hosts)) for first in range(0, ranks, ranks // hosts))


def equal_number(hosts: Sequence[Sequence[int]]) -> int:
    """Return the number of hosts if they have equally many consecutive ranks; 0 otherwise."""
    ranks = sum(map(len, hosts))
    equal = hosts and ranks % len(hosts) == 0 and equal_hosts(ranks, len(hosts)) == tuple(map(tuple, hosts))
    return len(hosts) if equal else 0


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
