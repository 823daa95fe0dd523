from __future__ import annotations

import pytest

from hostir.ir.source import counted, did_you_mean


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
def test_a_misspelt_name_gets_the_one_that_is_meant(typed: str, known: list[str], meant: str) -> None:
    assert did_you_mean(typed, known) == f"did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("typed", "known"),
    [("watch", "cache"), ("%a_i", "%c_i"), ("a100", "h100"), ("--foo", "--from"), ("reduce", "relu")],
)
def test_another_word_is_no_suggestion(typed: str, known: str) -> None:
    assert did_you_mean(typed, [known]) == ""


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(n, "input") for n in range(3)] == ["0 inputs", "1 input", "2 inputs"]
