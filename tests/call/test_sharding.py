"""Shards of tensors, their reassembly, and sizes that follow from the shapes of inputs."""

from __future__ import annotations

import random
import re
from math import prod

import pytest
import torch

from hostir.call.parts import assemble, check_shape, shard
from hostir.call.random import random_inputs
from hostir.call.sizes import bind_sizes
from hostir.ir import parse
from hostir.ir.source import HostIRError
from hostir.ir.types import DTYPES, Mesh, TensorType
from hostir.kernels.dtypes import torch_dtype


def tensor_type(text: str, mesh: str = "@mesh [didx] = 0 1 2 3") -> TensorType:
    """Parse a tensor type such as `f32[8@didx, 4]`."""
    return parse(f"hostir 1\nmesh {mesh}\nprogram @p(%x: {text}) -> (%x) {{\n}}\n").inputs[0].tensor


TYPES = [
    ("f32[8@didx, 3]", "@mesh [didx] = 0 1 2 3", {}),
    ("f32[3, 8@didx]", "@mesh [didx] = 0 1 2 3", {}),
    ("bf16[2, (3 8@didx 5), M]", "@mesh [didx] = 0 1 2 3", {"M": 2}),
    ("f32[(2@didx M/4), K]", "@mesh [didx] = 1 0", {"M": 8, "K": 3}),
    ("f16[4@dp, (3 4@tp)]", "@grid [dp, tp] = (0 1) (2 3)", {}),
    ("f32[(4@tp 4@dp), 3]", "@grid [dp, tp] = (0 1 2 3) (7 6 5 4)", {}),
    ("f32[4, 4@tp]", "@grid [dp, tp] = (0 1) (2 3)", {}),
    ("f32[4, 4@tp] partial(dp)", "@grid [dp, tp] = (0 1) (2 3)", {}),
    ("f32[5] partial(dp, tp)", "@grid [dp, tp] = (0 1) (2 3)", {}),
    ("f32[5]", "@mesh [didx] = 2 5", {}),
]


@pytest.mark.parametrize(("text", "mesh", "sizes"), TYPES)
def test_shards_assemble_to_the_original_tensor(text: str, mesh: str, sizes: dict[str, int]) -> None:
    type = tensor_type(text, mesh)
    unsharded = torch.randn([s.bind(sizes) for s in type.shape]).to(torch_dtype(type.dtype))
    parts = [shard(unsharded, type, rank, sizes) for rank in range(8)]
    assert type.mesh
    for rank, part in enumerate(parts):
        assert (part is None) == (rank not in type.mesh.devices)
        if part is not None:
            assert part.is_contiguous()
            assert part.shape == tuple(s.bind(sizes) for s in type.local_shape)
            assert part.untyped_storage().data_ptr() != unsharded.untyped_storage().data_ptr()
    assert torch.equal(assemble(parts, type, sizes), unsharded)


def test_blocks_follow_the_order_of_the_devices() -> None:
    unsharded = torch.arange(8.0)
    type = tensor_type("f32[8@didx]", "@mesh [didx] = 3 1")
    assert shard(unsharded, type, 3, {}).tolist() == [0, 1, 2, 3]
    assert shard(unsharded, type, 1, {}).tolist() == [4, 5, 6, 7]
    inner = tensor_type("f32[(2 4@didx)]", "@mesh [didx] = 3 1")
    assert shard(unsharded, inner, 3, {}).tolist() == [0, 1, 4, 5]
    grid = tensor_type("f32[(4@tp 2@dp)]", "@grid [dp, tp] = (0 1) (2 3)")  # dp splits each shard of tp
    assert [shard(unsharded, grid, r, {}).tolist() for r in range(4)] == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_random_shardings_round_trip() -> None:
    choice = random.Random(0)
    for _ in range(50):
        mesh = Mesh("g", ("y", "x"), (2, 2), tuple(choice.sample(range(6), 4)))
        marks: list[str | None] = ["x", "y"][: choice.randrange(3)]
        factors = [f"{2 * choice.randint(1, 3)}@{m}" for m in marks] + ["2", "3"]
        choice.shuffle(factors)
        cut = choice.randrange(1, len(factors))
        text = f"f32[({' '.join(factors[:cut])}), ({' '.join(factors[cut:])})]"
        type = tensor_type(text, str(mesh))
        unsharded = torch.randn([s.bind({}) for s in type.shape])
        parts = [shard(unsharded, type, rank, {}) for rank in range(6)]
        assert torch.equal(assemble(parts, type, {}), unsharded), text
        assert parts[mesh.devices[0]].numel() * prod(2 for _ in marks) == unsharded.numel()


def test_assemble_names_the_copies_that_differ_in_a_bit() -> None:
    type = tensor_type("f32[4]")
    parts = [torch.full((4,), float("nan")) for _ in range(4)]
    assert assemble(parts, type, {}).isnan().all()
    parts[1], parts[3] = torch.zeros(4), -torch.zeros(4)
    with pytest.raises(HostIRError, match=r"copies of a tensor f32\[4\] differ: ranks 1, 3 from rank 0"):
        assemble(parts, type, {})


def test_assemble_adds_partial_sums_and_rounds_once() -> None:
    type = tensor_type("bf16[1] partial(didx)")
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256, 1, 1, 1)]
    assert assemble(parts, type, {}).item() == 260  # 256 + 1 is 256 in bf16


def test_assemble_leaves_partial_sums_unrounded_on_request() -> None:
    type = tensor_type("bf16[1] partial(didx)")
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256, 1, 1, 3)]
    unsharded = assemble(parts, type, {}, rounded=False)
    assert (unsharded.dtype, unsharded.item()) == (torch.float64, 261)  # bf16 cannot represent 261
    assert [part.item() for part in parts] == [256, 1, 1, 3]
    copies = [torch.tensor([x], dtype=torch.bfloat16) for x in (3, 3, 3, 3)]
    assert assemble(copies, tensor_type("bf16[1]"), {}, rounded=False).dtype == torch.bfloat16


def test_assemble_does_not_change_float64_parts() -> None:
    parts = [torch.tensor([x], dtype=torch.float64) for x in (1, 2, 3, 4)]
    assert assemble(parts, tensor_type("f32[1] partial(didx)"), {}).item() == 10
    assert [part.item() for part in parts] == [1, 2, 3, 4]


def test_a_missing_or_misshapen_part_is_named() -> None:
    type = tensor_type("f32[8@didx]")
    with pytest.raises(HostIRError, match=r"rank 2 of a tensor .* is missing\n.*shape \[2\]"):
        assemble([torch.zeros(2), torch.zeros(2), None, torch.zeros(2)], type, {})
    with pytest.raises(HostIRError, match=r"rank 1 of a tensor .* has shape \[3\]"):
        assemble([torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2)], type, {})
    with pytest.raises(HostIRError, match=r"shape \[7\] is not f32\[8@didx\]\n.*shape \[8\]"):
        shard(torch.zeros(7), type, 0, {})
    with pytest.raises(HostIRError):
        check_shape(torch.zeros(8, 1), type, {})


SIZES = """hostir 1
mesh @mesh [didx] = 0 1 2 3
program @p(%a: bf16[(4@didx M/4), K], %b: bf16[K, N/2]) -> (%a) {
}
"""


def test_sizes_follow_from_unsharded_tensors_and_from_shards() -> None:
    program = parse(SIZES)
    unsharded = [torch.zeros(8, 3, dtype=torch.bfloat16), torch.zeros(3, 5, dtype=torch.bfloat16)]
    part = [torch.zeros(2, 3, dtype=torch.bfloat16), unsharded[1]]
    assert bind_sizes(program, unsharded) == {"M": 8, "K": 3, "N": 10}
    assert bind_sizes(program, part, rank=1) == {"M": 8, "K": 3, "N": 10}
    assert bind_sizes(program, part, {"K": 3}, rank=1) == {"M": 8, "K": 3, "N": 10}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("inputs", "sizes", "rank", "message"),
    [
        ([bf16(8, 3)], {}, None, r"@p was given 1 input\n.*expected: 2: %a, %b"),
        ([bf16(8, 3), bf16(4, 5)], {}, None, r"input %b has shape \[4, 5\].*\[3, 5\].* K=3 from %a, N=10 from %b"),
        ([bf16(8, 3), bf16(3, 5)], {"M": 16}, None, r"input %a has shape \[8, 3\].*\[16, 3\].*M=16 given"),
        ([bf16(2, 3), bf16(3, 5)], {"M": 16}, 1, r"input %a .*\[2, 3\].*\[4, 3\], the part of rank 1 of "),
        ([bf16(8, 3).float(), bf16(3, 5)], {}, None, r"input %a has dtype torch.float32.*expected: torch.bfloat16"),
        ([bf16(8, 3, 1), bf16(3, 5)], {}, None, r"input %a has shape \[8, 3, 1\].*expected: 2 axes: \[M, K\]"),
        (
            [bf16(6, 3), bf16(3, 5)],
            {},
            None,
            r"M=6 does not fit @\w+: M must be a multiple of 4, because %\w+ is sharded over 4 ranks",
        ),
        ([None, bf16(3, 5)], {}, 1, r"input %a of rank 1 is None.*expected: a tensor bf16"),
        ([bf16(2, 3), bf16(3, 5)], {}, 4, r"%a lies on @mesh .*, without rank 4.*expected: None"),
        ([None, None], {"M": 8, "K": 3}, 4, r"the size 'N' of @p is not bound.*hint: bind it"),
        ([bf16(8, 3), bf16(3, 5)], {"m": 8}, None, r"@p has no size 'm'"),
        ([bf16(8, 3).to("meta"), bf16(3, 5)], {}, None, r"input %a is on meta.*expected: cpu.*hint: move it"),
    ],
)
def test_a_wrong_input_is_named_with_what_was_expected(
    inputs: list[torch.Tensor | None], sizes: dict[str, int], rank: int | None, message: str
) -> None:
    with pytest.raises(HostIRError) as caught:
        bind_sizes(parse(SIZES), inputs, sizes, rank=rank, device="cpu")
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


def test_random_inputs_repeat_and_give_products_of_about_one() -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0 1
program @p(%a: f16[2, 64@didx, K], %w: f16[(32 K/32@didx), 48], %bias: f16[48]) -> (%c) {
  %full: f16[K, 48] = allocate
  %c: f16[2, 64@didx, 48] = allocate
  for %i in 0..1 {
    %w_i = chunk %w[%i of 1]
    %f_i = chunk %full[%i of 1]
    %h = allgather %w_i -> %f_i over didx
    wait %h
  }
  matmul %a, %full -> %c
}
""")
    sizes = {"K": 1024}
    a, w, bias = random_inputs(program, sizes, seed=3)
    assert (a.shape, w.shape, bias.shape) == ((2, 64, 1024), (1024, 48), (48,))
    assert {t.dtype for t in (a, w, bias)} == {torch.float16}
    assert 0.9 < (a.double() @ w.double()).std() < 1.1
    assert 0.5 < bias.double().std() < 1.5
    again = random_inputs(program, sizes, seed=3)
    assert all(torch.equal(x, y) for x, y in zip((a, w, bias), again, strict=True))
    assert not torch.equal(a, random_inputs(program, sizes, seed=4)[0])


def test_every_dtype_has_its_torch_dtype() -> None:
    for dtype in DTYPES.values():
        assert torch_dtype(dtype).itemsize == dtype.bytes
