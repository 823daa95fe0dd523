"""Simulated times of the cost model: which tasks overlap, wait, or share the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

import hostir as hi
from examples import patterns
from hostir.choice import simulation
from hostir.choice.cost import CostCopy, CostTask, CostTransfer, Loads, Nothing, Pause, Traffic, tasks_of
from hostir.choice.decision import decide
from hostir.choice.hardware import H200, Hardware, parse_machine
from hostir.choice.platforms import reference
from hostir.choice.simulation import (
    EAGER,
    GRAPH,
    SHORT_ALL_REDUCE,
    Costs,
    HostCosts,
    Simulation,
    collective_us,
    flops,
)
from hostir.ir.source import HostIRError
from hostir.kernels.matmul.estimate import block_ends, choose, duration
from hostir.kernels.matmul.tiles import MIN_OWN_ROWS, Gemm, candidates
from hostir.torch.ops.grouped import _gather_fusion
from tests.choice.fusions import scattered_rows
from tests.counting import calls_of

AT_ONCE = replace(H200, begin=0.0, first_matmul=0.0, captured=0.0)  # calls begin without delay
COPY = 2 * 1024 * 4096 / 1e3 / H200.link  # microseconds of the bytes of `%a` on the link, whose rate is in GB/s
HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p(%a: bf16[2@didx, 1024, 4096], %b: bf16[4096, 4096]) -> (%c) "


def estimates(
    program: hi.Program, sizes: Mapping[str, int], hardware: Hardware, kernels: str = "aten"
) -> Mapping[str, float]:
    """Return the estimated microseconds of one call of a program, by mode."""
    return simulation.estimates(tasks_of(program, sizes), hardware, kernels)


def estimate_us(body: str, mode: str = GRAPH) -> float:
    streams = "streams 2 " if "set_stream" in body else ""
    return estimates(hi.parse(f"{HEAD}{streams}{{\n{body}\n}}\n"), {}, AT_ONCE)[mode]


BUFFERS = """
  %user = current_stream
  %full: bf16[2, 1024, 4096] = allocate
  %c: bf16[2@didx, 1024, 4096] = allocate
"""
GATHER = "  %h = allgather %a -> %full over didx"
MATMUL = "  matmul %a, %b -> %c"
BESIDE = f"  set_stream 0\n{MATMUL}\n  set_stream %user"


def alone(body: str) -> float:
    return estimate_us(f"{BUFFERS}{body}\n")


def test_tasks_on_one_stream_take_the_sum_of_their_times() -> None:
    gather, matmul = alone(f"{GATHER}\n  wait %h"), alone(MATMUL)
    both = alone(f"{GATHER}\n  wait %h\n{MATMUL}")
    assert gather > H200.collective
    assert both == pytest.approx(gather + H200.edge + matmul)


def test_tasks_on_two_streams_overlap_but_slow_each_other() -> None:
    gather, matmul = alone(f"{GATHER}\n  wait %h"), alone(MATMUL)
    both = alone(f"{GATHER}\n{BESIDE}\n  wait %h")
    assert max(gather, matmul) < both < gather + matmul


def test_a_synchronize_prevents_overlap() -> None:
    apart = alone(f"{GATHER}\n  wait %h\n  set_stream 0\n  synchronize %user\n{MATMUL}\n  set_stream %user")
    together = alone(f"{GATHER}\n  wait %h\n{BESIDE}")
    assert apart > together * 1.2


def test_matmuls_that_fill_the_device_share_it() -> None:
    one = alone(MATMUL)
    two = alone(f"{MATMUL}\n{BESIDE}")
    assert two == pytest.approx(2 * one, rel=0.05)


def test_collectives_of_one_team_run_one_after_another() -> None:
    other = "  %more: bf16[2, 1024, 4096] = allocate\n  set_stream 0\n  %g = allgather %a -> %more over didx"
    one = alone(f"{GATHER}\n  wait %h")
    two = alone(f"{GATHER}\n{other}\n  wait %h\n  wait %g")
    assert two == pytest.approx(2 * one)


def test_a_collective_takes_longer_directly_behind_a_matmul() -> None:
    gather = f"{GATHER}\n  wait %h"
    later = alone(f"{MATMUL}\n{gather}") - alone(MATMUL) - alone(gather)
    assert later == pytest.approx(H200.behind + H200.edge)
    between = alone(f"{MATMUL}\n  delay 10 us\n{gather}") - alone(f"{MATMUL}\n  delay 10 us") - alone(gather)
    assert between == pytest.approx(H200.edge)


def test_nccl_sends_longer_all_reduces_at_a_high_rate() -> None:
    sizes = int(SHORT_ALL_REDUCE), int(1.01 * SHORT_ALL_REDUCE)
    short, long = (collective_us("allreduce", size, 2, H200) for size in sizes)
    assert long - short > 5
    assert collective_us("allgather", 3 << 20, 2, H200) < collective_us("allgather", 4 << 20, 2, H200)


def test_a_copy_takes_longer_if_its_stream_has_waited_for_another_one() -> None:
    buffers = "  %r = rank of %a over didx\n  %x: bf16[2@didx, 1024, 4096] = allocate_symmetric\n"
    copy = "  put %a -> %x at (%r + 1) % 2 over didx\n"

    def behind(pause: int) -> float:
        wait = f"  delay 50 us\n  set_stream 0\n  delay {pause} us\n  synchronize %user\n"
        return alone(f"{buffers}{wait}{copy}  set_stream %user\n  synchronize 0")

    late, early = behind(1) - 50, behind(100) - 100  # the copy waits for the other stream only in the first case
    assert late - early == pytest.approx(H200.waited + H200.edge, abs=0.1)


def test_a_kernel_that_copies_to_peers_copies_own_rows_meanwhile() -> None:
    fusion = patterns.allgather_matmul(ranks=2, S=4, M=4096, K=8192, N=3584, dtype="bf16")
    tasks = tasks_of(hi.lower(fusion, "push"), {})
    run = Simulation(tasks, Costs(H200, "triton", flops(tasks)))
    run.run()
    begins = []
    for own in (True, False):
        of_rank = [(task, task.work) for task in tasks if task.rank == 0]
        copies = [(task, work) for task, work in of_rank if isinstance(work, CostCopy) and (work.peer == 0) == own]
        assert [work.first for _, work in copies] == [True, False, False, False]
        spans = [(run.begun[task], run.ended[task]) for task, _ in copies]
        assert all(begin >= end for (_, end), (begin, _) in pairwise(spans))
        begins.append(spans[0][0])
    assert begins[0] == begins[1]


def test_copies_in_one_direction_do_not_overlap() -> None:
    copies = """
  %r = rank of %a over didx
  %x: bf16[2@didx, 1024, 4096] = allocate_symmetric
  %y: bf16[2@didx, 1024, 4096] = allocate_symmetric
  put %a -> %x at (%r + 1) % 2 over didx
"""
    one = alone(copies)
    two = alone(f"{copies}\n  set_stream 0\n  put %a -> %y at (%r + 1) % 2 over didx\n  set_stream %user")
    assert two - one == pytest.approx(
        H200.copy + COPY - H200.small_kernel
    )  # the kernel that ends the call runs beside them


def test_only_copies_with_several_peers_slow_each_other_down() -> None:
    def time_of(*peers: int) -> float:
        text = "hostir 1\nmesh @mesh [didx] = 0 1 2\nprogram @p(%a: bf16[3@didx, 1024, 4096]) -> (%a) streams 2 {\n"
        text += "  %user = current_stream\n  %r = rank of %a over didx\n"
        for n, peer in enumerate(peers):
            text += f"  %x{n}: bf16[3@didx, 1024, 4096] = allocate_symmetric\n  set_stream {n}\n"
            text += f"  synchronize %user\n  put %a -> %x{n} at (%r + {peer}) % 3 over didx\n"
        return estimates(hi.parse(text + "}\n"), {}, AT_ONCE, "triton")[GRAPH]

    assert time_of(1, 1) - time_of(1) == pytest.approx(COPY + H200.copy, abs=1)
    assert time_of(1, 2) - time_of(1, 1) > 0.3 * COPY


def test_a_wait_for_a_flag_ends_with_its_signal() -> None:
    before = "  %r = rank of %a over didx\n  %there: flag[1] = allocate_symmetric\n"
    signal = "  signal %there[0] = 1 at (%r + 1) % 2 over didx\n"
    late = alone(f"{before}  set_stream 0\n{MATMUL}\n{signal}  set_stream %user\n  wait_signal %there[0] >= 1")
    assert late == pytest.approx(alone(MATMUL) + H200.signal + H200.small_kernel)  # the small kernel resets the flag


def test_a_wait_for_another_stream_costs_an_edge() -> None:
    pause = "  delay 100 us"
    assert alone(f"{pause}\n{pause}") == pytest.approx(200)
    assert alone(f"  set_stream 0\n{pause}\n  set_stream %user\n  synchronize 0\n{pause}") == pytest.approx(
        200 + H200.edge
    )
    assert alone(f"  set_stream 0\n  delay 10 us\n  set_stream %user\n{pause}\n  synchronize 0") == pytest.approx(100)


def test_a_signal_by_a_kernel_delays_no_later_copy_and_follows_its_own_copy_quickly() -> None:
    buffers = "  %r = rank of %a over didx\n  %x: bf16[2@didx, 1024, 4096] = allocate_symmetric\n"
    buffers += "  %there: flag[2] = allocate_symmetric\n  set_stream 0\n"

    def rounds(signal: str, count: int) -> float:
        each = "".join(f"  put %a -> %x at 1 - %r over didx\n{signal.replace('$', str(i + 1))}" for i in range(count))
        return alone(f"{buffers}{each}  set_stream %user\n  wait_signal %there[0] >= {count}")

    plain = "  signal %there[0] = $ at 1 - %r over didx\n"
    by_sms = f"  set_stream 1\n  synchronize 0\n{plain[:-1]} by 1 sms\n  set_stream 0\n"
    copy = rounds(plain, 1) - H200.signal
    assert rounds(by_sms, 1) == pytest.approx(copy + H200.kernel_signal)
    copy -= H200.small_kernel  # the small kernel that resets the flags
    assert rounds(plain, 5) - rounds(plain, 1) == pytest.approx(4 * (copy + H200.signal))
    assert rounds(by_sms, 5) - rounds(by_sms, 1) == pytest.approx(4 * copy)


def test_a_matmul_reserves_one_sm_for_signals_by_kernels() -> None:
    gemm, model = Gemm(128 * 11, 256 * 12, 4096, "bf16"), costs("triton")  # 132 tiles, one for each SM
    family = H200.kernels["triton"]
    unsplit = replace(family.rates, split=None)  # else the last tile would be split among all SMs
    model.gemms.family = replace(family, tiles={"bf16": candidates("bf16")[:1]}, rates=unsplit)
    model.gemms.rates = replace(model.gemms.rates, split=None)
    without, with_one = (model.by_blocks(waiting(gemm, 1, reserved_sms=n), 0.0, [0.0])[0] for n in (0, 1))
    assert with_one > 1.8 * (without - H200.poll)
    fused = {n: hi.lower(patterns.allgather_matmul(ranks=4, S=1), "fused", n) for n in (1, 2)}
    assert {n: {t.reserved_sms for t in tasks_of(p, {}) if t.blocks} for n, p in fused.items()} == {1: {0}, 2: {1}}


def test_fused_on_two_streams_is_faster_where_copies_take_longest() -> None:
    fusion = patterns.allgather_matmul(ranks=8, S=1, M=2048, N=1792, K=4096, dtype="bf16")
    one, two = (estimates(hi.lower(fusion, "fused", streams), {}, H200, "triton")[GRAPH] for streams in (1, 2))
    assert 0.8 < two / one < 0.98


def test_a_copy_within_the_gpu_uses_sms_and_no_link() -> None:
    buffers = "  %r = rank of %a over didx\n  %x: bf16[2@didx, 1024, 4096] = allocate_symmetric\n"
    buffers += "  %y: bf16[2@didx, 1024, 4096] = allocate_symmetric\n"
    far = "  put %a -> %x at (%r + 1) % 2 over didx"
    near = "  set_stream 0\n  put %a -> %y at %r over didx\n  set_stream %user"
    assert alone(f"{buffers}{far}\n{near}") == pytest.approx(alone(f"{buffers}{far}"))
    assert alone(f"{buffers}{MATMUL}\n{near}") <= alone(f"{buffers}{MATMUL}")
    many = "\n".join([near] * 20)  # they take longer than the matmul, beside which they are slower
    assert alone(f"{buffers}{MATMUL}\n{many}") > alone(f"{buffers}{many}") + 5


def test_kernels_that_memory_bounds_share_its_rate() -> None:
    one = "  put %a -> %x at %r over didx"
    buffers = "  %r = rank of %a over didx\n  %x: bf16[2@didx, 1024, 4096] = allocate_symmetric\n"
    two = f"{buffers}{one}\n  set_stream 0\n{one}\n  set_stream %user"
    in_turn = alone(f"{buffers}{one}\n{one}")
    assert alone(two) == pytest.approx(in_turn - H200.small_kernel)  # the kernel that ends the call runs beside them


def test_a_barrier_waits_for_the_slowest_rank() -> None:
    slow = "  %r = rank of %a over didx\n  if %r == 1 {\n    delay 500 us\n  }\n  barrier of %a over didx"
    assert alone(slow) == pytest.approx(500 + H200.barrier)


def test_launch_times_count_in_eager_calls_only() -> None:
    # The host starts ahead of the device. It falls behind, as each launch takes longer than its kernel.
    many = "\n".join(["  delay 1 us"] * 200)
    assert estimate_us(f"{BUFFERS}{many}", GRAPH) == pytest.approx(200)
    assert estimate_us(f"{BUFFERS}{many}", EAGER) > 200 * H200.launch["delay"] - H200.host_lead
    few = f"{BUFFERS}  delay 2000 us\n"
    assert estimate_us(few, EAGER) == estimate_us(few, GRAPH) == pytest.approx(2000)


def test_torch_launches_one_matmul_for_each_block_and_triton_launches_one_for_all_blocks() -> None:
    fusion = patterns.allgather_matmul(ranks=8, S=1, M=64, N=64, K=64, dtype="bf16")
    tasks = tasks_of(hi.lower(fusion, "fused"), {})
    torch, triton = HostCosts(costs("aten")).call(tasks), HostCosts(costs("triton")).call(tasks)
    assert torch > triton + 7 * H200.launch["matmul"]


def costs(kernels: str = "aten") -> Costs:
    return Costs(H200, kernels, 1e11)


def waiting(gemm: Gemm, blocks: int, **options: int) -> CostTask:
    """Return a matmul that waits for its rows in this number of blocks."""
    return CostTask(0, replace(gemm, block=gemm.m // blocks), **options)


def test_a_matmul_that_fills_one_wave_takes_as_long_with_fewer_tiles() -> None:
    gemm = Gemm(128 * 12, 256 * 11, 4096, "bf16")  # 132 tiles
    family = H200.kernels["aten"]
    model = replace(H200, kernels={"aten": replace(family, tiles={"bf16": family.tiles["bf16"][:1]})})
    one = Costs(model, "aten", 1e11)
    full = one.gemms.time(gemm)
    assert one.gemms.time(replace(gemm, m=128 * 11)) == full
    assert one.gemms.time(replace(gemm, m=128 * 13)) > 1.8 * full


@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_a_matmul_that_waits_for_blocks_ends_after_the_last_of_them(kernels: str) -> None:
    gemm, c = Gemm(8192, 3584, 8192, "bf16"), costs(kernels)
    without_blocks = c.gemms.time(gemm)
    task = waiting(gemm, 8)
    at_once = c.by_blocks(task, 0.0, [0.0] * 8)[0]
    late = c.by_blocks(task, 0.0, [50.0 * i for i in range(8)])[0]
    very_late = c.by_blocks(task, 0.0, [0.0] * 7 + [5000.0])[0]
    assert without_blocks * 0.95 < at_once < without_blocks * 1.4
    assert at_once <= late
    assert 5000 < very_late < 5000 + without_blocks / 2


def test_the_first_matmuls_of_a_call_write_back_what_others_left_in_l2() -> None:
    few, c = Gemm(1, 8192, 4096, "bf16"), costs()
    size = 2 * (4096 + 8192 * 4096 + 8192)  # 64 MiB, more than `dirty`
    first, later = (c.gemms.streaming(few, Loads(before=before)) for before in (0, 64 << 20))
    assert first == pytest.approx((size + H200.dirty) / H200.operands / 1e3)
    assert later == pytest.approx(size / H200.operands / 1e3)
    assert later < c.gemms.streaming(few, Loads(before=16 << 20)) < first
    assert c.gemms.streaming(few, Loads(cached=True)) < later / 100
    small = replace(few, n=1024)
    assert c.gemms.streaming(small) == pytest.approx(2 * c.gemms.streaming(small, Loads(before=64 << 20)))


def test_a_matmul_of_few_rows_raises_its_flags_as_its_operands_are_loaded() -> None:
    few, c = Gemm(16, 8192, 8192, "bf16", block=4), costs("triton")  # memory takes longer than the tensor cores
    task = replace(raising(4, few), blocks=[[], [], [], []])
    end, flags = c.by_blocks(task, 0.0, [0.0] * 4)
    assert end == flags[-1] > c.gemms.streaming(few)
    assert c.by_blocks(task, 0.0, [0.0, 0.0, 0.0, 100.0])[0] > 100 + c.gemms.streaming(few), "one tile has all rows"


def test_collectives_of_few_bytes_by_nccl_begin_sooner() -> None:
    times = [simulation.collective_us("allreduce", size, 2, H200) for size in (64_000, 64_002, 1_500_000, 1_500_002)]
    assert times[1] - times[0] == pytest.approx(H200.low_latency_step, abs=0.01)
    assert times[3] > times[2]


def test_the_cost_model_uses_the_kernels_tile_and_the_kernels_estimate() -> None:
    model, start = costs("triton"), H200.kernels["triton"].start
    thin = Gemm(2048, 6656, 16384, "bf16")
    tile = choose(thin, 132, candidates("bf16"))
    assert model.gemms.fastest(thin) == tile
    assert tile.split == 20, "416 tiles of 128 x 256: the last wave has 20, each split into 6 parts"
    assert model.gemms.time(thin) == start + duration(tile, thin, 132, model.gemms.rates)[0]
    arriving = Gemm(2048, 3584, 8192, "bf16", block=256, separate=True)
    tile = choose(arriving, 132, candidates("bf16"))
    assert tile.early_blocks
    end = duration(tile, arriving, 132, model.gemms.rates, [start + H200.poll] * 8)[0]
    assert model.by_blocks(CostTask(0, arriving), 0.0, [0.0] * 8)[0] == end
    assert not costs("aten").gemms.fastest(thin).split, "the model has no split tiles for cuBLAS"


def test_splitting_the_first_and_the_last_tiles_saves_time_when_rows_arrive_late() -> None:
    gemm = Gemm(2048, 3584, 8192, "bf16", block=256, separate=True)  # 224 tiles of 128 x 256: 92 in the last wave
    unsplit, split = costs("triton"), costs("triton")
    family = H200.kernels["triton"]
    unsplit.gemms.family = replace(family, rates=replace(family.rates, split=None))
    arrivals = [0.0, *(15 + 13.2 * i for i in range(1, 8))]  # 4 MiB each, from a copy engine
    ends = [c.by_blocks(CostTask(0, gemm), 0.0, arrivals)[0] for c in (unsplit, split)]
    assert 5 < ends[0] - ends[1] < 30


def test_blocks_smaller_than_a_tile_are_multiplied_together() -> None:
    gemm, c = Gemm(64, 3584, 8192, "bf16"), costs("triton")
    together = c.by_blocks(waiting(gemm, 8), 0.0, [100.0] * 8)[0]
    assert together == c.by_blocks(waiting(gemm, 8), 0.0, [0.0] * 7 + [100.0])[0]
    assert together < 100 + H200.poll + 2 * c.gemms.time(gemm)


def test_matmuls_of_one_wave_run_together_only_where_both_fit() -> None:
    c = costs()
    small, large = (CostTask(0, Gemm(m, 3584, 8192, "bf16")) for m in (512, 8192))
    left = c.width(small)
    assert c.share(small, left) == left
    assert c.share(small, left * 0.9) == 0.0
    assert 0.0 < c.share(large, 0.3) < 0.3


def test_every_rank_has_tasks_and_collectives_have_all_ranks_as_partners() -> None:
    tasks = tasks_of(hi.lower(patterns.mlp(), "pipeline", 2), {})
    assert {task.rank for task in tasks} == set(range(4))
    assert {len(task.partners) for task in tasks} == {0, 4}


def test_more_bytes_and_more_work_take_longer() -> None:
    def time_of(m: int, strategy: str) -> float:
        fusion = patterns.allgather_matmul(ranks=8, S=2, M=m, N=1792, K=4096, dtype="bf16")
        return estimates(hi.lower(fusion, strategy), {}, H200, "triton")[GRAPH]

    for strategy in ("sequential", "pipeline", "ring", "fused", "push"):
        times = [time_of(m, strategy) for m in (2048, 4096, 8192, 16384)]
        assert times == sorted(times)
        assert times[-1] > 3 * times[0]


def test_symbols_are_bound_by_sizes() -> None:
    text = "hostir 1\nmesh @m [didx] = 0 1\nprogram @p(%a: bf16[M, 64], %b: bf16[64, 64]) -> (%c) {\n"
    text += "  %c: bf16[M, 64] = allocate\n  matmul %a, %b -> %c\n}\n"
    program = hi.parse(text)
    many, few = (estimates(program, {"M": m}, AT_ONCE)[GRAPH] for m in (1 << 20, 128))
    assert many > 10 * few


def test_machines_are_named_with_or_without_ranks() -> None:
    assert parse_machine("h200x8") == (H200, 8)
    assert parse_machine("H200") == (H200, None)
    for text in ("h20", "h200x0", "h200xx8", "x8", ""):
        with pytest.raises(HostIRError, match="unknown machine"):
            parse_machine(text)


def test_only_few_own_rows_take_a_copy_of_their_own_in_the_model() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0 1
fusion @rows(%a: bf16[M@didx, 4096], %b: bf16[4096, 1792]) -> (%c) {
  %full: bf16[M, 4096] = allgather %a over didx
  %c: bf16[M, 1792] auto = matmul %full, %b
}
"""
    program = hi.lower(hi.parse(text), "fused")

    def copies(rows: int) -> int:
        return sum(isinstance(task.work, Traffic) for task in tasks_of(program, {"M": 2 * rows}))

    few, many = (1, MIN_OWN_ROWS - 1), (MIN_OWN_ROWS, 8 * MIN_OWN_ROWS)
    assert {copies(rows) - copies(4096) for rows in few} == {2}  # one copy for each rank
    assert {copies(rows) - copies(4096) for rows in many} == {0}


def test_tiles_are_estimated_by_waves_not_one_by_one() -> None:
    fusion = patterns.allgather_matmul(ranks=2, S=1, M=1 << 17, K=256, N=8192, dtype="bf16")
    program = hi.lower(fusion, "fused")
    estimates(program, {}, H200, "triton")  # the first estimate also imports modules
    tiles = 2 * (1 << 17) // 128 * (8192 // 256)  # one call for each tile on both ranks would be more
    assert calls_of(lambda: estimates(program, {}, H200, "triton")) < tiles


def test_a_candidate_is_simulated_once_for_all_modes_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], Simulation.run
    monkeypatch.setattr(Simulation, "run", lambda each: runs.append(each) or run(each))
    choice = decide(patterns.allgather_matmul().program(), reference(H200, 4), {})
    assert len(runs) == len(choice.timings)


# Completion flags of blocks, and sums of arriving blocks ---------------------------------------------------------
PRODUCT = Gemm(8192, 4096, 4096, "bf16")


def raising(count: int, work: Gemm | Traffic = PRODUCT, **options: object) -> CostTask:
    """Return a task that sets a completion flag behind each of `count` blocks of its result."""
    return CostTask(0, work, raises=[CostTask(0, Pause(sender="stream")) for _ in range(count)], **options)


@pytest.mark.parametrize("kernels", ["aten", "triton"])
@pytest.mark.parametrize("work", [PRODUCT, Traffic(1 << 28)], ids=["matmul", "sum"])
def test_flags_are_set_in_order_while_a_computation_runs_and_the_last_at_its_end(
    kernels: str, work: Gemm | Traffic
) -> None:
    c = costs(kernels)
    end, flags = c.by_blocks(raising(8, work), 100.0, [])
    assert list(flags) == sorted(flags)
    assert flags[-1] == pytest.approx(end, abs=H200.small_kernel)
    fractions = [(flag - 100) / (end - 100) for flag in flags]
    assert fractions == pytest.approx([(i + 1) / 8 for i in range(8)], abs=0.15)
    assert c.alone(raising(8, work)) == pytest.approx(end - 100)


def test_a_triton_matmul_that_raises_flags_is_one_kernel_and_aten_runs_one_for_each_flag() -> None:
    triton, torch = costs("triton"), costs("aten")
    start = H200.kernels["triton"].start
    in_order = (triton.gemms.time(PRODUCT) - start) / simulation.BLOCK_BY_BLOCK  # tiles in this order find less in L2
    assert triton.alone(raising(8)) == pytest.approx(start + in_order, rel=0.01)
    assert torch.alone(raising(8)) > torch.gemms.time(PRODUCT) + 7 * H200.flag_wait
    of_block = replace(PRODUCT, m=1024)
    assert torch.alone(raising(8)) == pytest.approx(8 * torch.gemms.time(of_block) + 7 * H200.flag_wait)


def test_a_block_that_tiles_do_not_divide_ends_with_the_last_tile_that_covers_it() -> None:
    tile, gemm = replace(candidates("bf16")[0], split=0), Gemm(1000, 256, 4096, "bf16")  # 8 tiles of 128 rows
    model = costs("triton")
    ends = block_ends(tile, gemm, 1, model.gemms.rates, [0.0], 5)  # of 200 rows each
    one = model.gemms.rates.unsplit_time(tile, gemm)
    assert [round(end / one) for end in ends] == [2, 4, 5, 7, 8]
    more = block_ends(tile, gemm, 1, model.gemms.rates, [0.0], 16)
    assert [round(end / one) for end in more] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]


def test_a_matmul_may_wait_for_blocks_of_its_input_and_set_flags_for_blocks_of_its_result() -> None:
    c, gemm = costs("triton"), replace(PRODUCT, block=2048)
    arrivals = [0.0, 100.0, 5000.0, inf]
    end, flags = c.by_blocks(raising(8, gemm), 0.0, arrivals)
    assert end == inf
    assert flags[3] < 5000 < flags[4] <= flags[5] < inf == flags[6] == flags[7]


@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_a_sum_adds_each_block_when_it_has_arrived_from_all_sources(kernels: str) -> None:
    c, work = costs(kernels), Traffic(9 * (8 << 20))
    without_blocks = c.alone(CostTask(0, work))
    early, _ = c.by_blocks(CostTask(0, work), 0.0, [0.0] * 4)
    late, _ = c.by_blocks(CostTask(0, work), 0.0, [0.0, 0.0, 0.0, 1000.0])
    assert without_blocks <= early + 1e-9
    assert early < without_blocks + 4 * H200.small_kernel + H200.poll
    assert 1000 < late < 1000 + without_blocks / 2


SCATTERED = scattered_rows(4, 4096, 8192, 3584, pieces=2)


@pytest.mark.parametrize("kernels", ["cublas", "triton"])
def test_blocks_are_sent_while_the_others_are_computed(kernels: str) -> None:
    tasks = tasks_of(SCATTERED, {})
    model, all_copies = Costs(H200, kernels, flops(tasks)), 4096 * 8192 * 2 * 3 // 4 / H200.link / 1e3
    run = Simulation(tasks, model)
    total = run.run()
    matmul = next(t for t in tasks if t.raises and t.rank == 0)
    assert model.alone(matmul) < total < model.alone(matmul) + all_copies / 3
    raised = [run.ended[flag] for flag in matmul.raises]
    assert raised == sorted(raised)
    copies = [t for t in tasks if isinstance(t.work, CostCopy) and t.rank == 0]
    assert [raised[i] < run.ended[copy] for i, copy in enumerate(copies)] == [True] * 6
    assert run.ended[copies[0]] < raised[2]


def test_a_rank_computes_its_own_blocks_last_and_its_sum_waits_for_other_ranks_only() -> None:
    tasks = [t for t in tasks_of(SCATTERED, {}) if t.rank == 1]
    (matmul,), (added,) = [t for t in tasks if t.raises], [t for t in tasks if t.blocks]
    assert len(matmul.raises) == 8
    waited = [t.after[-1] for t in tasks if isinstance(t.work, Nothing) and t.after and t.after[-1] in matmul.raises]
    assert waited == matmul.raises[:6]
    assert [[signal.rank for signal in block] for block in added.blocks] == [[0, 2, 3]] * 2
    assert isinstance(added.work, Traffic)
    assert added.work.bytes == (4 + 1) * 1024 * 8192 * 2


def test_flags_are_set_later_when_a_collective_takes_sms_from_the_matmul() -> None:
    def last(team: list[CostTask]) -> float:
        matmul = raising(4)
        run = Simulation([matmul, *matmul.raises, *team], costs("aten"))
        run.run()
        return run.ended[matmul.raises[-1]]

    beside = [CostTask(rank, CostTransfer("reduce_scatter", 1 << 28, 2)) for rank in (0, 1)]
    for task in beside:
        task.partners = beside
    assert last(beside) > 1.1 * last([])


def test_fp8_matmuls_take_little_more_than_half_the_time_of_bf16() -> None:
    def time_of(dtype: str, fast: str = "") -> float:
        types = f"%a: {dtype}[8192, 8192], %b: {dtype}[8192, 8192]"
        scaled = f"scaled_matmul %a, %b scaled %s, %t to bf16{fast} -> %c"
        text = f"""hostir 1
mesh @mesh [didx] = 0 1
program @p({types}, %s: f32[8192, 1], %t: f32[1, 8192]) -> (%c) {{
  %c: bf16[8192, 8192] = allocate
  {"matmul %a, %b -> %c" if dtype == "bf16" else scaled}
}}
"""
        return estimates(hi.parse(text), {}, H200)[GRAPH]

    wide, fast, exact = time_of("bf16"), time_of("f8e4m3", " accumulate fast"), time_of("f8e4m3")
    assert 0.5 * wide < fast < 0.6 * wide
    assert fast < exact < wide


def test_scaled_matmuls_are_estimated_for_every_strategy() -> None:
    fusion = patterns.scaled_allgather_matmul(2, M=8192, K=8192, N=4096)
    choice = decide(fusion.program(), reference(H200, 2), {})
    taken = {timing.candidate.strategy for timing in choice.timings}
    by = {"sequential by low_latency", "sequential by copy_engine"}
    assert taken == {"sequential", *by, "ring", "fused", "push"}


def test_a_matmul_that_stores_few_rows_to_peers_saves_the_copy_kernel() -> None:
    program = hi.lower(patterns.row_parallel(2, 1, 64, 2 * 3584, 8192, "bf16"), "push")
    tasks = tasks_of(program, {})
    apart = tasks_of(program, {})
    for task in apart:
        if isinstance(task.work, CostCopy):
            assert task.work.in_matmul
            task.work = replace(task.work, in_matmul=False)
    slower = 1 / min(16 * H200.sm_rate, H200.link) - 1 / H200.link  # 16 SMs store less than the link allows
    in_matmul = H200.push - H200.small_kernel + 64 * 8192 * 2 * slower / 1e3
    for kernels, saved in (("aten", 0.0), ("triton", in_matmul)):
        assert estimated(apart, kernels) - estimated(tasks, kernels) == pytest.approx(saved, abs=0.01)
    hosts = [HostCosts(Costs(H200, "triton", 0.0)).call(each) for each in (apart, tasks)]
    assert hosts[0] - hosts[1] == pytest.approx(H200.launch["push"])


def estimated(tasks: list[CostTask], kernels: str) -> float:
    return Simulation(tasks, Costs(H200, kernels, flops(tasks))).run()


def test_aten_is_charged_for_every_pass_of_a_sum_with_own_rows_in_another_buffer() -> None:
    """ATen sums in f32: a copy, an addition for each other source, and a rounding. Triton reads and writes once."""
    tasks = tasks_of(
        hi.lower(patterns.row_parallel_scattered(ranks=2, S=1, M=4096, K=7168, N=8192, dtype="bf16"), "fused"), {}
    )
    (total,) = {t.work for t in tasks if isinstance(t.work, Traffic) and t.work.aten_bytes}
    elements = 4096 * 8192 // 2
    assert (total.bytes, total.aten_kernels, total.aten_bytes) == (6 * elements, 3, 22 * elements)
    times = {kernels: Costs(H200, kernels, 0.0).traffic(total) for kernels in ("aten", "cublas", "triton")}
    assert times["cublas"] == times["triton"] == pytest.approx(times["aten"] * 6 / 22)


def experts(count: int, tokens: int, sources: int = 2) -> hi.Program:
    """Return a program on one rank that multiplies `tokens` rows of each source by one of `count` matrices."""
    inputs = (
        f"%x: bf16[{sources}, {tokens}, 4096], %w: bf16[{count}, 4096, 2048], %offsets: i32[{sources}, {count + 1}]"
    )
    return hi.parse(f"""hostir 1
mesh @mesh [didx] = 0
program @p({inputs}) -> (%y) {{
  %y: bf16[{sources}, {tokens}, 2048] = allocate
  grouped_matmul %x, %w by %offsets -> %y
}}
""")


def of_experts(count: int, tokens: int, sources: int = 2) -> float:
    return estimates(experts(count, tokens, sources), {}, H200)[GRAPH]


def test_a_grouped_matmul_reads_all_matrices_and_its_tiles_hold_rows_of_one_group() -> None:
    (task,) = [t for t in tasks_of(experts(8, 1000), {}) if isinstance(t.work, Gemm)]
    assert task.work == Gemm(125, 2048, 4096, "bf16", batches=16, matrices=8, grouped=True)  # of one source
    assert flops([task]) == 2 * 8 * 250 * 2048 * 4096
    (task,) = [t for t in tasks_of(experts(128, 1024), {}) if isinstance(t.work, Gemm)]
    assert task.work == Gemm(16, 2048, 4096, "bf16", batches=128, matrices=128, grouped=True, collects=True)
    matrices = 128 * 4096 * 2048 * 2  # bytes
    assert of_experts(128, 64) > matrices / H200.memory / 1e3
    assert of_experts(128, 64) > 3 * of_experts(8, 64)
    assert of_experts(64, 8320) > of_experts(64, 16640, sources=1)
    assert of_experts(128, 8320) > 1.1 * of_experts(64, 8320)  # more groups have more partly empty tiles
    many = of_experts(8, 16384, sources=1)
    assert many == pytest.approx(of_experts(1, 16384, sources=1), rel=0.1)


@pytest.mark.parametrize("kernels", ["aten", "cublas", "triton"])
def test_more_ranks_than_experts_can_be_estimated(kernels: str) -> None:
    fusion = _gather_fusion(8, "bf16", 2, 1024, (1792,))
    for strategy in ("ring", "fused", "push"):
        assert estimates(hi.lower(fusion, strategy), {"M": 2048, "S": 4096}, H200, kernels)[GRAPH] > 0


@pytest.mark.parametrize("experts", [4, 256])
def test_gathered_rows_are_multiplied_as_they_arrive_unless_matrices_would_be_read_too_often(experts: int) -> None:
    with hi.Fusion("experts") as fusion:
        x, order = hi.tensor("x", [4, 1024, 2048], "bf16"), hi.tensor("order", [4, 2048], "i32")
        rows = hi.permute_rows(x, order)
        w, offsets = hi.tensor("w", [experts, 2048, 8192], "bf16"), hi.tensor("offsets", [4, experts + 1], "i32")
        y = hi.grouped_matmul(rows, w, offsets)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(4))
    x.shard(0, mesh)
    w.shard(2, mesh)
    y.shard(2, mesh)
    rows.set_device_mesh(mesh)
    choice = decide(fusion.program(), reference(H200, 4), {}, "triton")
    assert {t.candidate.strategy for t in choice.timings} >= {"sequential", "ring", "fused", "push"}
    assert (choice.taken.strategy == "ring") == (experts == 4)


def test_products_of_matrices_in_pairs_and_gradients_of_experts_count_all_their_matrices() -> None:
    program = hi.parse("""hostir 1
mesh @mesh [didx] = 0
program @p(%a: f32[3, 5, 16, 8], %b: f32[3, 5, 8, 4], %x: f32[2, 40, 8], %g: f32[2, 40, 4], %o: i32[2, 6]) -> (%c, %d) {
  %c: f32[3, 5, 16, 4] = allocate
  batched_matmul %a, %b -> %c
  %d: f32[5, 8, 4] = allocate
  grouped_outer %x, %g by %o -> %d
}
""")
    works = [t.work for t in tasks_of(program, {}) if isinstance(t.work, Gemm)]
    pairs = Gemm(16, 4, 8, "f32", batches=15, matrices=15)
    assert works == [pairs, Gemm(8, 4, 16, "f32", batches=5, matrices=5)]


def test_a_simulation_is_freed_after_its_run() -> None:
    tasks = tasks_of(hi.lower(patterns.allgather_matmul_rows(2), "ring"), {"M": 64, "K": 64, "N": 64})
    costs = Costs(H200, "triton", flops(tasks))
    Simulation(tasks, costs).run()
    held = weakref.ref(costs)
    del costs
    gc.collect()
    assert held() is None


NORMED = """hostir 1
mesh @mesh [didx] = 0 1
fusion @f(%x: bf16[64, 4096] partial(didx), %r: bf16[64, 4096], %w: bf16[4096]) -> (%t, %s, %q) {
  %y: bf16[64, 4096] = reshard %x
  %t: bf16[64, 4096] = add %y, %r
  %n: bf16[64, 4096] = rms_norm %t eps 1e-06 times %w
  %s: f32[64, 1] = row_scales %n to f8e4m3
  %q: f8e4m3[64, 4096] = quantize %n by %s to f8e4m3
}
"""


def test_what_follows_a_sum_in_its_kernel_takes_no_kernel() -> None:
    program = hi.lower(hi.parse(NORMED), "sequential by low_latency")
    tasks = [task for task in tasks_of(program, {}) if task.rank == 0 and isinstance(task.work, Traffic)]
    rows = 64 * 4096 * 2
    assert [task.work.in_sum for task in tasks] == [2 * rows, 4096 * 2, 64 * 4, rows // 2]
    for kernels, count in (("triton", 0), ("aten", 4)):
        model = costs(kernels)
        assert sum(model.kernel_count(task.work) for task in tasks) == count
    separate = [replace(task.work, in_sum=None) for task in tasks]
    assert sum(map(costs("triton").alone, tasks)) < H200.small_kernel * len(separate)
    host, compute = HostCosts(costs("triton")), H200.launch["compute"]
    for task in tasks:
        launches = {name: n for name, n in task.launches.items() if name != "compute"}
        assert host.issue(task) == pytest.approx(host.issue(replace(task, work=Nothing(), launches=launches)))
        assert task.launches["compute"] == 1
        assert compute > 0


def test_few_rows_are_summed_and_normalized_by_one_kernel() -> None:
    choice = decide(hi.parse(NORMED), reference(H200, 2), {})
    assert choice.timings[0].candidate.strategy == "sequential by low_latency"
