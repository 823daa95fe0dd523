"""What calls keep on a GPU is outside the memory pools of the caller, as CUDA graph trees require in a warm-up run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import hostir as hi
from hostir.call.executor import Executor
from hostir.kernels.matmul import workspaces
from hostir.kernels.matmul.matmul import matmul
from tests.gpu.one_device import inputs_of, is_product, pipeline
from tests.kernels.checking import tiles_of

pytestmark = pytest.mark.usefixtures("on_gpu")


def keeps_only_results(work: Callable[[], Sequence[torch.Tensor]]) -> bool:
    """Return True if work in a pool of this thread leaves only its results there. CUDA graph trees check the same."""
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        results = work()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
    addresses = {x.untyped_storage().data_ptr() for x in results}
    alone: bool = torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses)
    torch._C._cuda_releasePool(device, pool)
    return alone


def test_the_check_notices_a_tensor_that_is_kept() -> None:
    kept = []
    assert keeps_only_results(lambda: [torch.ones(1)])
    assert not keeps_only_results(lambda: kept.append(torch.ones(1)) or [torch.ones(1)])  # type: ignore[func-returns-value]


@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_an_executor_keeps_nothing_in_the_pool(kernels: str) -> None:
    a, b = inputs_of()

    def calls() -> Sequence[torch.Tensor]:
        executor = kept.setdefault("executor", Executor(pipeline(), machine="cuda", kernels=kernels))
        results = [executor(a, b)[0] for _ in range(5)]  # planned, recorded on a tape, issued from the tape
        assert all(is_product(c, a, b) for c in results)
        return results

    kept: dict[str, Executor] = {}
    assert keeps_only_results(calls)


def test_split_tiles_keep_their_workspace_outside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_by_stream", {})
    monkeypatch.setattr(workspaces, "_for_graphs", {})
    a, b = torch.randn(64, 1 << 15).bfloat16(), torch.randn(1 << 15, 128).bfloat16()
    tile = replace(tiles_of(torch.bfloat16, descriptors=False)[0], split=1 << 20, parts=2)

    def product() -> Sequence[torch.Tensor]:
        c = torch.empty(64, 128, dtype=torch.bfloat16)
        matmul(a, b, c, tile=tile)
        return [c]

    assert keeps_only_results(product)
    assert workspaces._by_stream
    assert workspaces._for_graphs


@pytest.mark.parametrize("calls", ["eager", "out"])
def test_a_trial_keeps_nothing_in_the_pool(
    calls: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTIR_CACHE", str(tmp_path_factory.mktemp("cache")))
    with hi.Fusion(f"alone_{calls}") as fusion:
        left, right = hi.tensor("a", ["M", 1024], "bf16"), hi.tensor("b", [1024, 512], "bf16")
        fusion.output(left @ right)
    for x in (left, right):
        x.set_device_mesh(hi.DeviceMesh([0]))
    executor = hi.compile(fusion, machine="cuda", calls=calls, tune=2)
    a, b, c = torch.randn(256, 1024).bfloat16(), torch.randn(1024, 512).bfloat16(), torch.empty(256, 512).bfloat16()

    def first_calls() -> Sequence[torch.Tensor]:
        if calls == "out":
            executor(a, b, out=c)
            return []
        return [executor(a, b)[0] for _ in range(3)]

    assert keeps_only_results(first_calls)
    assert executor.choice.choice({"M": 256}).source == "measured"
