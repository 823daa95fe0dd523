"""Checks of the tensors that a caller passes as inputs or as `out=`, and cache keys for these tensors.

Inputs must not require gradients. An input that the program writes must not share memory with another input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hostir.call.sizes import bind_sizes, solve_sizes
from hostir.call.tensors import overlaps_itself, share_memory, without_plain_memory
from hostir.ir.op import Codec, Phase, Value
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, described, error, warn_once
from hostir.ir.types import bind_shape
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.binding import Part
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram


def written_inputs(program: Program) -> frozenset[str]:
    """Return the names of the inputs that a program writes, directly or through views."""
    inputs = {value.name: value.name for value in program.inputs}
    written: set[str] = set()
    for s in program.walk():
        viewed = next((inputs.get(x.name) for x in s.values(Codec.ALIAS)), None)
        if (result := s.defines(Phase.HOST)) is not None:
            inputs.pop(result.name, None)
            if viewed is not None:
                inputs[result.name] = viewed
        written.update(inputs[x.name] for x in s.values(Codec.WRITE) if x.name in inputs)
    return frozenset(written)


def check_apart(program: Program, written: Collection[str], inputs: Sequence[Any]) -> None:
    """Raise HostIRError if an input in `written` overlaps itself, or overlaps another input of the same rank.

    The proof of the program assumes that inputs do not overlap. This function ignores inputs without plain tensor
    memory: other checks refuse them.
    """
    pairs = list(zip(program.inputs, inputs, strict=False))
    held = [(v, x) for v, x in pairs if isinstance(x, torch.Tensor) and without_plain_memory(x) is None]
    for value, x in held:
        if value.name in written and overlaps_itself(x):
            raise error(
                f"elements of input {value}, which @{program.name} writes, share memory",
                value.span,
                expected=f"separate memory for each element, not strides {list(x.stride())} for shape {list(x.shape)}",
                hint=f"pass {value.name}.clone(memory_format=torch.contiguous_format)",
            )
        for other, y in held if value.name in written else ():
            if other is not value and share_memory(x, y):
                raise error(
                    f"input {value}, which @{program.name} writes, shares memory with input {other}",
                    value.span,
                    expected="inputs that do not overlap in memory",
                    hint=f"pass {other.name}.clone()",
                )


def refuse_gradients(program: Program, inputs: Sequence[Any]) -> None:
    """Raise HostIRError if an input requires gradients, because autograd does not see what an executor computes."""
    if not torch.is_grad_enabled():
        return
    for value, x in zip(program.inputs, inputs, strict=False):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise error(
                f"input {value} requires gradients, which do not pass through a program",
                value.span,
                hint=f"pass {value.name}.detach(), or call under torch.no_grad()",
            )


def check_local(program: Program, written: Collection[str], inputs: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Refuse inputs of simulated ranks that real ranks would refuse, and warn of copies that real ranks would make.

    The simulation itself could run with all inputs, because it computes on dense copies without gradients.
    """
    parts = [x if isinstance(x, list | tuple) else [x] for x in inputs]
    ranks = list(enumerate(zip(*parts, strict=False)))
    for _, mine in ranks:
        refuse_gradients(program, mine)
        if written:
            check_apart(program, written, mine)
    odd = [(rank, mine) for rank, mine in ranks if any(_not_dense(x) for x in mine)]
    if not odd or len(ranks) != program.ranks or not all(isinstance(x, list | tuple) for x in inputs):
        return  # unsharded tensors: every rank gets a dense part
    for rank, mine in ranks:
        sizes = solve_sizes(program, mine, sizes, rank=rank, device="cpu")
    for rank, mine in odd:
        warn_of_copies(unroll(program, rank, sizes, mine))


def warn_of_copies(unrolled: UnrolledProgram) -> None:
    """Warn of each input that every call copies because the program needs it contiguous.

    Warn only once about an input.
    """
    program = unrolled.program
    copied = (register for op in unrolled.ops if op.place.statement.may_copy for register in op.reads)
    for register in dict.fromkeys(register for register in copied if register in unrolled.inputs):
        name = program.inputs[unrolled.inputs.index(register)].name
        message = f"Every call of @{program.name} copies its input %{name}, which is not contiguous and must be."
        warn_once((program.name, message), message, f"make {name}.contiguous() once and pass it, to save the copies")


def sizes_of(program: Program, inputs: Sequence[Any], sizes: Mapping[str, int]) -> Mapping[str, int] | None:
    """Return the values of all symbols for a call on simulated ranks. `sizes` has the values that are already known.

    The inputs must be all unsharded tensors, or all lists of parts. Otherwise return None.
    """
    if all(isinstance(x, torch.Tensor) for x in inputs):
        return bind_sizes(program, inputs, sizes, device="cpu")
    if not all(isinstance(x, list | tuple) and len(x) == program.ranks for x in inputs):
        return None  # the code that distributes them refuses them
    for rank, mine in enumerate(zip(*inputs, strict=True)):
        sizes = solve_sizes(program, mine, sizes, rank=rank, device="cpu")
    program.check_sizes(dict(sizes))
    return sizes


def _not_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and without_plain_memory(x) is None and not x.is_contiguous()


TensorsKey = tuple[tuple[Any, ...] | None, ...]
UNREADABLE = (AttributeError, TypeError, ValueError, RuntimeError)  # raised by values without tensor memory


def cache_key(tensors: Sequence[Any]) -> TensorsKey | None:
    """Return the key of some tensors in the cache of plans: their shapes, strides, dtypes and devices.

    Return None if a tensor is of an unsupported type.
    """
    grad, functorch = torch.is_grad_enabled(), torch._C._functorch
    try:
        within = functorch.peek_interpreter_stack() is not None  # torch.vmap and similar transforms
        if within and any(x is not None and functorch.is_functorch_wrapped_tensor(x) for x in tensors):
            return None
        return tuple([None if x is None else _tensor_key(x, grad) for x in tensors])
    except UNREADABLE:
        return None


def _tensor_key(x: torch.Tensor, grad: bool) -> tuple[Any, ...]:
    wraps = x.__class__.__torch_dispatch__
    return x.shape, x.stride(), x.dtype, x.device, wraps, x.is_neg() or x._is_zerotensor(), grad and x.requires_grad


def addresses(tensors: Iterable[Any]) -> list[int]:
    """Return the addresses of tensors, with 0 for None. If a tensor has no memory, return an empty list."""
    try:
        return [0 if x is None else x.data_ptr() for x in tensors]
    except UNREADABLE:
        return []


def unwritable(tensors: Iterable[Any]) -> bool:
    """Return True if torch would refuse to write to one of the tensors.

    Outside inference mode, torch refuses to write to a tensor that was made in inference mode.
    """
    outside = not torch.is_inference_mode_enabled()
    return outside and any(isinstance(x, torch.Tensor) and x.is_inference() for x in tensors)


def check_out(unrolled: UnrolledProgram, outs: Sequence[Part], inputs: Sequence[Part], device: torch.device) -> None:
    """Raise HostIRError unless the tensors `outs`, passed as `out=`, can hold this rank's outputs.

    They must have the right shapes and dtypes, and be on `device`. They must not share memory with inputs or with each
    other.
    """
    program, rank = unrolled.program, unrolled.rank
    check_out_tensors(program, rank, outs, expected_parts(program, rank, unrolled.sizes), device)
    check_out_apart(program, outs, inputs)


def expected_parts(program: Program, rank: int, sizes: Mapping[str, int]) -> list[Part]:
    """Return an entry for each output: a meta tensor with the shape and dtype of the rank's part, or None.

    None means that the rank holds no part of the output.
    """
    held = [v.tensor.mesh is None or rank in v.tensor.mesh.devices for v in program.outputs]
    return [_like(v, sizes) if here else None for v, here in zip(program.outputs, held, strict=True)]


def _like(value: Value, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = bind_shape(value.tensor.local_shape, sizes)
    return torch.empty(shape, dtype=torch_dtype(value.tensor.dtype), device="meta")


def sequence_of(out: Any) -> tuple[Any, ...]:
    """Return the argument `out` as a tuple of tensors. `out` is one tensor or a sequence of tensors."""
    if isinstance(out, torch.Tensor):
        return (out,)
    if not isinstance(out, list | tuple):
        raise error(f"out= is {described(out)}", expected="a tensor, or a list or tuple of tensors")
    return tuple(out)


def check_out_tensors(
    program: Program, rank: int, outs: Sequence[Part], expected: Sequence[Part], device: torch.device
) -> None:
    """Raise HostIRError unless the tensors of `out=` can hold the outputs of one rank.

    They must have the shapes and dtypes of the tensors in `expected`, be contiguous, and be on `device`. If `expected`
    has None in some place, `outs` must have None there, too.
    """
    if len(outs) != len(program.outputs):
        names = ", ".join(map(str, program.outputs))
        raise error(f"out= of @{program.name} has {len(outs)} tensors", expected=f"{len(program.outputs)}: {names}")
    for value, x, like in zip(program.outputs, outs, expected, strict=True):
        if like is not None:
            _check(value, rank, x, like, device)
        elif x is not None:
            raise error(
                f"out= for {value} on rank {rank}, which holds no part of it", value.span, expected="None for it"
            )


def _check(value: Value, rank: int, x: Part, like: torch.Tensor, device: torch.device) -> None:
    def fail(what: str, expected: str, hint: str = "") -> HostIRError:
        return error(f"out= for {value} of rank {rank} {what}", value.span, expected=expected, hint=hint)

    if not isinstance(x, torch.Tensor):
        raise fail(f"is {described(x)}", f"a tensor {value.tensor}")
    if odd := without_plain_memory(x):
        raise fail(f"is {odd.what}", f"a dense tensor {value.tensor}", odd.hint)
    if x.shape != like.shape:
        raise fail(f"has shape {list(x.shape)}", f"{list(like.shape)}")
    if x.dtype != like.dtype:
        raise fail(f"has dtype {x.dtype}", f"{like.dtype}")
    if x.device.type != device.type or device.index not in (None, x.device.index):
        raise fail(f"is on {x.device}", f"{device}")
    if not x.is_contiguous():
        raise fail(f"has strides {list(x.stride())}", f"a contiguous tensor of shape {list(x.shape)}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise fail("requires gradients", "a tensor that does not", "detach it, or call under torch.no_grad()")
    if unwritable([x]):
        hint = "call under torch.inference_mode(), or allocate the tensor outside it"
        raise fail("was made in inference mode", "a tensor that torch can write outside inference mode", hint)


def check_out_apart(program: Program, outs: Sequence[Part], inputs: Sequence[Part]) -> None:
    """Raise HostIRError if a tensor of `out=` shares memory with an input or with another tensor of `out=`.

    `outs` and `inputs` hold the tensors of one rank, or the tensors of several ranks, one rank after another.
    """
    others = [(f"input {value}", x) for value, x in _held(program.inputs, inputs)]
    for value, x in _held(program.outputs, outs):
        for other, y in others:
            if share_memory(x, y):
                raise error(
                    f"out= for {value} shares memory with {other}",
                    value.span,
                    hint="pass a tensor with separate memory",
                )
        others.append((f"out= for {value}", x))


def _held(values: Sequence[Value], tensors: Sequence[Part]) -> Iterator[tuple[Value, torch.Tensor]]:
    return ((values[i % len(values)], x) for i, x in enumerate(tensors) if x is not None)
