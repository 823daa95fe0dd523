"""A persistent Triton matmul on strided views, without copies: the host side."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.runtime.kernels.devices import (
    INTERPRETED,
    Compiled,
    StandIn,
    TooLargeError,
    bind_thread,
    check_device,
    launching,
    limits,
    load,
    only_loads,
)
from hostir.runtime.kernels.flags import DoneFlags, Pushed, PushKernel, ReadyFlags, block_rows, done_rows, pushed_rows
from hostir.runtime.kernels.layout import collapse, descriptor_strides, rows_or_copy, with_rows
from hostir.runtime.kernels.matmul_kernel import Bias, Constants, Scales, Strides, Workspace, matmul_kernel
from hostir.runtime.kernels.scaled import FlatScales, of_blocks
from hostir.runtime.kernels.table import Again
from hostir.runtime.kernels.tiles import (
    INTERPRETER,
    MIN_OWN_ROWS,
    SCALE_BLOCK,
    Gemm,
    Grid,
    Tile,
    alike,
    candidates,
    choose,
)

# Operands -------------------------------------------------------------------------------------------------------------
# The operands of a matmul: checks, rows as batches, and TMA descriptors.

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES_8_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Rows:
    """The leading axes of `a` and `out` as `batches` times `M` rows, with the strides (in elements) of both."""

    batches: int
    M: int
    a_batch: int
    a_row: int
    out_batch: int
    out_row: int

    def in_batches(self, height: int) -> Rows:
        """Return a single batch as batches of `height` rows."""
        return replace(
            self,
            batches=self.M // height,
            M=height,
            a_batch=height * self.a_row,
            out_batch=height * self.out_row,
        )


def check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, scaled: bool) -> None:
    """Raise TypeError or ValueError unless dtypes and shapes are those of a matmul, of 8-bit operands if `scaled`."""
    dtypes = {name: t.dtype for name, t in (("a", a), ("b", b), ("out", out), ("bias", bias)) if t is not None}
    found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    fits = {name: dtype in (DTYPES_8_BIT if name in "ab" else DTYPES) for name, dtype in dtypes.items()}
    if scaled and not all(fits.values()):
        expected = f"{', '.join(map(str, DTYPES_8_BIT))}, and out and bias of {', '.join(map(str, DTYPES))}"
        raise TypeError(f"a scaled matmul expects a and b of {expected}; got {found}")
    if not scaled and (a.dtype not in DTYPES or set(dtypes.values()) != {a.dtype}):
        raise TypeError(f"matmul expects one dtype of {', '.join(map(str, DTYPES))}; got {found}")
    if b.ndim != 2:
        raise ValueError(f"matmul expects b to have 2 axes, got shape {list(b.shape)}")
    K, N = b.shape
    wanted = f"[..., {K}] @ {[K, N]}"
    if a.ndim == 0 or a.shape[-1] != K:
        raise ValueError(f"matmul expects {wanted}, got a of shape {list(a.shape)}")
    if out.shape != (*a.shape[:-1], N):
        raise ValueError(f"{wanted} gives {[*a.shape[:-1], N]}, but out has shape {list(out.shape)}")
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"matmul expects a bias of shape {[N]}, got {list(bias.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out overlaps itself: shape {list(out.shape)}, strides {list(out.stride())}")


def check_own(own: torch.Tensor, a: torch.Tensor, block: int | None) -> None:
    """Raise TypeError or ValueError unless `own` can be the rows of one block of `a`."""
    if own.dtype != a.dtype:
        raise TypeError(f"expected own rows of {a.dtype}, as the others, got {own.dtype}")
    if block is None:
        raise ValueError("own rows are those of a block: expected flags for blocks too")
    if own.shape[-1:] != a.shape[-1:] or own.shape[:-1].numel() != block:
        raise ValueError(f"expected own rows {[block, a.shape[-1]]}, got shape {list(own.shape)}")


def place_own(own: torch.Tensor, a: torch.Tensor, ready: ReadyFlags) -> None:
    """Copy own rows to where block `first` of `a` is, on the current stream."""
    for place, rows in with_rows(a, a, ready.first, len(ready.flags), own):
        place.copy_(rows)


def own_strides(own: torch.Tensor, rows: Rows) -> tuple[int, int, int]:
    """Return the batch, row and column strides of own rows, whose leading axes merge."""
    row, column = rows_or_copy(own).stride()
    return rows.M * row, row, column


def rows_of(a: torch.Tensor, out: torch.Tensor) -> Rows:
    """Return the leading axes of `a` and `out` as few batches of rows; ValueError if they do not merge."""
    levels = collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])
    if len(levels) > 2:
        raise ValueError(
            f"the leading axes of a (shape {list(a.shape)}, strides {list(a.stride())}) and out (strides "
            f"{list(out.stride())}) do not merge into [batch, rows]; make both contiguous, or multiply slice by slice"
        )
    single = (1, 0, 0)
    (batches, a_batch, out_batch), (M, a_row, out_row) = (single, single, *levels)[-2:]
    return Rows(batches, M, a_batch, a_row, out_batch, out_row)


@dataclass(frozen=True)
class Described:
    """The layout of a TMA descriptor of a matrix or a batch of them; `transposed` if it describes the transpose."""

    shape: list[int]
    strides: list[int]
    transposed: bool = False

    def descriptor(self, tensor: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
        """Return a descriptor of `tensor`, which has the described layout, for tiles of shape `block`."""
        rows, columns = reversed(block) if self.transposed else block
        leading = [1] * (len(self.shape) - 2)
        return TensorDescriptor(tensor, self.shape, self.strides, [*leading, rows, columns])


def describe(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, own: torch.Tensor | None, rows: Rows
) -> list[Described] | str:
    """Return the TMA layouts of `a`, `b` `[K, N]`, `out` and `own`, or the reason why there are none."""
    K, N = b.shape
    transposed = isinstance(descriptor_strides(b, b.shape, b.stride()), str)
    seen = b.t() if transposed else b
    single = rows.batches == 1
    leading = (rows.batches, rows.M)[single:]
    matrices = {
        "a": (a, (*leading, K), (*(rows.a_batch, rows.a_row)[single:], a.stride(-1))),
        "b": (seen, seen.shape, seen.stride()),
        "out": (out, (*leading, N), (*(rows.out_batch, rows.out_row)[single:], out.stride(-1))),
    }
    if own is not None:
        mine = (own.shape[:-1].numel() // rows.M, rows.M)[single:] if rows.M else (0,)
        matrices["own"] = (own, (*mine, K), own_strides(own, rows)[single:])
    described = []
    for name, (tensor, shape, strides) in matrices.items():
        legal = descriptor_strides(tensor, shape, strides) if 0 not in shape else "it holds nothing"
        if not isinstance(legal, str) and name == "out" and N * tensor.element_size() % 16:
            # Seen on an H200: TMA writes all of the last 16 bytes of a row, over memory that may be someone else's.
            legal = f"its rows of {N} elements end within 16 bytes"
        if isinstance(legal, str):
            return f"{name} (shape {list(tensor.shape)}, strides {list(tensor.stride())}): {legal}"
        described.append(Described(list(shape), legal, transposed and name == "b"))
    return described


# Workspaces -----------------------------------------------------------------------------------------------------------
# Memory that the programs of one launch share: sums of split tiles, and a ticket (a counter) for each such tile; and
# where flags rise behind blocks of rows, a count for each block.

_CAPTURED_TICKETS = 1 << 18  # for all graphs of a device; a launch takes about as many as there are SMs
_LINE = 32  # tickets per cache line: those of a launch are aligned to a line, as the kernel was compiled for

_lock = threading.Lock()
_by_stream: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
_for_graphs: dict[torch.device, list[torch.Tensor]] = {}


def workspace(device: torch.device, stream: int, sums: int, tickets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `sums` of float32 and `tickets` of int32, all 0, for one launch on the current stream.

    `stream` is the handle of the current stream, 0 on a CPU. The launch leaves its tickets at 0.

    Launches on one stream run in order, so they share memory, which is kept. A captured launch may be replayed on any
    stream, in parallel with any other: its sums come from the memory pool of its graph, and no other launch ever gets
    its tickets.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _sums(device, sums), _captured(device, tickets)
    key = device, stream
    found = _by_stream.get(key)
    if found is not None and len(found[0]) >= sums and len(found[1]) >= tickets:
        return found
    with _lock:
        if device.type == "cuda" and device not in _for_graphs:
            _for_graphs[device] = [torch.zeros(_CAPTURED_TICKETS, dtype=torch.int32, device=device)]
            torch.cuda.current_stream(device).synchronize()
        if found is not None:
            # Sizes that are new in every call then soon take no more.
            sums, tickets = (
                max(len(held), 1 << (n - 1).bit_length()) for n, held in zip((sums, tickets), found, strict=True)
            )
        made = _sums(device, sums), torch.zeros(tickets, dtype=torch.int32, device=device)
        _by_stream[key] = made
    return made


def _sums(device: torch.device, sums: int) -> torch.Tensor:
    return torch.empty(sums, dtype=torch.float32, device=device)


def _captured(device: torch.device, tickets: int) -> torch.Tensor:
    """Return tickets that no other launch uses; if none are left or allocated yet, the graph zeroes new ones."""
    tickets = -(-tickets // _LINE) * _LINE
    with _lock:
        left = _for_graphs.get(device)
        if left is None or len(left[0]) < tickets:
            return torch.zeros(tickets, dtype=torch.int32, device=device)
        taken, left[0] = left[0][:tickets], left[0][tickets:]
    return taken


# Prepared calls -------------------------------------------------------------------------------------------------------
# Prepared launches: for known layouts a call costs little host time.

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # a, b, out, own
Vectors = tuple[torch.Tensor | None, FlatScales | None]  # a bias; the scales of a and of b

_NO_FLAGS = (None,) * 5  # the arguments of the kernel from `flags` to `polls`, if rows are ready
_NOT_RAISED = (None,) * 3  # from `raised_flags` to `raised_height`, if no flags rise
_NOT_SPLIT = (None,) * 4  # from `workspace` to `parts`, if no tile is split
_MAX_DESCRIPTORS = 64  # encoded descriptors of one operand that are kept, one per address


@dataclass
class MatmulLaunch:
    """A prepared launch of the matmul kernel, for operands of one layout.

    Fields:
        tile: what it was prepared with.
        programs: size of the grid.
        described: TMA layouts of a, b, out and own rows that are read in place; None: operands are pointers.
        blocks: the shape of the tile that each descriptor moves.
        bias_step: stride of the bias, in elements.
        scale_steps: strides of the scales of a, then of those of b, as in `Scales`; empty without scales.
        block: rows per block of those that are waited for, with flags.
        raised_block: rows per block behind which flags rise, with flags.
        schedule: number of tiles before the split ones, of split ones, and of parts of each; None if none is split.
        sums, tickets: sizes of the `workspace`.
        counts: where in the tickets the counts of blocks begin, two words each, behind the tickets of split tiles.
        pushed_block: rows per piece of those that are copied to peers; None: there are no copies.
        copies_own: copy own rows to their place in a before the launch, and do not pass them.
        sizes: the arguments of the kernel from `early` to `K`.
        strides, constants, options: further arguments, what the kernel is compiled for, and how.
    """

    tile: Tile
    device: torch.device
    programs: int
    described: Sequence[Described] | None
    blocks: Sequence[tuple[int, int]]
    bias_step: int
    scale_steps: tuple[int, ...]
    block: int | None
    raised_block: int | None
    schedule: tuple[int, int, int] | None
    sums: int
    tickets: int
    counts: int
    pushed_block: int | None
    copies_own: bool
    sizes: tuple[int, ...]
    strides: Strides
    constants: Constants
    options: Mapping[str, Any]
    compiled: Compiled | None = field(default=None, init=False)
    _rest: tuple[Any, ...] = field(init=False)
    _encoded: tuple[dict[int, Sequence[Any]], ...] = field(default_factory=lambda: ({}, {}, {}, {}), init=False)

    def __post_init__(self) -> None:
        self._rest = (*self.sizes, self.strides, self.constants)

    def launch(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> Again | None:
        """Launch for these tensors, on the current stream.

        Returns a function that launches it again for the same addresses, on the stream that is then current; None in
        the interpreter.
        """
        if self.compiled is None:
            self._interpret(matrices, vectors, ready, done, pushed)
            return None
        if torch.cuda.current_device() != self.device.index:
            with launching(self.device):
                return self.launch(matrices, vectors, ready, done, pushed)
        bind_thread(self.device)
        given = self._arguments(self.compiled, matrices, vectors, ready, done, pushed)
        self._start(self.compiled, given)
        return partial(self._again, self.compiled, given)

    def _again(self, compiled: Compiled, given: Sequence[Any]) -> None:
        if torch.cuda.current_device() == self.device.index:
            bind_thread(self.device)
            self._start(compiled, given)
            return
        with launching(self.device):
            self._again(compiled, given)

    def load(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> None:
        """Compile the kernel for such tensors, and load it. Raises TooLargeError if it needs more than the GPU has."""
        sums, tickets = (
            StandIn.of((size,), (1,), dtype, self.device)
            for size, dtype in ((self.sums, torch.float32), (self.tickets, torch.int32))
        )
        given = self._tensors(matrices, vectors, ready, done, pushed, sums, tickets)
        with launching(self.device):
            self.compiled = load(matmul_kernel, given, self.options)

    def _interpret(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> None:
        """Run the kernel in the interpreter."""
        sums, tickets = workspace(self.device, 0, self.sums, self.tickets) if self.tickets else (None, None)
        given = self._tensors(matrices, vectors, ready, done, pushed, sums, tickets)
        with launching(self.device):
            matmul_kernel[(self.programs,)](*given, **self.options)

    def _tensors(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
        sums: Any,
        tickets: Any,
    ) -> Sequence[Any]:
        """Return all arguments as Triton takes them, with tensors and descriptors."""
        operands: list[Any] = list(matrices)
        if self.described is not None:
            operands = [t if t is None else self._descriptor(number, t) for number, t in enumerate(matrices)]
        waits = _NO_FLAGS if ready is None else (ready.flags, ready.timeouts, *_polled(ready))
        raised = _NOT_RAISED if done is None else (done.flags, done.epoch, self.raised_block)
        counts = None if done is None else tickets[self.counts : self.tickets].view(torch.int64)
        shared = _NOT_SPLIT if self.schedule is None else (Workspace(sums, tickets), *self.schedule)
        copies = None if pushed is None else Pushed(pushed.table, pushed.arrived, pushed.count, self.pushed_block)
        given = (*operands, *self._vectors(*vectors), *self._order(ready, done), *waits, *raised, copies, counts)
        return *given, *shared, *self._rest

    def _start(self, compiled: Compiled, given: Sequence[Any]) -> None:
        stream = compiled.stream(self.device.index)
        counts: int | None = None
        shared: Sequence[Any] = _NOT_SPLIT
        if self.tickets:
            # Kept alive until the kernel is launched: nothing launched earlier can get this memory.
            sums, tickets = workspace(self.device, stream, self.sums, self.tickets)
            if self.schedule is not None:
                shared = ((sums.data_ptr(), tickets.data_ptr()), *self.schedule)
            if self.raised_block is not None:
                counts = tickets.data_ptr() + self.counts * tickets.element_size()
        compiled.launch(self.programs, stream, (*given, counts, *shared, *self._rest))

    def _order(self, ready: ReadyFlags | None, done: DoneFlags | None) -> tuple[int | None, int | None]:
        """Return the block to begin with, and the rows of a block; None if no flags say."""
        if ready is not None:
            return ready.first, self.block
        return (None, None) if done is None else (done.first, self.raised_block)

    def _arguments(
        self,
        compiled: Compiled,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> Sequence[Any]:
        """Return the arguments that depend on the tensors, as addresses and encoded descriptors."""
        a, b, out, own = matrices
        operands: Sequence[Any]
        if self.described is not None:
            of_a, of_b, of_out, of_own = self._encoded
            operands = (
                *(of_a.get(a.data_ptr()) or self._encode(compiled, 0, a)),
                *(of_b.get(b.data_ptr()) or self._encode(compiled, 1, b)),
                *(of_out.get(out.data_ptr()) or self._encode(compiled, 2, out)),
                *((None,) if own is None else of_own.get(own.data_ptr()) or self._encode(compiled, 3, own)),
            )
        else:
            operands = (a.data_ptr(), b.data_ptr(), out.data_ptr(), None if own is None else own.data_ptr())
        waits: Sequence[Any] = _NO_FLAGS
        if ready is not None:
            waits = (ready.flags.data_ptr(), ready.timeouts.data_ptr(), *_polled(ready))
        raised: Sequence[Any] = _NOT_RAISED
        if done is not None:
            raised = (done.flags.data_ptr(), done.epoch, self.raised_block)
        bias, scales = vectors
        added = self._vectors(
            None if bias is None else bias.data_ptr(),
            None if scales is None else (scales.of_a.data_ptr(), scales.of_b.data_ptr()),
        )
        copies: tuple[Any, ...] | None = None
        if pushed is not None:
            copies = (pushed.table.data_ptr(), pushed.arrived.data_ptr(), pushed.count, self.pushed_block)
        return (*operands, *added, *self._order(ready, done), *waits, *raised, copies)

    def _vectors(self, bias: Any, scales: Sequence[Any] | None) -> tuple[Bias | None, Scales | None]:
        """Return the arguments `bias` and `scales`, of tensors or addresses."""
        added = None if bias is None else Bias(bias, self.bias_step)
        return added, None if scales is None else Scales(*scales[:2], *self.scale_steps)

    def _descriptor(self, number: int, tensor: torch.Tensor) -> Any:
        assert self.described is not None
        return self.described[number].descriptor(tensor, self.blocks[number])

    def _encode(self, compiled: Compiled, number: int, tensor: torch.Tensor) -> Sequence[Any]:
        kept = self._encoded[number]
        if len(kept) >= _MAX_DESCRIPTORS:
            kept.clear()
        made = kept[tensor.data_ptr()] = compiled.encoded(number, self._descriptor(number, tensor))
        return made


def _polled(ready: ReadyFlags) -> tuple[int, ...]:
    """Return the arguments of the kernel from `epoch` to `polls`."""
    return ready.epoch, len(ready.flags), ready.polls


# The matmul -----------------------------------------------------------------------------------------------------------
# A persistent Triton matmul on strided views, without copies.
#
# Each program loops over tiles of the output, grouped so that neighbours share operands in L2 (the grouped ordering and
# the persistent loop are those of Triton's tutorials); the last tiles may be split along K among several programs each,
# and those of the first blocks of rows among two (hostir.runtime.kernels.matmul_kernel). On Hopper and later, tiles
# move through TMA descriptors; storing a large tile in two halves halves the staging buffer, which frees shared memory
# for one more pipeline stage. If a tensor breaks TMA's rules, masked loads through pointers serve any strides.
#
# The rows of the first operand may still arrive while the kernel runs: see hostir.runtime.kernels.flags.

EXACT_RUN = 64  # float32 products per partial sum

_MAX_CALLS = 4096
_calls: dict[tuple[object, ...], MatmulLaunch] = {}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute `out[..., N] = a[..., K] @ b (+ bias)`, accumulated in float32, on the current stream; return `out`.

    Args:
        a: `[..., K]`. Its leading axes, together with those of `out`, must merge into rows of one stride, or into two
            axes `[batch, rows]` of any strides; neither is copied. K may have any stride.
        b: `[K, N]`, or the weight `[N, K]` if `transpose_b`; any strides.
        out: `[..., N]` with the leading axes of `a`, overwritten; must overlap neither itself nor another argument.
        bias: `[N]`, added before rounding.
        ready: flags for equal blocks of the flattened rows of `a`, which may still arrive: a tile begins when its rows
            are ready, and tiles follow the order of blocks, from `ready.first` on. A tile spans several blocks only if
            they are smaller than it, or `a` is a batch; it waits for all of them. Results are bitwise equal to those
            of the same tile without flags, if it is split in the same way. If a block does not arrive, that is in
            `ready.timeouts` in the end, and tiles are not written: all that need the block, and others that the same
            programs had yet to compute. Split tiles multiply whatever is in the rows of the block.
        done: flags for equal blocks of the flattened rows of `out`, each of which rises behind its block. Tiles follow
            the order of blocks, from `done.first` on, or with `ready` the order of that; a tile may span several
            blocks. Bits are those of the same tile without flags, if it is split in the same way. If rows of `ready` do
            not arrive, the flags of blocks that need them do not rise.
        own: `[..., K]`, the rows of block `ready.first`, which is not waited for. If they are few, or no TMA descriptor
            fits them alone, they are copied to their place in `a`, over what was there; else they are read in place,
            no tile spans several blocks, and each block must consist of whole batches of rows, or all rows must be one
            batch.
        use_descriptors: move tiles with TMA descriptors. None: if the device and the layouts allow it. True: always, or
            raise. False: never.
        tile: the tile to use instead of the one that `choose` returns.

    All tensors have one dtype, bfloat16, float16 or float32. float32 is multiplied exactly, or in TF32 on a GPU if
    `torch.backends.cuda.matmul` says so when called. An empty `out` waits for no flags, and raises none.
    Results repeat bit for bit.

    Raises TypeError for a dtype, ValueError for a shape, a layout, a device, flags or a tile that do not fit, and
    TooLargeError if the kernel needs more than the GPU has, with the `tile` or with all tiles.
    """
    multiply(
        *(a, b.transpose(0, -1) if transpose_b else b, out),
        bias=bias,
        ready=ready,
        done=done,
        own=own,
        use_descriptors=use_descriptors,
        tile=tile,
    )
    return out


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
    scales: FlatScales | None = None,
    adds: bool = False,
    pushed: PushKernel | None = None,
) -> Again | None:
    """Compute as `matmul`. Returns a function that repeats the call for the same layouts and addresses.

    None if more than one launch was needed, if a setting may change what is launched, or in the interpreter.

    With `adds` the product is added to what `out` holds, and the sum rounded once. `scales` are for 8-bit operands.

    `pushed`: copies of pieces of `out`, of whole rows each, which the kernel makes itself, from registers; at its end
    it raises their flags. `out` must be dense, and there are no flags of `ready` or `done`.
    """
    wide, moved = a.dtype == torch.float32, False
    tf32 = wide and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if own is not None and not own.is_contiguous():
        own, moved = rows_or_copy(own), True
    kind = (
        *(_layout(a), _layout(b), _layout(out), None if bias is None else _layout(bias)),
        *(None if ready is None else _waits(ready), None if own is None else _layout(own)),
        None if done is None else (_layout(done.flags), _narrow(done.epoch)),
        None if scales is None else (_layout(scales.of_a), _layout(scales.of_b), scales.fast),
        *(use_descriptors, tile, tf32, adds, None if pushed is None else pushed.kind),
    )
    call = _calls.get(kind)
    if call is None:
        how = use_descriptors, tile, tf32, adds
        call = _loaded((a, b, out, own), (bias, scales), ready, done, *how, pushed)
        if call is None:
            if adds:
                return None
            if bias is None:
                out.zero_()
            else:
                out.copy_(bias.expand_as(out))
            if pushed is not None:
                pushed(out)
            return None
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[kind] = call
    if own is not None and call.copies_own:
        assert ready is not None
        place_own(own, a, ready)
        own, moved = None, True
    if only_loads():
        return None
    again = call.launch((a, b, out, own), (bias, scales), ready, done, pushed)
    return None if wide or moved else again


def _dtype_name(t: torch.Tensor, tf32: bool, stepwise: bool) -> str:
    """Return the dtype of an operand as `Gemm` names it."""
    if t.dtype in DTYPES_8_BIT:
        return "f8s" if stepwise else "f8"
    return {torch.bfloat16: "bf16", torch.float16: "f16"}.get(t.dtype, "tf32" if tf32 else "f32")


def _layout(t: torch.Tensor) -> tuple[object, ...]:
    """Return everything about a tensor that a launch depends on, except its address."""
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0


def _waits(ready: ReadyFlags) -> tuple[object, ...]:
    """Return everything about flags that a launch depends on, except their address and the value of the epoch."""
    timeouts = ready.timeouts
    pinned = timeouts.device.type == "cpu" and timeouts.is_pinned()
    sms = (ready.overlapped_sms, ready.reserved_sms)
    return _layout(ready.flags), _layout(timeouts), pinned, _narrow(ready.epoch), ready.first, ready.polls, sms


def _narrow(epoch: int) -> bool:
    """Whether an epoch fits into 32 bits: Triton compiles another kernel for an int64."""
    return -(1 << 31) <= epoch < 1 << 31


def _loaded(
    matrices: Matrices,
    vectors: Vectors,
    ready: ReadyFlags | None,
    done: DoneFlags | None,
    use_descriptors: bool | None,
    tile: Tile | None,
    tf32: bool,
    adds: bool,
    pushed: PushKernel | None,
) -> MatmulLaunch | None:
    """Prepare the launch of such a matmul, and load its kernel; None if only a bias or zeros are written.

    If the kernel is too large, the best of the other tiles is taken: the same one on all ranks with such layouts.
    Raises TooLargeError if it is too large with every tile.
    """
    too_large: dict[Tile, TooLargeError] = {}
    while True:
        how = use_descriptors, tile, tf32, adds
        call = _prepare(matrices, vectors, ready, done, *how, pushed, too_large)
        if call is None or INTERPRETED:
            return call
        assert call.tile.unsplit not in too_large, "a tile that is too large is not taken again"
        a, b, out, own = matrices
        try:
            call.load((a, b, out, None if call.copies_own else own), vectors, ready, done, pushed)
        except TooLargeError as problem:
            if tile is not None:
                raise
            too_large[call.tile.unsplit] = problem
        else:
            return call


def _prepare(
    matrices: Matrices,
    vectors: Vectors,
    ready: ReadyFlags | None,
    done: DoneFlags | None,
    use_descriptors: bool | None,
    tile: Tile | None,
    tf32: bool,
    adds: bool,
    pushed: PushKernel | None,
    too_large: Mapping[Tile, TooLargeError],
) -> MatmulLaunch | None:
    """Prepare the launch of such a matmul, without the tiles that are known to be too large.

    None if nothing is multiplied, and only a bias or zeros are written.
    """
    (a, b, out, own), (bias, scales) = matrices, vectors
    scale_a, scale_b, fast = scales or (None, None, False)
    device = check_device(a=a, b=b, out=out, bias=bias, own=own, scale_a=scale_a, scale_b=scale_b)
    check(a, b, out, bias, scales is not None)
    block = None if ready is None else block_rows(ready, out)
    raised_block = None if done is None else done_rows(done, out)
    if pushed is not None and (ready is not None or done is not None):
        raise ValueError("a matmul that copies to peers waits for no flags, and raises none but theirs")
    pushed_block = None if pushed is None else pushed_rows(pushed, out)
    has_own = own is not None
    if own is not None:
        check_own(own, a, block)
        if own.shape[:-1].numel() < MIN_OWN_ROWS:
            own = None
    K, N = b.shape
    if out.numel() == 0 or (K == 0 and ready is None and done is None):
        return None
    rows = rows_of(a, out)
    if own is not None and block and rows.batches > 1 and block % rows.M:
        raise ValueError(f"own rows of {block} are no whole batches of {rows.M}")
    bounds = limits(device)
    if scales is not None and not bounds.fp8:
        raise ValueError(f"a scaled matmul needs tensor cores for 8-bit floats: {device} has none")
    if not bounds.tma:
        if use_descriptors:
            raise ValueError(f"matmul cannot use TMA descriptors: {device} has no TMA")
        use_descriptors = False
    described = _described((a, b, out, own), rows, use_descriptors)
    if described is None and own is not None and use_descriptors is None:
        described = _described((a, b, out, None), rows, None)
        own = own if described is None else None
    copies_own = has_own and own is None
    # Programmatic dependent launch came with TMA, on Hopper; a copy would be between the previous kernel and this one.
    overlapped = ready.overlapped_sms if ready is not None and bounds.tma and not copies_own else 0
    sms = max(1, bounds.sms - overlapped - (0 if ready is None else ready.reserved_sms))
    blockwise = scales is not None and of_blocks(scales, N)
    stepwise = scales is not None and not fast
    name, result = _dtype_name(a, tf32, stepwise or blockwise), out.element_size()
    gemm = Gemm(rows.M, N, K, name, rows.batches, block, own is not None, overlapped > 0, result)
    if tile is None and INTERPRETED:
        tile = INTERPRETER
    elif tile is None:
        every = candidates(
            gemm.dtype,
            descriptors=described is not None,
            shared_memory=bounds.shared_memory,
            result=result,
            adds=adds,
        )
        fitting = tuple(t for t in every if t not in too_large)
        if not fitting:
            raise too_large[every[-1]]
        tile = choose(alike(gemm, fitting), sms, fitting)
    if blockwise and (SCALE_BLOCK % tile.n or SCALE_BLOCK % tile.k):
        raise ValueError(f"scales of blocks need tiles whose columns and steps divide {SCALE_BLOCK}, got {tile}")
    grid = Grid.of(tile, gemm)
    if grid.rows != rows.M:
        rows = rows.in_batches(grid.rows)
        described = _described((a, b, out, own), rows, use_descriptors)
    plan = grid.schedule(tile, sms)
    left = grid.tiles + grid.early - plan.whole
    slots = left * (1 if plan.parts == 2 else plan.parts) + grid.early
    strides = Strides(None, None, None, None)
    if described is None:
        of_a, of_out = (rows.a_batch, rows.a_row, a.stride(-1)), (rows.out_batch, rows.out_row, out.stride(-1))
        strides = Strides(None if own is None else own_strides(own, rows), of_a, tuple(b.stride()), of_out)
    halved = tile.n // 2 if tile.halves else tile.n
    tickets, group = left + grid.early, tile.group
    counts = -(-tickets // _LINE) * _LINE
    if done is not None:
        assert raised_block is not None
        tickets = counts + 2 * len(done.flags)
        high = -(-raised_block // tile.m)  # tiles of a block in a column; those of other blocks come later
        group = -(-high // -(-high // group))
    return MatmulLaunch(
        tile=tile,
        device=device,
        programs=plan.programs,
        described=described,
        blocks=((tile.m, tile.k), (tile.k, tile.n), (tile.m, halved), (tile.m, tile.k)),
        bias_step=0 if bias is None else bias.stride(0),
        scale_steps=() if scales is None else (*scales.of_a.stride(), *scales.of_b.stride()),
        block=block,
        raised_block=raised_block,
        schedule=(grid.tiles - left, left, plan.parts) if slots else None,
        sums=slots * tile.m * tile.n,
        tickets=tickets,
        counts=counts,
        pushed_block=pushed_block,
        copies_own=copies_own,
        sizes=(grid.early_blocks, group, grid.batches, grid.rows, N, K),
        strides=strides,
        constants=Constants(
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            HALVES=tile.halves,
            DESCRIPTORS=described is not None,
            B_IS_NK=described is not None and described[1].transposed,
            BATCHED=grid.batches > 1,
            HAS_BIAS=bias is not None,
            SPLIT=left > 0,
            PAIRS=plan.parts == 2,
            READY=ready is not None,
            OWN=has_own,
            FLAGS=1 if ready is None else triton.next_power_of_2(ready.flags.numel()),
            EARLY=grid.early > 0,
            DONE=0 if not raised_block else triton.next_power_of_2(grid.span(tile, raised_block)),
            OVERLAPS=overlapped > 0,
            PRECISION="tf32" if tf32 else "ieee",
            EXACT=gemm.dtype == "f32",
            RUN=max(1, EXACT_RUN // tile.k),
            SCALES="" if scales is None else "blocks" if blockwise else "rows",
            STEPWISE=stepwise,
            PUSHED=0 if pushed is None else triton.next_power_of_2(pushed.count),
            ALIGNED=pushed is not None and pushed.kind[2],
            ADDS=adds,
        ),
        options={"num_stages": tile.stages, "num_warps": tile.warps, **({"launch_pdl": True} if overlapped else {})},
    )


def _described(matrices: Matrices, rows: Rows, wanted: bool | None) -> list[Described] | None:
    """Return the TMA layouts of a, `[K, N]`, out and own; None to use pointers. ValueError if `wanted` but illegal."""
    if wanted is False:
        return None
    described = describe(*matrices, rows)
    if not isinstance(described, str):
        return described
    if wanted:
        raise ValueError(f"matmul cannot use TMA descriptors: {described}")
    return None


def matmul_reference(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, transpose_b: bool = False
) -> torch.Tensor:
    """Return `[..., K] @ [K, N] (+ [N])` (or `[N, K]` if `transpose_b`) in float64: the reference for `matmul`."""
    product = a.double() @ (b.t() if transpose_b else b).double()
    return product if bias is None else product + bias.double()
