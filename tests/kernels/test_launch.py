from __future__ import annotations

import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.kernels.devices import Compiled
from hostir.kernels.matmul.matmul import matmul


def test_a_cpu_without_the_interpreter_is_reported():
    with pytest.raises(ValueError, match="need CUDA tensors, got cpu; on a CPU, set TRITON_INTERPRET=1"):
        matmul(torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4))


def test_importing_the_package_does_not_load_triton():
    code = "import sys, hostir.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Utils:
    """A fake of the CUDA driver functions that Triton's driver calls."""

    def fill(self, address, swizzle, *rest):
        return ("map", address, *map(repr, rest))

    fill_tma_descriptor = fill_tma_descriptor_tiled = fill


def test_a_compiled_kernel_gets_what_triton_would_pass(monkeypatch):
    driver = SimpleNamespace(utils=Utils(), get_current_stream=lambda index: 40 + index)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    signature = {"x": "tensordesc<bf16[64,32]>", "n": "i32", "B": "constexpr", "p": "*fp32"}
    meta = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}]

    class Launcher(nvidia.CudaLauncher):
        def __init__(self):
            self.seen, self.num_ctas = [], 1
            self.launch = nvidia.wrap_handle_tensordesc(lambda *args: self.seen.append(args), signature, meta)
            self.global_scratch_size = self.profile_scratch_size = 0
            self.global_scratch_align = self.profile_scratch_align = 1
            self.launch_cooperative_grid = self.launch_pdl = False
            self.arg_annotations = self.kernel_signature = None

    metadata = SimpleNamespace(tensordesc_meta=meta)
    kernel = SimpleNamespace(run=Launcher(), function=1234, packed_metadata=(4, 1, 0), metadata=metadata)
    x = torch.zeros(128, 64, dtype=torch.bfloat16)
    descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 32])
    compiled = Compiled(kernel)
    stream = compiled.stream(2)
    compiled.launch(7, stream, (*compiled.encoded(0, descriptor), 5, True, 99))
    ours = kernel.run.seen.pop()
    kernel.run(7, 1, 1, 42, 1234, (4, 1, 0), None, None, None, descriptor, 5, True, 99)
    tritons = kernel.run.seen.pop()
    assert flat(ours) == flat(tritons)
    assert ("map", x.data_ptr()) in [value[:2] for value in flat(ours) if isinstance(value, tuple)]

    held = weakref.ref(x)
    encoded = compiled.encoded(0, descriptor)
    del x, descriptor
    assert encoded
    assert held() is None


def flat(arguments):
    """Newer versions of Triton pass the kernel's own arguments as one sequence at the end."""
    *launch, last = arguments
    return [*launch, *last] if isinstance(last, list | tuple) else [*launch, last]
