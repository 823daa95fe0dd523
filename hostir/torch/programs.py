"""Make the programs of torch's operators: one fusion for each kind of operator, compiled once for each group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hostir.choice import Choice, Ranges
from hostir.choice.choices import FALLBACK
from hostir.choice.compiling import compiled
from hostir.choice.overlaps import overlap_clauses
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, amount, check_known, warn_once
from hostir.lower import AUTO, STRATEGIES, lower
from hostir.lower.pipeline import NOT_OVERLAPPED
from hostir.runtime.executor import Executor
from hostir.runtime.guest import registered, resolved

# Fusions --------------------------------------------------------------------------------------------------------------
# As texts, with the numbers of rows free: M along the axis that is gathered or scattered, P0, P1, ... along those
# beside it, of which the first `outside` ones come before it. Communication has M outermost: `permute` brings it there.
# Operands may have any strides; where memory must be dense, lowering says `copy`, or `dense` if it may be so already.

DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
MACHINES = {"cpu": "gloo", "cuda": "cuda"}  # by the type of a device


def _fusion(name: str, ranks: int, inputs: Sequence[str], outputs: Sequence[str], body: Sequence[str]) -> Program:
    mesh = " ".join(map(str, range(ranks)))
    head = f"fusion @{name}({', '.join(inputs)}) -> ({', '.join(outputs)})"
    lines = "".join(f"  {line}\n" for line in body)
    return parse(f"hostir 1\nmesh @mesh [didx] = {mesh}\n{head} {{\n{lines}}}\n", f"@{name}")


def _extra_sizes(count: int) -> list[str]:
    return [f"P{i}" for i in range(count)]


def _type(dtype: str, *sizes: Any) -> str:
    return f"{dtype}[{', '.join(map(str, sizes))}]"


def _in_front(x: str, dtype: str, sizes: Sequence[Any], outside: int, partial: str = "") -> tuple[str, list[str], str]:
    """Return an operand with its type, the statements that bring the first of `sizes` outermost, and its name then."""
    first, before, after = sizes[0], sizes[1 : outside + 1], sizes[outside + 1 :]
    if not outside:
        return f"{x}: {_type(dtype, *sizes)}{partial}", [], x
    order = (outside, *range(outside), *range(outside + 1, len(sizes)))
    seen = f"{x}_front: {_type(dtype, *sizes)}{partial} = permute {x} {order}"
    return f"{x}: {_type(dtype, *before, first, *after)}{partial}", [seen], f"{x}_front"


def all_gather_matmul(
    ranks: int, dtype: str, K: int, columns: tuple[int, ...], extra: int, outside: int, gathered: bool, gated: bool
) -> Program:
    """`a`, of which each rank has rows, gathered and multiplied with matrices of so many columns each."""
    others = _extra_sizes(extra)
    a, body, front = _in_front("%a", dtype, ("M@didx", *others, K), outside)
    return _multiplied(ranks, dtype, ("M", *others, K), columns, a, [*body, f"reshard {front}"], gathered, gated)


def all_gather_columns_matmul(
    ranks: int, dtype: str, K: int, columns: tuple[int, ...], extra: int, slices: int, gathered: bool, gated: bool
) -> Program:
    """`a`, of which each rank has columns, gathered and multiplied; `slices` divides the outermost axis."""
    rows = (f"{slices}*M", *_extra_sizes(extra))
    a = f"%a: {_type(dtype, *rows, f'{K}@didx')}"
    return _multiplied(ranks, dtype, (*rows, K), columns, a, ["reshard %a"], gathered, gated)


def _multiplied(
    ranks: int,
    dtype: str,
    sizes: tuple[Any, ...],
    columns: tuple[int, ...],
    a: str,
    gather: list[str],
    gathered: bool,
    gated: bool,
) -> Program:
    """Return the program of what is gathered, of these sizes, and multiplied; `silu(c0) * c1` of two products `gated`.

    `gather`: the statements before the products, of which the last gathers.
    """
    *rows, K = sizes
    *body, last = gather
    body.append(f"%a_full: {_type(dtype, *sizes)} = {last}")
    body += [f"%c{i}: {_type(dtype, *rows, n)} = matmul %a_full, %b{i}" for i, n in enumerate(columns)]
    outputs = [f"%c{i}" for i in range(len(columns))]
    if gated:
        result = _type(dtype, *rows, columns[0])
        body += [f"%s: {result} = silu %c0", f"%y: {result} = mul %s, %c1"]
        outputs = ["%y"]
    inputs = [a, *(f"%b{i}: {_type(dtype, K, n)}" for i, n in enumerate(columns))]
    name = "all_gather_gated" if gated else "all_gather_matmul"
    return _fusion(name, ranks, inputs, outputs + ["%a_full"] * gathered, body)


def matmul_reduce_scatter(
    ranks: int, dtype: str, K: int, columns: int, extra: int, outside: int, result: str
) -> Program:
    """The sum over all ranks of `a @ b`, of which each gets rows; in the dtype `result`, which may be a wider one."""
    others, part = _extra_sizes(extra), "M@didx"
    a, body, front = _in_front("%a", dtype, ("M", *others, f"{K}@didx"), outside)
    inputs = [a, f"%b: {_type(dtype, f'{K}@didx', columns)}"]
    product = f"{_type(result, part, *others, columns)}"
    if extra > 1:  # kernels take rows of two strides, not of more
        rows = "*".join(others)
        body += [f"%a_rows: {_type(dtype, 'M', rows, f'{K}@didx')} = reshape {front}"]
        body += _summed("%c_rows", (part, rows, columns), "matmul %a_rows, %b", dtype, result)
        body += [f"%c0: {product} = reshape %c_rows"]
    else:
        body += _summed("%c0", (part, *others, columns), f"matmul {front}, %b", dtype, result)
    if outside:
        order = (*range(1, outside + 1), 0, *range(outside + 1, extra + 2))
        back = _type(result, *others[:outside], part, *others[outside:], columns)
        body += [f"%c_back: {back} = permute %c0 {order}", f"%c: {back} = copy %c_back"]
    return _fusion("matmul_reduce_scatter", ranks, inputs, ["%c" if outside else "%c0"], body)


def _summed(name: str, sizes: Sequence[Any], product: str, dtype: str, result: str) -> list[str]:
    """Return the statements of a product's sum over all ranks, of which each gets a part; in a wider dtype if asked."""
    if result == dtype:
        return [f"{name}: {_type(dtype, *sizes)} = {product}"]
    whole = [str(n).removesuffix("@didx") for n in sizes]
    return [
        f"%part: {_type(dtype, *whole)} partial(didx) = {product}",
        f"%wide: {_type(result, *whole)} partial(didx) = cast %part to {result}",
        f"{name}: {_type(result, *sizes)} = reshard %wide",
    ]


def matmul_reduce_scatter_columns(ranks: int, dtype: str, K: int, columns: int, extra: int, result: str) -> Program:
    """The sum over all ranks of `a @ b`, of which each gets columns."""
    rows = ("M", *_extra_sizes(extra))
    inputs = [f"%a: {_type(dtype, *rows, f'{K}@didx')}", f"%b: {_type(dtype, f'{K}@didx', columns)}"]
    body = _summed("%c", (*rows, f"{columns}@didx"), "matmul %a, %b", dtype, result)
    return _fusion("matmul_reduce_scatter", ranks, inputs, ["%c"], body)


def all_gather(ranks: int, dtype: str, extra: int, outside: int) -> Program:
    """The parts of all ranks along an axis, which is then outermost."""
    x, body, front = _in_front("%x", dtype, ("M@didx", *_extra_sizes(extra)), outside)
    return _fusion(
        "all_gather", ranks, [x], ["%y"], [*body, f"%y: {_type(dtype, 'M', *_extra_sizes(extra))} = reshard {front}"]
    )


def reduce_scatter(ranks: int, dtype: str, extra: int, outside: int, result: str) -> Program:
    """The sum over all ranks, of which each gets a part along an axis, which is then outermost; in a wider dtype if

    `result` is one.
    """
    x, body, front = _in_front("%x", dtype, ("M", *_extra_sizes(extra)), outside, " partial(didx)")
    if result != dtype:
        body.append(f"%wide: {_type(result, 'M', *_extra_sizes(extra))} partial(didx) = cast {front} to {result}")
        front = "%wide"
    y = f"%y: {_type(result, 'M@didx', *_extra_sizes(extra))} = reshard {front}"
    return _fusion("reduce_scatter", ranks, [x], ["%y"], [*body, y])


def matmul_all_reduce(ranks: int, dtype: str, K: int, columns: int, extra: int, addend: int) -> Program:
    """The sum over all ranks of `a @ b`, for each; with an addend of 1 axis, or of as many as the result has."""
    others = _extra_sizes(extra)
    rows = "*".join(("M", *others))
    a, b = f"%a: {_type(dtype, 'M', *others, f'{K}@didx')}", f"%b: {_type(dtype, f'{K}@didx', columns)}"
    body, left, z = [], "%a", "%z"
    if extra:
        body, left = [f"%a_rows: {_type(dtype, rows, f'{K}@didx')} = reshape %a"], "%a_rows"
    if extra and addend > 1:
        z = "%z_rows"
        body.append(f"%z_rows: {_type(dtype, rows, columns)} = reshape %z")
    body.append(f"%y0: {_type(dtype, rows, columns)} = matmul {left}, %b")
    last = "%y0"
    if addend:
        body.append(f"%y1: {_type(dtype, rows, columns)} = add {last}, {z}")
        last = "%y1"
    if extra:
        body.append(f"%y: {_type(dtype, 'M', *others, columns)} = reshape {last}")
        last = "%y"
    third = [f"%z: {_type(dtype, *(('M', *others) if addend > 1 else ()), columns)}"] if addend else []
    return _fusion("matmul_all_reduce", ranks, [a, b, *third], [last], body)


def all_reduce(ranks: int, dtype: str) -> Program:
    """The sum over all ranks, for each."""
    x, y = f"%x: {_type(dtype, 'M', 'P')} partial(didx)", f"%y: {_type(dtype, 'M', 'P')} = reshard %x"
    return _fusion("all_reduce", ranks, [x], ["%y"], [y])


# Compiled programs ----------------------------------------------------------------------------------------------------


class Unfit(Exception):  # noqa: N818  # no error of the user's: torch's own function may do it
    """Raised, alike on all ranks and before any communication, for what hostir does not do; its text says why."""


class OperatorGroup:
    """The ranks of a process group, as the operators see them.

    Fields:
        size: the number of ranks.
        compiled: the executors made so far, by what they compute; the reason where one cannot be made.
    """

    def __init__(self, name: str, process_group: Any) -> None:
        self.name, self.process_group = name, process_group
        self.size: int = process_group.size()
        self.compiled: dict[tuple[Any, ...], Executor | str] = {}
        self._locks: dict[tuple[Any, ...], threading.RLock] = {}  # by key: held while its executor is made

    def program(
        self, build: Callable[..., Program], *key: Any, strategy: str, device: torch.device, calls: str = "eager"
    ) -> Executor:
        """Return what runs `build(size, *key)` by a strategy; `calls` as for `hi.compile`. Raises Unfit."""
        name = (build, strategy, device.type, calls, *key)
        made = self.compiled.get(name)
        if made is None:
            # Other threads wait for this key only: two ranks may make two keys in opposite order.
            with self._locks.setdefault(name, threading.RLock()):
                made = self.compiled.get(name)
                if made is None:
                    made = self.compiled[name] = self._made(partial(build, self.size, *key), strategy, device, calls)
        if isinstance(made, str):
            raise Unfit(made)
        return made

    def _made(self, build: Callable[[], Program], strategy: str, device: torch.device, calls: str) -> Executor | str:
        if device.type not in MACHINES:
            return f"its tensors are on {device}"
        machine = MACHINES[device.type]
        try:
            executor = compiled(build(), strategy, calls=calls, machine=machine, group=self.process_group, warn=False)
        except HostIRError:
            try:  # what cannot be lowered cannot be so on any rank; other failures may be of this one alone
                lower(build(), "sequential" if strategy == AUTO else strategy)
            except HostIRError as refused:
                return refused.diagnostics[0].message
            raise
        if self.process_group.rank() == 0:
            warn_fallback(self.name, executor.choice)
        return executor


def warn_fallback(group: str, choice: Choice | Ranges) -> None:
    """Warn once for each reason why operators do not overlap, however many operators it holds for."""
    taken = choice.choice(choice.largest) if isinstance(choice, Ranges) else choice
    of_machine = tuple(it for it in taken.impossible if it.warn)
    taken = replace(taken, impossible=of_machine or taken.impossible)  # users cannot change what an operator computes
    notes = [note for note in taken.notes if f" is {NOT_OVERLAPPED}: " in note]
    clauses = [*taken.fallbacks, *notes]
    if not clauses:
        return
    nothing = ", and overlaps nothing" if taken.source == FALLBACK else ""
    runs = f"hostir.torch runs {taken.fusion} by '{taken.taken}' on group '{group}'{nothing}"
    hint = "hostir.torch.report() says how every operator ran, and why; the same reason is not told again"
    reasons = frozenset(it.reason for it in taken.impossible if taken.fallbacks)
    warn_once(("operators", reasons, *notes), f"{runs}: {'; '.join(clauses)}.", hint, first=True)


_groups: dict[str, OperatorGroup] = {}
_adding = threading.Lock()  # held while a group is added


def group_named(name: str) -> OperatorGroup:
    """Return the group of this name. Raises HostIRError for one that torch does not know."""
    known = _groups.get(name)
    if known is not None and known.process_group is registered(name):  # torch reuses names after all were destroyed
        return known
    with _adding:
        known = _groups.get(name)
        if known is None or known.process_group is not registered(name):
            for other, group in list(_groups.items()):
                if group.process_group is not registered(other):  # it was destroyed, and lives on while it is kept here
                    del _groups[other]
            known = _groups[name] = OperatorGroup(name, resolved(name))
        return known


def check_taken(strategy: str) -> str:
    """Return the strategy; raise HostIRError, at the user's line, unless there is one of this name."""
    check_known("strategy", strategy, [*STRATEGIES, AUTO])
    return strategy


# The report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """Calls of one operator on one group that ran alike.

    Fields:
        operator: its name, such as `symm_mem::fused_all_gather_matmul`.
        group: the name of the process group.
        strategy: that of the program that ran, with its streams and kernels; `torch` if torch's own function ran.
        calls: the number of calls.
        why: how many communications of the program overlap with what, why it ran, and why not another.
    """

    operator: str
    group: str
    strategy: str
    calls: int
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.operator} on group '{self.group}': {self.strategy}, {self.calls} call{'s' * (self.calls != 1)}"
        return "\n".join([head, *(f"  {clause}" for clause in self.why)])


class Report(tuple[Ran, ...]):
    """The operators that ran on this rank, how and why; `print` shows a paragraph for each.

    Fields:
        symmetric_bytes: the symmetric memory that the programs of each group hold on this rank, by the group's name.
    """

    symmetric_bytes: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        held = (
            f"group '{name}' holds {amount(n)} of symmetric memory" for name, n in self.symmetric_bytes.items() if n
        )
        return "\n".join([*map(str, self), *held]) or "no operator has been called"


@dataclass
class Ledger:
    """The calls of this process, counted by operator, by the name of the group, and by what ran or why torch did.

    The last part of a key of `by_hostir` is True for calls that were started beside what their operator issued next.
    """

    by_hostir: Counter[tuple[str, str, Executor, Executor, bool]] = field(default_factory=Counter)
    by_torch: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cleared: Counter[tuple[str, str]] = field(default_factory=Counter)  # hostir's calls before the last `clear`

    def ran(self, operator: str, group: str, executor: Executor, started: bool = False) -> None:
        """Record a call that an executor has just run, or has `started` beside what comes next."""
        self.by_hostir[operator, group, executor, getattr(executor, "current", executor), started] += 1

    def left(self, operator: str, group: str, why: str) -> None:
        """Record a call that was left to torch."""
        self.by_torch[operator, group, why] += 1

    def calls(self) -> Counter[tuple[str, str]]:
        """Return the number of calls that hostir has run in this process, by operator and group; `clear` keeps it."""
        counts = Counter(self.cleared)
        for (operator, group, *_), n in list(self.by_hostir.items()):
            counts[operator, group] += n
        return counts

    def clear(self) -> None:
        """Begin the report anew."""
        self.cleared = self.calls()
        self.by_hostir.clear()
        self.by_torch.clear()

    def report(self) -> Report:
        """Return the calls, those that ran alike as one."""
        counts: Counter[tuple[str, str, str]] = Counter()
        reasons: dict[tuple[str, str, str], dict[str, None]] = {}
        rows = [
            ((op, group, *explained(executor, ran, started)), n)
            for (op, group, executor, ran, started), n in self.by_hostir.items()
        ]
        rows += [((op, group, "torch", (why,)), n) for (op, group, why), n in self.by_torch.items()]
        for (operator, group, strategy, why), count in rows:
            counts[operator, group, strategy] += count
            reasons.setdefault((operator, group, strategy), {}).update(dict.fromkeys(why))
        found = Report(Ran(*name, count, tuple(reasons[name])) for name, count in counts.items())
        sessions = {group: executor.session for _, group, executor, *_ in self.by_hostir}
        found.symmetric_bytes = {group: it.symmetric_bytes for group, it in sessions.items() if it is not None}
        return found


LEDGER = Ledger()


def explained(executor: Executor, ran: Executor, started: bool) -> tuple[str, tuple[str, ...]]:
    """Return the strategy of the program that ran, and why it was taken and no other."""
    choice, call = executor.choice, ran.latest
    overlapping = () if call is None else overlap_clauses(call.plan.unrolled)
    if started and ran.machine == "cuda":  # elsewhere a call has ended when `start` returns
        overlapping = (*overlapping, "it was started beside the computations that its operator issued next")
    if isinstance(choice, Choice):
        return str(choice.taken), (f"{choice.source} on {choice.machine}", *overlapping, *choice.notes)
    taken = next(candidate for candidate, made in executor.executors.items() if made is ran)  # type: ignore[attr-defined]
    choices = [c for c in choice.choices.values() if c.taken == taken] or list(choice.choices.values())
    why = [clause for c in choices for clause in (f"{c.source} on {c.machine}", *overlapping, *c.notes)]
    why += [f"not {it.candidate}: {it.reason}" for c in choices for it in c.impossible]
    why += [
        f"not {it.candidate}: estimated or measured slower"
        for c in choices
        for it in c.timings
        if it.candidate != taken
    ]
    return str(taken), tuple(dict.fromkeys(why))
