"""Choose the fastest candidate, by measurements or else by estimates."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from hostir.choice import cache
from hostir.choice.cache import Entries
from hostir.choice.candidates import SEQUENTIAL, Candidates, candidates, uses_peers
from hostir.choice.choices import (
    ASKED_FOR,
    ESTIMATED,
    FALLBACK,
    MEASURED,
    Candidate,
    Choice,
    Impossible,
    Timing,
    ranked_by,
)
from hostir.choice.cost import CostTask, tasks_of
from hostir.choice.platforms import ELSEWHERE, SIMULATED, Platform, here
from hostir.choice.simulation import EAGER, GRAPH, estimates
from hostir.ir.program import Program
from hostir.ir.sizes import binding
from hostir.ir.source import (
    HostIRError,
    amount,
    check_known,
    described,
    error,
    logger,
    warn_once,
)
from hostir.knobs import KERNELS, SYMMETRIC_LIMIT
from hostir.lower import CALLS, HasProgram, lower
from hostir.lower.pipeline import NOT_OVERLAPPED
from hostir.lower.strategies import fusion_of
from hostir.runtime.unroll import unroll

LOG = logger(__name__)
UNMEASURED = "not measured: 'hostir tune' does it"


def choose(
    fusion: HasProgram | Program,
    *,
    sizes: Mapping[str, int] | None = None,
    kernels: str | None = None,
    machine: str | None = None,
    group: Any = None,
    calls: str = "out",
    symmetric_limit: int | None = None,
    warn: bool = True,
) -> Choice:
    """Choose how to run a fusion here. Under torchrun rank 0 of the group decides, and every rank gets the same.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        sizes: of its symbols: what it is chosen for.
        kernels: `aten`, `cublas` or `triton` for these alone; see the knob HOSTIR_KERNELS.
        machine: `local`, `gloo` or `cuda`, as for `Executor`.
        group: the ranks that run it, as for `Executor`.
        calls: how they are made on CUDA, and so which times count: `out` with `out=`, so that programs of one-sided
            copies are replayed from a CUDA graph; `eager` without; `graph` inside a graph that the caller captures.
        symmetric_limit: the most bytes of symmetric memory on a rank; see the knob HOSTIR_SYMMETRIC_LIMIT.
        warn: whether rank 0 warns of what is not possible here; False where the caller says it.

    Raises HostIRError for sizes that are not bound, and where there are fewer ranks than the fusion's.
    """
    program = fusion_of(fusion)
    check_sizes(program, program.given_sizes(sizes))
    decider = decider_for(program, kernels, machine, calls, symmetric_limit, group)
    agreed, speaks = from_rank_0(machine, group, lambda: decider.choice(sizes or {}).to_json())
    choice = Choice.from_json(agreed)
    log_choice(choice)
    if warn and speaks:  # once all have heard, as a warning may be an error
        warn_fallbacks(program, choice, group)
    return choice


def check_ranks(fusion: Program, platform: Platform) -> None:
    """Raise HostIRError if there are fewer ranks than the fusion needs."""
    if platform.ranks < fusion.ranks:
        raise error(
            f"@{fusion.name} is for {fusion.ranks} ranks, and there are {platform.ranks}",
            hint=f"build it for {platform.ranks} (--ranks {platform.ranks}, if its function has a parameter 'ranks'), "
            f"or take a machine with {fusion.ranks}",
        )


def check_sizes(fusion: Program, sizes: dict[str, int]) -> None:
    """Raise HostIRError unless all sizes are known: a choice is made for sizes."""
    if missing := sorted(fusion.size_names - sizes.keys()):
        raise error(
            f"what is fastest depends on the size '{missing[0]}' of @{fusion.name}, which is not bound",
            expected=f"every size that it is chosen for: {', '.join(sorted(fusion.size_names))}",
            hint=f"{binding(missing[0])}; hi.compile chooses by ranges of it, which 'hostir explain' shows",
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise error(
                f"the size {name}={described(size)} of @{fusion.name}", expected="an integer that is not negative"
            )
    fusion.check_sizes(sizes)


def decider_for(
    program: Program,
    kernels: str | None,
    machine: str | None,
    calls: str,
    symmetric_limit: int | None,
    group: Any = None,
) -> Decider:
    """Return what chooses for a fusion on this machine; the arguments are as for `choose`. All ranks call it."""
    check_known("kind of calls", calls, CALLS)
    platform = here(machine_name(machine, group), program.ranks, group)
    check_ranks(program, platform)
    return Decider(program, platform, KERNELS.get(kernels), calls, SYMMETRIC_LIMIT.get(symmetric_limit))


def from_rank_0(machine: str | None, group: Any, decided: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return what rank 0 of the group decides, and whether this one speaks for all. Without ranks, decide here."""
    from hostir.runtime.guest import session_of

    session = session_of(group) if machine_name(machine, group) != SIMULATED else None
    if session is None:
        return decided(), True
    key = f"choice {next(_rounds.setdefault(session, itertools.count()))}"
    return _decoded(session.exchange(key, _encoded(decided) if session.rank == 0 else "")[0]), session.rank == 0


_rounds: WeakKeyDictionary[object, itertools.count[int]] = WeakKeyDictionary()


def machine_name(machine: str | None, group: object = None) -> str:
    """Return the machine that an `Executor` would take: under torchrun by the device, else simulated ranks."""
    if machine is not None:
        check_known("machine", machine, ("local", "gloo", "cuda"))
    from hostir.runtime.guest import session_of

    if machine is not None:
        return machine
    session = session_of(group)
    if session is None:
        return SIMULATED
    return "cuda" if session.device.type == "cuda" else "gloo"


def rank_here(machine: str | None, group: Any = None) -> int | None:
    """Return this process's rank in the group; None if ranks are simulated."""
    from hostir.runtime.guest import session_of

    if machine_name(machine, group) == SIMULATED:
        return None
    session = session_of(group)
    return 0 if session is None else session.rank


def decide(
    program: Program, platform: Platform, sizes: Mapping[str, int], kernels: str = "auto", calls: str = "out"
) -> Choice:
    """Choose on a platform, by the measurements in this process's cache; the arguments are as for `choose`."""
    return Decider(program, platform, kernels, calls).choice(sizes)


class Decider:
    """Chooses for any sizes of a fusion on one platform. The fusion is lowered once.

    Args:
        program: the fusion.
        platform: where it will run.
        kernels, calls: as for `choose`.
        limit: the most bytes of symmetric memory that may be taken on a rank; None: any number.
    """

    def __init__(
        self,
        program: Program,
        platform: Platform,
        kernels: str = "auto",
        calls: str = "out",
        limit: int | None = None,
    ) -> None:
        self.program = program
        self.platform = platform
        self.kernels = kernels
        self.calls = calls
        self.limit = limit

    @cached_property
    def found(self) -> Candidates:
        """The candidates to choose from without measurements. Raises HostIRError if there are none."""
        found = candidates(self.program, self.platform, self.kernels)
        if not found.programs:
            lower(self.program, SEQUENTIAL)  # which says why, in its own words
        return found

    @cached_property
    def measurable(self) -> Candidates:
        """The candidates that may have been measured."""
        return candidates(self.program, self.platform, self.kernels, all_that_run=True)

    def measurements(self, sizes: Mapping[str, int]) -> Entries:
        """Return what this process's cache holds for these sizes."""
        if self.platform.machine in (SIMULATED, ELSEWHERE):
            return {}
        return cache.read(cache.key_of(self.program, sizes, self.platform))

    def choice(self, sizes: Mapping[str, int], entries: Entries | None = None) -> Choice:
        """Choose for sizes, by measurements in `entries` or the cache, or else by estimates."""
        found = self.found
        notes = list(found.whole)
        measured = self._measured(sizes, self.measurements(sizes) if entries is None else entries)
        if measured is not None:
            return self._taken(MEASURED, *measured, notes)
        timings, impossible = estimated(found, self.platform, sizes, self.calls, self.limit)
        if self.platform.note:
            notes.append(self.platform.note)
        only = {timing.candidate.strategy for timing in timings} == {SEQUENTIAL}
        source = FALLBACK if only and _communicates(found.programs.values()) else ESTIMATED
        return self._taken(source, timings, impossible, notes)

    def program_of(self, candidate: Candidate) -> Program:
        """Return the host program of a candidate that was chosen."""
        programs = self.found.programs
        return programs[candidate] if candidate in programs else self.measurable.programs[candidate]

    def fits(self, program: Program, sizes: Mapping[str, int]) -> bool:
        """Whether a candidate's program runs at these sizes, within the limit."""
        if program.misfits(sizes):
            return False
        return self.limit is None or symmetric_bytes(program, sizes) <= self.limit

    def _measured(
        self, sizes: Mapping[str, int], entries: Entries
    ) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]] | None:
        """Return the times of the current programs, and what cannot be taken; None if nothing was measured."""
        if not entries:
            return None
        timings: list[Timing] = []
        impossible = list(self.measurable.impossible)
        for candidate, lowered in self.measurable.programs.items():
            entry = entries.get(candidate)
            if entry is None or entry.digest != lowered.digest:
                impossible.append(Impossible(candidate, UNMEASURED))
            elif entry.failure:
                impossible.append(Impossible(candidate, entry.failure, warn=True))
            elif refused := _too_large(needed := symmetric_bytes(lowered, sizes), self.limit):
                impossible.append(Impossible(candidate, refused, warn=True))
            else:
                timings.append(_timing(candidate, lowered, entry.eager, entry.graph, self.calls, needed))
        return (tuple(timings), tuple(impossible)) if timings else None

    def _taken(
        self, source: str, timings: tuple[Timing, ...], impossible: tuple[Impossible, ...], notes: list[str]
    ) -> Choice:
        ranked = tuple(sorted(timings, key=lambda timing: timing.us))
        machine = str(self.platform)
        return Choice(self.program.name, ranked[0].candidate, source, machine, ranked, impossible, tuple(notes))


def _communicates(programs: Iterable[Program]) -> bool:
    """Whether the fusion communicates, so that there is something to overlap."""
    return any(s.collective for program in programs for s in program.walk())


def symmetric_bytes(program: Program, sizes: Mapping[str, int]) -> int:
    """Return the most bytes of symmetric memory that a program takes on a rank, without gaps between buffers."""
    if not uses_peers(program):
        return 0
    ranks = {mesh.devices[0] for mesh in program.meshes}  # those of a mesh take as much
    return max(unroll(program, rank, sizes).memory[1] for rank in ranks)


def _too_large(needed: int, limit: int | None) -> str:
    """Return why a candidate may not be taken that takes so many bytes of symmetric memory; empty if it may."""
    if limit is None or needed <= limit:
        return ""
    return f"it takes {amount(needed)} of symmetric memory on a rank, and the limit is {amount(limit)}"


def estimated(
    found: Candidates, platform: Platform, sizes: Mapping[str, int], calls: str, limit: int | None = None
) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]]:
    """Choose by estimated times; candidates that the sizes do not fit are impossible. Raises if they fit none."""
    timings: list[Timing] = []
    impossible = list(found.impossible)
    made: dict[int, tuple[Sequence[CostTask], int]] = {}  # candidates with other kernels share a program
    for candidate, program in found.programs.items():
        try:
            program.check_whole(sizes)
            if id(program) not in made:
                made[id(program)] = tasks_of(program, sizes), symmetric_bytes(program, sizes)
            tasks, needed = made[id(program)]
            if refused := _too_large(needed, limit):
                impossible.append(Impossible(candidate, refused, warn=True))
                continue
            timings.append(_estimate(candidate, program, tasks, platform, calls, needed))
        except HostIRError as misfit:
            if candidate.strategy == SEQUENTIAL:
                raise
            impossible.append(Impossible(candidate, misfit.diagnostics[0].message, warn=True))
    return tuple(timings), tuple(impossible)


def _estimate(
    candidate: Candidate, program: Program, tasks: Sequence[CostTask], platform: Platform, calls: str, needed: int
) -> Timing:
    # Simulated ranks compute in one way, and the machine that they stand for in the best.
    kernels = ("cublas", "triton") if platform.machine == SIMULATED else (candidate.kernels,)
    ways = [estimates(tasks, platform.hardware, k) for k in kernels]
    eager, graph = (round(min(times[mode] for times in ways), 1) for mode in (EAGER, GRAPH))
    replays = platform.computes != "cpu" or platform.machine == SIMULATED
    return _timing(candidate, program, eager, graph if replays else None, calls, needed)


def _timing(
    candidate: Candidate, program: Program, eager: float | None, graph: float | None, calls: str, needed: int
) -> Timing:
    us = ranked_by(calls, eager, graph, captured_by_caller=_communicates([program]))
    assert us is not None
    return Timing(candidate, us, eager, graph, needed)


def log_choice(choice: Choice) -> None:
    """Log a choice, the next best candidates, and what is not possible or not overlapped."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    others = "".join(f"; '{it.candidate}' {it.us:.0f} us" for it in choice.timings[1:3])
    LOG.info("%s%s", choice, others)
    for clause in (*choice.fallbacks, *choice.notes):
        LOG.info("@%s: %s", choice.fusion, clause)


def warn_fallbacks(program: Program, choice: Choice, group: Any = None) -> None:
    """Warn, on rank 0, once for a fusion and a reason, that a strategy or an overlap is not possible here."""
    first = None if group is None else rank_here(None, group) == 0
    hint = "'hostir explain' lists all ways to run it, with their times and what keeps them from being taken"
    if choice.source == ASKED_FOR:
        hint = "'pipeline' slices any communication along a Stream axis; 'auto' takes what is fastest"
    messages = [f"@{choice.fusion} runs '{choice.taken}', as {why}." for why in choice.fallbacks]
    messages += [f"In @{choice.fusion} {note}." for note in choice.notes if f" is {NOT_OVERLAPPED}: " in note]
    for message in messages:
        warn_once((program.digest, message), message, hint, first=first)


def _encoded(decided: Callable[[], dict[str, Any]]) -> str:
    """Encode what rank 0 decides, or its error, for the other ranks."""
    try:
        return json.dumps(decided())
    except HostIRError as refusal:
        first = refusal.diagnostics[0]
        return json.dumps({"refusal": [first.message, first.expected, first.hint]})
    except Exception as problem:  # whatever it is, the others must not wait
        return json.dumps({"refusal": [f"rank 0 could not choose: {type(problem).__name__}: {problem}", "", ""]})


def _decoded(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(text)
    if "refusal" in data:
        message, expected, hint = data["refusal"]
        raise error(message, expected=expected, hint=hint)
    return data


def program_of(fusion: Program, choice: Choice) -> Program:
    """Return the host program of the chosen candidate."""
    return lower(fusion, choice.strategy, choice.streams)
