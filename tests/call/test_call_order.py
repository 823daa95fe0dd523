"""Refused calls: after a call that only other ranks run, and inside another call."""

from __future__ import annotations

import signal
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import hostir as hi
from hostir.job.calls import SLOTS, Call, Calls

SLOW = """hostir 1
mesh @mesh [didx] = 0
program @slow(%x: f32[1536, 1536]) -> (%z) {
  %y: f32[1536, 1536] = allocate
  %z: f32[1536, 1536] = allocate
  matmul %x, %x -> %y
  matmul %x, %y -> %z
}
"""


def call(rows: int) -> Call:
    return Call("ag", "a digest", 0, (("M", rows),), "aten")


@pytest.mark.parametrize("planned", [True, False])
def test_a_rank_that_missed_a_call_makes_no_further_call(planned: bool) -> None:
    store = dist.HashStore()
    first, second = (Calls(store, rank, (0, 1), timeout=1.0) for rank in (0, 1))
    with first.lock, second.lock:
        calls_in_turn(first, second, planned)


def calls_in_turn(first: Calls, second: Calls, planned: bool) -> None:
    first.begin(call(8), planned=planned)
    with pytest.raises(hi.HostIRError, match="do not line up: rank 0 calls @ag with M=8, rank 1 with M=12"):
        second.begin(call(12), planned=True)
    if planned:  # its transfers would meet the transfers of rank 0's call
        with pytest.raises(
            hi.HostIRError, match=r"do not line up: rank 0 calls @ag with M=8(.|\n)*rank 1 makes no call any more"
        ):
            second.begin(call(8), planned=True)
    else:
        second.begin(call(8), planned=True)
        first.begin(call(8), planned=True)


def test_calls_are_compared_under_the_same_numbers_after_a_restart() -> None:
    store = dist.HashStore()
    first, second = both = [Calls(store, rank, (0, 1), timeout=1.0) for rank in (0, 1)]
    with first.lock, second.lock:
        for number in range(4):
            first.begin(call(8), planned=True)
            first.went(number)
            first.compare_new(call(number))
        second.begin(call(8), planned=True)
        later = dist.PrefixStore("later", store)
        for each in both:
            each.restart(later, 4)
        for number in range(2 * SLOTS):  # enough to use every slot twice; the ranks take turns in being ahead
            for each in both[:: 1 if number % 2 else -1]:
                each.begin(call(number), planned=True)
        for each in both:
            each.compare_new(call(8))
        second.begin(call(8), planned=False)
        with pytest.raises(hi.HostIRError, match="do not line up: rank 1 calls @ag with M=8, rank 0 with M=12"):
            first.begin(call(12), planned=True)


def test_a_call_from_a_signal_handler_within_a_call_is_refused() -> None:
    executor = hi.Executor(hi.parse(SLOW), machine="gloo")
    x = torch.randn(1536, 1536)
    (right,) = executor(x)
    refused: list[hi.HostIRError] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with pytest.raises(hi.HostIRError) as raised:
            executor(x)
        refused.append(raised.value)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        (y,) = executor(x)  # the handler runs after the first matmul
    finally:
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(y, right)
    assert "@slow is called while this thread runs another call" in str(refused[0])
    (y,) = executor(x)
    assert torch.equal(y, right)


@pytest.mark.parametrize("operator", ["", "hostir::all_gather"])
def test_the_next_comparison_shows_an_earlier_call_of_another_operator(operator: str) -> None:
    """Calls with known sizes are not compared. The next new sizes show that rank 1 has called another operator."""
    store = dist.HashStore()
    first, second = (Calls(store, rank, (0, 1)) for rank in (0, 1))
    second.operator = operator
    for calls in (first, second):
        calls.went(1)
    first.compare_new(call(8))
    if not operator:
        return second.compare_new(call(8))
    with pytest.raises(hi.HostIRError, match="ranks 0 and 1 have made other calls before their call 1"):
        second.compare_new(call(8))
