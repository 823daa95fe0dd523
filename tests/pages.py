"""Runs the code of a Markdown page as a reader would, from the top.

    ```python              runs; the blocks of a page share their variables
    ```python FILE         is a part of that file, which has its own tests
    ```python VERB NAME    changes hostir (tests/edits.py): the page runs with a changed copy
    ```output              is the output of the block before it
    ```hir                 is a program that the checker accepts
    ```hir NAME            is the case tests/cases/findings/NAME.hir, without its comments
    ```finding             is the output of the checker for the case before it
    ```console             holds commands after `$ ` and, optionally, their output
    ```text                is not run

`hostir` and the ranks of torchrun are forked from a process that has imported torch (tests/launch.py). The test of
`make demo` starts the same commands in new processes. In outputs, `...` stands for any text. Commands of `make`, which
runs the tests, and commands of a block with `gpu` after its language are not run; only their options and files are
checked.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.edits import edit
from tests.launch import launch, python_path

ROOT = Path(__file__).parent.parent
LANGUAGES = {"python", "output", "hir", "finding", "console", "text"}
COMMAND = re.compile(  # a command that needs no shell and starts only hostir
    r"(?P<variables>(?:export \w+=\w+; |\w+=\w+ )*)"
    r"(?:torchrun --standalone --nproc-per-node (?P<ranks>\d) |(?=hostir))(?P<words>[^;|&<>]+)"
    r"(?: > (?P<file>\S+))?\s*"
)
FENCE = re.compile(r"^```(\w*)(?: (?:(after|in|import) )?([\w./]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the verb of a change, the word after it, its text and its first line."""

    language: str
    verb: str
    word: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fenced = [
        Block(m[1], m[2] or "", m[3] or "", m[4], text[: m.start(4)].count("\n") + 1) for m in FENCE.finditer(text)
    ]
    unknown = [f"{page.name}:{b.line - 1}: {b.language!r}" for b in fenced if b.language not in LANGUAGES]
    assert not unknown, f"a block in an unknown language: {', '.join(unknown)}; expected one of {sorted(LANGUAGES)}"
    return fenced


def check_python(page: Path, folder: Path) -> None:
    """Run the Python of a page in a new process, in `folder`, and compare the output of each block."""
    command = (__file__, str(page), str(folder / f"{page.stem}.py"))
    if any(block.verb for block in blocks(page)):
        change(page, folder)
        env = environment() | {"PYTHONPATH": python_path(folder)}
        done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    else:
        done = launch(0, *command, cwd=folder, env=environment(), timeout=250)
    assert done.returncode == 0, f"{page.name}:\n{done.stderr}"
    printed = iter(json.loads(done.stdout))
    before = ""
    for block in blocks(page):
        if block.verb:
            continue
        if block.language == "python" and block.word:
            assert block.text in (ROOT / block.word).read_text(), (
                f"{page.name}:{block.line}: not a part of {block.word}"
            )
        elif block.language == "python":
            before = next(printed)
        elif block.language == "output":
            compare(page, block.line, block.text, before)


def change(page: Path, folder: Path) -> None:
    """Copy the package to `folder` and make the changes of the page."""
    shutil.copytree(ROOT / "hostir", folder / "hostir", ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(page):
        if block.verb:
            edit(folder, block.verb, block.word, block.text)


def check_console(page: Path, folder: Path) -> None:
    """Run the commands of a page in `folder`, which looks like the repository, and compare their output."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("docs/images", "dump"):
        (folder / name).mkdir(parents=True)
    for block in blocks(page):
        if block.language != "console":
            continue
        for line, command, expected in commands(block):
            where = f"{page.name}:{line}: {command}"
            if block.word or command.startswith("make "):
                check_without_running(command, where)
                continue
            done = ran(command, folder)
            assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
            if expected:
                compare(page, line, expected, done.stdout)


def ran(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page; `hostir` and the ranks of torchrun are forked with torch imported."""
    if not (known := COMMAND.fullmatch(command)):
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment(), timeout=250
        )
    variables = dict(pair.split("=") for pair in re.findall(r"\w+=\w+", known["variables"]))
    words = shlex.split(known["words"], comments=True)
    words = words if known["ranks"] else ["-m", *words]
    done = launch(int(known["ranks"] or 0), *words, cwd=folder, env=environment() | variables, timeout=250)
    if not known["file"]:
        return done
    (folder / known["file"]).write_text(done.stdout)
    return subprocess.CompletedProcess(command, done.returncode, "", done.stderr)


def commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """Yield the commands of a console block, each with its line and its output."""
    assert block.text.startswith("$ "), f"line {block.line}: a console block begins with '$ '"
    line = block.line
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield line, command, printed
        line += part.count("\n")


def check_without_running(command: str, where: str) -> None:
    """Check that the make targets, files and options of a command exist."""
    if command.startswith("make "):
        subprocess.run(
            ["make", "--dry-run", *shlex.split(command, comments=True)[1:]], cwd=ROOT, check=True, capture_output=True
        )
        return
    words = command.split()
    assert words[0] in ("torchrun", "hostir", "python"), where
    for word in words:
        if word.endswith(".py"):
            assert (ROOT / word.partition(":")[0]).is_file(), where
    if "hostir" in words:
        from hostir.__main__ import _parse

        _parse(words[words.index("hostir") + 1 :])


def environment() -> dict[str, str]:
    """Return the environment of a shell in which the virtual environment is active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def compare(page: Path, line: int, expected: str, got: str) -> None:
    if not doctest.OutputChecker().check_output(expected.rstrip() + "\n", got.rstrip() + "\n", doctest.ELLIPSIS):
        raise AssertionError(f"{page.name}:{line}: expected\n{expected}\nbut the output is\n{got}")


def _run(page: Path, module: Path) -> list[str]:
    """Run the Python blocks and return their outputs; one file holds them at the line numbers of the page."""
    python_blocks = [b for b in blocks(page) if b.language == "python" and not b.word]
    lines = [""] * page.read_text(encoding="utf-8").count("\n")
    for block in python_blocks:
        texts = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(texts)] = texts
    module.write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = sys.modules.setdefault("page", ModuleType("page")).__dict__  # dataclasses look up their module
    printed = []
    for block in python_blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * (block.line - 1) + block.text, str(module), "exec", dont_inherit=True), names)
        printed.append(out.getvalue())
    return printed


if __name__ == "__main__":
    print(json.dumps(_run(Path(sys.argv[1]), Path(sys.argv[2]))))
