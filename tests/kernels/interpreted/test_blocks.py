from __future__ import annotations

import pytest
import torch

from hostir.call.executor import Executor
from tests.call.small_programs import alone

BODY = """%user = current_stream
  %box: f32[2, 3, 4, 8] = allocate_symmetric
  %f: flag[BLOCKS] = allocate_symmetric
  %out: f32[2, 3, 4, 5] = allocate
  %x = permute %box (ORDER, 3)
  %c = permute %out (ORDER, 3)
  put %a -> %box at 0 over didx
  set_stream 0
  synchronize %user
  for %i in 0..BLOCKS { signal %f[%i] = 1 at 0 over didx }
  set_stream %user
  matmul %x, %b -> %c ready %f >= 1 from 1
  synchronize 0"""


@pytest.mark.parametrize(("order", "blocks"), [("0, 1, 2", 4), ("2, 1, 0", 4), ("1, 0, 2", 12)])
def test_a_matmul_that_waits_for_flags_runs_tritons_kernel_block_by_block(order, blocks):
    body = BODY.replace("ORDER", order).replace("BLOCKS", str(blocks))
    p = alone(body, "%a: f32[2, 3, 4, 8], %b: f32[8, 5]", "%out")
    executor = Executor(p, machine="gloo", kernels="triton", check=False)
    a, b = torch.randn(2, 3, 4, 8), torch.randn(8, 5)
    torch.testing.assert_close(executor(a, b)[0], a @ b, rtol=2e-3, atol=2e-3)
