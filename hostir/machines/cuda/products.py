"""Record what cuBLAS issues for a product, so that native code can issue it without torch.

Only cuBLAS knows which kernels it launches, and with which parameters. A capture of the product shows both, and
executes nothing. It may contain several kernels, and memsets. The parameters contain the addresses of the
operands, which change from call to call. Each 64-bit number that is an address in an operand is taken for such an
address. To make sure, the product is captured a second time, with operands elsewhere in memory. If these addresses are
put into the parameters of the first capture, the two captures must be equal to the last bit.

One more address may differ, because torch has a separate workspace for the stream of each capture. Work on other
streams must not use this workspace. So a launch gets hostir's workspace for the stream on which it runs (see
`workspace`). A workspace may contain anything, in hostir and in torch. The parameters must not contain any other
address in the memory of a GPU.

Otherwise torch calls cuBLAS in every run.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hostir.ir.machine import uncollected
from hostir.job.links import headline
from hostir.kernels.parameters import TAPING
from hostir.kernels.pools import outside_pools
from hostir.machines.binding import Step
from hostir.machines.cuda.driver import cuda_driver, new_stream
from hostir.machines.cuda.tape import LAUNCH, TapeWriter
from hostir.machines.cuda.uses import capturing
from hostir.plan.operations import NONE, ComputeOp

if TYPE_CHECKING:
    from hostir.machines.cuda.machine import CudaPlan

COMPUTATIONS = "matmul", "linear", "scaled_matmul"
UNIT = 256  # bytes: the choice of cuBLAS may depend on the alignment of an operand within this unit
MEMORY_TYPE, DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE and CU_MEMORYTYPE_DEVICE
Matrices = Mapping[int, torch.Tensor]  # the tensors in registers
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and handle of the stream
_recording = threading.RLock()  # held while a product is captured: all threads use the same two streams


@functools.cache
def streams_of_captures(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the two streams on which products are captured. Nothing runs on them.

    torch keeps a cuBLAS workspace for each of them, and for each thread that records, of 32 MiB on Hopper.
    """
    return new_stream(device, 0), new_stream(device, 0)


@dataclass(frozen=True)
class Issued:
    """A call of the driver that a product makes: the launch of a kernel, or a memset.

    Fields:
        kind: LAUNCH or MEMSET.
        name: the name of the kernel, or "memset".
        fields: the fields of the call's entry on a tape.
    """

    kind: int
    name: str
    fields: tuple[Any, ...]

    @property
    def image(self) -> bytes:
        """The parameters of the kernel, or the address of the memset, padded with zeros to a multiple of 8 bytes."""
        parameters: bytes = self.fields[4] if self.kind == LAUNCH else struct.pack("<Q", self.fields[0])
        return parameters.ljust(-(-len(parameters) // 8) * 8, b"\0")

    def with_image(self, image: bytes) -> Issued:
        """Return the same call with other parameters."""
        if self.kind == LAUNCH:
            return replace(self, fields=(*self.fields[:4], image[: len(self.fields[4])], self.fields[5]))
        return replace(self, fields=(*struct.unpack("<Q", image), *self.fields[1:]))

    @property
    def blank(self) -> Issued:
        """The same call with zeros in the place of all parameters."""
        return self.with_image(bytes(len(self.image)))

    def text(self, addresses: Sequence[object]) -> str:
        """Return the text of the tape entry."""
        where = ", ".join(map(str, addresses))
        if self.kind == LAUNCH:
            x, y, z, *_ = self.fields[1]
            return f"launch {self.name} x {x * y * z}({where})"
        _, value, unit, count = self.fields
        return f"memset {where or 'workspace'} to {value}, {unit * count} bytes"


def record_product(plan: CudaPlan, number: int, module: Any, writer: TapeWriter) -> str:
    """Add what a product issues to a tape. Return the reason if this is not possible, and else an empty text.

    Args:
        plan: the plan, with the tensors of a run in its registers.
        number: the index of the product's step.
        module: the native launcher.
        writer: the tape.
    """
    op, registers = plan.ops[number], plan.registers
    assert isinstance(op, ComputeOp)
    own_rows = NONE if op.ready is None or op.ready.own_rows is None else op.ready.own_rows
    operands: Matrices = {i: registers[i] for i in (op.out, *op.operands, own_rows) if i != NONE}
    if reason := refusal(op, operands):
        return reason
    try:
        with _recording, _disable_current_modes(), torch.cuda.device(plan.machine.device):
            calls = calls_for_any(plan, number, operands, module)
    except ValueError as problem:
        return str(problem)
    except Exception as problem:  # the step has just run, so this says only that it cannot be captured
        return headline(problem).partition("\n")[0]
    if not writer.complete:
        return "Triton computes it"
    for call, places in calls:
        addresses = [writer.address(at, operands[register].data_ptr() + offset) for at, register, offset in places]
        if any(address.memory is None for address in addresses):
            return "an operand is not in a buffer of the program"
        writer.add(call.kind, plan.streams[op.stream].cuda_stream, call.fields, addresses, call.text(addresses))
    return "" if writer.complete else "the tape lacks its stream"


def refusal(op: ComputeOp, operands: Matrices) -> str:
    """Return the reason why a product must not be recorded, or an empty text."""
    dtype = operands[op.out].dtype
    if op.computation not in COMPUTATIONS:
        return f"only {', '.join(COMPUTATIONS)} are recorded"
    if dtype not in (torch.bfloat16, torch.float16):
        return "each call reads torch's settings of precision"
    if dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return "torch allows sums in f16"
    return "" if all(x.numel() for x in operands.values()) else "an operand is empty"


def calls_for_any(
    plan: CudaPlan, number: int, operands: Matrices, module: Any
) -> list[tuple[Issued, list[tuple[int, int, int]]]]:
    """Return the calls of the driver that a product makes, each with the addresses of operands in its image.

    An address is given as by `addresses_in`. Raises ValueError if the calls depend on anything else.
    """
    step, streams, registers = plan.steps[number], streams_of_captures(plan.machine.device), plan.registers
    op = plan.ops[number]
    assert isinstance(op, ComputeOp)
    calls = calls_of(step, streams[0], module)
    moved = elsewhere(operands)
    for register, x in moved.items():
        registers[register] = x
    try:
        others = calls_of(step, streams[1], module)
    finally:
        for register, x in operands.items():
            registers[register] = x
    name, image, expected = calls[-1].name, image_of(calls), image_of(others)
    if [call.blank for call in calls] != [call.blank for call in others]:
        raise ValueError("its kernel or grid depends on the addresses of its operands")
    found, other = [*addresses_in(image, operands)], bytearray(image)
    for at, register, offset in found:
        struct.pack_into("<Q", other, at, moved[register].data_ptr() + offset)
    patched = {at for at, _, _ in found}
    foreign = [at for at in range(0, len(image), 8) if at not in patched and is_on_gpu(image, at)]
    size, offsets = in_workspace(name, (image, expected), foreign, plan.machine.device)
    for at in foreign:
        other[at : at + 8] = expected[at : at + 8]
    if different := [at for at, (one, two) in enumerate(zip(other, expected, strict=True)) if one != two]:
        raise ValueError(f"{name} depends on more than addresses (parameter bytes {different[0]} to {different[-1]})")
    if op.out not in {register for _, register, _ in found}:
        raise ValueError(f"{name} does not contain the address of the result")
    mine = bytearray(image)
    if foreign:
        memory = workspace(plan.machine.device, plan.streams[op.stream].cuda_stream, size)
        for at, offset in zip(foreign, offsets, strict=True):
            struct.pack_into("<Q", mine, at, memory.data_ptr() + offset)
    placed, begin = [], 0
    for call in calls:
        end = begin + len(call.image)
        places = [(at - begin, register, offset) for at, register, offset in found if begin <= at < end]
        placed.append((call.with_image(bytes(mine[begin:end])), places))
        begin = end
    return placed


def image_of(calls: Sequence[Issued]) -> bytes:
    """Return the images of all calls, one after another."""
    return b"".join(call.image for call in calls)


def in_workspace(
    name: str, images: tuple[bytes, bytes], places: Sequence[int], device: torch.device
) -> tuple[int, list[int]]:
    """Return the size of torch's workspace, and the offsets in it of the addresses at some places of the parameters.

    Raises ValueError for an address elsewhere: an address must be at the same place in two blocks of torch's memory of
    the same size, which belong to the streams of the captures. All addresses must be in the same block.

    Args:
        name: the name of the kernel.
        images: the parameters in the two captures. In each of them, torch has another workspace.
        places: the offsets of the addresses in the parameters.
        device: the device.
    """
    if not places:
        return 0, []
    segments, known, found = torch.cuda.memory_snapshot(), list[range](), list[int]()
    captures = streams_of_captures(device)
    for at in places:
        addresses = [struct.unpack_from("<Q", image, at)[0] for image in images]
        blocks = [block_of(x, segments, on.cuda_stream) for x, on in zip(addresses, captures, strict=True)]
        offset, other = (x - block.start for x, block in zip(addresses, blocks, strict=True))
        sizes = {len(block) for block in blocks}
        if 0 in sizes or len(sizes) > 1 or offset != other or known not in ([], blocks):
            raise ValueError(f"{name} uses other memory (parameter bytes {at} to {at + 7})")
        known = blocks
        found.append(offset)
    return len(known[0]), found


def block_of(address: int, segments: Sequence[dict[str, Any]], stream: int) -> range:
    """Return the addresses of the block of torch's memory that contains an address; an empty range if no block does.

    Args:
        address: the address.
        segments: a snapshot of torch's memory.
        stream: the handle of the stream to which the block must belong.
    """
    for segment in segments:
        begin = segment["address"]
        inside = segment["stream"] == stream and begin <= address < begin + segment["total_size"]
        for block in segment["blocks"] if inside else ():
            if begin <= address < begin + block["size"]:
                return range(begin, begin + block["size"])
            begin += block["size"]
    return range(address, address)


def workspace(device: torch.device, stream: int, size: int) -> torch.Tensor:
    """Return memory of at least `size` bytes for the products that native code launches on a stream of a device.

    These products run one after another, so they share the memory. The memory is never freed. torch keeps its workspace
    of each stream in the same way. A later product may need more memory, so a tape keeps the memory that its launches
    use. `stream` is a handle.
    """
    held = _workspaces.get((device, stream))
    if held is None or len(held) < size:
        make = partial(torch.empty, size, dtype=torch.uint8, device=device)
        held = _workspaces[device, stream] = outside_pools(device, make)
    TAPING.keep(held)
    return held


def calls_of(step: Step, stream: torch.cuda.Stream, module: Any) -> list[Issued]:
    """Return the calls of the driver that a step makes. Execute nothing."""
    with torch.cuda.stream(stream), uncollected(), capturing(step):
        return [Issued(*call) for call in module.calls_of(stream.cuda_stream, step)]


def extent(x: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element of a tensor that is not empty."""
    return x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))


def elsewhere(operands: Matrices) -> dict[int, torch.Tensor]:
    """Return tensors of the same layouts and alignments in other memory.

    Tensors with the same address have the same address in the result, too. The others overlap in the result, which
    saves memory: nothing is written there.
    """
    starts = {address: n for n, address in enumerate(sorted({x.data_ptr() for x in operands.values()}))}
    size = UNIT * (len(starts) + 1) + max(map(extent, operands.values()))
    flat = torch.empty(size, dtype=torch.uint8, device=next(iter(operands.values())).device)
    moved = {}
    for register, x in operands.items():
        begin = (x.data_ptr() - flat.data_ptr()) % UNIT + UNIT * starts[x.data_ptr()]
        moved[register] = flat[begin : begin + extent(x)].view(x.dtype).as_strided(x.shape, x.stride())
    return moved


def addresses_in(image: bytes, operands: Matrices) -> Iterator[tuple[int, int, int]]:
    """Yield each 64-bit number in the bytes of a launch's parameters that is an address in an operand.

    Yields the number's offset in the bytes, the register of the operand, and the offset of the address in the operand.
    If operands overlap, it is the one that begins last.
    """
    for at in range(0, len(image) - 7, 8):
        (value,) = struct.unpack_from("<Q", image, at)
        inside = ((value - x.data_ptr(), i) for i, x in operands.items() if 0 <= value - x.data_ptr() < extent(x))
        if nearest := min(inside, default=None):
            yield at, nearest[1], nearest[0]


def is_on_gpu(image: bytes, at: int) -> bool:
    """Return True if the 64-bit number at an offset of the bytes is an address in the memory of a GPU."""
    kind = ctypes.c_uint()
    (value,) = struct.unpack_from("<Q", image, at)
    get = partial(cuda_driver().cuPointerGetAttribute, ctypes.byref(kind), MEMORY_TYPE)
    return bool(value) and not get(ctypes.c_uint64(value)) and kind.value == DEVICE
