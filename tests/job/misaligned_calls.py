"""Programs of two gloo ranks whose calls do not line up; the arguments name one."""

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
    """This rank's part of m rows."""
    return torch.full((m // 2, 8), float(RANK))


def gathered(m: int) -> torch.Tensor:
    return torch.cat([torch.full((m // 2, 8), float(rank)) for rank in (0, 1)])


def other_sizes() -> None:
    """Once all shapes are known, rank 1 calls with others."""
    executor = hi.Executor(hi.parse(GATHER))
    for m in (8, 12, 8):
        executor(rows(m))
    executor(rows(8 if RANK == 0 else 12))


def other_sizes_at_first() -> None:
    hi.Executor(hi.parse(GATHER))(rows(8 if RANK == 0 else 12))


def said(call: Callable[[], object]) -> str:
    """The message that a call raises, without its notes, which this rank prints too."""
    with pytest.raises(hi.HostIRError) as raised:
        call()
    message = raised.value.diagnostics[0].message
    print(f"SAID {message}", flush=True)
    return message


def known_sizes(text: str, group: str, *sizes: int) -> None:
    """Sizes that all ranks have called before, another one on each rank: both ranks raise, then and later."""
    if group == "group":  # whose timeout is half an hour
        dist.init_process_group("gloo")
    executor = hi.Executor(hi.parse(text), group=dist.group.WORLD if group == "group" else None)
    for m in (*sizes, *sizes):
        executor(rows(m))
    mine = sizes if RANK == 0 else sizes[::-1]
    first = said(lambda: executor(rows(mine[0])))
    assert said(lambda: executor(rows(mine[1]))) == first


def one_side_has_ended_its_call() -> None:
    """Rank 0's call communicates with nobody: its next one raises."""
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


def one_side_refuses_its_input() -> None:
    """Rank 1 refuses its input of a call that rank 0 is in."""
    executor = hi.Executor(hi.parse(GATHER))
    executor(rows(8))
    if RANK == 0:
        said(lambda: executor(rows(8)))
    else:
        while not executor.calls.store.check(["call/1"]):
            time.sleep(0.01)
        refused(executor)
    said(lambda: executor(rows(8)))


def a_rank_that_was_in_its_call_exits_before_the_other() -> None:
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
        assert time.monotonic() < deadline, "it waits for its collective, of which this rank has no part"
        time.sleep(0.05)


def a_backward_pass_fails_on_one_rank() -> None:
    """Rank 1 goes on with a forward gather, whose program is that of the backward gather which rank 0 makes."""
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops = torch.ops.hostir
    for _ in range(2):  # all calls are known then
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
    """Without products, an all-gather + matmul is an all-gather, by the same executor. Rank 1 calls the other one."""
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x, ops = torch.ones(2, 8), torch.ops.hostir
    calls = [lambda: ops.all_gather(x, 0, name), lambda: ops.all_gather_matmul(x, [], 0, name, True)]
    for call in calls:
        call()
    message = said(calls[RANK])
    assert "for hostir::all_gather, " in message or "for hostir::all_gather_matmul, " in message, message


def another_order() -> None:
    gather, add = hi.Executor(hi.parse(GATHER)), hi.Executor(hi.parse(SUM))
    for executor in (gather, add):
        executor(rows(8))
    for executor in (gather, add) if RANK == 0 else (add, gather):
        executor(rows(8))


def another_executor() -> None:
    first, second = hi.Executor(hi.parse(GATHER)), hi.Executor(hi.parse(GATHER))
    for executor in (first, second):
        executor(rows(8))
    (first if RANK == 0 else second)(rows(8))


def wrong_inputs() -> None:
    """Rank 1 refuses its input of a call that both know, once rank 0 has returned from the call before."""
    executor = hi.Executor(hi.parse(GATHER))
    executor(rows(8))
    store = executor._agreement.session.store  # type: ignore[union-attr]
    store.set("called", "") if RANK == 0 else store.wait(["called"])
    executor(rows(8)[:, :4] if RANK == 1 else rows(8))


def uncompared(text: str = GATHER) -> hi.Executor:
    """One whose calls are compared at new sizes only, as on CUDA: without a proof no two are of one kind."""
    executor = hi.Executor(hi.parse(text), check=False)
    executor._compare = executor._agreement.compare = False
    return executor


def refused(executor: hi.Executor, m: int = 8, why: str = "input %x of rank . has dtype") -> None:
    with pytest.raises(hi.HostIRError, match=why):
        executor(rows(m).double())


def refused_alone_and_made_again() -> None:
    """Rank 1 refuses calls that rank 0 makes, and makes them then; new sizes and executors follow."""
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
            time.sleep(0.2)  # rank 1 has refused and made the next call before rank 0 gets there
    late = uncompared()
    if RANK == 1:
        refused(late)
        refused(late, 12)
    else:
        time.sleep(0.5)
    expecting(late, 8, gathered(8))()


def refused_by_one_and_by_all() -> None:
    """The call of new sizes that rank 1 refuses is refused on rank 0, which waits in it; later ones are right."""
    executor = uncompared()
    for m in (8, 12, 16):
        if RANK == 1:
            time.sleep(0.5)
            refused(executor)
            time.sleep(0.5)  # else it may make the call in time
        else:
            with pytest.raises(hi.HostIRError, match=r"because rank 1 does not: input %x of rank . has dtype"):
                executor(rows(m))
        refused(executor)
        expecting(executor, m, gathered(m))()
    for m in (24, 28, 32):  # rank 1 makes its next call at once
        if RANK == 1:
            refused(executor)
        else:
            time.sleep(0.3 * (m == 28))
            with pytest.raises(hi.HostIRError, match="because rank 1 does not"):
                executor(rows(m))
        expecting(executor, m + 100, gathered(m + 100))()


def refused_while_another_rank_ran_it() -> None:
    """Rank 1 refuses a call of known sizes and never makes it: the next new sizes show it."""
    executor = uncompared(RELU)
    executor(rows(8))
    if RANK == 1:
        refused(executor)
    else:
        executor(rows(8))
    executor(rows(12))


def expecting(executor: hi.Executor, m: int, expected: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        (y,) = executor(rows(m))
        assert torch.equal(y, expected), f"m={m}: {y}"

    return call


def many_calls() -> None:
    """More than the store has slots for; rank 1 is slow at times."""
    executor = hi.Executor(hi.parse(GATHER))
    for _ in range(1200):
        executor(rows(8))


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    globals()[name](*[int(word) if word.isdigit() else globals().get(word, word) for word in given])
