"""The names of operators in which calls of executors are made."""

from __future__ import annotations

import types
from typing import Any

import pytest

from hostir.ir.source import HostIRError, error
from hostir.runtime.session import Calls
from hostir.torch.ops.running import OperatorCall


def test_a_call_that_is_refused_within_another_leaves_the_operator_of_that() -> None:
    """As one in a signal handler: the interrupted call is still to be compared with those of the other ranks."""
    executor: Any = types.SimpleNamespace(calls=Calls())
    group: Any = None
    outer, inner = OperatorCall("hostir::outer", group), OperatorCall("hostir::inner", group)

    def refused() -> None:
        raise error("@p is called while this thread runs another call")

    def interrupted() -> str:
        with pytest.raises(HostIRError):
            inner._call(executor, refused, ())
        return str(executor.calls.operator)

    assert outer._call(executor, interrupted, ()) == "hostir::outer"
    assert not executor.calls.operator
