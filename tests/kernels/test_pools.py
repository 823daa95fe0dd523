"""Work outside the caller's memory pools, with a stand-in for the current stream of CUDA."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import hostir as hi
from hostir.kernels.pools import outside_pools
from hostir.knobs import TIMEOUT

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of the caller")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream))


def test_on_cuda_the_work_runs_in_another_thread_with_the_knobs_of_the_caller() -> None:
    with hi.knobs.scope(timeout=17.0), torch.inference_mode():
        thread, timeout, inference, gradients = outside_pools(
            CUDA,
            lambda: (
                threading.current_thread(),
                TIMEOUT.get(),
                torch.is_inference_mode_enabled(),
                torch.is_grad_enabled(),
            ),
        )
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    assert (timeout, inference, gradients) == (17.0, True, False)


def test_an_exception_of_the_work_reaches_the_caller() -> None:
    problem = KeyboardInterrupt()

    def fail() -> None:
        raise problem

    with pytest.raises(KeyboardInterrupt) as raised:
        outside_pools(CUDA, fail)
    assert raised.value is problem


def test_on_a_cpu_the_work_runs_in_the_thread_of_the_caller() -> None:
    assert outside_pools(torch.device("cpu"), threading.current_thread) is threading.current_thread()
