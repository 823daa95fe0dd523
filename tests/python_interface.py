"""Makes docs/python.md, the page of the Python interface, from signatures and docstrings.

`pytest tests/test_docs.py --accept` writes it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any

import hostir as hi
from hostir.dsl.tensors import LoopAxis

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Writing a fusion", ("Fusion", "tensor", "Tensor", "LoopAxis", "DeviceMesh", "ParallelType")),
    (
        "Computations",
        (
            *("matmul", "linear", "scaled_matmul", "quantize", "add", "mul", "relu", "gelu", "silu", "cast", "sum"),
            *("rms_norm", "grouped_matmul", "grouped_outer", "permute_rows", "combine_rows"),
            *("reshape", "permute", "reshard"),
        ),
    ),
    ("Lowering and checking", ("lower", "compile", "Choice", "Ranges", "FallbackWarning", "parse", "check", "Program")),
    ("Running", ("run", "Executor", "Started", "session", "Session", "Trace", "knobs.scope")),
    ("Predicting", ("timeline", "PredictedTimeline")),
    ("Mistakes", ("HostIRError", "Diagnostic")),
)
NOT_CONSTRUCTED = {  # by users
    "Tensor",
    "LoopAxis",
    "Session",
    "Started",
    "Choice",
    "Ranges",
    "PredictedTimeline",
    "Program",
    "HostIRError",
    "Diagnostic",
}
INTERNAL = {  # used by other parts of hostir only
    "Choice": {"from_json", "to_json"},
    "Ranges": {"candidate", "first_program", "program", "representative", "representatives", "to_json"},
    "DeviceMesh": {"axis_name"},
    "Fusion": {"size"},
    "Program": {"check_sizes", "check_whole", "divisions", "misfits"},
    "Trace": {"add", "lanes"},
}
FOR_USERS = {"Session": {"symmetric_bytes"}}  # all other members of these classes are internal
HEADINGS = {"Args:": "Arguments:", "Fields:": "Fields:", "Returns:": "Returns"}
WIDEST = 110

PAGE = """# The Python interface

<!-- Made from signatures and docstrings by `pytest tests/test_docs.py --accept`. Change those, not this page. -->

All of it is in `import hostir as hi`. The import loads torch only with the first name that needs it. The
[tutorial](tutorial.md) shows how the parts work together. [sharding.md](sharding.md) says which rank holds what.

Shapes count elements. They are the shapes of whole tensors, unless the text names a rank's part. Every mistake raises
`hi.HostIRError`. Its text says where the mistake is (for a fusion, at your line), what was expected and what to do.

In signatures, `Extent` is a size: an integer, a name that the call binds (`"M"`), or a product or quotient of them
(`"M/8"`). `HasProgram` is a fusion. `Watcher` is a function of a pass's name and a program. `Part` is a tensor or None.
"""


def markdown() -> str:
    """Return the page of the Python interface as Markdown."""
    parts = [PAGE]
    for title, names in SECTIONS:
        parts += [f"## {title}\n", *(_entry(name) for name in names)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the documented public methods and properties of a class, in the order of their definition."""
    for name, member in vars(cls).items():
        internal, for_users = INTERNAL.get(cls.__name__, ()), FOR_USERS.get(cls.__name__, {name})
        public = not name.startswith("_") and name not in internal and name in for_users
        if public and isinstance(member, (property, cached_property)) and member.__doc__:
            yield name, member
        if public and inspect.isfunction(member) and member.__doc__:
            yield name, member


def _entry(name: str) -> str:
    thing = LoopAxis if name == "LoopAxis" else attrgetter(name)(hi)
    if not inspect.isclass(thing):
        return f"### `hi.{name}`\n\n{_code(f'hi.{name}', thing)}{_text(thing)}\n"
    shown = f"hi.{name}" if name in hi.__all__ else name
    constructed = (
        "" if name in NOT_CONSTRUCTED or issubclass(thing, (Warning, hi.ParallelType)) else _code(shown, thing)
    )
    parts = [f"### `{shown}`\n\n{constructed}{_text(thing)}\n"]
    if "__call__" in vars(thing):
        parts.append(f"{_code(name.lower(), thing.__call__, bound=True)}{_text(thing.__call__)}\n")
    for member, value in members(thing):
        if isinstance(value, (property, cached_property)):
            parts.append(f"#### `{name}.{member}`\n\n{_text(value)}\n")
        else:
            parts.append(f"#### `{name}.{member}`\n\n{_code(f'{name}.{member}', value, bound=True)}{_text(value)}\n")
    return "\n".join(parts)


def _code(name: str, function: Callable[..., Any], *, bound: bool = False) -> str:
    """Return the signature in a block that is not run; `bound` drops the first parameter."""
    signature = inspect.signature(function)
    public = [p for p in signature.parameters.values() if str(p.default) != "<factory>"]
    parameters = [_parameter(p) for p in public[1 if bound else 0 :]]
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY) - bound, "*")
    result = "" if inspect.isclass(function) else _result(function, signature.return_annotation)
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) > WIDEST:
        line = f"{name}(\n" + "".join(f"    {it},\n" for it in parameters) + f"){result}"
    return f"```text\n{line}\n```\n\n"


def _parameter(p: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(p.kind, "")
    annotation = "" if p.annotation in (p.empty, "Any") else f": {p.annotation}"
    default = repr(p.default) if isinstance(p.default, str) else str(p.default)
    equals = f" = {default}" if annotation else f"={default}"
    return f"{stars}{p.name}{annotation}{'' if p.default is p.empty else equals}"


def _result(function: Callable[..., Any], annotation: Any) -> str:
    if annotation in (inspect.Signature.empty, "None"):
        return ""
    inner = re.fullmatch(r"Iterator\[(.*)\]", str(annotation))
    if inner and hasattr(function, "__wrapped__"):  # a context manager
        return f" -> ContextManager[{inner[1]}]"
    return f" -> {annotation}"


def _text(thing: Any) -> str:
    """Return the docstring as Markdown; sections such as `Args:` become lists."""
    lines = inspect.cleandoc(thing.__doc__).splitlines()
    rows: list[str] = []
    listing = False
    for line in lines:
        if line in HEADINGS:
            listing = True
            rows += [HEADINGS[line], ""]
        elif listing and (item := re.fullmatch(r"    ([\w*]+(?:, [\w*]+)*): (.*)", line)):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            rows.append(f"- {names}: {item[2]}")
        elif listing and line.startswith("    "):
            rows.append(f"  {line.strip()}" if rows[-1] else line.strip())
        else:
            listing = listing and not line
            rows.append(line)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(rows))
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text) + "\n"
