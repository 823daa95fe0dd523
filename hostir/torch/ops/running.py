"""Run the fusions of operators. The first call on a process group compiles a fusion; later calls reuse it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from hostir.call.executor import Executor
from hostir.call.started import Started
from hostir.choice import Choice, Ranges
from hostir.choice.choices import FALLBACK
from hostir.choice.compiling import compiled
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error, user_span, warn_once
from hostir.job.guest import registered, resolved
from hostir.lower import AUTO, lower
from hostir.lower.pipeline import NOT_OVERLAPPED
from hostir.torch.ops.remembered import Executed, Remembered
from hostir.torch.reporting import LEDGER

DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
MAX_REMEMBERED, MAX_VARIANTS = 256, 8  # the keys that a group remembers, and the calls with one key
MACHINES = {"cpu": "gloo", "cuda": "cuda"}  # by the type of a device


@dataclass
class Settings:
    """The settings that `hostir.torch.install` changes.

    Fields:
        strategy: the strategy of all operators.
        strict: True if a call that hostir cannot run raises HostIRError. Otherwise torch runs it.
        tune: as for `hi.compile`.
        graphs: True if the caller captures calls in CUDA graphs, so that the times of replays count.
    """

    strategy: str = AUTO
    strict: bool = False
    tune: float | None = None
    graphs: bool = False

    def change(self, strategy: str, strict: bool, tune: float | None, graphs: bool) -> None:
        """Change all settings."""
        self.strategy, self.strict, self.tune, self.graphs = strategy, strict, tune, graphs


class ThreadState(threading.local):
    """The state of one thread.

    Fields:
        in_torch: True during a call that hostir has left to torch. Nested calls then also run torch's functions.
        tracing: True while a kernel runs for a tracer. The kernel then returns results without data.
        executed: what the current call of an operator has executed so far. None outside such calls.
    """

    in_torch = False
    tracing = False
    executed: Executed | None = None


SETTINGS, THREAD = Settings(), ThreadState()


class Unfit(Exception):  # noqa: N818  # no error of the user's: torch's function may run the call
    """Raised for a call that hostir cannot run. The text is the reason. All ranks raise it before they communicate."""


def leave_to_torch(name: str, group: str, why: str, torchs: Callable[[], Any]) -> Any:
    """Leave a call to torch that hostir cannot run: warn once for each reason, and return what `run_by_torch` returns.

    Raises HostIRError in strict mode.
    """
    if SETTINGS.strict:
        hint = "without strict=True, hostir.torch.install leaves it to torch"
        raise error(f"hostir cannot run {name}: {why}", user_span(), hint=hint)
    warn_once((name, why), f"torch's own function runs {name}: {why}.", "hostir.torch.report() counts the calls")
    return run_by_torch(name, group, why, torchs)


def run_by_torch(name: str, group: str, why: str, torchs: Callable[[], Any]) -> Any:
    """Count a call that torch runs, run `torchs`, and return its result. `why` is why hostir does not run the call."""
    LEDGER.left(name, group, why)
    before, THREAD.in_torch = THREAD.in_torch, True
    try:
        return torchs()
    finally:
        THREAD.in_torch = before


def do_not_remember() -> None:
    """Mark the current call of an operator as one that does more than run one executor on views of its tensors."""
    if THREAD.executed is not None:
        THREAD.executed.others = True


def dtype_of(tensors: Sequence[Tensor]) -> str:
    """Return the name that programs use for the dtype of the tensors, such as `bf16`.

    Raises Unfit if the tensors have different dtypes, or a dtype that hostir does not support.
    """
    dtype = tensors[0].dtype
    for x in tensors:
        if x.dtype != dtype:
            raise Unfit(f"operands of several dtypes, {', '.join(sorted({str(x.dtype) for x in tensors}))}")
    if dtype not in DTYPES:
        raise Unfit(f"its dtype is {dtype}, not one of {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]


class OperatorGroup:
    """A process group, and the executors of the fusions that operators run on this group.

    Fields:
        name: the name of the process group.
        process_group: the process group.
        size: the number of ranks.
        compiled: the executors, by the arguments of `program`. If a fusion cannot be compiled, the reason takes the
            place of the executor.
        remembered: calls that later calls with the same layouts repeat. The keys are results of `key_of`. Calls with
            one key differ in strides, dtypes or modes of torch.
    """

    def __init__(self, name: str, process_group: Any) -> None:
        self.name, self.process_group = name, process_group
        self.size: int = process_group.size()
        self.compiled: dict[tuple[Any, ...], Executor | str] = {}
        self.remembered: dict[tuple[Any, ...], tuple[Remembered, ...]] = {}
        self._locks: dict[tuple[Any, ...], threading.RLock] = {}  # held while the executor of a key is compiled

    def remember(self, key: tuple[Any, ...], call: Remembered | None) -> None:
        """Keep `call` for later calls with the same key. If `call` is None, do nothing."""
        if call is None:
            return
        if len(self.remembered) >= MAX_REMEMBERED:
            self.remembered.clear()
        self.remembered[key] = (call, *self.remembered.get(key, ()))[:MAX_VARIANTS]

    def program(
        self, build: Callable[..., Program], *key: Any, strategy: str, device: torch.device, calls: str = "eager"
    ) -> Executor:
        """Return the executor of the fusion `build(size, *key)`. The first call compiles it.

        Raises Unfit if the fusion cannot be compiled. `calls` is as for `hi.compile`.
        """
        name = (build, strategy, device.type, calls, *key)
        executor = self.compiled.get(name)
        if executor is None:
            # One lock for each key: two ranks may compile two keys in opposite order, and must not block each other.
            with self._locks.setdefault(name, threading.RLock()):
                executor = self.compiled.get(name)
                if executor is None:
                    executor = self._compile(partial(build, self.size, *key), strategy, device, calls)
                    self.compiled[name] = executor
        if isinstance(executor, str):
            raise Unfit(executor)
        return executor

    def _compile(self, build: Callable[[], Program], strategy: str, device: torch.device, calls: str) -> Executor | str:
        if device.type not in MACHINES:
            return f"its tensors are on {device}"
        machine = MACHINES[device.type]
        try:
            options: dict[str, Any] = {"calls": calls, "machine": machine, "group": self.process_group}
            executor = compiled(build(), strategy, **options, tune=SETTINGS.tune, warn=False)
        except HostIRError:
            try:  # a fusion that cannot be lowered fails on all ranks; another failure may occur on this rank only
                lower(build(), "sequential" if strategy == AUTO else strategy)
            except HostIRError as refused:
                return refused.diagnostics[0].message
            raise
        if self.process_group.rank() == 0:
            warn_fallback(self.name, executor.choice)
        return executor


def warn_fallback(group: str, choice: Choice | Ranges) -> None:
    """Warn if the program of `choice` does not overlap.

    There is one warning for each reason, even if the reason applies to many operators.
    """
    taken = choice.choice(choice.largest) if isinstance(choice, Ranges) else choice
    of_machine = tuple(it for it in taken.impossible if it.warn)
    # Prefer reasons that lie in the machine: users cannot change what an operator computes.
    taken = replace(taken, impossible=of_machine or taken.impossible)
    notes = [note for note in taken.notes if f" is {NOT_OVERLAPPED}: " in note]
    clauses = [*taken.fallbacks, *notes]
    if not clauses:
        return
    nothing = ", and overlaps nothing" if taken.source == FALLBACK else ""
    runs = f"hostir.torch runs {taken.fusion} by '{taken.taken}' on group '{group}'{nothing}"
    hint = "hostir.torch.report() says how every operator ran, and why; the same reason is not told again"
    reasons = frozenset(it.reason for it in taken.impossible if taken.fallbacks)
    warn_once(("operators", reasons, *notes), f"{runs}: {'; '.join(clauses)}.", hint, first=True)


_resolve: Callable[[Any], Any] = _resolve_process_group
_groups: dict[str, OperatorGroup] = {}
_adding = threading.Lock()  # held while a group is added


def group_named(name: str) -> OperatorGroup:
    """Return the `OperatorGroup` of the process group `name`. Raises HostIRError if torch has no such group."""
    try:
        latest = _groups[name]
        if latest.process_group is _resolve(name):  # torch reuses the names of destroyed groups
            return latest
    except (KeyError, RuntimeError, ValueError):  # a new group, or a destroyed one
        pass
    with _adding:
        known = _groups.get(name)
        if known is None or known.process_group is not registered(name):
            for other, group in list(_groups.items()):
                if group.process_group is not registered(other):  # destroyed, but this reference keeps it alive
                    del _groups[other]
            known = _groups[name] = OperatorGroup(name, resolved(name))
        return known


class OperatorCall:
    """One call of an operator.

    Fields:
        name: the operator's name in the report.
        group: the group that the operator runs on.
    """

    __slots__ = ("group", "name")

    def __init__(self, name: str, group_name: str) -> None:
        self.name, self.group = name, group_named(group_name)

    def execute(
        self,
        build: Callable[..., Program],
        key: tuple[Any, ...],
        inputs: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        dtype: str = "",
    ) -> tuple[Tensor, ...]:
        """Run a fusion on this rank, and return this rank's parts of its outputs.

        Raises Unfit if the fusion cannot be compiled.

        Args:
            build: a function that returns the fusion. It is called as `build(ranks, dtype, *key)`.
            key: the arguments for the parameters of `build` that follow `dtype`.
            inputs: this rank's parts of the fusion's inputs.
            out: tensors that the outputs are written to. By default the outputs are new tensors.
            dtype: the name of the fusion's dtype. By default, it is the dtype of the inputs, and all inputs must have
                the same dtype.
        """
        executor = self._executor(build, key, inputs, "eager" if out is None else "out", dtype)
        outputs = self._call(executor, executor, inputs, out=out)
        LEDGER.ran(self.name, self.group.name, executor)
        if (executed := THREAD.executed) is not None:
            executed.note(executor, inputs, outputs, into=out is not None)
        return outputs

    def start(self, build: Callable[..., Program], key: tuple[Any, ...], inputs: Sequence[Tensor]) -> Started:
        """Start a fusion asynchronously, and return a handle. The handle's method `wait` returns the outputs.

        The fusion overlaps everything that the caller computes before it calls `wait`. The parameters are as for
        `execute`. Raises Unfit if the fusion cannot be compiled.
        """
        executor = self._executor(build, key, inputs, "eager")
        do_not_remember()
        started: Started = self._call(executor, executor.start, inputs)
        LEDGER.ran(self.name, self.group.name, executor, started=True)
        return started

    def _call(self, executor: Executor, call: Callable[..., Any], inputs: Sequence[Tensor], **options: Any) -> Any:
        """Call `call`, a method of `executor`, under this operator's name.

        The ranks compare the name, so a call can only be paired with calls of the same operator on other ranks.
        """
        calls = executor.calls
        # A signal handler may make another call during this one. It is refused, and must restore this call's name.
        before, calls.operator = calls.operator, self.name
        try:
            return call(*inputs, **options)
        finally:
            calls.operator = before

    def _executor(
        self, build: Callable[..., Program], key: tuple[Any, ...], inputs: Sequence[Tensor], calls: str, dtype: str = ""
    ) -> Executor:
        dtype, device = dtype or dtype_of(inputs), inputs[0].device
        calls = "graph" if SETTINGS.graphs else calls
        return self.group.program(build, dtype, *key, strategy=SETTINGS.strategy, device=device, calls=calls)
