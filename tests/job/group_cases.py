"""What the ranks of tests/job/test_groups.py run: `group_cases.py NAME ...`, on 4 processes.

The program has its own process groups, as those who train have; hostir gets one with each executor. A case that ends
well prints `PASS name rank`. Inputs are random and fresh for every call, memory that is allocated holds NaN until it is
written, and results are compared with the same computation on whole tensors in float64.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hostir as hi
import hostir.torch
from examples import patterns
from hostir.call.executor import Executor, run
from hostir.call.parts import shard

RANK = int(os.environ["RANK"])
SEED = 1000 * int(os.environ.get("MASTER_PORT", "1"))  # another one in every job
CASES: dict[str, Callable[[], None]] = {}
K, N = 16, 12


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Layer:
    """A fusion of so many ranks, as an executor of a group."""

    def __init__(self, fusion: hi.Fusion, group: Any, strategy: str, ranks: int = 2) -> None:
        self.group, self.ranks = group, ranks
        self.program = hi.lower(fusion, strategy)
        self.executor = Executor(self.program, group=group)

    def check(self, M: int, seed: int) -> None:
        """One call on fresh inputs, all ranks of the group with the same seed."""
        fresh = torch.Generator().manual_seed(SEED + seed)
        a, b = torch.randn(M, K, generator=fresh), torch.randn(K, N, generator=fresh)
        sizes = dict.fromkeys(self.program.size_names, M)
        rank = dist.get_rank(self.group)
        va, vb = self.program.inputs
        (c,) = self.executor(shard(a, va.tensor, rank, sizes), shard(b, vb.tensor, rank, sizes))
        exact = shard(a.double() @ b.double(), self.program.outputs[0].tensor, rank, sizes)
        torch.testing.assert_close(c.double(), exact, rtol=1e-4, atol=1e-4)


def gathered(group: Any, strategy: str = "ring", ranks: int = 2) -> Layer:
    return Layer(patterns.allgather_matmul_rows(ranks, 1, "M", K, N), group, strategy, ranks)  # type: ignore[arg-type]


def summed(group: Any, strategy: str = "pipeline", ranks: int = 2) -> Layer:
    return Layer(patterns.row_parallel(ranks, 1, "M", K, N), group, strategy, ranks)  # type: ignore[arg-type]


def grid(**options: Any) -> tuple[Any, Any]:
    """The groups of this rank, of two ranks each: neighbours, and those at the same place of the pairs."""
    tp = [dist.new_group(pair, **options) for pair in ([0, 1], [2, 3])][RANK // 2]
    dp = [dist.new_group(pair, **options) for pair in ([0, 2], [1, 3])][RANK % 2]
    return tp, dp


def refused(function: Callable[[], object]) -> str:
    try:
        function()
    except hi.HostIRError as problem:
        return str(problem)
    raise AssertionError("nothing was refused")


def contains(text: str, *pieces: str) -> None:
    assert not [piece for piece in pieces if piece not in text], text


# Ranks that do different things -----------------------------------------------------------------------------------
@case
def replicas_have_other_token_counts() -> None:
    tp, dp = grid()
    replica = RANK // 2
    up, down, gradients = gathered(tp, "fused"), summed(tp), summed(dp)
    for step in range(3):
        for call in range(1 + replica):  # and make other numbers of calls
            M = 4 * (1 + replica) * (1 + step)
            up.check(M, 100 * replica + 10 * step + call)
            down.check(M, step)
        gradients.check(8, step)
        whole = torch.ones(1)
        dist.all_reduce(whole, group=dp)  # the program's own collectives beside ours
        assert whole == 2


@case
def stages_have_other_programs() -> None:
    tp, pp = grid()
    layers = [gathered(tp, name) for name in ("ring", "push")] if RANK < 2 else [summed(tp), gathered(tp, "pipeline")]
    for step in range(6):
        tokens = torch.zeros(3)
        if RANK >= 2:
            dist.recv(tokens, group=pp, group_src=0)
            assert tokens[0] == step
        for number, layer in enumerate(layers if step % 2 or RANK < 2 else layers[::-1]):
            layer.check(2 * (1 + RANK // 2), 10 * step + number)
        if RANK < 2:
            dist.send(torch.full((3,), float(step)), group=pp, group_dst=1)


@case
def a_rank_never_calls() -> None:
    group = dist.new_group([0, 1, 3])
    if RANK == 2:
        contains(refused(lambda: gathered(group)), "a group that this process is not in", "on its members only")
        return
    layer = gathered(group, "ring", 3)
    for call in range(4):
        layer.check(6 * (1 + call % 2), call)
    gathered(group, "pipeline", 3).check(6, 9)


@case
def groups_interleave_in_other_orders() -> None:
    tp, dp = grid()
    layers = [gathered(tp), summed(dp)]
    for step in range(4):
        for number in (0, 1) if RANK == 0 else (1, 0):  # no cycle: rank 0 waits for nobody who waits for it
            layers[number].check(4, step)


@case
def threads_own_groups_of_the_same_ranks() -> None:
    groups = [dist.new_group(range(4)) for _ in range(3)]
    problems: list[BaseException] = []

    def calls(number: int) -> None:
        try:
            layer = gathered(groups[number], ("ring", "fused", "pipeline")[number], 4)
            for step in range(6):
                time.sleep(0.01 * ((RANK + number) % 4))
                layer.check(4 * (1 + number), 10 * number + step)
        except BaseException as problem:
            problems.append(problem)

    order = [(number + RANK) % 3 for number in range(3)]  # each rank begins with another
    threads = [threading.Thread(target=calls, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


@case
def groups_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    lines = ((0, 1), (2, 3), (0, 2), (1, 3))  # of a grid: two groups have one rank in common, or none
    groups = {line: dist.new_group(line, timeout=timedelta(seconds=5)) for line in lines}
    layers = [summed(group) for line, group in groups.items() if RANK in line]
    if RANK in (1, 2):
        layers.reverse()
    began = time.monotonic()
    said = refused(lambda: layers[0].check(4, 1))
    contains(said, " waited 5 s for rank ", "at the call of @row_parallel", "the group's timeout")
    mine = layers[0].executor.session
    contains(said, f"this rank, of group '{mine.group.group_name}', has made")  # type: ignore[union-attr]
    other = layers[1].executor.session
    contains(said, f"'{other.group.group_name}', too", "if ranks call the groups in different orders")  # type: ignore[union-attr]
    assert time.monotonic() - began < 30


@case
def calls_of_ready_groups_in_a_circle_end_with_an_error() -> None:
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=10)) for _ in range(2)]
    if RANK > 1:
        return
    for make in (gathered, summed):
        layers = [make(group) for group in groups]
        if make is gathered:
            for layer in layers:
                layer.check(4, 1)
            continue
        for layer in layers:
            layer.check(4, 1)
        contains(refused(lambda: layers[RANK].check(4, 2)), f"rank {RANK}, '")  # noqa: B023
        contains(refused(lambda: layers[RANK].check(4, 2)), f"rank {RANK} waited 10 s for rank")  # noqa: B023
        contains(refused(lambda: layers[RANK].check(4, 2)), f"rank {RANK} makes no more calls")  # noqa: B023


# What a group is --------------------------------------------------------------------------------------------------
@case
def a_group_is_given_as_torch_knows_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"].get_group()
    for group in (tp, tp.group_name, mesh["tp"]):
        layer = gathered(tp)
        layer.executor = Executor(layer.program, group=group)
        layer.check(4, 1)
        assert layer.executor.session is gathered(tp).executor.session
    compiled = gathered(tp)
    fusion = patterns.allgather_matmul_rows(2, 1, "M", K, N)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hi.FallbackWarning)
        compiled.executor = hi.compile(fusion, sizes={"M": 4}, group=tp)
    compiled.program = compiled.executor.program
    compiled.check(4, 2)
    (whole,) = run(compiled.program, torch.ones(4, K), torch.ones(K, N), group=tp)
    assert torch.equal(whole, torch.full((4, N), float(K)))
    contains(refused(lambda: gathered(mesh)), "a DeviceMesh of 2 dimensions", "mesh['tp']")
    contains(refused(lambda: gathered("nobody's")), "torch knows no group 'nobody's'")
    contains(refused(lambda: gathered(7)), "group=7", "a process group of torch's, its name")
    contains(refused(lambda: gathered(tp, ranks=3)), "runs on 3 ranks, and there are 2")
    contains(refused(lambda: Executor(compiled.program, machine="local", group=tp)), "machine='local'")
    alone = dist.new_group([RANK], use_local_synchronization=True)
    name = alone.group_name
    gathered(alone, "ring", 1).check(4, 1)
    dist.destroy_process_group(alone)
    contains(refused(lambda: gathered(name, "ring", 1)), f"torch knows no group '{name}'")


@case
def a_guest_leaves_the_process_as_it_was() -> None:
    tp, _ = grid()
    torchs = dist.distributed_c10d._world.pg_map
    before = signal.getsignal(signal.SIGTERM), len(torchs), dist.init_process_group, os.environ.copy()
    wakeup = signal.set_wakeup_fd(-1)
    for strategy in ("ring", "pipeline"):
        gathered(tp, strategy).check(4, 1)
    assert wakeup == -1 == signal.set_wakeup_fd(-1)
    assert before == (signal.getsignal(signal.SIGTERM), len(torchs), dist.init_process_group, os.environ.copy())


@case
def layers_share_workspaces() -> None:
    tp, _ = grid()
    layers = [gathered(tp, "fused") for _ in range(8)]
    session = layers[0].executor.session
    assert session is not None
    held = []
    for layer in layers:
        layer.check(8, 3)
        held.append(session.symmetric_bytes)
    assert 0 < held[0] == held[-1], held


@case
def workspaces_are_bounded() -> None:
    """Layers of other programs and sizes take turns within what one of them needs; more is refused on all ranks."""
    tp, _ = grid()
    layers = [gathered(tp, "fused"), gathered(tp, "ring")]
    layers[0].check(16, 1)
    session = layers[0].executor.session
    assert session is not None
    most = session.symmetric_bytes
    os.environ["HOSTIR_SYMMETRIC_LIMIT"] = str(most)
    for step in range(6):
        layers[step % 2].check(2 + 2 * step, step)
        assert 0 < session.symmetric_bytes <= most
    contains(refused(lambda: layers[0].check(400, 9)), "HOSTIR_SYMMETRIC_LIMIT")
    layers[1].check(8, 1)
    del os.environ["HOSTIR_SYMMETRIC_LIMIT"]


@case
def a_forked_child_is_no_rank() -> None:
    tp, _ = grid()
    layer = gathered(tp)
    layer.check(4, 1)
    out, into = os.pipe()
    if not os.fork():
        signal.alarm(10)
        said = refused(lambda: layer.check(4, 2)), refused(lambda: gathered(tp))
        os.write(into, "\n".join(said).encode())
        os._exit(0)
    os.close(into)
    with open(out) as found:
        assert found.read().count("this process was forked from rank") == 2
    os.wait()
    layer.check(4, 3)


@case
def destroyed_groups_leave_no_files_or_threads() -> None:
    """The executors outlive their groups. What hostir holds for the last group goes when the next one is joined."""
    layers: list[Layer] = []

    def after_groups(count: int) -> tuple[int, int]:
        for call in range(count):
            for strategy in ("sequential", "fused"):
                group = dist.new_group(range(4))
                layers.append(gathered(group, strategy, 4))
                layers[-1].check(8, call)
                layers[-1].group = None
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", hi.FallbackWarning)
                    hi.torch.column_parallel_linear(torch.randn(2, K), torch.randn(N, K), group)
                dist.destroy_process_group(group)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    files, threads = after_groups(2)
    more_files, more_threads = after_groups(8)
    assert more_files < files + 8, (files, more_files)  # less than one for each group
    assert more_threads < threads + 8, (threads, more_threads)
    contains(refused(lambda: layers[0].check(8, 1)), "after the end of its session")


@case
def the_first_rank_of_each_group_warns() -> None:
    tp, _ = grid()
    fusion = patterns.allgather_matmul_rows(2, 1, "M", K, N + 4)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hi.compile(fusion, sizes={"M": 4}, group=tp)
    said = [str(each.message) for each in seen if issubclass(each.category, hi.FallbackWarning)]
    assert len(said) == (RANK % 2 == 0), said


# Ranks that are lost ----------------------------------------------------------------------------------------------
def lost(strategy: str) -> None:
    """Rank 3 dies before its third call: the others get an error, live on, and call on in a group without it."""
    everyone, three = dist.new_group(range(4)), dist.new_group([0, 1, 2])
    layer = gathered(everyone, strategy, 4)
    for call in range(2):
        layer.check(8, call)
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    said = refused(lambda: layer.check(8, 2))
    refused(lambda: layer.check(8, 3))
    time.sleep(2)
    again = refused(lambda: layer.check(8, 3))
    new = refused(lambda: gathered(everyone, "sequential", 4).check(8, 4))
    assert time.monotonic() - began < 20, said
    contains(said, f"rank {RANK}")
    contains(again, "rank 3 died")
    contains(new, "rank 3 died")
    gathered(three, strategy, 3).check(6, 5)


@case
def a_peer_dies_in_a_collective() -> None:
    lost("sequential")


@case
def a_peer_dies_while_others_wait_for_flags() -> None:
    lost("ring")


@case
def a_peer_dies_before_the_first_call() -> None:
    group = dist.new_group(range(4))
    layer = gathered(group, "ring", 4)
    if RANK == 3:
        time.sleep(1)
        os._exit(0)
    contains(refused(lambda: layer.check(8, 2)), "rank 3 died")


@case
def a_call_that_fails_on_one_rank_ends_nothing() -> None:
    (tp, _), (_, dp) = grid(timeout=timedelta(seconds=5)), grid()
    layer, other = gathered(tp, "pipeline"), summed(dp)
    layer.check(4, 1)
    if RANK % 2:
        refused(lambda: layer.executor(torch.ones(3)))
    else:
        refused(lambda: layer.check(4, 2))  # its peer does not come
    time.sleep(6)  # longer than the timeout
    other.check(4, 3)


@case
def calls_of_a_group_go_on_after_one_that_ended_midway() -> None:
    (tp, _), (_, dp) = grid(timeout=timedelta(seconds=20)), grid()
    layers, other = [gathered(tp, "ring"), gathered(tp, "pipeline")], summed(dp)

    def strike() -> None:
        raise RuntimeError("on strike")

    for turn, layer in enumerate((*layers, *layers)):
        layer.check(4, turn)
        other.check(4, turn)
        said = ""
        dist.barrier()  # none is in a call
        if turn % 2 == RANK % 2:
            assert layer.executor.latest is not None
            layer.executor.latest.plan.lanes[-1].steps[0] = strike  # type: ignore[union-attr]
        else:
            with contextlib.suppress(AssertionError):  # it may end before this rank hears of the failure
                said = refused(lambda: layer.check(4, turn))  # noqa: B023
        said = said or refused(lambda: layer.check(4, turn))  # noqa: B023
        contains(said, "RuntimeError: on strike")
        for each in (*layers, other):
            each.check(8, turn)


def main() -> None:
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        CASES[name]()
        print(f"PASS {name} {RANK}", flush=True)


if __name__ == "__main__":
    main()
