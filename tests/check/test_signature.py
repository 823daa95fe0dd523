"""Signatures of sizes: for sizes of one signature, the same accesses overlap and cover each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

import hostir as hi
from examples import patterns
from hostir.check import proof as orders
from hostir.check import prove
from hostir.check.signature import Signature
from hostir.check.tracing.tracer import Tracer
from hostir.ir import Axis, HostIRError, Mesh, Phase, Program, TensorType, Value
from hostir.ir.host_ops import Allocate, Chunk, Select
from hostir.ir.op import Lit, Statement, codecs_of
from hostir.ir.regions import Region, covered
from hostir.ir.sizes import Size, product
from hostir.ir.tensor_ops import Relu
from hostir.ir.types import DTYPES
from hostir.ir.view_ops import Permute, Reshape, ViewStatement

MESH = Mesh("mesh", ("didx",), (1,), (0,))


# Relations between accesses ---------------------------------------------------------------------------------------
def relations(program: Program, sizes: dict[str, int], calls: int = 1) -> Any:
    """Return the relations between accesses: overlaps and coverage. Return "refused" if a rank cannot be traced."""
    tracers = [Tracer(rank, program, sizes) for rank in range(program.ranks)]
    try:
        for tracer in tracers:
            for _ in range(calls):
                tracer.call()
    except HostIRError:
        return "refused"
    return [list(_between(tracer)) for tracer in tracers]


def _between(tracer: Tracer) -> Iterator[Any]:
    seen: dict[Any, dict[Region, None]] = {}
    written: dict[Any, dict[Region, None]] = {}
    for event in tracer.trace.events:
        for access in event.accesses:
            place = access.buffer.name, access.rank
            others = seen.setdefault(place, {})
            if access.region not in others:
                meets = tuple(access.region.meets(other) for other in others)
                inside = tuple(covered(access.region, [other]) for other in others)
                holds = tuple(covered(other, [access.region]) for other in others)
                others[access.region] = None
                yield event.verb, place, meets, inside, holds
            else:
                yield event.verb, place, list(others).index(access.region)
            yield covered(access.region, written.setdefault(place, {}))
            if access.writes:
                written[place][access.region] = None


def verdict(program: Program, sizes: dict[str, int]) -> list[tuple[str, str]]:
    return [(finding.level, finding.category) for finding in orders.analyse(program, sizes).findings]


def by_signature(program: Program, many: Iterable[int]) -> dict[Any, list[int]]:
    """Return the values of M that one proof covers."""
    signature, groups = Signature(program), dict[Any, list[int]]()
    for m in many:
        groups.setdefault(signature.of({"M": m}), []).append(m)
    return groups


# Lowered programs -------------------------------------------------------------------------------------------------
SENT = (  # rows
    patterns.allgather_matmul,
    patterns.allgather_matmul_rows,
    patterns.mlp,
    patterns.gate_up,
    patterns.row_parallel_scattered,
)


def lowered(ranks: int, slices: int) -> Iterator[tuple[str, Program]]:
    for pattern in patterns.PATTERNS:
        known = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
        arguments: dict[str, Any] = {"ranks": ranks, "S": slices, "M": "M"}
        fusion = pattern(**{name: value for name, value in arguments.items() if name in known})
        for strategy in ("sequential", "pipeline", "ring", "fused", "push"):
            if strategy in ("sequential", "pipeline") or pattern in SENT:
                yield f"{pattern.__name__}-{strategy}", hi.lower(fusion, strategy)


LOWERED = {name: program for name, program in lowered(2, 4) if "M" in program.size_names}


@pytest.mark.parametrize("name", LOWERED)
def test_a_lowered_program_has_the_same_verdict_at_all_sizes_of_a_signature(name: str) -> None:
    program = LOWERED[name]
    groups = by_signature(program, range(1, 100))
    fitting = {key: many for key, many in groups.items() if len(many) > 1}
    assert len(fitting) <= 4, "only the number of rows differs"
    assert fitting
    for many in fitting.values():
        expected = relations(program, {"M": many[0]}), verdict(program, {"M": many[0]})
        for m in (many[1], many[-1]):
            assert (relations(program, {"M": m}), verdict(program, {"M": m})) == expected


# Random views -----------------------------------------------------------------------------------------------------
def of(*shape: Size) -> TensorType:
    return TensorType(DTYPES["f32"], tuple(Axis.of(n) for n in shape), MESH)


def view_of(x: Value, out: str, random: Random) -> ViewStatement | None:
    """Return a random view, or None if it does not fit."""
    shape = x.tensor.shape
    axis = random.randrange(len(shape)) if shape else 0
    view = random.choice(["select", "chunk", "chunk", "permute", "reshape", "reshape", "reshape"])
    any_type = of()
    if not shape:
        return None
    if view == "select" and (shape[axis].value or random.random() < 0.1):
        most = shape[axis].value or 2
        select = Select(x=x, out=Value(out, any_type), index=Lit(random.randrange(most)), axis=axis)
        return Select(x=x, out=Value(out, select.infer()), index=select.index, axis=axis)
    if view == "chunk":
        count = random.choice([1, 2, 3, 4])
        index = Lit(random.randrange(count))
        if not shape[axis].divisible_by(count):
            return None
        cut = Chunk(x=x, out=Value(out, any_type), index=index, count=Size(count), axis=axis)
        return Chunk(x=x, out=Value(out, cut.infer()), index=index, count=Size(count), axis=axis)
    if view == "permute":
        axes = list(range(len(shape)))
        random.shuffle(axes)
        return Permute(x=x, out=Value(out, of(*(shape[a] for a in axes))), axes=tuple(axes))
    new = list(shape)
    for _ in range(random.choice([1, 1, 2, 3])):
        at = random.randrange(len(new))
        if random.random() < 0.5 and at + 1 < len(new):
            new[at : at + 2] = [new[at] * new[at + 1]]
        elif new[at].divisible_by(count := random.choice([1, 2, 3, 4, 6])):
            pair = [Size(count), new[at] / count]
            new[at : at + 1] = pair if random.random() < 0.5 else pair[::-1]
    return Reshape(x=x, out=Value(out, of(*new)))


def viewed(random: Random) -> Program:
    """Return a program that writes and reads random views of its input."""
    m = Size.of("M")
    sizes = [m, m * 2, m / 6, *map(Size, (1, 2, 2, 3, 4, 4, 6, 12))]
    x = Value("x", of(*random.choices(sizes, k=random.randint(1, 4))))
    body: list[Statement] = []
    for chain in range(random.randint(2, 5)):
        value = x
        for step in range(random.randint(1, 5)):
            view = view_of(value, f"v{chain}_{step}", random)
            if view is not None:
                body.append(view)
                value = view.out
        t = Value(f"t{chain}", of(*value.tensor.shape))
        body += [Allocate(out=t), Relu(x=value, out=t) if random.random() < 0.6 else Relu(x=t, out=value)]
    return Program("p", Phase.HOST, (MESH,), (x,), (x,), tuple(body))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_views_overlap_equally_at_all_sizes_of_a_signature(seed: int) -> None:
    random, compared, refused = Random(seed), 0, 0
    for _ in range(120):
        program = viewed(random)
        for key, many in by_signature(program, [*range(1, 12), *range(12, 240, 12)]).items():
            if len(many) == 1:
                continue
            expected = relations(program, {"M": many[0]})
            for m in random.sample(many[1:], min(len(many) - 1, 6)):
                assert relations(program, {"M": m}) == expected, (key, many[0], m, str(program))
                compared += 1
                refused += expected == "refused"
    assert compared > 300
    assert refused < 0.5 * compared


def numbers(program: Program, sizes: dict[str, int]) -> Program:
    """Return the program with numbers in place of symbols."""

    def of_value(value: Value) -> Value:
        return Value(value.name, of(*(Size(n.bind(sizes)) for n in value.tensor.shape)))

    def of_field(it: Any) -> Any:
        return of_value(it) if isinstance(it, Value) else Size(it.bind(sizes)) if isinstance(it, Size) else it

    body = [replace(s, **{name: of_field(getattr(s, name)) for name in codecs_of(type(s))}) for s in program.body]
    (x,) = map(of_value, program.inputs)
    return replace(program, inputs=(x,), outputs=(x,), body=tuple(body))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_views_overlap_equally_in_all_programs_that_share_a_proof(seed: int) -> None:
    random, compared = Random(seed), 0
    for _ in range(40):
        program, known = viewed(random), dict[Any, Any]()
        fitting = [m for m in (*range(1, 12), *range(12, 120, 12)) if Signature(program).of({"M": m})[0] != program]
        for m in fitting:
            for variant, sizes in ((program, {"M": m}), (numbers(program, {"M": m}), {})):
                signature = Signature(variant)
                shared = id(signature.proved), signature.of(sizes)
                accesses = relations(variant, sizes)
                compared += shared in known
                assert known.setdefault(shared, accesses) == accesses, (str(program), m)
    assert compared > 150


def test_a_signature_holds_only_the_extents_that_a_reshape_depends_on() -> None:
    """A reshape that merges or splits axes depends on their outer extents."""
    m = Size.of("M")
    x = Value("x", of(Size(4), m, Size(6)))
    rows = Value("rows", of(m * 4, Size(6)))
    program = Program("p", Phase.HOST, (MESH,), (x,), (x,), (Reshape(x=x, out=rows),))
    assert Signature(program).exact == [Size(4)]
    columns = Value("columns", of(Size(4), m * 6))
    program = Program("p", Phase.HOST, (MESH,), (x,), (x,), (Reshape(x=x, out=columns),))
    assert Signature(program).exact == [m]
    assert product(x.tensor.shape) == product(columns.tensor.shape)


# Sizes that must have different signatures ------------------------------------------------------------------------
def text(body: str, inputs: str, ranks: int = 2, streams: int = 2) -> Program:
    mesh = " ".join(map(str, range(ranks)))
    head = f"hostir 1\nmesh @mesh [didx] = {mesh}\nprogram @p({inputs}) -> (%y) streams {streams}"
    return hi.parse(f"{head} {{\n{body}\n}}\n")


ROUNDS = """  %user = current_stream
  %y: f32[N, 64] = allocate
  %t: f32[5, 64] = allocate
  for %s in 0..2 { set_stream %s  synchronize %user }
  for %i in 0..N {
    set_stream %i % 2
    %x_i = select %x[%i]
    %t_i = select %t[%i % 5]
    %y_i = select %y[%i]
    relu %x_i -> %t_i
    gelu %t_i -> %y_i
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }
  free %t"""
UNEQUAL = """  %r = rank of %x over didx
  %y: f32[12] = allocate
  if %r == 0 {
    relu %z -> %y
    %h = send %x to 1 over didx
    wait %h
  }
  if %r == 1 {
    %h = recv %y from 0 over didx
    wait %h
  }"""
MERGED = """  %y: f32[12, M] = allocate
  %rows: f32[12*M] = reshape %y
  %head = chunk %rows[0 of 12]
  %tail = select %y[1]
  %w: f32[M] = allocate
  relu %x -> %y
  relu %tail -> %w
  free %w"""


def test_each_number_of_rounds_is_proved_separately() -> None:
    program = text(ROUNDS, "%x: f32[N, 64]", ranks=1)
    for n in (1, 5, 2, 3, 4):
        assert prove(program, {"N": n}) is program
    for n in (6, 7, 12):
        for _ in range(2):
            with pytest.raises(HostIRError, match="race on %t"):
                prove(program, {"N": n})


def test_numbers_of_rounds_pieces_and_flags_are_part_of_the_signature() -> None:
    body = """  %user = current_stream
  %y: f32[C*12] = allocate
  %f: flag[F] = allocate_symmetric
  for %s in 0..2 { set_stream %s  synchronize %user }
  for %i in 0..N {
    set_stream %i % 2
    %y_i = chunk %y[%i % 5 of C]
    %x_i = chunk %x[%i % 5 of C]
    relu %x_i -> %y_i
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }"""
    program = text(body, "%x: f32[C*12], %n: f32[N], %c: f32[C], %g: f32[F]", ranks=1)
    signature, few = Signature(program), {"N": 5, "C": 5, "F": 3}
    assert {size for size in signature.exact if size.names} == {*map(Size.of, "FNC")}
    assert prove(program, few) is program
    with pytest.raises(HostIRError, match="race on %y"):
        prove(program, few | {"N": 6})
    with pytest.raises(HostIRError, match="piece 4 is outside axis 0 of %y"):
        prove(program, few | {"C": 4})


def test_messages_that_fit_at_one_size_are_proved_for_that_size_only() -> None:
    program = text(UNEQUAL, "%x: f32[M], %z: f32[12]")
    assert prove(program, {"M": 12}) is program
    for m in (11, 24):
        with pytest.raises(HostIRError, match="sent and received with different sizes or dtypes"):
            prove(program, {"M": m})
    assert len(by_signature(program, range(2, 100))) == 2


IN_OTHER_PLACES = """  %r = rank of %x over didx
  %y: f32[{y}] = allocate
  %w: f32[{w}] = allocate
  if %r == 0 {{
    %g = {collective} %x -> %y{over}
    wait %g
  }}
  %h = {collective} %z -> %w{over}
  if %r == 1 {{
    %k = {collective} %x -> %y{over}
    wait %k
  }}
  wait %h"""


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        (
            "%x: f32[2@didx, M], %z: f32[2@didx, 12]",
            IN_OTHER_PLACES.format(y="2, M", w="2, 12", collective="allgather", over=" over didx"),
        ),
        ("%x: f32[M], %z: f32[3, 4]", IN_OTHER_PLACES.format(y="M", w="3, 4", collective="broadcast", over="")),
    ],
)
def test_collectives_that_match_at_one_size_are_proved_for_that_size_only(inputs: str, body: str) -> None:
    program = text(body, inputs)
    assert prove(program, {"M": 12}) is program
    for m in (11, 24):
        with pytest.raises(HostIRError, match="differ in the collectives"):
            prove(program, {"M": m})


def test_a_part_that_is_contiguous_at_one_size_is_proved_for_that_size_only() -> None:
    body = """  %y: f32[2, M, 8] = allocate
  %p: f32[M, 2, 8] = permute %y (1, 0, 2)
  %q: f32[M*2, 8] = reshape %p
  relu %x -> %q"""
    program = text(body, "%x: f32[2*M, 8]", ranks=1)
    assert prove(program, {"M": 1}) is program
    for m in (2, 3):
        with pytest.raises(HostIRError, match="no view"):
            prove(program, {"M": m})


def test_views_that_are_equal_at_one_size_are_proved_for_that_size_only() -> None:
    body = """  %y: f32[M, M] = allocate
  %t: f32[M, M] = permute %y (1, 0)
  relu %x -> %y
  relu %y -> %t"""
    program = text(body, "%x: f32[M, M]", ranks=1)
    assert prove(program, {"M": 1}) is program
    for m in (2, 3):
        with pytest.raises(HostIRError, match="writes %t while it reads %y"):
            prove(program, {"M": m})


def test_an_axis_of_extent_one_does_not_change_the_verdict() -> None:
    body = """  %y: f32[M, 4, 2] = allocate
  %t: f32[M, 4] = select %y[0] axis 2
  %u: f32[M, 4] = reshape %t
  relu %x -> %t
  relu %t -> %u
  %w = select %y[1] axis 2
  relu %x -> %w"""
    program = text(body, "%x: f32[M, 4]", ranks=1)
    assert verdict(program, {"M": 1}) == verdict(program, {"M": 3}) == []


def test_sizes_that_do_not_divide_have_separate_signatures() -> None:
    body = "  %y: f32[M] = allocate\n  %y_1 = chunk %y[0 of 4]\n  relu %x -> %y"
    program = text(body, "%x: f32[M]", ranks=1)
    signature = Signature(program)
    assert signature.of({"M": 8}) == signature.of({"M": 12})
    assert signature.of({"M": 9}) != signature.of({"M": 10})
    assert signature.of({"M": 8}) != signature.of({"M": 9})


def test_a_statement_with_an_unknown_evaluate_gets_a_signature_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    program = text("  %y: f32[M] = allocate\n  relu %x -> %y", "%x: f32[M]", ranks=1)
    assert len(by_signature(program, range(2, 50))) == 1
    evaluate: Callable[..., None] = Relu.evaluate
    monkeypatch.setattr(Relu, "evaluate", lambda self, frame: evaluate(self, frame))
    assert len(by_signature(program, range(2, 50))) == 48


def test_a_proof_is_reused_for_sizes_of_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    program = text("  %y: f32[M, 7] = allocate\n  relu %x -> %y", "%x: f32[M, 7]", ranks=1)
    analysed: list[Any] = []
    analyse = orders.analyse
    monkeypatch.setattr(orders, "analyse", lambda *arguments: analysed.append(arguments) or analyse(*arguments))
    for m in (5, 6, 7, 1000, 1):
        assert prove(program, {"M": m}) is program
    assert len(analysed) == 1


def test_programs_that_differ_only_in_numbers_share_their_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[Any] = []
    analyse = orders.analyse
    monkeypatch.setattr(orders, "analyse", lambda *arguments: analysed.append(arguments) or analyse(*arguments))
    rounds = ROUNDS.replace("gelu", "silu")  # without a cached proof
    symbolic = text(rounds.replace("64", "M"), "%x: f32[N, M]", ranks=1)
    assert prove(symbolic, {"M": 31, "N": 4})
    for m in (31, 32, 33):
        assert prove(text(rounds.replace("64", f"{m}").replace("N", "4"), f"%x: f32[4, {m}]", ranks=1))
    assert len(analysed) == 1
    for n in (5, 6, 6):
        program = text(rounds.replace("N", f"{n}"), f"%x: f32[{n}, 64]", ranks=1)
        if n == 5:
            assert prove(program) is program
            continue
        with pytest.raises(HostIRError, match="race on %t"):
            prove(program)
    assert len(analysed) == 4


def test_numbers_of_rows_that_the_flags_do_not_divide_share_no_proof() -> None:
    flags = """  %y: f32[R, 8] = allocate
  %f: flag[4] = allocate_symmetric
  %r = rank of %x over didx
  for %i in 0..4 { signal %f[%i] = 1 at %r over didx }
  matmul %x, %w -> %y ready %f >= 1 from 0"""
    head = "%x: f32[R, 8], %w: f32[8, 8]"
    for rows in (4, 8):
        assert prove(text(flags.replace("R", f"{rows}"), head.replace("R", f"{rows}"), ranks=1))
    for rows in (6, 7):
        with pytest.raises(HostIRError, match="4 flags do not divide"):
            prove(text(flags.replace("R", f"{rows}"), head.replace("R", f"{rows}"), ranks=1))


# Blocks of rows of several axes -----------------------------------------------------------------------------------
GATHERED = "%a: f32[M@didx, 3, 8], %b: f32[8, 4]) -> (%c) {\n  %f: f32[M, 3, 8] = reshard %a\n  %c: f32[M, 3, 4]"
SCATTERED = "%f: f32[M, 3, 8@didx], %b: f32[8@didx, 4]) -> (%c) {\n  %c: f32[M@didx, 3, 4]"


@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
@pytest.mark.parametrize("ends", [GATHERED, SCATTERED])
def test_blocks_of_rows_that_cut_the_first_axis_evenly_share_one_signature(ends: str, strategy: str) -> None:
    fusion = hi.parse(f"hostir 1\nmesh @mesh [didx] = 0 1\nfusion @rows({ends} = matmul %f, %b\n}}\n")
    program = hi.lower(fusion, strategy)
    (many,) = by_signature(program, range(2, 40, 2)).values()
    first = relations(program, {"M": many[0]}, calls=2)
    assert first != "refused"
    assert all(relations(program, {"M": m}, calls=2) == first for m in many[1:])


def test_blocks_of_rows_that_do_not_cut_the_first_axis_evenly_have_separate_signatures() -> None:
    program = hi.parse("""hostir 1
mesh @mesh [didx] = 0
program @rows(%a: f32[M, 4, 8], %b: f32[8, 4]) -> (%c) {
  %f: flag[4] = allocate_symmetric
  %c: f32[M, 4, 4] = allocate
  for %i in 0..4 { signal %f[%i] = 1 at 0 over didx }
  matmul %a, %b -> %c ready %f >= 1 from 0
}
""")
    groups = by_signature(program, (1, 2, 3, 4, 5, 6, 8, 12))
    assert [4, 8, 12] in groups.values()
    assert all(len(group) == 1 for group in groups.values() if group != [4, 8, 12])
