"""Passes `fused` and `push`: each rank sends its shard to all, and one matmul takes each block as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hostir.ir.comm_ops import AllGather, Collective, Communication
from hostir.ir.host_ops import Chunk, For, Select, SetStream, Synchronize
from hostir.ir.onesided_ops import AllocateSymmetric, Put, Signal, WaitSignal
from hostir.ir.op import Bin, Codec, Expr, Lit, Ref, Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.tensor_ops import Contraction, DenseCopy, Linear, Matmul, Reshape, Shard, ViewStatement
from hostir.ir.types import FLAG, Axis, TensorType
from hostir.lower import Pass
from hostir.lower.host import Host, Peers, isolate, modulo
from hostir.lower.pipeline import SlicePlace, with_reasons
from hostir.lower.propagate import result_of

# Allgathers that bring rows to matmuls --------------------------------------------------------------------------------
# Allgathers whose result a matmul reads by rows, and the layout of shards in them, for `ring`, `fused` and `push`.


@dataclass(frozen=True)
class Gathers:
    """The allgathers whose rows matmuls read, and reasons why the other communications stay whole, by their result."""

    rows: tuple[AllGather, ...]
    reasons: Mapping[str, str]

    @staticmethod
    def of(program: Program, strategy: str) -> Gathers:
        moves = [s for s in program.body if isinstance(s, Communication) and not _of_one_rank(s)]
        reasons = {s.out.name: why for s in moves if (why := _why_whole(s, program, strategy))}
        rows = [s for s in moves if isinstance(s, AllGather) and s.out.name not in reasons]
        return Gathers(tuple(rows), reasons)

    def only(self, fits: Callable[[AllGather], bool], why_not: str) -> Gathers:
        """Keep the allgathers that fit; the others get `why_not` as their reason."""
        out = {s.out.name: why_not for s in self.rows if not fits(s)}
        return Gathers(tuple(s for s in self.rows if s.out.name not in out), {**self.reasons, **out})

    def with_reasons(self, program: Program, strategy: str) -> Program:
        """Return the program with the reasons as notes; raise if it communicates but gathers no rows for a matmul."""
        if self.rows or not self.reasons:
            return with_reasons(program, self.reasons)
        s = next(s for s in program.body if result_of(s).name in self.reasons)
        raise s.fail(
            f"'{strategy}' cannot overlap the {s.keyword()}: {self.reasons[result_of(s).name]}",
            expected="an allgather of the rows of a matmul's left side",
            hint="use 'pipeline', which slices any communication along a Stream axis, or 'sequential'",
        )


def _of_one_rank(s: Communication) -> bool:
    """Whether a collective has one rank only: there is nothing to overlap, and it needs no reason."""
    return isinstance(s, Collective) and s.mesh.size(s.over) == 1


def _why_whole(s: Communication, program: Program, strategy: str) -> str:
    if not isinstance(s, AllGather):
        return f"{strategy} handles only allgathers of rows"
    if not any(reads_rows(user, s.out) for user in program.body):
        return f"no matmul has {s.out} as its left side"
    if first_matmul(program, s) is None:
        return f"every matmul with {s.out} as its left side needs it for its right side too"
    if s.x.tensor.axis_on(s.over) == len(s.x.tensor.axes) - 1:
        return f"it gathers the axis that the matmul sums over, of which every row of {s.out} needs all"
    return ""


def reads_rows(s: Statement, rows: Value) -> bool:
    """Whether a matmul reads a tensor as its left side, and nowhere else."""
    reads = [v.name for v in s.values(Codec.READ, Codec.ALIAS)]
    return isinstance(s, (Matmul, Linear)) and s.a.name == rows.name and reads.count(rows.name) == 1


def first_matmul(program: Program, s: AllGather) -> Statement | None:
    """Return the first matmul that reads the rows as its left side, and nothing else that depends on them."""
    after = computed_from(program, s.out)
    found = (user for user in program.body if reads_rows(user, s.out))
    return next((u for u in found if not any(v.name in after for v in u.values(Codec.READ))), None)


def computed_from(program: Program, value: Value) -> set[str]:
    """Return the names of all values that depend on a value."""
    found: set[str] = set()
    for s in program.body:
        if any(v.name == value.name or v.name in found for v in s.values(Codec.READ, Codec.ALIAS)):
            found.add(result_of(s).name)
    return found


def wanted_otherwise(program: Program, rows: Value) -> bool:
    """Whether a tensor is an output, or read by anything but matmuls that have it as their left side."""
    users = [s for s in program.body if any(v.name == rows.name for v in s.values(Codec.READ, Codec.ALIAS))]
    return rows in program.outputs or not all(reads_rows(s, rows) for s in users)


# How the shards lie -----------------------------------------------------------------------------------------------
def shard_place(s: AllGather) -> SlicePlace:
    """Return where one rank's shard lies in the gathered tensor."""
    k = s.x.tensor.axis_on(s.over)
    assert k is not None
    factors = s.x.tensor.host().axes[k].factors
    at = next(n for n, factor in enumerate(factors) if factor.on == s.over)
    return SlicePlace(k, product([f.extent for f in factors[:at]]), Size(s.mesh.size(s.over)))


def long_axes(s: AllGather) -> list[int]:
    """Return the axes outside the sharded one of which a rank has more than one element."""
    k = shard_place(s).axis
    return [j for j, size in enumerate(s.x.tensor.local_shape[:k]) if not size.is_one]


def shard_in_pieces(s: AllGather) -> bool:
    """Whether a shard is several blocks of one axis."""
    return not shard_place(s).blocks_outside(s.out.tensor).is_one


def block_axes(s: AllGather) -> tuple[Axis, ...]:
    """Return the gathered tensor's axes as `[blocks, ranks, ..., K]`, with the ranks as an axis of their own."""
    axes = isolate(s.x.tensor, s.over)
    at = next(n for n, axis in enumerate(axes) if s.over in axis.marks)
    blocks = Axis(tuple(f for axis in axes[:at] for f in axis.factors)).normal()
    return (blocks, *axes[at:])


def with_block_axes(
    program: Program, gathers: Sequence[AllGather], wanted: Callable[[AllGather], bool]
) -> tuple[Program, list[AllGather]]:
    """Rewrite the allgathers that want block axes, and their matmuls, to tensors with block axes.

    Returns the program, and all the allgathers as they are in it.
    """
    names = Names.of(program)
    known = {s.out.name for s in gathers}
    rows: dict[str, Value] = {}  # by what was gathered: the same with block axes
    body: list[Statement] = []
    anew: list[AllGather] = []
    for s in program.body:
        if isinstance(s, AllGather) and s.out.name in known:
            if not wanted(s):
                anew.append(s)
                body.append(s)
                continue
            axes = block_axes(s)
            shard = _like(s.x, axes, names)
            full = rows[s.out.name] = _like(s.out, tuple(a.without(s.over) for a in axes), names)
            anew.append(replace(s, x=shard, out=full))
            body += [Reshape(s.x, shard, span=s.span), anew[-1]]
            if wanted_otherwise(program, s.out):
                body.append(Reshape(full, s.out, span=s.span))
        elif isinstance(s, (Matmul, Linear)) and s.a.name in rows and reads_rows(s, s.a):
            a = rows[s.a.name]
            out = _like(s.out, (*a.tensor.axes[:-1], s.out.tensor.axes[-1]), names)
            body += [replace(s, a=a, out=out), Reshape(out, s.out, span=s.span)]
        else:
            body.append(s)
    return program.with_body(body), anew


def _like(value: Value, axes: tuple[Axis, ...], names: Names) -> Value:
    return Value(names.fresh(f"{value.name}_blocks"), value.tensor.host().with_axes(axes), value.span)


# By copy engines ------------------------------------------------------------------------------------------------------
# Pass `fused`: each rank pushes its shard to all others, and one matmul multiplies each block of rows as it arrives.
#
# The schedule is that of kernels which wait for the rows of a gathered operand inside the matmul: FLUX (Chang et al.,
# 2024), the all-gather matmuls of Triton-distributed (Zheng et al., 2025). The copies are left to the copy engines.
#
# With two streams and more than one copy, the signals after the copies go to the other stream, where a kernel sends
# each. A signal by the copying stream itself would delay the next copy.

COPY_STREAM = Lit(0)  # the worker stream that copies
SIGNAL_STREAM = Lit(1)  # the worker stream whose kernels signal after the copies, if there are two
ARRIVED = Lit(1)  # the epoch of a block that has arrived


def _in_blocks(s: AllGather) -> bool:
    """Whether the rows of a rank are equal blocks one after another, with a piece of each rank's shard in each."""
    outside = [block_axes(s)[0]] if _needs_block_axes(s) else [s.x.tensor.host().axes[j] for j in long_axes(s)]
    return all(len(axis.factors) == 1 for axis in outside)


def _needs_block_axes(s: AllGather) -> bool:
    return shard_in_pieces(s) or len(long_axes(s)) > 1


def _matmuls_first(program: Program, gathers: Sequence[AllGather]) -> Program:
    """Reorder statements so that the first user of gathered rows is a matmul: it can wait block by block."""
    for gather in gathers:
        matmul, body = first_matmul(program, gather), program.body
        assert matmul
        start, end = body.index(gather) + 1, body.index(matmul)
        needed = {v.name for v in matmul.values(Codec.READ)}
        for s in reversed(body[start:end]):
            needed |= {v.name for v in s.values(Codec.READ, Codec.ALIAS)} if result_of(s).name in needed else set()
        before = [s for s in body[start:end] if result_of(s).name in needed]
        after = [s for s in body[start:end] if result_of(s).name not in needed]
        program = program.with_body([*body[:start], *before, matmul, *after, *body[end + 1 :]])
    return program


class ShardPush:
    """Builds one allgather: the copies of the own shard to the peers, and the matmul that waits for theirs."""

    def __init__(self, host: Host, peers: Peers, gather: AllGather, streams: int) -> None:
        self.host, self.peers, self.gather = host, peers, gather
        self.ranks = gather.mesh.size(gather.over)
        self.place = peers.place(gather)
        self.axis = next(iter(long_axes(gather)), None)  # the axis of blocks, if a rank's rows are in several
        self.blocks = ONE if self.axis is None else gather.x.tensor.local_shape[self.axis]
        self.workers = self.workers_of(streams)
        x = host.packed(host.values[gather.x.name], gather)
        self.full, self.whole = self.buffers()
        count = Axis.of(self.blocks * self.ranks)
        flags = TensorType(FLAG, (count,), gather.mesh)
        self.flags = Value(host.names.fresh(f"{gather.out.name}_there"), flags, gather.span)
        host.body.append(AllocateSymmetric(self.flags, span=gather.span))
        self.block = peers.index("s")
        self.views, self.shard, self.mine = self.views_of(x)
        self.copies()

    def workers_of(self, streams: int) -> int:
        """Return how many worker streams it takes: two if signals and copies shall not wait for each other."""
        return 2 if streams > 1 and (self.ranks > 2 or self.axis is not None) else 1

    @property
    def copies_own(self) -> bool:
        """Whether this rank's rows are copied to the buffer too; a matmul can read one block of them where they are.

        A matmul that reads what else is gathered waits for all of it before it starts.
        """
        users = self.host.users.get(self.gather.out.name, [])
        if self.axis is not None or self.whole is not None or len(users) != 1:
            return True
        operands = {v.name for v in users[0].values(Codec.READ)} - {self.gather.out.name}
        return any(isinstance(s, AllGather) and s.out.name in operands for s in self.host.program.body)

    def buffers(self) -> tuple[Value, Value | None]:
        """Allocate the symmetric buffer that all ranks fill; return it, and the tensor for a copy of the rows or None.

        Rows are copied if anything but the matmul reads them: the next call's copies overwrite the buffer.
        """
        s, host = self.gather, self.host
        whole = host.destination(s.out) if wanted_otherwise(host.program, s.out) else None
        name = host.names.fresh(f"{s.out.name}_shared") if whole else s.out.name
        full = Value(name, s.out.tensor.host(), s.span)
        host.values.setdefault(s.out.name, full)
        host.body.append(AllocateSymmetric(full, span=s.span))
        return full, whole

    def copies(self) -> None:
        """Add the copies: to the own buffer, and on a worker stream to each peer when its matmul needs the rows."""
        s, body, turn = self.gather, self.host.body, self.peers.index("i")
        before = modulo(Bin("+", self.place, Bin("-", Lit(self.ranks - 1), turn)), self.ranks)
        copy, signal = self.push(before, "to the rank that multiplies these rows next")
        theirs: tuple[Statement, ...] = copy, signal
        if self.workers > 1:
            note = "by a kernel: the next copy need not wait for it"
            raised = replace(signal, sms=1, note=note)
            theirs = SetStream(COPY_STREAM), copy, SetStream(SIGNAL_STREAM), Synchronize(COPY_STREAM), raised
        body += [SetStream(COPY_STREAM), Synchronize(self.peers.user)]
        body += self.views if self.axis is None else ()
        if self.copies_own:
            # A copy within a GPU needs SMs, so it must come before the matmul that holds them.
            mine = self.each(self.push(self.place, "the matmul begins with these rows"))
            body += [SetStream(self.peers.user), *mine, SetStream(COPY_STREAM)]
        body += self.peers.barrier(s, self.full)
        body += self.each([For(turn.value, Size(self.ranks - 1), theirs, span=s.span)])
        body.append(SetStream(self.peers.user))

    def push(self, to: Expr, note: str) -> tuple[Put, Signal]:
        """Return the copy of one block of the own shard to a rank, and the signal after it."""
        slot = self.place if self.axis is None else Bin("+", Bin("*", self.block, Lit(self.ranks)), self.place)
        copy = Put(self.shard, self.mine, to, self.gather.over, span=self.gather.span, note=note)
        return copy, Signal(self.flags, slot, ARRIVED, to, self.gather.over, span=self.gather.span)

    def each(self, done: Iterable[Statement]) -> list[Statement]:
        """Return the statements, in a loop over the blocks of the own shard if there are several."""
        if self.axis is None:
            return [*done]
        return [For(self.block.value, self.blocks, (*self.views, *done), span=self.gather.span)]

    def views_of(self, x: Value) -> tuple[list[ViewStatement], Value, Value]:
        """Return views of the own shard, or of one of its blocks, and of its place in the buffer."""
        views: list[ViewStatement] = []
        full, span = self.full, self.gather.span
        if self.axis is not None:
            x, full = (self.one_of(v, self.block, views) for v in (x, full))
        mine = Value(self.host.names.fresh("mine"), x.tensor, span)
        views.append(Shard(full, mine, span=span))
        return views, x, mine

    def one_of(self, value: Value, block: Ref, views: list[ViewStatement]) -> Value:
        """Return a view of one block of the rows, added to `views`."""
        axes, k = value.tensor.axes, self.axis
        assert k is not None
        name = self.host.names.fresh(f"{value.name}_{block.value.name}")
        if axes[k].marks:
            rest = Axis(tuple(replace(f, extent=f.extent / self.blocks) for f in axes[k].factors))
            out = Value(name, value.tensor.with_axes(rest if i == k else a for i, a in enumerate(axes)), value.span)
            views.append(Chunk(value, out, block, self.blocks, k, span=self.gather.span))
        else:
            out = Value(name, value.tensor.with_axes(a for i, a in enumerate(axes) if i != k), value.span)
            views.append(Select(value, out, block, k, span=self.gather.span))
        return out

    def multiply(self, s: Contraction) -> None:
        """Add the matmul that waits for the blocks. After it all copies have ended, and others may read the rows."""
        self.host.destination(s.out)
        moved = s.rename(self.host.values)
        assert isinstance(moved, Contraction)
        note = "own rows first, each other block when it is there"
        own = None if self.copies_own else self.shard
        waits = replace(moved, a=self.full, ready=self.flags, epoch=ARRIVED, first=self.place, own=own, note=note)
        self.host.body.append(waits)
        self.join_copies()

    def arrive(self) -> None:
        """Make the caller's stream wait for all blocks, if something other than a matmul needs them first."""
        block = self.peers.index("i")
        self.host.body.append(For(block.value, self.blocks * self.ranks, (WaitSignal(self.flags, block, ARRIVED),)))
        self.join_copies()

    def join_copies(self) -> None:
        """Join this rank's copy streams once all blocks have arrived, and copy the rows if they are needed whole."""
        body, span = self.host.body, self.gather.span
        last = SIGNAL_STREAM if self.workers > 1 else COPY_STREAM  # whose last signal follows all copies
        body.append(Synchronize(last))
        if self.whole:
            body.append(DenseCopy(out=self.whole, x=self.full, span=span, note=f"copy: {self.whole} is wanted whole"))


@dataclass(frozen=True)
class Fused(Pass):
    """Copies shards to all peers instead of an allgather of rows, and a matmul that waits for each block of them."""

    name = "fused"
    pushes: ClassVar[type[ShardPush]] = ShardPush
    streams: int = 4

    def run(self, program: Program) -> Program:
        why_not = "the rows of a rank lie over several axes of the mesh, and a shard in no equal blocks of them"
        gathers = Gathers.of(program, self.name).only(_in_blocks, why_not)
        blocked, rows = with_block_axes(gathers.with_reasons(program, self.name), gathers.rows, _needs_block_axes)
        host = Host(_matmuls_first(blocked, rows))
        peers = Peers(host) if rows else None
        flying: dict[str, ShardPush] = {}  # by the gathered tensor: the copies that the caller's stream has not joined
        workers = 0
        for s in host.program.body:
            if peers and isinstance(s, AllGather) and s in rows:
                push = flying[s.out.name] = self.pushes(host, peers, s, self.streams)
                workers = max(workers, push.workers)
                continue
            pushes = [flying.pop(v.name) for v in s.values(Codec.READ, Codec.ALIAS) if v.name in flying]
            if len(pushes) == 1 and isinstance(s, Contraction) and reads_rows(s, pushes[0].gather.out):
                pushes[0].multiply(s)
                continue
            for push in pushes:
                push.arrive()
            host.whole(s)
        return host.finished(workers)


# By SMs ---------------------------------------------------------------------------------------------------------------
# Pass `push`: as `fused`, with copies by a few SMs of the rank that has the rows, in one kernel before the matmul.
#
# For few rows: a kernel begins to write to peers, and sets flags after that, in less time than copy engines take to
# begin. The matmul behind it starts while it copies. Kernels that store to peers are how low-latency collectives work
# in NCCL (its LL protocols) and in the one-shot kernels of TensorRT-LLM and of torch's symmetric memory.

SMS = 16  # that copy: fewer do not fill the links, more leave too few to the matmul


class KernelPush(ShardPush):
    """One allgather: copies to all ranks, this one first, on the caller's stream, before the matmul."""

    copies_own = True  # the same few SMs copy to all

    def workers_of(self, streams: int) -> int:
        return 0

    def copies(self) -> None:
        body, turn = self.host.body, self.peers.index("i")
        body += self.peers.barrier(self.gather, self.full)
        body += self.views if self.axis is None else ()
        before = modulo(Bin("+", self.place, Bin("-", Lit(self.ranks), turn)), self.ranks)
        copy, signal = self.push(before, "to itself, then to the rank that multiplies these rows next")
        body += self.each([For(turn.value, Size(self.ranks), (replace(copy, sms=SMS), signal), span=self.gather.span)])

    def join_copies(self) -> None:
        if self.whole:
            note = f"copy: {self.whole} is wanted whole"
            self.host.body.append(DenseCopy(out=self.whole, x=self.full, span=self.gather.span, note=note))


@dataclass(frozen=True)
class Pushed(Fused):
    """Copies shards by SMs instead of an allgather of rows, and a matmul that starts beside them."""

    name = "push"
    pushes: ClassVar[type[ShardPush]] = KernelPush
