"""Starts the ranks of a job from one process that has imported torch for all of them, and holds their store.

    python tests/launch.py RANKS SCRIPT ARGUMENT...
    python tests/launch.py RANKS -m MODULE ARGUMENT...

Most jobs of tests take less time than as many imports of torch. torchrun itself, which starts each rank anew and ends
them all when one fails, runs the demo, the commands of the pages, an example, and ranks that die.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

GRACE = 20  # seconds that ranks have to end by themselves, once one has failed


def launch(ranks: int, *command: str, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """A job of so many ranks: what they printed, and the first exit code that is not 0. None of it is left."""
    whole = [sys.executable, __file__, str(ranks), *command]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(whole, cwd=Path(__file__).parents[1], env=env, start_new_session=True, **piped) as job:
        try:
            printed, said = job.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(whole, job.returncode, printed, said)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def forked(ranks: int, port: int) -> set[int]:
    """The processes of the ranks; nothing in each of these, whose environment says which it is."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(job, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = set()
    for rank in range(ranks):
        if not (child := os.fork()):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return set()
        children.add(child)
    return children


def ended(children: set[int]) -> int:
    """Waits for all. Once one has failed, the others have `GRACE` left."""
    failed, last = 0, float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if child:
            children.discard(child)
            if status and not failed:
                failed, last = os.waitstatus_to_exitcode(status), time.monotonic() + GRACE
        elif time.monotonic() > last:
            for left in children:
                os.kill(left, signal.SIGKILL)
            last = float("inf")
        else:
            time.sleep(0.05)
    return failed


def main(ranks: int, command: list[str]) -> None:
    from torch.distributed import TCPStore  # and all of torch, for all ranks

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    if children := forked(ranks, port):  # before the store has threads
        _store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        code = ended(children)
        os._exit(code if code >= 0 else 128 - code)
    listening.close()
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
