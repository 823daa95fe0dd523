"""The example of a model: losses, gradients and checkpoints of several ranks equal those of one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import llama
from tests.launch import launch
from tests.pages import environment

RUNS = Path(__file__).parent / "llama_runs.py"


def ran(ranks: int, *runs: str) -> list[str]:
    """Return the output of each run; a run with --compare fails if an error exceeds its bound."""
    done = launch(ranks, str(RUNS), *runs, env=environment(), timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = re.split(r"^== .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert len(printed) == len(runs)
    for text, arguments in zip(printed, runs, strict=True):
        assert ("off one rank's by" in text) == ("--compare" in arguments)
    return printed


def losses(printed: str) -> list[float]:
    values = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert values
    return values


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.xdist_group("torch operators")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.load in one process
def test_several_ranks_train_like_one_and_load_checkpoints_of_another_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, one = tmp_path / "checkpoint", "--layers 1"
    llama.main([*one.split(), "--steps", "2"])
    alone = losses(capsys.readouterr().out)
    bf16, two, compiled, fp8 = ran(
        2,
        f"{one} --compare --dtype bf16 --steps 2",
        f"{one} --steps 2 --save {folder}",
        f"{one} --compare --varying --steps 3 --compile aot_eager",
        f"{one} --compare --fp8 --varying --steps 33 --batch 8 --strategy ring",
    )
    assert bf16.count("step") == 2
    assert compiled.count("step") == 3
    assert losses(fp8)[-1] < 0.8 * losses(fp8)[0], "the loss must fall"
    assert len(set(re.findall(r"(\d+) tokens", fp8))) > 1
    assert len(set(re.findall(r"symmetric memory ([1-9]\d*)", fp8))) == 1
    four, _, loaded = ran(
        4,
        f"{one} --compare --steps 2",
        f"{one} --compare --tp 2 --steps 1",
        f"{one} --compare --tp 2 --fsdp --dtype bf16 --steps 1 --load {folder}",
    )
    assert losses(two) == pytest.approx(alone, abs=2e-4)
    assert losses(four) == pytest.approx(alone, abs=2e-4)
    llama.main([*one.split(), "--steps", "1", "--load", str(folder)])
    assert losses(loaded) == pytest.approx(losses(capsys.readouterr().out), abs=2e-2), "in bf16"


def test_memory_that_grows_with_new_numbers_of_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, loss_of, arguments = [], llama.loss_of, "--layers 1 --features 16 --batch 1 --varying --steps 31"
    monkeypatch.setattr(llama, "loss_of", lambda model, tokens: (kept.append(tokens), loss_of(model, tokens))[1])
    with pytest.raises(SystemExit, match="bytes and symmetric bytes were"):
        llama.main(arguments.split())


def test_a_nan_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    model, alone, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)
    monkeypatch.setattr(llama, "loss_of", loss_of)
    loss = loss_of(model, x)
    model.bias.grad.fill_(torch.nan)
    with pytest.raises(SystemExit, match=r"gradients by up to nan \(bias\)"):
        llama.compare(model, alone, loss, x, model.state_dict())


def test_contradicting_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (("--graph --varying", "another for each"), ("--graph", "for GPUs")):
        with pytest.raises(SystemExit):
            llama.main(arguments.split())
        assert reason in capsys.readouterr().err
