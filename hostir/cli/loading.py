"""Read the files that commands name, load programs from them, and write results.

The file name `-` means standard input or standard output. A file holds a fusion in Python, a program as hostir's text,
or an nvFuser dump.
"""

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
from hostir.knobs import set_by_launcher

STANDARD = "-"
STDIN = (STANDARD, "/dev/stdin")


def check_readable(file: str) -> None:
    """Raise HostIRError if a program cannot be read from a file.

    A program cannot be read from a missing file, a folder or a device. In a job of several ranks, it cannot be read
    from standard input or a pipe either. Every rank reads the program, but such an input can be read only once.
    """
    several = set_by_launcher("WORLD_SIZE", 1) > 1
    if file == STANDARD:
        if sys.stdin is None:
            raise error("standard input is closed", expected="a text on standard input, or the name of a file")
        if several:
            raise _shared("standard input")
        return
    path = Path(file)
    if not file or path.is_dir():
        programs = ", ".join(_shortened(sorted(p.name for p in _entries(path) if p.suffix in (".py", ".hir"))))
        hint = f"it holds {programs or 'no .py or .hir'}" if file else ""
        raise error(f"{file} is a folder" if file else "the name of the file is empty", expected="a file", hint=hint)
    if not path.exists():
        files = (p.name for p in _entries(path.parent) if p.is_file())
        raise error(f"no such file: {file}", hint=did_you_mean(path.name, files))
    mode = path.stat().st_mode
    if several and not stat.S_ISREG(mode):
        raise _shared(file)
    if stat.S_ISCHR(mode) and file not in STDIN and not os.path.samefile(file, os.devnull):
        raise error(f"{file} is a device", expected="a file")


def _shared(file: str) -> Exception:
    """Return the error for an input that can be read only once and that several ranks would read."""
    return error(
        f"{file} can be read once, and every rank would read it", hint="write it to a file, and name that file"
    )


def _entries(folder: Path) -> list[Path]:
    """Return the paths in a folder, or an empty list if the folder cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _shortened(names: list[str], most: int = 20) -> Iterable[str]:
    return names if len(names) <= most else [*names[:most], f"and {len(names) - most} more"]


def read(file: str) -> str:
    """Return the text of a file, or of standard input if `file` is `-`. `check_readable` must have accepted `file`."""
    try:
        text = sys.stdin.buffer.read() if file == STANDARD else Path(file).read_bytes()
        return text.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise error(f"{file} is not a text", expected="a .py, a .hir or an nvFuser dump") from None
    except OSError as problem:
        raise error(f"cannot read {file}: {problem.strerror or problem}") from None


def write(text: str, out: str | Path | None) -> None:
    """Write a text to a file; print it if `out` is None or `-`."""
    if out is None or out == STANDARD:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    if not str(out):
        raise error("the name of the output is empty", expected="a file, or - for standard output")
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot write {out}: {problem.strerror or problem}") from None


class Loaded(NamedTuple):
    """The result of loading a file.

    Fields:
        program: the program.
        sizes: the sizes that `--set` binds.
        notices: diagnostics about the file that are not errors.
        comments: True if the file has comments, which the program does not keep.
    """

    program: Program
    sizes: dict[str, int]
    notices: list[Diagnostic]
    comments: bool


def load(file: str, *, name: str | None, form: str | None, assignments: Mapping[str, str], ranks: int | None) -> Loaded:
    """Load a program from a file.

    Args:
        file: the name of a Python file, of a file with hostir's text, or of an nvFuser dump.
        name: the name of the fusion in a Python file. None if the file has only one fusion.
        form: `nvfuser` for an nvFuser dump, otherwise None.
        assignments: the values of `--set` by name. A name is a parameter of the fusion's function, or a size.
        ranks: the argument for a parameter of the fusion's function that is named `ranks`; None to use its default.
    """
    check_readable(file)
    path = Path(file)
    if path.suffix == ".py":
        if form is not None:
            raise error(f"--from {form} says how to read a text, and {path.name} is Python", hint="leave it out")
        fusion, parameters = _from_python(path, name, assignments, ranks)
        program = fusion.program()
        return Loaded(program, _sizes(program, assignments, parameters), [], False)
    if name:
        raise error(f"':{name}' picks a fusion of a .py file, and {path.name} is not a .py file")
    text = read(file)
    if form == "nvfuser":
        from hostir.nvfuser import read_nvfuser

        program, notices = read_nvfuser(text, file)
        return Loaded(program, _sizes(program, assignments), notices, False)
    if text.lstrip().startswith("%HostIrContainer"):
        raise error(f"{file} is an nvFuser dump", hint="add --from nvfuser")
    program = parse(text, file)
    return Loaded(program, _sizes(program, assignments), [], "//" in text)


def _sizes(program: Program, assignments: Mapping[str, str], parameters: Sequence[str] = ()) -> dict[str, int]:
    """Return the sizes among the values of `--set`, as integers.

    A name in `parameters` is a parameter of the fusion's function, not a size. Raises HostIRError for any other name
    that is not a size of the program, and for a value that is not an integer.
    """
    names = [*sorted(program.size_names), *(name for name, _ in program.aliases)]
    sizes = {name: value for name, value in assignments.items() if name not in parameters}
    for name, value in sizes.items():
        if name not in names:
            valid, noun = [*parameters, *names], "parameter or size" if parameters else "size"
            expected, hint = f"one of: {', '.join(valid) or 'none'}", did_you_mean(name, valid)
            raise error(f"@{program.name} has no {noun} '{name}'", expected=expected, hint=hint)
        if not value.isdecimal() or len(value) > DIGITS:
            raise error(
                f"--set {name}={value:.60}: not a size", expected=f"an integer from 0, of at most {DIGITS} digits"
            )
    return {name: int(value) for name, value in sizes.items()}


def _from_python(
    path: Path, name: str | None, assignments: Mapping[str, str], ranks: int | None
) -> tuple[Fusion, Sequence[str]]:
    """Return the fusion `name` of a Python file, and the parameter names of the function that returns it.

    A fusion that is a module-level object has no parameters. If `name` is None, the file must have exactly one fusion.
    """
    module = _import(path)
    fusions = _fusions(module)
    if name is not None and inspect.isfunction(function := getattr(module, name, None)):
        fusions.setdefault(name, function)  # a function that the user names needs no annotation
    if name is not None and name not in fusions:
        raise error(
            f"{path} has no fusion '{name}'",
            expected=f"one of: {', '.join(fusions) or 'none'}",
            hint=did_you_mean(name, fusions),
        )
    if name is None and len(fusions) != 1:
        if not fusions:
            raise error(
                f"{path} has no fusion", expected="a function annotated '-> hi.Fusion', or a module-level Fusion"
            )
        raise error(f"{path} has several fusions", expected=f"{path}:NAME with one of: {', '.join(fusions)}")
    fusion = fusions[name or next(iter(fusions))]
    if isinstance(fusion, Fusion):
        return fusion, ()
    return _call(fusion, _arguments(fusion, assignments, ranks)), tuple(inspect.signature(fusion).parameters)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_hostir_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # as `python FILE` does: the file may import other files of its folder
    try:
        spec.loader.exec_module(module)
    except HostIRError:
        raise
    except (Exception, SystemExit) as problem:
        raise _error_in_users_code(f"importing {path}", problem, str(path.resolve())) from problem
    return module


def _error_in_users_code(action: str, problem: Exception | SystemExit, file: str) -> HostIRError:
    """Return the error for an exception that the user's Python file raised.

    The error points at the innermost line of the traceback that is in this file.
    """
    if isinstance(problem, SyntaxError):
        path = from_here(problem.filename or file)
        span = Span(path, problem.lineno or 1, problem.offset or 0, 1, problem.text or "")
        return error(f"{action}: {problem.msg}", span)
    lines = [line for frame, line in traceback.walk_tb(problem.__traceback__) if frame.f_code.co_filename == file]
    line = Span(from_here(file), lines[-1], 0, 1, linecache.getline(file, lines[-1]).rstrip()) if lines else None
    return error(f"{action}: {type(problem).__name__}: {problem}", line)


def _fusions(module: ModuleType) -> dict[str, Fusion | Callable[..., Fusion]]:
    """Return the fusions of a module by name.

    They are the module's `Fusion` objects, and its public functions that are annotated to return a `Fusion`.
    """
    fusions: dict[str, Fusion | Callable[..., Fusion]] = {}
    for key, value in vars(module).items():
        if isinstance(value, Fusion):
            fusions[key] = value
        elif inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_"):
            returns = value.__annotations__.get("return")
            if returns is Fusion or (isinstance(returns, str) and returns.split(".")[-1] == "Fusion"):
                fusions[key] = value
    return fusions


def _arguments(function: Callable[..., Fusion], assignments: Mapping[str, str], ranks: int | None) -> dict[str, Any]:
    """Return the arguments for a call of the function that makes a fusion, by name.

    The values come from `--set` and `--ranks`. A parameter without a value is left out if it has a default. If it has
    no default, raise HostIRError. `*args` and `**kwargs` are always left out.
    """
    parameters = inspect.signature(function).parameters
    arguments: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if key in assignments:
            arguments[key] = _convert(key, assignments[key], parameter)
        elif key == "ranks" and ranks is not None:
            arguments[key] = ranks
        elif parameter.default is inspect.Parameter.empty:
            raise error(
                f"the parameter '{key}' of {function.__name__} has no default", hint=f"give it one, or --set {key}=..."
            )
    return arguments


def _convert(key: str, text: str, parameter: inspect.Parameter) -> Any:
    """Convert the text of `--set` to the type of the parameter's default."""
    default = parameter.default
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "0", "1"):
            raise error(f"--set {key}={text:.60}: not a truth value", expected="true or false")
        return text.lower() in ("true", "1")
    if not isinstance(default, int | float):
        return text
    try:
        return type(default)(text)
    except ValueError:
        kind = "an integer" if isinstance(default, int) else "a number"
        expected, hint = f"{kind}, such as {default}", f"leave it out for {key}={default}, the default"
        raise error(f"--set {key}={text:.60}: not {kind}", expected=expected, hint=hint) from None


def _call(function: Callable[..., Fusion], arguments: dict[str, Any]) -> Fusion:
    bound = inspect.BoundArguments(inspect.signature(function), OrderedDict(arguments))
    try:
        fusion = function(*bound.args, **bound.kwargs)
    except HostIRError:
        raise
    except (Exception, SystemExit) as problem:
        file = inspect.getsourcefile(function) or ""
        raise _error_in_users_code(f"calling {function.__name__}", problem, file) from problem
    if not isinstance(fusion, Fusion):
        raise error(f"{function.__name__} returned {type(fusion).__name__}", expected="a hostir.Fusion")
    return fusion


def load_named(options: Namespace) -> tuple[Program, dict[str, int]]:
    """Return the program that the command line names as FILE or FILE:NAME, and the sizes that `--set` binds."""
    file, colon, name = options.file.rpartition(":")
    if not colon or "." in name or "/" in name:  # a colon, if any, is part of the path
        file, name = options.file, None
    if colon and name == "":
        raise error(f"{options.file} names no fusion behind the colon", expected="FILE or FILE:NAME")
    assignments: dict[str, str] = {}
    for assignment in options.assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key or not value:
            raise error(f"--set {assignment}", expected="NAME=VALUE")
        assignments[key] = value
    if options.ranks is not None and options.ranks < 1:
        raise error(f"--ranks {options.ranks}", expected="at least 1")
    world = set_by_launcher("WORLD_SIZE", 0)
    if world and options.ranks not in (None, world):
        raise error(f"--ranks {options.ranks} under torchrun with {world} processes", hint="leave --ranks out")
    ranks = options.ranks or world or None
    program, sizes, notices, options.comments = load(
        file, name=name, form=options.form, assignments=assignments, ranks=ranks
    )
    if options.ranks not in (None, program.ranks):
        hint = "leave --ranks out: a text has its meshes"
        if file.endswith(".py"):
            hint = "make the mesh from a parameter 'ranks' of its function, or leave --ranks out"
        raise error(f"@{program.name} is for {program.ranks} ranks, not {options.ranks}", hint=hint)
    for diagnostic in notices:
        print_once(str(diagnostic).replace("error:", "note:", 1))
    return program, sizes


def print_once(text: str) -> None:
    """Print a message to stderr. In a job of several ranks, only the first rank prints it."""
    if is_first_rank():
        print(text, file=sys.stderr)
