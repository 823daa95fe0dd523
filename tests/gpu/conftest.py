"""Ranks on GPUs compare their calls in tests: one that does not line up is named, and does not pass by chance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _calls_are_compared() -> Iterator[None]:
    """Also in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTIR_COMPARE_CALLS", "1")
        yield
