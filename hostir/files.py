"""The texts that commands read and write: files, devices, pipes and, as `-`, standard input and output."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from hostir.ir.source import did_you_mean, error

STANDARD = "-"
STDIN = (STANDARD, "/dev/stdin")


def check_readable(file: str) -> None:
    """Raises for what is no file to read: one that does not exist, a folder, a device, or input that ranks share."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    if file == STANDARD:
        if sys.stdin is None:
            raise error("standard input is closed", expected="a text there, or the name of a file")
        if several:
            raise _shared("standard input")
        return
    path = Path(file)
    if not file or path.is_dir():
        inside = ", ".join(_in_short(sorted(p.name for p in _listed(path) if p.suffix in (".py", ".hir"))))
        hint = f"it holds {inside or 'no .py or .hir'}" if file else ""
        raise error(f"{file} is a folder" if file else "the name of the file is empty", expected="a file", hint=hint)
    if not path.exists():
        raise error(f"no such file: {file}", hint=did_you_mean(path.name, (p.name for p in _listed(path.parent))))
    mode = path.stat().st_mode
    if several and not stat.S_ISREG(mode):
        raise _shared(file)
    if stat.S_ISCHR(mode) and file not in STDIN and not os.path.samefile(file, os.devnull):
        raise error(f"{file} is a device", expected="a file")


def _shared(file: str) -> Exception:
    return error(f"{file} can be read once, and every rank would read it", hint="write it to a file, and name that")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _in_short(names: list[str], most: int = 20) -> Iterable[str]:
    return names if len(names) <= most else [*names[:most], f"and {len(names) - most} more"]


def read(file: str) -> str:
    """The text of a file that `check_readable` passes, or of standard input."""
    try:
        text = sys.stdin.buffer.read() if file == STANDARD else Path(file).read_bytes()
        return text.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise error(f"{file} is not a text", expected="a .py, a .hir or an nvFuser dump") from None
    except OSError as problem:
        raise error(f"cannot read {file}: {problem.strerror or problem}") from None


def write(text: str, out: str | Path | None) -> None:
    """Writes a text to a file, or prints it where `out` is None or `-`."""
    if out is None or out == STANDARD:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    if not str(out):
        raise error("the name of the output is empty", expected="a file, or - for standard output")
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot write {out}: {problem.strerror or problem}") from None
