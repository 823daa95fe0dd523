"""Run a job of several ranks on one GPU, to test correctness. The ranks take turns on the GPU, so times mean nothing.

    python tests/gpu/on_one_gpu.py --ranks N SCRIPT [ARGUMENT ...]

Each rank is a process, as under torchrun, with symmetric memory that peers map, streams, flags and copies. Only the
links are missing: NCCL treats the ranks as different hosts and sends messages over sockets.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import runpy
import subprocess
import sys
from pathlib import Path

AS_RANK = "--as-rank"


def environment(rank: int) -> dict[str, str]:
    """Return the variables of a rank that shares GPU 0 with others."""
    return {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank{rank}",  # NCCL refuses two ranks of one host on one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def main() -> int:
    """Start the ranks, or run as one of them; return the exit code."""
    if sys.argv[1:2] == [AS_RANK]:
        os.environ.update(environment(int(os.environ["RANK"])))
        faulthandler.dump_traceback_later(float(sys.argv[2]), repeat=True)
        sys.argv = sys.argv[3:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    parser = argparse.ArgumentParser(description="Run a job of several ranks on one GPU.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stacks", type=float, default=300.0, help="seconds between two stack traces of all ranks")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    chosen = parser.parse_args()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    as_rank = [sys.executable, __file__, AS_RANK, str(chosen.stacks)]
    return subprocess.call([*launcher, "--nproc-per-node", str(chosen.ranks), *as_rank, *chosen.command])


if __name__ == "__main__":
    sys.exit(main())
