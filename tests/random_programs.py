"""Random host programs that a checker accepts and that hold together by little: what real ranks are given to run.

A program is drawn in two steps. First fragments (a collective and its use, rows that peers put and a matmul that waits
for them, a pipelined loop, ...) come one after another over a pool of buffers, with all streams joined and a barrier
between any two: that is right by construction. Then it is *loosened*: synchronisation is deleted, statements change
places, loops change their numbers, and each edit stays if the checker still accepts the program. What is left has no
synchronisation to spare, so it goes wrong where the checker believes in an order that no machine keeps.

The same seed gives the same program, as long as the checker gives the same verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import hostir as hi
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import For, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier, If, WaitSignal
from hostir.ir.op import Statement
from hostir.ir.p2p_ops import Message
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import Contraction

Accepts = Callable[[Program], bool]
CHECKS = 30  # statements of one program that are tried one by one, while it is loosened
LARGE = 384  # rows of the square that keeps one rank busy


def accepted(program: Program) -> bool:
    """Whether the checker finds nothing wrong; warnings pass."""
    return not any(found.level == "error" for found in hi.check(program))


# Text -------------------------------------------------------------------------------------------------------------
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
        whole, part: for each mesh the buffers of which every rank holds all rows, or one; those that hold something.
        flags: rows of flags, and how often each was used.
        body: the statements so far.
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

    def readable(self, kind: str) -> list[str]:
        given = [name for name, k in INPUTS.items() if k == kind]
        return given + sorted(self.defined.get(kind, ()))

    def read(self, kind: str) -> str:
        return self.random.choice(self.readable(kind))

    def write(self, kind: str, *but: str, symmetric: bool | None = None) -> str:
        """A buffer to be written as a whole."""
        names = [name for name, k in BUFFERS.items() if k == kind and name not in but]
        if symmetric is not None:
            names = [name for name in names if (name in SYMMETRIC) == symmetric]
        out = self.random.choice(names)
        self.defined.setdefault(kind, set()).add(out)
        return out

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def stream(self) -> str:
        return self.random.choice([*map(str, range(self.streams)), "%user"])

    def peer(self, step: int = 1) -> str:
        return f"(%r + {step}) % {self.ranks}"

    def text(self, name: str) -> str:
        """The whole program; it gives every buffer that holds something."""
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
        """All that came before on any stream of any rank comes before what follows on the caller's stream."""
        self.add("set_stream %user", *(f"synchronize {s}" for s in range(self.streams)), "barrier of %x over didx")

    def turn(self) -> str:
        """Goes on with another stream, which waits for the caller's."""
        stream = self.stream()
        if stream != "%user":
            self.add(f"set_stream {stream}", "synchronize %user")
        return stream

    def elementwise(self, x: str, out: str) -> str:
        return f"{self.random.choice(('gelu', 'silu', 'copy'))} {x} -> {out}"

    def wait(self, handle: str, comes: str) -> None:
        self.add(f"{handle} = {comes}", f"wait {handle}")


# Fragments --------------------------------------------------------------------------------------------------------
def compute(d: Draft) -> None:
    kind = d.random.choice(("part", "part", "whole", "whole", "part of the other"))
    if kind == "part of the other":
        return d.add(d.elementwise("%v", d.write(kind)))
    x, other = d.read(kind), d.read(kind)
    if d.chance(0.4):
        out = d.write(kind, x, other)
        d.add(f"{d.random.choice(('add', 'mul'))} {x}, {other} -> {out}")
    else:
        out = d.write(kind, x)
        d.add(d.elementwise(x, out))


def compute_on_one_rank(d: Draft) -> None:
    """Into a buffer that holds something already, as the other ranks leave it."""
    kind = d.random.choice(("part", "whole"))
    held = sorted(d.defined.get(kind, ()))
    x = d.read(kind)
    if not [out for out in held if out != x]:
        return compute(d)
    out = d.random.choice([out for out in held if out != x])
    d.add(Block(f"if %r == {d.random.randrange(d.ranks)}", [d.elementwise(x, out)]))


def compute_rows(d: Draft) -> None:
    """From a row to another, of one buffer perhaps: which ones, the rank says."""
    held = sorted(d.defined.get("whole", ()))
    if not held:
        return compute(d)
    x, out = d.read("whole"), d.random.choice(held)
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
    what = {
        ("whole at the root", "whole"): "broadcast",
        ("part", "whole at the root"): "gather",
        ("whole at the root", "part"): "scatter",
    }.get((x, out), "sendrecv")
    d.wait(d.name("h"), f"{what} {d.read(x)} -> {d.write(out)}")


def exchange(d: Draft) -> None:
    step, x = d.random.randrange(1, d.ranks), d.read("part")
    d.wait(
        d.name("h"),
        f"exchange {x} to {d.peer(step)}, {d.write('part', x)} from {d.peer(d.ranks - step)} over didx",
    )


def send(d: Draft) -> None:
    held = sorted(d.defined.get("part", ()))
    x = d.read("part")
    if not [out for out in held if out != x]:
        return exchange(d)
    out = d.random.choice([out for out in held if out != x])
    source, target = d.random.sample(range(d.ranks), 2)
    h, g = d.name("h"), d.name("h")
    d.add(
        Block(f"if %r == {source}", [f"{h} = send {x} to {target} over didx", f"wait {h}"]),
        Block(f"if %r == {target}", [f"{g} = recv {out} from {source} over didx", f"wait {g}"]),
    )


def put(d: Draft) -> None:
    """Rows to a peer, a flag behind them, and what reads them."""
    step, d.epochs = d.random.randrange(1, d.ranks), d.epochs + 1
    x = d.read("part")
    out = d.write("part", x, symmetric=True) if x != "%sp" else None
    if out is None:
        return get(d)
    sms = d.random.choice(("", "", " by 1 sms"))
    by = d.random.choice(("", "", " by 1 sms"))
    d.add(
        f"put {x} -> {out} at {d.peer(step)} over didx{sms}",
        f"signal %f[0] = {d.epochs} at {d.peer(step)} over didx{by}",
    )
    if d.chance(0.3):
        d.turn()
    d.add(f"wait_signal %f[0] >= {d.epochs}", d.elementwise(out, d.write("part", out)))


def put_rows(d: Draft) -> None:
    """Each rank's row to all; a barrier says that they are there."""
    x, out, row = d.read("part"), d.write("whole", symmetric=True), d.name("row")
    d.add(f"{row} = chunk {out}[%r of {d.ranks}]")
    d.add(Block(f"for %p in 0..{d.ranks}", [f"put {x} -> {row} at {d.peer(0).replace('0', '%p')} over didx"]))


def get(d: Draft) -> None:
    held = [name for name in SYMMETRIC if name in d.defined.get(BUFFERS[name], ())]
    if not held:
        return put_rows(d)
    x = d.random.choice(held)
    d.add(f"get {x} from {d.peer(d.random.randrange(d.ranks))} over didx -> {d.write(BUFFERS[x], symmetric=False)}")


def push_matmul(d: Draft) -> None:
    """Rows that peers put, each with its flag, and a matmul that waits for them."""
    x, a, row, g, own = d.read("part"), d.write("whole", symmetric=True), d.name("row"), d.name("g"), d.chance(0.4)
    d.heads.append(f"{g}: flag[{d.ranks}] = allocate_symmetric")
    sms = d.random.choice(("", "", " by 1 sms"))
    d.add(f"{row} = chunk {a}[%r of {d.ranks}]")
    peer = f"(%r + %p + 1) % {d.ranks}"
    copies: list[Node] = [f"put {x} -> {row} at {peer} over didx{sms}", f"signal {g}[%r] = 1 at {peer} over didx"]
    d.add(Block(f"for %p in 0..{d.ranks - own}", copies))
    if not own:  # what it puts to itself needs SMs, which the matmul takes
        d.add("set_stream %user", *(f"synchronize {s}" for s in range(d.streams)))
    elif d.chance(0.7):
        d.add("set_stream %user")
    out = d.write("whole", a)
    d.add(f"matmul {a}, %k -> {out} ready {g} >= 1 from %r" + (f" own {x}" if own else ""))
    if own:
        d.defined["whole"].discard(a)  # its own rows hold nothing


def temporary(d: Draft) -> None:
    """A buffer that is freed on the way, in a branch perhaps."""
    kind = d.random.choice(("part", "whole"))
    t, x = d.name("tmp"), d.read(kind)
    out = d.write(kind, x)
    d.add(f"{t}: {d.types[kind]} = allocate", d.elementwise(x, t))
    if d.chance(0.5):
        d.fence()
        d.turn()
    d.add(d.elementwise(t, out))
    if d.chance(0.3):
        d.add(*(Block(f"if %r == {rank}", [f"free {t}"]) for rank in range(d.ranks)))
    else:
        d.add(f"free {t}")


def pipeline(d: Draft) -> None:
    """A loop over streams, through a buffer of a few slots."""
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
    """The same without communication: rows of a buffer through a few slots."""
    t, a, b, c = d.name("slots"), d.name("x"), d.name("t"), d.name("y")
    slots, x = d.random.randrange(1, 4), d.read("whole")
    out = d.write("whole", x)
    body: list[Node] = [f"set_stream %i % {d.streams}", "synchronize %user", f"{a} = select {x}[%i]"]
    body += [f"{b} = select {t}[%i % {slots}]", f"{c} = select {out}[%i]", f"silu {a} -> {b}", f"gelu {b} -> {c}"]
    body += ["set_stream %user", *(f"synchronize {s}" for s in range(d.streams))]
    d.add(f"{t}: f32[{slots}, {d.columns}] = allocate", Block(f"for %i in 0..{d.ranks}", body), f"free {t}")


def collectives_by_rank(d: Draft) -> None:
    """Two collectives of one set of ranks in two orders, written out for every rank, waits and all."""
    x, y, v, u = d.read("part"), d.write("whole"), d.read("part of the other"), d.write("whole of the other")
    for rank in range(d.ranks):
        g, h = d.name("h"), d.name("h")
        body: list[Node] = [f"{g} = allgather {x} -> {y} over didx", f"{h} = allgather {v} -> {u} over didx"]
        d.add(Block(f"if %r == {rank}", [*body, f"wait {g}", f"wait {h}"]))


Fragment = Callable[[Draft], None]
PLAIN = (compute, compute_on_one_rank, compute_rows, keep_one_rank_busy, temporary, pipeline_on_one_rank)
COMMUNICATE = (allgather, allreduce, reduce_scatter, alltoall, transfer, exchange, send, pipeline, collectives_by_rank)
FLAGGED = (put, put, push_matmul)
COPIES = (put_rows, get)
FRAGMENTS = (*PLAIN, *COMMUNICATE, *COMMUNICATE, *FLAGGED, *COPIES)  # as often as they are to be drawn


def drawn(random: Random, ranks: int, fragments: Sequence[Fragment]) -> Draft:
    """A program that is right by construction, of some fragments and at least one with a flag."""
    d = Draft(
        random,
        ranks,
        streams=random.choice((2, 2, 3)),
        columns=random.choice((8, 8, 8, 64, 64, 512)),
        root=random.randrange(ranks),
        rounds=random.randrange(2, 6),
        flipped=random.random() < 0.3,
    )
    talks = [f for f in fragments if f in COMMUNICATE]
    chosen = [random.choice(talks), random.choice(FLAGGED)]
    chosen += [random.choice(fragments) for _ in range(random.randrange(1, 5))]
    random.shuffle(chosen)
    d.fence()
    for fragment in chosen:
        d.turn()
        fragment(d)
        d.fence()
    return d


# Loosening --------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Nest:
    """A loop or a condition of a program that is being edited."""

    head: For | If
    body: list[Item]


Item = Statement | Nest


def opened(body: Sequence[Statement]) -> list[Item]:
    """Statements as lists that can be edited."""
    return [Nest(s, opened(s.body)) if isinstance(s, (For, If)) else s for s in body]


def closed(items: Sequence[Item]) -> tuple[Statement, ...]:
    return tuple(replace(item.head, body=closed(item.body)) if isinstance(item, Nest) else item for item in items)


def every_block(items: list[Item]) -> Iterator[list[Item]]:
    """Every list of statements, outer before inner."""
    yield items
    for item in items:
        if isinstance(item, Nest):
            yield from every_block(item.body)


class Loosening:
    """A program, edited as long as the checker accepts it."""

    def __init__(self, random: Random, program: Program, accepts: Accepts) -> None:
        self.random, self.program, self.accepts = random, program, accepts
        self.checks = 0
        self.items = opened(program.body)

    def holds(self) -> bool:
        """Whether the items as they stand are accepted; then they are the program."""
        self.checks += 1
        program = self.program.with_body(closed(self.items))
        try:
            if not self.accepts(program):
                return False
        except HostIRError:
            return False
        self.program = program
        return True

    def tries(self, block: list[Item], becomes: list[Item]) -> None:
        """Puts other statements into a block; back again if the checker minds."""
        before = list(block)
        if len(before) == len(becomes) and all(a is b for a, b in zip(before, becomes, strict=True)):
            return
        block[:] = becomes
        if not self.holds():
            block[:] = before

    def delete(self, kinds: tuple[type[Statement], ...]) -> None:
        """Whatever is not needed of these statements: first many at once, then one after another."""
        for share in (0.6, 0.4, 0.3, 0.3):
            before = [(block, list(block)) for block in every_block(self.items)]
            for block, items in before:
                block[:] = [x for x in items if not (isinstance(x, kinds) and self.random.random() < share)]
            if not self.holds():
                for block, items in before:
                    block[:] = items
        places = [(block, x) for block in every_block(self.items) for x in block if isinstance(x, kinds)]
        for block, x in self.random.sample(places, len(places))[:CHECKS]:
            at = next(i for i, y in enumerate(block) if x is y)
            self.tries(block, [*block[:at], *block[at + 1 :]])

    def move(self, block: list[Item], at: int, to: int) -> None:
        rest = [*block[:at], *block[at + 1 :]]
        self.tries(block, [*rest[:to], block[at], *rest[to:]])

    def swap(self) -> None:
        """Two statements that follow each other."""
        block, at = self.random.choice([(b, i) for b in every_block(self.items) for i in range(len(b) - 1)])
        self.move(block, at, at + 1)

    def swap_in_a_branch(self) -> None:
        """The first two statements of a branch of several."""
        if branches := [x.body for x in self.items if isinstance(x, Nest) and isinstance(x.body[0], Communication)]:
            self.move(self.random.choice(branches), 0, 1)

    def wait_later(self) -> None:
        """A wait moves behind what follows, with a handful of other statements in between."""
        places = [(b, i) for b in every_block(self.items) for i, x in enumerate(b) if isinstance(x, Wait)]
        if places:
            block, at = self.random.choice(places)
            self.move(block, at, at + self.random.randrange(1, 9))

    def move_up(self) -> None:
        """Something moves in front of a fence, which no longer stands between it and what it followed."""
        block, at = self.random.choice([(b, i) for b in every_block(self.items) for i in range(1, len(b))])
        self.move(block, at, max(0, at - self.random.randrange(2, 9)))

    def stir(self, times: int) -> None:
        for _ in range(times):
            self.random.choice((self.wait_later, self.move_up, self.swap))()


def loosened(
    seed: int, ranks: int, accepts: Accepts = accepted, fragments: Sequence[Fragment] = FRAGMENTS
) -> Program | None:
    """The program of a seed; None where what was drawn is refused, or has too little left of what makes it count."""
    random = Random(seed)
    name = f"seed_{seed}"
    try:
        program = hi.parse(drawn(random, ranks, fragments).text(name), f"{name}.hir")
        if not accepts(program):
            return None
    except HostIRError:
        return None
    it = Loosening(random, program, accepts)
    it.swap_in_a_branch()
    it.stir(3)
    kinds = (Synchronize, Barrier, WaitSignal)
    it.delete((*kinds, SetStream) if random.random() < 0.2 else kinds)
    it.stir(4)
    try:
        found = hi.parse(str(it.program), f"{name}.hir")
    except HostIRError:  # an edit has taken a name from where it is used
        return None
    return found if counts(found) else None


def counts(program: Program) -> bool:
    """Whether it has two streams or more, a collective or message, a flag, and a buffer used twice."""
    every = list(program.walk())
    streams = {str(s.stream) for s in every if isinstance(s, SetStream)}
    talks = any(isinstance(s, (Communication, Message)) for s in every)
    flags = any(isinstance(s, WaitSignal) or (isinstance(s, Contraction) and s.ready is not None) for s in every)
    text = str(program)
    twice = any(len(re.findall(rf"{name}\b", text)) > 3 for name in BUFFERS)  # allocated, and used twice
    return len(streams) > 1 and talks and flags and twice
