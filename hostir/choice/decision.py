"""Choose the fastest candidate: by measurements if there are any for this machine, else by estimates."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from hostir.choice import cache
from hostir.choice.cache import Entries
from hostir.choice.candidates import SEQUENTIAL, Candidates, candidates_of, overlaps
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
from hostir.choice.cost import CostTask, tasks_to_simulate
from hostir.choice.platforms import ELSEWHERE, GLOO, SIMULATED, Platform, platform_here, simulated
from hostir.choice.simulation import EAGER, GRAPH, driver_calls, estimates
from hostir.ir.program import Program, shares_memory, stated_hosts, uses_nccl, with_hosts
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
from hostir.job.hosts import equal_number
from hostir.knobs import KERNELS, SYMMETRIC_LIMIT
from hostir.lower import CALLS, HasProgram, lower
from hostir.lower.pipeline import NOT_OVERLAPPED
from hostir.lower.strategies import fusion_of
from hostir.machines.cuda import FEW
from hostir.plan.unroll import unroll

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
    """Choose a candidate to run a fusion on this machine. Under torchrun rank 0 of the group chooses for all ranks.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        sizes: the sizes to choose for: a value for each of the fusion's symbols.
        kernels: the only kernels to consider: `aten`, `cublas` or `triton`. By default the knob HOSTIR_KERNELS decides.
        machine: `local`, `gloo` or `cuda`, as in `Executor`.
        group: the ranks that run the fusion, as in `Executor`.
        calls: how the caller will make calls on CUDA. Candidates are compared by their times when they are called in
            this way. `out`: the caller passes `out=`, so the executor may replay programs without collectives from a
            CUDA graph. `eager`: the caller does not pass `out=`. `graph`: the caller captures the calls in a graph.
        symmetric_limit: the maximum number of bytes of symmetric memory on a rank. By default the knob
            HOSTIR_SYMMETRIC_LIMIT decides.
        warn: True if rank 0 warns of strategies and overlaps that are not possible here. Pass False to report them in
            another way.

    Raises HostIRError for sizes that are not bound, and if there are fewer ranks than the fusion needs.
    """
    program = fusion_of(fusion)
    check_sizes(program, program.given_sizes(sizes))
    decider = decider_for(program, kernels, machine, calls, symmetric_limit, group)
    answer, first = from_rank_0(machine, group, lambda: decider.choice(sizes or {}).to_json())
    choice = Choice.from_json(answer)
    log_choice(choice)
    if warn and first:  # only after all ranks have the answer, because a warning may be an error
        warn_fallbacks(program, choice, group)
    return choice


def check_ranks(fusion: Program, platform: Platform) -> None:
    """Raise HostIRError if there are fewer ranks than the fusion needs."""
    if platform.ranks < fusion.ranks:
        raise error(
            f"@{fusion.name} is for {fusion.ranks} ranks, and there are {platform.ranks}",
            hint=f"build it for {platform.ranks} (--ranks {platform.ranks}, if its function has a parameter 'ranks'), "
            f"or take a machine with {fusion.ranks}, or several hosts (--hosts)",
        )


def check_sizes(fusion: Program, sizes: dict[str, int]) -> None:
    """Raise HostIRError unless every size of the fusion has a valid value."""
    if missing := sorted(fusion.size_names - sizes.keys()):
        raise error(
            f"the fastest strategy depends on the size '{missing[0]}' of @{fusion.name}, which is not bound",
            expected=f"a value for every size: {', '.join(sorted(fusion.size_names))}",
            hint=f"{binding(missing[0])}; hi.compile chooses by ranges of it, which 'hostir explain' shows",
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise error(
                f"the size {name}={described(size)} of @{fusion.name}", expected="an integer that is not negative"
            )
    fusion.check_sizes(sizes)


def with_hosts_of(program: Program, platform: Platform) -> Program:
    """Return a fusion that states the hosts of a platform, if they have equally many ranks and it states none."""
    hosts = equal_number(platform.hosts) if program.ranks == platform.ranks else 0
    return with_hosts(program, hosts) if hosts and not stated_hosts(program) else program


def decider_for(
    program: Program,
    kernels: str | None,
    machine: str | None,
    calls: str,
    symmetric_limit: int | None,
    group: Any = None,
) -> Decider:
    """Return a decider for a fusion on this machine. All ranks call this together.

    The arguments are the same as in `choose`.
    """
    check_known("kind of calls", calls, CALLS)
    name = machine_name(machine, group)
    platform = simulated(program) if name == SIMULATED else platform_here(name, program.ranks, group)
    check_ranks(program, platform)
    return Decider(program, platform, KERNELS.get(kernels), calls, SYMMETRIC_LIMIT.get(symmetric_limit))


def from_rank_0(machine: str | None, group: Any, decide: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Call `decide` on rank 0 of the group, and return its result on all ranks.

    The second result is True on rank 0, which warns for all ranks. If ranks are simulated, or if this process is the
    only rank, call `decide` in this process, and return True as the second result.
    """
    from hostir.job.guest import session_of

    session = session_of(group) if machine_name(machine, group) != SIMULATED else None
    if session is None:
        return decide(), True
    first = session.rank == 0
    return _decoded(session.exchange("choice", _encoded(decide) if first else "")[0]), first


def machine_name(machine: str | None, group: object = None) -> str:
    """Return the name of the machine on which an `Executor` with these arguments runs.

    It is the argument `machine` if this is not None. Otherwise it is `gloo` or `cuda` under torchrun, and `local`
    (simulated ranks) elsewhere.
    """
    if machine is not None:
        check_known("machine", machine, ("local", "gloo", "cuda"))
        return machine
    from hostir.job.guest import session_of

    session = session_of(group)
    if session is None:
        return SIMULATED
    return "cuda" if session.device.type == "cuda" else "gloo"


def rank_here(machine: str | None, group: Any = None) -> int | None:
    """Return the rank of this process in the group; None if ranks are simulated."""
    from hostir.job.guest import session_of

    if machine_name(machine, group) == SIMULATED:
        return None
    session = session_of(group)
    return 0 if session is None else session.rank


def decide(
    program: Program, platform: Platform, sizes: Mapping[str, int], kernels: str = "auto", calls: str = "out"
) -> Choice:
    """Choose a candidate for any platform, by the measurements in this process's cache.

    `sizes`, `kernels` and `calls` are the same as in `choose`.
    """
    return Decider(program, platform, kernels, calls).choice(sizes)


class Decider:
    """Chooses a candidate of one fusion on one platform. It can choose for several sets of sizes, one after another.

    Args:
        program: the fusion.
        platform: the platform that the fusion will run on.
        kernels, calls: the same as in `choose`.
        limit: the maximum number of bytes of symmetric memory that a program may use on a rank; None for no limit.
    """

    def __init__(
        self,
        program: Program,
        platform: Platform,
        kernels: str = "auto",
        calls: str = "out",
        limit: int | None = None,
    ) -> None:
        self.program = with_hosts_of(program, platform)
        self.platform = platform
        self.kernels = kernels
        without_graphs = platform.machine in (GLOO, SIMULATED)
        self.calls = "eager" if calls == "graph" and without_graphs else calls
        self.limit = limit

    @cached_property
    def candidates(self) -> Candidates:
        """The candidates that can be chosen without measurements.

        Raises HostIRError if no strategy lowers the fusion.
        """
        candidates = candidates_of(self.program, self.platform, self.kernels)
        if not candidates.programs:
            lower(self.program, SEQUENTIAL)  # raises the reason
        return candidates

    @cached_property
    def measurable(self) -> Candidates:
        """The candidates that can be measured. On a CPU they include candidates that run on it only for testing."""
        return candidates_of(self.program, self.platform, self.kernels, for_testing=True)

    def measurements(self, sizes: Mapping[str, int]) -> Entries:
        """Return the measurements for these sizes in this process's cache."""
        if self.platform.machine in (SIMULATED, ELSEWHERE):
            return {}
        return cache.read(cache.key_of(self.program, sizes, self.platform))

    def choice(self, sizes: Mapping[str, int], entries: Entries | None = None, calls: str | None = None) -> Choice:
        """Return the choice for these sizes: the fastest candidate by measurements or, without any, by estimates.

        Args:
            sizes: a value for each of the fusion's symbols.
            entries: the measurements; None for the measurements in this process's cache.
            calls: how calls are made; None for the decider's field `calls`.
        """
        candidates, calls = self.candidates, calls or self.calls
        notes = list(candidates.not_overlapped)
        entries = self.measurements(sizes) if entries is None else entries
        measured, unfit = self._measured(sizes, entries, calls)
        if measured:
            return self._fastest(MEASURED, measured, unfit, notes)
        timings, impossible = self.estimates(sizes, calls)
        known = {candidate: entry.refusal(calls) for candidate, entry in (entries or {}).items()}
        refused = {each.candidate: each for each in unfit if each.reason == known.get(each.candidate)}
        if others := tuple(timing for timing in timings if timing.candidate not in refused):
            timings, impossible = others, (*impossible, *refused.values())
        if self.platform.note:
            notes.append(self.platform.note)
        nothing_overlaps = not any(overlaps(timing.candidate.strategy) for timing in timings)
        source = FALLBACK if nothing_overlaps and _communicates(candidates.programs.values()) else ESTIMATED
        return self._fastest(source, timings, impossible, notes)

    def estimates(
        self, sizes: Mapping[str, int], calls: str | None = None
    ) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]]:
        """Return the estimated times of the candidates, and the impossible candidates. See `choice` for `calls`."""
        return estimated(self.candidates, self.platform, sizes, calls or self.calls, self.limit)

    def program_of(self, candidate: Candidate) -> Program:
        """Return the host program of a chosen candidate."""
        programs = self.candidates.programs
        return programs[candidate] if candidate in programs else self.measurable.programs[candidate]

    def fits(self, program: Program, sizes: Mapping[str, int]) -> bool:
        """Return True if a candidate's program can run with these sizes and stays within the memory limit."""
        if program.misfits(sizes):
            return False
        return self.limit is None or symmetric_bytes(program, sizes) <= self.limit

    def _measured(
        self, sizes: Mapping[str, int], entries: Entries, calls: str
    ) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]]:
        """Return the measured times of candidates, and the candidates that are left out, with the reasons.

        Only measurements of the programs that the candidates have now are valid.
        """
        if not entries:
            return (), ()
        timings: list[Timing] = []
        impossible = list(self.measurable.impossible)
        for candidate, program in self.measurable.programs.items():
            entry = entries.get(candidate)
            if entry is None or entry.digest != program.digest:
                impossible.append(Impossible(candidate, UNMEASURED))
            elif refusal := entry.refusal(calls):
                impossible.append(Impossible(candidate, refusal, warn=bool(entry.failure)))
            elif (us := entry.time(calls)) is None:
                impossible.append(Impossible(candidate, UNMEASURED))
            elif refusal := _too_large(symmetric := symmetric_bytes(program, sizes), self.limit):
                impossible.append(Impossible(candidate, refusal, warn=True))
            else:
                plain = entry.plain and calls == "out"
                timings.append(Timing(candidate, us, entry.eager, entry.graph, symmetric, plain))
        return tuple(timings), tuple(impossible)

    def _fastest(
        self, source: str, timings: tuple[Timing, ...], impossible: tuple[Impossible, ...], notes: list[str]
    ) -> Choice:
        """Return the choice of the fastest candidate."""
        ranked = tuple(sorted(timings, key=lambda timing: timing.us))
        machine = str(self.platform)
        hosts = stated_hosts(self.program)
        return Choice(self.program.name, ranked[0].candidate, source, machine, ranked, impossible, tuple(notes), hosts)


def _communicates(programs: Iterable[Program]) -> bool:
    """Return True if one of the programs has a collective, so that there is something to overlap."""
    return any(s.collective for program in programs for s in program.walk())


def symmetric_bytes(program: Program, sizes: Mapping[str, int]) -> int:
    """Return the number of bytes of symmetric memory that a program uses on the rank that uses most of it.

    Gaps between buffers do not count.
    """
    if not shares_memory(program):
        return 0
    ranks = {mesh.devices[0] for mesh in program.meshes}  # all ranks of a mesh use the same number of bytes
    return max(unroll(program, rank, sizes).memory[1] for rank in ranks)


def _too_large(symmetric: int, limit: int | None) -> str:
    """Return the reason to refuse a program that uses `symmetric` bytes on a rank; empty if this is within `limit`."""
    if limit is None or symmetric <= limit:
        return ""
    return f"it takes {amount(symmetric)} of symmetric memory on a rank, and the limit is {amount(limit)}"


def estimated(
    candidates: Candidates, platform: Platform, sizes: Mapping[str, int], calls: str, limit: int | None = None
) -> tuple[tuple[Timing, ...], tuple[Impossible, ...]]:
    """Return the estimated times of the candidates, and the impossible candidates.

    A candidate is impossible if the sizes do not fit its program, or if it needs more than `limit` bytes of symmetric
    memory on a rank. Raises HostIRError if the sizes do not fit the sequential program.
    """
    timings: list[Timing] = []
    impossible = list(candidates.impossible)
    # By the id of the program, because candidates with other kernels share it.
    simulated: dict[int, tuple[Sequence[CostTask], int]] = {}
    for candidate, program in candidates.programs.items():
        try:
            program.check_whole(sizes)
            if id(program) not in simulated:
                simulated[id(program)] = (
                    tasks_to_simulate(program, sizes, platform.hosts),
                    symmetric_bytes(program, sizes),
                )
            tasks, symmetric = simulated[id(program)]
            if refusal := _too_large(symmetric, limit):
                impossible.append(Impossible(candidate, refusal, warn=True))
                continue
            timings.append(_estimate(candidate, program, tasks, platform, calls, symmetric))
        except HostIRError as misfit:
            if candidate.strategy == SEQUENTIAL:
                raise
            impossible.append(Impossible(candidate, misfit.diagnostics[0].message, warn=True))
    return tuple(timings), tuple(impossible)


def _estimate(
    candidate: Candidate, program: Program, tasks: Sequence[CostTask], platform: Platform, calls: str, symmetric: int
) -> Timing:
    # Simulated ranks compute with ATen, but they stand for a GPU, which would use its fastest kernels.
    kernels = ("cublas", "triton") if platform.machine == SIMULATED else (candidate.kernels,)
    by_kernels = [estimates(tasks, platform.hardware, name) for name in kernels]
    eager, graph = (round(min(times[mode] for times in by_kernels), 1) for mode in (EAGER, GRAPH))
    replays = platform.computes != "cpu" or platform.machine == SIMULATED
    by_caller = uses_nccl(program) or driver_calls(tasks) <= FEW
    us = ranked_by(calls, eager, graph if replays else None, captured_by_caller=by_caller)
    assert us is not None
    return Timing(candidate, us, eager, graph if replays else None, symmetric)


def log_choice(choice: Choice) -> None:
    """Log a choice, the next best candidates, the impossible strategies and the communications that do not overlap."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    next_best = "".join(f"; '{timing.candidate}' {timing.us:.0f} us" for timing in choice.timings[1:3])
    LOG.info("%s%s", choice, next_best)
    for clause in (*choice.fallbacks, *choice.notes):
        LOG.info("@%s: %s", choice.fusion, clause)


def warn_fallbacks(program: Program, choice: Choice, group: Any = None) -> None:
    """Warn that strategies or overlaps are not possible here. Only rank 0 warns, once for each fusion and reason."""
    first = None if group is None else rank_here(None, group) == 0
    hint = "'hostir explain' lists all ways to run it, with their times or the reasons why they are not possible"
    if choice.source == ASKED_FOR:
        hint = "'pipeline' slices any communication along a Stream axis; 'auto' takes the fastest strategy"
    messages = [f"@{choice.fusion} runs '{choice.taken}', as {clause}." for clause in choice.fallbacks]
    messages += [f"In @{choice.fusion} {note}." for note in choice.notes if f" is {NOT_OVERLAPPED}: " in note]
    for message in messages:
        warn_once((program.digest, message), message, hint, first=first)


def _encoded(decide: Callable[[], dict[str, Any]]) -> str:
    """Call `decide`. Return its result or its error as a text for the other ranks."""
    try:
        return json.dumps(decide())
    except HostIRError as refusal:
        first = refusal.diagnostics[0]
        return json.dumps({"refusal": [first.message, first.expected, first.hint]})
    except Exception as problem:  # the other ranks must hear of any error, or they would wait
        return json.dumps({"refusal": [f"rank 0 could not choose: {type(problem).__name__}: {problem}", "", ""]})


def _decoded(text: str) -> dict[str, Any]:
    """Decode the text that `_encoded` returns. Return the result of `decide`, or raise its error."""
    data: dict[str, Any] = json.loads(text)
    if "refusal" in data:
        message, expected, hint = data["refusal"]
        raise error(message, expected=expected, hint=hint)
    return data


def program_of(fusion: Program, choice: Choice) -> Program:
    """Return the host program of the chosen candidate."""
    return lower(with_hosts(fusion, choice.hosts), choice.strategy, choice.streams)
