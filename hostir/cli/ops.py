"""Run `hostir ops`: print the language reference, which is generated from the registered statement classes.

`table()` returns the reference for a terminal, and `markdown()` returns it as the page docs/language.md.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from dataclasses import dataclass

from hostir.ir.comm_ops import Communication, Reshard
from hostir.ir.message_ops import Message
from hostir.ir.onesided_ops import AllocateSymmetric, Barrier, PeerCopy, Signal, WaitSignal
from hostir.ir.op import REGISTRY, VALUE_CODECS, Codec, Phase, Statement, codecs_of, defaults_of
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.text import OptionalPart, SyntaxPart, declares_type, template
from hostir.ir.types import DTYPES
from hostir.ir.view_ops import ViewStatement

SECTIONS: tuple[tuple[str, tuple[type[Statement], ...]], ...] = (
    ("Computations", (TensorOp,)),
    ("Views", (ViewStatement,)),
    ("Communications", (Communication, Reshard)),
    ("Messages", (Message,)),
    ("One-sided communication", (AllocateSymmetric, PeerCopy, Signal, WaitSignal, Barrier)),
    ("Buffers, streams, loops and conditions", (Statement,)),
)

PAGE = f"""# The language

<!-- Made by `hostir ops --markdown > docs/language.md`. Change the statements' docstrings, not this page. -->

Everything that hostir lowers, checks and runs is a program with this text. `hostir.parse(str(program)) == program`, and
equal programs print the same bytes except for comments. `//` starts a comment that ends with the line: `print` and
`hostir lower` print the notes of passes as comments, and parsing drops them. White space has no meaning.

```hir
hostir 1
mesh @mesh [didx] = 0 1 2 3
mesh @grid [dp, tp] = (0 1) (2 3)
program @example(%a: bf16[4@didx, M], %b: bf16[4@dp, (2@tp 16)] on @grid) -> (%c) streams 2 {{
  %c: bf16[4, M] = allocate
  %h = allgather %a -> %c over didx   // a handle: the communication is in flight
  wait %h
}}
```

| part | meaning |
|---|---|
| `hostir 1` | the version of the text |
| `mesh @grid [dp, tp] = (0 1) (2 3)` | devices in a line or a grid: teams of `tp` are its rows, of `dp` its columns |
| `mesh @cube [dp, cp, tp] = ((0 1) (2 3)) ((4 5) (6 7))` | a grid of grids, and so on: any number of axes |
| `mesh @mesh [didx] = 0 1 2 3 hosts 2` | planned for 2 hosts with equally many ranks; all meshes state it, or none |
| `fusion @name` | a tensor program, before lowering: every statement defines a value |
| `program @name` | a host program, after lowering: statements write buffers and run on streams |
| `(%a: ...) -> (%c)` | inputs with their types, and outputs |
| `streams 2` | the size of the pool of worker streams, `0` and `1`; if left out, there is only the caller's stream |

**Types.** `bf16[8@didx, 128, 64]` is the whole tensor, with its first axis sharded in equal blocks over the mesh axis
`didx`. Dtypes: {", ".join(f"`{name}`" for name in DTYPES)}. `i32` and `i64` hold indices, which are
moved and viewed, and not computed with.

| type | meaning |
|---|---|
| `f32[M, 64]` | replicated: every rank holds all of it |
| `f32[4096@didx, 64]` | contiguous blocks of rows, one a rank |
| `f32[(4@dp 1024@tp), 64]` | one axis of 4096 as the product of its parts, outermost first |
| `f32[(4@stream 1024), 64]` | in a fusion: sliced in 4 by the pipeline |
| `f32[M, 64] partial(didx)` | each rank holds one term of a sum over the ranks of `didx` |
| `f32[M, 64] on @grid` | on another mesh than the first |
| `f32[M, 64] auto` | in a fusion: its sharding is inferred |
| `flag[8]` | in a program: an array of flags on every rank, which peers signal and streams wait for |

**Sizes** are products and quotients of integers and names: `4096`, `M`, `M*K/8`. Names are bound when the program runs,
by the shapes of its inputs or by `--set M=4096`. A size that is divided into equal parts, over ranks or into chunks,
must be a multiple of their number; that is checked before anything runs. **Indices** are integers, loop indices, this
rank's position on the mesh (`%r = rank of %x over didx`), and `+ - * / %` on them; `/` rounds down.

A fusion states the type of every result, a program only if it does not follow from the operands. In the syntax below
`%x` is a value, `<x>` anything else, and `(...)?` is optional. In the examples every operand carries the type that it
was defined with. [memory-model.md](memory-model.md) describes how statements are ordered, [extending.md](extending.md)
how to add one.
"""


@dataclass(frozen=True)
class ReferenceEntry:
    """The entry of one statement in the reference.

    Fields:
        keyword: the statement's keyword in the text.
        forms: the syntax of the statement. Each item is a pair: the phases with this syntax, and the syntax as text.
        doc: the description.
        example: an example of the statement.
        fields: the fields of the statement, grouped by codec. Each group is a pair: the meaning of the codec, and the
            names of the fields.
    """

    keyword: str
    forms: tuple[tuple[str, str], ...]
    doc: str
    example: str
    fields: tuple[tuple[str, str], ...]

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.doc.split("\n\n")[0].split())


def entry(cls: type[Statement]) -> ReferenceEntry:
    """Return the reference entry of a statement class."""
    doc, _, example = inspect.cleandoc(cls.__doc__ or "").partition("Example:")
    forms: dict[str, list[str]] = {}
    for phase in (p for p in Phase if p in cls.phases):
        forms.setdefault(_syntax(cls, phase), []).append(phase.value)
    written = tuple((", ".join(phases), text) for text, phases in forms.items())
    return ReferenceEntry(cls.keyword(), written, doc.strip(), example.strip(), tuple(_fields(cls).items()))


def sections() -> dict[str, list[ReferenceEntry]]:
    """Return the entries of all statements by section title.

    A statement belongs to the first section of SECTIONS that lists one of its base classes.
    """
    entries: dict[str, list[ReferenceEntry]] = {title: [] for title, _ in SECTIONS}
    for cls in REGISTRY.values():
        title = next(title for title, bases in SECTIONS if issubclass(cls, bases))
        entries[title].append(entry(cls))
    return entries


def table() -> str:
    """Return the reference for a terminal, with one line for each statement.

    The line shows the statement's syntax in a host program. If only fusions have the statement, it shows the syntax in
    a fusion.
    """
    width = max(len(e.forms[-1][1]) for entries in sections().values() for e in entries)
    blocks = [
        "\n".join([title, *(f"  {e.forms[-1][1]:{width}}  {e.summary}" for e in entries)])
        for title, entries in sections().items()
    ]
    return "\n\n".join(blocks)


def markdown() -> str:
    """Return the reference as a page of Markdown."""
    parts = [PAGE]
    for title, entries in sections().items():
        parts += [f"## {title}\n", *(_markdown(e) for e in entries)]
    return "\n".join(parts).rstrip()


def _markdown(e: ReferenceEntry) -> str:
    width = max(len(text) for _, text in e.forms)
    forms = "\n".join(f"{text:{width}}  // {phase}" for phase, text in e.forms)
    fields = "".join(f"- {names}: {meaning}\n" for meaning, names in e.fields)
    return f"### `{e.keyword}`\n\n{e.doc}\n\n```text\n{forms}\n```\n\n{fields}\nExample: `{e.example}`\n"


def _syntax(cls: type[Statement], phase: Phase) -> str:
    """Return the syntax of a statement for people, such as `%out: <type> = cast %x to <dtype>`."""
    codecs = codecs_of(cls)

    def spell(part: SyntaxPart, leads: bool) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, OptionalPart):
            inner = "".join(spell(p, leads=False) for p in part.parts)
            return f" ({inner.lstrip()})?" if inner.startswith(" ") else f"({inner})?"
        if codecs[part.name] is Codec.BLOCK:
            return "{ ... }"
        if codecs[part.name] not in VALUE_CODECS:
            return f"<{part.name}>"
        typed = leads and part.name != "handle" and declares_type(cls, phase)
        return f"%{part.name}: <type>" if typed else f"%{part.name}"

    return "".join(spell(part, leads=i == 0) for i, part in enumerate(template(cls.form(phase)))).strip()


def _fields(cls: type[Statement]) -> dict[str, str]:
    """Return the fields of a statement class, grouped by codec.

    A key is the meaning of a codec. A value lists the names of the fields with this codec, as text. Optional fields are
    listed with their defaults.
    """
    optional = {part.field for part in template(cls.syntax) if isinstance(part, OptionalPart)}
    fields: dict[str, str] = {}
    for name, codec in sorted(codecs_of(cls).items(), key=lambda field: field[0] in optional):
        default = defaults_of(cls).get(name)
        aside = (
            ""
            if name not in optional
            else " (may be left out)"
            if default in (None, "")
            else f" ({default} unless said)"
        )
        before = fields.get(codec.value)
        fields[codec.value] = f"{before}, `{name}`{aside}" if before else f"`{name}`{aside}"
    return fields


def main(options: Namespace) -> int:
    """Run `hostir ops`; return its exit code."""
    print(markdown() if options.markdown else table())
    return 0
