"""Drafts of random programs, and their fragments: a collective and its use, a pipelined loop, and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

LARGE = 384  # rows of the square matrix that keeps one rank busy


@dataclass
class Block:
    """A loop or a condition: `head { body }`."""

    head: str
    body: list[Node]


Node = str | Block


def lines(nodes: list[Node], depth: int = 1) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield "  " * depth + node
        else:
            yield "  " * depth + node.head + " {"
            yield from lines(node.body, depth + 1)
            yield "  " * depth + "}"


INPUTS = {
    "%x": "part",
    "%w": "whole",
    "%v": "part of the other",
    "%z": "whole at the root",
    "%xs": "parts",
}
BUFFERS = {
    "%p0": "part",
    "%p1": "part",
    "%sp": "part",
    "%t0": "whole",
    "%t1": "whole",
    "%s0": "whole",
    "%s1": "whole",
    "%q0": "part of the other",
    "%u0": "whole of the other",
    "%z0": "whole at the root",
    "%a0": "sent",
    "%b0": "received",
    "%ys": "wholes",
}
SYMMETRIC = ("%sp", "%s0", "%s1")


@dataclass
class Draft:
    """A program under construction.

    Fields:
        body: the statements so far.
        heads: statements at the beginning, which allocate.
        defined: for each layout the names of buffers that have been written.
        count, epochs: numbers of names and of epochs used so far.
    """

    random: Random
    ranks: int
    streams: int
    columns: int
    root: int
    rounds: int
    flipped: bool
    body: list[Node] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    defined: dict[str, set[str]] = field(default_factory=dict)
    count: int = 0
    epochs: int = 0

    # Names and types ----------------------------------------------------------------------------------------------
    @property
    def types(self) -> dict[str, str]:
        R, D, N = self.ranks, self.columns, self.rounds
        return {
            "part": f"f32[{R}@didx, {D}]",
            "whole": f"f32[{R}, {D}]",
            "part of the other": f"f32[{R}@didx, {D}] on @other",
            "whole of the other": f"f32[{R}, {D}] on @other",
            "whole at the root": f"f32[{R}, {D}] on @root",
            "sent": f"f32[{R}, {R}@didx, {D}]",
            "received": f"f32[{R}@didx, {R}, {D}]",
            "parts": f"f32[{N}, {R}@didx, {D}]",
            "wholes": f"f32[{N}, {R}, {D}]",
        }

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"%{stem}{self.count}"

    def readable(self, layout: str) -> list[str]:
        return [name for name, k in INPUTS.items() if k == layout] + sorted(self.defined.get(layout, ()))

    def read(self, layout: str) -> str:
        return self.random.choice(self.readable(layout))

    def write(self, layout: str, *excluded: str, symmetric: bool | None = None) -> str:
        """Draw a buffer with a layout, except those in `excluded`. The next statement must overwrite it completely."""
        names = [name for name, k in BUFFERS.items() if k == layout and name not in excluded]
        if symmetric is not None:
            names = [name for name in names if (name in SYMMETRIC) == symmetric]
        out = self.random.choice(names)
        self.defined.setdefault(layout, set()).add(out)
        return out

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def stream(self) -> str:
        return self.random.choice([*map(str, range(self.streams)), "%user"])

    def peer(self, step: int = 1) -> str:
        return f"(%r + {step}) % {self.ranks}"

    def text(self, name: str) -> str:
        """Return the text of the program; its outputs are all buffers that have been written."""
        inside = "\n".join(lines(self.body))
        order = list(range(self.ranks))[:: -1 if self.flipped else 1]

        def used(name: str) -> bool:
            return re.search(rf"{name}\b", inside) is not None

        inputs = [f"{n}: {self.types[k]}" for n, k in INPUTS.items() if n == "%x" or used(n)]
        if used("%k"):
            inputs.append(f"%k: f32[{self.columns}, {self.columns}]")
        if used("%large"):
            inputs.append(f"%large: f32[{LARGE}, {LARGE}]")
        buffers = {n: k for n, k in BUFFERS.items() if used(n)}
        outputs = [n for n, k in buffers.items() if n in self.defined.get(k, ())]
        heads = ["%user = current_stream", "%r = rank of %x over didx"]
        for n, k in buffers.items():
            heads.append(f"{n}: {self.types[k]} = allocate{'_symmetric' if n in SYMMETRIC else ''}")
        heads += self.heads
        if used("%f"):
            heads.append("%f: flag[1] = allocate_symmetric")
        frees = [f"free {n}" for n in buffers if n not in outputs and n not in SYMMETRIC]
        return f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, order))}
mesh @other [didx] = {" ".join(map(str, reversed(order)))}
mesh @root [didx] = {self.root}
program @{name}({", ".join(inputs)}) -> ({", ".join(outputs)}) streams {self.streams} {{
{chr(10).join(heads)}
{inside}
{chr(10).join(frees)}
}}
"""

    # Statements ---------------------------------------------------------------------------------------------------
    def add(self, *nodes: Node) -> None:
        self.body += nodes

    def fence(self) -> None:
        """Join all streams of all ranks to the caller's stream."""
        self.add("set_stream %user", *(f"synchronize {s}" for s in range(self.streams)), "barrier of %x over didx")

    def turn(self) -> str:
        """Continue on another stream, which waits for the caller's stream."""
        stream = self.stream()
        if stream != "%user":
            self.add(f"set_stream {stream}", "synchronize %user")
        return stream

    def elementwise(self, x: str, out: str) -> str:
        return f"{self.random.choice(('gelu', 'silu', 'copy'))} {x} -> {out}"

    def wait(self, handle: str, communication: str) -> None:
        """Add a communication and wait for it at once; sometimes each rank waits in a separate branch."""
        branches = self.chance(0.1)
        waits = [Block(f"if %r == {r}", [f"wait {handle}"]) for r in range(self.ranks)] if branches else []
        self.add(f"{handle} = {communication}", *(waits or [f"wait {handle}"]))


# Fragments --------------------------------------------------------------------------------------------------------
def compute(d: Draft) -> None:
    layout = d.random.choice(("part", "part", "whole", "whole", "part of the other"))
    if layout == "part of the other":
        return d.add(d.elementwise("%v", d.write(layout)))
    x, other = d.read(layout), d.read(layout)
    if d.chance(0.4):
        out = d.write(layout, x, other)
        d.add(f"{d.random.choice(('add', 'mul'))} {x}, {other} -> {out}")
    else:
        out = d.write(layout, x)
        d.add(d.elementwise(x, out))


def compute_on_one_rank(d: Draft) -> None:
    """Overwrite a buffer on one rank; the other ranks keep its contents."""
    layout = d.random.choice(("part", "whole"))
    x = d.read(layout)
    if not (written := sorted(d.defined.get(layout, set()) - {x})):
        return compute(d)
    out = d.random.choice(written)
    d.add(Block(f"if %r == {d.random.randrange(d.ranks)}", [d.elementwise(x, out)]))


def compute_rows(d: Draft) -> None:
    """Compute one row from another, maybe of the same buffer; the rows depend on the rank."""
    if not (written := sorted(d.defined.get("whole", ()))):
        return compute(d)
    x, out = d.read("whole"), d.random.choice(written)
    a, b, step = d.name("row"), d.name("row"), d.random.randrange(1, d.ranks)
    d.add(f"{a} = chunk {x}[%r of {d.ranks}]", f"{b} = chunk {out}[{d.peer(step)} of {d.ranks}]", f"gelu {a} -> {b}")


def keep_one_rank_busy(d: Draft) -> None:
    z = d.name("busy")
    body: list[Node] = [f"{z}: f32[{LARGE}, {LARGE}] = allocate", f"matmul %large, %large -> {z}", f"free {z}"]
    d.add(Block(f"if %r == {d.random.randrange(d.ranks)}", body))


def allgather(d: Draft) -> None:
    other = " of the other" if d.chance(0.3) else ""
    x = d.read(f"part{other}")
    d.wait(d.name("h"), f"allgather {x} -> {d.write(f'whole{other}')} over didx")


def allreduce(d: Draft) -> None:
    x, p = d.read("whole"), d.name("partial")
    out = x if d.chance(0.4) and x != "%w" else d.write("whole", x)
    d.add(f"{p} = as_partial {x} over didx")
    d.wait(d.name("h"), f"allreduce {p} -> {out} over didx")


def reduce_scatter(d: Draft) -> None:
    p = d.name("partial")
    d.add(f"{p} = as_partial {d.read('whole')} over didx")
    d.wait(d.name("h"), f"reduce_scatter {p} -> {d.write('part')} over didx")


def alltoall(d: Draft) -> None:
    sent, received, x, a = d.write("sent"), d.write("received"), d.read("part"), d.name("row")
    d.add(Block(f"for %i in 0..{d.ranks}", [f"{a} = select {sent}[%i]", d.elementwise(x, a)]))
    d.wait(d.name("h"), f"alltoall {sent} -> {received} over didx")
    b, out = d.name("row"), d.write("part")
    d.add(f"{b} = select {received}[{d.random.randrange(d.ranks)}] axis 1", d.elementwise(b, out))


def transfer(d: Draft) -> None:
    x, out = d.random.choice(
        [
            ("whole at the root", "whole"),
            ("part", "whole at the root"),
            ("whole at the root", "part"),
            ("part", "part of the other"),
            ("part of the other", "part"),
        ]
    )
    collective = {
        ("whole at the root", "whole"): "broadcast",
        ("part", "whole at the root"): "gather",
        ("whole at the root", "part"): "scatter",
    }.get((x, out), "sendrecv")
    d.wait(d.name("h"), f"{collective} {d.read(x)} -> {d.write(out)}")


def exchange(d: Draft) -> None:
    step, x = d.random.randrange(1, d.ranks), d.read("part")
    d.wait(
        d.name("h"),
        f"exchange {x} to {d.peer(step)}, {d.write('part', x)} from {d.peer(d.ranks - step)} over didx",
    )


def send(d: Draft) -> None:
    x = d.read("part")
    if not (written := sorted(d.defined.get("part", set()) - {x})):
        return exchange(d)
    out = d.random.choice(written)
    source, target = d.random.sample(range(d.ranks), 2)
    h, g = d.name("h"), d.name("h")
    d.add(
        Block(f"if %r == {source}", [f"{h} = send {x} to {target} over didx", f"wait {h}"]),
        Block(f"if %r == {target}", [f"{g} = recv {out} from {source} over didx", f"wait {g}"]),
    )


def put(d: Draft) -> None:
    """Put rows to a peer, signal a flag, and read the rows after a wait."""
    step, d.epochs = d.random.randrange(1, d.ranks), d.epochs + 1
    x = d.random.choice([name for name in d.readable("part") if name not in SYMMETRIC])
    out = d.write("part", symmetric=True)
    sms = d.random.choice(("", "", " by 1 sms"))
    by = d.random.choice(("", "", " by 1 sms"))
    d.add(
        f"put {x} -> {out} at {d.peer(step)} over didx{sms}",
        f"signal %f[0] = {d.epochs} at {d.peer(step)} over didx{by}",
    )
    if d.chance(0.3):
        d.turn()
    d.add(f"wait_signal %f[0] >= {d.epochs}", d.elementwise(out, d.write("part", out, x)))


def put_twice(d: Draft) -> None:
    """Put two rows to a peer, with two epochs of one flag."""
    step, d.epochs = d.random.randrange(1, d.ranks), d.epochs + 2
    pair, rows = d.name("pair"), [d.name("row"), d.name("row")]
    d.heads.append(f"{pair}: f32[2, {d.ranks}@didx, {d.columns}] = allocate_symmetric")
    x = d.read("part")
    for i, row in enumerate(rows):
        d.add(f"{row} = select {pair}[{i}]", f"put {x} -> {row} at {d.peer(step)} over didx")
        d.add(f"signal %f[0] = {d.epochs - 1 + i} at {d.peer(step)} over didx")
    for i, row in enumerate(rows):
        d.add(f"wait_signal %f[0] >= {d.epochs - 1 + i}", d.elementwise(row, d.write("part", x)))


def put_rows(d: Draft) -> None:
    """Put each rank's row to all ranks; the next barrier orders them."""
    x, out, row = d.read("part"), d.write("whole", symmetric=True), d.name("row")
    d.add(f"{row} = chunk {out}[%r of {d.ranks}]")
    d.add(Block(f"for %p in 0..{d.ranks}", [f"put {x} -> {row} at {d.peer(0).replace('0', '%p')} over didx"]))


def get(d: Draft) -> None:
    if not (written := [name for name in SYMMETRIC if name in d.defined.get(BUFFERS[name], ())]):
        return put_rows(d)
    x = d.random.choice(written)
    d.add(f"get {x} from {d.peer(d.random.randrange(d.ranks))} over didx -> {d.write(BUFFERS[x], symmetric=False)}")


def push_matmul(d: Draft) -> None:
    """Put rows to peers, each with its flag, and multiply them by a matmul that waits for the flags."""
    x, a, row, g = d.read("part"), d.write("whole", symmetric=True), d.name("row"), d.name("g")
    local = d.chance(0.4)
    d.heads.append(f"{g}: flag[{d.ranks}] = allocate_symmetric")
    right = "%k"
    if d.chance(0.3):  # the right side comes from a peer
        right = d.name("k")
        d.heads.append(f"{right}: f32[{d.columns}, {d.columns}] = allocate_symmetric")
        d.add(f"put %k -> {right} at {d.peer()} over didx")
        d.fence()
        d.turn()
    sms = d.random.choice(("", "", " by 1 sms"))
    d.add(f"{row} = chunk {a}[%r of {d.ranks}]")
    peer = f"(%r + %p + 1) % {d.ranks}"
    copies: list[Node] = [f"put {x} -> {row} at {peer} over didx{sms}", f"signal {g}[%r] = 1 at {peer} over didx"]
    d.add(Block(f"for %p in 0..{d.ranks - local}", copies))
    if not local:  # a put to itself needs SMs, which the matmul takes
        d.add("set_stream %user", *(f"synchronize {s}" for s in range(d.streams)))
    elif d.chance(0.7):
        d.add("set_stream %user")
    out = d.write("whole", a)
    d.add(f"matmul {a}, {right} -> {out} ready {g} >= 1 from %r" + (f" own {x}" if local else ""))
    if local:
        d.defined["whole"].discard(a)  # the local rows are undefined


def temporary(d: Draft) -> None:
    """Use a temporary buffer and free it, sometimes in branches."""
    layout = d.random.choice(("part", "whole"))
    t, x = d.name("tmp"), d.read(layout)
    out = d.write(layout, x)
    d.add(f"{t}: {d.types[layout]} = allocate", d.elementwise(x, t))
    if d.chance(0.5):
        d.fence()
        d.turn()
    d.add(d.elementwise(t, out))
    if d.chance(0.3):
        d.add(*(Block(f"if %r == {rank}", [f"free {t}"]) for rank in range(d.ranks)))
    else:
        d.add(f"free {t}")


def pipeline(d: Draft) -> None:
    """Add a loop over streams that gathers into a buffer of a few slots."""
    d.fence()  # the streams of the rounds wait for the caller's stream
    t, a, b, c = d.name("slots"), d.name("x"), d.name("t"), d.name("y")
    slots = d.random.randrange(1, 4)
    out = d.write("wholes")
    body: list[Node] = [
        f"set_stream %i % {d.streams}",
        "synchronize %user",
        f"{a} = select %xs[%i]",
        f"{b} = select {t}[%i % {slots}]",
        f"{c} = select {out}[%i]",
    ]
    h = d.name("h")
    body += [f"{h} = allgather {a} -> {b} over didx", f"wait {h}", f"gelu {b} -> {c}"]
    body += ["set_stream %user", *(f"synchronize {s}" for s in range(d.streams))]
    d.add(f"{t}: f32[{slots}, {d.ranks}, {d.columns}] = allocate", Block(f"for %i in 0..{d.rounds}", body))
    d.add(f"free {t}")


def pipeline_on_one_rank(d: Draft) -> None:
    """Add a loop over streams without communication. It uses a few slots, or allocates a buffer in each round."""
    d.fence()  # the streams of the rounds wait for the caller's stream
    t, a, b, c = d.name("slots"), d.name("x"), d.name("t"), d.name("y")
    slots, x, anew = d.random.randrange(1, 4), d.read("whole"), d.chance(0.3)
    out = d.write("whole", x)
    slot = f"{b}: f32[{d.columns}] = allocate" if anew else f"{b} = select {t}[%i % {slots}]"
    body: list[Node] = [f"set_stream %i % {d.streams}", "synchronize %user", f"{a} = select {x}[%i]", slot]
    body += [f"{c} = select {out}[%i]", f"silu {a} -> {b}", f"gelu {b} -> {c}"]
    body += ["set_stream %user", *(f"synchronize {s}" for s in range(d.streams))]
    loop = Block(f"for %i in 0..{d.ranks}", [*body, f"free {b}"] if anew else body)
    d.add(*([loop] if anew else [f"{t}: f32[{slots}, {d.columns}] = allocate", loop, f"free {t}"]))


def collectives_by_rank(d: Draft) -> None:
    """Add two collectives of one team in a branch for every rank, with waits; an edit may swap their order."""
    x, y, v, u = d.read("part"), d.write("whole"), d.read("part of the other"), d.write("whole of the other")
    for rank in range(d.ranks):
        g, h = d.name("h"), d.name("h")
        body: list[Node] = [f"{g} = allgather {x} -> {y} over didx", f"{h} = allgather {v} -> {u} over didx"]
        d.add(Block(f"if %r == {rank}", [*body, f"wait {g}", f"wait {h}"]))


Fragment = Callable[[Draft], None]
PLAIN = (compute, compute_on_one_rank, compute_rows, keep_one_rank_busy, temporary, pipeline_on_one_rank)
COMMUNICATE = (allgather, allreduce, reduce_scatter, alltoall, transfer, exchange, send, pipeline, collectives_by_rank)
FLAGGED = (put, put_twice, push_matmul)
COPIES = (put_rows, get)
FRAGMENTS = (*PLAIN, *COMMUNICATE, *COMMUNICATE, *FLAGGED, *COPIES)  # repeated fragments are drawn more often


def drawn(random: Random, ranks: int, fragments: Sequence[Fragment]) -> Draft:
    """Return a program that is correct by construction, with several fragments and at least one flag."""
    d = Draft(
        random,
        ranks,
        streams=random.choice((2, 2, 3)),
        columns=random.choice((8, 8, 8, 64, 64, 512)),
        root=random.randrange(ranks),
        rounds=random.randrange(2, 6),
        flipped=random.random() < 0.3,
    )
    chosen = [random.choice([f for f in fragments if f in COMMUNICATE]), random.choice(FLAGGED)]
    chosen += [random.choice(fragments) for _ in range(random.randrange(1, 5))]
    random.shuffle(chosen)
    d.fence()
    for fragment in chosen:
        d.turn()
        fragment(d)
        d.fence()
    return d
