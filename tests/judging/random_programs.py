"""Random host programs that the checker accepts with little synchronisation, for tests on real ranks.

A program is drawn in two steps. First it is a sequence of fragments (a collective and its use, a waiting matmul, a
pipelined loop, ...) over a pool of buffers, with a join of all streams and a barrier between fragments. It is correct
by construction. Then it is *loosened*: synchronisation is deleted and statements are moved, and each edit stays if the
checker still accepts the program. The result has no redundant synchronisation, so it goes wrong if the checker assumes
an order that machines do not guarantee.

The same seed gives the same program as long as the checker gives the same verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import hostir as hi
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import For, SetStream, Synchronize, Wait
from hostir.ir.message_ops import Message
from hostir.ir.onesided_ops import Barrier, If, WaitSignal
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import Contraction
from tests.judging.fragments import BUFFERS, FRAGMENTS, Fragment, drawn
from tests.judging.simulated import errors

Accepts = Callable[[Program], bool]
CHECKS = (8, 16, 32)  # how many single deletions are tried at most


def accepted(program: Program) -> bool:
    """Return True if the checker has no errors; warnings are allowed."""
    return not errors(hi.check(program))


@dataclass(eq=False)
class Nest:
    """A loop or a condition of a program that is being edited."""

    head: For | If
    body: list[Item]


Item = Statement | Nest


def opened(body: Sequence[Statement]) -> list[Item]:
    """Return statements as nested lists that can be edited."""
    return [Nest(s, opened(s.body)) if isinstance(s, (For, If)) else s for s in body]


def closed(items: Sequence[Item]) -> tuple[Statement, ...]:
    return tuple(replace(item.head, body=closed(item.body)) if isinstance(item, Nest) else item for item in items)


def every_block(items: list[Item]) -> Iterator[list[Item]]:
    """Yield every list of statements, outer before inner."""
    yield items
    for item in items:
        if isinstance(item, Nest):
            yield from every_block(item.body)


class Loosening:
    """Edits a program at random, and keeps an edit only if the checker accepts the edited program."""

    def __init__(self, random: Random, program: Program, accepts: Accepts) -> None:
        self.random, self.program, self.accepts = random, program, accepts
        self.items = opened(program.body)

    def keeps(self) -> bool:
        """Return True and update the program if the edited items are accepted."""
        program = self.program.with_body(closed(self.items))
        try:
            if not self.accepts(program):
                return False
        except HostIRError:
            return False
        self.program = program
        return True

    def try_block(self, block: list[Item], edited: list[Item]) -> None:
        """Replace the statements of a block if the checker accepts the result."""
        before = list(block)
        if len(before) == len(edited) and all(a is b for a, b in zip(before, edited, strict=True)):
            return
        block[:] = edited
        if not self.keeps():
            block[:] = before

    def delete(self, types: tuple[type[Statement], ...]) -> None:
        """Delete statements of these types that are not needed: first many at once, then single ones."""
        for share in (0.6, 0.4, 0.3, 0.3):
            before = [(block, list(block)) for block in every_block(self.items)]
            for block, items in before:
                block[:] = [x for x in items if not (isinstance(x, types) and self.random.random() < share)]
            if not self.keeps():
                for block, items in before:
                    block[:] = items
        places = [(block, x) for block in every_block(self.items) for x in block if isinstance(x, types)]
        for block, x in self.random.sample(places, len(places))[: self.random.choice(CHECKS)]:
            at = next(i for i, y in enumerate(block) if x is y)
            self.try_block(block, [*block[:at], *block[at + 1 :]])

    def move(self, block: list[Item], at: int, to: int) -> None:
        rest = [*block[:at], *block[at + 1 :]]
        self.try_block(block, [*rest[:to], block[at], *rest[to:]])

    def swap(self) -> None:
        """Swap two neighbouring statements."""
        block, at = self.random.choice([(b, i) for b in every_block(self.items) for i in range(len(b) - 1)])
        self.move(block, at, at + 1)

    def swap_in_a_branch(self) -> None:
        """Swap the first two statements of a loop or condition whose body begins with a communication."""
        if branches := [x.body for x in self.items if isinstance(x, Nest) and isinstance(x.body[0], Communication)]:
            self.move(self.random.choice(branches), 0, 1)

    def wait_later(self) -> None:
        """Move a wait behind a few of the statements after it."""
        places = [(b, i) for b in every_block(self.items) for i, x in enumerate(b) if isinstance(x, Wait)]
        if places:
            block, at = self.random.choice(places)
            self.move(block, at, at + self.random.randrange(1, 9))

    def move_up(self) -> None:
        """Move a statement before a few of the statements before it, maybe across a fence."""
        block, at = self.random.choice([(b, i) for b in every_block(self.items) for i in range(1, len(b))])
        self.move(block, at, max(0, at - self.random.randrange(2, 9)))

    def stir(self, times: int) -> None:
        for _ in range(times):
            self.random.choice((self.wait_later, self.move_up, self.swap))()


def loosened(
    seed: int, ranks: int, accepts: Accepts = accepted, fragments: Sequence[Fragment] = FRAGMENTS
) -> Program | None:
    """Return the program of a seed; None if the checker refuses the draft, or if too little is left of it."""
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
    types = (Synchronize, Barrier, WaitSignal)
    it.delete((*types, SetStream) if random.random() < 0.2 else types)
    it.stir(4)
    try:
        parsed = hi.parse(str(it.program), f"{name}.hir")
    except HostIRError:  # an edit moved a definition behind its use
        return None
    return parsed if is_interesting(parsed) else None


def is_interesting(program: Program) -> bool:
    """Return True if a program has two streams, a collective or message, a flag, and a buffer used twice."""
    every = list(program.walk())
    streams = {str(s.stream) for s in every if isinstance(s, SetStream)}
    communicates = any(isinstance(s, (Communication, Message)) for s in every)
    flags = any(isinstance(s, WaitSignal) or (isinstance(s, Contraction) and s.ready is not None) for s in every)
    text = str(program)
    twice = any(len(re.findall(rf"{name}\b", text)) > 3 for name in BUFFERS)  # allocated, and used twice
    return len(streams) > 1 and communicates and flags and twice
