"""Cases that every rank of tests/call/test_processes.py runs: `process_cases.py NAME ...` runs the named cases.

Each case does something unusual to its process, and makes calls before and after it. A case that succeeds prints
`PASS name rank`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
import torch.distributed as dist

from hostir.call.executor import Executor
from hostir.ir import parse
from hostir.ir.source import HostIRError
from hostir.job import watchdog
from hostir.job.session import joined

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CASES: dict[str, Callable[[], None]] = {}
RANKS = " ".join(map(str, range(SIZE)))
# A worker stream gathers the rows and multiplies them. N is a symbol, so that a caller can ask for too many columns.
TEXT = f"""hostir 1
mesh @mesh [didx] = {RANKS}
program @gathered(%a: f32[{SIZE}@didx, M], %b: f32[M, N]) -> (%c) streams 1 {{
  %user = current_stream
  %c: f32[{SIZE}, N] = allocate
  set_stream 0
  synchronize %user
  %g: f32[{SIZE}, M] = allocate
  %h = allgather %a -> %g over didx
  wait %h
  matmul %g, %b -> %c
  set_stream %user
  synchronize 0
}}
"""
ALONE = """hostir 1
mesh @mesh [didx] = 0
program @alone(%a: f32[4]) -> (%c) streams 1 {
  %user = current_stream
  %c: f32[4] = allocate
  set_stream 0
  synchronize %user
  add %a, %a -> %c
  set_stream %user
  synchronize 0
}
"""


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def call(executor: Executor, m: int = 3, n: int = 2) -> None:
    """Make one call, and check its result."""
    mine = torch.full((1, m), float(RANK + 1))
    (c,) = executor(mine, torch.ones(m, 1).expand(m, n))
    assert torch.equal(c, torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, n) * m), c


def called_executor() -> Executor:
    """Return an executor that has been called once."""
    executor = Executor(parse(TEXT))
    call(executor)
    return executor


def call_after_a_pause(executor: Executor, seconds: float = 3 * watchdog.PERIOD) -> None:
    """Make a call after several periods of the watchdog, in which it would notice a failure."""
    time.sleep(seconds)
    call(executor)


def error_text(function: Callable[[], object]) -> str:
    """Return the message of a function's HostIRError; "nothing" if it raises none."""
    try:
        function()
    except HostIRError as problem:
        return str(problem)
    return "nothing"


def in_a_child(function: Callable[[], str]) -> str:
    """Return a function's result in a forked child; "a hang" if it does not return within ten seconds."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(10)
        os.write(into, function().encode())
        os._exit(0)
    os.close(into)
    with open(out) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text or "a hang"


def hold_the_gil(seconds: float) -> None:
    """Sleep while holding the GIL, so that no other thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def idle() -> None:
    time.sleep(100)


def double(x: int) -> int:
    return 2 * x


@case
def pools_come_and_go() -> None:
    executor = called_executor()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:  # the end of the block terminates its processes
        assert pool.map(double, [1, 2, 3]) == [2, 4, 6]
    call_after_a_pause(executor)


@case
def a_child_is_ended_by_sigterm() -> None:
    executor = called_executor()
    child = multiprocessing.get_context("fork").Process(target=idle)
    child.start()
    call(executor)
    child.terminate()
    child.join(10)
    code = child.exitcode
    child.kill()
    assert code == -signal.SIGTERM, code
    call_after_a_pause(executor)


@case
def children_are_ended_by_sigterm_at_once() -> None:
    executor = called_executor()
    for _ in range(20):
        child = os.fork()
        if not child:
            signal.alarm(10)
            time.sleep(20)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == -signal.SIGTERM, code
    call(executor)


@case
def a_child_exits_normally() -> None:
    executor = called_executor()
    child = os.fork()
    if not child:
        signal.alarm(20)
        sys.exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, code
    call_after_a_pause(executor)


@case
def executors_are_refused_in_a_child() -> None:
    executor, alone = called_executor(), Executor(parse(ALONE), machine="gloo")
    x, mine = torch.ones(4), torch.ones(4) if RANK == 0 else None
    alone(mine)
    attempts: list[Callable[[], object]] = [partial(call, executor), partial(alone, mine), called_executor, joined]
    for attempt in attempts:
        text = in_a_child(partial(error_text, attempt))
        assert "this process was forked" in text, text
        assert "hint: " in text, text
    assert in_a_child(lambda: str(Executor(parse(ALONE), machine="local")([x])[0][0].sum().item())) == "8.0"
    call_after_a_pause(executor)
    alone(mine)


@case
def a_rank_holds_the_gil() -> None:
    """A rank holds the GIL for three quarters of HOSTIR_TIMEOUT, while the other rank waits in a call."""
    executor = called_executor()
    for holder in range(SIZE):
        if holder == RANK:
            hold_the_gil(0.75 * joined().timeout)
        call(executor)


@case
def a_rank_is_stopped() -> None:
    executor = called_executor()
    for stopped in range(SIZE):
        if stopped == RANK:
            later = ["sh", "-c", f"sleep {0.75 * joined().timeout}; kill -CONT {os.getpid()}"]
            with subprocess.Popen(later):
                os.kill(os.getpid(), signal.SIGSTOP)
        call(executor)


@case
def a_rank_is_stopped_for_longer_than_the_timeout_while_nobody_waits() -> None:
    executor = called_executor()
    later = ["sh", "-c", f"sleep {1.5 * joined().timeout}; kill -CONT {os.getpid()}"]
    with subprocess.Popen(later):
        os.kill(os.getpid(), signal.SIGSTOP)
    call(executor)


@case
def a_rank_is_busy_for_longer_than_the_timeout_while_nobody_waits() -> None:
    executor = called_executor()
    (hold_the_gil if RANK else time.sleep)(3 * joined().timeout)
    call(executor)


def signalled(handler: Callable[[int, FrameType | None], object]) -> None:
    """Install a handler for SIGTERM after the first executor, and send SIGTERM."""
    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)


@case
def a_user_handler_has_time_to_finish() -> None:
    executor, saved = called_executor(), []

    def save(number: int, frame: FrameType | None) -> None:
        time.sleep(3 * watchdog.PERIOD)
        saved.append(number)

    signalled(save)
    assert saved == [signal.SIGTERM]
    call(executor)
    assert signal.getsignal(signal.SIGTERM) is save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@case
def a_user_handler_calls_the_previous_one() -> None:
    called_executor()
    before = signal.getsignal(signal.SIGTERM)
    assert callable(before)

    def save(number: int, frame: FrameType | None) -> None:
        print("saved", flush=True)
        before(number, frame)

    signalled(save)
    time.sleep(60)


@case
def a_user_handler_stays_installed_after_the_session() -> None:
    called_executor()
    signal.signal(signal.SIGTERM, lambda *_: print("the user's handler", flush=True))
    joined().close(done=True)
    os.kill(os.getpid(), signal.SIGTERM)


@case
def a_rank_is_busy_after_rank_0_has_ended() -> None:
    called_executor()
    if RANK:
        time.sleep(8)  # longer than rank 0 waits at its end


@case
def all_ranks_catch_a_failure_and_try_again() -> None:
    executor = called_executor()
    for _ in range(2):
        text = error_text(lambda: call(executor, n=1 << 50))
        assert "allocate" in text, text
        call_after_a_pause(executor)
    time.sleep(1.5 * joined().timeout)  # without any call, ranks may be silent for longer than the timeout
    call(executor)


@case
def a_rank_catches_its_failure_and_makes_no_further_call() -> None:
    executor = called_executor()

    def failing_matmul(*operands: torch.Tensor) -> None:
        raise RuntimeError("the floating point unit is on strike")

    if RANK == 1:
        executor._machine.kernels = {**executor._machine.kernels, "matmul": failing_matmul}
        executor.plans.clear()
    text = error_text(lambda: call(executor, m=5))
    if RANK == 0:
        text += error_text(lambda: call(executor))  # the first call may have ended before rank 0 learned of the failure
        call(executor)
    assert "strike" in text, text
    time.sleep(60)


def relu_and_gather(name: str) -> Executor:
    """Return an executor of a program `name` that gathers the result of a computation. All programs have one shape."""
    return Executor(
        parse(f"""hostir 1
mesh @mesh [didx] = {RANKS}
program @{name}(%a: f32[{SIZE}@didx, 4]) -> (%g) {{
  %g: f32[{SIZE}, 4] = allocate
  %b: f32[{SIZE}@didx, 4] = allocate
  relu %a -> %b
  %h = allgather %b -> %g over didx
  wait %h
}}
""")
    )


def check_gather(executor: Executor, first: float) -> None:
    """Gather the values first + rank, and check the result."""
    (g,) = executor(torch.full((1, 4), first + RANK))
    assert torch.equal(g, (first + torch.arange(float(SIZE)))[:, None].expand(SIZE, 4)), g


@case
def an_interrupt_before_a_call_has_begun_ends_it_on_all_ranks() -> None:
    """Rank 0 leaves a call before its communication. Its later calls must not send data into rank 1's pending call."""
    one, two = relu_and_gather("one"), relu_and_gather("two")
    check_gather(one, 10.0)
    check_gather(two, 20.0)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if RANK:
        assert "rank 0 was interrupted in @one by KeyboardInterrupt" in error_text(lambda: check_gather(one, 30.0))
    else:
        next(iter(one.plans.values())).run = stop  # type: ignore[method-assign]
        try:
            check_gather(one, 30.0)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("nothing was raised")
    for executor in (two, one):
        check_gather(executor, 40.0)


@case
def threads_make_their_first_executors_at_once() -> None:
    gate, failures, executors = threading.Barrier(4), list[BaseException](), list[Executor]()

    def first() -> None:
        try:
            gate.wait()
            executors.append(Executor(parse(TEXT)))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for executor in executors:  # the main thread makes all calls, so ranks call in the same order
        call(executor)


@case
def process_groups_are_refused_after_the_first_executor() -> None:
    executor = called_executor()
    try:
        dist.init_process_group("gloo")
    except Exception as problem:
        text = str(problem)
    assert "before the first executor" in text, text
    call(executor)


def main() -> None:
    for name in sys.argv[1:]:
        CASES[name]()
        print(f"PASS {name} {RANK}", flush=True)


if __name__ == "__main__":
    main()
