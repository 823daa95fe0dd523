"""The streams of one simulated rank, and the object that creates the rank's tasks on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hostir.ir.op import Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import HostIRError, Span, error
from hostir.machines.simulated.memory import storage_of
from hostir.machines.simulated.tasks import Epoch, SMGate, Task, Views

TeamRanks = tuple[int, ...]


class IssueQueue:
    """A stream of one rank.

    Fields:
        label: the name of the stream.
        tail: the tasks that the next task of the stream follows.
        pushing: a task that marks a start, then all copies by SMs since then, and the signals directly after them. The
            list is empty if the latest task of the stream is neither a copy by SMs nor such a signal.
        signalled: True if the last task in `pushing` is a signal.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.tail: list[Task] = []
        self.pushing: list[Task] = []
        self.signalled = False

    def wait(self, others: Sequence[Task]) -> None:
        self.pushing = []
        self.tail = [*self.tail, *(task for task in others if task not in self.tail)]


class Issuer:
    """Creates the tasks of one rank, on its streams.

    Fields:
        sms: the gate of the rank's SMs.
        steps: the number of statements so far, including skipped statements.
        calls: the number of calls so far, including the current call.
        statement: the statement that is being planned; None for tasks of the caller.
        rounds: the rounds of the loops around the statement; () for tasks of the caller.
    """

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.program = program
        self.caller = self.current = IssueQueue("caller")
        self.pool = [IssueQueue(f"stream {i}") for i in range(program.streams)]
        self.sms = SMGate()
        self.tasks: list[Task] = []
        self.steps = 0
        self.calls = 0
        self.statement: Statement | None = None
        self.rounds: tuple[int, ...] = ()

    @property
    def call(self) -> int:
        """The number of the call that is being planned, from 0."""
        return self.calls - 1

    def epoch(self, epoch: int) -> Epoch:
        """Return a pair: the number of the current call, and `epoch`."""
        return self.call, epoch

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.statement, self.rounds, self.steps = statement, rounds, self.steps + 1

    def at_caller(self) -> None:
        """Make the caller's stream current, and attribute the next tasks to the caller instead of a statement."""
        self.statement, self.rounds, self.current, self.steps = None, (), self.caller, self.steps + 1

    @property
    def defined_name(self) -> str:
        """The name of the value that the current statement defines; empty if it defines no value."""
        return next((v.name for v in self.statement.named), "") if self.statement else ""

    def task(
        self,
        run: Callable[[], object] | None,
        reads: Views = (),
        writes: Views = (),
        undefines: Views = (),
        *,
        lane: str = "",
        timed: bool = False,
        team: TeamRanks = (),
    ) -> Task:
        """Return a new task that follows no other task yet. See `Task` for the arguments."""
        task = Task(
            rank=self.rank,
            lane=lane or self.current.label,
            order=len(self.tasks),
            step=self.steps,
            statement=self.statement,
            rounds=self.rounds,
            call=self.call,
            stream=self.current.label,
            run=run,
            reads=reads,
            writes=writes,
            undefines=undefines,
            memory=tuple({storage_of(x) for x in (*reads, *writes, *undefines)}),
            timed=timed,
            team=team,
        )
        self.tasks.append(task)
        return task

    def issue(
        self,
        run: Callable[[], object] | None,
        reads: Views = (),
        writes: Views = (),
        undefines: Views = (),
        *,
        timed: bool = False,
    ) -> Task:
        """Add a task to the end of the current stream, and return it. See `Task` for the arguments."""
        task = self.task(run, reads, writes, undefines, timed=timed).follow(self.current.tail)
        self.current.tail, self.current.pushing = [task], []
        task.since = task if timed else None
        return task

    def push(self, run: Callable[[], object] | None, reads: Views = (), writes: Views = ()) -> Task:
        """Add a copy by SMs, or a signal directly after such a copy, to the current stream, and return its task.

        A signal has no `writes`. A later kernel of the stream that waits for flags may overlap these tasks.
        """
        stream = self.current
        pushing = stream.pushing or [self.issue(do_nothing)]
        task = self.task(run, reads, writes, lane=f"{stream.label}, SMs that copy", timed=bool(writes))
        task.follow(stream.tail)
        task.gate, task.since = (self.sms, task) if writes else (None, None)
        stream.pushing, stream.tail, stream.signalled = [*pushing, task], [task], not writes
        return task

    def stream(self, stream: IssueQueue | int) -> IssueQueue:
        if isinstance(stream, IssueQueue):
            return stream
        if not 0 <= stream < len(self.pool):
            hint = f"write 'streams {stream + 1}' after the program's outputs" if stream > 0 else ""
            raise self.fail(f"there is no stream {stream}", expected=f"an index below {len(self.pool)}", hint=hint)
        return self.pool[stream]

    def where(self, task: Task) -> tuple[Span | None, str]:
        """Return the place of a task's statement in the text, and a text that names rank, statement, round and call."""
        call = f" of call {task.call + 1}" if self.calls > 1 else ""
        if task.statement is None:
            return None, f"rank {self.rank}, caller{call}"
        rounds = f" in round {', '.join(map(str, task.rounds))}" if task.rounds else ""
        text = format_statement(task.statement, self.program)
        return task.statement.span, f"rank {self.rank}, '{text}'{rounds}{call}"

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        """Return an error that names the statement that is being planned."""
        span, where = self.where(Task(statement=self.statement, rounds=self.rounds, call=self.call))
        return error(f"{where}: {message}", span, expected=expected, hint=hint)


def do_nothing() -> None:
    """Do nothing: the task only orders other tasks."""
