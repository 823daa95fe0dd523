"""Choose for ranges of sizes, for a fusion with free sizes: symbols that only the inputs of a call determine.

Choices are made for powers of two. A power of two stands for the sizes from 3/4 of it to just below 3/2 of it. For
example, 4096 stands for 3072 to 6143.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from hostir.choice import cache
from hostir.choice.cache import Entries, Entry
from hostir.choice.candidates import SEQUENTIAL
from hostir.choice.choices import BEING_MEASURED, MEASURED, Candidate, Choice, Impossible, Timing, TrialState
from hostir.choice.decision import Decider, check_sizes, decider_for, from_rank_0, log_choice, warn_fallbacks
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, warn_once

LARGEST = 16  # the exponent of the largest size that choices are made for; it stands for all larger sizes as well
MOST_RIVALS = 8  # candidates with the shortest estimates that a trial compares; NCCL + cuBLAS is always added
_numbers = itertools.count(1)
UNTRIED = "not tried: its estimate is longer than those of the candidates that were tried"


@dataclass(frozen=True)
class Range:
    """The values of a size from `first` to `last`, all with the same choice.

    If `last` is None, the range has no end.
    """

    first: int
    last: int | None
    choice: Choice

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first} on" if self.first else "of any value"
        return f"from {self.first} to {self.last}"


class Ranges:
    """The choices for a fusion with free sizes. Each choice is made for powers of two near the sizes of a call.

    A choice is made when a call first needs it. It depends only on the sizes and the measurements, so all ranks make
    the same choice without communicating. A trial may replace it later.

    Args:
        decider: makes the choice for one set of sizes.
        fixed: the sizes that are not free.
        measured: the measurements, by `key` of the sizes; None to read the measurements in this process's cache.

    Fields:
        budget: the seconds that a trial may add to the calls of a range; 0 for no trials.
        number: a number that is the same on all ranks, and different for each object of a group of ranks.
    """

    budget = 0.0
    number = 0

    def __init__(
        self, decider: Decider, fixed: Mapping[str, int], measured: Mapping[str, Entries] | None = None
    ) -> None:
        self.decider = decider
        self.fixed = dict(fixed)
        self.free = free_sizes(decider.program, fixed)
        self.measured = measured
        self.multiples = {name: _multiple(name, decider) for name in self.free}
        self.choices: dict[str, Choice] = {}  # by `key` of the sizes
        self.compiling: dict[str, list[float]] = {}  # seconds to plan each challenger of trials, by its kernels
        self.failed: set[Candidate] = set()  # candidates of which a call failed in a trial, on any rank

    @property
    def fusion(self) -> str:
        """The name of the fusion."""
        return self.decider.program.name

    def representative(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes for which the choice is made if a call has the sizes `sizes`.

        A free size is replaced by a power of two. The power is rounded to a multiple of the number by which the size
        must be divisible in every candidate.
        """
        return self.fixed | {n: _fitting(1 << _power(sizes[n]), self.multiples[n]) for n in self.free}

    def choice(self, sizes: Mapping[str, int]) -> Choice:
        """Return the choice for the sizes of a call."""
        representative = self.representative(sizes)
        name = key(representative)
        if name not in self.choices:
            self.choices[name] = self.decider.choice(representative, self._entries(name))
            log_choice(self.choices[name])
        return self.choices[name]

    def _entries(self, name: str) -> Entries | None:
        return None if self.measured is None else self.measured.get(name, {})

    def candidate(self, sizes: Mapping[str, int]) -> Candidate:
        """Return the fastest candidate with a program that can run with these sizes.

        If no program can, return the sequential candidate. Its executor raises the reason.
        """
        return self._fitting(self.choice(sizes), sizes)

    def fits(self, candidate: Candidate, sizes: Mapping[str, int]) -> bool:
        """Return True if a candidate can run calls with these sizes."""
        return self.decider.fits(self.program(candidate), sizes)

    def _fitting(self, choice: Choice, sizes: Mapping[str, int]) -> Candidate:
        ranked = [choice.taken, *(timing.candidate for timing in choice.timings)]
        everything = [*ranked, *self.decider.candidates.programs]  # a trial may have left a sequential one out
        sequential = [candidate for candidate in everything if candidate.strategy == SEQUENTIAL]
        fitting = (candidate for candidate in (*ranked, *sequential) if self.fits(candidate, sizes))
        return next(fitting, None) or next(iter(sequential), choice.taken)

    def rivals(self, sizes: Mapping[str, int]) -> tuple[Timing, ...]:
        """Return the candidates that a trial should compare in calls with these sizes, with their estimated times.

        The fastest comes first: by measurements if some were measured before, else by estimates. The tuple is empty if
        there is nothing to compare, or if all were measured before.
        """
        if not self.budget:
            return ()
        choice = self.choice(sizes)
        best = choice.taken if choice.source == MEASURED else None
        timings = self.decider.estimates(self.representative(sizes))[0]
        fitting = [t for t in timings if t.candidate not in self.failed and self.fits(t.candidate, sizes)]
        fitting.sort(key=lambda timing: (timing.candidate != best, timing.us))
        rivals = fitting[:MOST_RIVALS]
        sequential = [timing for timing in fitting if timing.candidate.strategy == SEQUENTIAL]
        by_library = [timing for timing in sequential if timing.candidate.kernels != "triton"]
        rivals += [timing for timing in (by_library or sequential)[:1] if timing not in rivals]
        measured = {timing.candidate for timing in choice.timings} if choice.source == MEASURED else set()
        if len(rivals) < 2 or all(timing.candidate in measured for timing in rivals):
            return ()
        return tuple(rivals)

    def tried(
        self, sizes: Mapping[str, int], choice: Choice, estimates: Sequence[Timing], writes: bool, progress: TrialState
    ) -> None:
        """Replace the choice for the sizes of a call by the result of a trial so far.

        Args:
            sizes: the sizes of the call.
            choice: the choice before the trial.
            estimates: the candidates of the trial, with their estimated times.
            writes: True if this rank writes the measurements to the cache when the trial has ended.
            progress: the state of the trial.
        """
        timings = [
            replace(timing, us=round(us, 1), eager=None, graph=progress.replays.get(it), plain=it in progress.plain)
            for timing in estimates
            if (us := progress.times.get(it := timing.candidate)) is not None
        ]
        refused = [Impossible(candidate, reason) for candidate, reason in progress.refused.items()]
        if not progress.done:
            source = f"{BEING_MEASURED} ({progress.tried} of {progress.rivals})"
        else:
            source = MEASURED if timings else choice.source
        left = choice.timings if timings and progress.done else ()
        tried = progress.times.keys() | progress.refused.keys()
        refused += [Impossible(timing.candidate, UNTRIED) for timing in left if timing.candidate not in tried]
        taken = f"its trial took {progress.seconds:.1f} s, of which compiling took {progress.compiling:.1f} s"
        self.choices[key(self.representative(sizes))] = replace(
            choice,
            taken=progress.best,
            source=source,
            timings=tuple(sorted(timings, key=lambda timing: (timing.us, timing.candidate != progress.best)))
            or (choice.timings if progress.done else ()),
            impossible=(*(each for each in choice.impossible if each.candidate not in tried), *refused),
            notes=(*choice.notes, taken) if timings and progress.done else choice.notes,
        )
        if progress.done:
            log_choice(self.choices[key(self.representative(sizes))])
            if writes:
                self._keep(sizes, progress)

    def _keep(self, sizes: Mapping[str, int], progress: TrialState) -> None:
        """Write the measurements of a trial to the cache. Warn once if that is not possible."""
        calls, replays, plain = self.decider.calls, progress.replays, progress.plain
        entries = {
            it: Entry.of(self.program(it).digest, calls, us, replays.get(it), it in plain)
            for it, us in progress.times.items()
        }
        try:
            if entries:
                sizes = self.representative(sizes)
                cache.write(cache.key_of(self.decider.program, sizes, self.decider.platform), self.fusion, entries)
        except HostIRError as refusal:
            message = f"The times of @{self.fusion} are not kept: {refusal.diagnostics[0].message}"
            warn_once(("not kept", cache.folder()), message, "HOSTIR_CACHE names another folder", cache.CacheWarning)

    def program(self, candidate: Candidate) -> Program:
        """Return the program of a chosen candidate."""
        return self.decider.program_of(candidate)

    @cached_property
    def first_program(self) -> Program:
        """The program of the first candidate.

        If possible this is the sequential program, because it accepts the most sizes.
        """
        return next(iter(self.decider.candidates.programs.values()))

    @property
    def largest(self) -> dict[str, int]:
        """The largest sizes for which choices are made.

        If several sizes are free, each gets a smaller value, so that their product stays about the same. The number of
        rows may be this product.
        """
        return dict.fromkeys(self.free, 1 << LARGEST // max(len(self.free), 1))

    @property
    def representatives(self) -> list[dict[str, int]]:
        """All sizes for which choices are made, if only one size is free.

        The list is empty if several sizes are free, because there would be too many combinations.
        """
        if len(self.free) != 1:
            return [] if self.free else [self.fixed]
        sizes = [self.representative({self.free[0]: 1 << power}) for power in range(LARGEST + 1)]
        return [row for i, row in enumerate(sizes) if row not in sizes[:i]]

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges of the free size. In a range, the chosen candidate and the field `source` are the same.

        The tuple is empty if several sizes are free.
        """
        ranges: list[Range] = []
        for power in range(LARGEST + 1) if len(self.free) == 1 else ():
            choice, first = self.choice({self.free[0]: 1 << power}), _first(power)
            if ranges and (ranges[-1].choice.taken, ranges[-1].choice.source) == (choice.taken, choice.source):
                continue
            if ranges:
                ranges[-1] = replace(ranges[-1], last=first - 1)
            ranges.append(Range(first, None, choice))
        return tuple(ranges)

    def __str__(self) -> str:
        machine = self.decider.platform
        if len(self.free) > 1:
            return f"@{self.fusion} runs on {machine} as is chosen for the {', '.join(self.free)} of each call"
        (name,) = self.free
        lines = [f"  {name} {row}: '{row.choice.taken}' ({row.choice.status})" for row in self.ranges]
        return "\n".join([f"@{self.fusion} runs on {machine}, by the {name} of each call:", *lines])

    def to_json(self) -> dict[str, Any]:
        """Return the ranges as a JSON object for tools."""
        ranges = [{"first": row.first, "last": row.last, "choice": row.choice.to_json()} for row in self.ranges]
        return {"fusion": self.fusion, "free": list(self.free), "given": self.fixed, "ranges": ranges}


def free_sizes(program: Program, fixed: Mapping[str, int]) -> tuple[str, ...]:
    """Return the symbols of a fusion that are not fixed and that follow from the shapes of its inputs, sorted."""
    bound = {name for value in program.inputs for name in value.tensor.names}
    return tuple(sorted((program.size_names & bound) - fixed.keys()))


def agreed_ranges(
    program: Program,
    fixed: Mapping[str, int],
    kernels: str | None = None,
    machine: str | None = None,
    calls: str = "out",
    symmetric_limit: int | None = None,
    group: Any = None,
    warn: bool = True,
    budget: float = 0.0,
) -> Ranges:
    """Return the ranges of a fusion, the same on all ranks. All ranks call this, and rank 0 sends its measurements.

    The `calls` of rank 0 count, because all ranks must time the same calls. So does its `budget`, the field of
    `Ranges`. The choice for the largest sizes is made and logged at once. If `warn` is True, rank 0 warns of the
    strategies and overlaps that are not possible for these sizes.
    """
    decider = decider_for(program, kernels, machine, calls, symmetric_limit, group)
    ranges = Ranges(decider, fixed)
    check_sizes(program, ranges.representative(ranges.largest))
    mine = {"budget": budget, "calls": decider.calls}
    data, first = from_rank_0(machine, group, lambda: {**_encoded(ranges), **mine, "number": next(_numbers)})
    ranges.budget, ranges.number, decider.calls = data["budget"], data["number"], data["calls"]
    ranges.choices = {key(ranges.representative(ranges.largest)): Choice.from_json(data["choice"])}
    ranges.measured = {name: {Candidate(*c): Entry(*e) for c, e in each} for name, each in data["measured"].items()}
    choice = ranges.choice(ranges.largest)
    if warn and first:
        warn_fallbacks(program, choice, group)
    return ranges


def key(sizes: Mapping[str, int]) -> str:
    """Return sizes as a text, such as `K=64 M=4096`."""
    return " ".join(f"{name}={value}" for name, value in sorted(sizes.items()))


def _encoded(ranges: Ranges) -> dict[str, Any]:
    """Return the measurements in this process's cache and the choice for the largest sizes, as a JSON object."""
    decider = ranges.decider
    known = cache.sizes_of(decider.program, decider.platform)
    measured = {key(sizes): decider.measurements(sizes) for sizes in known}
    rows = {
        name: [(list(asdict(candidate).values()), list(asdict(entry).values())) for candidate, entry in entries.items()]
        for name, entries in measured.items()
        if entries
    }
    return {"measured": rows, "choice": ranges.choice(ranges.largest).to_json()}


def _power(size: int) -> int:
    """Return the exponent of the power of two that stands for a size."""
    power = max(size, 1).bit_length() - 1
    return min(power + (size >= 3 << power - 1) if power else 0, LARGEST)


def _first(power: int) -> int:
    """Return the smallest size for which `_power` returns this exponent."""
    return (0, 2)[power] if power < 2 else 3 << power - 2


def _fitting(size: int, multiple: int) -> int:
    """Return the multiple of `multiple` that is nearest to `size`, but at least `multiple` itself."""
    return max(round(size / multiple), 1) * multiple


def _multiple(name: str, decider: Decider) -> int:
    """Return the smallest n such that every candidate can run with every multiple of n as the size `name`."""
    sizes = [d.size for program in decider.candidates.programs.values() for d in program.divisions]
    return lcm(*(size.den for size in sizes if name in size.names))
