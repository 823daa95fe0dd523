"""The DSL: fusions that users write, their programs, and names and positions taken from the user's lines."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hostir as hi
from hostir.ir import HostIRError, Phase
from hostir.ir.sizes import Size
from hostir.ir.source import from_here
from hostir.lower import STRATEGIES

DIDx, DIDy, Stream = hi.ParallelType.DIDx, hi.ParallelType.DIDy, hi.ParallelType.Stream


def ag_matmul(ranks: int = 8, S: int = 4, M: int = 4096, K: int = 1024, N: int = 512, dtype: str = "bf16") -> hi.Fusion:
    with hi.Fusion("ag_matmul") as fusion:
        a = hi.tensor("a", [S, ranks, M // (S * ranks), K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = hi.matmul(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(hi.ParallelType.DIDx)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def test_a_fusion_prints_as_a_program() -> None:
    fusion = ag_matmul()
    assert str(fusion) == (
        "hostir 1\n"
        "mesh @mesh [didx] = 0 1 2 3 4 5 6 7\n"
        "fusion @ag_matmul(%a: bf16[4, 8@didx, 128, 1024], %b: bf16[1024, 512]) -> (%c) {\n"
        "  %c: bf16[4@stream, 8, 128, 512] = matmul %a, %b\n"
        "}\n"
    )
    assert hi.parse(str(fusion)) == fusion.program()
    assert fusion.program().phase is Phase.FUSION
    assert hi.check(fusion) == []


def one(shape: list[object], dtype: str = "f32") -> hi.Tensor:
    with hi.Fusion("one"):
        return hi.tensor("x", shape, dtype)


def test_every_function_adds_one_statement() -> None:
    with hi.Fusion("all") as fusion:
        x = hi.tensor("x", [4, 6, 8], "f32")
        w = hi.tensor("w", [8, 5], "f32")
        v = hi.tensor("v", [5, 5], "f32")
        bias = hi.tensor("bias", [5], "f32")
        y = x @ w + bias
        z = hi.linear(y * y, v, bias)
        u = hi.silu(hi.gelu(hi.relu(z)))
        c = hi.cast(u, "bf16")
        s = hi.sum(c, -1)
        p = hi.permute(s, (-1, 0))
        r = hi.reshape(p, [24])
        e = hi.reshard(r)
        fusion.output(e, y)
    statements = [line.split("= ", 1)[1] for line in str(fusion).splitlines() if "= " in line][1:]
    assert statements == [
        "matmul %x, %w",
        "add %matmul, %bias",
        "mul %y, %y",
        "linear %mul, %v, %bias",
        "relu %z",
        "gelu %relu",
        "silu %gelu",
        "cast %u to bf16",
        "sum %c axis 2",
        "permute %s (1, 0)",
        "reshape %p",
        "reshard %r",
    ]
    assert [v.name for v in fusion.program().outputs] == ["e", "y"]


def test_results_are_named_after_the_variable_on_the_line_of_the_user() -> None:
    with hi.Fusion("names") as fusion:
        x = hi.tensor("x", [4], "f32")
        x = hi.relu(x)
        typed: hi.Tensor = hi.relu(x)
        pair = [hi.relu(typed), hi.gelu(typed)]
        broken = hi.add(
            pair[0],
            pair[1],
        )
        fusion.output(broken)
    assert list(fusion.tensors) == ["x", "x_1", "typed", "relu", "gelu", "add"]


def test_sizes_may_be_symbols_and_quotients() -> None:
    x = one(["M", "K*2/8", 4])
    assert [str(s) for s in x.shape] == ["M", "K/4", "4"]
    assert Size.of("K/4") in x.shape


def test_one_size_of_a_reshape_may_be_inferred() -> None:
    with hi.Fusion("rest"):
        x = hi.tensor("x", [4, "M", 6], "f32")
        shapes = [hi.reshape(x, shape).shape for shape in ([-1], [8, -1], ("M", -1, 2), [-1, 24])]
    assert [[str(s) for s in shape] for shape in shapes] == [["24*M"], ["8", "3*M"], ["M", "12", "2"], ["M", "24"]]


def test_dtypes_and_devices_of_torch_are_accepted() -> None:
    with hi.Fusion("torch"):
        x = hi.tensor("x", [4], torch.float32)
        assert [str(hi.cast(x, d).dtype) for d in (torch.float16, torch.bfloat16, "f32")] == ["f16", "bf16", "f32"]
    assert str(x.dtype) == "f32"
    mesh = hi.DeviceMesh(torch.arange(4).view(2, 2))
    assert (mesh.shape, mesh.devices) == ((2, 2), (0, 1, 2, 3))
    assert hi.DeviceMesh(torch.arange(4)).devices == hi.DeviceMesh(range(4)).devices


@pytest.mark.parametrize(
    ("write", "message", "hint"),
    [
        (lambda a: None @ a, "not a tensor: None", ""),
        (lambda a: a @ 2, "not a tensor: 2", ""),
        (lambda a: True * a, "not a tensor: True", ""),
        (lambda a: hi.add(1, 2), "not a tensor: 1", ""),
        (lambda a: a + 1j, "not a tensor: 1j", ""),
        (lambda a: a / a, "a fusion divides by numbers only", "holds the inverse"),
        (lambda a: 1 / a, "a fusion divides by numbers only", "holds the inverse"),
        (lambda a: a / 0, "%a is divided by 0, which has no inverse", ""),
        (lambda a: a * float("nan"), "a tensor meets the number nan", ""),
        (lambda a: a + 10**400, f"a tensor meets the number 1{'0' * 37}...{'0' * 39}", ""),
        (lambda a: a * 1e300, "scale of f32 by 1e+300", ""),
    ],
)
def test_unsupported_arithmetic_is_refused_at_its_line(
    write: Callable[[hi.Tensor], hi.Tensor], message: str, hint: str
) -> None:
    with hi.Fusion("lacks"):
        a = hi.tensor("a", [4], "f32")
        with pytest.raises(HostIRError) as wrong:
            write(a)
    (diagnostic,) = wrong.value.diagnostics
    assert diagnostic.message == message
    assert hint in diagnostic.hint
    assert diagnostic.span


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 0.5,
        lambda x: 3 * x + 1,
        lambda x: 1 - x,
        lambda x: np.float32(2) - x / 3,
        lambda x: -x - 1 / 4,
        lambda x: x - x * np.int64(2),
    ],
)
def test_arithmetic_with_numbers_gives_the_results_of_torch_by_every_strategy(
    strategy: str, compute: Callable[[Any], Any]
) -> None:
    with hi.Fusion("numbers") as fusion:
        a, b = hi.tensor("a", ["M", 8], "f64"), hi.tensor("b", [8, 6], "f64")
        products = hi.matmul(compute(a), b), a @ b  # before the product, and after it as a partial sum
        outputs = [hi.relu(products[0]), compute(products[1])]
        fusion.output(*outputs)
    mesh = hi.DeviceMesh(range(2))
    a.shard(1, mesh)
    b.shard(0, mesh)
    outputs[1].shard(0, mesh)
    program = hi.lower(fusion, strategy)
    assert hi.parse(str(program)) == program
    assert hi.check(program) == []
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    first, second = hi.run(program, x, y)
    torch.testing.assert_close(first, (compute(x) @ y).relu())
    torch.testing.assert_close(second, compute(x @ y))


def test_arithmetic_with_a_number_rounds_only_the_result() -> None:
    with hi.Fusion("wide") as fusion:
        x = hi.tensor("x", [2], "f16")
        fusion.output(x * 2.0**20, x + 100_000)
    scaled, moved = hi.run(fusion, torch.tensor([2.0**-10, -0.0], dtype=torch.float16))
    assert scaled.tolist() == [1024, 0]
    assert math.copysign(1, scaled[1]) == -1
    assert moved.tolist() == [math.inf, math.inf]
    (moved,) = hi.run(fusion, torch.tensor([-60_000, -65_504], dtype=torch.float16))[1:]
    assert moved.tolist() == [40_000, 34_496]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmax", r"no attribute 'softmax'; it has .*\bgelu, .*\brms_norm, .*\bsilu\b"),
        ("silo", r"no attribute 'silo'; did you mean 'silu'\? it has .*\bsilu\b"),
        ("nvfuser", r"no attribute 'nvfuser'; write 'import hostir.nvfuser' first$"),
        ("__path_to__", r"no attribute '__path_to__'$"),
    ],
)
def test_an_unknown_name_of_hostir_raises_an_error_with_the_known_names(name: str, message: str) -> None:
    command = f"import hostir; hostir.{name}"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert re.search(rf"AttributeError: module 'hostir' has {message}", ended.stderr.strip()), ended.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hi.lower(None), "not a fusion: None"),
        (lambda: hi.lower(ag_matmul), "call it, and lower what it returns"),
        (lambda: hi.run(None), "not a fusion: None"),
        (lambda: hi.check(None), "not a program: None"),
        (lambda: hi.parse(None), "not a text: None"),
        (lambda: hi.parse(Path("a.hir")), "such as path.read_text()"),
        (lambda: hi.Executor(ag_matmul()), "not a host program: fusion @ag_matmul"),
        (lambda: hi.Executor(ag_matmul().program()), "@ag_matmul is a fusion"),
    ],
)
def test_an_argument_that_is_not_a_program_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HostIRError) as wrong:
        call()
    assert len(wrong.value.diagnostics) == 1
    assert message in str(wrong.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hi.lower(ag_matmul(), "fusd"), "unknown strategy 'fusd'"),
        (lambda: hi.lower(ag_matmul(), streams=0), "streams must be at least 1, not 0"),
        (lambda: hi.lower(ag_matmul(), "auto", streams=2), "streams=2: 'auto' chooses it too"),
        (lambda: hi.lower(ag_matmul(), sizes={"Q": 3}), "@ag_matmul has no size 'Q'"),
        (lambda: hi.compile(ag_matmul(), strategy="fusd"), "unknown strategy 'fusd'"),
        (lambda: hi.run(ag_matmul(), strategy="fusd"), "unknown strategy 'fusd'"),
        (lambda: hi.Executor(hi.lower(ag_matmul()), machine="cloud"), "unknown machine 'cloud'"),
        (lambda: hi.rms_norm(one([4]), eps=10**400), r"eps is 1000+\.\.\.0+\n"),  # larger than any float
    ],
)
def test_an_invalid_argument_is_shown_at_the_line_of_the_user(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HostIRError, match=message) as wrong:
        call()
    (diagnostic,) = wrong.value.diagnostics
    assert diagnostic.span is not None
    assert (diagnostic.span.file, diagnostic.span.line) == (from_here(__file__), call.__code__.co_firstlineno)


def test_an_input_may_be_a_partial_sum() -> None:
    mesh = hi.DeviceMesh([[0, 1], [2, 3]], names=("dp", "tp"))
    with hi.Fusion("reduced") as fusion:
        x = hi.tensor("x", [8, 6], "f32")
        scattered, summed = hi.reshard(x), hi.relu(x)
        fusion.output(scattered, summed)
    assert x.shard(0, mesh, "dp").partial(mesh, "tp") is x
    assert repr(x) == "%x: f32[8@dp, 6] partial(tp)"
    scattered.shard(0, mesh, "dp").shard(1, mesh, "tp")
    summed.shard(0, mesh, "dp")
    assert "(%x: f32[8@dp, 6] partial(tp))" in str(fusion)
    terms = [torch.randn(4, 6) for _ in range(4)]
    total = torch.cat([terms[0] + terms[1], terms[2] + terms[3]])
    program = hi.lower(fusion)
    first, second = hi.Executor(program, machine="local")(terms)
    for rank, (mine, rows) in enumerate(zip(first, second, strict=True)):
        dp, tp = divmod(rank, 2)
        torch.testing.assert_close(mine, total[4 * dp : 4 * dp + 4, 3 * tp : 3 * tp + 3])
        torch.testing.assert_close(rows, total[4 * dp : 4 * dp + 4].relu())


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (lambda x, mesh: x.partial(4), "not a mesh: 4"),
        (lambda x, mesh: x.partial(mesh, "dp"), "the mesh has no axis 'dp'"),
        (lambda x, mesh: x.partial(mesh, Stream), "Stream is no mesh axis"),
        (lambda x, mesh: x.shard(0, mesh).partial(mesh), "an axis of %x lies on didx, over which it cannot be a sum"),
        (lambda x, mesh: x.partial(mesh).shard(0, mesh), "%x is a partial sum over didx, on which none of its axes"),
        (
            lambda x, mesh: x.partial(mesh).set_device_mesh(hi.DeviceMesh(range(4), names="tp")),
            "%x is a partial sum over didx, which the mesh does not have",
        ),
    ],
)
def test_a_partial_sum_over_an_unknown_axis_or_a_sharding_axis_is_refused(
    mark: Callable[..., object], message: str
) -> None:
    x = one([16, 24])
    with pytest.raises(HostIRError) as wrong:
        mark(x, hi.DeviceMesh(range(4)))
    (diagnostic,) = wrong.value.diagnostics
    assert diagnostic.message.startswith(message)
    assert diagnostic.span


def test_split_keeps_the_shape_and_counts_axes_after_it() -> None:
    x = one([16, 24])
    x.split(0, 4)
    x.split(-1, 3)
    mesh = hi.DeviceMesh(range(4))
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(DIDx)
    x.axis(-2).parallelize(Stream)
    assert repr(x) == "%x: f32[(4@didx 4), (3@stream 8)]"
    assert [s.value for s in x.shape] == [16, 24]


def test_shard_parallelizes_an_axis() -> None:
    mesh = hi.DeviceMesh(range(4))
    assert repr(one([16, 24]).shard(1, mesh)) == "%x: f32[16, 24@didx]"
    assert repr(one([16, 24]).shard(-2, mesh, "didx")) == "%x: f32[16@didx, 24]"


def test_a_mesh_of_two_axes_has_didy_before_didx() -> None:
    default = hi.DeviceMesh([[0, 1, 2], [3, 4, 5]])
    assert (default.shape, default.names) == ((2, 3), ("didy", "didx"))
    named = hi.DeviceMesh([range(3), range(3, 6)], names=("dp", "tp"))
    x = one([4, 6]).shard(0, named, DIDy).shard(1, named, DIDx)
    assert repr(x) == "%x: f32[4@dp, 6@tp]"
    assert repr(one([4, 6]).shard(1, named, "dp")) == "%x: f32[4, 6@dp]"


def test_equal_meshes_are_one_mesh_of_the_program() -> None:
    with hi.Fusion("meshes") as fusion:
        x = hi.tensor("x", [4], "f32")
        y = hi.reshard(hi.relu(x))
        fusion.output(y)
    x.set_device_mesh(hi.DeviceMesh([0, 1]))
    fusion.tensors["relu"].set_device_mesh(hi.DeviceMesh(range(2)))
    y.set_device_mesh(hi.DeviceMesh([1, 2]))
    assert [str(m) for m in fusion.program().meshes] == ["@mesh [didx] = 0 1", "@mesh_1 [didx] = 1 2"]
    assert fusion.program().ranks == 3


def test_a_fusion_without_a_mesh_has_one_rank() -> None:
    with hi.Fusion("alone") as fusion:
        y = hi.relu(hi.tensor("x", [4], "f32"))
        fusion.output(y)
    assert fusion.program().ranks == 1
    assert [s.keyword() for s in hi.lower(fusion).walk()] == ["allocate", "relu"]


def test_annotating_a_tensor_twice_changes_nothing() -> None:
    mesh = hi.DeviceMesh(range(4))
    x = one([16]).shard(0, mesh).shard(0, mesh)
    assert repr(x) == "%x: f32[16@didx]"


def test_fusions_nest_and_are_local_to_their_thread() -> None:
    seen: list[str] = []

    def elsewhere() -> None:
        try:
            hi.tensor("x", [4])
        except HostIRError as wrong:
            seen.append(wrong.diagnostics[0].message)

    with hi.Fusion("outer") as outer:
        hi.tensor("a", [4])
        with hi.Fusion("inner") as inner:
            hi.tensor("b", [4])
        hi.tensor("c", [4])
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert (list(outer.tensors), list(inner.tensors)) == (["a", "c"], ["b"])
    assert seen == ["no fusion is being built"]


def test_a_fusion_may_be_entered_again() -> None:
    with hi.Fusion("twice") as fusion:
        x = hi.tensor("x", [4], "f32")
        with fusion:
            y = hi.relu(x)
        z = hi.gelu(y)
    fusion.output(z)
    assert len(fusion.program().body) == 2


def test_a_fusion_shows_as_markdown() -> None:
    assert ag_matmul()._repr_markdown_().startswith("```\nhostir 1\n")


def test_an_error_points_at_the_line_and_expression_of_the_user() -> None:
    with hi.Fusion("bad"):
        a, b = hi.tensor("a", [4, 8], "f32"), hi.tensor("b", [4, 8], "f32")
        with pytest.raises(HostIRError) as wrong:
            a @ b
    span = wrong.value.diagnostics[0].span
    assert span is not None
    assert Path(span.file).resolve() == Path(__file__)
    assert span.text[span.column - 1 :][: span.width] == "a @ b"


def test_all_lists_the_public_names() -> None:
    assert set(hi.__all__) >= {"Fusion", "DeviceMesh", "ParallelType", "lower", "parse", "check", "run", "Executor"}
    assert all(hasattr(hi, name) for name in hi.__all__)
    assert set(hi.dsl.__all__) <= set(hi.__all__)
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        attrgetter("matmull")(hi)


def test_sizes_of_lower_are_checked_for_every_strategy() -> None:
    with hi.Fusion("rows") as fusion:
        a, b = hi.tensor("a", ["M", 8]), hi.tensor("b", [8, 4])
        c = a @ b
        fusion.output(c)
    a.shard(0, hi.DeviceMesh(range(2)))
    for strategy in ("pipeline", "sequential", "fused", "auto"):
        with pytest.raises(hi.HostIRError, match="@rows has no size 'Q'"):
            hi.lower(fusion, strategy, sizes={"Q": 3})
        with pytest.raises(hi.HostIRError, match="M must be a multiple of 2"):
            hi.lower(fusion, strategy, sizes={"M": 7})
