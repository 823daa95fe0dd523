from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hostir as hi
from hostir.ir import HostIRError
from hostir.ir.sizes import ONE, Size, product
from tests.strategies import sizes

bindings = st.fixed_dictionaries({name: st.integers(1, 60) for name in ("M", "K", "on", "streams", "hosts")})


def fraction(size: Size, values: dict[str, int]) -> float:
    value = size.num / size.den
    for name, power in size.symbols:
        value *= values[name] ** power
    return value


@given(sizes())
def test_a_size_reads_back_from_its_text(size: Size) -> None:
    assert Size.of(str(size)) == size


@given(sizes(), sizes(), bindings)
def test_products_and_quotients_agree_with_arithmetic_on_numbers(a: Size, b: Size, values: dict[str, int]) -> None:
    assert fraction(a * b, values) == pytest.approx(fraction(a, values) * fraction(b, values))
    assert fraction(a / b, values) == pytest.approx(fraction(a, values) / fraction(b, values))
    assert a * b == b * a
    assert a * b / b == a


@given(sizes(), sizes(), bindings)
def test_a_quotient_marked_as_integer_is_an_integer(a: Size, b: Size, values: dict[str, int]) -> None:
    if (a / b).is_integer:
        assert a.divisible_by(b)
        assert fraction(a / b, values) == pytest.approx((a / b).bind(values))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("4096", "4096"), ("M", "M"), ("2*M*4", "8*M"), ("M*K/8", "K*M/8"), ("M/M", "1"), ("M/K", "M/K"), ("M*M", "M*M")],
)
def test_a_size_prints_in_canonical_form(text: str, canonical: str) -> None:
    assert str(Size.of(text)) == canonical


@pytest.mark.parametrize("text", ["", "M+1", "-4", "0", "M//8", "4.5", "M/0", "8 8", "7/2", "M*", "é?"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(HostIRError, match="size"):
        Size.of(text)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_an_invalid_number_is_refused_as_a_size(value: object) -> None:
    with pytest.raises(HostIRError, match="a size must be"):
        Size.of(value)


@pytest.mark.parametrize(
    ("size", "expected"), [("10/4", "such as 8/4 or 12/4"), ("3/8", "such as 8/8"), ("2*3/4", "an integer")]
)
def test_a_quotient_that_is_no_integer_is_refused_with_others_nearby(size: str, expected: str) -> None:
    with pytest.raises(HostIRError, match="is not an integer") as wrong:
        Size.of(size)
    assert expected in str(wrong.value)


def test_binding_needs_every_symbol_and_leaves_no_remainder() -> None:
    assert Size.of("M*K/8").bind({"M": 4, "K": 6, "N": 1}) == 3
    with pytest.raises(HostIRError, match=r"the size M/8 is not an integer for M=12: 12/8"):
        Size.of("M/8").bind({"M": 12})
    with pytest.raises(HostIRError, match="unknown size 'Mx'") as wrong:
        Size.of("Mx").bind({"M": 12})
    assert "did you mean 'M'?" in str(wrong.value)


def test_an_unbound_symbol_counts_as_divisible() -> None:
    assert Size.of("M").divisible_by(8)
    assert Size(16).divisible_by(8)
    assert not Size(12).divisible_by(8)
    assert Size.of("8*M").divisible_by(Size.of("M"))


def test_the_empty_product_is_one() -> None:
    assert product([]) == ONE
    assert product([Size(2), Size.of("M"), Size(3)]) == Size.of("6*M")


QUOTIENT = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[S, M/S]) -> (%y) {
  %y: f32[S, M/S] = allocate
  %x_i = chunk %x[0 of S]
  relu %x -> %y
}
"""


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S": 0, "M": 8}, "the size M/S divides by zero for M=8, S=0"),
        ({"S": -1, "M": 8}, "the size 'S'=-1 of @p"),
        ({"S": "2", "M": 8}, "the size 'S'='2' of @p"),
        ({"S": 2.0, "M": 8}, "the size 'S'=2.0 of @p"),
        ({"S": 10**20, "M": 8}, "the size 'S'=100000000000000000000 of @p"),
        ({"s": 2}, "@p has no size 's'\n[^$]*did you mean 'S'"),
        ({3: 2}, "@p has no size '3'"),
        ("M=8", "sizes='M=8'"),
    ],
)
def test_the_checker_and_the_executor_refuse_invalid_sizes(sizes: Any, message: str) -> None:
    program = hi.parse(QUOTIENT)
    for use in (lambda: hi.check(program, sizes=sizes), lambda: hi.Executor(program, sizes=sizes)):
        with pytest.raises(hi.HostIRError, match=message):
            use()
