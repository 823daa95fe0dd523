"""Names that were misspelt: the one helper that finds what was meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A hint that names the nearest of the known names, upper or lower case alike; an empty string where none is."""
    import difflib  # seldom needed, and not quickly loaded

    if not isinstance(word, str):
        return ""
    names = {name.casefold(): name for name in known if name != word}
    near = difflib.get_close_matches(word.casefold(), names, n=1, cutoff=0.6)
    return f"did you mean '{names[near[0]]}'?" if near else ""
