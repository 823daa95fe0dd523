"""Arguments of repeated launches of a compiled kernel, recorded without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.layout import rows
from hostir.kernels.matmul import matmul as module
from hostir.kernels.matmul import prepared
from hostir.kernels.matmul.kernel import matmul_kernel
from hostir.kernels.matmul.matmul import matmul, multiply
from hostir.kernels.matmul.tiles import Tile
from tests.kernels.checking import filled

TILE = Tile(16, 16, 16, stages=1, warps=1, group=2)
SPLIT = dataclasses.replace(TILE, halves=True, split=1)
NAMES = list(matmul_kernel.arg_names)


class Recorder:
    """Replaces a compiled kernel and records its launches."""

    def __init__(self) -> None:
        self.launches: list[dict[str, object]] = []
        self.streams: list[int] = []
        self.encodings = 0
        self.current = 0

    def stream(self, index: object) -> int:
        return self.current

    def encoded(self, number: int, descriptor: object) -> tuple[object, ...]:
        self.encodings += 1
        return ((descriptor.base.data_ptr(), descriptor.shape, descriptor.strides, descriptor.block_shape),)

    def launch(self, programs: int, stream: int, arguments: tuple[object, ...]) -> None:
        self.streams.append(stream)
        self.launches.append({"programs": programs, **dict(zip(NAMES, arguments, strict=True))})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Record every launch of a layout except the first, which is interpreted."""
    recorder = Recorder()
    original = prepared.MatmulLaunch._interpret

    def interpret(self: prepared.MatmulLaunch, *tensors: object) -> None:
        original(self, *tensors)
        self.compiled = recorder

    monkeypatch.setattr(prepared.MatmulLaunch, "_interpret", interpret)
    monkeypatch.setattr(prepared, "bind_thread", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(module, "_launches", {})
    return recorder


def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Record the arguments of every launch that goes through Triton."""
    seen: list[dict[str, object]] = []
    kernel = SimpleNamespace()

    class Kernel:
        def __getitem__(self, grid):
            def call(*arguments, num_stages, num_warps, launch_pdl=False):
                values = dict(zip(NAMES, arguments, strict=True))
                assert launch_pdl == values["C"].OVERLAPS
                seen.append({"programs": grid[0], **values})
                return kernel

            return call

    monkeypatch.setattr(prepared, "matmul_kernel", Kernel())
    return seen


def address(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, TensorDescriptor):
        return (value.base.data_ptr(), value.shape, value.strides, value.block_shape)
    if isinstance(value, tuple):
        return tuple(map(address, value))
    return value


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("config", "epoch", "raised"),
    [
        (TILE, None, None),
        (TILE, 1, None),
        (TILE, 1 << 33, None),
        (SPLIT, None, None),
        (TILE, None, 1),
        (SPLIT, None, 1 << 33),
        (TILE, 1, 1),
    ],
)
def test_later_launches_get_the_arguments_of_the_first(
    config, epoch, raised, with_bias, use_descriptors, recorder, monkeypatch
):
    first = interpreted(monkeypatch)
    a, b, out = (
        filled([3, 20, 200], torch.float32, pad=[0, 4, 0]),
        filled([40, 200], torch.float32),
        torch.empty(3, 20, 40),
    )
    ready = (
        None if epoch is None else ReadyFlags(torch.ones(3, dtype=torch.int32), epoch, no_timeouts(3, "cpu"), first=2)
    )
    bias = filled([40], torch.float32) if with_bias else None
    done = None if raised is None else DoneFlags(torch.zeros(5, dtype=torch.int64), raised, first=3)
    options = {"ready": ready, "bias": bias, "use_descriptors": use_descriptors, "tile": config, "transpose_b": True}
    options["done"] = done
    for _ in range(2):
        matmul(a, b, out, **options)
    wanted = {name: address(value) for name, value in first[0].items()}
    received = {name: address(value) for name, value in recorder.launches[0].items()}
    if not use_descriptors:
        assert received == wanted
    else:
        assert {n: v[0] if isinstance(v, tuple) and len(v) == 1 else v for n, v in received.items()} == wanted


def test_a_repeated_launch_passes_the_same_arguments_on_the_current_stream(recorder):
    a, b, out = filled([32, 32], torch.bfloat16), filled([32, 32], torch.bfloat16), torch.empty(32, 32).bfloat16()
    flags = ReadyFlags(torch.ones(2, dtype=torch.int64), 1, no_timeouts(2, "cpu"), first=1)
    assert multiply(a, b, out, ready=flags, tile=SPLIT) is None, "the first one is interpreted"
    again = multiply(a, b, out, ready=flags, tile=SPLIT)
    recorder.current = 5
    again()
    assert recorder.launches[0] == recorder.launches[1]
    assert recorder.streams == [0, 5]
    assert recorder.encodings == 3


def test_a_call_of_several_launches_or_that_depends_on_a_setting_is_not_repeated(recorder):
    def twice(dtype: torch.dtype, **options: object) -> object:
        a, b = filled([64, 32], dtype), filled([32, 32], dtype)
        out = torch.empty(64, 32, dtype=dtype)
        multiply(a, b, out, **options)
        return multiply(a, b, out, **options)

    flags = ReadyFlags(torch.ones(2, dtype=torch.int64), 1, no_timeouts(2, "cpu"))
    assert twice(torch.bfloat16, ready=flags) is not None
    assert twice(torch.float32, ready=flags) is None, "TF32 may be allowed from call to call"
    few = filled([32, 32], torch.bfloat16)
    assert twice(torch.bfloat16, ready=flags, own_rows=few) is None, "few own rows are copied first"


def test_own_rows_that_must_be_copied_are_copied_in_every_launch(recorder):
    a, b, out = filled([2, 64, 32], torch.bfloat16), filled([32, 32], torch.bfloat16), torch.empty(2, 64, 32).bfloat16()
    flags = ReadyFlags(torch.ones(2, dtype=torch.int64), 1, no_timeouts(2, "cpu"))
    dense, apart = filled([64, 32], torch.bfloat16), filled([2, 32, 32], torch.bfloat16, pad=[0, 8, 0])
    assert rows(apart) is None
    for own_rows, repeats in ((dense, True), (apart, False)):
        multiply(a, b, out, ready=flags, own_rows=own_rows)
        assert (multiply(a, b, out, ready=flags, own_rows=own_rows) is not None) == repeats


@pytest.mark.parametrize(("beside", "programs"), [(0, 3), (1, 2), (5, 1)])
def test_a_launch_leaves_sms_to_the_kernel_that_it_overlaps(beside, programs, recorder, monkeypatch):
    first = interpreted(monkeypatch)
    ready = ReadyFlags(torch.ones(4, dtype=torch.int64), 1, no_timeouts(4, "cpu"), overlapped_sms=beside)
    a, b, out = filled([64, 32], torch.float32), filled([32, 32], torch.float32), torch.empty(64, 32)
    for _ in range(2):
        matmul(a, b, out, tile=TILE, ready=ready)
    assert [launch["programs"] for launch in (*first, *recorder.launches)] == [programs] * 2
    assert (beside > 0) == first[0]["C"].OVERLAPS


def test_only_new_addresses_are_encoded(recorder):
    a, b = filled([32, 32], torch.float32), filled([32, 32], torch.float32)
    outs = [torch.empty(32, 32) for _ in range(3)]
    matmul(a, b, outs[0])
    for out in outs * 2:
        matmul(a, b, out)
    assert recorder.encodings == 5
    assert [launch["out"][0] for launch in recorder.launches] == [out.data_ptr() for out in outs * 2]


def test_tensors_are_not_kept(recorder):
    tensors = [filled([32, 32], torch.float32) for _ in range(3)]
    for _ in range(2):
        matmul(*tensors)
    held = [weakref.ref(t) for t in tensors]
    del tensors
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_another_layout_dtype_or_width_of_epoch_needs_another_launch(recorder):
    a, b, out = filled([32, 32], torch.float32), filled([32, 32], torch.float32), torch.empty(32, 32)
    flags = ReadyFlags(torch.ones(2, dtype=torch.int64), 1, no_timeouts(2, "cpu"))
    kinds = [
        lambda: matmul(a, b, out),
        lambda: matmul(a[:16], b, out[:16]),
        lambda: matmul(a, b.t(), out),
        lambda: matmul(a, b[:, :16], out[:, :16]),
        lambda: matmul(a, b, out, bias=b[0]),
        lambda: matmul(a.bfloat16(), b.bfloat16(), out.bfloat16()),
        lambda: matmul(a, b, out, tile=TILE),
        lambda: matmul(a, b, out, use_descriptors=False),
        lambda: matmul(a[:, 1:17], b[1:17], out),  # not aligned to 16 bytes
        lambda: matmul(a, b, out, ready=flags),
        lambda: matmul(a, b, out, ready=dataclasses.replace(flags, first=1)),
        lambda: matmul(a, b, out, ready=dataclasses.replace(flags, overlapped_sms=1)),
    ]
    for number, call in enumerate(kinds):
        call()
        assert len(module._launches) == number + 1
    for call in kinds:
        call()
    matmul(a, b, out, ready=dataclasses.replace(flags, flags=flags.flags + 1, epoch=2))  # as before, with other values
    matmul(a, b.t(), out, transpose_b=True)  # the same layout, written differently
    assert len(module._launches) == len(kinds)
    matmul(a, b, out, ready=dataclasses.replace(flags, flags=flags.flags << 33, epoch=1 << 33))
    assert len(module._launches) == len(kinds) + 1
