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
from dataclasses import dataclass, replace
from random import Random

import hostir as hi
from hostir.ir.comm_ops import Communication, Message
from hostir.ir.host_ops import For, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier, If, WaitSignal
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import Contraction
from tests.drafts import BUFFERS
from tests.random_fragments import FRAGMENTS, Fragment, drawn

Accepts = Callable[[Program], bool]
CHECKS = (8, 16, 32)  # statements of a program that are tried one by one while it is loosened, at most


def accepted(program: Program) -> bool:
    """Whether the checker finds nothing wrong; warnings pass."""
    return not any(found.level == "error" for found in hi.check(program))


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
        for block, x in self.random.sample(places, len(places))[: self.random.choice(CHECKS)]:
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
