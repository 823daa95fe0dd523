"""Runs the code of a Markdown page as a reader would, from the top.

    ```python              runs; the blocks of a page share their names
    ```python FILE         is a part of that file, which has tests of its own
    ```python VERB NAME    changes hostir (tests/edits.py): the page runs with a changed copy
    ```output              is what the block before it prints
    ```hir                 is a program that checks
    ```hir NAME            is the case tests/cases/findings/NAME.hir, without its comments
    ```finding             is what is found in the case before it
    ```console             holds commands after `$ ` and, optionally, their output
    ```text                is not run

`hostir` and the ranks of torchrun are forked from a process that has imported torch (tests/launch.py); the test of
`make demo` starts the same commands anew. In outputs `...` stands for anything. The commands of a block with `gpu`
behind its language need GPUs and are only looked at; so are those of make, which runs the tests.
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
COMMAND = re.compile(  # one that needs no shell and starts nothing but hostir
    r"(?P<variables>(?:export \w+=\w+; |\w+=\w+ )*)"
    r"(?:torchrun --standalone --nproc-per-node (?P<ranks>\d) |(?=hostir))(?P<words>[^;|&<>]+)"
    r"(?: > (?P<file>\S+))?\s*"
)
FENCE = re.compile(r"^```(\w*)(?: (?:(after|in|import) )?([\w./]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the verb of a change, the word after it, its text and the text's first line."""

    language: str
    verb: str
    word: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(m[1], m[2] or "", m[3] or "", m[4], text[: m.start(4)].count("\n") + 1) for m in FENCE.finditer(text)
    ]
    unknown = [f"{page.name}:{b.line - 1}: {b.language!r}" for b in found if b.language not in LANGUAGES]
    assert not unknown, f"a block in no language that is run, {', '.join(unknown)}; expected one of {sorted(LANGUAGES)}"
    return found


def check_python(page: Path, folder: Path) -> None:
    """Runs the Python of a page in a process of its own, in `folder`, and compares what each block prints."""
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
                f"{page.name}:{block.line}: {block.word} reads otherwise"
            )
        elif block.language == "python":
            before = next(printed)
        elif block.language == "output":
            compare(page, block.line, block.text, before)


def change(page: Path, folder: Path) -> None:
    """Copies the package to `folder` and changes it as the page says."""
    shutil.copytree(ROOT / "hostir", folder / "hostir", ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(page):
        if block.verb:
            edit(folder, block.verb, block.word, block.text)


def check_console(page: Path, folder: Path) -> None:
    """Runs the commands of a page in `folder`, which looks like the repository, and compares what they print."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("docs/images", "dump"):
        (folder / name).mkdir(parents=True)
    for block in blocks(page):
        if block.language != "console":
            continue
        for line, command, expected in commands(block):
            where = f"{page.name}:{line}: {command}"
            if block.word or command.startswith("make "):
                looks_right(command, where)
                continue
            done = ran(command, folder)
            assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
            if expected:
                compare(page, line, expected, done.stdout)


def ran(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of a page; `hostir`, and torchrun's ranks, in processes that need not import torch."""
    if not (known := COMMAND.fullmatch(command)):
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment(), timeout=250
        )
    variables = dict(one.split("=") for one in re.findall(r"\w+=\w+", known["variables"]))
    words = shlex.split(known["words"], comments=True)
    words = words if known["ranks"] else ["-m", *words]
    done = launch(int(known["ranks"] or 0), *words, cwd=folder, env=environment() | variables, timeout=250)
    if not known["file"]:
        return done
    (folder / known["file"]).write_text(done.stdout)
    return subprocess.CompletedProcess(command, done.returncode, "", done.stderr)


def commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """The commands of a console block, each with its line and with what it prints."""
    assert block.text.startswith("$ "), f"line {block.line}: a console block begins with '$ '"
    line = block.line
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield line, command, printed
        line += part.count("\n")


def looks_right(command: str, where: str) -> None:
    """Holds a command that is not run against what there is: targets of make, files, options."""
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
    """That of a shell in which the virtual environment is active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def compare(page: Path, line: int, expected: str, got: str) -> None:
    if not doctest.OutputChecker().check_output(expected.rstrip() + "\n", got.rstrip() + "\n", doctest.ELLIPSIS):
        raise AssertionError(f"{page.name}:{line}: expected\n{expected}\nbut it prints\n{got}")


def _run(page: Path, module: Path) -> list[str]:
    """What each Python block prints. All of them stand in one file, so that errors and names find their lines."""
    found = [b for b in blocks(page) if b.language == "python" and not b.word]
    lines = [""] * page.read_text(encoding="utf-8").count("\n")
    for block in found:
        texts = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(texts)] = texts
    module.write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = sys.modules.setdefault("page", ModuleType("page")).__dict__  # dataclasses look their module up
    printed = []
    for block in found:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * (block.line - 1) + block.text, str(module), "exec", dont_inherit=True), names)
        printed.append(out.getvalue())
    return printed


if __name__ == "__main__":
    print(json.dumps(_run(Path(sys.argv[1]), Path(sys.argv[2]))))
