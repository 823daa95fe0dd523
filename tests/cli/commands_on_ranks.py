"""Run several commands in one job, because starting processes takes longer than the commands.

`on_ranks` starts the job. Its ranks run this file as a script, with the job's folder as the argument.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.launch import environment, launch

ROOT = Path(__file__).parents[2]
Ended = subprocess.CompletedProcess[str]


def on_ranks(ranks: int, commands: Mapping[str, Sequence[str]], folder: Path, **variables: str) -> dict[str, Ended]:
    """Run commands on `ranks` ranks; return for each the highest exit code, and the output of all ranks.

    A command is the path of a script, or arguments of `hostir`. If the key of a command is the name of a fault, the
    command runs with this fault.
    """
    (folder / "commands.json").write_text(json.dumps(commands))
    job = launch(ranks, __file__, str(folder), env=environment(**variables), timeout=150)
    assert job.returncode == 0, job.stderr
    every = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    ended = {}
    for name, command in commands.items():
        codes, printed, errors = zip(*(one[name] for one in every), strict=True)
        ended[name] = Ended(command, max(codes), "".join(printed), "".join(errors))
    return ended


# On the ranks -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def wrong_kernel() -> Iterator[None]:
    """Multiply the first row of rank 1's matmuls by 1.02."""
    from hostir.call import rank

    right = rank.kernel_table

    def spoiled(*policy: str) -> Mapping[str, Any]:
        table = right(*policy)

        def matmul(out: Any, a: Any, b: Any) -> None:
            table["matmul"](out, a, b)
            out.select(-2, 0).mul_(1.02)

        return {**table, "matmul": matmul}

    with mock.patch.object(rank, "kernel_table", spoiled):
        yield


@contextlib.contextmanager
def lost_copies() -> Iterator[None]:
    """Drop all one-sided copies of rank 1."""
    from hostir.machines.gloo.onesided import GlooOneSided

    with mock.patch.object(GlooOneSided, "copy", return_value=None):
        yield


FAULTS = {"wrong kernel": wrong_kernel, "lost copies": lost_copies}


def script(path: str) -> int:
    """Run a script as `python` does. An exception ends the job."""
    with mock.patch.object(sys, "argv", [path]):
        runpy.run_path(path, run_name="__main__")
    return 0


def main(folder: Path) -> None:
    import torch.distributed as dist

    from hostir.__main__ import main as hostir

    rank, ended = int(os.environ["RANK"]), {}
    dist.init_process_group("gloo")  # each command opens and closes its own session on this group
    for name, command in json.loads((folder / "commands.json").read_text()).items():
        out, err = io.StringIO(), io.StringIO()
        fault = FAULTS[name] if name in FAULTS and rank == 1 else contextlib.nullcontext
        with fault(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = script(command[0]) if command[0].endswith(".py") else hostir(command)
        ended[name] = code, out.getvalue(), err.getvalue()
    (folder / f"{rank}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
