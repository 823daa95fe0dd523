from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from hostir.ir.source import (
    Diagnostic,
    FallbackWarning,
    HostIRError,
    check_known,
    counted,
    did_you_mean,
    warn_user,
)


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("%X", ["%x"], "%x"),
        ("matmull", ["mul", "matmul"], "matmul"),
        ("gather", ["allgather", "scatter"], "allgather"),
        ("fp16", ["f32", "f16"], "f16"),
        ("--redundent", ["--ranks", "--redundant"], "--redundant"),
    ],
)
def test_a_misspelt_name_gets_the_nearest_known_name_as_a_suggestion(typed: str, known: list[str], meant: str) -> None:
    assert did_you_mean(typed, known) == f"did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("typed", "known"),
    [("watch", "cache"), ("%a_i", "%c_i"), ("a100", "h100"), ("--foo", "--from"), ("reduce", "relu")],
)
def test_an_unrelated_word_is_not_suggested(typed: str, known: str) -> None:
    assert did_you_mean(typed, [known]) == ""


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(n, "input") for n in range(3)] == ["0 inputs", "1 input", "2 inputs"]


# The user's line --------------------------------------------------------------------------------------------------
WARNING = Diagnostic("it is slow", level="warning")


def test_an_error_names_the_users_line_behind_frames_of_the_standard_library() -> None:
    with pytest.raises(HostIRError) as refusal, ExitStack() as stack:  # contextlib makes the call
        stack.callback(check_known, "machine", "tpu", ["gloo"])
    (span,) = (diagnostic.span for diagnostic in refusal.value.diagnostics)
    assert span is not None
    assert __file__.endswith(span.file)
    assert "ExitStack() as stack" in span.text


def test_a_warning_names_the_users_line_behind_frames_of_the_standard_library() -> None:
    with pytest.warns(FallbackWarning, match="it is slow") as seen, ExitStack() as stack:
        stack.callback(warn_user, WARNING, FallbackWarning)
    assert [each.filename for each in seen] == [__file__]


def test_a_thread_without_the_users_code_has_no_users_line() -> None:
    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(check_known, "machine", "tpu", ["gloo"]).exception()
        assert isinstance(refusal, HostIRError)
        assert [diagnostic.span for diagnostic in refusal.diagnostics] == [None]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pool.submit(warn_user, WARNING, FallbackWarning).result()
    assert [(each.filename, each.lineno) for each in seen] == [("sys", 1)]
