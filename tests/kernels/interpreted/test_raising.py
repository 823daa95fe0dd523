from __future__ import annotations

import torch

from hostir.kernels.flags.signals import SignalKernel


def test_a_kernel_sets_one_flag_to_its_epoch_and_no_other_flag():
    flags = torch.full((5,), 7, dtype=torch.int64)
    raising = SignalKernel(flags.device, flags[3:].data_ptr(), 1 << 40)
    for _ in range(2):
        raising(None)
        assert flags.tolist() == [7, 7, 7, 1 << 40, 7]
        flags[3] = 0
