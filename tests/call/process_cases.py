"""What the ranks of tests/call/test_processes.py do beside their calls: `process_cases.py NAME ...`.

A case that ends well prints `PASS name rank`. Every case makes calls before and after what it tries.
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
# Every worker stream gathers the rows and multiplies them: b has so many columns that the caller can ask too much.
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
    """One call, whose result is looked at."""
    mine = torch.full((1, m), float(RANK + 1))
    (c,) = executor(mine, torch.ones(m, 1).expand(m, n))
    assert torch.equal(c, torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, n) * m), c


def called() -> Executor:
    executor = Executor(parse(TEXT))
    call(executor)
    return executor


def for_a_while(executor: Executor, seconds: float = 3 * watchdog.PERIOD) -> None:
    """Calls, so long that whoever watches would have noticed something."""
    time.sleep(seconds)
    call(executor)


def said_by(function: Callable[[], object]) -> str:
    try:
        function()
    except HostIRError as problem:
        return str(problem)
    return "nothing"


def in_a_child(function: Callable[[], str]) -> str:
    """What a forked child finds; `a hang` where it finds nothing for ten seconds."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(10)
        os.write(into, function().encode())
        os._exit(0)
    os.close(into)
    with open(out) as found:
        text = found.read()
    os.waitpid(child, 0)
    return text or "a hang"


def hold_the_gil(seconds: float) -> None:
    """Lets no other thread of this process run Python."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def idle() -> None:
    time.sleep(100)


def double(x: int) -> int:
    return 2 * x


# Forks ------------------------------------------------------------------------------------------------------------
@case
def pools_come_and_go() -> None:
    executor = called()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:  # which terminates its processes
        assert pool.map(double, [1, 2, 3]) == [2, 4, 6]
    for_a_while(executor)


@case
def a_child_ends_by_sigterm() -> None:
    executor = called()
    child = multiprocessing.get_context("fork").Process(target=idle)
    child.start()
    call(executor)
    child.terminate()
    child.join(10)
    code = child.exitcode
    child.kill()
    assert code == -signal.SIGTERM, code
    for_a_while(executor)


@case
def children_end_by_sigterm_before_they_have_begun() -> None:
    executor = called()
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
def a_child_ends_as_a_program_does() -> None:
    executor = called()
    child = os.fork()
    if not child:
        signal.alarm(20)
        sys.exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, code
    for_a_while(executor)


@case
def executors_are_refused_in_a_child() -> None:
    executor, alone = called(), Executor(parse(ALONE), machine="gloo")
    x, mine = torch.ones(4), torch.ones(4) if RANK == 0 else None
    alone(mine)
    tries: list[Callable[[], object]] = [partial(call, executor), partial(alone, mine), called, joined]
    for tried in tries:
        text = in_a_child(partial(said_by, tried))
        assert "this process was forked" in text, text
        assert "hint: " in text, text
    assert in_a_child(lambda: str(Executor(parse(ALONE), machine="local")([x])[0][0].sum().item())) == "8.0"
    for_a_while(executor)
    alone(mine)


# Time -------------------------------------------------------------------------------------------------------------
@case
def a_rank_holds_the_gil() -> None:
    """For longer than half of HOSTIR_TIMEOUT, between calls and while another rank waits in one."""
    executor = called()
    for holder in range(SIZE):
        if holder == RANK:
            hold_the_gil(0.75 * joined().timeout)
        call(executor)


@case
def a_rank_is_stopped() -> None:
    executor = called()
    for stopped in range(SIZE):
        if stopped == RANK:
            later = ["sh", "-c", f"sleep {0.75 * joined().timeout}; kill -CONT {os.getpid()}"]
            with subprocess.Popen(later):
                os.kill(os.getpid(), signal.SIGSTOP)
        call(executor)


@case
def a_rank_is_stopped_for_longer_than_the_timeout_where_nobody_waits() -> None:
    executor = called()
    later = ["sh", "-c", f"sleep {1.5 * joined().timeout}; kill -CONT {os.getpid()}"]
    with subprocess.Popen(later):
        os.kill(os.getpid(), signal.SIGSTOP)
    call(executor)


@case
def a_rank_is_busy_for_longer_than_the_timeout_where_nobody_waits() -> None:
    executor = called()
    (hold_the_gil if RANK else time.sleep)(3 * joined().timeout)
    call(executor)


# Signals ----------------------------------------------------------------------------------------------------------
def signalled(handler: Callable[[int, FrameType | None], object]) -> None:
    """SIGTERM, with a handler that was installed after the first executor."""
    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)


@case
def a_handler_of_the_users_has_its_time() -> None:
    executor, saved = called(), []

    def save(number: int, frame: FrameType | None) -> None:
        time.sleep(3 * watchdog.PERIOD)
        saved.append(number)

    signalled(save)
    assert saved == [signal.SIGTERM]
    call(executor)
    assert signal.getsignal(signal.SIGTERM) is save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@case
def a_handler_of_the_users_calls_the_one_before() -> None:
    called()
    before = signal.getsignal(signal.SIGTERM)
    assert callable(before)

    def save(number: int, frame: FrameType | None) -> None:
        print("saved", flush=True)
        before(number, frame)

    signalled(save)
    time.sleep(60)


@case
def the_users_handler_is_left_when_the_session_ends() -> None:
    called()
    signal.signal(signal.SIGTERM, lambda *_: print("the user's handler", flush=True))
    joined().close(done=True)
    os.kill(os.getpid(), signal.SIGTERM)


# Ends and failures ------------------------------------------------------------------------------------------------
@case
def a_rank_is_busy_when_rank_0_has_gone() -> None:
    called()
    if RANK:
        time.sleep(8)  # rank 0 does not wait that long when it ends


@case
def a_failure_on_all_ranks_is_caught_and_tried_again() -> None:
    executor = called()
    for _ in range(2):
        text = said_by(lambda: call(executor, n=1 << 50))
        assert "allocate" in text, text
        for_a_while(executor)
    time.sleep(1.5 * joined().timeout)  # with no call at all: nobody is missed
    call(executor)


@case
def a_failure_on_one_rank_is_caught_and_it_stays_away() -> None:
    executor = called()

    def strike(*operands: torch.Tensor) -> None:
        raise RuntimeError("the floating point unit is on strike")

    if RANK == 1:
        executor._machine.kernels = {**executor._machine.kernels, "matmul": strike}
        executor.plans.clear()
    text = said_by(lambda: call(executor, m=5))
    if RANK == 0:
        text += said_by(lambda: call(executor))  # if it had not heard of the failure before
        call(executor)
    assert "strike" in text, text
    time.sleep(60)


def other(name: str) -> Executor:
    """One of several programs that gather the same shapes, after a computation."""
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


def gathers(executor: Executor, first: float) -> None:
    (g,) = executor(torch.full((1, 4), first + RANK))
    assert torch.equal(g, (first + torch.arange(float(SIZE)))[:, None].expand(SIZE, 4)), g


@case
def an_interrupt_before_a_call_has_begun_ends_it_on_all_ranks() -> None:
    """No executor of a rank that has left a call before its communication sends what the others in it wait for."""
    one, two = other("one"), other("two")
    gathers(one, 10.0)
    gathers(two, 20.0)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if RANK:
        assert "rank 0 was interrupted in @one by KeyboardInterrupt" in said_by(lambda: gathers(one, 30.0))
    else:
        next(iter(one.plans.values())).run = stop  # type: ignore[method-assign]
        try:
            gathers(one, 30.0)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("nothing was raised")
    for executor in (two, one):
        gathers(executor, 40.0)


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
    for executor in executors:  # their calls have an order, by the main thread
        call(executor)


@case
def groups_after_the_first_executor() -> None:
    executor = called()
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
