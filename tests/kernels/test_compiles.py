"""Kernels compiled for Hopper without a GPU: every tile must fit and use tensor cores and TMA."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

import hostir as hi
from hostir.kernels.flags.copies import PER_THREAD, WARPS, push_kernel
from hostir.kernels.flags.pushed import Pushed
from hostir.kernels.flags.signals import Ending
from hostir.kernels.gated import _gate_gradients_kernel, _gate_kernel
from hostir.kernels.grouped import _COLLECTING, MIN_GROUPS, _collect_rows_kernel, _grouped_matmul_kernel, _tile
from hostir.kernels.matmul.kernel import Bias, Constants, Scales, Strides, Workspace, matmul_kernel
from hostir.kernels.matmul.matmul import EXACT_RUN
from hostir.kernels.matmul.tiles import Tile, candidates
from hostir.kernels.norm import _rms_norm_kernel
from hostir.kernels.outer import _grouped_outer_kernel
from hostir.kernels.outer import _tile as outer_tile
from hostir.kernels.quantize import (
    _SQUARE,
    _TILE,
    _quantize_adjacent_kernel,
    _quantize_kernel,
    _quantize_rows_kernel,
    _row_scales_kernel,
    _transpose_kernel,
)
from hostir.kernels.reduce import SumConstants, SumPart, sum_kernel
from hostir.kernels.rows_by_index import _combine_rows_kernel
from tests.kernels.hopper import SHARED_MEMORY, TARGET, counted, hopper, inputs_of

WAITING = ("flags", "timeouts", "epoch", "blocks", "polls")
RAISING = ("raised_flags", "raised_epoch", "raised_height", "counts")


@pytest.fixture(scope="module", autouse=True)
def spills_counted() -> Iterator[None]:
    """Record `spilled` in compiled kernels: the bytes of spilled registers."""
    with counted():
        yield


def compiled(
    tile: Tile,
    *,
    dtype: str,
    descriptors: bool,
    b_is_nk: bool,
    batched: bool = False,
    bias: bool = False,
    ready: dict[str, str] | None = None,
    own_rows: bool = False,
    overlapped: bool = False,
    pairs: bool = False,
    done: int = 0,
    result: str | None = None,
    scales: str = "",
    stepwise: bool = False,
    adds: bool = False,
    dtype_b: str | None = None,
    pushed: int = 0,
    ends: int = 0,
):
    """Compile the matmul kernel for one tile.

    `ready`: the types of the flags and the epoch that it waits for. `done`: the number of blocks with completion flags
    that a tile has rows of. `result`, `dtype_b`: the types of out and b, if they are not `dtype`. `pushed`: the largest
    number of pieces that it copies to peers. `ends`: the size of the `CallEnd` that it carries out.
    """
    columns = tile.n // 2 if tile.halves else tile.n
    lead = "1," if batched else ""
    blocks = {
        "a": f"{lead}{tile.m},{tile.k}",
        "b": f"{tile.n},{tile.k}" if b_is_nk else f"{tile.k},{tile.n}",
        "out": f"{lead}{tile.m},{columns}",
        **({"own_rows": f"{lead}{tile.m},{tile.k}"} if own_rows else {}),
    }
    shares = tile.split > 0 or tile.early_blocks > 0
    settings = Constants(
        *(tile.m, tile.n, tile.k, tile.halves, descriptors, b_is_nk, batched, bias, tile.split > 0, pairs),
        *(
            ready is not None,
            ready is not None and own_rows,
            8 if ready else 1,
            tile.early_blocks > 0,
            done,
            overlapped,
        ),
        *("ieee", dtype == "fp32", max(1, EXACT_RUN // tile.k), scales, stepwise, pushed, pushed > 0, adds, ends),
    )
    result = result or dtype
    types = {"b": dtype_b or dtype, "out": result}
    absent = [*(() if bias else ["bias"]), *(() if scales else ["scales"]), *(() if ready else WAITING)]
    absent += [] if own_rows else ["own_rows"]
    absent += [*(() if ready or done else ("first", "height")), *(() if done else RAISING)]
    absent += [*([] if pushed else ["pushed"]), *([] if ends else ["ending"])]
    absent += [] if shares else ["workspace", "unsplit", "split", "parts"]
    constants = {"C": settings, **dict.fromkeys(absent)}
    one, three = "constexpr", ("i32", "i32", "constexpr")  # rows of a and out, and of b, are contiguous: strides of 1
    strides = Strides(three if own_rows else one, three, (one, "i32") if b_is_nk else ("i32", one), three)
    strides = Strides(one, one, one, one) if descriptors else strides
    names = matmul_kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature |= {
        name: f"tensordesc<{types.get(name, dtype)}[{block}]>" if descriptors else f"*{types.get(name, dtype)}"
        for name, block in blocks.items()
    }
    signature["strides"] = strides
    if bias:
        signature["bias"] = Bias(f"*{result}", "i32")
    if scales:
        signature["scales"] = Scales("*fp32", "*fp32", "i32", one, one, "i32")
    if ready:
        signature |= {"timeouts": "*i64", **ready}
    if done:
        signature |= {"raised_flags": "*i64", "counts": "*i64"}
    if pushed:
        signature["pushed"] = Pushed("*i64", "*i32", "i32", "i32")
    if ends:
        signature["ending"] = Ending("*i64", "*i32")
    if shares:
        signature["workspace"] = Workspace("*fp32", "*i32")
    leaves = dict(leaves_of(tuple(signature.values())))
    tuples = names.index("strides")  # in this tuple, None means a descriptor
    constants |= {
        path: None if len(path) == 2 and path[0] == tuples else 1
        for path, type in leaves.items()
        if type == one and path[1:]
    }
    aligned = {path: [["tt.divisibility", 16]] for path, type in leaves.items() if type[0] in "*i"}
    source = ASTSource(matmul_kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": overlapped}
    return triton.compile(source, target=TARGET, options=options)


def compiled_sum(
    sources: int,
    *,
    dtype: str,
    block: int,
    warps: int,
    own_rows: int = -1,
    axes: int = 1,
    flags: bool = True,
    activation: str = "",
    ends: int = 0,
):
    """Compile the kernel that sums up sources, and with an activation an addend.

    `flags`: it waits for flags and raises flags. `ends`: the size of the `CallEnd` that it carries out.
    """
    vector, wide = 4 if dtype == "fp32" else 8, dtype == "fp32"
    waits = triton.next_power_of_2(sources) if flags else 0
    settings = SumConstants(
        sources, sources <= 16, own_rows, block, vector, axes, waits, flags, ends, False, wide, activation
    )
    absent = [] if flags else ["flags", "timeouts", "epoch", "waits", "polls"]
    absent += [] if flags else ["raised_flags", "raised_epoch", "raises", "counts"]
    absent += [] if ends else ["ending"]
    constants = {"C": settings, **dict.fromkeys(absent if activation else [*absent, "addend"])}
    signature = {name: "constexpr" if name in constants else "i32" for name in sum_kernel.arg_names}
    part = SumPart(f"*{dtype}", (*["i32"] * (axes - 1), "constexpr"))
    signature |= {"addend": part} if activation else {}
    signature |= {"x": part, "own_rows": part, "out": part, "sizes": ("i32",) * axes}
    signature |= {"ending": Ending("*i64", "*i32")} if ends else {}
    signature |= {name: "*i64" for name in ("flags", "timeouts", "raised_flags", "counts") if flags}
    varying = {
        sum_kernel.arg_names.index(name)
        for name in ("epoch", "waits", "polls", "raised_epoch", "raises", "first", "blocks")
    }
    leaves = dict(leaves_of(tuple(signature.values())))
    constants |= {path: 1 for path, type in leaves.items() if type == "constexpr" and path[1:]}
    aligned = {path: [["tt.divisibility", 16]] for path, t in leaves.items() if t[0] in "*i" and path[0] not in varying}
    source = ASTSource(sum_kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=TARGET, options={"num_warps": warps})


def leaves_of(types: tuple[object, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the types in a signature and in its tuples, with their paths."""
    for i, type in enumerate(types):
        yield from leaves_of(type, (*path, i)) if isinstance(type, tuple) else [((*path, i), type)]


def pipeline(tile: Tile) -> dict[str, int]:
    """Return the numbers of instructions in the one loop of a plain kernel: of tensor cores, and of loads."""
    plain = dataclasses.replace(tile, split=0)
    ptx = compiled(plain, dtype="bf16", descriptors=True, b_is_nk=False).asm["ptx"]  # from Triton's cache, but once
    return {name: ptx.count(name) for name in ("wgmma.mma_async", "complete_tx::bytes")}


@pytest.mark.parametrize(("tile", "b_is_nk"), [*zip(candidates("bf16"), [True, False] * 4, strict=True)], ids=str)
def test_tiles_with_descriptors_use_hopper(tile, b_is_nk):
    kernel = compiled(tile, dtype="bf16", descriptors=True, b_is_nk=b_is_nk)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=True) <= SHARED_MEMORY


@pytest.mark.parametrize(("tile", "batched"), [*zip(candidates("bf16"), [True, False] * 4, strict=True)], ids=str)
def test_batches_and_a_bias_fit_as_well(tile, batched):
    kernel = compiled(tile, dtype="bf16", descriptors=True, b_is_nk=True, batched=batched, bias=True)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=True) <= SHARED_MEMORY


@pytest.mark.parametrize("tile", candidates("bf16", descriptors=False), ids=str)
def test_tiles_with_pointers_copy_asynchronously(tile):
    kernel = compiled(tile, dtype="bf16", descriptors=False, b_is_nk=True)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=False)


@pytest.mark.parametrize("tile", candidates("f32"), ids=str)
def test_float32_is_multiplied_exactly(tile):
    kernel = compiled(tile, dtype="fp32", descriptors=True, b_is_nk=True)
    assert "mma" not in kernel.asm["ptx"].replace("fma", "")
    assert kernel.metadata.shared <= tile.shared_memory(4, descriptors=True)


@pytest.mark.parametrize(
    ("ready", "width"),
    [({"flags": "*i32", "epoch": "i32"}, "u32"), ({"flags": "*i64", "epoch": "i64"}, "u64")],
    ids=["int32", "int64"],
)
@pytest.mark.parametrize("descriptors", [True, False])
def test_a_waiting_kernel_acquires_before_it_loads_and_keeps_its_pipeline(descriptors, ready, width):
    tile = candidates("bf16", descriptors=descriptors)[0]
    options = {"dtype": "bf16", "descriptors": descriptors, "b_is_nk": True, "batched": True}
    load = "global.mbarrier::complete_tx::bytes" if descriptors else "cp.async.cg.shared.global"
    plain, waiting = (compiled(tile, ready=r, **options).asm["ptx"] for r in (None, ready))
    apart = compiled(tile, ready=ready, own_rows=True, **options).asm["ptx"]
    acquire, first_load = waiting.find(f"atom.global.sys.acquire.add.{width}"), waiting.find(load)
    assert 0 <= acquire < first_load
    assert ("fence.proxy.async.global" in waiting[acquire:first_load]) == descriptors
    assert waiting.count(load) == plain.count(load) >= tile.stages  # loads ahead of the loop, and in it
    assert apart.count(load) == 2 * plain.count(load)  # own rows have a loop of their own, before the first flag
    assert apart.find(load) < apart.find(f"atom.global.sys.acquire.add.{width}")


@pytest.mark.parametrize(("tile", "own_rows"), [*zip(candidates("bf16"), [True, False] * 4, strict=True)], ids=str)
def test_waiting_needs_no_more_shared_memory_than_the_estimate(tile, own_rows):
    options = {"dtype": "bf16", "descriptors": True, "b_is_nk": True, "batched": True, "own_rows": own_rows}
    kernel = compiled(tile, ready={"flags": "*i32", "epoch": "i32"}, **options)
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=True)


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_kernel_that_may_start_early_ends_after_the_previous_kernel(overlapped):
    options = {"dtype": "bf16", "descriptors": True, "b_is_nk": True, "ready": {"flags": "*i64", "epoch": "i32"}}
    ptx = compiled(candidates("bf16")[0], overlapped=overlapped, **options).asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == overlapped
    if overlapped:
        assert "wgmma" not in ptx[ptx.find("griddepcontrol.wait") :]


@pytest.mark.parametrize(("tile", "pairs"), [*zip(candidates("bf16"), [True, False] * 4, strict=True)], ids=str)
def test_split_tiles_are_pipelined_like_unsplit_tiles_and_need_no_more_memory(tile, pairs):
    split = dataclasses.replace(tile, split=1)
    kernel = compiled(split, dtype="bf16", descriptors=True, b_is_nk=False, pairs=pairs)
    for instruction, count in pipeline(tile).items():
        assert kernel.asm["ptx"].count(instruction) == 2 * count
    assert kernel.metadata.shared <= split.shared_memory(2, descriptors=True) <= SHARED_MEMORY
    assert kernel.metadata.spilled == 0


# With a bias, some registers spill after the pipeline, where a tile is stored: 9 for a tile of 128 x 128.
@pytest.mark.parametrize(
    ("tile", "split", "bias", "spills"),
    [
        (tile, *settings)
        for n, tile in enumerate(candidates("bf16")[:4])
        for settings in ((1, True, 96), *([(n, False, 0)] if n < 2 else []))
    ],
    ids=str,
)
def test_early_tiles_are_pipelined_like_unsplit_tiles_and_need_no_more_memory(tile, split, bias, spills):
    early = dataclasses.replace(tile, early_blocks=3, split=split)
    options = {"dtype": "bf16", "descriptors": True, "b_is_nk": False, "batched": True, "bias": bias}
    kernel = compiled(early, ready={"flags": "*i64", "epoch": "i32"}, own_rows=True, pairs=split > 0, **options)
    for instruction, count in pipeline(tile).items():  # loops of 4 kinds of tiles
        assert kernel.asm["ptx"].count(instruction) == (3 + split) * count
    assert kernel.metadata.shared <= early.shared_memory(2, descriptors=True) <= SHARED_MEMORY
    assert kernel.metadata.spilled <= spills


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_program_takes_a_ticket_after_it_writes_its_sum_and_before_it_reads_sums(descriptors):
    tile = dataclasses.replace(candidates("bf16", descriptors=descriptors)[0], split=1)
    ptx = compiled(tile, dtype="bf16", descriptors=descriptors, b_is_nk=False).asm["ptx"]
    ticket = ptx.find("atom.global.gpu.acq_rel.add.u32")
    assert 0 <= ptx.rfind("st.global.v4.b32", 0, ticket) < ptx.rfind("bar.sync", 0, ticket)
    sums = re.search(r"ld\.global\.cg\.v4", ptx)
    assert sums
    assert ticket < ptx.find("bar.sync", ticket) < sums.start()


@pytest.mark.parametrize("descriptors", [True, False])
def test_the_second_of_two_programs_reads_a_sum_only_after_the_first_has_released_it(descriptors):
    tile = dataclasses.replace(candidates("bf16", descriptors=descriptors)[0], split=1)
    ptx = compiled(tile, dtype="bf16", descriptors=descriptors, b_is_nk=False, pairs=True).asm["ptx"]
    claimed, released = (ptx.find(f"atom.global.gpu.{order}.add.u32") for order in ("relaxed", "release"))
    acquired = [match.start() for match in re.finditer(r"(atom|ld)\.global\.gpu\.acquire\.", ptx)]
    read = re.search(r"ld\.global\.cg\.v4", ptx)
    assert read
    written = ptx.rfind("st.global.v4.b32", 0, released)
    assert ptx.count(".gpu.relaxed.") == 1, "the claim of a ticket orders nothing"
    assert 0 <= claimed < written < ptx.rfind("bar.sync", 0, released) < released, "a barrier orders the writes"
    assert claimed < min(acquired)
    assert max(acquired) < ptx.rfind("bar.sync", 0, read.start()), "all threads read after the thread that has acquired"


E4M3 = {"dtype": "fp8e4nv", "result": "bf16", "b_is_nk": True, "descriptors": True}
STEPS = {"scales": "blocks", "stepwise": True}, {"scales": "rows", "stepwise": True}


@pytest.mark.parametrize(
    ("tile", "how"),
    [(candidates("f8", result=2)[i], {"scales": "rows"}) for i in (0, 4)]
    + [(candidates("f8s", result=2)[i], STEPS[i]) for i in (0, 1)],
    ids=str,
)
def test_tiles_of_8_bit_operands_use_hopper(tile, how):
    kernel = compiled(tile, **E4M3, **how)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned" in ptx
    assert ".e4m3.e4m3" in ptx
    assert ptx.count("complete_tx::bytes") >= 2 * tile.stages
    assert kernel.metadata.shared <= tile.shared_memory(1, descriptors=True, result=2) <= SHARED_MEMORY
    assert kernel.metadata.spilled == 0


@pytest.mark.parametrize(("tile", "how"), [*zip(candidates("f8s", result=2)[2:], STEPS, strict=True)], ids=str)
def test_the_sum_of_a_step_is_read_only_after_the_tensor_cores_have_ended(tile, how):
    """With `max_num_imprecise_acc`, Triton adds the sum of a step before it waits for the tensor cores."""
    ptx = compiled(tile, **E4M3, **how).asm["ptx"]
    for products in re.finditer(r"wgmma\.mma_async[^;]*;", ptx):
        following = re.search(r"wgmma\.(mma_async|wait_group\.sync\.aligned 0;)", ptx[products.end() :])
        assert following
        assert not re.search(r"(add|fma|mul)\S*\.f32", ptx[products.end() : products.end() + following.start()])


@pytest.mark.parametrize(
    ("family", "tile", "result"),
    [
        *(("f8", tile, 2) for tile in candidates("f8", result=2)),
        *(("f8s", tile, 4) for tile in candidates("f8s", result=4)),
    ],
    ids=str,
)
def test_batches_with_scales_a_bias_and_flags_fit(family, tile, result):
    """The tile of a batch must not take over the layout of the bias and of the scales of columns."""
    options = {"scales": "rows", "stepwise": family == "f8s", "result": "bf16" if result == 2 else "fp32"}
    options |= {"batched": True, "bias": result == 4, "own_rows": True, "done": 2}
    kernel = compiled(tile, ready={"flags": "*i64", "epoch": "i32"}, **{**E4M3, **options})
    assert kernel.metadata.shared <= tile.shared_memory(1, descriptors=True, result=result) <= SHARED_MEMORY
    assert kernel.metadata.spilled <= 32, "spills are after the pipeline, where a tile is stored"


@pytest.mark.parametrize("tile", candidates("f8", descriptors=False, result=2)[2:3], ids=str)
@pytest.mark.parametrize("how", [{"scales": "rows"}, STEPS[0]], ids=str)
def test_8_bit_operands_of_two_types_by_pointers_use_hopper(tile, how):
    kernel = compiled(tile, **{**E4M3, "descriptors": False, "dtype_b": "fp8e5"}, **how)
    assert ".e4m3.e5m2" in kernel.asm["ptx"]
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= tile.shared_memory(1, descriptors=False)


# Triton 3.6 and 3.7 wait after a TMA store only until shared memory has been read; see `stores_ended`.
@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("ready", [None, {"flags": "*i64", "epoch": "i32"}], ids=["ready", "waits"])
def test_a_flag_rises_only_after_its_block_is_in_memory(ready, span, descriptors):
    tile = candidates("bf16", descriptors=descriptors)[0]
    options = {"dtype": "bf16", "descriptors": descriptors, "b_is_nk": True, "batched": True, "ready": ready}
    ptx = compiled(tile, done=span, **options).asm["ptx"]
    stores = ["cp.async.bulk.commit_group"] if descriptors else ["st.global.v4.b32"]
    raised = [match.start() for match in re.finditer(r"atom\.global\.sys\.release\.exch\.b64", ptx)]
    assert raised
    for flag in raised:
        counted = ptx.rfind("atom.global.gpu.acq_rel.add.u64", 0, flag)
        barrier = ptx.rfind("bar.sync", 0, counted)
        stored = max(ptx.rfind(store, 0, flag) for store in stores)
        if descriptors:
            ended = ptx.rfind("@wanted cp.async.bulk.wait_group 0;", 0, barrier)
            assert stored < ended < barrier < counted < flag
        assert stored < barrier < counted < flag


@pytest.mark.parametrize(("tile", "span"), [*zip(candidates("bf16"), [1, 8] * 4, strict=True)], ids=str)
def test_raising_flags_keeps_the_pipeline_and_needs_no_more_memory_than_the_estimate(tile, span):
    kernel = compiled(tile, dtype="bf16", descriptors=True, b_is_nk=False, done=span)
    for instruction, count in pipeline(tile).items():
        assert kernel.asm["ptx"].count(instruction) == count
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=True) <= SHARED_MEMORY
    assert kernel.metadata.spilled == 0


def test_the_old_output_that_a_product_is_added_to_fits_beside_the_pipeline():
    tile = candidates("bf16", adds=True)[0]
    kernel = compiled(tile, dtype="bf16", descriptors=True, b_is_nk=True, batched=True, done=1, adds=True)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=True, adds=True) <= SHARED_MEMORY
    assert kernel.metadata.spilled == 0


# With own rows, early and split tiles, a few registers spill after the pipeline, where a tile is stored.
@pytest.mark.parametrize(
    ("tile", "pairs", "spills"),
    [*((tile, True, 32) for tile in candidates("bf16")[:3]), (candidates("bf16")[0], False, 0)],
    ids=str,
)
def test_raising_flags_after_early_and_split_tiles_keeps_the_pipeline(tile, pairs, spills):
    options = {"ready": {"flags": "*i64", "epoch": "i32"}, "own_rows": True} if pairs else {}
    both = dataclasses.replace(tile, early_blocks=3 if pairs else 0, split=1)
    kernel = compiled(both, dtype="bf16", descriptors=True, b_is_nk=False, batched=True, pairs=pairs, done=4, **options)
    for instruction, count in pipeline(tile).items():  # loops of 4 kinds of tiles, or of split and unsplit tiles
        assert kernel.asm["ptx"].count(instruction) == (4 if pairs else 2) * count
    assert kernel.metadata.shared <= both.shared_memory(2, descriptors=True) <= SHARED_MEMORY
    assert kernel.metadata.spilled <= spills


@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize(
    ("sources", "dtype", "block", "warps", "axes"),
    [
        (2, "bf16", 16384, 16, 1),
        (3, "bf16", 512, 2, 1),
        (8, "bf16", 4096, 16, 1),
        (8, "fp16", 4096, 16, 3),
        (16, "bf16", 2048, 8, 1),
        (2, "fp32", 8192, 16, 1),
        (8, "fp32", 2048, 16, 2),
    ],
)
def test_a_sum_moves_16_bytes_at_a_time_and_hardly_spills(sources, dtype, block, warps, axes, flags):
    kernel = compiled_sum(sources, dtype=dtype, block=block, warps=warps, own_rows=1, axes=axes, flags=flags)
    ptx, each = kernel.asm["ptx"], block * (4 if dtype == "fp32" else 2) // (32 * warps * 16)
    assert len(re.findall(r"ld\.global\.cg\.(v4\.b32|v2\.b64)", ptx)) == len(re.findall(r"ld\.global", ptx))
    assert len(re.findall(r"ld\.global", ptx)) == sources * each
    assert len(re.findall(r"st\.global\.(v4\.b32|v2\.b64)", ptx)) == each
    assert kernel.metadata.spilled <= 16, "the numbers that vary between blocks may spill"


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_a_sum_with_an_addend_and_an_activation_moves_16_bytes_at_a_time(activation):
    kernel = compiled_sum(8, dtype="bf16", block=4096, warps=16, own_rows=1, axes=2, activation=activation)
    ptx = kernel.asm["ptx"]
    assert len(re.findall(r"ld\.global\.cg\.v4\.b32", ptx)) == len(re.findall(r"ld\.global", ptx)) == 9
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 1
    assert kernel.metadata.spilled <= 32, "the numbers that vary between blocks may spill"


def test_a_sum_reads_after_it_waits_for_flags_and_raises_flags_after_its_stores():
    ptx = compiled_sum(4, dtype="bf16", block=2048, warps=8, own_rows=2).asm["ptx"]
    acquire, load = ptx.find("atom.global.sys.acquire.add.u64"), ptx.find("ld.global.cg.v4")
    counted, raised = ptx.find("atom.global.gpu.acq_rel.add.u64"), ptx.find("atom.global.sys.release.exch.b64")
    assert 0 < acquire < ptx.find("bar.sync", acquire) < load
    assert ptx.count("atom.global.gpu.acq_rel.add.u64") == 1
    barrier = ptx.rfind("bar.sync", 0, counted)
    assert not re.search(r"st\.global|\$L__BB", ptx[barrier:counted]), "in one basic block, after all stores"
    assert counted < ptx.find("bar.sync", counted) < raised


@pytest.mark.parametrize("kernel", ["sum", "matmul"])
def test_the_last_program_resets_flags_and_then_grants_credits_to_the_whole_system(kernel):
    tile = candidates("bf16")[0]
    ptx = (
        compiled_sum(4, dtype="bf16", block=2048, warps=8, ends=4)
        if kernel == "sum"
        else compiled(
            tile, dtype="bf16", descriptors=True, b_is_nk=True, ready={"flags": "*i64", "epoch": "i32"}, ends=4
        )
    ).asm["ptx"]
    arrived = ptx.rfind("atom.global.gpu.acq_rel.add.u32")
    granted = ptx.rfind("atom.global.sys.release.add.u64")
    stored = [match.start() for match in re.finditer(r"st\.global\.[^;]*b64|cp\.async\.bulk\.tensor\.\S*global", ptx)]
    assert 0 < arrived < granted
    accessed = [match.end() for match in re.finditer(r"(ld|st)\.global|cp\.async|wgmma", ptx[:arrived])]
    assert "bar.sync" in ptx[accessed[-1] : arrived], "all accesses of the program come before its arrival"
    assert any(arrived < at < granted for at in stored), "flags are reset after the last program has arrived"
    assert "bar.sync" in ptx[max(at for at in stored if at < granted) : granted], "and before peers may signal again"


@pytest.mark.parametrize(("x", "out"), [("bf16", "fp8e4nv"), ("fp32", "fp8e5")])
def test_kernels_of_rows_move_16_bytes_at_a_time_round_in_hardware_and_spill_nothing(x, out):
    sizes = {"COUNT": 1, "WIDTH": 4096, "ONCE": True}
    floats = {"limit": "fp32", "least": "fp32", "eps": "fp32"}
    for kernel, types in (
        (_row_scales_kernel, {"x": f"*{x}", "out": "*fp32"}),
        (_quantize_kernel, {"x": f"*{x}", "scale": "*fp32", "out": f"*{out}"}),
        (_rms_norm_kernel, {"x": f"*{x}", "weight": f"*{x}", "out": f"*{x}"}),
    ):
        names = kernel.arg_names
        constants = {name: size for name, size in sizes.items() if name in names} | {
            name: 1 for name in ("x_column", "out_column", "weight_column") if name in names
        }
        signature = {name: "constexpr" if name in constants else {**floats, **types}.get(name, "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        kernel = triton.compile(source, target=TARGET, options={"num_warps": 8})
        ptx = kernel.asm["ptx"]
        assert re.search(r"ld\.global\.(v4\.b32|v2\.b64)", ptx)
        assert "div.rn.f32" in ptx
        assert kernel.metadata.spilled == 0
        if kernel is _quantize_kernel:
            assert f"cvt.rn.satfinite.{'e4m3' if out == 'fp8e4nv' else 'e5m2'}x2.f32" in ptx
            assert re.search(r"st\.global\.(v4\.b32|v2\.b32|b64|v2\.b64)", ptx)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("by_columns", [0, 8, 16, 32])
@pytest.mark.parametrize("adjacent", [False, True])
def test_matrices_are_quantized_16_bytes_at_a_time_in_both_layouts(adjacent, by_columns, count):
    kernel = _quantize_adjacent_kernel if adjacent or by_columns else _quantize_rows_kernel
    names, tuples = kernel.arg_names, 3 if adjacent or by_columns else 2
    sizes = {"ROWS": by_columns, "WIDTH": _TILE // by_columns} if by_columns else {"ROWS": 1, "WIDTH": 8192}
    constants = {
        (names.index(n),): value for n, value in {**sizes, "ONCE": True, "out_column": 1}.items() if n in names
    }
    if by_columns:
        constants |= {(names.index("x_rows"), i): 1 for i in range(count)}
    else:
        constants[names.index("x_column"),] = 1
    types = {"xs": ("*bf16",) * count, "scale": "*fp32", "out": "*fp8e4nv"}
    types |= dict.fromkeys(("columns" if tuples == 3 else "rows", "x_rows"), ("i32",) * count)
    if by_columns:
        types["x_rows"] = ("constexpr",) * count
    signature = {name: "constexpr" if (i,) in constants else types.get(name, "i32") for i, name in enumerate(names)}
    at = [(i, *((j,) if i < tuples else ())) for i in range(len(names)) for j in range(count)]
    aligned = {place: [["tt.divisibility", 16]] for place in at if place not in constants}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": 8})
    assert re.search(r"ld\.global\.(v4\.b32|v2\.b64)", compiled.asm["ptx"])
    assert re.search(r"st\.global\.(v4\.b32|v2\.b64)", compiled.asm["ptx"])
    assert compiled.metadata.spilled == 0


NORMED = """hostir 1
mesh @mesh [didx] = {mesh}
fusion @f(%x: {dtype}[8, {columns}] partial(didx), %r: {t}, %w: {dtype}[{columns}]) -> ({results}) {{
  %y: {t} = reshard %x
  %t: {t} = add %y, %r
  %n: {t} = rms_norm %t eps 1e-06 times %w
{more}}}
"""
QUANTIZED = """  %s: f32[{rows}, 1] = row_scales %n to f8e4m3
  %q: f8e4m3[{rows}, {columns}] = quantize %n by %s to f8e4m3
"""


@pytest.mark.parametrize(
    ("ranks", "columns", "dtype", "results", "scattered"),
    [
        (2, 4096, "bf16", "%y", False),
        (4, 4096, "bf16", "%y", True),
        (2, 4096, "bf16", "%t, %n", False),
        (2, 5120, "bf16", "%n", True),
        (4, 8192, "f16", "%t, %n", True),
        (8, 8192, "bf16", "%t, %s, %q", False),
        (2, 8192, "f32", "%t, %n, %s, %q", False),
    ],
)
def test_one_kernel_sums_and_normalizes_moves_16_bytes_at_a_time_and_spills_nothing(
    ranks, columns, dtype, results, scattered
):
    rows = "8@didx" if scattered else "8"
    text = {"dtype": dtype, "columns": columns, "rows": rows, "t": f"{dtype}[{rows}, {columns}]", "results": results}
    more = QUANTIZED.format(**text) if "%q" in results else ""
    fusion = hi.parse(NORMED.format(**text, mesh=" ".join(map(str, range(ranks))), more=more))
    program = hi.lower(fusion, "sequential by low_latency")
    with hopper() as gpu:
        gpu.plan(program, 0, "auto", inputs_of(program, 0))
    kernels = [kernel for kernel in gpu.kernels.values() if kernel.name == "low_latency_kernel"]
    assert len(kernels) == 1
    if results != "%y":
        assert len(gpu.kernels) == 1
    compiled = kernels[0].compiled()
    loads, stores = (
        set(re.findall(rf"{access}(?:\.volatile)?\.global(\S*)", compiled.asm["ptx"])) for access in ("ld", "st")
    )
    assert {".v4.b32"} <= loads <= {".v4.b32", ".b32"}  # the number of the call
    assert {".v4.b32"} <= stores <= {".v4.b32", ".b32", ".b64"} | ({".v2.b32"} if more else set())  # and a timeout
    assert compiled.metadata.spilled == 0


GATHERED = """hostir 1
mesh @mesh [didx] = {mesh}
fusion @gathered(%x: {dtype}[{ranks}@didx, {columns}]) -> (%y) {{
  %y: {dtype}[{ranks}, {columns}] = reshard %x
}}
"""


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f8e4m3", "f8e5m2"])
def test_the_kernel_of_a_gather_moves_16_bytes_at_a_time_and_spills_nothing(ranks, dtype):
    mesh = " ".join(map(str, range(ranks)))
    fusion = hi.parse(GATHERED.format(mesh=mesh, dtype=dtype, ranks=ranks, columns=1 << 20))
    with hopper() as gpu:
        gpu.plan(program := hi.lower(fusion, "sequential by low_latency"), 0, "auto", inputs_of(program, 0))
    (kernel,) = gpu.kernels.values()
    compiled = kernel.compiled()
    for access, others in ("ld", {".b32"}), ("st", {".b32", ".b64"}):  # of the number of the call, and of a timeout
        widths = set(re.findall(rf"{access}(?:\.volatile)?\.global(\S*)", compiled.asm["ptx"]))
        assert widths == {".v4.b32"} | others
    assert compiled.metadata.spilled == 0


def aligned_source(kernel, constants, pointers, varying=()):
    """Return the source of a kernel whose numbers, except `varying`, and addresses are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] in "*i" and n not in varying
    }
    return ASTSource(kernel, signature, constexprs=constants, attrs=aligned)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("rows", [16, 512])
def test_a_grouped_matmul_of_16_bits_loads_by_tma_and_spills_nothing(rows, collected, transposed):
    tile = _tile(rows, 2)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"SOURCES": 8 if collected else 2, "GROUPS": 256 if collected else 16, **tile, "COLLECTED": collected}
    constants |= {"DESCRIPTORS": True, "W_IS_NK": transposed, "SCALED": False, "INDEX": False}
    constants |= dict.fromkeys(("index", "scale_x", "scale_w"))
    columns = ("left_column", "w_row" if transposed else "w_column", "out_column", "offsets_step")
    constants |= dict.fromkeys(columns, 1)
    of_w = (tile["BN"], tile["BK"]) if transposed else (tile["BK"], tile["BN"])
    pointers = {"left": f"tensordesc<bf16[{tile['BM']},{tile['BK']}]>", "w": f"tensordesc<bf16[1,{of_w[0]},{of_w[1]}]>"}
    pointers |= {"out": "*bf16", "offsets": "*i32"}
    varying = ("sources", "groups", "first", "rows", "tokens", "capacity")
    source = aligned_source(_grouped_matmul_kernel, constants, pointers, varying)
    kernel = triton.compile(source, target=TARGET, options=options)
    ptx, code = kernel.asm["ptx"], kernel.asm["sass"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "wgmma.wait_group.sync.aligned 1" in ptx, "loads overlap the tensor cores"
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert kernel.metadata.spilled <= 640  # bytes, where a program counts its tiles or finds the rows of a tile
    assert not re.findall(r"\b(?:LDL|STL)\b", code[code.index("HGMMA") : code.rindex("HGMMA")])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("rows", [16, 512])
def test_a_grouped_matmul_of_fp8_adds_each_step_to_the_others_and_spills_nothing(rows, indexed):
    tile = _tile(rows, 1)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"SOURCES": 2, "GROUPS": 16, **tile, "COLLECTED": True, "DESCRIPTORS": True, "W_IS_NK": True}
    constants |= {"SCALED": True, "INDEX": indexed, **({} if indexed else {"index": None})}
    columns = ("left_column", "w_row", "out_column", "offsets_step", "index_step", "scale_w_column")
    constants |= dict.fromkeys(columns, 1)
    pointers = {"left": f"tensordesc<fp8e4nv[{tile['BM']},{tile['BK']}]>"}
    pointers |= {"w": f"tensordesc<fp8e4nv[1,{tile['BN']},{tile['BK']}]>", "out": "*bf16"}
    pointers |= dict.fromkeys(("offsets", "index"), "*i32") | dict.fromkeys(("scale_x", "scale_w"), "*fp32")
    varying = ("sources", "groups", "first", "rows", "tokens", "capacity")
    source = aligned_source(_grouped_matmul_kernel, constants, pointers, varying)
    kernel = triton.compile(source, target=TARGET, options=options)
    ptx, code = kernel.asm["ptx"], kernel.asm["sass"]
    products = list(re.finditer(r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3", ptx))
    after = ptx[products[-1].end() :]
    sums = re.search(r"wgmma\.wait_group\.sync\.aligned 0(.*?)bra", after, re.DOTALL)
    elements = tile["BM"] * tile["BN"] // (32 * options["num_warps"])
    assert sums is not None
    assert len(re.findall(r"add(?:\.rn)?\.f32", sums[1])) == elements
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert not re.findall(r"\b(?:LDL|STL)\b", code[code.index("QGMMA") : code.rindex("QGMMA")])


def test_a_grouped_matmul_of_f32_adds_sums_of_steps_and_spills_nothing():
    tile = _tile(512, 4)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"SOURCES": 2, "GROUPS": 16, **tile, "COLLECTED": True, "DESCRIPTORS": False, "W_IS_NK": False}
    constants |= {"SCALED": False, "INDEX": False, **dict.fromkeys(("index", "scale_x", "scale_w"))}
    constants |= dict.fromkeys(("left_column", "w_column", "out_column", "offsets_step"), 1)
    pointers = dict.fromkeys(("left", "w", "out"), "*fp32") | {"offsets": "*i32"}
    varying = ("sources", "groups", "first", "rows", "tokens", "capacity")
    source = aligned_source(_grouped_matmul_kernel, constants, pointers, varying)
    kernel = triton.compile(source, target=TARGET, options=options)
    elements = tile["BM"] * tile["BN"] // (32 * options["num_warps"])
    assert len(re.findall(r"add(?:\.rn)?\.f32", kernel.asm["ptx"])) == elements
    assert kernel.metadata.spilled == 0


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp8e4nv"])
def test_rows_of_groups_are_collected_16_bytes_at_a_time(dtype, waits, indexed):
    unit = dict(_COLLECTING)
    options = {"num_warps": unit.pop("num_warps")}
    constants = {**unit, "BM": 128, "READY": waits, "OWN": waits, "INDEX": indexed}
    few = {"SOURCES": 2, "GROUPS": MIN_GROUPS, "FLAGS": 1}
    constants |= {"SOURCES": 8, "GROUPS": 256, "FLAGS": 8} if waits else few
    constants |= {} if waits else {"own_rows": None, "flags": None, "timeouts": None}
    constants |= {} if indexed else {"index": None}
    constants |= dict.fromkeys(("x_column", "offsets_step", "index_step"), 1)
    pointers = dict.fromkeys(("x", "out", "own_rows"), f"*{dtype}") | dict.fromkeys(("flags", "timeouts"), "*i64")
    pointers |= {"offsets": "*i32", "index": "*i32"}
    varying = ("sources", "groups", "rows", "tokens", "epoch", "first", "blocks", "polls", "capacity")
    source = aligned_source(_collect_rows_kernel, constants, pointers, varying)
    kernel = triton.compile(source, target=TARGET, options=options)
    assert re.search(r"ld\.global\.(v4\.b32|v2\.b64)", kernel.asm["ptx"])
    assert re.search(r"st\.global\.(v4\.b32|v2\.b64)", kernel.asm["ptx"])
    assert kernel.metadata.spilled <= 256  # bytes, where a program counts the rows of all groups


@pytest.mark.parametrize("kernel", [_gate_kernel, _gate_gradients_kernel], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(("width", "warps"), [(2048, 4), (8192, 8)])
def test_gates_of_16_bits_load_16_bytes_at_a_time_and_spill_nothing(kernel, width, warps):
    pointers = dict.fromkeys(("g", "u", "out", "dy", "d_g", "d_u"), "*bf16")
    pointers |= dict.fromkeys(("weights", "d_weights"), "*fp32")
    source = aligned_source(kernel, {"WIDTH": width}, {n: p for n, p in pointers.items() if n in kernel.arg_names})
    compiled = triton.compile(source, target=TARGET, options={"num_warps": warps})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert compiled.metadata.spilled == 0


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("columns", "sources"), [(128, 8), (1792, 1), (1792, 2), (1792, 64)])
def test_sums_of_outer_products_of_16_bits_use_tensor_cores_asynchronously_and_spill_nothing(columns, sources, adds):
    tile = outer_tile(torch.bfloat16, columns) | {"SOURCES": sources, "EVEN": True}
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**tile, **dict.fromkeys(("x_column", "y_column", "out_column", "addend_column", "offsets_step"), 1)}
    constants |= {} if adds else {"addend": None}
    pointers = dict.fromkeys(("x", "y", "out", "addend"), "*bf16") | {"offsets": "*i32"}
    source = aligned_source(_grouped_outer_kernel, constants, pointers, ("sources", "rows"))
    kernel = triton.compile(source, target=TARGET, options=options)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert kernel.metadata.spilled == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_by_an_index_move_16_bytes_at_a_time_and_spill_nothing(weighted):
    constants = {"WIDTH": 4096, **dict.fromkeys(("y_column", "index_column", "weights_column", "out_column"), 1)}
    constants |= {} if weighted else {"weights": None}
    pointers = {"y": "*bf16", "out": "*bf16", "index": "*i32", "weights": "*fp32"}
    source = aligned_source(_combine_rows_kernel, constants, pointers, ("sums", "rows", "addends"))
    kernel = triton.compile(source, target=TARGET, options={"num_warps": 8})
    assert re.search(r"ld\.global\.(v4\.b32|v2\.b64)", kernel.asm["ptx"])
    assert re.search(r"st\.global\.(v4\.b32|v2\.b64)", kernel.asm["ptx"])
    assert kernel.metadata.spilled == 0


def test_a_product_stores_16_bytes_at_a_time_to_peers_and_raises_flags_after_all_stores():
    tile = dataclasses.replace(next(t for t in candidates("bf16") if (t.m, t.n) == (64, 128)), split=64)
    kernel = compiled(tile, dtype="bf16", descriptors=True, b_is_nk=True, pairs=True, pushed=8)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= tile.shared_memory(2, descriptors=True)
    assert kernel.metadata.spilled == 0
    assert ptx.count("wgmma.wait_group.sync.aligned 1") == 2, "loads overlap the tensor cores"
    stored = [match.start() for match in re.finditer(r"st\.global\.v4\.b32", ptx)]
    arrival, raised = ptx.find("atom.global.sys.acq_rel.add.u32"), ptx.find("atom.global.sys.release.exch.b64")
    assert stored
    assert max(stored) < ptx.rfind("bar.sync", 0, arrival) < arrival < raised
    assert arrival < ptx.find("bar.sync", arrival) < raised, "a barrier comes before any thread raises a flag"


def test_copies_let_the_next_kernel_start_move_16_bytes_at_a_time_and_then_raise_flags():
    constants = {
        "UNIT": tl.int64,
        "BLOCK": 32 * WARPS * PER_THREAD // 8,
        "ALIGNED": True,
        "MAX_PIECES": 4,
        "GROUPS": 2,
        "DEPENDENTS": True,
    }
    signature = {name: "constexpr" if name in constants else "i32" for name in push_kernel.arg_names}
    signature |= {"source": "*i16", "table": "*i64", "arrived": "*i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(signature.values()) if type[0] == "*"}
    source = ASTSource(push_kernel, signature, constexprs=constants, attrs=aligned)
    ptx = triton.compile(source, target=TARGET, options={"num_warps": WARPS}).asm["ptx"]
    assert "griddepcontrol.launch_dependents" in ptx
    assert re.search(r"ld\.global\.(v2\.b64|v4\.b32|v4\.b64|v8\.b32) .*st\.global\.\1 ", ptx, re.DOTALL)
    atomics = ("sys.acq_rel.add.u32", "gpu.acq_rel.add.u32", "sys.release.exch.b64")
    arrival, handed_on, raising = (ptx.find(f"atom.global.{atomic}") for atomic in atomics)
    assert ptx.rfind("bar.sync", 0, arrival) >= 0, "the writes of all threads come before"
    assert 0 < arrival < handed_on < raising, "flags travel to peers while the next batch is copied"
    assert arrival < ptx.find("bar.sync", arrival) < handed_on
    assert handed_on < ptx.find("bar.sync", handed_on) < raising, "a barrier comes before any thread raises a flag"


@pytest.mark.parametrize("large", [(), ("a_outer",), ("b_outer", "b_inner")])  # strides of 2^31 elements and more
def test_rows_of_fp8_are_transposed_16_bytes_at_a_time_and_spill_nothing(large):
    pointers = dict.fromkeys(("a", "b", "a_out", "b_out"), "*fp8e4nv") | {"least": "fp32"} | dict.fromkeys(large, "i64")
    pointers |= dict.fromkeys(("a_scale", "b_scale", "scales"), "*fp32")
    constants = {"TILE": _SQUARE, "WIDTH": 4096, "column_step": 1, "a_scale_inner": 1, "b_scale_inner": 1}
    source = aligned_source(_transpose_kernel, constants, pointers, ("inner", "rows", "scales_step", "least"))
    kernel = triton.compile(source, target=TARGET, options={"num_warps": 8})
    widths = {access: re.findall(rf"{access}\.global\.(\S*)", kernel.asm["ptx"]) for access in ("ld", "st")}
    assert widths["ld"].count("v4.b32") == widths["st"].count("v4.b32") == _SQUARE * _SQUARE // 256 // 16
    assert kernel.metadata.spilled == 0
