"""Binding a plan compiles and loads its kernels: tiles that are too large are replaced or reported before a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import hostir as hi
from examples import patterns
from hostir.ir.source import HostIRError
from hostir.kernels.devices import StandIn, loading
from hostir.kernels.matmul.matmul import matmul
from hostir.kernels.matmul.tiles import candidates
from hostir.lower import STRATEGIES
from tests.kernels.hopper import GPU, Hopper, Kernel, hopper, inputs_of


@pytest.fixture
def gpu() -> Iterator[Hopper]:
    with hopper() as fake:
        yield fake


def tiles(kernels: Any) -> list[tuple[int, int]]:
    return [(kernel.settings.BM, kernel.settings.BN) for kernel in kernels if kernel.name == "matmul_kernel"]


def large(*shape: int, at: int = 0) -> StandIn:
    strides = torch.empty(shape, device="meta").stride()
    return StandIn.of(shape, strides, torch.bfloat16, GPU, at)


FUSIONS = {
    "gathered": lambda: patterns.allgather_matmul(2, S=2, M=4096, K=8192, N=3584, dtype="bf16"),
    "gathered few": lambda: patterns.allgather_matmul(8, S=1, M=64, K=256, N=512, dtype="bf16"),
    "scattered": lambda: patterns.row_parallel_scattered(2, S=2, M=4096, K=7168, N=8192, dtype="bf16"),
    "summed few": lambda: patterns.row_parallel(2, S=1, M=64, K=512, N=1024, dtype="bf16"),
    "normed": lambda: patterns.attention_output(2, S=1, M=512, K=512, N=1024, dtype="bf16"),
    "quantized": lambda: patterns.quantized_rows(2, M=512, K=256, N=512),
    "scaled by blocks": lambda: patterns.scaled_allgather_matmul(2, M=512, K=256, N=512, scales="blocks"),
    "experts": lambda: patterns.moe_layer(2, S=1, M=256, K=256, H=512, dtype="bf16"),
    "odd rows": lambda: patterns.column_parallel(2, S=1, M=62, K=33, N=70),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("fusion", "kernels"),
    [(f, k) for f in FUSIONS for k in ("triton", "auto", "aten") if (f, k) != ("experts", "aten")],  # it reads offsets
)
def test_binding_a_plan_loads_all_kernels_that_its_calls_launch(
    fusion: str, strategy: str, kernels: str, gpu: Hopper
) -> None:
    program = hi.lower(FUSIONS[fusion](), strategy)
    inputs = inputs_of(program, 0)
    plan = gpu.plan(program, 0, kernels, inputs)
    loaded = dict(gpu.kernels)
    assert gpu.launches == 0, "nothing has been issued"
    plan.run(inputs)
    assert gpu.kernels == loaded
    assert gpu.launches > 0 or not loaded
    assert loaded or kernels != "triton"


def test_kernels_are_loaded_for_the_addresses_of_the_first_call(gpu: Hopper) -> None:
    program = hi.lower(patterns.row_parallel(2, S=1, M=4096, K=1024, N=1024, dtype="bf16"), "sequential")
    a, b = inputs_of(program, 0)
    gpu.plan(program, 0, "triton", [a, b])
    gpu.plan(program, 0, "triton", [large(*a.shape, at=2), b])
    assert [kernel.settings.DESCRIPTORS for kernel in gpu.kernels.values()] == [True, False]


def too_large(*named: tuple[int, int]) -> Any:
    """Return a function for `Hopper.lacks`: kernels with these tiles need too much shared memory."""

    def lacks(kernel: Kernel) -> OutOfResources | None:
        fits = not set(tiles([kernel])) & set(named)
        return None if fits else OutOfResources(240000, 232448, "shared memory")

    return lacks


def test_a_tile_that_is_too_large_is_replaced_by_the_same_tile_on_all_ranks() -> None:
    program = hi.lower(patterns.allgather_matmul(2, S=1, M=4096, K=8192, N=3584, dtype="bf16"), "fused")
    gone: list[tuple[int, int]] = []
    shapes = {(tile.m, tile.n) for tile in candidates("bf16")}
    for _ in shapes:
        chosen = []
        for rank in (0, 1):
            with hopper() as gpu:
                gpu.lacks = too_large(*gone)
                gpu.plan(program, rank, "triton", inputs_of(program, rank))
                chosen += tiles(gpu.kernels.values())
        assert len(set(chosen)) == 1
        assert chosen[0] not in gone
        gone += chosen[:1]
    assert {*gone} == shapes


def test_a_product_that_fits_with_no_tile_is_reported_at_its_statement_before_any_launch(gpu: Hopper) -> None:
    program = hi.lower(patterns.allgather_matmul(2, S=1, M=4096, K=8192, N=3584, dtype="bf16"), "fused")
    gpu.lacks = too_large(*((tile.m, tile.n) for tile in candidates("bf16")))
    with pytest.raises(HostIRError) as raised:
        gpu.plan(program, 0, "triton", inputs_of(program, 0))
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.message.startswith("rank 0, 'matmul %")
    assert "ready %" in diagnostic.message
    assert "the kernel needs 240000 bytes of shared memory, and the GPU has 232448" in diagnostic.message
    assert "kernels='aten'" in diagnostic.message
    assert gpu.launches == 0


def test_a_requested_tile_that_is_too_large_is_reported(gpu: Hopper) -> None:
    gpu.lacks = too_large((64, 64))
    tile = next(tile for tile in candidates("bf16") if (tile.m, tile.n) == (64, 64))
    with loading(), pytest.raises(HostIRError, match="needs 240000 bytes of shared memory"):
        matmul(large(64, 64), large(64, 64), large(64, 64), tile=tile)


def test_a_lack_of_registers_is_reported(gpu: Hopper) -> None:
    program = hi.lower(patterns.quantized_rows(2, M=512, K=256, N=512), "sequential")
    gpu.lacks = lambda kernel: OutOfResources(512, 448, "threads") if kernel.name == "_quantize_kernel" else None
    with pytest.raises(HostIRError, match=r"'quantize [^']*': the kernel needs 512 threads, and the GPU has 448"):
        gpu.plan(program, 0, "auto", inputs_of(program, 0))


# Stand-ins --------------------------------------------------------------------------------------------------------
def test_views_of_a_tensor_without_memory_have_addresses_within_it() -> None:
    x = StandIn.of((2, 8, 16), (128, 16, 1), torch.bfloat16, GPU, 256)
    assert (x.device, x.is_cuda, x.data_ptr(), x[1].data_ptr()) == (GPU, True, 256, 512)
    assert [part.data_ptr() for part in x.unbind(0)] == [256, 512]
    assert x[1].as_strided((2, 3), (1, 2), 5).data_ptr() == 256 + 5 * 2
    assert x[:, 1].expand(3, 2, 16).data_ptr() == 256 + 16 * 2
    assert x.view(torch.uint8)[..., 4:].data_ptr() == 256 + 4
    assert x.reshape(16, 16).t().stride() == (1, 16)
    assert x.transpose(0, 1).reshape(16, 16).data_ptr() == 0, "a copy is memory of its own"


def test_writes_to_a_tensor_without_memory_do_nothing() -> None:
    x, real = StandIn.of((4, 4), (4, 1), torch.float32, GPU), torch.ones(4, 4)
    x.zero_()
    x.copy_(real)
    x += real
    assert torch.add(x, real, out=x) is x
    assert torch.relu_(input=x) is x
    assert torch.add(x, real, out=None).shape == x.shape
    assert torch.equal(real, torch.ones(4, 4))
    assert (x.float() + real).device == torch.empty_like(x).device == GPU


@pytest.mark.parametrize(
    "change", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.as_strided_((2,), (1,), 3)]
)
def test_the_layout_of_a_tensor_without_memory_is_not_changed_in_place(change: Any) -> None:
    x = StandIn.of((4, 6), (6, 1), torch.float32, GPU)
    with pytest.raises(NotImplementedError, match="_ changes the layout of a tensor without memory"):
        change(x)
    assert (x.shape, x.stride()) == ((4, 6), (6, 1))
