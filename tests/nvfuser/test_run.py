"""Dumps of nvFuser run on simulated ranks and compared with the unsharded fusions that they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import hostir as hi
from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.nvfuser import print_nvfuser, read_nvfuser
from tests.call.whole import run_whole
from tests.nvfuser.random_dumps import random_dump
from tests.same_names import same_up_to_names

CASES = Path(__file__).parent.parent / "cases" / "nvfuser"


@dataclass(frozen=True)
class Case:
    """The computation of a dump, and the unsharded shapes of its inputs for its symbolic sizes."""

    meaning: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    sizes: dict[str, int] = field(default_factory=dict)


def two_matmuls(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b @ c


TWO_MATMULS = Case(two_matmuls, [(12, 7), (7, 6), (6, 4)], {"i0": 12, "i2": 7, "i4": 6, "i6": 4})
MEANINGS = {
    "by_hand_reduce_scatter": Case(lambda a, b, c: a @ b, [(12, 20), (20, 6), (12, 6)], {"i0": 12, "i2": 5, "i4": 6}),
    "row_parallel_shard_by_stream": Case(linear, [(12, 16), (6, 16)], {"i0": 12}),
    "row_parallel_no_deallocate": Case(linear, [(12, 16), (4, 16)], {"i0": 12}),
    "linear_allreduce": Case(linear, [(12, 10), (6, 10)], {"i0": 12, "i1": 10, "i2": 6}),
    "matmul_stream_m_numbers": Case(torch.matmul, [(12, 5), (5, 6)]),
    "matmul_stream_n": Case(torch.matmul, [(5, 7), (7, 6)], {"i0": 5, "i2": 7, "i4": 6}),
    "matmul_stream_n_loop_domain": Case(torch.matmul, [(5, 7), (7, 6)], {"i0": 5, "i2": 7, "i4": 6}),
    "matmul_stream_n_numbers": Case(torch.matmul, [(5, 7), (7, 6)]),
    "column_parallel_numbers": Case(linear, [(6, 8), (12, 8)]),
    "device_outside_stream": Case(torch.matmul, [(12, 5), (5, 3)], {"i0": 12, "i2": 5, "i4": 3}),
    "stream_outside_device": Case(linear, [(12, 8), (5, 8)]),
    "two_matmuls_ceil_div": TWO_MATMULS,
    "two_matmuls_loop_domain": TWO_MATMULS,
    "two_matmuls_two_loops": TWO_MATMULS,
    "two_matmuls_sliced_otherwise": TWO_MATMULS,
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_dump_checks_and_runs_equal_to_the_unsharded_result(name: str) -> None:
    case = MEANINGS[name]
    program, warnings = read_nvfuser((CASES / f"{name}.txt").read_text(), f"{name}.txt")
    assert warnings == []
    assert hi.check(program, sizes=case.sizes) == []
    inputs = random_inputs(program, case.sizes)
    assert [tuple(x.shape) for x in inputs] == list(case.shapes)
    exact, plain = case.meaning(*(x.double() for x in inputs)), case.meaning(*inputs)
    outputs = run_whole(program, inputs, case.sizes)
    assert [comparison.good for comparison in compare(program, list(outputs), [plain], [exact])] == [True]


def test_a_dump_without_deallocate_frees_what_it_allocates() -> None:
    text = (CASES / "row_parallel_no_deallocate.txt").read_text()
    assert "Deallocate" not in text
    program, _ = read_nvfuser(text, "dump.txt")
    assert hi.check(program) == []
    assert str(program).count("free ") == str(program).count("= allocate") - len(program.outputs)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_dump_computes_its_product(seed: int) -> None:
    dump = random_dump(seed)
    program, warnings = read_nvfuser(dump.text, "dump.txt")
    assert warnings == []
    sizes = {name: size for name, size in dump.sizes.items() if name in program.size_names}
    assert hi.check(program, sizes=sizes) == []
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-3, 4, shape, generator=generator).float() for shape in dump.shapes)
    (c,) = run_whole(program, [a, b])
    assert torch.equal(c, dump.product(a, b))  # small integers: f32 is exact
    assert same_up_to_names(read_nvfuser(print_nvfuser(program))[0], program)
