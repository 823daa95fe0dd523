"""Platforms that programs run on: GPUs, links, versions, and the constants of known machines."""

from __future__ import annotations

import itertools
import json
import os
import platform as python_platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hostir.choice.hardware import CPU, REFERENCE, Hardware, hardware_of
from hostir.ir.source import error

if TYPE_CHECKING:
    from hostir.runtime.session import Session

CUDA, GLOO, SIMULATED, ELSEWHERE = "cuda", "gloo", "local", "elsewhere"
FOR_TESTING = "copies and flags between CPU processes are there for testing"


@dataclass(frozen=True)
class Platform:
    """The machine that ranks run on: GPU or CPU, number of ranks, links and versions.

    Fields:
        machine: what executes: `cuda`, `gloo` or `local`; `elsewhere` for one that is known by its constants only.
        name: of the GPU, or of the CPU.
        ranks: how many there are.
        link: between them: `nvlink`, `peer access`, `no peer access`, `several hosts`, `one host` (CPU), `alone`.
        versions: of all that a time depends on.
        hardware: the constants that estimates use.
        refuses: why ranks should not reach into each other's memory here; empty where they may.
        runs_all: whether what it refuses would still run, as for a test.
    """

    machine: str
    name: str
    ranks: int
    link: str
    versions: tuple[tuple[str, str], ...]
    hardware: Hardware
    refuses: str = ""
    runs_all: bool = False

    def __str__(self) -> str:
        if self.machine in (SIMULATED, ELSEWHERE):
            return f"{self.ranks} x {self.name} as estimated elsewhere"
        return f"{self.ranks} x {self.name}, {self.link}"

    @property
    def computes(self) -> str:
        """The device type of its kernels: `cuda`, or `cpu`, on which ranks are simulated too."""
        return "cuda" if self.machine in (CUDA, ELSEWHERE) and self.hardware is not CPU else "cpu"

    @property
    def identity(self) -> dict[str, Any]:
        """All that a measurement depends on besides program and sizes."""
        return {
            "machine": self.machine,
            "name": self.name,
            "ranks": self.ranks,
            "link": self.link,
            "versions": dict(self.versions),
        }

    @property
    def note(self) -> str:
        """A remark on the estimates, for the user."""
        known = hardware_of(self.name) if self.machine == CUDA else self.hardware
        return "" if known else f"there are no constants of {self.name}: estimates use those of {self.hardware.name}"


def reference(hardware: Hardware, ranks: int) -> Platform:
    """Return a platform of which only the constants are known."""
    return Platform(ELSEWHERE, hardware.name, ranks, "nvlink", (), hardware)


def simulated(ranks: int) -> Platform:
    """Return the platform of simulated ranks, which have no speed: the choice is that of the reference machine."""
    return Platform(SIMULATED, REFERENCE.name, ranks, "nvlink", (), REFERENCE)


def here(machine: str, ranks: int, group: object = None) -> Platform:
    """Return this process's platform, for a program of `ranks` ranks.

    Under torchrun all ranks of the group come here together, and `ranks` is how many there are; `machine` and `group`
    are as for an `Executor`.
    Outside torchrun the GPUs of this host stand for the ranks' (`cuda`), or its CPU (`gloo`).
    """
    if machine == SIMULATED:
        return simulated(ranks)
    from hostir.runtime.guest import session_of

    session = session_of(group, "cuda" if machine == CUDA else "cpu")
    if session is None:
        return _platform([_facts(machine, rank) for rank in range(ranks)])
    number = next(_rounds.setdefault(session, itertools.count()))
    mine = json.dumps(_facts(machine, session.device.index or 0))
    return _platform([json.loads(text) for text in session.exchange(f"platform {number}", mine)])


_rounds: WeakKeyDictionary[Session, itertools.count[int]] = WeakKeyDictionary()


def _facts(machine: str, device: int) -> dict[str, Any]:
    """Return what one rank knows of its own device."""
    import torch

    from hostir.runtime.cuda.memory import why_not

    versions = {"hostir": _version("hostir"), "torch": torch.__version__}
    facts = {"machine": machine, "host": socket.gethostname(), "versions": versions, "peers": "", "refuses": ""}
    if machine == GLOO:
        return {**facts, "name": f"{python_platform.machine()} CPU of {os.cpu_count()} cores"}
    if device >= torch.cuda.device_count():
        raise error(
            f"this host has {torch.cuda.device_count()} GPUs, not {device + 1}",
            hint="'hostir explain --machine' chooses for a machine that is not here",
        )
    versions |= {"triton": _version("triton"), "driver": str(_driver()), "nccl": _nccl()}
    others = [n for n in range(torch.cuda.device_count()) if n != device]
    blocked = [n for n in others if not torch.cuda.can_device_access_peer(device, n)]
    facts["refuses"] = why_not(torch.device("cuda", device))
    return {**facts, "name": torch.cuda.get_device_name(device), "peers": _link(blocked)}


def _link(blocked: Sequence[int]) -> str:
    if blocked:
        return "no peer access"
    return "nvlink" if _over_nvlink() else "peer access"


def _over_nvlink() -> bool:
    """Whether all GPUs of this host are joined by NVLink, as far as torch can tell."""
    from torch._C import _autograd, _distributed_c10d

    detect, kinds = getattr(_distributed_c10d, "_detect_dma_connectivity", None), getattr(_autograd, "DeviceType", None)
    if detect is None or kinds is None:
        return False
    try:
        matrix = detect(kinds.CUDA, "nvlink").matrix
    except (AttributeError, RuntimeError):
        return False
    return all(count > 0 for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j)


def _driver() -> int:
    import torch

    return int(getattr(torch._C, "_cuda_getDriverVersion", int)())


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # here, as it takes its time to load

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _platform(facts: Sequence[dict[str, Any]]) -> Platform:
    """Combine what all ranks know into one platform, the same on every rank."""
    first, ranks = facts[0], len(facts)
    versions = tuple(sorted(first["versions"].items()))
    one_host = len({it["host"] for it in facts}) == 1
    if first["machine"] == GLOO:
        link = "one host" if one_host else "several hosts"
        runs = "" if one_host else "processes of several hosts share no memory"
        return Platform(GLOO, first["name"], ranks, link, versions, CPU, runs or FOR_TESTING, runs_all=one_host)
    names = sorted({it["name"] for it in facts})
    link = _links([it["peers"] for it in facts], one_host) if ranks > 1 else "alone"
    refuses = next((it["refuses"] for it in facts if it["refuses"]), "") or REFUSALS.get(link, "")
    hardware = hardware_of(names[0]) or REFERENCE
    return Platform(CUDA, " and ".join(names), ranks, link, versions, hardware, refuses)


REFUSALS = {
    "several hosts": "copies between GPUs stay within one host, and the ranks are on several",
    "no peer access": "some GPUs have no peer access to each other's memory",
}


def _links(peers: Sequence[str], one_host: bool) -> str:
    if not one_host:
        return "several hosts"
    return next(link for link in ("no peer access", "peer access", "nvlink") if link in peers)
