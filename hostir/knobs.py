"""Every environment variable that hostir reads.

A knob is set, the strongest first, by the argument of a call, by a surrounding ``with knobs.scope(...)``, or by the
environment::

    with knobs.scope(spec=2):
        program = hostir.lower(fusion)  # checks as HOSTIR_SPEC=2 would
    timeout = knobs.TIMEOUT.get(argument)  # argument, or None where the caller gave none

All three are checked alike, so a bad value is refused in the same words wherever it comes from. A scope holds for the
thread or task that entered it. Threads do not inherit it: read a knob where the user's call arrives, and pass its value
on.
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
    "SPEC",
    "SYMMETRIC_LIMIT",
    "TIMEOUT",
    "Knob",
    "Row",
    "check_environment",
    "scope",
    "table",
]

T = TypeVar("T")

PREFIX = "HOSTIR_"


class UnknownVariableWarning(UserWarning):
    """A variable HOSTIR_... is ignored, as hostir has none of this name."""


_scoped: ContextVar[Mapping[str, object]] = ContextVar("hostir_knobs")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One setting.

    Args:
        name: the environment variable.
        default: the value where nothing sets it.
        expected: the values it accepts, in words, for errors and for the documentation.
        parse: makes a value from text; raises ValueError for text that it does not accept.
        doc: what the setting does.
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
        """The value in force: the argument's unless it is None, else the innermost scope's, else the environment's.

        Raises HostIRError for a value that the knob does not accept.
        """
        if argument is not None:
            return self.check(argument, self.keyword, user_span())
        scoped = _scoped.get({})
        if self.keyword in scoped:
            return self.check(scoped[self.keyword], self.keyword)
        return self.check(os.environ.get(self.name), self.name)

    def check(self, value: object, given_as: str, span: Span | None = None) -> T:
        """Return the typed value. None and empty text stand for the default, as in ``HOSTIR_SPEC= hostir ...``.

        Raises HostIRError for a value that the knob does not accept; the message calls the knob ``given_as``.
        """
        try:
            text = "" if value is None else str(value)
            return self.parse(text) if text else self.default
        except Exception:  # also what the value's own __str__ raises
            raise error(f"{given_as}={described(value)}", span, expected=self.expected) from None


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
    "What lowering verifies: 0 the finished program, 1 the program after every pass, 2 also that each of these prints, "
    "parses back equal, and verifies again.",
)
TIMEOUT: Knob[float] = Knob(
    "HOSTIR_TIMEOUT",
    30.0,
    "a number of seconds greater than 0",
    _seconds,
    "Seconds without progress after which every rank of a run ends, each naming the statement at which it waits.",
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
    "Which kernels compute: Triton; cuBLAS with sums in Triton (cublas); ATen; or (auto) the ones for the device: ATen "
    "on a CPU. f64 is always ATen's.",
)
CACHE: Knob[Path | None] = Knob(
    "HOSTIR_CACHE",
    None,
    "a directory, or a path where one can be made",
    _directory,
    "Directory for measurements that are kept, such as those of `hostir tune`; "
    "if unset, the folder `hostir` in $XDG_CACHE_HOME or ~/.cache.",
)
SYMMETRIC_LIMIT: Knob[int | None] = Knob(
    "HOSTIR_SYMMETRIC_LIMIT",
    None,
    "a number of bytes",
    _bytes,
    "The most bytes of symmetric memory that the programs of the job, or of a process group, may take on a rank "
    "together: what was not used longest makes room. A program that alone takes more is refused; the strategy `auto` "
    "takes the fastest that takes no more. If unset, there is no limit, and each program keeps up to 4 GiB.",
)

COMPARE_CALLS: Knob[bool] = Knob(
    "HOSTIR_COMPARE_CALLS",
    False,
    "1 or 0",
    _truth,
    "Whether ranks on CUDA compare each call before it runs, and the thread that makes it, as ranks on CPUs always do. "
    "It costs about 50 us, and turns calls that do not line up into errors instead of wrong results.",
)

KNOBS: tuple[Knob[Path | None] | Knob[int] | Knob[int | None] | Knob[float] | Knob[str] | Knob[bool], ...] = (
    *(DUMP, SPEC, TIMEOUT, KEEPALIVE, KERNELS, CACHE, SYMMETRIC_LIMIT, COMPARE_CALLS),
)


def check_environment() -> None:
    """Raise HostIRError for a variable with a value that its knob does not accept; warn of HOSTIR_... that is no knob.

    Executors and the command line begin with it, so that a mistake is not found only where a knob is first read. An
    unknown variable may be of another version, or of another program.
    """
    names = [knob.name for knob in KNOBS]
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in names):
        hint = did_you_mean(name.removeprefix(PREFIX), (known.removeprefix(PREFIX) for known in names))
        hint = hint.replace("'", f"'{PREFIX}", 1) or f"hostir reads {', '.join(names)}"
        warn_once(name, f"unknown environment variable {name} is ignored", hint, UnknownVariableWarning)
    for knob in KNOBS:
        knob.check(os.environ.get(knob.name), knob.name)


def scope(**values: object) -> AbstractContextManager[None]:
    """Set knobs for the calls inside the block: `with hi.knobs.scope(spec=2, kernels="aten")`.

    The names are those of docs/environment.md without HOSTIR_, in lower case. None stands for the default. Raises
    HostIRError for an unknown name or a value that the knob does not accept, before anything is set.
    """
    known = {knob.keyword: knob for knob in KNOBS}
    for keyword, value in values.items():
        if keyword not in known:
            expected, hint = f"one of: {', '.join(known)}", did_you_mean(keyword, known)
            raise error(f"no knob is called '{keyword}'", user_span(), expected=expected, hint=hint)
        known[keyword].check(value, keyword, user_span())
    return _set(values)


@contextmanager
def _set(values: Mapping[str, object]) -> Iterator[None]:
    token = _scoped.set({**_scoped.get({}), **values})
    try:
        yield
    finally:
        _scoped.reset(token)


class Row(NamedTuple):
    """A knob as a row of the documentation."""

    name: str
    expected: str
    default: str
    doc: str


def table() -> list[Row]:
    """Return one row for each knob, in the order in which they are documented."""
    return [Row(knob.name, knob.expected, _default(knob.default), knob.doc) for knob in KNOBS]


def _default(value: object) -> str:
    """Return a default as one would type it."""
    if isinstance(value, bool):
        return str(int(value))
    return "unset" if value is None else str(value)
