"""Programs of two gloo ranks with different calls; the first argument names the program."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hostir as hi
import hostir.torch

RANK = int(os.environ["RANK"])
MESH = "hostir 1\nmesh @mesh [didx] = 0 1\n"
GATHER = (
    MESH
    + """program @ag(%x: f32[M@didx, 8]) -> (%y) {
  %y: f32[M, 8] = allocate
  %h = allgather %x -> %y over didx
  wait %h
}
"""
)
SUM = (
    MESH
    + """program @sum(%x: f32[M, 8] partial(didx)) -> (%y) {
  %y: f32[M, 8] = allocate
  %h = allreduce %x -> %y over didx
  wait %h
}
"""
)
PUT = (
    MESH
    + """program @put(%x: f32[M@didx, 8]) -> (%y) {
  %r = rank of %x over didx
  %y: f32[M, 8] = allocate_symmetric
  %mine = chunk %y[%r of 2]
  barrier of %x over didx
  for %i in 0..2 { put %x -> %mine at %i over didx }
  barrier of %x over didx
}
"""
)
RELU = (
    MESH
    + """program @alone(%x: f32[M@didx, 8]) -> (%y) {
  %y: f32[M@didx, 8] = allocate
  relu %x -> %y
}
"""
)


def rows(m: int) -> torch.Tensor:
    """Return this rank's shard of m rows."""
    return torch.full((m // 2, 8), float(RANK))


def gathered(m: int) -> torch.Tensor:
    """Return the gathered rows of all ranks."""
    return torch.cat([torch.full((m // 2, 8), float(rank)) for rank in (0, 1)])


def different_known_sizes() -> None:
    """All sizes are known; rank 1 calls with different ones."""
    executor = hi.Executor(hi.parse(GATHER))
    for m in (8, 12, 8):
        executor(rows(m))
    executor(rows(8 if RANK == 0 else 12))


def different_new_sizes() -> None:
    hi.Executor(hi.parse(GATHER))(rows(8 if RANK == 0 else 12))


def said(call: Callable[[], object]) -> str:
    """Return the message that a call raises, without its notes, and print it."""
    with pytest.raises(hi.HostIRError) as raised:
        call()
    message = raised.value.diagnostics[0].message
    sys.stdout.write(f"SAID {message}\n")  # in one write: other processes print, too
    sys.stdout.flush()
    return message


def known_sizes(text: str, group: str, *sizes: int) -> None:
    """Each rank calls with a different known size: both ranks raise, in this call and in the next."""
    if group == "group":  # its timeout is half an hour
        dist.init_process_group("gloo")
    executor = hi.Executor(hi.parse(text), group=dist.group.WORLD if group == "group" else None)
    for m in (*sizes, *sizes):
        executor(rows(m))
    mine = sizes if RANK == 0 else sizes[::-1]
    first = said(lambda: executor(rows(mine[0])))
    assert said(lambda: executor(rows(mine[1]))) == first


def rank_0_has_ended_its_call() -> None:
    """Rank 0's call has no communication and ends; its next call raises."""
    executor = hi.Executor(hi.parse(RELU))
    for m in (8, 12):
        executor(rows(m))
    if RANK == 0:
        executor(rows(8))
        executor._agreement.session.store.set("called", "")  # type: ignore[union-attr]
        while not executor.watchdog.misaligned:  # type: ignore[union-attr]
            time.sleep(0.01)
        said(lambda: executor.places(rows(8)))
        said(lambda: executor(rows(8)))
    else:
        executor._agreement.session.store.wait(["called"])  # type: ignore[union-attr]
        said(lambda: executor(rows(12)))


def rank_1_refuses_its_input() -> None:
    """Rank 1 refuses its input while rank 0 is in the call."""
    executor = hi.Executor(hi.parse(GATHER))
    executor(rows(8))
    if RANK == 0:
        said(lambda: executor(rows(8)))
    else:
        while not executor.calls.store.check(["call/1"]):
            time.sleep(0.01)
        refused(executor)
    said(lambda: executor(rows(8)))


def a_rank_in_its_call_exits_before_the_other() -> None:
    dist.init_process_group("gloo")
    executor = hi.Executor(hi.parse(GATHER), group=dist.group.WORLD)
    for m in (8, 12):
        executor(rows(m))
    store = executor.calls.store
    if RANK == 0:
        store.set("process", str(os.getpid()))
        said(lambda: executor(rows(8)))
        return
    while not store.check(["call/2"]):
        time.sleep(0.01)
    said(lambda: executor(rows(12)))
    process, deadline = Path("/proc", store.get("process").decode()), time.monotonic() + 20
    while process.exists():
        assert time.monotonic() < deadline, "rank 0 did not exit: it waits for a collective that rank 1 does not run"
        time.sleep(0.05)


def a_backward_pass_fails_on_one_rank() -> None:
    """Rank 1's backward pass fails: it runs a forward gather while rank 0 runs an equal gather in its backward pass."""
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops = torch.ops.hostir
    for _ in range(2):  # makes all calls known
        x = torch.ones(4, 8, requires_grad=True)
        ops.reduce_scatter(x, "sum", 0, name).sum().backward()
        ops.all_gather(torch.ones(2, 8), 0, name)

    def fail(gradient: torch.Tensor) -> None:
        if RANK == 1:
            raise RuntimeError("the data are on strike")

    x = torch.ones(4, 8, requires_grad=True)
    y = ops.reduce_scatter(x, "sum", 0, name)
    y.register_hook(fail)

    def step() -> None:
        with contextlib.suppress(RuntimeError):
            y.sum().backward()
        ops.all_gather(torch.ones(2, 8), 0, name)

    message = said(step)
    assert re.search("rank 0 [^,]*, P0=8 in a backward pass", message), message
    assert re.search("rank 1 [^,]*, P0=8 in a forward pass", message), message


def operators_of_one_program() -> None:
    """Without matmuls, `all_gather_matmul` is run by the executor of `all_gather`. Each rank calls one of the two."""
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x, ops = torch.ones(2, 8), torch.ops.hostir
    calls = [lambda: ops.all_gather(x, 0, name), lambda: ops.all_gather_matmul(x, [], 0, name, True)]
    for call in calls:
        call()
    message = said(calls[RANK])
    assert "for hostir::all_gather, " in message or "for hostir::all_gather_matmul, " in message, message


def a_different_order() -> None:
    gather, add = hi.Executor(hi.parse(GATHER)), hi.Executor(hi.parse(SUM))
    for executor in (gather, add):
        executor(rows(8))
    for executor in (gather, add) if RANK == 0 else (add, gather):
        executor(rows(8))


def a_different_executor() -> None:
    first, second = hi.Executor(hi.parse(GATHER)), hi.Executor(hi.parse(GATHER))
    for executor in (first, second):
        executor(rows(8))
    (first if RANK == 0 else second)(rows(8))


def wrong_inputs() -> None:
    """Rank 1 refuses its input of a known call, after rank 0 has returned from the call before."""
    executor = hi.Executor(hi.parse(GATHER))
    executor(rows(8))
    store = executor._agreement.session.store  # type: ignore[union-attr]
    store.set("called", "") if RANK == 0 else store.wait(["called"])
    executor(rows(8)[:, :4] if RANK == 1 else rows(8))


def uncompared(text: str = GATHER) -> hi.Executor:
    """Return an executor that compares calls at new sizes only, as on CUDA. It has no proof: each size is new."""
    executor = hi.Executor(hi.parse(text), check=False)
    executor._compare = executor._agreement.compare = False
    return executor


def refused(executor: hi.Executor, m: int = 8, why: str = "input %x of rank . has dtype") -> None:
    """Make a call with a wrong dtype, and check that it is refused."""
    with pytest.raises(hi.HostIRError, match=why):
        executor(rows(m).double())


def calls_refused_by_one_rank_are_made_again() -> None:
    """Rank 1 first refuses calls that rank 0 makes, then makes them. Calls with new sizes and executors follow."""
    first, second = uncompared(), uncompared(SUM)
    for executor in (first, second):
        executor(rows(8))
    for m in (8, 12, 16, 20):
        for executor, calls in ((first, 1), (second, 3)):
            for call in range(calls):
                if RANK == 1 and call != 1 and (call or m == 8):
                    refused(executor, 8)
                expecting(executor, 8, gathered(8) if executor is first else torch.ones(4, 8))()
        expecting(first, m, gathered(m))()
        if RANK == 0:
            time.sleep(0.2)  # rank 1 refuses and makes the next call first
    late = uncompared()
    if RANK == 1:
        refused(late)
        refused(late, 12)
    else:
        time.sleep(0.5)
    expecting(late, 8, gathered(8))()


def calls_refused_by_one_rank_and_by_all() -> None:
    """Rank 1 refuses a call with new sizes: rank 0, which waits in it, raises too. Later calls are right."""
    executor = uncompared()
    for m in (8, 12, 16):
        if RANK == 1:
            time.sleep(0.5)
            refused(executor)
            time.sleep(0.5)  # without a pause, its next call could come before rank 0 gives up
        else:
            with pytest.raises(hi.HostIRError, match=r"because rank 1 does not: input %x of rank . has dtype"):
                executor(rows(m))
        refused(executor)
        expecting(executor, m, gathered(m))()
    for m in (24, 28, 32):  # without a pause on rank 1
        if RANK == 1:
            refused(executor)
        else:
            time.sleep(0.3 * (m == 28))
            with pytest.raises(hi.HostIRError, match="because rank 1 does not"):
                executor(rows(m))
        expecting(executor, m + 100, gathered(m + 100))()


def a_call_refused_while_the_other_rank_ran_it() -> None:
    """Rank 1 refuses a call with known sizes and never makes it. The next call with new sizes shows the difference."""
    executor = uncompared(RELU)
    executor(rows(8))
    if RANK == 1:
        refused(executor)
    else:
        executor(rows(8))
    executor(rows(12))


def expecting(executor: hi.Executor, m: int, expected: torch.Tensor) -> Callable[[], None]:
    """Return a function that makes a call and checks its result."""

    def call() -> None:
        (y,) = executor(rows(m))
        assert torch.equal(y, expected), f"m={m}: {y}"

    return call


def many_calls() -> None:
    """Make more calls than the store has slots."""
    executor = hi.Executor(hi.parse(GATHER))
    for _ in range(1200):
        executor(rows(8))


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    globals()[name](*[int(word) if word.isdigit() else globals().get(word, word) for word in words])
