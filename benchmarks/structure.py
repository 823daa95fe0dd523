"""Measure hostir's structure: lines of each package, long functions, large classes, import circles, and more.

    python -m benchmarks.structure
    python -m benchmarks.structure --root ../before --out benchmarks/results/structure

The other figures are: globals that functions bind anew, lists of classes that are kept by hand, long signatures, the
files that a new statement changes, and the functions of a warm call.

Lines are code, docstrings, comments, imports or blank. Kernels may be longer than other functions. An import circle is
a set of modules that all import each other, directly or through other modules. Imports within functions count; imports
for type checkers only do not count. A list of classes that is kept by hand is an `isinstance`, a `case` or a literal
that names classes of statements, or classes of operations of an unrolled program. Such lists are counted in the
packages `ROOMS`, which should ask for traits instead. The files that a new statement changes are taken from
docs/extending.md, as in the test of that page. The parameters of a method do not include `self`. A warm call is the
fourth call `executor(a, b, out=(c,))` of a program on one CPU process. Its chain is the deepest stack of hostir's
functions.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks.harness import table, write
from tests.edits import anchor

ROOMS = (
    "check",
    "repair",
    "plan",
    "job",
    "machines",
    "call",
    "choice",
)  # packages that should keep no lists of classes
LONG = 12  # parameters
LONG_FUNCTION, LARGE_CLASS = 60, 12  # lines, methods
CHANGE = re.compile(r"^```python (?:after|in|import) (\S+)$", re.MULTILINE)
KINDS = ("code", "docstrings", "comments", "imports", "blank")
WARM = """
import sys, torch, hostir as hi
TEXT = '''hostir 1
mesh @mesh [didx] = 0
program @product(%a: f32[4, 8], %b: f32[8, 4]) -> (%c) {
  %c: f32[4, 4] = allocate
  matmul %a, %b -> %c
}
'''
executor = hi.Executor(hi.parse(TEXT), machine="gloo")
a, b, c = torch.randn(4, 8), torch.randn(8, 4), torch.empty(4, 4)
for _ in range(3):
    executor(a, b, out=(c,))
stack, deepest, called = [], [], set()
def look(frame, event, argument):
    global deepest
    code = frame.f_code
    if "/hostir/" not in code.co_filename:
        return
    if event == "call":
        stack.append(f"{code.co_filename.rpartition('/hostir/')[2]}:{code.co_qualname}")
        called.add(stack[-1])
        deepest = max(deepest, list(stack), key=len)
    elif event == "return":
        stack.pop()
sys.setprofile(look)
executor(a, b, out=(c,))
sys.setprofile(None)
print("\\n".join(deepest), "", *sorted(called), sep="\\n")
"""


def lines_of(text: str) -> Counter[str]:
    """Return the number of lines of a module that are code, docstrings, comments, imports or blank."""
    tree = ast.parse(text)
    kinds = dict.fromkeys(range(1, len(text.splitlines()) + 1), "code")
    for n, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            kinds[n] = "blank"
        elif line.lstrip().startswith("#"):
            kinds[n] = "comments"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kinds |= dict.fromkeys(range(node.lineno, _last_line(node) + 1), "imports")
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            doc = node.body[0]
            kinds |= dict.fromkeys(range(doc.lineno, _last_line(doc) + 1), "docstrings")
    return Counter(kinds.values())


def _last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def modules(root: Path) -> dict[str, str]:
    """Return the text of each module below `root`, by its path."""
    return {str(path.relative_to(root)): path.read_text() for path in sorted((root / "hostir").rglob("*.py"))}


def classes(texts: dict[str, str]) -> set[str]:
    """Return the names of the classes of statements and of operations of an unrolled program."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }
    subclasses = {"Statement", "Op"}
    while more := {name for name, parents in bases.items() if parents & subclasses} - subclasses:
        subclasses |= more
    return subclasses


def lists(name: str, text: str, known: set[str]) -> Iterator[str]:
    """Yield the places where a module lists several of the classes `known`, or tests for an instance of one of them."""
    for node in ast.walk(ast.parse(text)):
        named = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            named = _names(node.args[1])
        elif isinstance(node, ast.MatchClass):
            named = _names(node.cls)
        elif isinstance(node, (ast.Tuple, ast.Set, ast.List)):
            named = [item.id for item in node.elts if isinstance(item, ast.Name)]
            named = named if len(set(named) & known) > 1 else []
        elif isinstance(node, ast.Dict):
            named = [n for key in node.keys if key is not None for n in _names(key)]
        if set(named) & known:
            yield f"{name}:{node.lineno}: {', '.join(n for n in named if n in known)}"


def _names(node: ast.AST) -> list[str]:
    """Return the names in an expression, without names of modules."""
    return [
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(node)
        if isinstance(n, (ast.Name, ast.Attribute))
    ]


def long_signatures(name: str, text: str) -> Iterator[str]:
    """Yield the functions with more than LONG parameters. Triton kernels are marked."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            names = [
                p.arg
                for p in (
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                    arguments.vararg,
                    arguments.kwarg,
                )
                if p
            ]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if count > LONG:
                yield f"{name}:{node.lineno}: {node.name}, {count}{' (Triton)' if kernel else ''}"


def long_functions(name: str, text: str) -> Iterator[str]:
    """Yield the functions with more than LONG_FUNCTION lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (lines := _last_line(node) - node.lineno + 1) > LONG_FUNCTION:
            yield f"{name}:{node.lineno}: {node.name}, {lines}"


def large_classes(name: str, text: str) -> Iterator[str]:
    """Yield the classes with more than LARGE_CLASS methods."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, ast.FunctionDef) for member in node.body)
            if methods > LARGE_CLASS:
                yield f"{name}:{node.lineno}: {node.name}, {methods}"


def rebound_globals(name: str, text: str) -> Iterator[str]:
    """Yield the `global` statements, with which functions bind module globals anew."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: {', '.join(node.names)}"


def import_circles(texts: dict[str, str]) -> list[str]:
    """Return the import circles. Each is a text with the names of its modules."""
    names = {_module(path): path for path in texts}
    imported = {name: set(_imports(ast.parse(texts[path]), names)) - {name} for name, path in names.items()}
    reached = {name: _reachable(name, imported) for name in names}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in names}
    return sorted(", ".join(sorted(circle)) for circle in circles if len(circle) > 1)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(node: ast.AST, names: Collection[str]) -> Iterator[str]:
    """Yield those of the modules `names` that the code below a node imports. Imports for type checkers are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module in names:
            yield from (
                f"{child.module}.{a.name}" if f"{child.module}.{a.name}" in names else child.module for a in child.names
            )
        elif isinstance(child, ast.Import):
            yield from (a.name for a in child.names if a.name in names)
        else:
            yield from _imports(child, names)


def _reachable(name: str, imported: dict[str, set[str]]) -> set[str]:
    """Return all modules that a module imports, directly or through other modules."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        more = imported[waiting.pop()] - seen
        seen |= more
        waiting += more
    return seen


def statements_of(root: Path) -> dict[str, str]:
    """Return the sections of docs/extending.md that add a statement. The keys are the titles."""
    page = (root / "docs/extending.md").read_text()
    sections = (section.partition("\n") for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:])
    return {title: text for title, _, text in sections if "statement" in title}


def touched(root: Path, section: str) -> list[str]:
    """Return the files of hostir that a section of docs/extending.md changes."""
    paths = (anchor(root, name).path.relative_to(root).as_posix() for name in CHANGE.findall(section))
    return [*dict.fromkeys(paths)]


def warm_call(root: Path) -> tuple[list[str], list[str]]:
    """Return the functions in the deepest stack of a warm call, and all functions that the call calls."""
    done = subprocess.run([sys.executable, "-c", WARM], cwd=root, capture_output=True, text=True, check=True)
    chain, _, called = done.stdout.partition("\n\n")
    return chain.split(), called.split()


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(), help="another checkout (default: this one)")
    parser.add_argument("--out", type=Path, help="write .json and .md files with this name")
    options = parser.parse_args()
    texts = modules(options.root)
    rooms: dict[str, Counter[str]] = {}
    for name, text in texts.items():
        parts = name.split("/")[1:-1] or ["hostir"]
        rooms.setdefault("/".join(parts), Counter())
        rooms["/".join(parts)] += lines_of(text) + Counter(files=1)
    total = sum(rooms.values(), Counter())
    rows = [
        [room, *(str(n[kind]) for kind in ("files", *KINDS))] for room, n in [*sorted(rooms.items()), ("all", total)]
    ]
    known = classes(texts)
    by_hand = [
        at for name, text in texts.items() if set(name.split("/")) & set(ROOMS) for at in lists(name, text, known)
    ]
    outside = {name: text for name, text in texts.items() if "kernels" not in name.split("/")}
    functions = [at for name, text in outside.items() for at in long_functions(name, text)]
    large = [at for name, text in texts.items() for at in large_classes(name, text)]
    rebound = [at for name, text in texts.items() for at in rebound_globals(name, text)]
    circles = import_circles(texts)
    long = [at for name, text in texts.items() for at in long_signatures(name, text)]
    added = {title: touched(options.root, section) for title, section in statements_of(options.root).items()}
    chain, called = warm_call(options.root)
    warm = f"{len(called)} functions of {len({f.partition(':')[0] for f in called})} files"
    sections = [
        table(["room", "files", *KINDS], rows),
        f"{len(functions)} functions of more than {LONG_FUNCTION} lines outside kernels:\n" + "\n".join(functions),
        f"{len(large)} classes of more than {LARGE_CLASS} methods:\n" + "\n".join(large),
        f"{len(circles)} import circles:\n" + "\n".join(circles),
        f"{len(rebound)} functions that bind globals of their module anew:\n" + "\n".join(rebound),
        f"{len(by_hand)} lists of classes kept by hand in {', '.join(ROOMS)}:\n" + "\n".join(by_hand),
        f"{len(long)} functions of more than {LONG} parameters:\n" + "\n".join(long),
        *(f"{title}: {len(files)} files\n" + "\n".join(files) for title, files in added.items()),
        f"a warm call: {warm}; the deepest chain:\n" + "\n".join(chain),
    ]
    print("\n\n".join(sections))
    if options.out is not None:
        text = "\n\n".join([sections[0], *(f"```\n{text}\n```" for text in sections[1:])])
        data = {
            **{"rooms": rooms, "functions": functions, "large": large, "circles": circles, "globals": rebound},
            **{"by_hand": by_hand, "long": long, "touched": added, "chain": chain, "called": called},
        }
        write(options.out, "Structure", text, data)


if __name__ == "__main__":
    main()
