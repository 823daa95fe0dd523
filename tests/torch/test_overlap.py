"""The overlap pass and Inductor's caches: the key of the pass, and operators and reports with a warm cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hostir.torch import OverlapPass, overlap
from tests.launch import environment, launch

PLAIN = ["_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"]
FUSED = ["hostir::all_gather_matmul", "hostir::matmul_reduce_scatter"]


def test_the_key_of_the_pass_covers_every_module_of_hostir() -> None:
    loaded = {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "hostir"}
    assert len(loaded) > 50
    assert loaded <= set(overlap.sources())


def test_the_key_of_the_pass_changes_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = OverlapPass().uuid()
    monkeypatch.setattr(overlap, "__version__", "0.0.0.changed")
    assert OverlapPass().uuid() != before


def compiled(overlapped: bool, cache: Path) -> list[dict[str, Any]]:
    """Compile and run in new processes; return what each of the two ranks reports."""
    env = environment(TORCHINDUCTOR_CACHE_DIR=str(cache), TORCHINDUCTOR_FX_GRAPH_CACHE="1")
    script = Path(__file__).parent / "cached_run.py"
    job = launch(2, str(script), str(int(overlapped)), env=env, timeout=120)
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-6000:]
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.xdist_group("torch operators")
def test_a_warm_cache_holds_graphs_with_and_without_the_pass_apart(tmp_path: Path) -> None:
    warm = set()
    for overlapped in (False, True, False, True):  # in turn cold and warm
        ranks = compiled(overlapped, tmp_path)
        assert len(ranks) == 2
        for rank in ranks:
            functional = [name for name in rank["ran"] if not name.endswith("wait_tensor")]
            assert functional == (FUSED if overlapped else PLAIN)
            assert rank["hits"] == 2 or overlapped not in warm, "both graphs come from the cache"
            for name in FUSED:
                assert (f"{name} on group '0', 4 calls" in rank["report"]) == overlapped, rank["report"]
            assert ("graph 1" in rank["report"]) == (overlapped and rank["hits"] < 2)
            assert ("Inductor took it from its cache" in rank["report"]) == ("graph 1" not in rank["report"])
            assert ("no fused operator" in rank["report"]) != overlapped
        warm.add(overlapped)
