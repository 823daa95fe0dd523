"""Run `hostir lower`: lower a fusion, and print the program as text, in nvFuser's form or as a graph."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from hostir.cli.loading import write
from hostir.cli.lowering import choose_strategy, load_to_lower, lowering_of
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import CurrentStream, For, FreeBuffer, SetStream, Synchronize, Wait
from hostir.ir.message_ops import Message
from hostir.ir.onesided_ops import Barrier, If, PeerCopy, Signal, WaitSignal
from hostir.ir.op import Codec, Expr, Phase, Ref, Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import did_you_mean, error
from hostir.ir.tensor_ops import Contraction, TensorOp
from hostir.ir.text import Printer
from hostir.ir.view_ops import ViewStatement
from hostir.lower import lower, passes_of

CALLER = "the caller's stream"
COLORS = ("#ffffff", "#dbe9f6", "#fde4cf", "#dff0d8", "#efe0f5", "#fff3c4", "#d8f0ee", "#f6d9e0", "#e6e6e6")
DATA, SYNCHRONIZATION, ORDER = "solid", "dashed", "dotted"  # the styles of edges
ONE_SIDED = (PeerCopy, Signal, WaitSignal, Barrier)
# Statements that a stream runs in order.
QUEUED = (TensorOp, Communication, Message, Wait, Synchronize, FreeBuffer, *ONE_SIDED)


def to_dot(program: Program) -> str:
    """Return the graph of a fusion or a host program in Graphviz's language, DOT."""
    return "\n".join(_Drawing(program).lines()) + "\n"


class _Drawing:
    """Draws a program in one walk over its statements.

    The fields hold the latest node for every value and every stream, because later nodes get edges from these nodes.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.host = program.phase is Phase.HOST
        self.nodes: list[str] = []
        self.edges: dict[tuple[str, str], str] = {}
        self.makers: dict[str, str] = {}  # by the name of a value: the node that computes it
        self.roots: dict[str, str] = {}  # by the name of a view: the buffer or input that it views
        self.in_flight: dict[str, Communication | Message] = {}  # by the name of a handle: the communication
        self.signals: dict[str, list[str]] = {}  # by the name of an array of flags: the nodes that signal it
        self.stream = CALLER
        self.streams: dict[str, str] = {}  # by the name of a stream value: the name of the stream
        # By the name of a stream: the latest nodes on it. The caller's stream begins with the nodes of the inputs.
        self.last: dict[str, list[str]] = {}
        self.colors = {CALLER: COLORS[0]}

    def lines(self) -> list[str]:
        """Return the lines of the graph's text in DOT."""
        printer = Printer(self.program.phase, self.program.meshes)
        for value in self.program.inputs:
            self.makers[value.name] = self.node(f"{value}: {printer.type(value.tensor)}", "shape=ellipse")
        self.last[CALLER] = list(self.makers.values())
        self.block(self.program.body)
        for value in self.program.outputs:
            node = self.node(f"output {value}", "shape=ellipse")
            self.edge([self.makers[value.name]], node, DATA)
            if self.host:
                self.edge(self.last[CALLER], node, ORDER)
        defaults = 'node [shape=box, style=filled, fillcolor="#ffffff", fontname="monospace", fontsize=10]'
        edges = (f"{a} -> {b} [style={style}]" for (a, b), style in self.edges.items())
        return [f"digraph {_quoted(self.program.name)} {{", *(f"  {x}" for x in (defaults, *self.nodes, *edges)), "}"]

    def block(self, body: Iterable[Statement]) -> None:
        for s in body:
            if isinstance(s, For):
                self.frame(f"for {s.index} in 0..{s.count}", s.body)
            elif isinstance(s, If):
                self.frame(f"if {s.left} == {s.right}", s.body)
            elif isinstance(s, CurrentStream):
                self.streams[s.out.name] = self.stream
            elif isinstance(s, SetStream):
                self.stream = self.stream_name(s.stream)
            else:
                self.statement(s)

    def frame(self, label: str, body: Iterable[Statement]) -> None:
        """Draw a frame with a label around the statements of a loop or a condition."""
        look = f'label={_quoted(label)} fontname="monospace" fontsize=10'
        self.nodes.append(f"subgraph cluster_{len(self.nodes)} {{ {look}")
        self.block(body)
        self.nodes.append("}")

    def statement(self, s: Statement) -> None:
        """Add a node for a statement, and the edges to this node for synchronisation, data and order."""
        queued = isinstance(s, QUEUED)
        stream_line = f"\n{self.stream}" if queued and self.stream != CALLER else ""
        pool = "computed" if "%" in self.stream else self.stream
        color = self.colors.setdefault(pool, COLORS[len(self.colors) % len(COLORS)])
        style = f'fillcolor="{color}"' if queued else "style=dotted"
        node = self.node(format_statement(s, self.program) + stream_line, style)
        if isinstance(s, Synchronize):
            self.edge(self.latest(self.stream_name(s.stream)), node, SYNCHRONIZATION)
        elif isinstance(s, Wait):
            self.edge([self.makers[s.handle.name]], node, SYNCHRONIZATION)
        elif isinstance(s, WaitSignal):
            self.edge(self.signals.get(s.flags.name, []), node, SYNCHRONIZATION)
        elif isinstance(s, Contraction) and s.ready:
            self.edge(self.signals.get(s.ready.name, []), node, SYNCHRONIZATION)
        elif isinstance(s, Signal):
            self.signals.setdefault(s.flags.name, []).append(node)
        self.edge((self.makers[v.name] for v in s.uses(self.program.phase) if v.name in self.makers), node, DATA)
        if queued and self.host:
            self.edge(self.last.get(self.stream) or self.latest(self.stream), node, ORDER)
            self.last[self.stream] = [node]
        self.record(s, node)

    def record(self, s: Statement, node: str) -> None:
        """Record `node` as the node that computes the results of a statement.

        The result of an asynchronous communication is recorded twice: first with the node that starts the
        communication, then with the node that waits for it.
        """
        if isinstance(s, ViewStatement):
            self.roots[s.out.name] = self.roots.get(s.x.name, s.x.name)
            self.makers[s.out.name] = node
            return
        if isinstance(s, (Communication, Message)) and s.handle:
            self.in_flight[s.handle.name] = s
        source = self.in_flight.get(s.handle.name, s) if isinstance(s, Wait) else s
        for value in source.values(Codec.WRITE, Codec.DEFINE):
            self.makers[value.name] = self.makers[self.roots.get(value.name, value.name)] = node

    def stream_name(self, stream: Expr) -> str:
        """Return the name of a stream.

        If `stream` is the result of a `current_stream` statement, return the name of the stream that was current at
        this statement. Otherwise return the word `stream` and the expression, such as `stream 0`.
        """
        name = self.streams.get(stream.value.name) if isinstance(stream, Ref) else None
        return name or f"stream {stream}"

    def latest(self, stream: str) -> list[str]:
        """Return the latest nodes of a stream.

        A stream with a computed index may be any stream of the pool. For such a stream, the result holds the latest
        nodes of all streams of the pool.
        """
        if stream == CALLER:
            return self.last[CALLER]
        possible = [other for other in self.last if other == stream or (other != CALLER and "%" in other + stream)]
        return [node for other in possible for node in self.last[other]]

    def node(self, label: str, style: str) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(f"{name} [label={_quoted(label)}, {style}]")
        return name

    def edge(self, sources: Iterable[str], target: str, style: str) -> None:
        """Add an edge from each source to `target`, unless the graph already has an edge between these nodes."""
        for source in sources:
            self.edges.setdefault((source, target), style)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def main(options: Namespace) -> int:
    """Run `hostir lower`; return its exit code."""
    program, sizes = load_to_lower(options)
    if program.phase is Phase.HOST:
        if options.after or options.all:
            raise error(
                f"@{program.name} is a host program already", hint="--after and --all show the passes over a fusion"
            )
        write(_formatted(program, options.format), options.out)
        return 0
    if options.all and options.format == "nvfuser":
        raise error(
            "--all begins with the fusion, and nvFuser's form prints host programs", hint="leave one of them out"
        )
    program = choose_strategy(program, sizes, options)
    stages: list[tuple[str, Program]] = [("fusion", program)]
    final = lower(program, **lowering_of(options), watch=lambda name, after: stages.append((name, after)))
    if options.after is not None:
        names = [p.name for p in passes_of(**lowering_of(options))]
        if options.after not in names:
            hint = did_you_mean(options.after, names)
            raise error(f"unknown pass '{options.after}'", expected=f"one of: {', '.join(names)}", hint=hint)
        final = dict(stages)[options.after]
    text = _formatted(final, options.format)
    if options.all:
        text = "\n".join(f"// after {n}\n{_formatted(p, options.format)}" for n, p in stages)
    write(text, options.out)
    return 0


def _formatted(program: Program, form: str) -> str:
    if form == "nvfuser":
        from hostir.nvfuser import print_nvfuser

        return print_nvfuser(program)
    if form == "dot":
        return to_dot(program)
    return str(program)
