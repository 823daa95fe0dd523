"""Single passes: the program after each one parses back, verifies, and gives the same result when lowered further."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import hostir as hi
from examples import patterns
from hostir import knobs
from hostir.__main__ import main
from hostir.check import verify
from hostir.ir import HostIRError, Phase, Program
from hostir.ir.comm_ops import Communication, Reshard
from hostir.ir.host_ops import Allocate, FreeBuffer
from hostir.ir.source import UNCHECKED, Diagnostic
from hostir.ir.tensor_ops import Matmul
from hostir.lower import STRATEGIES, Pass, passes_of, run_passes, strategies
from hostir.lower.propagate import Propagate

NAMES = ["propagate", "reshard", "communicate", "pipeline", "streams", "stagger", "free", "tidy", "dense"]


def stages(fusion: hi.Fusion, strategy: str = "pipeline") -> dict[str, Program]:
    seen: dict[str, Program] = {}
    hi.lower(fusion, strategy, watch=lambda name, program: seen.update({name: program}))
    return seen


def test_the_passes_run_in_this_order() -> None:
    assert [p.name for p in passes_of("pipeline")] == NAMES
    assert [p.name for p in passes_of("sequential")] == [*NAMES[:3], "sequential", *NAMES[6:]]
    for strategy in ("ring", "fused", "push"):
        assert [p.name for p in passes_of(strategy)] == [*NAMES[:3], strategy, *NAMES[6:]]
    assert list(stages(patterns.mlp())) == NAMES


def test_the_passes_that_all_strategies_share_run_once_for_a_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], Propagate.run
    monkeypatch.setattr(Propagate, "run", lambda self, program: runs.append(program) or run(self, program))
    fusion = patterns.mlp().program()
    programs = [hi.lower(fusion, strategy) for strategy in STRATEGIES]
    assert len(runs) == 1
    assert programs == [hi.lower(patterns.mlp(), strategy) for strategy in STRATEGIES]


def test_a_fusion_that_equals_the_one_before_keeps_its_own_lines() -> None:
    text = str(patterns.mlp().program())
    lowered = [hi.lower(hi.parse(text, file)) for file in ("first.hir", "second.hir")]
    assert [program.inputs[0].span and program.inputs[0].span.file for program in lowered] == [
        "first.hir",
        "second.hir",
    ]


def test_an_unknown_strategy_is_refused_and_auto_is_suggested_only_by_functions_that_accept_it() -> None:
    for call in (passes_of, lambda strategy: hi.lower(patterns.mlp(), strategy)):
        with pytest.raises(HostIRError, match=r"one of: sequential, .*, auto\n.*did you mean 'auto'"):
            call("atuo")
    with pytest.raises(HostIRError, match=r"'auto' has no passes\n[^$]*one of: sequential, (?!.*auto)"):
        passes_of("auto")


def test_a_pass_is_a_pure_function() -> None:
    program = patterns.mlp().program()
    for step in passes_of("pipeline"):
        before = str(program)
        after = step.run(program)
        assert step.run(program) == after
        assert str(program) == before
        program = after


def test_after_propagate_every_tensor_has_a_sharding() -> None:
    with hi.Fusion("f") as fusion:
        x, w = hi.tensor("x", [8, 16], "f32"), hi.tensor("w", [16, 32], "f32")
        h = hi.gelu(x @ w)
        fusion.output(h)
    mesh = hi.DeviceMesh(range(4))
    w.shard(1, mesh)
    product = fusion.program().body[0].defines(Phase.FUSION)
    assert product
    assert product.tensor.mesh is None
    after = stages(fusion)["propagate"]
    assert "%matmul: f32[8, 32@didx] = matmul %x, %w" in str(after)
    assert "%h: f32[8, 32@didx] = gelu %matmul" in str(after)
    assert "auto" not in str(after)


def test_reshard_makes_changes_of_sharding_explicit_and_communicate_replaces_them() -> None:
    seen = stages(patterns.column_parallel())
    assert [s.keyword() for s in seen["reshard"].body] == ["reshard", "linear", "gelu"]
    assert [s.keyword() for s in seen["communicate"].body] == ["allgather", "linear", "gelu"]
    verify(seen["communicate"], explicit=True)
    assert hi.check(seen["reshard"]) == []
    with pytest.raises(HostIRError, match="a reshard is left"):
        verify(seen["reshard"], explicit=True)


def test_every_buffer_but_the_outputs_is_freed_once() -> None:
    for pattern in patterns.PATTERNS:
        program = hi.lower(pattern())
        allocated = {s.out.name for s in program.walk() if isinstance(s, Allocate)}
        freed = [s.x.name for s in program.walk() if isinstance(s, FreeBuffer)]
        assert len(set(freed)) == len(freed)
        assert not set(freed) & {v.name for v in program.outputs}
        assert allocated - set(freed) <= {v.name for v in program.outputs}


def test_the_sequential_strategy_does_not_slice() -> None:
    program = hi.lower(patterns.mlp(), "sequential")
    assert [s.keyword() for s in program.walk() if isinstance(s, (Communication, Matmul))] == [
        "allgather",
        "matmul",
        "matmul",
        "reduce_scatter",
    ]
    assert program.streams == 0


@pytest.mark.parametrize("pattern", patterns.PATTERNS, ids=lambda p: p.__name__)
def test_dumped_files_are_numbered_and_can_be_lowered_further(pattern: type, tmp_path: Path) -> None:
    with knobs.scope(dump=tmp_path):
        final = hi.lower(pattern())
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == [f"{final.name}-{n:02}-{name}.hir" for n, name in enumerate(["fusion", *NAMES])]
    for file in files:
        program = hi.parse(file.read_text(), str(file))
        leaks = file.name < f"{final.name}-{NAMES.index('free') + 1:02}"  # buffers are not freed yet
        assert [d for d in hi.check(program) if d.level == "error" or not leaks] == []
        if program.phase is Phase.FUSION:
            assert hi.lower(program) == final, file.name
    assert program == final


def test_dumped_files_run_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with knobs.scope(dump=tmp_path):
        hi.lower(patterns.row_parallel_bias())
    for file in tmp_path.iterdir():
        assert main(["check", str(file)]) == 0
        assert main(["lower", str(file)]) == 0
        assert main(["run", str(file), "--compare"]) == 0
    assert "MISMATCH" not in capfd.readouterr().err


def test_spec_2_parses_the_program_after_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def spy(text: str) -> Program:
        parsed.append(text)
        return hi.parse(text)

    monkeypatch.setattr(importlib.import_module("hostir.lower.strategies"), "parse", spy)
    with knobs.scope(spec=2):
        seen = stages(patterns.mlp())
    assert parsed == [str(program) for program in seen.values()]


@dataclass(frozen=True)
class Break(Pass):
    """Removes the definition of an operand."""

    name = "break"

    def run(self, program: Program) -> Program:
        return replace(program, body=program.body[1:])


@pytest.mark.parametrize("spec", [0, 1, 2])
def test_a_pass_that_leaves_an_invalid_program_is_named(spec: int) -> None:
    program = patterns.mlp().program()
    with knobs.scope(spec=spec), pytest.raises(HostIRError, match="%h is not defined here") as wrong:
        run_passes(program, [Break()])
    assert ("after the pass 'break'" in "".join(getattr(wrong.value, "__notes__", ()))) == (spec > 0)


def test_a_host_program_is_not_lowered_again() -> None:
    with pytest.raises(HostIRError, match="@mlp is a host program already"):
        hi.lower(hi.lower(patterns.mlp()))


def test_a_reshard_between_two_meshes_takes_two_communications() -> None:
    with hi.Fusion("f") as fusion:
        x = hi.tensor("x", [8, 8], "f32")
        y = hi.reshard(x)
        fusion.output(y)
    x.shard(0, hi.DeviceMesh([[0, 1], [2, 3]]), "didx")
    y.shard(1, hi.DeviceMesh([3, 1]))
    seen = stages(fusion)
    assert all(isinstance(s, Reshard) for s in seen["reshard"].body)
    assert [s.keyword() for s in seen["communicate"].body] == ["allgather", "scatter"]


def test_a_program_too_large_to_check_is_lowered_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(program: Program) -> Program:
        raise HostIRError(Diagnostic(f"@{program.name} was not checked for races: too long", category=UNCHECKED))

    monkeypatch.setattr(strategies, "prove", too_long)
    with pytest.warns(RuntimeWarning, match="was not checked for races: too long"):
        assert hi.lower(patterns.mlp()).phase is Phase.HOST
