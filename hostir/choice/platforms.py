"""Platforms that programs run on: their GPUs, links and versions, and reasons not to access the memory of peers."""

from __future__ import annotations

import json
import os
import platform as python_platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostir.choice import calibration
from hostir.choice.hardware import CPU, REFERENCE, Hardware, hardware_of, parse_machine
from hostir.ir.program import Program, shared_across, stated_hosts
from hostir.ir.source import error, user_span
from hostir.job.hosts import equal_hosts, ranks_by_host
from hostir.knobs import set_by_launcher

CUDA, GLOO, SIMULATED, ELSEWHERE = "cuda", "gloo", "local", "elsewhere"
SEVERAL_HOSTS = "several hosts"
ACROSS_HOSTS = "copies, signals and barriers stay within one host"
NO_PEER_ACCESS = "some GPUs have no peer access to each other's memory"
FOR_TESTING = "copies and flags between CPU processes are there for testing"


@dataclass(frozen=True)
class Platform:
    """The machine that ranks run on: GPU or CPU, number of ranks, links and versions.

    Fields:
        machine: the machine of the executor: `cuda`, `gloo` or `local`. It is `elsewhere` for a platform that is not
            the platform of this process. Only the constants of its hardware are then known.
        name: the name of the GPU, or of the CPU.
        ranks: the number of ranks.
        link: the link between ranks: `nvlink`, `peer access`, `no peer access`, `several hosts`, `one host` (CPU) or
            `alone`.
        versions: the versions of everything that times depend on.
        hardware: the constants that estimates use.
        refuses: the reason why ranks of one host should not access each other's memory; empty if they may.
        runs_all: True if programs that access the memory of peers still run here, for testing.
        calibrated: True if the constants were scaled by times that were measured on this machine.
        hosts: the ranks of each host; empty if all ranks share a host.
    """

    machine: str
    name: str
    ranks: int
    link: str
    versions: tuple[tuple[str, str], ...]
    hardware: Hardware
    refuses: str = ""
    runs_all: bool = False
    calibrated: bool = False
    hosts: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        if self.machine in (SIMULATED, ELSEWHERE):
            return f"{self.gpus} as estimated elsewhere"
        return self.gpus if self.hosts else f"{self.gpus}, {self.link}"

    @property
    def gpus(self) -> str:
        """The number and the name of the GPUs, and the number of hosts if there are several."""
        hosts = f" on {len(self.hosts)} hosts" if self.hosts else ""
        return f"{self.ranks} x {self.name}{hosts}"

    def unreachable(self, program: Program) -> str:
        """Return a reason if ranks of different hosts would access each other's memory in a program, else ""."""
        pair = shared_across(program, self.hosts) if self.hosts else None
        return "" if pair is None else f"{ACROSS_HOSTS}, and ranks {pair[0]} and {pair[1]} are on different hosts"

    @property
    def computes(self) -> str:
        """The device type of the kernels: `cuda` or `cpu`. Simulated ranks run on the CPU, too."""
        return "cuda" if self.machine in (CUDA, ELSEWHERE) and self.hardware is not CPU else "cpu"

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a measurement depends on, except the program and its sizes."""
        return {
            "machine": self.machine,
            "name": self.name,
            "ranks": self.ranks,
            "link": self.link,
            "versions": dict(self.versions),
            **({"hosts": self.hosts} if self.hosts else {}),
        }

    @property
    def note(self) -> str:
        """A remark on the estimates for the user; empty if there is nothing to remark."""
        if self.machine != CUDA or hardware_of(self.name):
            return ""
        note = f"there are no constants for {self.name}: estimates use the constants of {self.hardware.name}"
        return f"{note}, scaled" if self.calibrated else f"{note}; 'hostir tune --calibrate' scales them"


def reference(hardware: Hardware, ranks: int, hosts: int = 1) -> Platform:
    """Return a platform on which this process does not run.

    Only its number of ranks, its number of hosts and the constants of its hardware are known.
    """
    if hosts == 1:
        return Platform(ELSEWHERE, hardware.name, ranks, "nvlink", (), hardware)
    return Platform(ELSEWHERE, hardware.name, ranks, SEVERAL_HOSTS, (), hardware, hosts=equal_hosts(ranks, hosts))


def planned(program: Program, machine: str, hosts: int | None = None) -> Platform:
    """Return the platform that a user names to plan a program for it.

    Args:
        program: a fusion or a host program.
        machine: a known machine. `h100x8` has 8 GPUs in each host. `h100` has as many as the program has ranks.
        hosts: the number of hosts; by default the number that the program's meshes state. If they state none, there are
            as few hosts as the program needs: 1 if `machine` has a number.

    Raises HostIRError for an unknown machine, for more GPUs than a host has, and for ranks that do not fill the hosts.
    """
    hardware, in_host = parse_machine(machine)
    if hosts is not None and hosts < 1:
        raise error(f"{hosts} hosts", user_span(), expected="at least 1")
    stated = stated_hosts(program)
    if hosts and stated and hosts != stated:
        what = f"the meshes of @{program.name} state {stated} hosts, not {hosts}"
        raise error(what, user_span(), hint="leave --hosts out, or change the meshes")
    hosts = hosts or stated or None
    if in_host is None:
        hosts = hosts or _fewest_hosts(program.ranks, hardware.host_gpus or program.ranks)
        in_host = program.ranks // hosts
    hosts = hosts or 1
    if hosts > 1 and in_host * hosts != program.ranks:
        raise error(
            f"@{program.name} is for {program.ranks} ranks, and {hosts} hosts of {machine} have {in_host * hosts}",
            user_span(),
            expected="as many ranks on each host",
            hint=f"build it for {in_host * hosts} (--ranks {in_host * hosts}, if its function has a parameter 'ranks')",
        )
    if 0 < hardware.host_gpus < in_host:
        raise error(
            f"{in_host} x {hardware.name} in one host",
            user_span(),
            expected=f"at most {hardware.host_gpus} in each host",
            hint=f"several hosts, such as --machine {hardware.name}x{hardware.host_gpus} --hosts 2",
        )
    return reference(hardware, in_host * hosts, hosts)


def _fewest_hosts(ranks: int, host_gpus: int) -> int:
    """Return the smallest number of hosts that `ranks` ranks fill equally, with at most `host_gpus` on each."""
    return next(hosts for hosts in range(1, ranks + 1) if ranks % hosts == 0 and ranks <= hosts * host_gpus)


def simulated(program: Program) -> Platform:
    """Return the platform of simulated ranks. They have no speed, so choices are made for the reference machine."""
    return replace(planned(program, REFERENCE.name), machine=SIMULATED)


def platform_here(machine: str, ranks: int, group: object = None) -> Platform:
    """Return this process's platform for a program of `ranks` ranks.

    `machine` and `group` are the same as in `Executor`. Under torchrun all ranks of the group call this together, and
    the platform has the ranks of the group. Outside torchrun, the platform has `ranks` ranks. For `cuda`, each of these
    ranks then stands for one GPU of this host. For `gloo`, all ranks run on the CPU of this host.
    """
    from hostir.job.guest import session_of

    session = session_of(group, "cuda" if machine == CUDA else "cpu")
    if session is None:
        return platform_of([_device_facts(machine, rank) for rank in range(ranks)])
    facts = json.dumps(_device_facts(machine, session.device.index or 0))
    return platform_of([json.loads(text) for text in session.exchange("platform", facts)], session.hosts())


def platform_like(machine: str, device: int, ranks: Sequence[int]) -> Platform:
    """Return the platform of some ranks of the job, as far as this process knows it. The ranks do not communicate.

    All ranks count as having devices like `device` of this process. LOCAL_WORLD_SIZE, which torchrun sets, says how
    many ranks of the job share a host. Without it, all of `ranks` share a host.

    Args:
        machine: the machine of the executor, as in `Platform`.
        device: the index of this rank's device.
        ranks: the ranks of the job that form the platform.
    """
    in_host = set_by_launcher("LOCAL_WORLD_SIZE", 0) or max(ranks) + 1
    hosts = ranks_by_host([str(rank // in_host) for rank in ranks])
    return platform_of([_device_facts(machine, device)] * len(ranks), hosts)


def _device_facts(machine: str, device: int) -> dict[str, Any]:
    """Return facts about one rank's device: name, versions and links.

    They also include the reason why peers cannot access its memory.
    """
    import torch

    from hostir.machines.cuda.memory import why_not

    versions = {"hostir": _version("hostir"), "torch": torch.__version__}
    facts = {"machine": machine, "versions": versions, "peers": "", "refuses": ""}
    if machine == GLOO:
        name = f"{python_platform.machine()} CPU of {os.cpu_count()} cores"
        return {**facts, "name": name, "calibration": calibration.read(name)}
    if device >= torch.cuda.device_count():
        raise error(
            f"this host has {torch.cuda.device_count()} GPUs, not {device + 1}",
            hint="'hostir explain --machine' chooses for a machine that is not here",
        )
    versions |= {"triton": _version("triton"), "driver": str(_driver()), "nccl": _nccl()}
    others = [n for n in range(torch.cuda.device_count()) if n != device]
    unreachable = [n for n in others if not torch.cuda.can_device_access_peer(device, n)]
    facts["refuses"] = why_not(torch.device("cuda", device))
    name = torch.cuda.get_device_name(device)
    return {**facts, "name": name, "peers": _link(unreachable), "calibration": calibration.read(name)}


def _link(unreachable: Sequence[int]) -> str:
    """Return the link of a GPU to the other GPUs of its host. `unreachable` holds the GPUs that it cannot access."""
    if unreachable:
        return "no peer access"
    return "nvlink" if _over_nvlink() else "peer access"


def _over_nvlink() -> bool:
    """Return True if torch reports NVLink between all GPUs of this host."""
    from torch._C import _autograd, _distributed_c10d

    detect = getattr(_distributed_c10d, "_detect_dma_connectivity", None)
    device_types = getattr(_autograd, "DeviceType", None)
    if detect is None or device_types is None:
        return False
    try:
        matrix = detect(device_types.CUDA, "nvlink").matrix
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
    from importlib.metadata import PackageNotFoundError, version  # imported here because it loads slowly

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def platform_of(facts: Sequence[dict[str, Any]], hosts: tuple[tuple[int, ...], ...] = ()) -> Platform:
    """Combine the facts about the devices of all ranks into one platform. The result is the same on every rank.

    `hosts` has the ranks of each host. It may be empty if all ranks share a host.
    """
    first, ranks = facts[0], len(facts)
    versions = tuple(sorted(first["versions"].items()))
    several = hosts if len(hosts) > 1 else ()
    one_host = not several
    if first["machine"] == GLOO:
        link = "one host" if one_host else SEVERAL_HOSTS
        platform = Platform(GLOO, first["name"], ranks, link, versions, CPU, FOR_TESTING, runs_all=True, hosts=several)
        return _calibrated(platform, first)
    names = sorted({device["name"] for device in facts})
    inside = _weakest_link([device["peers"] for device in facts]) if ranks > 1 else "alone"
    link = inside if one_host else SEVERAL_HOSTS
    refusal = next((device["refuses"] for device in facts if device["refuses"]), "")
    refusal = refusal or (NO_PEER_ACCESS if inside == "no peer access" else "")
    hardware = hardware_of(names[0]) or REFERENCE
    platform = Platform(CUDA, " and ".join(names), ranks, link, versions, hardware, refusal, hosts=several)
    return _calibrated(platform, first)


def _calibrated(platform: Platform, facts: dict[str, Any]) -> Platform:
    """Return a platform with constants that are scaled by the calibration of rank 0, whose facts are passed."""
    times, ranks = facts["calibration"]
    if not times:
        return platform
    device, known = ("cpu", False) if platform.machine == GLOO else ("cuda", hardware_of(platform.name) is not None)
    hardware = calibration.scaled(platform.hardware, times, device, ranks, known=known)
    return replace(platform, hardware=hardware, calibrated=True)


def _weakest_link(links: Sequence[str]) -> str:
    return next(link for link in ("no peer access", "peer access", "nvlink") if link in links)
