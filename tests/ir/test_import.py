"""The compiler loads few modules, and no heavy ones such as torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hostir.ir.op import REGISTRY
from tests.launch import launch

HEAVY = "{'torch', 'triton', 'lark', 'networkx', 'numpy', 'rich'}"


def fresh(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["hostir.ir", "hostir.lower.strategies", "hostir"])
def test_an_import_loads_nothing_heavy(module: str) -> None:
    assert fresh(f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))") == "[]"


def test_the_intermediate_representation_loads_neither_passes_nor_rarely_used_modules() -> None:
    loaded = fresh(
        "import sys; before = set(sys.modules); import hostir.ir; print(*(set(sys.modules) - before))"
    ).split()
    assert [name for name in loaded if name.startswith(("hostir.lower", "hostir.choice"))] == ["hostir.lower"]
    rarely_used = {"hashlib", "difflib", "fractions", "decimal", "hostir.dsl", "hostir.call"}
    assert not rarely_used & set(loaded)
    assert len(loaded) < 100


def test_parsing_does_not_load_the_checker() -> None:
    code = """
import sys
from types import ModuleType

class Checks(ModuleType):
    check = prove = verify = None

sys.modules["hostir.check"] = Checks("hostir.check")
from hostir.ir import parse
from hostir.ir.op import REGISTRY
from tests.launch import launch
assert str(parse(sys.argv[1])) == sys.argv[1]
assert not [name for name in sys.modules if name.startswith("hostir.check.")]
print(*sorted(REGISTRY))
"""
    text = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%a: f32[4@didx, 8], %b: f32[8, 2]) -> (%c) {
  %c: f32[4@didx, 2] = allocate
  matmul %a, %b -> %c
}
"""
    assert fresh(code, text).split() == sorted(REGISTRY)


def test_dir_lists_lazily_loaded_names_without_loading_them() -> None:
    code = """
import sys, typing
import hostir as hi
late = {"Choice", "Executor", "Fusion", "dsl", "matmul"}
assert {*late, *hi.__all__} <= set(dir(hi)) and not late & set(vars(hi))
assert not {"hostir.dsl", "hostir.choice", "torch"} & set(sys.modules), "listing loads nothing"
assert hi.dsl.Fusion is hi.Fusion and {"dsl", "Fusion"} <= set(vars(hi))
print(typing.get_type_hints(hi.check)["program"])
"""
    assert fresh(code) == "hostir.dsl.fusion.Fusion | hostir.ir.program.Program"


def test_the_package_hostir_torch_does_not_shadow_torch() -> None:
    code = """
import typing, torch
import hostir as hi
import hostir.torch
names = {name: getattr(hi, name) for name in hi.__all__}
for function in (hi.run, hi.lower, hi.check):
    typing.get_type_hints(function, localns=names | {"HasProgram": object, "Watcher": object})
print(typing.get_type_hints(hi.run, localns=names)["inputs"] is torch.Tensor, hi.Tensor is torch.Tensor)
"""
    assert launch(0, "-c", code, env=os.environ, timeout=100).stdout == "True False\n"


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
import hostir.__main__  # the command line
print(sorted({'torch', 'triton'} & set(sys.modules)))
"""
    assert fresh(code) == "[]"


def test_unrolling_needs_no_torch() -> None:
    code = """
import sys
import hostir as hi
from hostir.plan.unroll import unroll

class Tensor:
    shape = (4, 6)
    def stride(self):
        return (6, 1)

program = hi.parse('''hostir 1
mesh @mesh [x] = 0
program @p(%a: f32[4, 6]) -> (%c) {
  %c: f32[24] = allocate
  %b: f32[24] = reshape %a
  relu %b -> %c
}
''')
print([type(op).__name__ for op in unroll(program, 0, {}, [Tensor()]).ops])
print(sorted({'torch', 'triton'} & set(sys.modules)))
"""
    assert fresh(code) == "['AllocateOp', 'ViewOp', 'ComputeOp']\n[]"
