"""Run benchmarks on the ranks of test_comparison.py: `on_ranks.py "NAME ARGUMENTS..." ...`, a string for each."""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    for command in sys.argv[1:]:
        name, *arguments = command.split()
        with mock.patch.object(sys, "argv", [name, *arguments]):
            importlib.import_module(f"benchmarks.{name}").main()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
