"""docs/extending.md: a statement touches few files. That the page's changes apply and run is for tests/test_docs.py."""

from __future__ import annotations

import pytest

from benchmarks.structure import statements_of, touched
from tests.pages import ROOT

MOST = {"An elementwise statement": 3, "A statement of another kind": 7}  # one of the three has the user's function


@pytest.mark.parametrize("title", MOST)
def test_a_statement_touches_few_files(title: str) -> None:
    assert 2 <= len(touched(statements_of(ROOT)[title])) <= MOST[title]
