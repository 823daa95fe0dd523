"""Estimate the memory that a program needs and find the memory that the host has. Report if the host has too little."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path

from hostir.ir.op import Statement, Value
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, amount, error
from hostir.ir.types import bind_shape

SMALLER = "choose smaller sizes, or fewer ranks"
SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


class Room:
    """The memory that a host program takes for one set of sizes.

    A rank holds its parts of the inputs, and the buffers that are not freed yet. Simulated ranks (`frees=False`) keep
    all buffers, and two copies of the inputs. Copies by `dense` are not counted, because they depend on the caller's
    strides.

    Fields:
        inputs: the number of bytes of the unsharded inputs.
        ranks: for each rank, the largest number of bytes that it holds at once.
    """

    def __init__(self, program: Program, sizes: Mapping[str, int], *, frees: bool = True) -> None:
        self.sizes = sizes
        self.frees = frees
        self.inputs = sum(prod(bind_shape(v.tensor.shape, sizes)) * v.tensor.dtype.bytes for v in program.inputs)
        meshes = [mesh.devices for mesh in program.meshes]
        of_meshes = cache(lambda mine: self._of_rank(program, mine))  # ranks of the same meshes hold equally many
        self.ranks = [of_meshes(tuple(rank in devices for devices in meshes)) for rank in range(program.ranks)]
        self.name = program.name

    def check(self, total: int, there: int, where: str, has: str, whole: str = "") -> None:
        """Raise HostIRError if `total` bytes are needed, but only `there` bytes are available.

        The other arguments are parts of the message. `where` says where the bytes are needed, `has` describes the
        available bytes, and `whole` is a remark on the unsharded inputs.
        """
        if total <= there:
            return
        raise error(
            f"@{self.name} takes {amount(total)} {where}: {amount(max(self.ranks, default=0))} a rank, "
            f"and {amount(self.inputs)} for whole inputs{whole}",
            expected=f"at most {amount(there)}, {has}",
            hint=SMALLER,
        )

    def _of_rank(self, program: Program, mine: tuple[bool, ...]) -> int:
        meshes = {mesh.name for mesh, belongs in zip(program.meshes, mine, strict=True) if belongs}
        inputs = sum(self._part(v, meshes) for v in program.inputs)
        return inputs * (1 if self.frees else 2) + self._most(program.body, meshes)[0]

    def _part(self, value: Value, meshes: set[str]) -> int:
        type = value.tensor
        if type.mesh is not None and type.mesh.name not in meshes:
            return 0
        return prod(bind_shape(type.local_shape, self.sizes)) * type.dtype.bytes

    def _most(self, body: tuple[Statement, ...], meshes: set[str]) -> tuple[int, int]:
        """Return two numbers of bytes: the most that the buffers of a body take at once, and what they take at its end.

        Only buffers on the meshes `meshes` are counted.
        """
        most = now = 0
        for s in body:
            if s.buffer is not None:
                now += self._part(s.buffer, meshes)
            elif s.freed is not None and self.frees:
                now -= self._part(s.freed, meshes)
            for inner in s.bodies:
                rounds = s.repeats.bind(self.sizes)
                inside, left = self._most(inner, meshes)
                most = max(most, now + left * (rounds - 1) + inside)
                now += left * rounds
            most = max(most, now)
        return most, now


def of_host() -> int:
    """Return the number of bytes of memory of this host; the limit of this container if it is lower."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def free_here() -> int:
    """Return the number of bytes of memory that are free on this host, including free swap space.

    The result is at most the limit of this container.
    """
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left = sum(int(rows[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        left = of_host()
    return min([left, *_limits()])


def _limits() -> Iterator[int]:
    for file in LIMITS:
        with suppress(OSError, ValueError):  # without a limit, the file holds a word instead of a number
            yield int(Path(file).read_text())


def lacks_memory(problem: BaseException) -> bool:
    """Return True if an exception of Python or torch means that an allocation failed."""
    return isinstance(problem, MemoryError) or any(sign in str(problem) for sign in SIGNS)


def out_of_memory(problem: BaseException, what: str = "it") -> HostIRError:
    """Return the error to report for a failed allocation. `what` is the thing that needs the memory."""
    reason = f": {str(problem).splitlines()[0]}" if str(problem) else ""
    return error(f"there is not enough memory for {what}{reason}", hint=SMALLER)


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Return a context manager that turns a failed allocation into a HostIRError. The message names `what`."""
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not lacks_memory(problem):
            raise
        raise out_of_memory(problem, what) from problem
