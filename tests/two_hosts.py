"""Two hosts on one machine, for tests: each has its own network, processes, shared memory and host name.

The hosts are namespaces of Linux, joined by a pair of virtual network devices. They need no privileges, but a kernel
that lets users make namespaces. `run` starts a command on some ranks of each host, with the variables that torchrun
sets. All processes end with `run`, because they are in a namespace of processes whose first process ends then.

As a script, this file is the machine around the hosts, or one of the hosts:

    two_hosts.py machine RANKS COMMAND...
    two_hosts.py host NUMBER RANKS COMMAND...
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = ("first", "second")  # the names of the hosts
ADDRESSES = ("10.9.0.1", "10.9.0.2")
DEVICE = "eth_hosts"  # the network device of each host; a rank may take it down
ENDS = ("end_one", "end_two")  # the two ends of the link before the hosts get them
PAIR = ("link", "add", "name", ENDS[0], "type", "veth", "peer", "name", ENDS[1])
PORT = 29511
NEW_HOST = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
NEW_MACHINE = ("unshare", "--user", "--map-root-user", *NEW_HOST[1:])
SETUP = 20.0  # seconds


@cache
def why_not() -> str:
    """Return the reason why this machine cannot have two hosts; empty if it can."""
    missing = [program for program in ("unshare", "ip", "mount") if not _found(program)]
    if missing:
        return f"there is no program '{missing[0]}'"
    probe = subprocess.run((*NEW_MACHINE, "ip", *PAIR), capture_output=True, text=True, check=False)
    return probe.stderr.strip() or ("" if probe.returncode == 0 else f"unshare failed with {probe.returncode}")


def _found(program: str) -> bool:
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/sbin", "/sbin"]
    return any(os.access(Path(folder) / program, os.X_OK) for folder in folders)


def run(ranks: int, *command: str, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND...` on `ranks` ranks of each host, until all have ended; return what they printed.

    The exit code is the first one that is not 0. After `timeout` seconds everything is killed.
    """
    machine = (*NEW_MACHINE, sys.executable, __file__, "machine", str(ranks), *command)
    env = {**env, "PATH": os.pathsep.join([env.get("PATH", ""), "/usr/sbin", "/sbin"])}
    job = subprocess.Popen(
        machine, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = job.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # unshare kills its child, the first process of the machine
        job.communicate()
    return subprocess.CompletedProcess(command, job.returncode, out, err)


# Around the hosts -----------------------------------------------------------------------------------------------------
def machine(ranks: int, command: list[str]) -> int:
    """Make two hosts and the link between them, and run the ranks; return the first exit code that is not 0."""
    hosts = []
    for number in range(2):
        process = subprocess.Popen(
            (*NEW_HOST, sys.executable, __file__, "host", str(number), str(ranks), *command),
            stdin=subprocess.PIPE,
            stdout=None,
        )
        hosts.append(process)
    _ip(*PAIR)
    for end, host in zip(ENDS, hosts, strict=True):
        _ip("link", "set", "dev", end, "netns", str(_child(host.pid)), "name", DEVICE)
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write(b"\n")
        host.stdin.close()
    codes = [host.wait() for host in hosts]
    return next((code for code in codes if code), 0)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, timeout=SETUP)


def _child(process: int) -> int:
    """Return the only child of a process, when it has one in a namespace of its own."""
    deadline = time.monotonic() + SETUP
    mine = os.readlink("/proc/self/ns/net")
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        with contextlib.suppress(OSError):
            if children and os.readlink(f"/proc/{children[0]}/ns/net") != mine:
                return int(children[0])
        time.sleep(0.01)
    raise TimeoutError(f"process {process} has started no host")


# In a host ------------------------------------------------------------------------------------------------------------
def host(number: int, ranks: int, command: list[str]) -> int:
    """Set up this host, run its ranks, and return the first exit code that is not 0."""
    socket.sethostname(NAMES[number])
    subprocess.run(("mount", "-t", "tmpfs", "tmpfs", "/dev/shm"), check=True)
    sys.stdin.readline()  # the link is there
    _ip("addr", "add", f"{ADDRESSES[number]}/24", "dev", DEVICE)
    for device in (DEVICE, "lo"):
        _ip("link", "set", "dev", device, "up")
    shared = {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(2 * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": DEVICE,
    }
    jobs = []
    for local in range(ranks):
        place = {"RANK": str(number * ranks + local), "LOCAL_RANK": str(local)}
        jobs.append(
            subprocess.Popen(
                (sys.executable, *command), env={**os.environ, **shared, **place}, stdin=subprocess.DEVNULL
            )
        )
    codes = [job.wait() for job in jobs]
    return abs(next((code for code in codes if code), 0))


if __name__ == "__main__":
    level, *rest = sys.argv[1:]
    if level == "machine":
        sys.exit(machine(int(rest[0]), rest[1:]))
    sys.exit(host(int(rest[0]), int(rest[1]), rest[2:]))
