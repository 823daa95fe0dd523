"""Run a job of several ranks on one GPU, for correctness: the processes take turns on it, so that times mean nothing.

    python tests/gpu/on_one_gpu.py --ranks N SCRIPT [ARGUMENT ...]

Each rank is a process, as under torchrun, with symmetric memory that its peers map, streams, flags and copies: all as
on several GPUs but the links. NCCL takes the ranks for different hosts, and sends messages over sockets.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import runpy
import subprocess
import sys
from pathlib import Path

RANK_OF_ALL = "--as-rank"


def environment(rank: int) -> dict[str, str]:
    """Return the variables of a rank that shares GPU 0 with others."""
    return {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank{rank}",  # NCCL refuses two ranks of one host on one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def main() -> int:
    """Start the ranks, or be one. Returns the exit code."""
    if sys.argv[1:2] == [RANK_OF_ALL]:
        os.environ.update(environment(int(os.environ["RANK"])))
        faulthandler.dump_traceback_later(float(sys.argv[2]), repeat=True)
        sys.argv = sys.argv[3:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    parser = argparse.ArgumentParser(description="Run a job of several ranks on one GPU.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stacks", type=float, default=300.0, help="seconds between two prints of where ranks stand")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    chosen = parser.parse_args()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    me = [sys.executable, __file__, RANK_OF_ALL, str(chosen.stacks)]
    return subprocess.call([*launcher, "--nproc-per-node", str(chosen.ranks), *me, *chosen.command])


if __name__ == "__main__":
    sys.exit(main())
