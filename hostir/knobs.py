"""Knobs: every environment variable that hostir reads.

An argument of a call overrides a surrounding ``with knobs.scope(...)``. A scope overrides the environment variable::

    with knobs.scope(spec=2):
        program = hostir.lower(fusion)  # checks as HOSTIR_SPEC=2 would
    timeout = knobs.TIMEOUT.get(argument)  # `argument` is None if the caller passes no timeout

Every value is checked in the same way, so a bad value raises the same message wherever it comes from. A scope is valid
in the thread or task that entered it. Threads do not inherit it: read a knob in the thread of the user's call, and pass
its value on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from hostir.ir.source import Span, described, did_you_mean, error, user_span, warn_once

__all__ = [
    "CACHE",
    "COMPARE_CALLS",
    "DUMP",
    "KEEPALIVE",
    "KERNELS",
    "KNOBS",
    "NATIVE",
    "PROFILE",
    "SPEC",
    "SYMMETRIC_LIMIT",
    "TIMEOUT",
    "TUNE",
    "Knob",
    "Row",
    "check_environment",
    "scope",
    "set_by_launcher",
    "table",
]

T = TypeVar("T")

PREFIX = "HOSTIR_"


class UnknownVariableWarning(UserWarning):
    """Warns that an environment variable HOSTIR_... is ignored, because hostir has no knob of this name."""


_scoped: ContextVar[Mapping[str, object]] = ContextVar("hostir_knobs")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One setting.

    Args:
        name: the environment variable.
        default: the value if nothing sets it.
        expected: a description of the valid values, for errors and for the documentation.
        parse: converts text to a value; raises ValueError for invalid text.
        doc: the effect of the setting.
    """

    name: str
    default: T
    expected: str
    parse: Callable[[str], T]
    doc: str

    @property
    def keyword(self) -> str:
        """The knob's keyword in ``scope``: ``HOSTIR_SPEC`` is ``spec``."""
        return self.name.removeprefix(PREFIX).lower()

    def get(self, argument: T | str | None = None) -> T:
        """Return the knob's value: from `argument`, else from the innermost scope, else from the environment.

        An argument of None sets nothing. If nothing sets the knob, return its default. Raises HostIRError for an
        invalid value.
        """
        if argument is not None:
            return self.check(argument, self.keyword, user_span())
        scoped = _scoped.get({})
        if self.keyword in scoped:
            return self.check(scoped[self.keyword], self.keyword)
        return self.check(os.environ.get(self.name), self.name)

    def check(self, value: object, source: str, span: Span | None = None) -> T:
        """Convert a value to the knob's type, and return it.

        If the value is None or an empty text, as in ``HOSTIR_SPEC= hostir ...``, return the default.

        Raises HostIRError for an invalid value. The message names ``source``: a keyword, or the environment variable.
        """
        try:
            text = "" if value is None else str(value)
            return self.parse(text) if text else self.default
        except Exception:  # also an error in the value's __str__
            raise error(f"{source}={described(value)}", span, expected=self.expected) from None


def set_by_launcher(variable: str, default: int) -> int:
    """Return the number in an environment variable that a launcher such as torchrun sets; `default` if it is not set.

    Raises HostIRError if the variable holds no number.
    """
    text = os.environ.get(variable, str(default))
    if text.isdecimal():
        return int(text)
    hint = f"a launcher such as torchrun sets {variable}; without a launcher, unset it"
    raise error(f"{variable}={described(text)}", expected="a number", hint=hint)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _truth(text: str) -> bool:
    return _one_of("1", "0", "True", "False")(text) in ("1", "True")


def _level(text: str) -> int:
    return int(_one_of("0", "1", "2")(text))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(text)
    return seconds


def _budget(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(text)
    return seconds


def _bytes(text: str) -> int | None:
    if (count := int(text)) < 0:
        raise ValueError(text)
    return count


def _directory(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ValueError(text)
    return path


DUMP: Knob[Path | None] = Knob(
    "HOSTIR_DUMP",
    None,
    "a directory, or a path where one can be made",
    _directory,
    "Directory into which lowering writes the program after every pass, as numbered files that can be fed back in.",
)
SPEC: Knob[int] = Knob(
    "HOSTIR_SPEC",
    1,
    "0, 1 or 2",
    _level,
    "What lowering verifies. 0: the finished program. 1: the program after every pass. 2: also that the text of each "
    "program parses back to an equal program, which verifies again.",
)
TIMEOUT: Knob[float] = Knob(
    "HOSTIR_TIMEOUT",
    30.0,
    "a number of seconds greater than 0",
    _seconds,
    "Seconds without progress after which every rank of a run ends. Each rank names the statement at which it waits.",
)
KEEPALIVE: Knob[float] = Knob(
    "HOSTIR_KEEPALIVE",
    30.0,
    "a number of seconds greater than 0",
    _seconds,
    "Seconds after which a rank counts as dead if its host does not answer. "
    "If only the process ends, the other ranks notice at once.",
)
KERNELS: Knob[str] = Knob(
    "HOSTIR_KERNELS",
    "auto",
    "auto, triton, cublas or aten",
    _one_of("auto", "triton", "cublas", "aten"),
    "The kernels that compute. triton: matmuls and sums in Triton, the rest in ATen; on a GPU, cuBLAS computes matmuls "
    "that add to their result without flags. cublas: matmuls by cuBLAS, sums in Triton, the rest in ATen. aten: all in "
    "ATen. auto on a CPU: as aten. auto on a GPU: as cublas, but matmuls that wait for flags or raise them are in "
    "Triton. With auto, the strategy `auto` on GPUs tries the kernels cublas and triton, and takes the faster ones. "
    "ATen always computes f64.",
)
CACHE: Knob[Path | None] = Knob(
    "HOSTIR_CACHE",
    None,
    "a directory, or a path where one can be made",
    _directory,
    "Directory for measurements, such as the times of `hostir tune`. "
    "If unset, it is the folder `hostir` in $XDG_CACHE_HOME or ~/.cache.",
)
SYMMETRIC_LIMIT: Knob[int | None] = Knob(
    "HOSTIR_SYMMETRIC_LIMIT",
    None,
    "a number of bytes",
    _bytes,
    "The most bytes of symmetric memory that all programs of the job, or of a process group, take on a rank. To stay "
    "within the limit, the least recently used programs release their memory. A program that alone needs more is "
    "refused. The strategy `auto` takes the fastest program within the limit. If unset, there is no limit, and each "
    "program keeps up to 4 GiB for all its sizes together.",
)

COMPARE_CALLS: Knob[bool] = Knob(
    "HOSTIR_COMPARE_CALLS",
    False,
    "1 or 0",
    _truth,
    "1: before each call, ranks on CUDA compare the calls that they make and the threads that make them. Ranks on CPUs "
    "always do. Calls that differ between ranks are then errors instead of wrong results. It costs 50 to 80 us a call.",
)

NATIVE: Knob[bool] = Knob(
    "HOSTIR_NATIVE",
    True,
    "1 or 0",
    _truth,
    "1: native code issues calls on CUDA, from the third call of each shape on: kernels, copies, and most matmuls by "
    "cuBLAS and collectives by NCCL. It is built once, by the C compiler that Triton needs, too. 0: Python issues all "
    "calls, which takes two to three times as long on the host.",
)

PROFILE: Knob[bool] = Knob(
    "HOSTIR_PROFILE",
    False,
    "1 or 0",
    _truth,
    "1: on CUDA, the work of each statement is in a range with the statement's text, for torch.profiler and as NVTX "
    "ranges for Nsight Systems. Python then issues all calls, and executors replay no CUDA graphs. 0: only calls that "
    "torch.profiler records have such ranges.",
)

TUNE: Knob[float] = Knob(
    "HOSTIR_TUNE",
    2.0,
    "a number of seconds; 0 for no trials",
    _budget,
    "Seconds that a trial may take before the first call in each range of sizes, without the time to compile. The "
    "strategy `auto` tries the best candidates, and keeps the fastest. 0: it takes the candidate that was measured "
    "before, or the one with the shortest estimate.",
)

KNOBS: tuple[Knob[Path | None] | Knob[int] | Knob[int | None] | Knob[float] | Knob[str] | Knob[bool], ...] = (
    *(DUMP, SPEC, TIMEOUT, KEEPALIVE, KERNELS, CACHE, SYMMETRIC_LIMIT, COMPARE_CALLS, NATIVE),
    *(PROFILE, TUNE),
)


def check_environment() -> None:
    """Raise HostIRError for an environment variable with an invalid value, and warn of unknown variables HOSTIR_...

    Executors and the command line call this function first. So an invalid value is reported even if its knob is never
    read. An unknown variable causes only a warning, because another version or another program may use it.
    """
    names = [knob.name for knob in KNOBS]
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in names):
        hint = did_you_mean(name.removeprefix(PREFIX), (knob_name.removeprefix(PREFIX) for knob_name in names))
        hint = hint.replace("'", f"'{PREFIX}", 1) or f"hostir reads {', '.join(names)}"
        warn_once(name, f"unknown environment variable {name} is ignored", hint, UnknownVariableWarning)
    for knob in KNOBS:
        knob.check(os.environ.get(knob.name), knob.name)


def scope(**values: object) -> AbstractContextManager[None]:
    """Set knobs for the calls inside the block: `with hi.knobs.scope(spec=2, kernels="aten")`.

    The keyword of a knob is the name of its variable in docs/environment.md, in lower case and without HOSTIR_. The
    value None sets the default. Raises HostIRError for an unknown keyword or an invalid value; then no knob is set.
    """
    knobs = {knob.keyword: knob for knob in KNOBS}
    for keyword, value in values.items():
        if keyword not in knobs:
            expected, hint = f"one of: {', '.join(knobs)}", did_you_mean(keyword, knobs)
            raise error(f"no knob is called '{keyword}'", user_span(), expected=expected, hint=hint)
        knobs[keyword].check(value, keyword, user_span())
    return _set(values)


@contextmanager
def _set(values: Mapping[str, object]) -> Iterator[None]:
    token = _scoped.set({**_scoped.get({}), **values})
    try:
        yield
    finally:
        _scoped.reset(token)


class Row(NamedTuple):
    """The row of a knob in the table of docs/environment.md."""

    name: str
    expected: str
    default: str
    doc: str


def table() -> list[Row]:
    """Return the rows of the table in docs/environment.md, one for each knob."""
    return [Row(knob.name, knob.expected, _default(knob.default), knob.doc) for knob in KNOBS]


def _default(value: object) -> str:
    """Return the text of a default, as a user would type it; `unset` for None."""
    if isinstance(value, bool):
        return str(int(value))
    return "unset" if value is None else str(value)
