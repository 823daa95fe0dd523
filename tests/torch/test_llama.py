"""The example of a model: losses, gradients and checkpoints of several ranks are those of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import llama
from tests.launch import launch
from tests.pages import environment

RUNS = Path(__file__).parent / "llama_runs.py"
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.xdist_group("torch operators")]


def ran(ranks: int, *runs: str) -> list[str]:
    """What each run prints; a run with --compare ends the job where its bounds do not hold."""
    done = launch(ranks, str(RUNS), *runs, env=environment(), timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = re.split(r"^== .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert len(printed) == len(runs)
    for text, arguments in zip(printed, runs, strict=True):
        assert ("off one rank's by" in text) == ("--compare" in arguments)
    return printed


def losses(printed: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert found
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.load, of one process
def test_ranks_train_as_one_does_and_read_what_others_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint"
    llama.main(["--steps", "3"])
    alone = losses(capsys.readouterr().out)
    _, two, compiled, varying, _ = ran(
        2,
        "--compare --dtype bf16 --steps 2",
        f"--steps 3 --save {folder}",
        "--compare --varying --steps 3 --layers 1 --compile aot_eager",
        "--varying --steps 60 --layers 1 --batch 8",
        f"--compare --steps 1 --load {folder}",
    )
    assert two.count("step") == compiled.count("step") == 3
    assert losses(varying)[-1] < 0.8 * losses(varying)[0], "it learns"
    assert len(set(re.findall(r"(\d+) tokens", varying))) > 1
    four, *_, loaded = ran(
        4,
        "--compare --steps 3",
        "--compare --tp 2 --steps 2",
        "--compare --tp 2 --fsdp --dtype bf16 --steps 2",
        f"--compare --tp 2 --fsdp --steps 1 --load {folder}",
        f"--steps 1 --load {folder}",
    )
    assert losses(two) == pytest.approx(alone, abs=2e-4)
    assert losses(four) == pytest.approx(alone, abs=2e-4)
    llama.main(["--steps", "1", "--load", str(folder)])
    assert losses(loaded) == pytest.approx(losses(capsys.readouterr().out), abs=2e-4)
