"""The compiler loads fast, and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "{'torch', 'triton', 'lark', 'networkx', 'numpy', 'rich'}"


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["hostir.ir", "hostir.lower", "hostir"])
def test_an_import_loads_nothing_heavy(module: str) -> None:
    assert fresh(f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))") == "[]"


def test_the_intermediate_representation_loads_few_modules() -> None:
    # How long that takes is for benchmarks/overhead.py to say: machines differ by more than a mistake would cost.
    counted = "import sys; before = set(sys.modules); import hostir.ir; print(len(set(sys.modules) - before))"
    assert int(fresh(counted)) < 100


def test_reading_lowering_and_printing_need_no_torch() -> None:
    code = """
import sys
import hostir as hi
with hi.Fusion("f") as fusion:
    a, b = hi.tensor("a", [8, 4], "f32"), hi.tensor("b", [4, 4], "f32")
    c = a @ b
    fusion.output(c)
a.shard(0, hi.DeviceMesh(range(2)))
c.set_device_mesh(hi.DeviceMesh(range(2)))
program = hi.lower(fusion)
assert hi.parse(str(program)) == program and not hi.check(program)
print(sorted({'torch', 'triton'} & set(sys.modules)))
"""
    assert fresh(code) == "[]"
