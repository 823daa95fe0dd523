"""The maximum number of calls that one check covers."""

from __future__ import annotations

from hostir.ir.source import error, user_span

MAX_CALLS = 32  # the most successive calls that one check covers


def check_calls(calls: object, given_as: str) -> None:
    """Raise HostIRError unless `calls` is None or an integer from 1 to MAX_CALLS.

    The message begins with `given_as`, a text with the name of the argument and its value.
    """
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or not 1 <= calls <= MAX_CALLS):
        hint = "leave it out to check as many calls as show the errors of any number of calls, mostly 2"
        raise error(given_as, user_span(), expected=f"an integer from 1 to {MAX_CALLS}", hint=hint)
