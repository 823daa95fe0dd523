"""Runs the benchmark of a block of Llama-3 with a backend of torch.compile that generates no code."""

from __future__ import annotations

import sys

from benchmarks.llama_block import main
from tests.torch.without_code import WITHOUT_CODE

if __name__ == "__main__":
    sys.argv += ["--backend", WITHOUT_CODE]
    main()
