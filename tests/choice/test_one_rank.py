"""The simulation of rank 0 gives the times of all ranks, and programs whose ranks differ are simulated on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hostir as hi
from examples import patterns
from hostir.choice.cost import tasks_of, tasks_to_simulate
from hostir.choice.hardware import H100
from hostir.choice.simulation import estimates
from hostir.ir.program import Program, with_hosts
from hostir.job.hosts import equal_hosts
from hostir.kernels.matmul.tiles import Gemm
from tests.counting import calls_of

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1 2 3\n"
# Each rank sends its rows to the next rank. The flags that it sets and waits for are left open.
SENT = (
    HEAD
    + """program @sent(%a: f32[4@didx, 1024, 64]) -> (%b) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %there: f32[4@didx, 1024, 64] = allocate_symmetric
  %flags: flag[4] = allocate_symmetric
  %b: f32[4@didx, 1024, 64] = allocate
  barrier of %there over didx
  put %a -> %there at (%r + 1) % 4 over didx
  signal %flags[{0}] = 1 at (%r + 1) % 4 over didx
  wait_signal %flags[{1}] >= 1
  relu %there -> %b
}}
"""
)
ONE_RANK = {
    "sequential": (patterns.row_parallel, 1),
    "pipeline": (patterns.mlp, 1),
    "ring": (patterns.mlp, 1),
    "hierarchical": (patterns.mlp, 2),
}


def simulated(program: Program, hosts: int = 1) -> tuple[int, bool]:
    """Return the number of simulated ranks, and whether the estimates are those of a simulation of all ranks."""
    on_hosts = equal_hosts(program.ranks, hosts) if hosts > 1 else ()
    tasks, every = (tasks(program, {}, on_hosts) for tasks in (tasks_to_simulate, tasks_of))
    equal = all(estimates(tasks, H100, k) == pytest.approx(estimates(every, H100, k)) for k in ("cublas", "triton"))
    return len({task.rank for task in tasks}), equal


def test_ranks_that_use_different_streams_are_all_simulated() -> None:
    text = """program @streams(%a: f32[4@didx, 64]) -> (%b) streams 2 {
  %user = current_stream
  %r = rank of %a over didx
  %b: f32[4@didx, 64] = allocate
  for %s in 0..2 { set_stream %s   synchronize %user }
  set_stream %r % 2
  relu %a -> %b
  set_stream %user
  for %s in 0..2 { synchronize %s }
}
"""
    assert simulated(hi.parse(HEAD + text)) == (4, True)


def test_right_operands_stay_in_l2_until_others_take_their_place() -> None:
    with hi.Fusion("products") as fusion:
        mesh = hi.DeviceMesh([0])
        x, *weights = (hi.tensor(name, [4096, 4096], "bf16") for name in ("x", "a", "b"))  # 32 MiB each
        small = hi.tensor("small", [4096, 1024], "bf16")
        for each in (x, small, *weights):
            each.set_device_mesh(mesh)
        for right in (weights[0], weights[0], weights[1], weights[0], small, small):
            fusion.output(hi.matmul(x, right))
    tasks = tasks_of(hi.lower(fusion, "sequential"), {})
    loads = [task.loads for task in tasks if isinstance(task.work, Gemm)]
    assert [each.cached for each in loads] == [False, True, False, False, False, True]
    assert [each.before >> 20 for each in loads] == [0, 32, 32, 64, 96, 104]


@pytest.mark.parametrize("strategy", ONE_RANK)
def test_rank_0_has_the_times_of_all_ranks(strategy: str) -> None:
    pattern, hosts = ONE_RANK[strategy]
    fusion = pattern(ranks=8).program()
    program = hi.lower(with_hosts(fusion, hosts) if hosts > 1 else fusion, strategy)
    assert simulated(program, hosts) == (1, True)


@pytest.mark.parametrize(
    "pattern", [patterns.row_parallel, patterns.allgather_matmul_rows, patterns.row_parallel_scattered]
)
def test_rank_0_has_the_times_of_all_ranks_of_a_hierarchical_program(pattern: Callable[..., hi.Fusion]) -> None:
    program = hi.lower(with_hosts(pattern(ranks=8).program(), 4), "hierarchical", 2)
    assert simulated(program, 4) == (1, True)


@pytest.mark.parametrize("slots", [("%r", "(%r + 3) % 4"), ("0", "0")])
def test_flags_that_rotate_with_the_ranks_are_found(slots: tuple[str, str]) -> None:
    assert simulated(hi.parse(SENT.format(*slots))) == (1, True)


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        (("%r", "0"), "only rank 1 waits for a flag that is set"),
        (("%r / 2", "((%r + 3) % 4) / 3"), "ranks 0 and 3 wait for flags of other signals"),
    ],
)
def test_all_ranks_are_simulated_if_they_wait_for_other_flags(slots: tuple[str, str], why: str) -> None:
    ranks, equal = simulated(hi.parse(SENT.format(*slots)))
    assert (ranks, equal) == (4, True), why


def test_all_ranks_are_simulated_if_one_does_something_else() -> None:
    text = SENT.format("0", "0").replace("  relu", "  if %r == 1 { relu %a -> %b }\n  relu")
    assert simulated(hi.parse(text)) == (4, True)
    assert simulated(hi.lower(patterns.gather(), "pipeline")) == (4, True)


def test_eight_times_the_ranks_need_little_more_work() -> None:
    def work(hosts: int) -> int:
        fusion = with_hosts(patterns.mlp(8 * hosts, S=1, M=64 * 8 * hosts, K=64 * hosts, H=64 * hosts).program(), hosts)
        program = hi.lower(fusion, "pipeline")
        return calls_of(lambda: hi.timeline(program, machine="h100x8", hosts=hosts))

    work(2)  # loads lazily imported modules
    assert work(8) < 1.5 * work(2)


def test_a_timeline_of_rank_0_has_the_spans_of_all_ranks() -> None:
    each = hi.timeline(hi.lower(patterns.mlp(4), "ring"), machine="h100x4")
    assert each.alike
    assert {span.rank for span in each.simulated} == {0}
    assert len(each.spans) == 4 * len(each.simulated)
    assert [span.statement for span in each.of_rank(3)] == [span.statement for span in each.simulated]
    assert {span.rank for span in each.of_rank(3)} == {3}
    assert each.busy(3) == each.busy(0)
