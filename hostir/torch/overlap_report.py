"""The report of the overlap pass: what became of each collective, and estimates of those that were left alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node

from hostir.choice.platforms import Platform, platform_like
from hostir.choice.simulation import collective_us
from hostir.ir.source import counted
from hostir.job.guest import registered
from hostir.torch.ops.running import MACHINES


@dataclass(frozen=True)
class Visited:
    """A collective that the pass has seen.

    Fields:
        graph: the number of the collective's graph, counted from 1.
        node: the name of the collective's node in the graph.
        collective: the name of the collective, such as `all_gather_into_tensor`.
        group: the name of the process group.
        fused: the name of the fused operator that replaced the collective. Empty if the collective was not fused.
        why: if the collective was fused, a text that says what it was fused with, such as `2 products`. Otherwise the
            reason why it was not fused.
        us: an estimate of the microseconds of the unfused collective, if nothing else runs. None if its size or its
            machine is unknown.
        machine: the machine that `us` is estimated for. Empty for an unknown machine.
    """

    graph: int
    node: str
    collective: str
    group: str
    fused: str
    why: str
    us: float | None = None
    machine: str = ""

    def __str__(self) -> str:
        fate = f"{self.fused}, {self.why}" if self.fused else f"left alone: {self.why}"
        return f"graph {self.graph}, {self.node} ({self.collective} on group '{self.group}'): {fate}"


NOTHING_SEEN = "the pass has seen no collective: the graph has none, or Inductor took it from its cache"
OPERATORS = (  # the fused operators that the pass inserts
    "hostir::all_gather_matmul",
    "hostir::all_gather_scaled_matmul",
    "hostir::matmul_reduce_scatter",
    "hostir::scaled_matmul_reduce_scatter",
    "hostir::matmul_all_reduce",
    "hostir::all_reduce_residual_norm",
    "hostir::reduce_scatter_residual_norm",
)


class Overlaps(tuple[Visited, ...]):
    """The report of the pass: the collectives that it has seen, and the number of calls of fused operators.

    The tuple has one `Visited` for each collective that the pass has seen. `print` shows a line for each collective, a
    line with the numbers of calls, and a summary: how many collectives were fused, how many were left alone, and the
    estimated time of each that was left alone.

    Fields:
        ran: the number of calls of fused operators since the report began, by operator and group. All calls count:
            calls from graphs that the pass has changed, calls from graphs in Inductor's cache, calls by hostir's
            layers, and direct calls.
    """

    ran: Mapping[tuple[str, str], int] = MappingProxyType({})

    def __str__(self) -> str:
        lines = [*map(str, self)] or [NOTHING_SEEN]
        calls = [f"{op} on group '{group}', {counted(n, 'call')}" for (op, group), n in self.ran.items()]
        if calls or not self:
            lines.append(f"ran since the report began: {'; '.join(calls) or 'no fused operator'}")
        return "\n".join([*lines, *([self.summary] if self else [])])

    @property
    def summary(self) -> str:
        """The number of collectives that were fused, the number that were left alone, and what each of these costs."""
        left = [visit for visit in self if not visit.fused]
        head = f"{counted(len(self) - len(left), 'collective')} fused, {len(left)} left alone"
        if not left:
            return head
        machines = " and ".join(dict.fromkeys(visit.machine for visit in left if visit.machine))
        costs = ", ".join(f"{visit.node} of graph {visit.graph} {_cost(visit.us)}" for visit in left)
        return f"{head}: {costs}{f' (estimated for {machines})' if machines else ''}"


def _cost(us: float | None) -> str:
    return "of unknown time" if us is None else f"about {us:.0f} us"


def operands_of(collective: Node) -> list[Tensor]:
    """Return the fake tensors that a collective reads. A coalesced collective reads a list of tensors."""
    operands: Any = collective.args[0]
    return [node.meta["val"] for node in (operands if isinstance(operands, list | tuple) else [operands])]


def platform_of_group(group: str, device: torch.device) -> Platform | None:
    """Return the platform of a process group. It assumes that all ranks have devices like `device` of this rank.

    The ranks do not communicate, because a pass may run on some ranks only. Returns None if torch has no such group, or
    if this process has no such device.
    """
    members = registered(group)
    if members is None or device.type not in MACHINES:
        return None
    index = device.index or 0
    if device.type == "cuda" and index >= torch.cuda.device_count():
        return None
    return platform_like(MACHINES[device.type], index, dist.get_process_group_ranks(members))


KEYWORDS = {  # the beginnings of names of torch's collectives, and the names that the cost model uses
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
}


def alone_us(collective: Node, name: str, platform: Platform) -> float | None:
    """Estimate the microseconds of a collective if nothing else runs. Returns None if its size is unknown.

    Symbolic sizes count as their values in the call for which the graph was traced.
    """
    results = collective.meta["val"]
    sides = operands_of(collective), results if isinstance(results, list | tuple) else [results]
    sizes = [sum(x.numel() * x.itemsize for x in side if isinstance(x, Tensor)) for side in sides]
    hints: list[Any] = sizes  # mypy takes a symbolic size for an int
    numbers = [size.node.hint if isinstance(size, torch.SymInt) else size for size in hints]
    if None in numbers:
        return None
    keyword = next((keyword for start, keyword in KEYWORDS.items() if name.startswith(start)), name)
    return collective_us(keyword, int(max(numbers)), platform.ranks, platform.hardware, platform.hosts)
