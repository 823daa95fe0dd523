"""Golden files, settings of hypothesis, the order of tests, and GPUs that tests need."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import hypothesis
import pytest

from tests.golden import Golden

TESTS = Path(__file__).parent
NO_GPU = "for lack of a CUDA GPU"
NO_HOSTS = "for lack of namespaces, so that there is only one host"
# `make slow` runs tests marked `alone` at the end, and looks for them in these files only.
ALONE = {TESTS / "call" / f"test_{name}.py" for name in ("processes", "torchrun")}

# The draws are the same every time, so that a failure is the fault of the change. For new draws:
# pytest --hypothesis-profile=fresh
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("fresh", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the golden files under tests/cases anew")


def pytest_configure() -> None:
    # Trials of candidates would run several programs in turn: tests of trials turn them on.
    os.environ.setdefault("HOSTIR_TUNE", "0")


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Golden:
    """``golden("lower/ag_matmul.hir", text)`` compares the text with tests/cases/lower/ag_matmul.hir."""
    return Golden(TESTS / "cases", accept=pytestconfig.getoption("accept"))


@pytest.fixture(autouse=True)
def _python_issues_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python issue the calls of tests without a GPU: a stand-in for CUDA in Python does not see native calls."""
    if not request.path.is_relative_to(TESTS / "gpu"):
        monkeypatch.setenv("HOSTIR_NATIVE", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow tests first, so that no worker starts one when the others have nothing left to do."""
    if lost := [item.nodeid for item in items if item.get_closest_marker("alone") and item.path not in ALONE]:
        raise pytest.UsageError(f"'make slow' runs tests marked 'alone' of {len(ALONE)} files only: {', '.join(lost)}")
    items.sort(key=lambda item: not (item.get_closest_marker("slow") or item.get_closest_marker("torchrun")))


def pytest_collection_finish() -> None:
    """Let the garbage collector run seldom and skip modules: it took a sixth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.path.is_relative_to(TESTS / "gpu"):
        return
    import torch  # imported here, because most runs do not need it

    marker = item.get_closest_marker("gpus")
    needed = marker.args[0] if marker else 1
    available = torch.cuda.device_count()
    if available < needed:
        pytest.skip(f"{NO_GPU}: needs {needed}, found {available}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, what in (
        (NO_GPU, f"tests under tests/gpu, {NO_GPU}; run `pytest tests/gpu` on a machine with GPUs"),
        (NO_HOSTS, f"tests of two hosts, {NO_HOSTS}; run `pytest -m two_hosts` where users may make namespaces"),
    ):
        skipped = [report for report in terminalreporter.stats.get("skipped", []) if reason in str(report.longrepr)]
        if skipped:
            terminalreporter.write_line(f"NOT RUN: {len(skipped)} {what}", yellow=True, bold=True)
