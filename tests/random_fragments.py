"""What random programs are made of: a collective and its use, rows that peers put, a pipelined loop, ..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tests.drafts import BUFFERS, LARGE, SYMMETRIC, Block, Draft, Node


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
    """Two rows to a peer, with two epochs of one flag."""
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
    right = "%k"
    if d.chance(0.3):  # what they are multiplied with comes from a peer, too
        right = d.name("k")
        d.heads.append(f"{right}: f32[{d.columns}, {d.columns}] = allocate_symmetric")
        d.add(f"put %k -> {right} at {d.peer()} over didx")
        d.fence()
        d.turn()
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
    d.add(f"matmul {a}, {right} -> {out} ready {g} >= 1 from %r" + (f" own {x}" if own else ""))
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
    d.fence()  # the rounds' streams wait for the caller's
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
    """The same without communication: rows through a few slots, or through a buffer that each round allocates."""
    d.fence()  # the rounds' streams wait for the caller's
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
    """Two collectives of one set of ranks in two orders, written out for every rank, waits and all."""
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
