"""Calls on CUDA of proved programs that use flags in other ways than the strategies ring and fused."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.check import prove
from hostir.choice import laps
from hostir.machines.binding import Step, places
from hostir.machines.cuda.credits import CallBoundary
from hostir.plan.endings import CallEnding
from hostir.plan.operations import CALLER, WaitOp
from hostir.plan.unroll import unroll
from tests.machines.cuda.simulated_gpus import Gpus, Stream, gpus, plans
from tests.machines.cuda.test_onesided import check_calls

__all__ = ["gpus"]  # a fixture
NEXT = "(%r + 1) % 2 over didx"
SELF = "set_stream 0   signal %f[1] = 1 at %r over didx   wait_signal %f[1] >= 1   set_stream %user"
SENT = f"put %x -> %box at {NEXT}   signal %f[0] = 1 at {NEXT}"


def program(body: str, symmetric: str = "%box", ranks: int = 2) -> hi.Program:
    """Return a proved program with two workers, symmetric buffers like the input, and flags."""
    buffers = "\n".join(f"  {name}: f32[{ranks}@didx, 4] = allocate_symmetric" for name in symmetric.split())
    parsed = hi.parse(f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, range(ranks)))}
program @p(%x: f32[{ranks}@didx, 4]) -> (%y) streams 2 {{
  %user = current_stream
  %r = rank of %x over didx
{buffers}
  %f: flag[2] = allocate_symmetric
  %y: f32[{ranks}@didx, 4] = allocate
  {body}
}}
""")
    prove(parsed)
    return parsed


BODIES = {
    "a worker that waits for a flag and for nothing else": f"""{SENT}
  set_stream 0   wait_signal %f[0] >= 1   copy %box -> %keep
  set_stream %user   synchronize 0   copy %keep -> %y   barrier of %x over didx""",
    "workers that signal each other and wait for nothing else": """set_stream 0   signal %f[0] = 1 at %r over didx
  set_stream 1   wait_signal %f[0] >= 1
  set_stream %user   synchronize 0   synchronize 1   copy %x -> %y   barrier of %x over didx""",
    "a wait before the first statement that touches a peer": f"""set_stream 0   synchronize %user
  wait_signal %f[0] >= 1   put %x -> %box at {NEXT}   signal %f[1] = 1 at {NEXT}
  set_stream 1   signal %f[0] = 1 at {NEXT}
  set_stream %user   wait_signal %f[1] >= 1   copy %box -> %y   synchronize 0   synchronize 1
  barrier of %x over didx""",
    "a wait of the caller's stream before a worker begins": f"""wait_signal %f[0] >= 1
  set_stream 1   signal %f[0] = 1 at {NEXT}
  set_stream %user   copy %x -> %y   synchronize 1   barrier of %x over didx""",
    "a flag raised again for the same epoch": f"""barrier of %x over didx
  {SENT}   signal %f[0] = 1 at {NEXT}   wait_signal %f[0] >= 1   copy %box -> %y""",
    "a first barrier behind what peers overwrite": f"""put %x -> %box at %r over didx   barrier of %x over didx
  {SENT}   wait_signal %f[0] >= 1   copy %box -> %y""",
    "a first barrier behind a read of what peers overwrite": f"""put %x -> %box at %r over didx
  put %box -> %keep at %r over didx   barrier of %x over didx
  {SENT}   wait_signal %f[0] >= 1   copy %keep -> %y""",
    "a put that no signal follows": f"""barrier of %x over didx   signal %f[0] = 1 at {NEXT}
  put %x -> %box at %r over didx   copy %box -> %y
  signal %f[1] = 1 at {NEXT}   wait_signal %f[0] >= 1
  set_stream 1   synchronize %user   wait_signal %f[1] >= 1
  set_stream 0   synchronize 1   put %x -> %box at {NEXT}
  set_stream %user   synchronize 0""",
    "a first barrier behind a signal that peers go on from": f"""signal %f[0] = 1 at %r over didx
  barrier of %x over didx   signal %f[0] = 2 at {NEXT}   wait_signal %f[0] >= 2   copy %x -> %y""",
}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_program_that_is_proved_is_right_call_after_call(
    body: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(program(body, "%box %keep"), gpus, seed, monkeypatch, calls=5)


CHAIN = """hostir 1
mesh @ab [didx] = 0 1
mesh @bc [didx] = 1 2
mesh @ac [didx] = 0 2
program @chain(%x: f32[2@didx, 4] on @ab, %z: f32[2@didx, 4] on @bc, %w: f32[2@didx, 4] on @ac) -> (%y) {
  %box: f32[2@didx, 4] on @ac = allocate_symmetric
  %f: flag[2] on @ab = allocate_symmetric
  %g: flag[2] on @bc = allocate_symmetric
  %y: f32[2@didx, 4] on @ac = allocate
  %a = rank of %x over didx
  %b = rank of %z over didx
  %c = rank of %w over didx
  barrier of %x over didx
  barrier of %z over didx
  if %a == 0 { signal %f[1] = 1 at 1 over didx }
  if %b == 0 { signal %g[1] = 1 at 1 over didx }
  if %c == 1 { copy %w -> %box   copy %w -> %y }
  if %b == 1 { signal %g[0] = 1 at 0 over didx }
  if %b == 0 { wait_signal %g[0] >= 1 }
  if %a == 1 { signal %f[0] = 1 at 0 over didx }
  if %a == 0 { wait_signal %f[0] >= 1 }
  if %c == 0 { get %box from 1 over didx -> %y }
}
"""


@pytest.mark.parametrize("seed", range(20))
def test_credits_count_barriers_of_a_third_rank(seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = hi.parse(CHAIN)
    prove(chain)
    check_calls(chain, gpus, seed, monkeypatch, calls=5)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_grants_credits_to_a_peer_even_if_it_never_accesses_the_peer(
    seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "signal %f[0] = 1 at (%r + 1) % 3 over didx   wait_signal %f[0] >= 1   copy %x -> %y"
    check_calls(program(body, ranks=3), gpus, seed, monkeypatch)


@pytest.mark.parametrize("seed", range(8))
def test_plans_for_different_strides_share_one_memory(seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    signalling = program(f"barrier of %x over didx   {SENT}   wait_signal %f[0] >= 1   copy %box -> %y   {SELF}")
    dense = [[torch.randn(1, 4)] for _ in range(2)]
    apart = [[torch.randn(1, 8)[:, ::2]] for _ in range(2)]
    both = [
        (first, first.machine.plan(unroll(signalling, rank, {}, apart[rank])))
        for rank, first in enumerate(plans(gpus, signalling, dense, monkeypatch))
    ]
    assert all(first.memory is second.memory for first, second in both)
    random, outputs = Random(seed), []
    for rank, turns in enumerate(both):
        gpus.current = Stream()
        outputs.append([turns[call % 2].run((dense, apart)[call % 2][rank])[0] for call in range(6)])
    gpus.run(random)
    for rank, results in enumerate(outputs):
        for call, y in enumerate(results):
            assert torch.equal(y, (dense, apart)[call % 2][1 - rank][0])


def how_it_ends(
    source: hi.Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, waiting: bool = True
) -> tuple[bool, list[str]]:
    """Return whether a kernel of the program ends the call, and the streams of the steps that end it otherwise."""
    gpus.waiting, ends = waiting, list[tuple[bool, list[str]]]()
    end_call = CallBoundary.end_call

    def watched(boundary: CallBoundary) -> list[tuple[int, Step]]:
        steps = end_call(boundary)
        streams = ["caller" if stream == CALLER else "worker" for stream, step in steps if step is boundary.end]
        ends.append((boundary.ends_in_kernel, streams))
        return steps

    monkeypatch.setattr(CallBoundary, "end_call", watched)
    inputs = random_inputs(source, {}, seed=0)
    parts = [[shard(x, v.tensor, rank, {}) for x, v in zip(inputs, source.inputs, strict=True)] for rank in range(2)]
    plans(gpus, source, parts, monkeypatch)
    assert len({str(end) for end in ends}) == 1, "all ranks alike"
    return ends[0]


ENDS = {  # by strategy: a kernel ends the call if kernels wait for flags, and else the stream of the end
    ("row_parallel_scattered", "ring"): (True, "caller"),
    ("row_parallel_scattered", "push"): (True, "caller"),
    ("row_parallel_scattered", "fused"): (False, "caller"),  # the copies wait for the product's flags, not for the sum
    ("row_parallel_scattered", "chain"): (False, "worker"),
    ("allgather_matmul", "fused"): (True, "caller"),
    ("allgather_matmul", "push"): (True, "caller"),
    ("row_parallel_bias", "ring"): (False, "caller"),
}


@pytest.mark.parametrize(("pattern", "strategy"), ENDS)
def test_a_call_ends_in_its_last_kernel_that_waits_or_behind_the_last_copy_if_nothing_else_must_end_first(
    pattern: str, strategy: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_kernel, stream = ENDS[pattern, strategy]
    lowered = hi.lower(getattr(patterns, pattern)(2, 1, 16, 16, 8), strategy)
    assert how_it_ends(lowered, gpus, monkeypatch) == (in_kernel, [] if in_kernel else [stream])


def test_a_flag_that_nothing_waits_for_is_awaited_before_the_call_ends(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = program(
        f"barrier of %x over didx   {SENT}   signal %f[1] = 1 at {NEXT}   wait_signal %f[0] >= 1   copy %box -> %y"
    )
    assert how_it_ends(late, gpus, monkeypatch) == (False, ["caller"])


BLAME = """if %r == 0 { set_stream 0   synchronize %user   signal %f[0] = 1 at 2 over didx
    set_stream 1   wait_signal %f[1] >= 1   set_stream %user   synchronize 0   synchronize 1 }
  if %r == 1 { signal %f[1] = 1 at 0 over didx }
  if %r == 2 { wait_signal %f[0] >= 1 }
  copy %x -> %y"""


def test_a_call_that_waits_for_a_credit_names_no_flag_that_has_come(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = plans(gpus, program(BLAME, ranks=3), [[torch.ones(1, 4)] for _ in range(3)], monkeypatch)
    for rank in (0, 1):  # rank 2 makes no call, so rank 0 gets no second credit from it
        gpus.current = Stream()
        for _ in range(2):
            mine[rank].run([torch.ones(1, 4)])
    gpus.advance()
    assert any(stream.tasks for stream in gpus.streams)
    assert mine[0].busy() == []


def test_a_collective_in_flight_holds_the_end_of_the_call_until_a_stream_has_waited_for_it() -> None:
    exchanged = program(
        f"""barrier of %x over didx   {SENT}   wait_signal %f[0] >= 1
  %h = exchange %box to (%r + 1) % 2, %keep from (%r + 1) % 2 over didx
  set_stream 0   synchronize %user   signal %f[1] = 1 at {NEXT}   wait_signal %f[1] >= 1
  set_stream %user   synchronize 0   wait %h   copy %keep -> %y""",
        "%box %keep",
    )
    unrolled = unroll(exchanged, 0, {})
    ending = CallEnding.of(unrolled)
    waits = next(op for op in unrolled.ops if isinstance(op, WaitOp))
    assert unrolled.ops.index(ending.last) >= unrolled.ops.index(waits)
    assert ending.stream == CALLER


@pytest.mark.parametrize(("target", "within"), [("%y", True), ("%late", False)])
def test_a_kernel_that_writes_to_symmetric_memory_does_not_end_the_call(target: str, within: bool) -> None:
    product = hi.parse(f"""hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[8@didx, 4], %w: f32[4, 4]) -> ({target}) {{
  %r = rank of %x over didx
  %box: f32[8@didx, 4] = allocate_symmetric
  %late: f32[8@didx, 4] = allocate_symmetric
  %f: flag[1] = allocate_symmetric
  %y: f32[8@didx, 4] = allocate
  put %x -> %box at {NEXT}   signal %f[0] = 1 at {NEXT}
  matmul %box, %w -> {target} ready %f >= 1 from 0
}}
""")
    ending = CallEnding.of(unroll(product, 0, {}))
    assert ending.last is not None
    assert ending.within(ending.last) == within


OVERWRITTEN = {
    "peers put there before": f"""{SENT}   wait_signal %f[0] >= 1   copy %box -> %y
  put %x -> %box at %r over didx   barrier of %x over didx""",
    "another input goes there too": """put %x -> %box at %r over didx   copy %box -> %y
  put %y -> %box at %r over didx   barrier of %x over didx""",
    "it is computed on there": """put %x -> %box at %r over didx   relu %box -> %box   copy %box -> %y
  barrier of %x over didx""",
}


@pytest.mark.parametrize("body", OVERWRITTEN.values(), ids=OVERWRITTEN.keys())
def test_memory_with_another_writer_is_no_place_for_an_input(
    body: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [[torch.randn(1, 4)] for _ in range(2)]
    for plan in plans(gpus, program(body), inputs, monkeypatch):
        assert places(plan.unrolled, plan.memory, plan.registers) == (None,)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_leaves_the_barrier_of_a_timed_run_before_all_ranks_have_come(
    ranks: int, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a call may replace the first barrier of the next one, but not in this program."""
    barrier = hi.parse(laps.BY_FLAGS.format(mesh=" ".join(map(str, range(ranks))), ranks=ranks))
    came, left = [0] * ranks, []

    def come(rank: int) -> None:
        came[rank] += 1

    for rank, plan in enumerate(plans(gpus, barrier, [[]] * ranks, monkeypatch)):
        gpus.current = Stream()
        for _ in range(4):
            gpus.current.add(partial(come, rank))
            plan.run([])
            gpus.current.add(lambda rank=rank: left.append(min(came) >= came[rank]))
    gpus.run(Random(seed))
    assert left == [True] * (4 * ranks)
