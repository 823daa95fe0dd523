"""Run examples/llama.py once for each argument, on the ranks of test_llama.py."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from examples import llama


def main() -> None:
    dist.init_process_group("gloo")
    for arguments in sys.argv[1:]:
        if os.environ["RANK"] == "0":
            print(f"== {arguments}", flush=True)
        llama.main(arguments.split())
        torch._dynamo.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
