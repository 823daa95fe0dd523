"""Copies to peers by a kernel, in the interpreter."""

from __future__ import annotations

from random import Random

import pytest
import torch
import triton.runtime.interpreter as interpreter

from hostir.kernels.flags import copies
from hostir.kernels.flags.copies import Piece, PushKernel
from hostir.kernels.layout import Words
from tests.kernels.pushing import Job


@pytest.mark.parametrize("shift", [0, 8, 6])
@pytest.mark.parametrize(("pieces", "size"), [(1, 16), (5, 208), (2, 4098), (4, 10_000), (9, 6)])
def test_every_piece_arrives_completely_and_its_flag_rises(pieces: int, size: int, shift: int) -> None:
    job = Job.random(Random(size + shift), "cpu", pieces, size, shift)
    for _ in range(2):
        job.flags.zero_()
        job.push(job.source)
        job.check(shift)


def test_pieces_come_in_batches_of_some_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH", 100)
    for pieces, size, batches in ((5, 40, 3), (4, 100, 4), (3, 400, 3), (1, 8, 1)):
        job = Job.random(Random(pieces), "cpu", pieces, size, 0)
        assert len(job.push.arrived) == batches
        job.push(job.source)
        job.check(0)
    monkeypatch.setattr(copies, "MAX_PIECES", 4)
    assert len(Job.random(Random(0), "cpu", 9, 2, 0).push.arrived) == 3
    monkeypatch.setattr(copies, "BATCH", 1)
    many = Job.random(Random(0), "cpu", 70, 2, 0)
    assert len(many.push.arrived) == 70
    many.push(many.source)
    many.check(0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_flags_rise_in_any_order_of_programs(groups: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH", 1)  # a batch for each piece
    monkeypatch.setattr(copies, "GROUPS", groups)
    order = [0, 1, 2]
    Random(seed).shuffle(order)
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(order[x], y, z))
    job = Job.random(Random(seed), "cpu", 7, 48, 0)
    for _ in range(2):
        job.flags.zero_()
        job.push(job.source)
        job.check(0)
        assert not job.push.arrived.any()


def test_a_piece_already_in_place_is_not_copied_but_its_flag_rises() -> None:
    source = torch.randn(64)
    flag = torch.zeros(2, dtype=torch.int64)
    before, other = source.clone(), torch.zeros(32)
    here = Piece(128, source.data_ptr() + 128, flag.data_ptr(), 3)
    there = Piece(128, other.data_ptr(), flag.data_ptr() + 8, 4)
    PushKernel(torch.device("cpu"), [here, there], 128, sms=2)(source)
    assert torch.equal(source, before)
    assert torch.equal(other, source[32:])
    assert flag.tolist() == [3, 4]


def test_one_kernel_copies_sources_of_different_alignment() -> None:
    target = torch.zeros(40, dtype=torch.int16)
    kernel = PushKernel(torch.device("cpu"), [Piece(0, target.data_ptr())], 80, sms=2)
    memory = torch.arange(64, dtype=torch.int16)
    for start in (0, 8, 3, 4):
        source = memory[start : start + 40]
        kernel(source)
        assert torch.equal(target, source)


def test_freed_kernels_return_their_memory() -> None:
    words, source, target = Words(torch.device("cpu"), owners=3), torch.randn(64), torch.zeros(64)
    held: list[list[PushKernel]] = []
    memory = set()
    for step in range(12):
        size = 4 * (step + 1)
        pieces = [Piece(n * size, target.data_ptr() + n * size) for n in range(1 + step % 3)]
        held.append([PushKernel(torch.device("cpu"), pieces, size, 2, words, place) for place in range(2)])
        rows = [kernel.table.data_ptr() for plan in held for kernel in plan]
        assert len(set(rows)) == len(rows)
        assert not any((row - min(rows)) % 64 for row in rows)
        memory |= {kernel.table.untyped_storage().data_ptr() for kernel in held[-1]}
        assert len(memory) == 2
        del held[: len(held) - 2]
        target.zero_()
        for kernel in held[-1]:
            kernel(source)
        assert torch.equal(target[: len(pieces) * (step + 1)], source[: len(pieces) * (step + 1)])


def test_there_are_no_more_groups_than_batches() -> None:
    for pieces, size, sms, groups in ((1, 48, 3, 1), (4, 48, 3, 1), (2, copies.BATCH, 3, 2), (2, copies.BATCH, 1, 1)):
        assert Job.random(Random(0), "cpu", pieces, size, 0, sms).push.groups == groups


def test_a_request_for_too_many_sms_uses_all_sms() -> None:
    target = torch.zeros(8)
    assert PushKernel(torch.device("cpu"), [Piece(0, target.data_ptr())], 32, sms=10**12).sms == 3
