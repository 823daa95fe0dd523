"""Programs of operators that several threads request at once, and the counts of their calls."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hostir.call.executor import Executor
from hostir.torch.ops import running
from hostir.torch.ops.running import OperatorGroup
from hostir.torch.reporting import Ledger

CPU = torch.device("cpu")


def build(ranks: int, key: str) -> Any:
    raise AssertionError("not called in these tests")


def compile_slowly(monkeypatch: pytest.MonkeyPatch, executors: list[object]) -> None:
    def make(*_: object) -> object:
        time.sleep(0.05)
        executors.append(object())
        return executors[-1]

    monkeypatch.setattr(OperatorGroup, "_compile", make)


def on_threads(*calls: Any) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def test_threads_that_request_the_same_program_at_once_get_one_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    executors: list[object] = []
    compile_slowly(monkeypatch, executors)
    group = OperatorGroup("0", SimpleNamespace(size=lambda: 2))
    ask = partial(group.program, build, "one", strategy="auto", device=CPU)
    first, *others = on_threads(*[ask] * 8)
    assert len(executors) == 1
    assert all(other is first for other in others)


def test_threads_can_make_different_executors_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)  # passes only if both threads are making executors

    def make(*_: object) -> object:
        both.wait(10)
        return object()

    monkeypatch.setattr(OperatorGroup, "_compile", make)
    group = OperatorGroup("0", SimpleNamespace(size=lambda: 2))
    keys = ("one", "other")
    one, other = on_threads(*[lambda key=key: group.program(build, key, strategy="auto", device=CPU) for key in keys])
    assert one is not None
    assert one is not other


def test_threads_that_use_a_new_group_at_once_get_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(size=lambda: 2)

    def resolved(name: str) -> object:
        time.sleep(0.05)
        return group

    monkeypatch.setattr(running, "_groups", {})
    monkeypatch.setattr(running, "registered", lambda name: group)
    monkeypatch.setattr(running, "resolved", resolved)
    first, *others = on_threads(*[lambda: running.group_named("0")] * 8)
    assert all(other is first for other in others)


def test_the_number_of_calls_survives_clearing_the_report() -> None:
    ledger, one, other = Ledger(), cast(Executor, object()), cast(Executor, object())
    ledger.ran("hostir::all_gather", "0", one)
    ledger.clear()
    assert not ledger.by_hostir
    ledger.ran("hostir::all_gather", "0", one)
    ledger.ran("hostir::all_gather", "0", other, started=True)
    ledger.left("hostir::all_gather", "0", "torch ran it")
    ledger.clear()
    ledger.ran("hostir::all_gather", "1", one)
    assert ledger.calls() == {("hostir::all_gather", "0"): 3, ("hostir::all_gather", "1"): 1}


def test_calls_that_the_caller_captures_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    group = cast(Any, SimpleNamespace(program=lambda *key, calls, **options: asked.append(calls)))
    call = object.__new__(running.OperatorCall)
    call.name, call.group = "op", group
    settings = running.Settings()
    monkeypatch.setattr(running, "SETTINGS", settings)
    x = torch.ones(2)
    for graphs in (False, True):
        settings.change("auto", strict=False, tune=None, graphs=graphs)
        for calls in ("eager", "out"):
            call._executor(build, (), [x], calls)
    assert asked == ["eager", "out", "graph", "graph"]
