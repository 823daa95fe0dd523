"""The choice: the fastest of what was measured on the machine, and without measurements of what is estimated."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from weakref import WeakKeyDictionary

from hostir.choice import cache
from hostir.choice.candidates import SEQUENTIAL, Candidates, candidates, check_ranks, check_sizes, fusion_of
from hostir.choice.platforms import ELSEWHERE, SIMULATED, Platform, here
from hostir.choice.simulate import EAGER, GRAPH, estimates
from hostir.choice.verdict import (
    ASKED_FOR,
    CALLS,
    ESTIMATED,
    FALLBACK,
    MEASURED,
    Candidate,
    Choice,
    Impossible,
    Timing,
    ranked_by,
)
from hostir.ir.comm_ops import Communication
from hostir.ir.notices import warn_once
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, check_known, error
from hostir.knobs import KERNELS
from hostir.log import logger
from hostir.lower import HasProgram, lower
from hostir.lower.interleave import NOT_OVERLAPPED

LOG = logger(__name__)
UNMEASURED = "not measured: 'hostir tune' does it"


def choose(
    fusion: HasProgram | Program,
    *,
    sizes: Mapping[str, int] | None = None,
    kernels: str | None = None,
    machine: str | None = None,
    calls: str = "out",
) -> Choice:
    """How a fusion is best run here. Under torchrun rank 0 decides, and every rank gets the same.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        sizes: of its symbols: what it is chosen for.
        kernels: `aten` or `triton` for these alone; see the knob HOSTIR_KERNELS.
        machine: `local`, `gloo` or `cuda`, as for `Executor`.
        calls: how they are made on CUDA, and so which times count: `out` with `out=`, so that programs of one-sided
            copies are replayed from a CUDA graph; `eager` without; `graph` inside a graph that the caller captures.

    Raises HostIRError for sizes that are not bound, and where there are fewer ranks than the fusion's.
    """
    from hostir.runtime.session import joined, launched

    program = fusion_of(fusion)
    check_sizes(program, program.given_sizes(sizes))
    check_known("kind of calls", calls, CALLS)
    policy = KERNELS.get(kernels)
    name = machine_name(machine)
    platform = here(name, program.ranks)
    check_ranks(program, platform)
    decided = partial(decide, program, platform, sizes or {}, policy, calls)
    if name == SIMULATED or not launched():
        choice, speaks = decided(), True
    else:
        session = joined()
        speaks = session.rank == 0
        key = f"choice {next(_rounds.setdefault(session, itertools.count()))}"
        choice = _heard(session.exchange(key, _spoken(decided) if speaks else "")[0])
    tell(choice)
    if speaks:  # once all have heard, as a warning may be an error
        warn_fallbacks(program, choice)
    return choice


_rounds: WeakKeyDictionary[object, itertools.count[int]] = WeakKeyDictionary()


def machine_name(machine: str | None) -> str:
    """The machine that an `Executor` would take: under torchrun what the device calls for, else simulated ranks."""
    if machine is not None:
        check_known("machine", machine, ("local", "gloo", "cuda"))
    from hostir.runtime.session import joined, launched

    if machine is not None:
        return machine
    if not launched():
        return SIMULATED
    return "cuda" if joined().device.type == "cuda" else "gloo"


def decide(
    program: Program, platform: Platform, sizes: Mapping[str, int], kernels: str = "auto", calls: str = "out"
) -> Choice:
    """The choice on a platform, by what this process finds in its cache; the arguments are as for `choose`."""
    found = candidates(program, platform, kernels)
    if not found.programs:
        lower(program, SEQUENTIAL)  # which says why, in its own words
    notes = list(found.whole)
    measured = _measured(program, platform, sizes, kernels, calls)
    if measured is not None:
        timings, impossible = measured
        return _choice(program, platform, MEASURED, timings, impossible, notes)
    timings, impossible = _estimated(found, platform, sizes, calls)
    if platform.note:
        notes.append(platform.note)
    alone = {timing.candidate.strategy for timing in timings} == {SEQUENTIAL} and _communicates(found.programs.values())
    return _choice(program, platform, FALLBACK if alone else ESTIMATED, timings, impossible, notes)


def _communicates(programs: Iterable[Program]) -> bool:
    """Whether there is something that could be overlapped."""
    return any(isinstance(s, Communication) for program in programs for s in program.walk())


def _choice(
    program: Program,
    platform: Platform,
    source: str,
    timings: tuple[Timing, ...],
    impossible: tuple[Impossible, ...],
    notes: list[str],
) -> Choice:
    ranked = tuple(sorted(timings, key=lambda timing: timing.us))
    return Choice(program.name, ranked[0].candidate, source, str(platform), ranked, impossible, tuple(notes))


def _measured(
    program: Program, platform: Platform, sizes: Mapping[str, int], kernels: str, calls: str
) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]] | None:
    """What the cache knows of today's programs; None where it knows no time of any."""
    if platform.machine in (SIMULATED, ELSEWHERE):
        return None
    entries = cache.read(cache.key_of(program, sizes, platform))
    if not entries:
        return None
    every = candidates(program, platform, kernels, all_that_run=True)
    timings: list[Timing] = []
    impossible = list(every.impossible)
    for candidate, lowered in every.programs.items():
        entry = entries.get(candidate)
        if entry is None or entry.digest != lowered.digest:
            impossible.append(Impossible(candidate, UNMEASURED))
        elif entry.failure:
            impossible.append(Impossible(candidate, entry.failure, loud=True))
        else:
            timings.append(_timing(candidate, lowered, entry.eager, entry.graph, calls))
    return (tuple(timings), tuple(impossible)) if timings else None


def _estimated(
    found: Candidates, platform: Platform, sizes: Mapping[str, int], calls: str
) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]]:
    """Times of all candidates; those that the sizes do not fit are not possible. Raises where they fit none."""
    timings: list[Timing] = []
    impossible = list(found.impossible)
    for candidate, program in found.programs.items():
        try:
            timings.append(_estimate(candidate, program, platform, sizes, calls))
        except HostIRError as misfit:
            if candidate.strategy == SEQUENTIAL:
                raise
            impossible.append(Impossible(candidate, misfit.diagnostics[0].message, loud=True))
    return tuple(timings), tuple(impossible)


def _estimate(
    candidate: Candidate, program: Program, platform: Platform, sizes: Mapping[str, int], calls: str
) -> Timing:
    program.check_whole(sizes)
    # Simulated ranks compute in one way, and the machine that they stand for in the best.
    kernels = ("aten", "triton") if platform.machine == SIMULATED else (candidate.kernels,)
    ways = [estimates(program, sizes, platform.hardware, k) for k in kernels]
    eager, graph = (round(min(times[mode] for times in ways), 1) for mode in (EAGER, GRAPH))
    replays = platform.computes != "cpu" or platform.machine == SIMULATED
    return _timing(candidate, program, eager, graph if replays else None, calls)


def _timing(candidate: Candidate, program: Program, eager: float | None, graph: float | None, calls: str) -> Timing:
    us = ranked_by(calls, eager, graph, captured_by_caller=_communicates([program]))
    assert us is not None
    return Timing(candidate, us, eager, graph)


# Telling ----------------------------------------------------------------------------------------------------------
def tell(choice: Choice) -> None:
    """Logs a choice, what came near, and what is not possible or not overlapped."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    others = "".join(f"; '{it.candidate}' {it.us:.0f} us" for it in choice.timings[1:3])
    LOG.info("%s%s", choice, others)
    for clause in (*choice.fallbacks, *choice.notes):
        LOG.info("@%s: %s", choice.fusion, clause)


def warn_fallbacks(program: Program, choice: Choice) -> None:
    """Warns, once for a fusion and a reason, of what does not run as one might have hoped."""
    hint = "'hostir explain' lists all ways to run it, with their times and what keeps them from being taken"
    if choice.source == ASKED_FOR:
        hint = "'pipeline' slices any communication along a Stream axis; 'auto' takes what is fastest"
    messages = [f"@{choice.fusion} runs '{choice.taken}', as {why}." for why in choice.fallbacks]
    messages += [f"In @{choice.fusion} {note}." for note in choice.notes if f" is {NOT_OVERLAPPED}: " in note]
    for message in messages:
        warn_once(program.digest, message, hint)


def _spoken(decided: Callable[[], Choice]) -> str:
    """Rank 0's choice for the others, or why there is none."""
    try:
        return json.dumps(decided().to_json())
    except HostIRError as refusal:
        first = refusal.diagnostics[0]
        return json.dumps({"refusal": [first.message, first.expected, first.hint]})
    except Exception as problem:  # whatever it is, the others must not wait
        return json.dumps({"refusal": [f"rank 0 could not choose: {type(problem).__name__}: {problem}", "", ""]})


def _heard(text: str) -> Choice:
    data = json.loads(text)
    if "refusal" in data:
        message, expected, hint = data["refusal"]
        raise error(message, expected=expected, hint=hint)
    return Choice.from_json(data)


def program_of(fusion: Program, choice: Choice) -> Program:
    """The host program that was chosen."""
    return lower(fusion, choice.strategy, choice.streams)
