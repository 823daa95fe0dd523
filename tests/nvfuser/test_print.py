"""Host programs printed in nvFuser's form: they read back equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.patterns import SCALED
from hostir.check import check_structure
from hostir.ir import HostIRError, Program, Statement, parse
from hostir.ir.op import REGISTRY
from hostir.lower import STRATEGIES, lower
from hostir.nvfuser import print_nvfuser, read_nvfuser
from hostir.nvfuser.print import DumpPrinter
from tests.golden import Golden
from tests.same_names import same_up_to_names
from tests.statement_examples import ALONE, example_program

PATTERNS = Path(__file__).parent.parent / "cases" / "patterns"
EVERY = sorted(path for name in ("pipeline", "sequential") for path in PATTERNS.glob(f"*-{name}.hir"))
FP8 = [path for path in EVERY if "f8e4m3[" in path.read_text()]
NOT_SPELLED = ("rms_norm", "batched_matmul", "grouped_matmul")  # statements that nvFuser's form does not have
WITHOUT_SPELLING = [path for path in EVERY if any(f"{word} " in path.read_text() for word in NOT_SPELLED)]
COLLECTIVE = [path for path in EVERY if path not in (*FP8, *WITHOUT_SPELLING)]


def read(text: str) -> Program:
    program, warnings = read_nvfuser(text, "printed.txt")
    assert not warnings
    return program


HOST_PROGRAMS = {
    "sizes by name, and a split axis": """hostir 1
mesh @m [ranks] = 3 1 0 2
program @p(%a: bf16[(2 M/2@ranks), K], %b: bf16[4*K*M/8, N]) -> (%a) {
}
""",
    "views": """hostir 1
mesh @m [ranks] = 0 1
program @p(%a: f16[4, M@ranks, 6, 8]) -> (%e) {
  %b = permute %a (2, 0, 3, 1)
  %c: f16[2, 3, 4, 8, M@ranks] = reshape %b
  %d = chunk %c[1 of 2] axis 3
  %e = chunk %d[0 of 3] axis 4
  %f: f16[4, M@ranks, 6, 8] = allocate
  copy %a -> %f
  free %f
}
""",
    "a shard, and partial sums": """hostir 1
mesh @g [dp, tp] = (0 1 2) (3 4 5)
program @p(%a: f32[6, 12], %p: f32[6, 12] partial(dp, tp)) -> (%s, %r) {
  %s: f32[6@tp, 12] = shard %a
  %o: f32[6, 12] partial(dp) = allocate
  %h = allreduce %p -> %o over tp
  wait %h
  %r: f32[6, 12] = allocate
  %q = as_partial %r over dp
  copy %o -> %q
  %h2 = allreduce %q -> %r over dp
  wait %h2
  free %o
}
""",
    "computations": """hostir 1
mesh @m [didx] = 0 1
program @p(%a: f32[8, 4@didx, 6], %w: f32[5, 6], %bias: f32[5]) -> (%z) {
  %c: f32[8, 4@didx, 5] = allocate
  linear %a, %w, %bias -> %c
  %d: f32[8, 4@didx, 5] = allocate
  gelu %c -> %d
  silu %d -> %c
  mul %c, %d -> %d
  add %d, %bias -> %d
  relu %d -> %d
  %e: bf16[8, 4@didx, 5] = allocate
  cast %d to bf16 -> %e
  %y: bf16[8, 5] partial(didx) = allocate
  sum %e axis 1 -> %y
  %z: bf16[8, 5] = allocate
  %h = allreduce %y -> %z over didx
  wait %h
  free %c
  free %d
  free %e
  free %y
}
""",
    "casts": """hostir 1
mesh @m [didx] = 0 1
program @p(%a: f32[4], %b: bf16[4]) -> (%a) {
  %c: f64[4] = allocate
  cast %a to f64 -> %c
  cast %c to f32 -> %a
  cast %b to f64 -> %c
  cast %c to bf16 -> %b
  cast %c to f64 -> %c
  free %c
}
""",
    "streams": """hostir 1
mesh @m [didx] = 0
program @p(%i0: f32[i1, 4]) -> (%i0) streams 3 {
  %user = current_stream
  for %s in 0..3 { set_stream %s   synchronize %user }
  for %i in 0..i1 {
    set_stream (%i + 1) % 3
    for %j in 0..2 {
      %x = select %i0[%i]
      synchronize %j
    }
  }
  for %j in 0..1 { synchronize %j % 2 }
  set_stream %user
}
""",
    "meshes": """hostir 1
mesh @a [didx] = 0 1
mesh @b [x] = 2 3
program @p(%x: f32[2@didx, 4]) -> (%z) {
  %y: f32[2@x, 4] on @b = allocate
  %h = sendrecv %x -> %y
  wait %h
  %z: f32[2, 4] = allocate
  %k = gather %y -> %z
  wait %k
  %w: f32[2, 4] on @b = allocate
  %l = broadcast %z -> %w
  wait %l
  %v: f32[2@didx, 4] = allocate
  %m = scatter %w -> %v
  wait %m
  free %y
  free %w
  free %v
}
""",
}


@pytest.mark.parametrize("name", HOST_PROGRAMS)
def test_a_printed_program_reads_back_equal_up_to_names(name: str) -> None:
    program = parse(HOST_PROGRAMS[name], "test.hir")
    assert check_structure(program) == []
    text = print_nvfuser(program)
    assert same_up_to_names(read(text), program), f"{text}\n{read(text)}"
    assert print_nvfuser(read(text)) == text


@pytest.mark.parametrize("path", COLLECTIVE, ids=lambda path: path.stem)
def test_a_program_lowered_to_collectives_reads_back_equal(path: Path) -> None:
    program = parse(path.read_text(), path.name)
    assert same_up_to_names(read(print_nvfuser(program)), program)


def test_tensors_of_fp8_are_refused_at_their_position() -> None:
    texts = {f"{pattern.__name__} {name}": str(lower(pattern(), name)) for pattern in SCALED for name in STRATEGIES}
    assert len(texts) >= 20
    for name, text in texts.items():
        with pytest.raises(HostIRError, match="nvFuser's form has no spelling for tensors of f8e4m3: %") as refused:
            print_nvfuser(parse(text, name))
        (diagnostic,) = refused.value.diagnostics
        assert diagnostic.span is not None
        assert diagnostic.expected == "one of: f64, f32, f16, bf16"


def test_computations_that_nvfuser_does_not_have_are_refused_at_their_position() -> None:
    assert len(WITHOUT_SPELLING) >= len(NOT_SPELLED)
    for path in WITHOUT_SPELLING:
        with pytest.raises(HostIRError, match=r"nvFuser's form has no spelling for ('\w+'|tensors of i32)") as refused:
            print_nvfuser(parse(path.read_text(), path.name))
        assert refused.value.diagnostics[0].span is not None


def test_host_programs_print_in_the_current_form_of_nvfuser(golden: Golden) -> None:
    texts = [print_nvfuser(parse(text, "test.hir")) for text in HOST_PROGRAMS.values()]
    golden("nvfuser/spelling.printed", "\n".join(texts))


def test_a_fusion_is_not_printed() -> None:
    fusion = parse("hostir 1\nmesh @m [didx] = 0\nfusion @f(%a: f32[4]) -> (%a) {\n}\n")
    with pytest.raises(HostIRError, match="lower it first"):
        print_nvfuser(fusion)


def test_equality_up_to_names_ignores_names_only() -> None:
    text = HOST_PROGRAMS["streams"]
    program = parse(text)
    assert same_up_to_names(program, parse(text.replace("%user", "%u").replace("@m", "@n").replace("%j", "%k")))
    for old, new in [
        ("streams 3", "streams 4"),
        ("% 2", "% 3"),
        ("[i1, 4]", "[i1, 5]"),
        ("synchronize %j\n", "set_stream %j\n"),
    ]:
        assert not same_up_to_names(program, parse(text.replace(old, new)))


@pytest.mark.parametrize("cls", [*map(REGISTRY.__getitem__, ALONE), REGISTRY["if"]], ids=[*ALONE, "if"])
def test_statements_of_single_ranks_are_refused_at_their_position(cls: type[Statement]) -> None:
    program = example_program(cls)
    with pytest.raises(HostIRError, match="nvFuser's form has no spelling for '") as refused:
        print_nvfuser(program)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.span is not None
    assert "what all ranks of a team do alike" in diagnostic.expected


@pytest.mark.parametrize("product", ["matmul", "linear"])
def test_a_product_that_waits_for_flags_is_refused(product: str) -> None:
    program = parse(
        "hostir 1\nmesh @m [didx] = 0 1\nprogram @p(%a: f32[8, 8], %b: f32[8, 8], %f: flag[2]) -> (%c) {\n"
        f"  %c: f32[8, 8] = allocate\n  {product} %a, %b -> %c ready %f >= 1 from 0\n}}\n"
    )
    with pytest.raises(HostIRError, match=rf"no spelling for '{product} \.\.\. ready'"):
        DumpPrinter(program).statement(program.body[-1])
    with pytest.raises(HostIRError, match="no spelling for flags"):
        print_nvfuser(program)
