"""Cases that every rank of tests/job/test_groups.py runs: `group_cases.py NAME ...`, on 4 processes.

As in a training script, the program creates the process groups, and passes one to each executor. A case that succeeds
prints `PASS name rank`. Every call gets new random inputs. Allocated memory holds NaN until it is written. Results are
compared with the same computation on unsharded tensors in float64.
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
SEED = 1000 * int(os.environ.get("MASTER_PORT", "1"))  # different in every job
CASES: dict[str, Callable[[], None]] = {}
K, N = 16, 12


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Layer:
    """An executor of a fusion on a process group of `ranks` ranks."""

    def __init__(self, fusion: hi.Fusion, group: Any, strategy: str, ranks: int = 2) -> None:
        self.group, self.ranks = group, ranks
        self.program = hi.lower(fusion, strategy)
        self.executor = Executor(self.program, group=group)

    def check(self, M: int, seed: int) -> None:
        """Make one call on random inputs, and check its result. All ranks of the group pass the same seed."""
        generator = torch.Generator().manual_seed(SEED + seed)
        a, b = torch.randn(M, K, generator=generator), torch.randn(K, N, generator=generator)
        sizes = dict.fromkeys(self.program.size_names, M)
        rank = dist.get_rank(self.group)
        va, vb = self.program.inputs
        (c,) = self.executor(shard(a, va.tensor, rank, sizes), shard(b, vb.tensor, rank, sizes))
        exact = shard(a.double() @ b.double(), self.program.outputs[0].tensor, rank, sizes)
        torch.testing.assert_close(c.double(), exact, rtol=1e-4, atol=1e-4)


def gather_layer(group: Any, strategy: str = "ring", ranks: int = 2) -> Layer:
    return Layer(patterns.allgather_matmul_rows(ranks, 1, "M", K, N), group, strategy, ranks)  # type: ignore[arg-type]


def sum_layer(group: Any, strategy: str = "pipeline", ranks: int = 2) -> Layer:
    return Layer(patterns.row_parallel(ranks, 1, "M", K, N), group, strategy, ranks)  # type: ignore[arg-type]


def grid(**options: Any) -> tuple[Any, Any]:
    """Return this rank's two groups in a 2 x 2 grid: its row (ranks 0 1 and 2 3) and its column (0 2 and 1 3)."""
    tp = [dist.new_group(pair, **options) for pair in ([0, 1], [2, 3])][RANK // 2]
    dp = [dist.new_group(pair, **options) for pair in ([0, 2], [1, 3])][RANK % 2]
    return tp, dp


def refusal(function: Callable[[], object]) -> str:
    """Return the message of the HostIRError that a function must raise."""
    try:
        function()
    except hi.HostIRError as problem:
        return str(problem)
    raise AssertionError("no HostIRError was raised")


def contains(text: str, *pieces: str) -> None:
    assert not [piece for piece in pieces if piece not in text], text


@case
def replicas_have_different_token_counts() -> None:
    tp, dp = grid()
    replica = RANK // 2
    up, down, gradients = gather_layer(tp, "fused"), sum_layer(tp), sum_layer(dp)
    for step in range(3):
        for call in range(1 + replica):  # replicas also make different numbers of calls
            M = 4 * (1 + replica) * (1 + step)
            up.check(M, 100 * replica + 10 * step + call)
            down.check(M, step)
        gradients.check(8, step)
        total = torch.ones(1)
        dist.all_reduce(total, group=dp)  # a collective of the program, beside hostir's
        assert total == 2


@case
def stages_run_different_programs() -> None:
    tp, pp = grid()
    layers = (
        [gather_layer(tp, name) for name in ("ring", "push")]
        if RANK < 2
        else [sum_layer(tp), gather_layer(tp, "pipeline")]
    )
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
def a_rank_outside_the_group_never_calls() -> None:
    group = dist.new_group([0, 1, 3])
    if RANK == 2:
        contains(refusal(lambda: gather_layer(group)), "a group that this process is not in", "on its members only")
        return
    layer = gather_layer(group, "ring", 3)
    for call in range(4):
        layer.check(6 * (1 + call % 2), call)
    gather_layer(group, "pipeline", 3).check(6, 9)


@case
def ranks_call_groups_in_different_orders() -> None:
    tp, dp = grid()
    layers = [gather_layer(tp), sum_layer(dp)]
    for step in range(4):
        for number in (0, 1) if RANK == 0 else (1, 0):  # no cycle: rank 0 never waits for a rank that waits for rank 0
            layers[number].check(4, step)


@case
def threads_own_groups_of_the_same_ranks() -> None:
    groups = [dist.new_group(range(4)) for _ in range(3)]
    problems: list[BaseException] = []

    def calls(number: int) -> None:
        try:
            layer = gather_layer(groups[number], ("ring", "fused", "pipeline")[number], 4)
            for step in range(6):
                time.sleep(0.01 * ((RANK + number) % 4))
                layer.check(4 * (1 + number), 10 * number + step)
        except BaseException as problem:
            problems.append(problem)

    order = [(number + RANK) % 3 for number in range(3)]  # each rank starts another thread first
    threads = [threading.Thread(target=calls, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


@case
def groups_that_wait_for_each_other_in_a_cycle_are_refused() -> None:
    lines = ((0, 1), (2, 3), (0, 2), (1, 3))  # rows and columns of a grid: two groups share one rank, or no rank
    groups = {line: dist.new_group(line, timeout=timedelta(seconds=5)) for line in lines}
    layers = [sum_layer(group) for line, group in groups.items() if RANK in line]
    if RANK in (1, 2):
        layers.reverse()
    began = time.monotonic()
    message = refusal(lambda: layers[0].check(4, 1))
    contains(message, " waited 5 s for rank ", "at the call of @row_parallel", "the group's timeout")
    mine = layers[0].executor.session
    contains(message, f"this rank, of group '{mine.group.group_name}', has made")  # type: ignore[union-attr]
    other = layers[1].executor.session
    contains(message, f"'{other.group.group_name}', too", "if ranks call the groups in different orders")  # type: ignore[union-attr]
    assert time.monotonic() - began < 30


@case
def calls_of_ready_groups_in_a_cycle_end_with_an_error() -> None:
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=6)) for _ in range(2)]
    if RANK > 1:
        return
    for make in (gather_layer, sum_layer):
        layers = [make(group) for group in groups]
        if make is gather_layer:
            for layer in layers:
                layer.check(4, 1)
            continue
        for layer in layers:
            layer.check(4, 1)
        contains(refusal(lambda: layers[RANK].check(4, 2)), f"rank {RANK}, '")  # noqa: B023
        contains(refusal(lambda: layers[RANK].check(4, 2)), f"rank {RANK} waited 6 s for rank")  # noqa: B023
        contains(refusal(lambda: layers[RANK].check(4, 2)), f"rank {RANK} makes no more calls")  # noqa: B023


@case
def a_group_may_be_a_process_group_its_name_or_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"].get_group()
    for group in (tp, tp.group_name, mesh["tp"]):
        layer = gather_layer(tp)
        layer.executor = Executor(layer.program, group=group)
        layer.check(4, 1)
        assert layer.executor.session is gather_layer(tp).executor.session
    compiled = gather_layer(tp)
    fusion = patterns.allgather_matmul_rows(2, 1, "M", K, N)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hi.FallbackWarning)
        compiled.executor = hi.compile(fusion, sizes={"M": 4}, group=tp)
    compiled.program = compiled.executor.program
    compiled.check(4, 2)
    (product,) = run(compiled.program, torch.ones(4, K), torch.ones(K, N), group=tp)
    assert torch.equal(product, torch.full((4, N), float(K)))
    contains(refusal(lambda: gather_layer(mesh)), "a DeviceMesh of 2 dimensions", "mesh['tp']")
    contains(refusal(lambda: gather_layer("nobody's")), "torch knows no group 'nobody's'")
    contains(refusal(lambda: gather_layer(7)), "group=7", "a process group of torch's, its name")
    contains(refusal(lambda: gather_layer(tp, ranks=3)), "runs on 3 ranks, and there are 2")
    contains(refusal(lambda: Executor(compiled.program, machine="local", group=tp)), "machine='local'")
    alone = dist.new_group([RANK], use_local_synchronization=True)
    name = alone.group_name
    gather_layer(alone, "ring", 1).check(4, 1)
    dist.destroy_process_group(alone)
    contains(refusal(lambda: gather_layer(name, "ring", 1)), f"torch knows no group '{name}'")


@case
def a_group_changes_nothing_else_in_the_process() -> None:
    tp, _ = grid()
    torch_groups = dist.distributed_c10d._world.pg_map
    before = signal.getsignal(signal.SIGTERM), len(torch_groups), dist.init_process_group, os.environ.copy()
    wakeup = signal.set_wakeup_fd(-1)
    for strategy in ("ring", "pipeline"):
        gather_layer(tp, strategy).check(4, 1)
    assert wakeup == -1 == signal.set_wakeup_fd(-1)
    assert before == (signal.getsignal(signal.SIGTERM), len(torch_groups), dist.init_process_group, os.environ.copy())


@case
def layers_share_symmetric_memory() -> None:
    tp, _ = grid()
    layers = [gather_layer(tp, "fused") for _ in range(8)]
    session = layers[0].executor.session
    assert session is not None
    held = []
    for layer in layers:
        layer.check(8, 3)
        held.append(session.symmetric_bytes)
    assert 0 < held[0] == held[-1], held


@case
def symmetric_memory_is_bounded() -> None:
    """With a limit of one layer's memory, layers use it in turn. A layer that needs more is refused on all ranks."""
    tp, _ = grid()
    layers = [gather_layer(tp, "fused"), gather_layer(tp, "ring")]
    layers[0].check(16, 1)
    session = layers[0].executor.session
    assert session is not None
    most = session.symmetric_bytes
    os.environ["HOSTIR_SYMMETRIC_LIMIT"] = str(most)
    for step in range(6):
        layers[step % 2].check(2 + 2 * step, step)
        assert 0 < session.symmetric_bytes <= most
    contains(refusal(lambda: layers[0].check(400, 9)), "HOSTIR_SYMMETRIC_LIMIT")
    layers[1].check(8, 1)
    del os.environ["HOSTIR_SYMMETRIC_LIMIT"]


@case
def a_forked_child_cannot_call() -> None:
    tp, _ = grid()
    layer = gather_layer(tp)
    layer.check(4, 1)
    out, into = os.pipe()
    if not os.fork():
        signal.alarm(10)
        messages = refusal(lambda: layer.check(4, 2)), refusal(lambda: gather_layer(tp))
        os.write(into, "\n".join(messages).encode())
        os._exit(0)
    os.close(into)
    with open(out) as pipe:
        assert pipe.read().count("this process was forked from rank") == 2
    os.wait()
    layer.check(4, 3)


@case
def destroyed_groups_leave_no_files_or_threads() -> None:
    """Executors outlive their groups. hostir frees the resources of a destroyed group when it joins the next one."""
    layers: list[Layer] = []

    def after_groups(count: int) -> tuple[int, int]:
        for call in range(count):
            for strategy in ("sequential", "fused"):
                group = dist.new_group(range(4))
                layers.append(gather_layer(group, strategy, 4))
                layers[-1].check(8, call)
                layers[-1].group = None
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", hi.FallbackWarning)
                    hi.torch.column_parallel_linear(torch.randn(2, K), torch.randn(N, K), group)
                dist.destroy_process_group(group)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    files, threads = after_groups(2)
    more_files, more_threads = after_groups(8)
    assert more_files < files + 8, (files, more_files)  # fewer than one file for each group
    assert more_threads < threads + 8, (threads, more_threads)
    contains(refusal(lambda: layers[0].check(8, 1)), "after the end of its session")


@case
def the_first_rank_of_each_group_warns() -> None:
    tp, _ = grid()
    fusion = patterns.allgather_matmul_rows(2, 1, "M", K, N + 4)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hi.compile(fusion, sizes={"M": 4}, group=tp)
    texts = [str(each.message) for each in seen if issubclass(each.category, hi.FallbackWarning)]
    assert len(texts) == (RANK % 2 == 0), texts


def lose_a_rank(strategy: str) -> None:
    """Rank 3 dies before its third call. The others get an error, stay alive, and make calls in a group without it."""
    everyone, three = dist.new_group(range(4)), dist.new_group([0, 1, 2])
    layer = gather_layer(everyone, strategy, 4)
    for call in range(2):
        layer.check(8, call)
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    message = refusal(lambda: layer.check(8, 2))
    refusal(lambda: layer.check(8, 3))
    time.sleep(2)
    again = refusal(lambda: layer.check(8, 3))
    new = refusal(lambda: gather_layer(everyone, "sequential", 4).check(8, 4))
    assert time.monotonic() - began < 20, message
    contains(message, f"rank {RANK}")
    contains(again, "rank 3 died")
    contains(new, "rank 3 died")
    gather_layer(three, strategy, 3).check(6, 5)


@case
def a_peer_dies_in_a_collective() -> None:
    lose_a_rank("sequential")


@case
def a_peer_dies_while_others_wait_for_flags() -> None:
    lose_a_rank("ring")


@case
def a_peer_dies_before_the_first_call() -> None:
    group = dist.new_group(range(4))
    layer = gather_layer(group, "ring", 4)
    if RANK == 3:
        time.sleep(1)
        os._exit(0)
    contains(refusal(lambda: layer.check(8, 2)), "rank 3 died")


@case
def a_call_that_fails_on_one_rank_ends_no_process() -> None:
    (tp, _), (_, dp) = grid(timeout=timedelta(seconds=5)), grid()
    layer, other = gather_layer(tp, "pipeline"), sum_layer(dp)
    layer.check(4, 1)
    if RANK % 2:
        refusal(lambda: layer.executor(torch.ones(3)))
    else:
        refusal(lambda: layer.check(4, 2))  # its peer makes no valid call
    time.sleep(6)  # longer than the timeout
    other.check(4, 3)


@case
def calls_of_a_group_work_after_a_call_that_failed_midway() -> None:
    (tp, _), (_, dp) = grid(timeout=timedelta(seconds=20)), grid()
    layers, other = [gather_layer(tp, "ring"), gather_layer(tp, "pipeline")], sum_layer(dp)

    def fail() -> None:
        raise RuntimeError("on strike")

    for turn, layer in enumerate((*layers, *layers)):
        layer.check(4, turn)
        other.check(4, turn)
        message = ""
        dist.barrier()  # no rank is in a call
        if turn % 2 == RANK % 2:
            assert layer.executor.latest is not None
            layer.executor.latest.plan.lanes[-1].steps[0] = fail  # type: ignore[union-attr]
        else:
            with contextlib.suppress(AssertionError):  # the call may end before this rank learns of the failure
                message = refusal(lambda: layer.check(4, turn))  # noqa: B023
        message = message or refusal(lambda: layer.check(4, turn))  # noqa: B023
        contains(message, "RuntimeError: on strike")
        for each in (*layers, other):
            each.check(8, turn)


def main() -> None:
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        CASES[name]()
        print(f"PASS {name} {RANK}", flush=True)


if __name__ == "__main__":
    main()
