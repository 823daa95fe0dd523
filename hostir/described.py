"""Format users' values and names for messages: each in one bounded line, with a suggestion for a misspelt name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

SHOWN = 80  # characters


def described(value: object) -> str:
    """Return the repr of a value if it is short; else what the value is: `a torch.Tensor of shape [4, 8], float32`."""
    try:
        text = _short.repr(value)
    except Exception:  # of the value's own __repr__
        text = _kind(value)
    return shortened(text, 3 * SHOWN)


def shortened(text: str, most: int) -> str:
    """Return a text, with its middle left out if it has more characters than this."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


class _Short(reprlib.Repr):
    """A repr that shows the first items of containers, and describes arrays and tensors."""

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
    if not all(isinstance(n, int) for n in shape):  # a tensor of a fusion, which shows itself
        return None
    return f"shape {list(shape)}, {str(dtype).removeprefix('torch.')}"


def _kind(x: object) -> str:
    return f"an object of type {type(x).__module__}.{type(x).__qualname__}"


_short = _Short()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 input`, `2 inputs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a hint with the known name that is probably meant, ignoring case; an empty string if there is none.

    Words with different first letters are different words (`a100` is not `h100`), unless one holds the other.
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
    """Return a name in lower case without the `%`, `@` or `--` before it."""
    return name.casefold().lstrip("%@-")
