"""Runs commands in processes that are forked from a server that has imported torch, triton and hostir.

`begin` starts one command, or the ranks of a job and their store. `launch` waits until they end. Most commands of tests
take less time than the imports.

A process starts like `python COMMAND...`, but some modules are already imported, and garbage is collected less often.
It ends after its exit handlers, unless `finalize` is True: freeing all modules takes longer than most commands.
Tests of the start itself (imports, torchrun, the commands of the README) start new processes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRACE = 20  # seconds until the other ranks are killed, after one has failed
MAX_REQUEST_BYTES = 1 << 20


class Job:
    """A running command, or the ranks of a job, with the methods of `subprocess.Popen`.

    Fields:
        returncode: None until `communicate` returns; then 0 or the first other exit code, negative if a signal ended
            that process.
    """

    def __init__(self, ranks: int, command: tuple[str, ...], env: Mapping[str, str], cwd: Path, finalize: bool) -> None:
        self.args, self.returncode, self._output = command, None, ("", "")
        self._printed = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115, closed in communicate
        self._ends, theirs = socket.socketpair()
        request = {"ranks": ranks, "command": command, "env": dict(env), "cwd": str(cwd), "finalize": finalize}
        with theirs:
            fds = [theirs.fileno(), *(file.fileno() for file in self._printed)]
            socket.send_fds(_server(env.get("TRITON_INTERPRET")), [json.dumps(request).encode()], fds)
        group = self._ends.recv(64)
        assert group, "the server did not start, or could not fork"
        self._group = int(group)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """
        if self.returncode is not None:
            return self._output
        self._ends.settimeout(timeout)
        try:
            code = self._ends.recv(64)
        except TimeoutError:
            printed = (text.encode() for text in self._read())  # bytes, as in Popen
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *printed) from None
        self.returncode, self._output = int(code or -signal.SIGKILL), self._read()
        for file in (self._ends, *self._printed):
            file.close()
        return self._output

    def _read(self) -> tuple[str, str]:
        for file in self._printed:
            file.seek(0)
        out, err = (file.read() for file in self._printed)
        return out, err

    def kill(self) -> None:
        """Kill all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH: `folders`, the repository, and the PYTHONPATH of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")]))


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that a test starts: the repository's modules, and one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **more}


def begin(*command: str, env: Mapping[str, str], ranks: int = 0, cwd: Path = ROOT, finalize: bool = False) -> Job:
    """Start `python COMMAND...`: a script, `-m MODULE` or `-c CODE`, with arguments; on ranks if `ranks` > 0.

    `finalize`: True to free all modules at the end, as `python` does.
    """
    return Job(ranks, command, env, cwd, finalize)


def launch(
    ranks: int, *command: str, env: Mapping[str, str], timeout: float, cwd: Path = ROOT, finalize: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a job of several ranks, or one process if `ranks` is 0, until it ends; kill all that is left."""
    job = begin(*command, env=env, ranks=ranks, cwd=cwd, finalize=finalize)
    try:
        out, err = job.communicate(timeout)
    finally:
        job.kill()
        job.communicate()
    return subprocess.CompletedProcess(command, job.returncode, out, err)


def free_port() -> int:
    """Return a free port below those that Linux hands out by itself: no connection of another test will take it."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, lowest), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError(f"of 100 ports between 10000 and {lowest} none is free")


@cache
def _server(interpret: str | None) -> socket.socket:
    """Start the server and return the socket for requests; `interpret` is TRITON_INTERPRET, read on import."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = environment() | ({"TRITON_INTERPRET": interpret} if interpret else {})
    command = [sys.executable, __file__, str(theirs.fileno())]
    with theirs:
        server = subprocess.Popen(
            command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    atexit.register(server.wait, 10)
    atexit.register(ours.close)
    return ours


# In the server ----------------------------------------------------------------------------------------------------
def serve(requests: socket.socket) -> tuple[dict[str, Any], socket.socket]:
    """Fork a process for every request. Only the forked process returns.

    It returns the request, and the socket to which the exit code is sent.
    """
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
    os.setsid()
    requests.close()
    for fd in (1, 2):
        os.dup2(fds[fd], fd)
        os.close(fds[fd])
    return json.loads(request), socket.socket(fileno=fds[0])


def fork_ranks(ranks: int, port: int) -> set[int]:
    """Fork the ranks, and return their process ids. In each rank, set the environment, and return an empty set."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(job, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = set()
    for rank in range(ranks):
        if not (child := os.fork()):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return set()
        children.add(child)
    return children


def wait_for(children: set[int]) -> int:
    """Wait for all processes and return the first exit code that is not 0; after a failure, kill them in `GRACE` s."""
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


def supervise(ranks: int, ends: socket.socket) -> None:
    """Fork the processes of a job and return in each; the first process waits for them and sends the exit code."""
    ends.send(str(os.getpid()).encode())
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    children = fork_ranks(ranks, port) if ranks else {os.fork()} - {0}  # before the store has threads
    if not children:
        ends.close()
        listening.close()
        return
    if ranks:
        from torch.distributed import TCPStore

        _store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    ends.send(str(wait_for(children)).encode())
    os._exit(0)


class Ending:
    """Ends the process with its exit code, after all exit handlers of others. Must be made before they are."""

    def __init__(self) -> None:
        self.code: int | None = None  # None leaves the end to Python
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)

    @contextlib.contextmanager
    def records(self) -> Iterator[None]:
        """Record the exit code that follows from the end of the block."""
        try:
            yield
            self.code = 0
        except KeyboardInterrupt:
            raise  # Python ends itself by a signal
        except SystemExit as end:
            self.code = (end.code or 0) & 255 if isinstance(end.code, int | None) else 1
            raise
        except BaseException:
            self.code = 1
            raise


def main() -> None:
    ending = Ending()
    import networkx  # noqa: F401
    import pytest  # noqa: F401
    import torch._inductor.compile_fx  # with Dynamo: each rank that compiles would take more than a second for it
    import torch.distributed.checkpoint  # noqa: F401

    import examples.patterns  # noqa: F401
    import hostir.call.local
    import hostir.call.rank
    import hostir.choice.measure
    import hostir.cli.run
    import hostir.kernels.reduce  # with Triton and the matmul
    import hostir.torch  # noqa: F401
    from hostir.ir.grammar import tree_of

    tree_of("hostir 1\nmesh @one [rank] = 0\nfusion @none() -> () {\n}\n", "")  # builds the parser
    gc.collect()
    gc.freeze()  # otherwise each fork copies all pages when it ends
    gc.set_threshold(50_000, 10, 10)  # as in tests/conftest.py: it saves a tenth of the time of ranks
    request, ends = serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    supervise(request["ranks"], ends)
    if "PYTHONWARNINGS" in os.environ:
        warnings.simplefilter(os.environ["PYTHONWARNINGS"])  # type: ignore[arg-type]
    with contextlib.nullcontext() if request["finalize"] else ending.records():
        run(*request["command"])


def run(first: str, *rest: str) -> None:
    """Run a script, `-m MODULE` or `-c CODE` with arguments."""
    sys.path[0] = "" if first in ("-c", "-m") else str(Path(first).resolve().parent)
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
