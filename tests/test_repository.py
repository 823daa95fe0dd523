"""Rules for the whole repository: paths, variables, imports, names and docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.structure import long_signatures, modules

ROOT = Path(__file__).parent.parent

# Joined from parts so that this file passes its test.
FOREIGN_PATHS = re.compile("|".join([r"(?<![\w.~-])/(?:work|root)" + "/", re.escape("../" + "shared")]))
READS_OWN_VARIABLE = re.compile(r"\b(?:environ|getenv)\b.*HOSTIR_")


def files_of_the_repository() -> list[Path]:
    """Return the files that git tracks or would add; in a copy without git, every file that is not hidden."""
    if not (ROOT / ".git").exists():
        return [path for path in ROOT.rglob("*") if path.is_file() and "/." not in f"/{relative(path)}"]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file; an empty list for a binary file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_no_file_names_a_path_outside_the_repository() -> None:
    places = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in files_of_the_repository()
        for number, line in enumerate(lines_of(path), 1)
        if FOREIGN_PATHS.search(line)
    ]
    assert not places, "\n".join(places)


def test_only_knobs_reads_the_variables_of_hostir() -> None:
    places = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in (ROOT / "hostir").rglob("*.py")
        if path.name != "knobs.py"
        for number, line in enumerate(lines_of(path), 1)
        if READS_OWN_VARIABLE.search(line)
    ]
    assert not places, "\n".join(places)


def loaded_with(module: str, seen: dict[str, None]) -> dict[str, None]:
    """Return the modules that an import loads, following imports within hostir."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module in seen or not path.exists():
        return seen | {module: None}
    seen |= {module: None}
    for node in ast.parse(path.read_text()).body:
        names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        for name in names:
            seen = loaded_with(name, seen)
    return seen


def test_triton_is_imported_only_with_its_kernels() -> None:
    loaded: dict[str, None] = {}
    for module in ("hostir.call.rank", "hostir.machines.cuda.machine", "hostir.choice", "hostir.torch"):
        loaded = loaded_with(module, loaded)
    assert "torch" in loaded, "imports are not followed"
    assert "triton" not in loaded, [*loaded]


def test_every_example_has_a_main() -> None:
    without = [relative(path) for path in (ROOT / "examples").glob("*.py") if "main" not in functions_of(path)]
    assert not without, "an example is run by its main()"


@pytest.mark.xdist_group("grouped")
def test_tests_of_one_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    if hasattr(request.config, "workerinput") and request.config.option.loadgroup:  # as in `make test`
        assert request.node.nodeid.endswith("@grouped"), "see pytest in pyproject.toml"


# Former words of hostir, and the words of CUDA and Triton papers.
OLD_WORDS = {
    "permit": "credit",
    "stall": "timeout",
    "teller": "signal stream",
    "copier": "copy stream",
    "handover": "flag reset, credits",
    "torn": "in pieces",
    "loud": "warn",
    "unsaid": "unraised",
    "recorder": "unroller",
    "told": "received",
    "settle": "decide",
    "spoil": "make undefined",
    "ailment": "problem",
}
# Words that are unclear as names.
OLD_NAMES = {
    "beside": "concurrent, overlapped",
    "fed": "given",
    "spare": "idle, left over",
    "ahead": "lead, peek",
    "tell": "send, announce",
    "hear": "receive",
}
TYPE_NAME = re.compile(r"[A-Z](?=\w*[a-z])\w*")
RIDDLE = re.compile(r"(What|Which|How|Where|Why|When)\b(?!.*\?$)")


def types_of(path: Path) -> set[str]:
    """Return the classes and type aliases of a module: names with capitals and lower case."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if TYPE_NAME.fullmatch(name)}


def test_no_function_has_more_than_twelve_parameters() -> None:
    texts = modules(ROOT)
    long = [at for name, text in texts.items() for at in long_signatures(name, text)]
    assert any("(Triton)" in at for at in long), "signatures are not read"
    assert not [at for at in long if "(Triton)" not in at], "group parameters in a dataclass"


def test_no_two_types_have_the_same_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "hostir").rglob("*.py")):
        for name in types_of(path):
            homes.setdefault(name, []).append(relative(path))
    assert len(homes) > 200, "classes and aliases are not read"
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice, twice


def test_names_are_the_words_of_the_field() -> None:
    places = []
    old = OLD_WORDS | OLD_NAMES
    for path in sorted((ROOT / "hostir").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [getattr(node, field, None) for field in ("name", "id", "attr", "arg")]
            for name in (name for name in names if isinstance(name, str)):
                words = re.split(r"_|(?<=[a-z])(?=[A-Z])", name)
                places += [f"{relative(path)}: {name}" for word in words if word.lower().removesuffix("s") in old]
    assert not places, "\n".join(dict.fromkeys(places))


def test_pages_use_the_words_of_the_field() -> None:
    places = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        words = re.findall(r"[a-z]+", path.read_text().lower())
        places += [f"{relative(path)}: {word}" for word in words if word.removesuffix("s") in OLD_WORDS]
    assert not places, "\n".join(dict.fromkeys(places))


def test_docstrings_begin_with_a_statement() -> None:
    places = []
    for path in sorted((ROOT / "hostir").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                places += [f"{relative(path)}: {first}"] if RIDDLE.match(first) else []
    assert not places, "\n".join(places)
