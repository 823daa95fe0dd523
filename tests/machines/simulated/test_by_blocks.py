"""Computations that set a flag after each block of rows, and sums over blocks of all ranks, on simulated ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
import torch

from hostir.call.local import rehearse
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.source import HostIRError
from tests.call import programs
from tests.call.small_programs import alone, said

SEEDS = range(20)
MESHES = ("0 1", "2 0 1", "0 1 2 3")
PROGRAMS: dict[str, Callable[[str, str], str]] = {
    "scattered": programs.scattered,
    "scattered in one piece": lambda mesh, dtype: programs.scattered(mesh, dtype, pieces=1),
    "slices": programs.scattered_slices,
    "everywhere": programs.summed_everywhere,
    "passed on, other blocks": lambda mesh, dtype: programs.passed_on(mesh, dtype, {3: 3, 5: 4, 7: 6}[len(mesh)]),
    "passed on, smaller blocks": lambda mesh, dtype: programs.passed_on(mesh, dtype, 4 * len(mesh.split())),
    "passed on, one block": lambda mesh, dtype: programs.passed_on(mesh, dtype, 1),
}


def flat(outputs: Iterable[Iterable[Iterable[torch.Tensor | None]]]) -> list[torch.Tensor]:
    """Return the shards of all outputs of all calls, in one list."""
    return [part for call in outputs for parts in call for part in parts if part is not None]


def exact(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a.double() @ b.double()
    return product.clamp_min(0) if name.startswith("passed on") else product


def closeness(ranks: int, dtype: torch.dtype) -> float:
    """Return the largest error of a sum of rounded parts, relative to the largest element."""
    return 4 * torch.finfo(dtype).eps * ranks**0.5


@pytest.mark.parametrize(
    ("name", "mesh", "dtype"),
    [
        *((name, mesh, "f32" if name == "slices" else "bf16") for name in PROGRAMS for mesh in MESHES),
        *(("scattered", mesh, dtype) for mesh in MESHES for dtype in ("f32", "f16")),
    ],
)
def test_every_order_gives_the_sum_of_the_parts_bit_for_bit(name: str, mesh: str, dtype: str) -> None:
    program = parse(PROGRAMS[name](mesh, dtype))
    sizes = {"M": 3} if "M" in str(program) else {}
    calls = [random_inputs(program, sizes, seed=call) for call in range(3)]
    machine = rehearse(program, calls, sizes)
    expected = machine.run(0, watch=True)
    for (a, b), (parts,) in zip(calls, expected, strict=True):
        true = exact(name, a, b)
        for rank, part in enumerate(parts):
            mine = shard(true, program.outputs[0].tensor, rank, sizes)
            assert part is not None
            assert mine is not None
            error = (part.double() - mine).abs().max() / mine.abs().max()
            assert error <= closeness(len(mesh.split()), part.dtype)
    for seed in SEEDS:
        outputs = machine.run(seed, watch=seed < 4)
        assert all(torch.equal(x, y) for x, y in zip(flat(outputs), flat(expected), strict=True)), seed


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_by_blocks_has_the_bits_of_a_sum_that_waits_for_all_blocks(ranks: int) -> None:
    text = programs.scattered(" ".join(map(str, range(ranks))), "f16")
    before = f"""  for %i in 0..{ranks - 1} {{
    for %p in 0..2 {{ wait_signal %there[((%r + %i + 1) % {ranks}) * 2 + %p] >= 1 }}
  }}
  %own = select %sent[%r]
  copy %mine -> %own
  sum %sent axis 0 -> %c
"""
    whole = changed(text, "  sum %sent axis 0 -> %c ready %there >= 1 from %r own %mine\n", before)
    calls = [random_inputs(parse(text), {"M": 5}, seed=call) for call in range(2)]
    outputs, expected = (rehearse(parse(t), calls, {"M": 5}).run(3) for t in (text, whole))
    assert all(torch.equal(x, y) for x, y in zip(flat(outputs), flat(expected), strict=True))


@pytest.mark.parametrize("text", [programs.scattered(), programs.scattered_slices(), programs.summed_everywhere()])
def test_blocks_of_no_rows_are_signalled_and_waited_for(text: str) -> None:
    program = parse(text)
    machine = rehearse(program, [random_inputs(program, {"M": 0}, seed=call) for call in range(2)], {"M": 0})
    for seed in SEEDS:
        assert not any(part.numel() for part in flat(machine.run(seed, watch=seed < 4)))


def test_blocks_of_the_teams_of_a_mesh_stay_within_them() -> None:
    text = programs.scattered("0 1").replace("[didx] = 0 1", "[dp, tp] = (0 2) (3 1)").replace("didx", "tp")
    calls = [random_inputs(parse(text), {"M": 3}, seed=call) for call in range(2)]
    machine = rehearse(parse(text), calls, {"M": 3})
    expected = machine.run(0, watch=True)
    for (a, b), (parts,) in zip(calls, expected, strict=True):
        for rank, half in ((0, 0), (2, 1), (3, 0), (1, 1)):
            torch.testing.assert_close(parts[rank], (a @ b)[half : half + 1])
    for seed in SEEDS:
        assert all(torch.equal(x, y) for x, y in zip(flat(machine.run(seed)), flat(expected), strict=True))


@pytest.mark.parametrize(
    ("statement", "inputs", "message"),
    [
        (
            "matmul %a, %b -> %c done %f = 1",
            "%a: f32[4, 8], %b: f32[8, 5], %s: f32[S]",
            "0 flags do not divide the 4 rows",
        ),
        ("sum %a axis 0 -> %c ready %f >= 1", "%a: f32[2, 4, 5], %s: f32[S]", "0 flags do not divide the 8 rows"),
        ("sum %a axis 0 -> %c ready %g >= 1", "%a: f32[S, 4, 5]", "2 flags do not divide the 0 sources"),
    ],
)
def test_no_flags_or_no_sources_are_refused(statement: str, inputs: str, message: str) -> None:
    flags = "%f: flag[S] = allocate_symmetric\n  %g: flag[2] = allocate_symmetric\n  %c: f32[4, 5] = allocate"
    p = alone(f"{flags}\n  {statement}", inputs)
    assert message in said(lambda: rehearse(p, [random_inputs(p, {"S": 0})], {"S": 0}))


def test_the_rows_that_own_rows_replace_become_undefined() -> None:
    text = programs.scattered("0 1").replace("-> (%c)", "-> (%c, %sent)")
    calls = [random_inputs(parse(text), {"M": 3}, seed=call) for call in range(2)]
    for _, sent in rehearse(parse(text), calls, {"M": 3}).run(4):
        for rank, part in enumerate(sent):
            assert part is not None
            assert part[rank].isnan().all()
            assert not part[1 - rank].isnan().any()


def changed(text: str, *pairs: str) -> str:
    """Return a text with the two lines of each pair swapped."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


PUT = "      put %piece -> %place at (%r + %i + 1) % 3 over didx\n"
SENT = "      signal %there[%r * 2 + %p] = 1 at (%r + %i + 1) % 3 over didx\n"
AWAIT = "      wait_signal %done[((%r + %i + 1) % 3) * 2 + %p] >= 1\n"
WRONG = {
    "no wait for the block": (AWAIT, ""),
    "a wait for the block before": (AWAIT, AWAIT.replace("+ %p]", "+ (%p + 1) % 2]")),
    "a flag before its bytes": (PUT, "", SENT, SENT + PUT),
    "no barrier": ("  barrier of %sent over didx\n", ""),
    "a barrier that does not wait for the call before": ("  synchronize %user\n", ""),
    "a free that does not wait for the copies": ("  synchronize 0\n", ""),
}


@pytest.mark.parametrize("fault", WRONG)
def test_watch_finds_a_fault_under_seed_0_and_other_seeds_change_the_result(fault: str) -> None:
    text = programs.scattered("0 1 2")
    calls = [random_inputs(parse(text), {"M": 3}, seed=call) for call in range(3)]
    right = flat(rehearse(parse(text), calls, {"M": 3}).run(0))
    machine = rehearse(parse(changed(text, *WRONG[fault])), calls, {"M": 3})
    with pytest.raises(HostIRError, match="race: "):
        machine.run(0, watch=True)
    wrong = 0
    for seed in range(200):
        try:
            wrong += not all(torch.equal(x, y) for x, y in zip(flat(machine.run(seed)), right, strict=True))
        except HostIRError:  # memory that is freed too early
            wrong += 1
    assert wrong > 2


@pytest.mark.parametrize(
    ("fault", "flag"),
    [
        ((SENT, ""), r"%there\[\d\]"),
        ((" from %r own %mine", ""), r"%there\[\d\]"),
        ((AWAIT, AWAIT.replace(">= 1", ">= 2")), r"%done\[\d\]"),
    ],
    ids=["no signal", "no own rows", "another epoch"],
)
def test_a_flag_that_never_rises_is_named(fault: tuple[str, str], flag: str) -> None:
    text = changed(programs.scattered("0 1 2"), *fault)
    machine = rehearse(parse(text), [random_inputs(parse(text), {"M": 3})], {"M": 3})
    for seed in range(5):
        message = said(lambda seed=seed: machine.run(seed))
        assert "deadlock" in message
        for rank in range(3):
            assert re.search(rf"rank {rank}, '[^'\n]*'[\w, ]*: no signal sets flag {flag} to epoch \d", message), (
                message
            )


TWICE = """hostir 1
mesh @mesh [didx] = 0 1
program @twice(%a: f32[2@didx, 4], %b: f32[2@didx, 4]) -> (%c) streams 1 {
  %user = current_stream
  %r = rank of %a over didx
  %sent: f32[2, 1, 4] = allocate_symmetric
  %there: flag[2] = allocate_symmetric
  %c: f32[1, 4] = allocate
  set_stream 0
  synchronize %user
  barrier of %a over didx
  %first = select %sent[0]
  %second = select %sent[1]
  put %a -> %first at 1 - %r over didx
  signal %there[0] = 1 at 1 - %r over didx
  put %b -> %first at 1 - %r over didx
  put %b -> %second at 1 - %r over didx
  signal %there[1] = 1 at 1 - %r over didx
  set_stream %user
  sum %sent axis 0 -> %c ready %there >= 1
  synchronize 0
}
"""


def test_a_source_may_be_read_as_soon_as_its_own_flag_rises() -> None:
    program = parse(TWICE)
    machine = rehearse(program, [random_inputs(program, {})])
    sums = {tuple(flat(machine.run(seed))[0].flatten().tolist()) for seed in range(30)}
    assert len(sums) == 2
    with pytest.raises(HostIRError, match=r"race: .*(put %b -> %first.*sum|sum.*put %b -> %first)"):
        machine.run(0, watch=True)
