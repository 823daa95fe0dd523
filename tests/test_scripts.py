"""Scripts that only a machine with GPUs can run: what they import is held here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT = """
import runpy, sys
for script in sys.argv[1:]:
    print(script, file=sys.stderr)
    runpy.run_path(script, run_name="imported")
"""


@pytest.mark.parametrize("folder", ["tests/gpu", "benchmarks"])
def test_what_scripts_import_exists(folder: str) -> None:
    scripts = sorted(map(str, ROOT.glob(f"{folder}/*.py")))
    assert len(scripts) > 5
    path = os.pathsep.join([str(ROOT), str(ROOT / folder), os.environ.get("PYTHONPATH", "")])
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", IMPORT, *scripts]
    done = subprocess.run(command, env={**os.environ, **rank}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
