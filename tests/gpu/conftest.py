"""Fixtures of tests on GPUs: ranks compare their calls, and new tensors are on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _calls_are_compared() -> Iterator[None]:
    """Set HOSTIR_COMPARE_CALLS in this process and in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTIR_COMPARE_CALLS", "1")
        yield


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Create tensors on the GPU by default; wait for it at the end."""
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()
