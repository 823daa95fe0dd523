"""A call of an executor has the name of the torch operator that made it."""

from __future__ import annotations

import types
from typing import Any

import pytest

from hostir.ir.source import HostIRError, error
from hostir.job.calls import Calls
from hostir.torch.ops import running


def test_a_call_that_is_refused_inside_another_keeps_the_operator_of_the_outer_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal handler can make such a call. The ranks have not compared the interrupted call yet."""
    monkeypatch.setattr(running, "group_named", lambda name: None)
    executor: Any = types.SimpleNamespace(calls=Calls())
    outer, inner = (running.OperatorCall(name, "world") for name in ("hostir::outer", "hostir::inner"))

    def refused() -> None:
        raise error("@p is called while this thread runs another call")

    def interrupted() -> str:
        with pytest.raises(HostIRError):
            inner._call(executor, refused, ())
        return str(executor.calls.operator)

    assert outer._call(executor, interrupted, ()) == "hostir::outer"
    assert not executor.calls.operator
