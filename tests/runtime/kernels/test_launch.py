from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hostir.runtime.kernels.matmul import matmul


def test_a_cpu_without_the_interpreter_is_said():
    with pytest.raises(ValueError, match="need CUDA tensors, got cpu; on a CPU, set TRITON_INTERPRET=1"):
        matmul(torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4))


def test_the_package_itself_loads_no_triton():
    code = "import sys, hostir.runtime.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
