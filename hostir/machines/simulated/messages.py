"""Messages between two simulated ranks. The sides of `send`, `recv` and `exchange` are matched in pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from hostir.ir.machine import Exchange
from hostir.ir.source import Diagnostic, HostIRError
from hostir.machines.simulated.collectives import MakeTask, Note
from hostir.machines.simulated.tasks import Task


class MessageSide:
    """One rank's side of a message: it sends a tensor, receives a tensor, or does both.

    The rank's next message in the same team starts after this one has ended.

    Fields:
        x, out: the tensor that this rank sends, and the tensor into which it receives; None if there is no such tensor.
        start: the task that starts the message.
        to, source: the rank to which this rank sends, and the rank from which it receives.
        take: the task that reads `x`; None if nothing is sent.
        give: the task that writes `out`; None if nothing is received.
        sender: the matching side of the rank that sends to this rank.
        taken: the copy of `x` that `take` has read.
    """

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        start: Task,
        task: MakeTask,
        earlier: MessageSide | None,
    ) -> None:
        self.x, self.out, self.start = x, out, start
        self.to = next((m.target for m in exchange.moves or () if x is not None and m.source == start.rank), None)
        self.source = next((m.source for m in reversed(exchange.moves or ()) if out is not None), None)
        self.take = None if x is None else task(self._take, reads=(x,)).follow([start])
        self.give = None if out is None else task(self._give, writes=(out,)).follow([start])
        self.sender: MessageSide | None = None
        self.taken: torch.Tensor | None = None
        self.ends[-1].since = self.ends[-1]
        if earlier is not None:
            start.follow(earlier.ends)

    @property
    def ends(self) -> list[Task]:
        """The tasks that end the message: `take` and `give`, if they exist."""
        return [task for task in (self.take, self.give) if task is not None]

    def meet(self, sender: MessageSide) -> None:
        """Make this side receive the tensor that `sender` sends, and add edges between the tasks of the two sides."""
        assert sender.take is not None
        assert self.give is not None
        sender.take.held_by([self.start])
        self.give.follow([sender.start, sender.take])
        self.sender = sender

    def _take(self) -> None:
        assert self.x is not None
        self.taken = self.x.reshape(-1).clone()

    def _give(self) -> None:
        assert self.out is not None
        assert self.sender is not None
        assert self.sender.taken is not None
        self.out.view(-1).copy_(self.sender.taken)


def pair(issued: Sequence[Sequence[MessageSide]], note: Callable[[Task], Note]) -> None:
    """Match the messages of one team: the k-th send from rank a to rank b with the k-th receive of rank b from rank a.

    `issued` has the messages of each rank in issue order. Raises HostIRError if a message has no partner, or if the two
    tensors have different sizes or dtypes.
    """
    sent: dict[tuple[int, int], list[MessageSide]] = {}
    received: dict[tuple[int, int], list[MessageSide]] = {}
    for message in (message for messages in issued for message in messages):
        if message.to is not None:
            sent.setdefault((message.start.rank, message.to), []).append(message)
        if message.source is not None:
            received.setdefault((message.source, message.start.rank), []).append(message)
    for ends in dict.fromkeys([*sent, *received]):
        for number, (sender, receiver) in enumerate(zip_longest(sent.get(ends, []), received.get(ends, []))):
            if sender is None or receiver is None or not _message_fits(sender, receiver):
                raise _mismatch(ends, number, sender, receiver, note)
            receiver.meet(sender)


def _message_fits(sender: MessageSide, receiver: MessageSide) -> bool:
    x, out = sender.x, receiver.out
    return x is not None and out is not None and x.dtype == out.dtype and x.numel() == out.numel()


def _mismatch(
    ends: tuple[int, int],
    number: int,
    sender: MessageSide | None,
    receiver: MessageSide | None,
    note: Callable[[Task], Note],
) -> HostIRError:
    sides = ((sender, f"rank {ends[0]} sends only {number}"), (receiver, f"rank {ends[1]} receives only {number}"))
    notes = tuple((None, fewer) if side is None else _message_note(side, side is sender, note) for side, fewer in sides)
    return HostIRError(
        Diagnostic(
            f"message {number + 1} from rank {ends[0]} to rank {ends[1]} has no partner that fits",
            expected="as many sent as received, each of one dtype and number of elements on both sides",
            notes=notes,
        )
    )


def _message_note(message: MessageSide, sends: bool, note: Callable[[Task], Note]) -> Note:
    span, text = note(message.start)
    tensor = message.x if sends else message.out
    assert tensor is not None
    return span, f"{text}, {tensor.dtype} {list(tensor.shape)}"
