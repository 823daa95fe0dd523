"""Define programs: immutable data in one of two phases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hostir.ir.divisions import divisions_of, misfits
from hostir.ir.op import Codec, Phase, Statement, Value, codecs_of
from hostir.ir.sizes import DIGITS, Division, Size, binding
from hostir.ir.source import Diagnostic, HostIRError, Span, described, did_you_mean, error, user_span
from hostir.ir.text import INDENT, VERSION, Printer
from hostir.ir.types import Mesh, TensorType


@dataclass(frozen=True)
class Program:
    """A fusion or a host program.

    `str(p)` is the complete text, with the comments that passes have added to statements. Parsing drops the comments,
    and `parse(str(p)) == p`. Equal programs have the same text except for comments.

    Fields:
        name: the name, without `@`.
        phase: FUSION or HOST.
        meshes: the meshes of the program's tensors. A tensor lies on `meshes[0]` if its type, as written in the text,
            names no mesh.
        inputs, outputs: the values that a call takes and returns, each with its `name` and `type`.
        body: the statements, in order. A loop is one statement, and holds the statements of its body.
        streams: the number of worker streams.
        aliases: further names of sizes, from another text form such as an nvFuser dump. The pair `("i5", "i4")` says
            that `i5` equals `i4`. A caller may bind aliases, too. The text of the program does not show them.
    """

    name: str
    phase: Phase
    meshes: tuple[Mesh, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    body: tuple[Statement, ...]
    streams: int = 0
    aliases: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return format_program(self)

    def _repr_markdown_(self) -> str:
        return f"```\n{self}```"

    @property
    def ranks(self) -> int:
        """The number of ranks that the program needs: one more than the highest device in its meshes."""
        return 1 + max(device for mesh in self.meshes for device in mesh.devices)

    def walk(self) -> Iterator[Statement]:
        """Yield every statement in order; a loop comes before the statements in its body."""
        return _walk(self.body)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.phase, self.meshes, self.inputs, self.outputs, self.body, self.streams))

    @cached_property
    def size_names(self) -> frozenset[str]:
        """The symbolic sizes in the program. All of them must have values before the program can run."""
        values = [*self.inputs, *(v for s in self.walk() for v in s.named)]
        named = {n for v in values if isinstance(v.type, TensorType) for n in v.type.names}
        for s in self.walk():
            named |= {n for f, c in codecs_of(type(s)).items() if c is Codec.SIZE for n in getattr(s, f).names}
        return frozenset(named)

    @cached_property
    def digest(self) -> str:
        """A hash of the program's text without comments. It is equal on all ranks that run the same program."""
        import hashlib  # seldom needed, and slow to load

        return hashlib.sha256(format_program(self, notes=False).encode()).hexdigest()[:16]

    @cached_property
    def divisions(self) -> tuple[Division, ...]:
        """The quotients of sizes that must be integers."""
        return divisions_of(self.inputs, self.walk())

    def misfits(self, sizes: Mapping[str, int]) -> list[Diagnostic]:
        """Return a diagnostic for each size that the program must split into equal parts, but cannot."""
        return misfits(self.name, self.divisions, sizes)

    def check_whole(self, sizes: Mapping[str, int]) -> None:
        """Raise HostIRError if the program must split a size into equal parts, but cannot."""
        if misfits := self.misfits(sizes):
            raise HostIRError(*misfits)

    def given_sizes(self, sizes: Mapping[str, int] | None) -> dict[str, int]:
        """Check the sizes that a caller binds to symbols, and return them as a dictionary.

        Symbols may be missing. If `sizes` is None, the caller binds no symbols. Raise HostIRError for unknown names and
        invalid sizes.
        """
        if sizes is None:
            return {}
        if not isinstance(sizes, Mapping):
            raise error(f"sizes={described(sizes)}", user_span(), expected="a dictionary such as {'M': 4096}")
        self._refuse_unknown(sizes)
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 10**DIGITS:
                message = f"the size {described(name)}={described(size)} of @{self.name}"
                raise error(message, user_span(), expected=f"an integer from 0, of at most {DIGITS} digits")
        return dict(sizes)

    def _refuse_unknown(self, sizes: Mapping[str, int]) -> None:
        names = self.size_names | dict(self.aliases).keys()
        if unknown := next((name for name in sizes if name not in names), None):
            hint = did_you_mean(unknown, names)
            expected = f"one of: {', '.join(sorted(names)) or 'none'}"
            raise error(f"@{self.name} has no size '{unknown}'", user_span(), expected=expected, hint=hint)

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Check that the program can run with these sizes; raise HostIRError if it cannot.

        Every symbol must have a value. Every size that is split into equal parts must be a multiple of the number of
        parts. An alias may be missing. If `sizes` contains an alias, the alias must have the value of the size that it
        stands for.
        """
        names, aliases = self.size_names, dict(self.aliases)
        self._refuse_unknown(sizes)
        if missing := sorted(names - sizes.keys()):
            raise error(f"the size '{missing[0]}' of @{self.name} is not bound", hint=binding(missing[0]))
        for name, meaning in aliases.items():
            if name in sizes and sizes[name] != (value := Size.of(meaning).bind(sizes)):
                same = f"{name} equals {meaning}" if str(value) != meaning else f"{name} is {meaning}"
                raise error(f"{name}={sizes[name]} does not fit @{self.name}, where {same}", expected=f"{name}={value}")
        self.check_whole(sizes)

    def with_body(self, body: Iterable[Statement]) -> Program:
        return replace(self, body=tuple(body))


def check_hosts(meshes: Collection[Mesh], span: Span | None) -> None:
    """Raise HostIRError if meshes state different numbers of hosts, or a number that the ranks cannot fill equally."""
    stated, ranks = sorted({mesh.hosts for mesh in meshes}), 1 + max(d for mesh in meshes for d in mesh.devices)
    if len(stated) > 1:
        numbers = " and ".join(str(hosts) if hosts else "none" for hosts in stated)
        raise error(f"the meshes of a program state different hosts: {numbers}", span, expected="one number for all")
    if stated[0] and ranks % stated[0]:
        raise error(f"{ranks} ranks on {stated[0]} hosts", span, expected="equally many ranks on each host")


def stated_hosts(program: Program) -> int:
    """Return the number of hosts for which a program is planned; 0 if its meshes do not state it."""
    return program.meshes[0].hosts


def shares_memory(program: Program) -> bool:
    """Return True if ranks access each other's memory. Then they are on one host, and meet before the first call."""
    return any(s.one_sided or s.workspace is not None for s in program.walk())


def sharing_teams(program: Program) -> frozenset[tuple[int, ...]]:
    """Return the teams of ranks that access each other's memory."""
    teams: set[tuple[int, ...]] = set()
    for s in program.walk():
        over = getattr(s, "over", "") if s.one_sided else ""  # copies, signals and barriers are over a mesh axis
        meshes = {v.type.mesh for v in s.named if isinstance(v.type, TensorType)}
        teams.update(team for mesh in meshes if mesh and over in mesh.axes for team in mesh.teams(over))
        if s.workspace is not None:
            teams.update(s.teams)
    return frozenset(teams)


def shared_across(program: Program, hosts: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return two ranks on different hosts that access each other's memory, if the program has any.

    `hosts` has the ranks of each host. It is empty if all ranks share a host.
    """
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    pairs = ((team[0], rank) for team in sorted(sharing_teams(program)) for rank in team)
    return next(((one, other) for one, other in pairs if host_of.get(one) != host_of.get(other)), None)


def with_hosts(program: Program, hosts: int) -> Program:
    """Return the program with meshes that state a number of hosts."""
    if hosts == stated_hosts(program):
        return program

    def stated(value: Value) -> Value:
        type = value.type
        if not isinstance(type, TensorType) or type.mesh is None:
            return value
        return replace(value, type=replace(type, mesh=replace(type.mesh, hosts=hosts)))

    every = [*program.inputs, *program.outputs, *(v for s in program.walk() for v in s.named)]
    values = {v.name: stated(v) for v in every}
    return replace(
        program,
        meshes=tuple(replace(mesh, hosts=hosts) for mesh in program.meshes),
        inputs=tuple(values[v.name] for v in program.inputs),
        outputs=tuple(values[v.name] for v in program.outputs),
        body=tuple(s.rename(values) for s in program.body),
    )


def uses_nccl(program: Program) -> bool:
    """Return True if a collective or a transfer of the program goes through a process group: on CUDA, through NCCL."""
    return any(s.collective and s.workspace is None for s in program.walk())


def format_program(program: Program, *, notes: bool = True, printer: Printer | None = None) -> str:
    """Return the program's text. If `notes` is True, each statement is followed by its note as a comment.

    `printer` replaces the default printer.
    """
    printer = printer or Printer(program.phase, program.meshes, notes=notes)
    lines = [f"hostir {VERSION}", *(f"mesh {mesh}" for mesh in program.meshes)]
    head = f"{program.phase.value} @{program.name}"
    inputs = [printer.binder(v, typed=True) for v in program.inputs]
    outputs = ", ".join(map(str, program.outputs))
    tail = f") -> ({outputs})" + (f" streams {program.streams}" if program.streams else "") + " {"
    one_line = f"{head}({', '.join(inputs)}{tail}"
    if len(one_line) <= 120:
        lines.append(one_line)
    else:
        lines += [f"{head}(", ",\n".join(f"{INDENT * 2}{i}" for i in inputs), tail]
    lines += printer.block(program.body, 1)
    return "\n".join([*lines, "}"]) + "\n"


def format_statement(statement: Statement, program: Program) -> str:
    """Return the text of a statement on one line, without the body of a loop, for messages and traces."""
    text = Printer(program.phase, program.meshes).lines(statement, 0)[0]
    return text.removesuffix("{").rstrip()


def _walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for s in body:
        yield s
        for inner in s.bodies:
            yield from _walk(inner)


def rewrite(body: Iterable[Statement], change: Callable[[Statement], Iterable[Statement]]) -> tuple[Statement, ...]:
    """Return a body with each statement replaced by the statements that `change` returns for it.

    The bodies inside a statement are rewritten before the statement itself.
    """
    done: list[Statement] = []
    for s in body:
        done.extend(change(s.with_bodies(lambda body: rewrite(body, change))))
    return tuple(done)


class Names:
    """Generates fresh names: `a`, then `a_1`, `a_2`, ... in the order of requests."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)

    @staticmethod
    def of(program: Program) -> Names:
        names = {v.name for v in program.inputs}
        return Names(names | {v.name for s in program.walk() for v in s.named})

    def fresh(self, wish: str) -> str:
        name, n = wish, 0
        while name in self.taken:
            n += 1
            name = f"{wish}_{n}"
        self.taken.add(name)
        return name
