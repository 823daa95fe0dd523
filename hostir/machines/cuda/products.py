"""Record the kernel that cuBLAS launches for a product, so that native code can launch it without torch.

Only cuBLAS knows which kernel it launches, and with which parameters. A capture of the product in a CUDA graph shows
both, and executes nothing. The parameters contain the addresses of the operands, which change from call to call. Each
64-bit number that is an address in an operand is taken for such an address. To make sure, the product is captured a
second time, with operands elsewhere in memory. If these addresses are put into the parameters of the first capture, the
two launches must be equal to the last bit.

If they are not, torch calls cuBLAS in every run. It does so, too, if the product takes several kernels. The captures
are made on two streams, and torch has a cuBLAS workspace for each stream. So the launches also differ if the kernel
uses the workspace: native code could not launch such a kernel on another stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hostir.machines.binding import Step
from hostir.machines.cuda.cublas import streams_of_trials
from hostir.machines.cuda.graphs import captured
from hostir.machines.cuda.tape import LAUNCH, TapeWriter
from hostir.plan.operations import NONE, ComputeOp

if TYPE_CHECKING:
    from hostir.machines.cuda.machine import CudaPlan

UNIT = 256  # bytes: the choice of cuBLAS may depend on the alignment of an operand within this unit
OF_16_BITS = torch.bfloat16, torch.float16
Matrices = Mapping[int, torch.Tensor]  # the tensors in registers


def record_product(plan: CudaPlan, number: int, module: Any, writer: TapeWriter) -> str:
    """Add the kernel of a product to a tape. Return the reason if this is not possible, and else an empty text.

    Args:
        plan: the plan, with the tensors of a run in its registers.
        number: the index of the product's step.
        module: the native launcher.
        writer: the tape.
    """
    op, step, registers = plan.ops[number], plan.steps[number], plan.registers
    assert isinstance(op, ComputeOp)
    operands = {i: registers[i] for i in (op.out, *op.operands) if i != NONE}
    if operands[op.out].dtype not in OF_16_BITS:
        return "each call reads torch's settings of precision"
    if torch.backends.cuda.matmul.allow_fp16_accumulation:
        return "torch allows sums in f16"
    if not all(x.numel() for x in operands.values()):
        return "an operand is empty"
    streams = streams_of_trials(plan.machine.device)
    try:
        name, fields = launch_of(step, streams[0], module)
        moved = elsewhere(operands)
        for register, x in moved.items():
            registers[register] = x
        try:
            _, expected = launch_of(step, streams[1], module)
        finally:
            for register, x in operands.items():
                registers[register] = x
    except (RuntimeError, ValueError) as problem:  # a capture failed, or it is not one kernel
        return str(problem).partition("\n")[0]
    function, sizes, shared, attributes, image, offsets = fields
    found, other = [*addresses_in(image, operands)], bytearray(image)
    for at, register, offset in found:
        struct.pack_into("<Q", other, at, moved[register].data_ptr() + offset)
    if (function, sizes, shared, attributes, offsets) != (*expected[:4], expected[5]):
        return "its kernel or grid depends on the addresses of its operands"
    if different := [at for at, (one, two) in enumerate(zip(other, expected[4], strict=True)) if one != two]:
        where = f"parameter bytes {different[0]} to {different[-1]} of {name}"
        return f"its kernel depends on more than the addresses of its operands ({where})"
    addresses = [writer.address(at, operands[register].data_ptr() + offset) for at, register, offset in found]
    if any(address.memory is None for address in addresses):
        return "an operand is not in a buffer of the program"
    text = f"launch {name} x {sizes[0] * sizes[1] * sizes[2]}({', '.join(map(str, addresses))})"
    writer.add(LAUNCH, plan.streams[op.stream].cuda_stream, fields, addresses, text)
    return ""


def launch_of(step: Step, stream: torch.cuda.Stream, module: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the kernel that a step launches, and the fields of the launch in a tape. Launch nothing.

    Raises ValueError if the step issues anything else, and RuntimeError if it cannot be captured.
    """
    graph = captured(torch.cuda.CUDAGraph(keep_graph=True), stream, torch.cuda.graph_pool_handle(), step)
    name, fields = module.kernel_of(graph.raw_cuda_graph())
    return name, fields


def extent(x: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element of a tensor that is not empty."""
    return x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))


def elsewhere(operands: Matrices) -> dict[int, torch.Tensor]:
    """Return tensors of the same layouts and alignments in other memory.

    Tensors that begin at the same address in `operands` do so in the result.
    """
    sizes: dict[int, int] = {}
    for x in operands.values():
        sizes[x.data_ptr()] = max(extent(x), sizes.get(x.data_ptr(), 0))
    memory = {}
    for address, size in sizes.items():
        flat = torch.empty(size + UNIT, dtype=torch.uint8, device=next(iter(operands.values())).device)
        begin = (address - flat.data_ptr()) % UNIT
        memory[address] = flat[begin : begin + size]
    return {
        register: memory[x.data_ptr()][: extent(x)].view(x.dtype).as_strided(x.shape, x.stride())
        for register, x in operands.items()
    }


def addresses_in(image: bytes, operands: Matrices) -> Iterator[tuple[int, int, int]]:
    """Yield each 64-bit number in the bytes of a launch's parameters that is an address in an operand.

    Yields the number's offset in the bytes, the register of the operand, and the offset of the address in the operand.
    """
    for at in range(0, len(image) - 7, 8):
        (value,) = struct.unpack_from("<Q", image, at)
        for register, x in operands.items():
            if 0 <= value - x.data_ptr() < extent(x):
                yield at, register, value - x.data_ptr()
                break
