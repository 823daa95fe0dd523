"""Walk a program on a machine, which executes its statements or proves them right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hostir.ir.machine import Frame, Handle, Machine
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError

MAX_UNROLLED = 1_000_000  # statements with loops unrolled; planning more takes minutes, and much memory


class Observer:
    """Is notified of every statement before it is evaluated, so that traces and errors can name it."""

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        """Note the statement that runs next, and the indices of the loops around it, outermost first."""


def interpret(
    program: Program,
    machine: Machine,
    sizes: Mapping[str, int],
    inputs: Sequence[Handle | None],
    observer: Observer | None = None,
    frames: type[Frame] = Frame,
) -> tuple[Handle | None, ...]:
    """Evaluate every statement in program order, loops unrolled; return the outputs' handles.

    `inputs` are this rank's parts (or whole tensors, where the machine's rank is None), None where it holds none.
    Raises HostIRError at the loop that makes the program longer than `MAX_UNROLLED` statements.
    """
    unrolled_length(program.body, sizes)
    frame = frames(machine, sizes)
    for value, handle in zip(program.inputs, inputs, strict=True):
        frame[value] = handle
    _run(program.body, frame, observer or Observer(), ())
    return tuple(frame[value] for value in program.outputs)


def unrolled_length(body: tuple[Statement, ...], sizes: Mapping[str, int]) -> int:
    """Return the number of statements of a body with its loops unrolled; each round counts as one more."""
    total = 0
    for statement in body:
        if not statement.bodies:
            total += 1
            continue
        total += statement.repeats.bind(sizes) * (1 + sum(unrolled_length(inner, sizes) for inner in statement.bodies))
        if total > MAX_UNROLLED:
            raise statement.fail(
                f"with this loop the program has {total} statements and rounds to go through",
                expected=f"at most {MAX_UNROLLED}",
                hint="choose fewer rounds, each with more work",
            )
    return total


def _run(statements: tuple[Statement, ...], frame: Frame, observer: Observer, rounds: tuple[int, ...]) -> None:
    for statement in statements:
        if statement.bodies:
            for index in statement.rounds(frame):
                for body in statement.bodies:
                    _run(body, frame, observer, (*rounds, *index))
            continue
        observer.at(statement, rounds)
        try:
            statement.evaluate(frame)
        except HostIRError:
            raise
        except Exception as problem:
            raise statement.fail(f"{type(problem).__name__}: {problem}") from problem
