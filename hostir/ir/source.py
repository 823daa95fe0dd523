"""Report mistakes: format values and names for messages, and define spans, diagnostics, errors, warnings and logs."""

from __future__ import annotations

import linecache
import logging
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Hashable, Iterable, MutableMapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SHOWN = 80  # the most characters of a value in a message


def described(value: object) -> str:
    """Return a text for a value in a message: its repr if that is short, else a description.

    A description is, for example, `a torch.Tensor of shape [4, 8], float32`.
    """
    try:
        text = _short.repr(value)
    except Exception:  # raised by the value's __repr__
        text = _kind(value)
    return shortened(text, 3 * SHOWN)


def amount(bytes: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if bytes < 1024 or unit == "TiB":
            break
        bytes /= 1024
    return f"{bytes:.{0 if unit == 'bytes' else 1}f} {unit}"


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


class _Short(reprlib.Repr):
    """Makes reprs that show only the first items of a container, and describe an array or a tensor by its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = SHOWN

    def repr_instance(self, x: object, level: int) -> str:
        if (array := _array(x)) is not None:
            return f"a {type(x).__module__}.{type(x).__qualname__} of {array}"
        text = repr(x)
        return text if len(text) <= SHOWN and "\n" not in text else _kind(x)


def _array(x: object) -> str | None:
    """Return the shape and dtype of a tensor or an array; None for anything else."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if isinstance(x, type) or dtype is None or not isinstance(shape, tuple):
        return None
    if not all(isinstance(n, int) for n in shape):  # it is a tensor of a fusion, which has a readable repr
        return None
    return f"shape {list(shape)}, {str(dtype).removeprefix('torch.')}"


def _kind(x: object) -> str:
    return f"an object of type {type(x).__module__}.{type(x).__qualname__}"


_short = _Short()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 input`, `2 inputs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a hint with the name in `known` that is most similar to `word`; an empty string if no name is similar.

    Case does not matter. Two words with different first letters, such as `a100` and `h100`, count as similar only if
    one of them contains the other.
    """
    import difflib  # seldom needed, and slow to load

    if not isinstance(word, str):
        return ""
    typed = _plain(word)
    names = {_plain(name): name for name in known if name != word}
    alike = [n for n in names if n[:1] == typed[:1] or typed in n or n in typed]
    near = difflib.get_close_matches(typed, alike, n=1, cutoff=0.65)
    return f"did you mean '{names[near[0]]}'?" if near else ""


def _plain(name: str) -> str:
    """Return a name in lower case, without a `%`, `@` or `--` at its start."""
    return name.casefold().lstrip("%@-")


WIDEST = 160  # characters; messages show only a part of a longer source line
MAX_WORD, MAX_TEXT = 240, 2000  # characters; longer words and texts are shortened in messages


@dataclass(frozen=True)
class Span:
    """A stretch of one source line. Lines and columns count from 1; `width` is the number of carets to draw."""

    file: str
    line: int
    column: int = 0
    width: int = 1
    text: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.column else f"{self.file}:{self.line}"

    def render(self) -> str:
        """Return the source line with carets below the span; an empty string if the line is unknown."""
        if not self.text.strip():
            return ""
        gutter = f"{self.line:5} | "
        text, column = _window(self.text.rstrip(), self.column)
        if not column:
            return f"{gutter}{text}"
        lead = "".join("\t" if c == "\t" else " " for c in text[: column - 1])
        carets = "^" * min(max(1, self.width), WIDEST)
        return f"{gutter}{text}\n{' ' * (len(gutter) - 2)}| {lead}{carets}"


def _window(text: str, column: int) -> tuple[str, int]:
    """Return the part of a long line around `column`, and the position of `column` in this part."""
    if len(text) <= WIDEST:
        return text, column
    start = max(0, min(column - WIDEST // 3, len(text) - WIDEST))
    before, after = "... " if start else "", " ..." if start + WIDEST < len(text) else ""
    return before + text[start : start + WIDEST] + after, column and column - start + len(before)


def user_span() -> Span | None:
    """Return the place in the user's code that called hostir.

    Return None on the command line, and in a thread that runs no user code.
    """
    frame = _user_frame()
    return None if frame is None else _frame_span(frame)


def _user_frame() -> FrameType | None:
    """Return the innermost stack frame outside hostir, torch and the standard library.

    Return None on the command line, or if there is no such frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        command = module == "__main__" and frame.f_globals.get("__package__") == "hostir"  # `python -m hostir`
        if command or module == "hostir.__main__":
            return None
        if module.split(".")[0] not in ("hostir", "torch") and not _is_librarys(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
GENERATED = ("<frozen ", "<eval_with_key>")  # the files of frozen modules, and of torch.fx's graphs


def _is_librarys(file: str) -> bool:
    """Return True if a file belongs to the standard library, or holds code that Python or torch.fx has generated."""
    installed = os.sep + "site-packages" + os.sep in file or os.sep + "dist-packages" + os.sep in file
    return file.startswith(GENERATED) or (file.startswith(STANDARD_LIBRARY) and not installed)


def _frame_span(frame: FrameType) -> Span:
    line = frame.f_lineno
    text = linecache.getline(frame.f_code.co_filename, line).rstrip("\n")
    file = from_here(frame.f_code.co_filename)
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    start_line, end_line, start, end = positions
    if start_line != line or end_line != line or start is None or end is None:
        return Span(file, line, 0, 1, text)
    return Span(file, line, start + 1, end - start, text)


def from_here(file: str) -> str:
    """Return a path inside the current folder as a relative path; return any other path unchanged."""
    inside = os.path.join(os.getcwd(), "")
    return file.removeprefix(inside)


def _bounded(text: str) -> str:
    """Return a message, shortened if it is long or quotes long names or values."""
    if len(text) <= MAX_WORD:
        return text
    return shortened(re.sub(rf"\S{{{MAX_WORD},}}", lambda word: shortened(word[0], WIDEST), text), MAX_TEXT)


UNCHECKED = "unchecked"  # category of a finding that says that a program could not be checked


@dataclass(frozen=True)
class Diagnostic:
    """One finding: the mistake, its place, what was expected, and what to do.

    `str(diagnostic)` is the text for people.

    Fields:
        message: the mistake.
        span: the place of the mistake: `file`, `line` and `column`, counted from 1; None if the place is unknown.
        expected: a description of correct input; may be empty.
        hint: what to do; may be empty.
        notes: related places, each with a text.
        level: `error` or `warning`.
        category: the category of a finding about order, memory or ranks; empty for all other mistakes.
    """

    message: str
    span: Span | None = None
    expected: str = ""
    hint: str = ""
    notes: tuple[tuple[Span | None, str], ...] = ()
    level: str = "error"  # or "warning"
    category: str = ""

    def __post_init__(self) -> None:
        for name in ("message", "expected", "hint"):
            object.__setattr__(self, name, _bounded(getattr(self, name)))
        object.__setattr__(self, "notes", tuple((span, _bounded(text)) for span, text in self.notes))

    def __str__(self) -> str:
        parts = [f"{self.span}: {self.level}: {self.message}" if self.span else f"{self.level}: {self.message}"]
        if self.span and (drawn := self.span.render()):
            parts.append(drawn)
        if self.expected:
            parts.append(f"  expected: {self.expected}")
        if self.hint:
            parts.append(f"  hint: {self.hint}")
        for span, text in self.notes:
            parts.append(f"{span}: note: {text}" if span else f"  note: {text}")
            if span and (drawn := span.render()):
                parts.append(drawn)
        return "\n".join(parts)


class HostIRError(Exception):
    """Raised for every mistake in a program, a text or a call. `str(error)` is the text for people.

    Fields:
        diagnostics: the findings, one `hi.Diagnostic` each.
    """

    def __init__(self, *diagnostics: Diagnostic) -> None:
        self.diagnostics = diagnostics
        super().__init__("\n".join(map(str, diagnostics)))


def error(
    message: str,
    span: Span | None = None,
    *,
    expected: str = "",
    hint: str = "",
    notes: tuple[tuple[Span | None, str], ...] = (),
) -> HostIRError:
    """Return a HostIRError with one diagnostic, ready to raise."""
    return HostIRError(Diagnostic(message, span, expected, hint, notes))


def check_known(what: str, value: object, known: Iterable[str]) -> None:
    """Raise HostIRError at the user's line unless `value` is one of the `known` words.

    `what` is the noun that the message uses for the value, such as "strategy".
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        message, expected = f"unknown {what} {described(value)}", f"one of: {', '.join(words)}"
        raise error(message, user_span(), expected=expected, hint=did_you_mean(value, words))


# Nothing is logged until a program asks for it: `logging.getLogger("hostir").setLevel(logging.INFO)`, with a handler.
# A call of an executor that runs an existing plan, or replays an existing graph, logs nothing.
logging.getLogger("hostir").addHandler(logging.NullHandler())


def rank() -> str | None:
    """Return the rank that a launcher such as torchrun assigned to this process, as text; None without a launcher."""
    return os.environ.get("RANK")


def is_first_rank() -> bool:
    """Return True if this process prints for the job: it is rank 0, or was started without a launcher."""
    return rank() in (None, "0")


class Logger(logging.LoggerAdapter[logging.Logger]):
    """The logger of a module; its records begin with the rank if a launcher started the process."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        number = rank()
        return (msg if number is None else f"rank {number}: {msg}"), kwargs


def logger(module: str) -> Logger:
    """Return the logger of a module, given its `__name__`."""
    return Logger(logging.getLogger(module), {})


class FallbackWarning(UserWarning):
    """Warns that something runs in a slower way than preferred."""


_warned: set[Hashable] = set()


def warn_once(
    key: Hashable,
    message: str,
    hint: str = "",
    category: type[Warning] = FallbackWarning,
    first: bool | None = None,
) -> None:
    """Warn at the line of the user's call, but only once for each `key`, and on one rank only.

    Args:
        key: identifies the warning.
        message: the warning.
        hint: what to do about it; may be empty.
        category: the class of the warning.
        first: True on the rank that warns. None for the default, rank 0.
    """
    if not (is_first_rank() if first is None else first) or key in _warned:
        return
    _warned.add(key)
    warn_user(Diagnostic(message, hint=hint, level="warning"), category)


def warn_user(warning: Diagnostic, category: type[Warning]) -> None:
    """Warn at the line of the user's call.

    In a thread that runs no user code, warn at line 1 of `sys`, as Python does.
    """
    frame = _user_frame()
    if frame is None:
        warnings.warn_explicit(str(warning), category, "sys", 1)
        return
    names = frame.f_globals
    file, module, seen = frame.f_code.co_filename, names.get("__name__"), names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(str(warning), category, file, frame.f_lineno, module, seen)
