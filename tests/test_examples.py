from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hostir as hi
from examples.ag_matmul import ag_matmul
from examples.mlp_block import mlp_block
from examples.patterns import EXPERTS, PATTERNS
from hostir.__main__ import main
from hostir.cli.loading import load
from tests.cli.commands_on_ranks import Ended, on_ranks
from tests.launch import launch
from tests.pages import ROOT, environment

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# patterns.py cannot be run; llama.py, generate.py and moe.py have no fusion, and tests of their own
PAGES = [path for path in EXAMPLES if path.stem not in ("patterns", "llama", "generate", "moe")]
LONGEST_PAGE = 100
SEVERAL = {"autograd": ("forward", "backward")}  # examples with more than one fusion
FUSIONS = [f"{path}{name}" for path in PAGES for name in [f":{n}" for n in SEVERAL.get(path.stem, ())] or [""]]

EACH = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
EACH_FUSION = pytest.mark.parametrize(
    "fusion", FUSIONS, ids=lambda fusion: Path(fusion).stem + fusion.partition(":")[2]
)


def run(*command: str, ranks: int = 0) -> str:
    done = launch(ranks, *command, env=environment(), timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@EACH
def test_an_example_is_at_most_a_page_and_documents_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST_PAGE
    assert f"python examples/{path.name}" in text
    assert f"torchrun --nproc-per-node 4 examples/{path.name}" in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_alone(path: Path) -> None:
    assert run(str(path))


@EACH_FUSION
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["sequential", "pipeline"])
def test_an_example_gives_the_reference_result_on_any_number_of_ranks(
    fusion: str, ranks: int, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", fusion, "--ranks", str(ranks), "--strategy", strategy, "--compare", "--seed", "3"]
    assert main(command) == 0, capsys.readouterr().err
    assert f"ran on {ranks} simulated rank" in capsys.readouterr().out


@pytest.mark.torchrun
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_of_a_job_holds_only_its_parts(ranks: int) -> None:
    printed = run("examples/tensor_parallel.py", ranks=ranks)
    assert printed.count(f"{ranks} ranks with {512 // ranks} rows each, relative error") == 3


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mixture_of_experts_trains_as_on_one_rank(ranks: int) -> None:
    printed = run("examples/moe.py", ranks=ranks)
    assert printed.count(f"tokens on {ranks} ranks, loss") == 3


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Run every example, and `hostir run` of every fusion, in one job."""
    scripts = {path.name: [str(path)] for path in PAGES}
    commands = {fusion: ["run", fusion, "--compare", "--device", "cpu"] for fusion in FUSIONS}
    return on_ranks(4, {**scripts, **commands}, tmp_path_factory.mktemp("job"))


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.xdist_group("examples on ranks")
@EACH
def test_an_example_runs_on_real_ranks(path: Path, ended: dict[str, Ended]) -> None:
    assert ended[path.name].returncode == 0, ended[path.name].stderr
    assert ended[path.name].stdout


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.xdist_group("examples on ranks")
def test_the_gradients_of_the_training_example_match_torch_on_every_rank(ended: dict[str, Ended]) -> None:
    assert ended["autograd.py"].stdout.count("dx [16, 48] and dw [48, 24] are those of torch's autograd") == 4


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.xdist_group("examples on ranks")
@EACH_FUSION
def test_the_command_runs_an_example_on_real_ranks(fusion: str, ended: dict[str, Ended]) -> None:
    assert ended[fusion].returncode == 0, ended[fusion].stderr
    assert "ran on 4 ranks on cpu" in ended[fusion].stdout


def test_the_fusion_of_ag_matmul_is_for_eight_ranks_by_default() -> None:
    program = load(str(ROOT / "examples/ag_matmul.py"), name=None, form=None, assignments={}, ranks=None).program
    assert str(program).splitlines()[2] == (
        "fusion @ag_matmul(%a: bf16[4, 8@didx, 128, 1024], %b: bf16[1024, 512]) -> (%c) {"
    )


@pytest.mark.parametrize("fusion", [ag_matmul, mlp_block, *PATTERNS, *EXPERTS], ids=lambda fusion: fusion.__name__)
def test_rows_that_the_ranks_do_not_divide_are_refused_or_kept(fusion: Callable[..., hi.Fusion]) -> None:
    try:
        built = fusion(ranks=4, M=63).program()
    except hi.HostIRError as refused:
        (diagnostic,) = refused.diagnostics
        assert "63" in diagnostic.message
        assert diagnostic.span is not None
        assert diagnostic.span.file.startswith("examples")
    else:
        assert any("63" in str(value.tensor) for value in built.inputs)


def test_a_late_wait_gives_wrong_results_in_some_schedules() -> None:
    lines = [line for line in run("examples/edit_a_dump.py").splitlines() if "schedule" in line]
    assert "relative error 1" in lines[0]  # program order gives the right result
    wrong = [line for line in lines if "differ" in line or "nan" in line]
    assert len(wrong) >= 2
