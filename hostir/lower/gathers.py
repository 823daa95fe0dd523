"""Allgathers whose result a matmul reads by rows, and how the shards lie in them; for `ring`, `fused` and `push`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather, Collective, Communication
from hostir.ir.op import Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size, product
from hostir.ir.tensor_ops import Linear, Matmul, Reshape
from hostir.ir.types import Axis
from hostir.lower.host import isolate
from hostir.lower.pipeline import with_reasons
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import SlicePlace

# Which they are -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathers:
    """The allgathers of a program whose rows matmuls read, and reasons why its other communications stay whole."""

    program: Program
    rows: tuple[AllGather, ...]
    reasons: Mapping[str, str]  # by the result of a communication

    @staticmethod
    def of(program: Program, strategy: str) -> Gathers:
        moves = [s for s in program.body if isinstance(s, Communication) and not _of_one_rank(s)]
        reasons = {s.out.name: why for s in moves if (why := _why_whole(s, program, strategy))}
        rows = [s for s in moves if isinstance(s, AllGather) and s.out.name not in reasons]
        return Gathers(program, tuple(rows), reasons)

    def only(self, fits: Callable[[AllGather], bool], why_not: str) -> Gathers:
        """Keep the allgathers that fit; the others get `why_not` as their reason."""
        out = {s.out.name: why_not for s in self.rows if not fits(s)}
        rows = tuple(s for s in self.rows if s.out.name not in out)
        return Gathers(self.program, rows, {**self.reasons, **out})

    def noted(self, strategy: str) -> Gathers:
        """Write the reasons into the program; raise if it communicates but gathers no rows for a matmul."""
        if self.rows or not self.reasons:
            return replace(self, program=with_reasons(self.program, self.reasons))
        s = next(s for s in self.program.body if result_of(s).name in self.reasons)
        raise s.fail(
            f"'{strategy}' cannot overlap the {s.keyword()}: {self.reasons[result_of(s).name]}",
            expected="an allgather of the rows of a matmul's left side",
            hint="use 'pipeline', which slices any communication along a Stream axis, or 'sequential'",
        )

    def with_block_axes(self, wanted: Callable[[AllGather], bool]) -> Gathers:
        """Rewrite the allgathers that want block axes, and their matmuls, to tensors that have them."""
        names = Names.of(self.program)
        full: dict[str, Value] = {}  # by what was gathered: the same with block axes
        body: list[Statement] = []
        rows: list[AllGather] = []
        for s in self.program.body:
            if isinstance(s, AllGather) and s in self.rows:
                if wanted(s):
                    axes = block_axes(s)
                    shard = _like(s.x, axes, names)
                    full[s.out.name] = _like(s.out, tuple(a.without(s.over) for a in axes), names)
                    rows.append(replace(s, x=shard, out=full[s.out.name]))
                    body += [Reshape(s.x, shard, span=s.span), rows[-1]]
                    whole = wanted_otherwise(self.program, s.out)
                    body += [Reshape(rows[-1].out, s.out, span=s.span)] if whole else []
                    continue
                rows.append(s)
            if isinstance(s, (Matmul, Linear)) and s.a.name in full and reads_rows(s, s.a):
                a = full[s.a.name]
                out = _like(s.out, (*a.tensor.axes[:-1], s.out.tensor.axes[-1]), names)
                body += [replace(s, a=a, out=out), Reshape(out, s.out, span=s.span)]
            else:
                body.append(s)
        return replace(self, program=self.program.with_body(body), rows=tuple(rows))


def _like(value: Value, axes: tuple[Axis, ...], names: Names) -> Value:
    return Value(names.fresh(f"{value.name}_blocks"), value.tensor.host().with_axes(axes), value.span)


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
    reads = [v.name for v in operands_of(s)]
    return isinstance(s, (Matmul, Linear)) and s.a.name == rows.name and reads.count(rows.name) == 1


def first_matmul(program: Program, s: AllGather) -> Statement | None:
    """Return the first matmul that reads the rows as its left side, and nothing else that depends on them."""
    after: set[str] = set()  # computed from the rows
    for user in program.body:
        reads = [v.name for v in operands_of(user)]
        if reads_rows(user, s.out) and after.isdisjoint(reads):
            return user
        if s.out.name in reads or not after.isdisjoint(reads):
            after.add(result_of(user).name)
    return None


def wanted_otherwise(program: Program, rows: Value) -> bool:
    """Whether a tensor is an output, or read by anything but matmuls that have it as their left side."""
    users = [s for s in program.body if any(v.name == rows.name for v in operands_of(s))]
    return rows in program.outputs or not all(reads_rows(s, rows) for s in users)


# How the shards lie ---------------------------------------------------------------------------------------------------


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
