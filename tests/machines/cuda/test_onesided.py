"""One-sided statements as CUDA plans issue them, on simulated GPUs: calls back to back, in orders that CUDA allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.local import rehearse
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.comm_ops import Communication
from hostir.ir.message_ops import Message
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import Linear
from hostir.kernels.dtypes import undefined
from hostir.machines.binding import places
from hostir.machines.cuda.streams import CallOrder
from hostir.plan.operations import ComputeOp
from hostir.plan.unroll import unroll
from tests import symbolic
from tests.counting import calls_of
from tests.judging.reduce_scatters import FORMS, IN_PIECES, reduce_scatter
from tests.lower.gathered import gathered
from tests.machines.cuda.simulated_gpus import CPU, Gpus, Stream, gpus, layers, plans

__all__ = ["gpus"]  # a fixture
CASES = Path(__file__).parents[2] / "cases" / "onesided"


def check_calls(
    program: Program,
    gpus: Gpus,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    calls: int = 3,
    sizes: dict[str, int] | None = None,
    layout: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    executors: int = 1,
    in_place: bool = False,
) -> None:
    """Issue calls of all ranks at once, and compare results bit for bit with simulated ranks in program order.

    Several executors of the program take turns, and each call may be on any stream. With `in_place`, the callers write
    their inputs to the memory that `places` returns.
    """
    sizes = sizes or {}
    random = Random(seed)
    gpus.waiting = random.random() < 0.5  # else one kernel a block, or one behind all blocks
    wholes = [random_inputs(program, sizes, seed=10 * seed + call) for call in range(calls)]
    ranks = range(program.ranks)
    inputs = [
        [[shard(x, v.tensor, r, sizes) for x, v in zip(whole, program.inputs, strict=True)] for r in ranks]
        for whole in wholes
    ]
    expected = rehearse(program, wholes, sizes, "aten").run()
    first = [[x if x is None else layout(x) for x in mine] for mine in inputs[0]]
    ready = layers(gpus, program, first, monkeypatch, sizes, executors)
    callers = [[Stream() for _ in range(executors)] for _ in ranks]
    outputs = []
    for rank in random.sample(ranks, len(ranks)):  # the hosts are far ahead of their devices, and of each other
        order = CallOrder(CPU)
        for call in range(calls):
            gpus.current = caller = random.choice(callers[rank])
            if executors > 1:
                order.follow()
            mine, plan = [x if x is None else layout(x) for x in inputs[call][rank]], random.choice(ready[rank])
            if in_place:
                homes = places(plan.unrolled, plan.memory, plan.registers)
                mine = [x if home is None else gpus.written(home, x) for home, x in zip(homes, mine, strict=True)]
            outputs.append((call, rank, plan.run(mine)))
            for x in mine:  # the caller overwrites its inputs as soon as its stream gets there
                if x is not None:
                    gpus.current.add(lambda x=x: x.fill_(undefined(x.dtype)))
            assert gpus.current is caller
    gpus.run(random)
    for call, rank, outs in outputs:
        for out, parts in zip(outs, expected[call], strict=True):
            want = parts[rank]
            assert (out is None) == (want is None)
            if out is not None:
                close = torch.finfo(out.dtype).eps if out.dtype.itemsize == 1 else 1e-5  # a last bit may round to fp8
                torch.testing.assert_close(out.float(), want.float(), rtol=close, atol=1e-5)
    for plan in (plan for mine in ready for plan in mine):
        assert plan.registers == plan.blank


def lowered(strategy: str, ranks: int, S: int = 1) -> Program:
    with hi.Fusion("ag") as fusion:
        a = hi.tensor("a", [S, ranks, 4, 8], "f32")
        b = hi.tensor("b", [8, 5], "f32")
        c = hi.matmul(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(hi.ParallelType.DIDx)
    return hi.lower(fusion, strategy)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
def test_calls_that_follow_each_other_at_once_are_right_in_every_order(
    strategy: str, ranks: int, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(lowered(strategy, ranks, S=1 + seed % 2), gpus, seed, monkeypatch, calls=4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
def test_executors_of_one_program_share_memory_and_are_right_in_every_order(
    strategy: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(lowered(strategy, 2 + seed % 3), gpus, seed, monkeypatch, calls=6, executors=3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("executors", [1, 2])
@pytest.mark.parametrize("pattern", [patterns.row_parallel_scattered, patterns.row_parallel], ids=lambda p: p.__name__)
def test_chains_of_products_are_right_in_every_order(
    pattern: Callable[..., hi.Fusion], executors: int, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 2 + seed % 3
    program = hi.lower(pattern(ranks=ranks, S=1, M=4 * ranks, K=ranks, N=4), "chain", 1 + seed % 2)
    check_calls(program, gpus, seed, monkeypatch, calls=4, executors=executors)


WORKERS_ALONE = """hostir 1
mesh @mesh [didx] = 0
program @kept(%x: f32[8], %y: f32[8]) -> (%c) streams 1 {
  %user = current_stream
  %box: f32[8] = allocate_symmetric
  %c: f32[8] = allocate
  set_stream 0
  synchronize %user
  copy %x -> %box
  set_stream %user
  copy %y -> %c
}
"""


def test_executors_of_one_program_share_worker_streams(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes of %box in two calls are on worker 0, and only this stream orders them."""
    inputs = [[torch.randn(8), torch.randn(8)]]
    for (one, other), same in (
        (layers(gpus, hi.parse(WORKERS_ALONE), inputs, monkeypatch, None, 2)[0], True),
        (layers(gpus, hi.parse(ALONE), inputs, monkeypatch, None, 2)[0], False),
    ):
        assert (one.machine.streams == other.machine.streams) is same
        assert one.memory is other.memory


ALONE = WORKERS_ALONE.replace("allocate_symmetric", "allocate")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bias", ["", ", %bias"])
def test_a_linear_waits_for_its_rows_as_a_matmul_does(
    bias: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = hi.parse(f"""hostir 1
mesh @mesh [didx] = 0 1 2
fusion @biased(%x: f32[6@didx, 2], %w: f32[3, 2], %bias: f32[3]) -> (%y) {{
  %full: f32[6, 2] = allgather %x over didx
  %y: f32[6, 3] auto = linear %full, %w{bias}
}}
""")
    program = hi.lower(fusion, "fused")
    assert [s.ready is not None for s in program.walk() if isinstance(s, Linear)] == [True]
    check_calls(program, gpus, seed, monkeypatch)


PERMUTED = """  %rows: f32[6, 8, 2] auto = permute_rows %full by %order
  %y: f32[6, 8, 5] auto = grouped_matmul %rows, %w by %offsets"""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
@pytest.mark.parametrize("body", ["  %y: f32[6, 8, 5] auto = grouped_matmul %full, %w by %offsets", PERMUTED])
def test_a_grouped_matmul_waits_for_sources_in_every_order(
    body: str, strategy: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = hi.parse(
        f"""hostir 1
mesh @mesh [didx] = 0 1 2
fusion @experts(%x: f32[6@didx, 4, 2], %w: f32[3, 2, 5], %offsets: i32[6, 4], %order: i32[6, 8]) -> (%y) {{
  %full: f32[6, 4, 2] = allgather %x over didx
{body}
}}
""".replace("4, 2]", "4, 2]" if body == PERMUTED else "8, 2]")
    )
    check_calls(hi.lower(fusion, strategy), gpus, seed, monkeypatch)


GATHERED = (patterns.allgather_matmul, patterns.allgather_matmul_rows, patterns.allgather_matmul_kept, patterns.gate_up)


def needs_nccl(program: Program) -> bool:
    return any(isinstance(s, Communication | Message) for s in program.walk())


def by_hand() -> list[str]:
    names = [path.stem for path in CASES.glob("*.hir")]
    programs = {name: parse((CASES / f"{name}.hir").read_text(), name) for name in names}
    return sorted(name for name, p in programs.items() if not needs_nccl(p) and not p.size_names)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", by_hand())
def test_programs_written_by_hand_are_right_in_every_order(
    name: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = parse((CASES / f"{name}.hir").read_text(), name)
    check_calls(program, gpus, seed, monkeypatch)


def overlapped(fusion: Program, strategy: str) -> Program | None:
    """Return a program without NCCL, which the simulated GPUs lack; None if this strategy makes no such program."""
    try:
        program = hi.lower(fusion, strategy)
    except HostIRError:
        return None
    return None if needs_nccl(program) else program


LAYOUTS = {2: symbolic.LAYOUTS[:2], 3: symbolic.LAYOUTS[2:-1]}  # by ranks: each with every program once


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("pattern", GATHERED, ids=lambda p: p.__name__)
def test_no_rows_and_inputs_of_any_strides_are_right_in_every_order(
    pattern: Callable[..., hi.Fusion], ranks: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = [p for _, p in symbolic.lowered(pattern, ranks) if not needs_nccl(p)]
    programs = [*{str(p): p for p in lowered}.values()]  # without a reduce_scatter, `chain` is `ring`
    assert len(programs) in (3, 4)
    for seed, program in enumerate(programs):
        check_calls(program, gpus, seed, monkeypatch, sizes={"M": 0})
        for layout in LAYOUTS[ranks]:
            check_calls(program, gpus, seed, monkeypatch, sizes={"M": 12 * ranks}, layout=layout)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_are_right_in_every_order(seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    fusions = (gathered(2 + seed % 3, draw) for draw in range(seed, seed + 1000, 40))
    program = next(p for f in fusions if (p := overlapped(f, ("ring", "fused", "push")[seed % 3])))
    check_calls(program, gpus, seed, monkeypatch)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("form", FORMS, ids=["pieces", "slices"])
def test_blocks_that_are_done_are_sent_and_summed_in_every_order(
    form: str, ranks: int, pieces: int, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.parse(reduce_scatter(form, ranks, pieces))
    check_calls(program, gpus, seed, monkeypatch, calls=4, executors=1 + seed % 2)


BOTH = """hostir 1
mesh @mesh [didx] = 0 1
program @both(%x: f32[{rows}@didx, 4], %w: f32[4, 3], %v: f32[{rows}@didx, 3]) -> (%y, %z) streams 2 {{
  %user = current_stream
  %r = rank of %x over didx
  %full: f32[{rows}, 4] = allocate_symmetric
  %there: flag[{ready}] = allocate_symmetric
  %done: flag[{raised}] = allocate_symmetric
  %y: f32[{rows}, 3] = allocate
  %z: f32[{rows}, 3] = allocate
  set_stream 0
  synchronize %user
  set_stream 1
  synchronize %user
  set_stream 0
  barrier of %full over didx
  for %i in 0..{ready} / 2 {{
    %piece = chunk %x[%i of {ready} / 2]
    %slot = chunk %full[((%r * {ready}) / 2) + %i of {ready}]
    put %piece -> %slot at (%r + 1) % 2 over didx
    signal %there[((%r * {ready}) / 2) + %i] = 1 at (%r + 1) % 2 over didx
  }}
  set_stream %user
  %own = chunk %full[%r of 2]
  copy %x -> %own
  for %i in 0..{ready} / 2 {{
    signal %there[((%r * {ready}) / 2) + %i] = 1 at %r over didx
  }}
  matmul %full, %w -> %y ready %there >= 1 done %done = 1 from 1
  set_stream 1
  for %i in 0..{raised} {{
    wait_signal %done[%i] >= 1
    %from = chunk %y[%i of {raised}]
    %to = chunk %z[%i of {raised}]
    relu %from -> %to
  }}
  set_stream %user
  synchronize 0
  synchronize 1
}}
"""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ready", "raised"), [(4, 4), (4, 2), (2, 8)])
def test_flags_of_another_number_of_blocks_rise_behind_those_that_were_waited_for(
    ready: int, raised: int, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.parse(BOTH.format(rows=16, ready=ready, raised=raised))
    check_calls(program, gpus, seed, monkeypatch, calls=4)


SCATTERED = (patterns.row_parallel_scattered, patterns.row_parallel_bias, patterns.mlp)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("pattern", SCATTERED, ids=lambda p: p.__name__)
def test_reduce_scatters_as_they_are_lowered_are_right_in_every_order(
    pattern: Callable[..., hi.Fusion], ranks: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [p for _, p in symbolic.lowered(pattern, ranks) if not needs_nccl(p)]
    assert programs or pattern is patterns.row_parallel_bias
    for seed, program in enumerate(programs):
        check_calls(program, gpus, seed, monkeypatch, sizes={"M": 0})
        for n, layout in enumerate((torch.clone, *LAYOUTS[ranks])):
            check_calls(program, gpus, seed + n, monkeypatch, sizes={"M": 12 * ranks}, layout=layout)


PUSHED = (patterns.row_parallel, patterns.mlp_replicated, patterns.mlp)
WAITING = (1, 3, 4, 7)  # seeds with which kernels wait by themselves, and store to peers


@pytest.mark.parametrize("pattern", PUSHED, ids=lambda p: p.__name__)
def test_products_that_store_to_peers_themselves_are_right_in_every_order(
    pattern: Callable[..., hi.Fusion], gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.lower(pattern(3, 1, 12, 4 * 3, 6), "push")
    for seed in WAITING:
        check_calls(program, gpus, seed, monkeypatch)
        assert gpus.pushes == 3 * 3, "each rank in each call"


def test_flags_that_a_kernel_raises_while_it_runs_are_no_order_of_a_stream(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a call does not wait for these flags: a kernel that gives up leaves some of them unraised."""
    body = """%part: f32[8, 3] = allocate
  matmul %x, %w -> %part done %f = 1
  wait_signal %f[0] >= 1
  copy %part -> %y"""
    program = hi.parse(f"""hostir 1
mesh @mesh [didx] = 0
program @alone(%x: f32[8, 4], %w: f32[4, 3]) -> (%y) {{
  %f: flag[4] = allocate_symmetric
  %y: f32[8, 3] = allocate
  {body}
}}
""")
    (plan,) = plans(gpus, program, [[torch.randn(8, 4), torch.randn(4, 3)]], monkeypatch)
    assert plan.one_sided is not None
    control = plan.one_sided.flags.flow_control
    assert not control.stream_ordered
    assert not control.unawaited
    assert [slot for _, slot in control.raised] == [0, 1, 2, 3]
    for seed in range(4):
        check_calls(program, gpus, seed, monkeypatch)


def test_a_source_that_a_sum_gave_up_on_is_named(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    program = hi.parse(reduce_scatter(IN_PIECES, 3))
    inputs = [
        [shard(x, v.tensor, rank, {}) for x, v in zip(random_inputs(program, {}, seed=0), program.inputs, strict=True)]
        for rank in range(program.ranks)
    ]
    plan = plans(gpus, program, inputs, monkeypatch)[0]
    op = next(op for op in plan.unrolled.ops if isinstance(op, ComputeOp) and op.ready is not None)
    plan.machine.timeouts.of(plan.unrolled, op, op.ready.blocks)[5] = torch.tensor([1, 0])
    said = "rank 0: flag %sent_there[5], for block 1 of source 2, did not reach epoch 1 (stands at 0)"
    message = str(plan.problem())
    assert said in message
    assert "sum %sent axis 0" in message


UNSEEN = """hostir 1
mesh @mesh [didx] = 0 1
program @unseen(%x: f32[2@didx, 4]) -> (%y) {
  %r = rank of %x over didx
  %box: f32[2@didx, 4] = allocate_symmetric
  %f: flag[2] = allocate_symmetric
  %y: f32[2@didx, 4] = allocate
  barrier of %x over didx
  put %x -> %box at (%r + 1) % 2 over didx
  signal %f[0] = 1 at (%r + 1) % 2 over didx
  signal %f[0] = 2 at (%r + 1) % 2 over didx
  signal %f[1] = 7 at (%r + 1) % 2 over didx
  wait_signal %f[0] >= 1
  copy %box -> %y
}
"""


@pytest.mark.parametrize("seed", range(12))
def test_a_signal_that_nobody_waits_for_does_not_reach_the_next_call(
    seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(hi.parse(UNSEEN), gpus, seed, monkeypatch, calls=5)


ONE_WAY = """if %r == 0 { put %x -> %box at 1 over didx   signal %f[0] = 1 at 1 over didx }
  if %r == 1 { wait_signal %f[0] >= 1   copy %box -> %y }
  if %r == 0 { copy %x -> %y }
  barrier of %x over didx"""
NOBODY_READS = """put %x -> %box at (%r + 1) % 2 over didx
  copy %x -> %y"""
BARRIERS_ALONE = """barrier of %x over didx
  copy %x -> %y"""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("body", [ONE_WAY, NOBODY_READS, BARRIERS_ALONE])
def test_a_rank_may_be_several_calls_ahead_of_a_rank_that_it_does_not_wait_for(
    body: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, tail = UNSEEN.split("  barrier of %x over didx\n")[0], "\n}\n"
    program = hi.parse(f"{head}  {body}{tail}")
    check_calls(program, gpus, seed, monkeypatch, calls=7)


def test_an_input_written_in_place_is_not_copied(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = hi.parse("""hostir 1
mesh @mesh [didx] = 0 1
fusion @two(%a: f32[8@didx, 8], %b: f32[8, 5]) -> (%c, %d) {
  %full: f32[8, 8] = allgather %a over didx
  %c: f32[8, 5] auto = matmul %full, %b
  %d: f32[8, 5] auto = matmul %full, %b
}
""")
    program = hi.lower(fusion, "fused")
    inputs = [[torch.randn(4, 8), torch.randn(8, 5)] for _ in range(2)]
    kernels = {**gpus.kernels(), "copy": lambda *_: pytest.fail("copied")}
    monkeypatch.setattr(Gpus, "kernels", lambda _: kernels)
    ready = plans(gpus, program, inputs, monkeypatch)
    targets = [places(plan.unrolled, plan.memory, plan.registers) for plan in ready]
    assert [x[1] for x in targets] == [None, None], "b is not copied anywhere"
    outputs = []
    for (a, b), (home, _), plan in zip(inputs, targets, ready, strict=True):
        home.copy_(a)
        gpus.current = Stream()
        outputs.append(plan.run([home, b])[0])
    gpus.run(Random(0))
    whole = torch.cat([a for a, _ in inputs])
    for out, (_, b) in zip(outputs, inputs, strict=True):
        torch.testing.assert_close(out, whole @ b)


def test_memory_that_peers_read_is_no_place_for_an_input(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [[torch.randn(1, 1, 4, 8), torch.randn(8, 5)] for _ in range(2)]
    for plan in plans(gpus, lowered("ring", 2), inputs, monkeypatch):
        assert places(plan.unrolled, plan.memory, plan.registers) == (None, None)


NEVER = """hostir 1
mesh @mesh [didx] = 0
program @never(%a: f32[2, 4, 8], %b: f32[8, 5]) -> (%c) {
  %full: f32[2, 4, 8] = allocate_symmetric
  %there: flag[2] = allocate_symmetric
  copy %a -> %full
  %c: f32[2, 4, 5] = allocate
  matmul %full, %b -> %c ready %there >= 1 from 0
}
"""


@pytest.mark.parametrize(("program", "alone"), [(lowered("fused", 2), False), (hi.parse(NEVER), True)])
def test_a_timeout_is_reported_by_the_next_call_of_any_executor_that_shares_the_memory(
    program: Program, alone: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With peers, the call is abandoned: a late signal of a peer would count for the next call."""
    inputs = [
        [shard(x, v.tensor, rank, {}) for x, v in zip(random_inputs(program, {}, seed=0), program.inputs, strict=True)]
        for rank in range(program.ranks)
    ]
    for one, other in layers(gpus, program, inputs, monkeypatch, None, 2):
        op = next(op for op in one.unrolled.ops if isinstance(op, ComputeOp) and op.ready is not None)
        one.machine.timeouts.of(one.unrolled, op, op.ready.blocks)[1] = torch.tensor([1, 0])
        assert "[1] did not reach epoch 1 (stands at 0)" in str(other.problem())
        assert one.problem() is other.problem() is None
        assert ("[1] did not reach epoch 1" in one.machine.groups.abandoned) is not alone


@pytest.mark.parametrize(("strategy", "most"), [("ring", 48), ("push", 57)])
def test_a_plan_for_new_sizes_takes_few_calls_of_functions(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, strategy: str, most: int
) -> None:
    """`most` is the maximum number of function calls for each operation.

    There would be 10 more calls if the plan asked several times whether an operation accesses a peer.
    """
    program = hi.lower(patterns.allgather_matmul(8, S=1, M="M", K=8, N=8), strategy)
    sizes = {"M": 64}
    inputs = random_inputs(program, sizes)
    parts = [[shard(x, v.tensor, r, sizes) for x, v in zip(inputs, program.inputs, strict=True)] for r in range(8)]
    plan = plans(gpus, program, parts, monkeypatch, sizes)[0]
    unrolled = unroll(program, 0, sizes, parts[0])
    taken = calls_of(lambda: plan.machine.plan(unrolled))
    assert taken <= most * len(unrolled.ops), taken / len(unrolled.ops)


@pytest.mark.parametrize(
    ("strategy", "positions"), [("fused", [0]), ("ring", []), ("push", []), ("sequential by low_latency", [])]
)
def test_a_plan_knows_which_tensors_of_a_call_copy_engines_send_to_peers(
    strategy: str, positions: list[int], gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.lower(patterns.allgather_matmul_rows(2, 2, 16, 8, 8), strategy)
    parts = [
        [shard(x, v.tensor, r, {}) for v, x in zip(program.inputs, random_inputs(program, {}), strict=True)]
        for r in range(2)
    ]
    all_plans = plans(gpus, program, parts, monkeypatch)
    assert [plan.copied_with_peers for plan in all_plans] == [positions, positions]
