"""Read and write the texts of commands, and load programs from files."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import os
import stat
import sys
import traceback
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hostir.dsl import Fusion
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.sizes import DIGITS
from hostir.ir.source import Diagnostic, HostIRError, Span, did_you_mean, error, from_here, is_first_rank

# Texts ----------------------------------------------------------------------------------------------------------------
# Texts that commands read and write: files, devices, pipes and, as `-`, standard input and output.

STANDARD = "-"
STDIN = (STANDARD, "/dev/stdin")


def check_readable(file: str) -> None:
    """Raise for a file that cannot be read: one that does not exist, a folder, a device, or input that ranks share."""
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
        files = (p.name for p in _listed(path.parent) if p.is_file())
        raise error(f"no such file: {file}", hint=did_you_mean(path.name, files))
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
    """Return the text of a file that `check_readable` accepts, or of standard input."""
    try:
        text = sys.stdin.buffer.read() if file == STANDARD else Path(file).read_bytes()
        return text.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise error(f"{file} is not a text", expected="a .py, a .hir or an nvFuser dump") from None
    except OSError as problem:
        raise error(f"cannot read {file}: {problem.strerror or problem}") from None


def write(text: str, out: str | Path | None) -> None:
    """Write a text to a file, or print it where `out` is None or `-`."""
    if out is None or out == STANDARD:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    if not str(out):
        raise error("the name of the output is empty", expected="a file, or - for standard output")
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot write {out}: {problem.strerror or problem}") from None


# Programs -------------------------------------------------------------------------------------------------------------
# From a file on the command line to a program: Python with a fusion, canonical text, or an nvFuser dump.


class Loaded(NamedTuple):
    """A program, the sizes that were given for it, notices about its file, and whether the file has comments."""

    program: Program
    sizes: dict[str, int]
    notices: list[Diagnostic]
    comments: bool


def load(file: str, *, name: str | None, form: str | None, given: Mapping[str, str], ranks: int | None) -> Loaded:
    """Load the program of `FILE`.

    Args:
        file: a `.py`, a text of hostir, or an nvFuser dump (`form="nvfuser"`).
        name: which fusion of a `.py` to take.
        given: `--set` values by name: a function's parameters, or sizes.
        ranks: what a parameter named `ranks` gets.
    """
    check_readable(file)
    path = Path(file)
    if path.suffix == ".py":
        if form is not None:
            raise error(f"--from {form} says how to read a text, and {path.name} is Python", hint="leave it out")
        fusion, parameters = _from_python(path, name, given, ranks)
        program = fusion.program()
        return Loaded(program, _sizes(program, given, parameters), [], False)
    if name:
        raise error(f"':{name}' picks a fusion of a .py file, and {path.name} is none")
    text = read(file)
    if form == "nvfuser":
        from hostir.nvfuser import read_nvfuser

        program, notices = read_nvfuser(text, file)
        return Loaded(program, _sizes(program, given), notices, False)
    if text.lstrip().startswith("%HostIrContainer"):
        raise error(f"{file} is an nvFuser dump", hint="add --from nvfuser")
    program = parse(text, file)
    return Loaded(program, _sizes(program, given), [], "//" in text)


def _sizes(program: Program, given: Mapping[str, str], parameters: Sequence[str] = ()) -> dict[str, int]:
    """Return the given sizes of the program, apart from the parameters of the fusion's function."""
    names = [*sorted(program.size_names), *(name for name, _ in program.aliases)]
    left = {name: value for name, value in given.items() if name not in parameters}
    for name, value in left.items():
        if name not in names:
            known, what = [*parameters, *names], "parameter or size" if parameters else "size"
            expected, hint = f"one of: {', '.join(known) or 'none'}", did_you_mean(name, known)
            raise error(f"@{program.name} has no {what} '{name}'", expected=expected, hint=hint)
        if not value.isdecimal() or len(value) > DIGITS:
            raise error(
                f"--set {name}={value:.60}: not a size", expected=f"an integer from 0, of at most {DIGITS} digits"
            )
    return {name: int(value) for name, value in left.items()}


def _from_python(
    path: Path, name: str | None, given: Mapping[str, str], ranks: int | None
) -> tuple[Fusion, Sequence[str]]:
    """Return the fusion, and the parameters of the function that made it."""
    module = _import(path)
    found = _fusions(module)
    if name is not None and inspect.isfunction(function := getattr(module, name, None)):
        found.setdefault(name, function)  # who names a function need not annotate it
    if name is not None and name not in found:
        raise error(
            f"{path} has no fusion '{name}'",
            expected=f"one of: {', '.join(found) or 'none'}",
            hint=did_you_mean(name, found),
        )
    if name is None and len(found) != 1:
        if not found:
            raise error(
                f"{path} has no fusion", expected="a function annotated '-> hi.Fusion', or a module-level Fusion"
            )
        raise error(f"{path} has several fusions", expected=f"{path}:NAME with one of: {', '.join(found)}")
    chosen = found[name or next(iter(found))]
    if isinstance(chosen, Fusion):
        return chosen, ()
    return _call(chosen, _arguments(chosen, given, ranks)), tuple(inspect.signature(chosen).parameters)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_hostir_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # as `python FILE` does, for what it imports from beside it
    try:
        spec.loader.exec_module(module)
    except HostIRError:
        raise
    except (Exception, SystemExit) as problem:
        raise _users_fault(f"importing {path}", problem, str(path.resolve())) from problem
    return module


def _users_fault(what: str, problem: Exception | SystemExit, file: str) -> HostIRError:
    """Return the error for a failure of the user's own Python, with the deepest line of the file."""
    if isinstance(problem, SyntaxError):
        where = from_here(problem.filename or file)
        return error(
            f"{what}: {problem.msg}", Span(where, problem.lineno or 1, problem.offset or 0, 1, problem.text or "")
        )
    lines = [line for frame, line in traceback.walk_tb(problem.__traceback__) if frame.f_code.co_filename == file]
    span = Span(from_here(file), lines[-1], 0, 1, linecache.getline(file, lines[-1]).rstrip()) if lines else None
    return error(f"{what}: {type(problem).__name__}: {problem}", span)


def _fusions(module: ModuleType) -> dict[str, Fusion | Callable[..., Fusion]]:
    """Return module-level fusions, and functions annotated to return one."""
    found: dict[str, Fusion | Callable[..., Fusion]] = {}
    for key, value in vars(module).items():
        if isinstance(value, Fusion):
            found[key] = value
        elif inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_"):
            returns = value.__annotations__.get("return")
            if returns is Fusion or (isinstance(returns, str) and returns.split(".")[-1] == "Fusion"):
                found[key] = value
    return found


def _arguments(function: Callable[..., Fusion], given: Mapping[str, str], ranks: int | None) -> dict[str, Any]:
    """Return the arguments for a fusion's function, by name; none for `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters
    chosen: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if key in given:
            chosen[key] = _convert(key, given[key], parameter)
        elif key == "ranks" and ranks is not None:
            chosen[key] = ranks
        elif parameter.default is inspect.Parameter.empty:
            raise error(
                f"the parameter '{key}' of {function.__name__} has no default", hint=f"give it one, or --set {key}=..."
            )
    return chosen


def _convert(key: str, text: str, parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "0", "1"):
            raise error(f"--set {key}={text}: not a truth value", expected="true or false")
        return text.lower() in ("true", "1")
    if not isinstance(default, int | float):
        return text
    try:
        return type(default)(text)
    except ValueError:
        raise error(f"--set {key}={text}: not {'an integer' if isinstance(default, int) else 'a number'}") from None


def _call(function: Callable[..., Fusion], arguments: dict[str, Any]) -> Fusion:
    bound = inspect.BoundArguments(inspect.signature(function), OrderedDict(arguments))
    try:
        fusion = function(*bound.args, **bound.kwargs)
    except HostIRError:
        raise
    except (Exception, SystemExit) as problem:
        file = inspect.getsourcefile(function) or ""
        raise _users_fault(f"calling {function.__name__}", problem, file) from problem
    if not isinstance(fusion, Fusion):
        raise error(f"{function.__name__} returned {type(fusion).__name__}", expected="a hostir.Fusion")
    return fusion


def load_named(options: Namespace) -> tuple[Program, dict[str, int]]:
    """Load the program that FILE or FILE:NAME names, and the sizes that `--set` gives."""
    file, colon, name = options.file.rpartition(":")
    if not colon or "." in name or "/" in name:  # the colon, if any, belongs to a path
        file, name = options.file, None
    if colon and name == "":
        raise error(f"{options.file} names no fusion behind the colon", expected="FILE or FILE:NAME")
    given: dict[str, str] = {}
    for item in options.given:
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise error(f"--set {item}", expected="NAME=VALUE")
        given[key] = value
    if options.ranks is not None and options.ranks < 1:
        raise error(f"--ranks {options.ranks}", expected="at least 1")
    world = os.environ.get("WORLD_SIZE")
    if world and options.ranks not in (None, int(world)):
        raise error(f"--ranks {options.ranks} under torchrun with {world} processes", hint="leave --ranks out")
    program, sizes, notices, options.comments = load(
        file, name=name, form=options.form, given=given, ranks=options.ranks or (int(world) if world else None)
    )
    if options.ranks not in (None, program.ranks):
        hint = "leave --ranks out: a text has its meshes"
        if file.endswith(".py"):
            hint = "have a parameter 'ranks' of its function make the mesh, or leave --ranks out"
        raise error(f"@{program.name} is for {program.ranks} ranks, not {options.ranks}", hint=hint)
    for diagnostic in notices:
        print_once(str(diagnostic).replace("error:", "note:", 1))
    return program, sizes


def print_once(text: str) -> None:
    """Print a message to stderr, once a job."""
    if is_first_rank():
        print(text, file=sys.stderr)
