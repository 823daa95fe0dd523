from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.check import check_structure
from hostir.ir import Diagnostic, HostIRError, Program, parse
from hostir.nvfuser import print_nvfuser, read_nvfuser
from tests.golden import Golden
from tests.same_names import same_up_to_names

CASES = Path(__file__).parent.parent / "cases" / "nvfuser"
DUMPS = {path.stem: path.read_text() for path in sorted(CASES.glob("*.txt"))}
SEED = DUMPS["seed_3606"]


def read(text: str, file: str = "dump.txt") -> Program:
    program, warnings = read_nvfuser(text, file)
    assert not warnings
    return program


def container(inputs: str, outputs: str, *body: str) -> str:
    return "\n".join([f"%HostIrContainer {{ ({inputs}) -> ({outputs}) :", *(f"  {line}" for line in body), "}"])


def refused(text: str) -> str:
    """Return the error of a dump that is refused with one diagnostic."""
    with pytest.raises(HostIRError) as raised:
        read_nvfuser(text, "dump.txt")
    assert len(raised.value.diagnostics) == 1
    assert re.match(r"dump\.txt:\d+:\d+: error: ", str(raised.value))
    assert "^" in str(raised.value)
    return str(raised.value)


# Reading ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_reads_as_a_valid_program(name: str, golden: Golden) -> None:
    program, _ = read_nvfuser(DUMPS[name], f"{name}.txt")
    assert check_structure(program) == []
    assert parse(str(program)) == program
    golden(f"nvfuser/{name}.hir", str(program))


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_prints_in_the_current_form_and_reads_back(name: str, golden: Golden) -> None:
    program, _ = read_nvfuser(DUMPS[name], f"{name}.txt")
    text = print_nvfuser(program)
    again = read(text)
    assert same_up_to_names(again, program)
    assert print_nvfuser(again) == text
    if name == "seed_3606":
        golden("nvfuser/seed_3606.printed", text)


def test_an_output_defined_only_inside_a_loop_is_reported_and_dropped() -> None:
    program, warnings = read_nvfuser(SEED, "seed.txt")
    assert [v.name for v in program.outputs] == ["T2"]
    assert len(warnings) == 1
    assert str(warnings[0]).startswith("seed.txt:1:173: warning: the output T4 exists in the rounds of a loop only")


def test_sizes_that_must_be_equal_can_be_bound_by_any_of_their_names() -> None:
    program, _ = read_nvfuser(SEED, "seed.txt")
    assert program.aliases == (("i2", "8"), ("i5", "i4"))
    sizes = {"i0": 4, "i3": 16, "i4": 64, "i6": 32}
    program.check_sizes(sizes)
    program.check_sizes(sizes | {"i2": 8, "i5": 64})


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ({"i5": 32}, "i5=32 does not fit @seed, where i5 equals i4"),
        ({"i2": 4}, "i2=4 does not fit @seed, where i2 is 8"),
        ({"i7": 4}, "@seed has no size 'i7'"),
    ],
)
def test_a_size_that_contradicts_the_dump_is_refused(binding: dict[str, int], message: str) -> None:
    program, _ = read_nvfuser(SEED, "seed.txt")
    with pytest.raises(HostIRError) as raised:
        program.check_sizes({"i0": 4, "i3": 16, "i4": 64, "i6": 32} | binding)
    assert message in str(raised.value)


def test_sizes_that_cannot_be_equal_are_refused() -> None:
    a, b, c = "T0_g_float[iS0{4}, iS1{8}]", "T1_g_float[iS2{9}, iS3{5}]", "T2_g_float[iS4{4}, iS5{5}]"
    message = refused(container(f"{a}, {b}", c, f"{c} = matmul({a}, {b})"))
    assert "sizes do not fit: %T0 has 8 in axis 1, %T1 has 9 in axis 0" in message


def test_equal_sizes_are_inferred_across_statements() -> None:
    a, b, c, d = "T0_g_float[iS0{i0}]", "T1_g_float[iS1{i1}]", "T2_g_float[iS2{i2}]", "T3_g_float[iS3{12}]"
    program = read(container(f"{a}, {b}", d, f"{c} = {a} + {b};", f"{d} = {c} * {a};"))
    assert program.size_names == frozenset()
    assert program.aliases == (("i0", "12"), ("i1", "12"), ("i2", "12"))


def test_without_a_mesh_the_device_axis_determines_the_number_of_devices() -> None:
    program = read(container("T0_g_float[ideviceIdx.x0{6}]", "T0_g_float[ideviceIdx.x0{6}]"))
    assert program.meshes[0].devices == tuple(range(6))


def test_a_dump_without_device_axes_is_for_one_device() -> None:
    program = read(container("T0_g_float[iS0{6}]", "T0_g_float[iS0{6}]"))
    assert program.meshes[0].devices == (0,)


def test_device_axes_moved_to_the_front_are_matched_with_splits_in_order() -> None:
    x = "T0_g_float[ideviceIdx.y0{2}, ideviceIdx.x1{2}, iS2{5}, iS3{( ceilDiv(i0, 2) )}, iS4{( ceilDiv(i1, 2) )}]"
    program = read(container(x + " (DeviceMesh{{0 1}{2 3}})", x + " (DeviceMesh{{0 1}{2 3}})"))
    assert str(program.inputs[0].type) == "f32[5, i0@didy, i1@didx]"


@pytest.mark.parametrize(
    ("printed", "meant"),
    [
        # A stream axis outermost of one axis, devices on another.
        ("istreamIdx0{3}, ideviceIdx.x1{2}, iS2{( ceilDiv(i0, 3) )}, iS3{10}", "i0, 20@didx"),
        ("istreamIdx0{3}, iS1{( ceilDiv(i0, 3) )}, ideviceIdx.x2{2}, iS3{10}", "i0, 20@didx"),
        # Both on one axis, either one outside.
        ("ideviceIdx.x0{2}, istreamIdx1{3}, iS2{( ceilDiv(( ceilDiv(i0, 2) ), 3) )}", "i0@didx"),
        ("istreamIdx0{3}, ideviceIdx.x1{2}, iS2{( ceilDiv(( ceilDiv(i0, 3) ), 2) )}", "(3 i0/3@didx)"),
        ("istreamIdx0{2}, ideviceIdx.x1{2}, iS2{3}", "(2 6@didx)"),
        # The parts of a split are numbered one after the other.
        ("istreamIdx4{3}, ideviceIdx.x6{2}, iS0{4}, iS5{5}, iS7{6}", "4, 15, 12@didx"),
        ("istreamIdx9{3}, ideviceIdx.x6{2}, iS7{4}, iS1{5}, iS10{6}", "8@didx, 5, 18"),
        # A device axis with no matching split is a separate axis.
        ("ideviceIdx.x0{2}, iS1{4}", "2@didx, 4"),
        ("ideviceIdx.x2{2}, iS1{4}, iS3{5}", "4, 10@didx"),
    ],
)
def test_the_axes_before_the_split_are_recovered(printed: str, meant: str) -> None:
    x = f"T0_g_float[{printed}] (DeviceMesh{{0 1}})"
    assert str(read(container(x, x)).inputs[0].type) == f"f32[{meant}]"


def test_the_use_of_a_tensor_determines_which_axis_its_device_axis_splits() -> None:
    x, out = "T0_g_float[iS0{n}, iS1{8}]", "T2_g_float[ideviceIdx.x4{2}, iS5{n}, iS6{6}]"
    weight = "T1_g_float[ideviceIdx.x2{2}, iS3{6}, iS9{8}]"
    program = read(container(f"{x}, {weight}", out, f"{out} = linear({x}, {weight})"))
    assert [str(v.type) for v in program.inputs] == ["f32[n, 8]", "f32[12@didx, 8]"]
    out = "T2_g_float[ideviceIdx.x4{2}rf, iS5{n}, iS6{6}]"
    x = "T0_g_float[ideviceIdx.x0{2}, iS7{n}, iS1{8}]"
    program = read(container(f"{x}, {weight}", out, f"{out} = linear({x}, {weight})"))
    assert [str(v.type) for v in program.inputs] == ["f32[n, 16@didx]", "f32[6, 16@didx]"]


def by_hand(name: str, *extents: object) -> str:
    """Return a tensor of a hand-written program, printed with the extents of one rank's part."""
    axes = ", ".join(f"iS{4 * int(name[1:]) + k}{{{extent}}}" for k, extent in enumerate(extents))
    return f"{name}_g_float[{axes}] (DeviceMesh{{0 1}})"


def summed(collective: str, x: str, out: str) -> list[str]:
    return [f"Communication 1 (type={collective}, team=(0 1), input={x}, output={out})", "Wait(Communication 1)"]


A, B, AB = by_hand("T0", "m", "k"), by_hand("T1", "k", "n"), by_hand("T2", "m", "n")


@pytest.mark.parametrize(
    ("collective", "out", "expected"),
    [("Allreduce", by_hand("T3", "m", "n"), "f32[m, n]"), ("ReduceScatter", by_hand("T3", "p", "n"), "f32[m@didx, n]")],
)
def test_a_product_that_is_summed_over_ranks_contracts_a_sharded_axis(collective: str, out: str, expected: str) -> None:
    program = read(container(f"{A}, {B}", out, f"{AB} = matmul({A}, {B})", *summed(collective, AB, out)))
    assert [str(v.type) for v in program.inputs] == ["f32[m, 2*k@didx]", "f32[2*k@didx, n]"]
    assert [str(v.type) for v in program.outputs] == [expected]
    assert "%T2: f32[m, n] partial(didx)" in str(program)
    assert check_structure(program) == []


def test_constant_extents_of_one_rank_are_read() -> None:
    a, b, ab, out = by_hand("T0", 8, 3), by_hand("T1", 3, 5), by_hand("T2", 8, 5), by_hand("T3", 4, 5)
    program = read(container(f"{a}, {b}, {out}", out, f"{ab} = matmul({a}, {b})", *summed("ReduceScatter", ab, out)))
    assert [str(v.type) for v in program.inputs] == ["f32[8, 6@didx]", "f32[6@didx, 5]", "f32[8@didx, 5]"]


def test_the_contracted_axis_is_traced_to_the_inputs() -> None:
    x, up, down = by_hand("T0", "m", "k"), by_hand("T1", "h", "k"), by_hand("T2", "n", "h")
    hidden, act, y, z, out = (by_hand(f"T{n}", "pm"[n < 7], "nh"[n < 5]) for n in range(3, 8))
    body = [f"{hidden} = linear({x}, {up})", f"{act} = gelu({hidden})", f"{y} = linear({act}, {down})"]
    body += [f"{z} = view({y})", *summed("ReduceScatter", z, out)]
    program = read(container(f"{x}, {up}, {down}", out, *body))
    assert [str(v.type) for v in program.inputs] == ["f32[m, k]", "f32[2*h@didx, k]", "f32[n, 2*h@didx]"]
    assert [str(v.type) for v in program.outputs] == ["f32[m@didx, n]"]
    assert check_structure(program) == []


def test_a_printed_device_axis_of_an_operand_is_kept() -> None:
    a = "T0_g_float[iS0{m}, ideviceIdx.x1{2}, iS2{( ceilDiv(k, 2) )}] (DeviceMesh{0 1})"
    b, out = by_hand("T1", "q", "n"), by_hand("T3", "p", "n")
    program = read(container(f"{a}, {b}", out, f"{AB} = matmul({a}, {b})", *summed("ReduceScatter", AB, out)))
    assert [str(v.type) for v in program.inputs] == ["f32[m, k@didx]", "f32[k@didx, n]"]
    assert check_structure(program) == []


@pytest.mark.parametrize(
    "product",
    [
        f"{AB} = matmul({by_hand('T0', 'n', 'n')}, {by_hand('T0', 'n', 'n')})",  # rows and columns on the same devices
        f"{by_hand('T4', 'm', 'k')} = view({A})\n  {AB} = matmul({by_hand('T4', 'm', 'k')}, {B})",
        f"{AB} = relu({A})",
    ],
)
def test_a_sum_of_tensors_that_are_not_partial_is_refused(product: str) -> None:
    a = by_hand("T0", "n", "n") if "T0_g_float[iS0{n}" in product else A
    message = refused(container(f"{a}, {B}", AB, product, *summed("Allreduce", AB, AB)))
    assert "T2 holds nothing to sum over didx" in message


def test_views_in_a_circle_are_refused() -> None:
    other = by_hand("T3", "m", "n")
    body = [f"{AB} = view({other})", f"{other} = view({AB})", *summed("Allreduce", AB, AB)]
    assert "T3 does not exist here" in refused(container(f"{A}, {B}", AB, *body))


SLICED = "T{0}_g_float[istreamIdx{1}{{2}}, iS{2}{{( ceilDiv(n, 2) )}}]"


def test_inside_a_loop_a_tensor_from_outside_means_the_slice_of_the_iteration() -> None:
    x, y = SLICED.format(0, 0, 1), SLICED.format(1, 2, 3)
    program = read(container(x, y, "FOR i7 from 0 to 2:", f"  {y} = relu({x})"))
    assert re.findall(r"(\w+) %T.*?\[(.*) of 2\]|(relu .*)", str(program)) == [
        ("chunk", "%i7", ""),
        ("chunk", "%i7", ""),
        ("", "", "relu %T0_1 -> %T1_1"),
    ]
    assert "%T1: f32[n] = allocate\n  for" in str(program)


def test_outside_of_loops_a_tensor_means_all_of_its_slices() -> None:
    x, y = SLICED.format(0, 0, 1), SLICED.format(1, 2, 3)
    assert [s.keyword() for s in read(container(x, y, f"{y} = relu({x})")).body] == ["allocate", "relu"]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("iS0{2}, istreamIdx1{3}, iS2{( ceilDiv(( ceilDiv(n, 2) ), 3) )}", "the slices of axis 0 of T1 are not contig"),
        ("istreamIdx0{3}, istreamIdx1{2}, iS2{n}", "T0 has 2 streamIdx axes"),
        ("istreamIdx0{4}, iS2{( ceilDiv(n, 4) )}", "T1 is meant in 4 slices, and no loop around this has 4 rounds"),
    ],
)
def test_slices_that_cannot_be_cut_are_refused(printed: str, message: str) -> None:
    x, y = f"T0_g_float[{printed}]", f"T1_g_float[{printed}]"
    assert message in refused(container(x, y, f"{y} = ALLOCATE()", "FOR i7 from 0 to 3:", f"  {y} = relu({x})"))


def test_a_tensor_without_deallocate_is_freed_at_the_end_of_its_block() -> None:
    x, y, z, w, v = (f"T{n}_g_float[iS{n}{{n}}]" for n in range(5))
    text = container(x, w, f"{y} = relu({x})", f"{z} = relu({y})", f"{w} = view({z})", "FOR i7 from 0 to 2:")
    program = read(text.replace("\n}", f"\n    {v} = relu({x})\n}}"))
    assert re.findall(r"free %\w+|for|}", str(program)) == ["for", "free %T4", "}", "free %T1", "}"]  # T3 shows T2


@pytest.mark.parametrize(
    ("stream", "expected", "pool"),
    [
        ("Stream 1", "1", 4),
        ("Stream 6", "2", 4),
        ("Stream i0", "%i0 % 4", 4),
        ("Stream ( ( i0 + 1 ) % numberOfStreams )", "(%i0 + 1) % 4", 4),
        ("Stream 0x1f", "4", 5),
    ],
)
def test_a_stream_index_is_taken_modulo_the_pool(stream: str, expected: str, pool: int) -> None:
    x = "T0_g_float[iS0{n}]"
    program = read(container(x, x, "FOR i0 from 0 to n:", f"  SetCurrentStream({stream})"))
    assert f"set_stream {expected} }}" in str(program)
    assert program.streams == pool


def test_current_streams_are_numbered_in_order() -> None:
    x = "T0_g_float[iS0{n}]"
    text = container(x, x, "GetCurrentStream into Stream 7", "Stream 0x3 = GetCurrentStream()", "Synchronize Stream 7")
    assert re.findall(r"%\w+ = current_stream|synchronize.*", str(read(text))) == [
        "%stream = current_stream",
        "%stream_1 = current_stream",
        "synchronize %stream",
    ]


def test_a_different_select_of_the_same_name_defines_a_new_value() -> None:
    x, y = "T0_g_float[iS0{3}, iS1{4}]", "T1_l_float[iS2{4}]"
    select = "{} = select( {}, axis = iS0{{3}}, index = {} )"
    program = read(container(x, y, select.format(y, x, 0), select.format(y, x, 0), select.format(y, x, 1)))
    assert [str(s.defines(program.phase)) for s in program.body] == ["%T1", "%T1_1"]
    assert [v.name for v in program.outputs] == ["T1_1"]


def test_a_view_that_is_stored_in_an_allocated_tensor_is_copied() -> None:
    x, y = "T0_g_float[iS0{3}, iS1{4}]", "T1_g_float[iS3{4}, iS2{3}]"
    program = read(container(x, y, f"{y} = ALLOCATE(mem_type=global)", f"{y} = Set.Permute( {x} )"))
    assert [s.keyword() for s in program.body] == ["allocate", "permute", "copy"]
    assert check_structure(program) == []


def test_text_around_the_container_is_ignored() -> None:
    x = "T0_g_float[iS0{n}]"
    around = "[ RUN ] some test\n" + container(x, x) + "\nIndex definitions:\n  i7 = ( i0 + 1 );\nnumberOfStreams = 2\n"
    assert read(around).streams == 2


def test_a_program_is_named_after_its_file() -> None:
    x = "T0_g_float[iS0{n}]"
    names = {file: read(container(x, x), file).name for file in ("a/b-c.txt", "3606.txt", "<text>", "é.txt")}
    assert names == {"a/b-c.txt": "b_c", "3606.txt": "dump_3606", "<text>": "text", "é.txt": "dump"}


# Statements without a meaning here --------------------------------------------------------------------------------
X = "T0_g_float[iS0{4}, iS1{n}] (DeviceMesh{0 1})"
Y = "T1_g_float[iS2{4}, iS3{n}] (DeviceMesh{0 1})"
D = "T2_g_float[ideviceIdx.x4{2}, iS5{n}] (DeviceMesh{0 1})"


NO_MEANING = [
    (f"PostOnStream (HostUnit0, Inputs:{{{X}, }}, Outputs:{{{Y}, }})", "PostOnStream has no meaning here"),
    ("LaunchKernel(", "LaunchKernel has no meaning here"),
    ("HostUnit3: Inputs={} -> Outputs={}", "HostUnit has no meaning here"),
    ("IF Manual ( i3 == rank ):", "IF has no meaning here"),
    ("ELSE:", "ELSE has no meaning here"),
    (
        f"P2PCommunication 38 (type=send, buffer={X}, peer=i84, backend=CUDA)",
        "P2PCommunication has no meaning",
    ),
    (f"CollectivePermute 4 (team=(0 1), send_peer=1, input={X}, output={Y})", "CollectivePermute has no meaning"),
    ("ShareMemHandles(P2PCommunication 37 (), ", "ShareMemHandles has no meaning here"),
    ("StartCoalescing", "StartCoalescing has no meaning here"),
    ("EndCoalescing 33", "EndCoalescing has no meaning here"),
    ("Dispatch 5 (num_experts=8, backend=NCCL)", "Dispatch has no meaning here"),
    ("Combine 6 (num_experts=8, backend=NCCL)", "Combine has no meaning here"),
    (f"{Y} = SymmetricContiguousView({X})", "SymmetricContiguousView has no meaning here"),
    ("Sleep(3)", "'Sleep' has no meaning here"),
    ("Syncronize(Stream 0)", "did you mean 'Synchronize'?"),
    (f"{Y} = softmax({X})", "'softmax' has no meaning here"),
    (f"{Y} = matmull({X}, {X})", "did you mean 'matmul'?"),
    (f"{Y} = {X} - {X};", "'-' has no meaning here"),
    (f"{Y} = {X} * double(2);", "unexpected 'double'"),
    (f"{Y} = reduction( {X}, op = max, initial value = 0 )", "a reduction by 'max' has no meaning here"),
    (f"{Y} = reduction( {X}, op = add )", "this reduction sums 0 axes"),
    (f"{Y} = ALLOCATE(mem_type=global, zero_init=true)", "filled with zeros has no meaning here"),
    (f"Communication 1 (type=Reduce, team=(0 1), input={D}, output={Y})", "type Reduce has no meaning here"),
    (f"Communication 1 (type=Allgathr, team=(0 1), input={D}, output={Y})", "did you mean 'Allgather'?"),
    (f"Communication 1 (type=Allgather, team=(0 2), input={D}, output={Y})", "the team (0 2) is no row or column"),
    (f"Communication 1 (type=Allgather, team=(), input={D}, output={Y})", "a team needs devices"),
    (f"Communication 1 (type=Allgather, input={D}, output={Y})", "Communication lacks 'team='"),
    (f"Communication 1 (type=Broadcast, team=(0 1), root=i9, input={X}, output={Y})", "Broadcast from this root"),
    (
        f"Communication 1 (type=Broadcast, team=(0 7), root=0, input={X}, output={Y})",
        "devices that neither mesh has",
    ),
    (f"Communication 1 (type=Allreduce, team=(0 1), input={X}, output={Y})", "T0 holds nothing to sum over didx"),
    ("Wait(Communication 3)", "Communication 3 is not in flight here"),
    ("SetCurrentStream(Stream i9)", "'i9' is no loop index here"),
    ("SetCurrentStream(Stream ( 1 % 0 ))", "divided by zero"),
    ("FOR i3 from 1 to 4:", "a loop that starts at '1'"),
    (f"{Y} = HirAliasSelect( {X}, axis = iS9{{4}}, index = 0 )", "is not one of the axes of T0"),
    (f"{Y} = HirAliasSelect( {X}, axis = iS0{{4}}, index = 0 )", "T1 is printed with 2 axes, but select gives 1"),
    (f"T3_l_float[iS6{{n}}] = select( {D}, axis = ideviceIdx.x4{{2}}, index = 0 )", "axis 0 of %T2 lies over didx"),
    (f"{Y} = ShardByStream({X}, stream_index=0)", "neither T0 nor T1 has a streamIdx axis"),
    (f"Deallocate {{ {Y} }}", "T1 does not exist here"),
    ("T3_g_int64_t[iS0{4}] = ALLOCATE(mem_type=global)", "tensors of 'int64_t' have no meaning here"),
    ("T3_g_float[iblockIdx.x0{4}] = ALLOCATE(mem_type=global)", "the axis 'iblockIdx.x0' has no meaning here"),
    ("T3_g_float[iS0{( i0 + 1 )}] = ALLOCATE(mem_type=global)", "'+' in a size"),
    ("T3_g_float[bS0{1 ex i3}] = ALLOCATE(mem_type=global)", "has an offset or is expanded"),
    ("T3_g_float[iS0{0}] = ALLOCATE(mem_type=global)", "a size must be at least 1"),
    ("T3_g_float[ideviceIdx.y0{2}] = ALLOCATE(mem_type=global)", "has no such axis"),
    ("T3_g_float[ideviceIdx.x0{3}] = ALLOCATE(mem_type=global)", "2 devices cannot hold an axis of 3"),
    ("T3_g_float[iS0{4}] (DeviceMesh{0 0}) = ALLOCATE(mem_type=global)", "a mesh needs devices, each once"),
    ("T3_g_float[iS0{4}] (DeviceMesh{{0 1}{2}}) = ALLOCATE(mem_type=global)", "in rows of one length"),
    ("SetCurrentStream(Stream " + "(" * 4000 + ")", "levels of nesting"),
    ("SetCurrentStream(Stream (0" + " + 1" * 4000 + "))", "operators in a row"),
    ("FOR i3 from 0 to " + "9" * 6000 + ":", "expected: an integer"),
]


@pytest.mark.parametrize(("line", "message"), NO_MEANING, ids=[message for _, message in NO_MEANING])
def test_a_statement_without_a_meaning_is_refused_at_its_position(line: str, message: str) -> None:
    text = refused(container(f"{X}, {D}", X, line))
    assert message in text
    assert text.startswith("dump.txt:2:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "this is no dump of nvFuser's host IR"),
        ("hostir 1\n", "this is no dump of nvFuser's host IR"),
        ("%HostIrContainer {", "the dump ends too early"),
        (container(X, X).removesuffix("}"), "the dump ends too early"),
        (container(X, "T9_g_float[iS0{4}]"), "the output T9 is never computed"),
        (container("iS0{4}", X), "expected: a tensor"),
        (container(X, X) + "\nnumberOfStreams = 0", "a pool of 0 streams"),
    ],
)
def test_a_text_that_is_not_a_dump_is_refused(text: str, message: str) -> None:
    assert message in refused(text)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(HostIRError, match="this is no dump of nvFuser's host IR"):
        read_nvfuser("", "dump.txt")


def test_too_many_nested_loops_are_refused() -> None:
    loops = [f"{' ' * k}FOR i{k} from 0 to 2:" for k in range(2000)]
    assert "levels of nesting" in refused(container(X, X, *loops))


EDITS = st.tuples(
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from([*"()[]{}=,:;/%*x 0123456789\n\té", "rf", "FOR i in ", "ceilDiv("]),
)


def program_or_diagnostics(text: str) -> tuple[Program | None, Sequence[Diagnostic]]:
    try:
        return read_nvfuser(text, "dump.txt")[0], ()
    except HostIRError as error:
        return None, error.diagnostics


@settings(max_examples=300)
@given(st.sampled_from(sorted(DUMPS)), st.floats(0, 1), st.lists(EDITS, max_size=4))
def test_a_damaged_dump_is_a_program_or_a_diagnostic(
    name: str, kept: float, edits: list[tuple[float, int, str]]
) -> None:
    text = DUMPS[name]
    for place, removed, inserted in edits:
        at = int(place * len(text))
        text = text[:at] + inserted + text[at + removed :]
    for damaged in (text, text[: int(kept * len(text))]):
        program, problems = program_or_diagnostics(damaged)
        if program is not None:
            assert parse(str(program)) == program
        else:
            assert problems
            assert all(d.span and d.message for d in problems)


@settings(max_examples=100)
@given(st.text(max_size=80))
def test_any_text_in_a_container_is_a_program_or_a_diagnostic(line: str) -> None:
    for text in (line, container(X, X, line)):
        program, problems = program_or_diagnostics(text)
        assert program is not None or [problem for problem in problems if problem.message]
