"""Find misuse of buffers and handles while one rank is traced."""

from __future__ import annotations

from collections.abc import Iterable

from hostir.check.tracing.events import Event
from hostir.check.tracing.memory import Buffer, View
from hostir.check.tracing.trace import RankTrace
from hostir.ir.op import Codec, Phase, Statement, Value
from hostir.ir.source import Diagnostic, Span


class Misuse:
    """Collects the misuse of buffers and handles by one rank. The tracer reports each use of a buffer or a handle.

    A handle is the event at which a communication ends.

    Fields:
        problems: the findings, by statement and message, in the order of issue.
        allocated: the buffers that the current call has allocated.
        freed: for each freed buffer, the statement that frees it.
        in_flight: the communications that nothing has waited for yet. The handle of each is mapped to the statement
            that starts it.
        waited: the communications that a statement has waited for. The handle of each is mapped to this statement.
    """

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self.problems: dict[tuple[int, str], Diagnostic] = {}
        self.allocated: list[Buffer] = []
        self.freed: dict[Buffer, Statement] = {}
        self.in_flight: dict[Event, Statement] = {}
        self.waited: dict[Event, Statement] = {}

    def refuse(
        self,
        message: str,
        at: Span | None = None,
        *,
        expected: str = "",
        hint: str = "",
        notes: tuple[tuple[Span | None, str], ...] = (),
    ) -> None:
        """Record a finding about the current statement.

        If the same finding occurs in another round, it is not recorded again.
        """
        s = self.trace.statement
        span = at or (s.span if s else None)
        self.problems.setdefault((id(s), message), Diagnostic(message, span, expected, hint, notes))

    def use(self, out: View | None, *reads: View | None) -> None:
        """Record a finding if the current statement reads or writes a freed buffer.

        `out` is the view that the statement writes, and `reads` are the views that it reads.
        """
        s, read = self.trace.statement, [x for x in reads if x is not None]
        if s is None or not self.freed:
            return
        for value, x in (*zip(s.reads, read, strict=False), (next(s.values(Codec.WRITE), None), out)):
            if x is not None and value is not None and (freed := self.freed.get(x.buffer)):
                name = x.buffer.name
                what = "it was freed" if value.name == name else f"its buffer %{name} was freed"
                self.refuse(f"{value} is used after {what}", notes=((freed.span, "freed here"),))

    def overwrite(self, out: View | None, *reads: View | None) -> None:
        """Record a finding if the current statement writes memory that it also reads.

        `out` is the view that the statement writes, and `reads` are the views that it reads. There are two exceptions:
        an elementwise statement and an allreduce may write exactly the view that they read.
        """
        s = self.trace.statement
        read = [x for x in reads if x is not None]
        if s is None or out is None or all(x.buffer is not out.buffer for x in read):
            return
        result = next(s.values(Codec.WRITE))
        for n, (value, x) in enumerate(zip(s.reads, read, strict=True)):
            if x.buffer is not out.buffer or not x.region.meets(out.region):
                continue
            if x.equals(out) and s.in_place(n):
                continue
            both = "" if value == result else f" {value}, and both are memory of %{x.buffer.name}"
            self.refuse(
                f"{s.keyword()} writes {result} while it reads{both or ' it'}",
                expected="memory that overlaps no operand; only elementwise statements and allreduce may write "
                "exactly the view that they read",
                hint="allocate a buffer for the result",
            )
            return

    def free(self, buffer: Buffer) -> bool:
        """Record that the current statement frees a buffer; return True.

        If the buffer was already freed, record a finding and return False.
        """
        if (before := self.freed.get(buffer)) is not None:
            self.refuse(f"%{buffer.name} is freed twice", hint="free it once", notes=((before.span, "first here"),))
            return False
        assert self.trace.statement is not None
        self.freed[buffer] = self.trace.statement
        return True

    def start(self, handle: Event) -> None:
        """Record that the current statement starts the communication with the handle `handle`."""
        assert self.trace.statement is not None
        self.in_flight[handle] = self.trace.statement

    def wait(self, handle: Event) -> bool:
        """Record that the current statement waits for a communication; return True.

        If a statement has already waited for this communication, record a finding and return False.
        """
        s = self.trace.statement
        assert s is not None
        if handle in self.waited:
            name = next(s.values(Codec.USE))
            first = ((self.waited[handle].span, "first here"),)
            self.refuse(f"{name} is waited for twice", hint="wait for it once", notes=first)
            return False
        self.in_flight.pop(handle)
        self.waited[handle] = s
        return True

    def end_call(self, outputs: Iterable[tuple[Value, View | None]]) -> None:
        """End a call: record findings about its communications and its outputs, and find leaked buffers.

        There is a finding for each communication that no statement has waited for, and for each output that was freed.
        """
        for statement in self.in_flight.values():
            self.trace.statement, handle = statement, statement.defines(Phase.HOST)
            self.refuse(f"{handle} is never waited for", hint=f"add 'wait {handle}' before its result is used")
        self.in_flight.clear()
        self.trace.at_caller()
        gone = {*self.freed}
        for value, x in outputs:
            if x is None:
                continue
            gone.add(x.buffer)
            if freed := self.freed.get(x.buffer):
                named = f"{value}" if value.name == x.buffer.name else f"{value}, a view of %{x.buffer.name},"
                self.refuse(f"the output {named} was freed", freed.span)
        self.trace.leaked += [buffer for buffer in self.allocated if buffer not in gone]
        self.allocated.clear()
