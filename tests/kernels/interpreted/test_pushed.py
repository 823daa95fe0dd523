"""Matmuls that copy their rows to peers themselves, in the interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton.runtime.interpreter as interpreter

from hostir.kernels.contractions import PUSHED
from hostir.kernels.flags.copies import Piece, PushKernel
from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.matmul.matmul import matmul, multiply
from hostir.kernels.matmul.tiles import Tile
from tests.kernels.checking import filled, multiprocessors, parts, programs_of_last
from tests.kernels.pushing import Peers

TILE = Tile(16, 16, 16, stages=1, warps=1, group=2)
HALVED = Tile(32, 32, 16, stages=1, warps=1, halves=True, group=1)


@pytest.mark.parametrize(
    ("shape", "dtype", "tile", "tops", "height", "shift"),
    [
        ((20, 150, 48), torch.float32, TILE, [0, 0, 0], 20, 0),  # all rows to each peer
        ((24, 150, 40), torch.bfloat16, replace(TILE, split=3, parts=3), [8, 16, 0], 8, 0),  # one block to each peer
        ((64, 160, 20), torch.float16, replace(TILE, split=2, parts=2), [0, 32, 0, 32], 32, 6),
        ((2, 9, 40, 72), torch.bfloat16, HALVED, [1, 0, 17, 8, 5], 1, 0),  # of a batch
        ((1, 200, 16), torch.float16, replace(HALVED, split=1), [0] * 7, 1, 2),
    ],
)
def test_pieces_are_stored_to_peers_and_flags_rise_after_the_last_program(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tile: Tile,
    tops: list[int],
    height: int,
    shift: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *rows, K, N = shape
    a = filled([*rows, K], dtype, pad=[0, *([1] * (len(rows) - 1)), 8])  # the two axes of rows do not merge
    b = filled([K, N], dtype)
    with multiprocessors(7):
        expected = matmul(a, b, torch.empty(*rows, N, dtype=dtype), tile=tile)
        assert (parts() > 0) == (tile.split > 0)
        programs = programs_of_last()
        place = interpreter.interpreter_builder.set_grid_idx
        for order in (range(programs), range(programs)[::-1]):
            out = torch.full((*rows, N), math.nan, dtype=dtype)
            peers, begun = Peers.of(out, tops, height, shift), list[int]()

            def begins(
                x: int, y: int, z: int, order: range = order, peers: Peers = peers, begun: list[int] = begun
            ) -> None:
                assert not peers.flags.any(), "a flag rose before a program had begun"
                begun.append(x)
                place(order[x], y, z)

            with monkeypatch.context() as patch:
                patch.setattr(interpreter.interpreter_builder, "set_grid_idx", begins)
                multiply(a, b, out, tile=tile, pushed=peers.push)
            assert len(begun) == programs
            assert torch.equal(out, expected)
            peers.check(out, shift)


def test_if_the_matmul_cannot_copy_another_kernel_does() -> None:
    for shape, K in (((2, 3, 2), 5), ((4,), 0)):  # axes that do not merge; K = 0
        a = filled([*shape, K], torch.float32, pad=[0, *([1] * (len(shape) - 1)), 1])
        b, out = filled([K, 6], torch.float32), torch.full((*shape, 6), math.nan)
        peers = Peers.of(out, [0, 2], 2)
        PUSHED["matmul_pushed"](out, a, b, pushed=peers.push)
        torch.testing.assert_close(out, a @ b)
        peers.check(out)
    out, kept = filled([4, 6], torch.float32).contiguous(), torch.empty(4, 6)
    kept.copy_(out)
    peers = Peers.of(out, [0, 2], 2)
    multiply(torch.empty(4, 0), torch.empty(0, 6), out, adds=True, pushed=peers.push)  # adds nothing
    assert torch.equal(out, kept)
    peers.check(out)
    out = torch.full((4, 6), math.nan)
    peers = Peers.of(out, [2], 2)
    x, weight, bias = filled([4, 5], torch.float32), filled([6, 5], torch.float32), filled([6], torch.float32)
    PUSHED["linear_pushed"](out, x, weight, bias, pushed=peers.push)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))
    peers.check(out)


def test_incomplete_rows_strided_results_and_other_flags_are_refused() -> None:
    a, b, target = torch.randn(4, 8), torch.randn(8, 6), torch.empty(4, 6)
    done = DoneFlags(torch.zeros(2, dtype=torch.int64), 1)
    for size, offset, columns, flags, message in (
        (20, 0, 6, None, "whole rows of 24 bytes, got 20"),
        (24, 4, 6, None, "whole rows"),
        (24, 0, 7, None, "a dense result"),
        (24, 0, 6, done, "cannot wait for flags"),
    ):
        push = PushKernel(torch.device("cpu"), [Piece(offset, target.data_ptr())], size, 1)
        with pytest.raises(ValueError, match=message):
            multiply(a, b, torch.empty(4, columns)[:, :6], pushed=push, done=flags)
