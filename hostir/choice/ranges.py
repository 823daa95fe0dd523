"""Choose by ranges of sizes, for a fusion whose sizes are known at its calls only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from hostir.choice.cache import Entries, Entry
from hostir.choice.candidates import SEQUENTIAL
from hostir.choice.choices import Candidate, Choice
from hostir.choice.decision import Decider, check_sizes, decider_for, from_rank_0, log_choice, warn_fallbacks
from hostir.ir.program import Program

LARGEST = 16  # 2 to this power is the largest size that is chosen for; larger ones run the same


@dataclass(frozen=True)
class Range:
    """The values of a size that run alike, with a choice for one of them: `first` to `last`, or all from `first` on."""

    first: int
    last: int | None
    choice: Choice

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first} on" if self.first else "of any value"
        return f"from {self.first} to {self.last}"


class Ranges:
    """The choices for a fusion with free sizes: each is made for a power of two nearby.

    What is chosen is a function of the sizes, alike on all ranks, which need not talk. Choices are made when they are
    first asked for.

    Args:
        decider: chooses for given sizes.
        given: sizes that are not free.
        measured: what was measured, by `key` of the sizes; None: what this process's cache holds.
    """

    def __init__(
        self, decider: Decider, given: Mapping[str, int], measured: Mapping[str, Entries] | None = None
    ) -> None:
        self.decider = decider
        self.given = dict(given)
        self.free = free_sizes(decider.program, given)
        self.measured = measured
        self.multiples = {name: _multiple(name, decider) for name in self.free}
        self.choices: dict[str, Choice] = {}  # by key

    @property
    def fusion(self) -> str:
        """The name of the fusion."""
        return self.decider.program.name

    def representative(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes that the choice for these is made for: powers of two, or what fits all programs nearby."""
        return self.given | {n: _fitting(1 << _power(sizes[n]), self.multiples[n]) for n in self.free}

    def choice(self, sizes: Mapping[str, int]) -> Choice:
        """Return the choice for sizes of a call."""
        taken = self.representative(sizes)
        name = key(taken)
        if name not in self.choices:
            known = None if self.measured is None else self.measured.get(name, {})
            self.choices[name] = self.decider.choice(taken, known)
            log_choice(self.choices[name])
        return self.choices[name]

    def candidate(self, sizes: Mapping[str, int]) -> Candidate:
        """Return the fastest candidate whose program these sizes fit; if none does, the one that says why."""
        ranked = [timing.candidate for timing in self.choice(sizes).timings]
        fitting = (c for c in ranked if self.decider.fits(self.program(c), sizes))
        plain = (c for c in ranked if c.strategy == SEQUENTIAL)
        return next(fitting, None) or next(plain, ranked[0])

    def program(self, candidate: Candidate) -> Program:
        """Return the program of a candidate that was chosen."""
        return self.decider.program_of(candidate)

    @cached_property
    def plain(self) -> Program:
        """The program that divides sizes least: the sequential one, where it lowers."""
        return next(iter(self.decider.found.programs.values()))

    @property
    def largest(self) -> dict[str, int]:
        """The largest sizes, if one is free; else sizes whose product is as large, since rows may be a product."""
        return dict.fromkeys(self.free, 1 << LARGEST // max(len(self.free), 1))

    @property
    def representatives(self) -> list[dict[str, int]]:
        """The sizes that choices are made for, if one size is free; none if several are, whose values are too many."""
        if len(self.free) > 1:
            return []
        every = [self.representative({self.free[0]: 1 << power}) for power in range(LARGEST + 1)]
        return [sizes for i, sizes in enumerate(every) if sizes not in every[:i]]

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges of the free size, neighbours that run alike as one; none if several sizes are free."""
        found: list[Range] = []
        for power in range(LARGEST + 1) if len(self.free) == 1 else ():
            choice, first = self.choice({self.free[0]: 1 << power}), _first(power)
            if found and found[-1].choice.taken == choice.taken:
                continue
            if found:
                found[-1] = replace(found[-1], last=first - 1)
            found.append(Range(first, None, choice))
        return tuple(found)

    def __str__(self) -> str:
        machine = self.decider.platform
        if len(self.free) > 1:
            return f"@{self.fusion} runs on {machine} as is chosen for the {', '.join(self.free)} of each call"
        (name,) = self.free
        lines = [f"  {name} {it}: '{it.choice.taken}' ({it.choice.source})" for it in self.ranges]
        return "\n".join([f"@{self.fusion} runs on {machine}, by the {name} of each call:", *lines])

    def to_json(self) -> dict[str, Any]:
        """Return the ranges as data for tools."""
        ranges = [{"first": it.first, "last": it.last, "choice": it.choice.to_json()} for it in self.ranges]
        return {"fusion": self.fusion, "free": list(self.free), "given": self.given, "ranges": ranges}


def free_sizes(program: Program, given: Mapping[str, int]) -> tuple[str, ...]:
    """Return the symbols of a fusion that are not given and follow from the shapes of its inputs, in order."""
    bound = {name for value in program.inputs for name in value.tensor.names}
    return tuple(sorted((program.size_names & bound) - given.keys()))


def agreed_ranges(
    program: Program,
    given: Mapping[str, int],
    kernels: str | None = None,
    machine: str | None = None,
    calls: str = "out",
    symmetric_limit: int | None = None,
    group: Any = None,
    warn: bool = True,
) -> Ranges:
    """Return the ranges of a fusion, alike on all ranks, which call it together: rank 0 says what was measured.

    Log, and with `warn` warn, as `choose` does, of what is chosen for the largest sizes.
    """
    decider = decider_for(program, kernels, machine, calls, symmetric_limit, group)
    ranges = Ranges(decider, given)
    check_sizes(program, ranges.representative(ranges.largest))
    agreed, speaks = from_rank_0(machine, group, lambda: _encoded(ranges))
    ranges.measured = {name: {Candidate(*c): Entry(*e) for c, e in entries} for name, entries in agreed.items()}
    choice = ranges.choice(ranges.largest)
    if warn and speaks:
        warn_fallbacks(program, choice, group)
    return ranges


def key(sizes: Mapping[str, int]) -> str:
    """Return sizes as text, such as `K=64 M=4096`."""
    return " ".join(f"{name}={value}" for name, value in sorted(sizes.items()))


def _encoded(ranges: Ranges) -> dict[str, Any]:
    """Return what this process's cache holds for the sizes that choices are made for."""
    entries = {key(sizes): ranges.decider.measurements(sizes) for sizes in ranges.representatives}
    return {
        name: [(list(asdict(candidate).values()), list(asdict(entry).values())) for candidate, entry in found.items()]
        for name, found in entries.items()
        if found
    }


# Powers of two --------------------------------------------------------------------------------------------------------
# A size runs as the power of two of which it is at least 3/4 and less than 3/2: 3072 to 6143 run as 4096.


def _power(size: int) -> int:
    """Return the power of two that stands for a size."""
    power = max(size, 1).bit_length() - 1
    return min(power + (size >= 3 << power - 1) if power else 0, LARGEST)


def _first(power: int) -> int:
    """Return the smallest size that a power of two stands for."""
    return (0, 2)[power] if power < 2 else 3 << power - 2


def _fitting(size: int, multiple: int) -> int:
    """Return the multiple nearest to a size, at least one."""
    return max(round(size / multiple), 1) * multiple


def _multiple(name: str, decider: Decider) -> int:
    """Return what a size must be a multiple of to fit all candidates."""
    sizes = [d.size for program in decider.found.programs.values() for d in program.divisions]
    return lcm(*(size.den for size in sizes if name in size.names))
