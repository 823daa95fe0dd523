"""Tables of machines, the cost model and kernel tests must list every operation."""

from __future__ import annotations

import inspect

import pytest

from hostir.choice.cost import TASKS
from hostir.ir.op import REGISTRY
from hostir.ir.tensor_ops import Unary
from hostir.machines.cuda.binder import BIND
from hostir.machines.gloo.dealer import DEAL
from hostir.plan import operations as plan_operations
from tests.kernels.test_aten import ELEMENTWISE, NUMBERS

TESTED_ALONE = {"cast", "sum"}  # they change the dtype or the shape


@pytest.mark.parametrize("table", [TASKS, DEAL, BIND], ids=["cost model", "gloo", "cuda"])
def test_every_operation_of_an_unrolled_program_has_a_meaning(table: dict[type, object]) -> None:
    operations = {
        cls
        for _, cls in inspect.getmembers(plan_operations, inspect.isclass)
        if issubclass(cls, plan_operations.Op) and cls is not plan_operations.Op
    }
    assert table.keys() == operations


def test_every_elementwise_computation_is_compared_with_a_reference_that_is_not_its_kernel() -> None:
    unary = {name for name, cls in REGISTRY.items() if issubclass(cls, Unary)}
    assert unary - TESTED_ALONE == ELEMENTWISE.keys() | NUMBERS.keys()
