"""Choose the strategy for `--strategy auto`.

This is a separate file because it imports torch, which most commands do not need.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

import torch

from hostir.choice.choices import Choice
from hostir.choice.decision import Decider, check_ranks, check_sizes, choose
from hostir.choice.hardware import REFERENCE
from hostir.choice.platforms import Platform, planned, platform_here
from hostir.ir.program import Program, stated_hosts
from hostir.job.session import joined, launched
from hostir.knobs import KERNELS, SYMMETRIC_LIMIT


def choice_for(fusion: Program, sizes: Mapping[str, int], options: Namespace) -> Choice:
    """Choose the strategy for a fusion at given sizes; return the choice.

    For `hostir run`, choose for the ranks that will run the program. For other commands, choose as `hostir explain`
    does. No warning is issued about a fallback, because the caller prints the choice and its fallback.
    """
    if options.command == "run":
        machine = {"cpu": "gloo", "cuda": "cuda", None: None}[options.device] if launched() else None
        return choose(fusion, sizes=sizes, kernels=options.kernels, machine=machine, warn=False)
    check_sizes(fusion, dict(sizes))
    platform = platform_of(fusion, machine=getattr(options, "machine", None), hosts=getattr(options, "hosts", None))
    check_ranks(fusion, platform)
    return Decider(fusion, platform, KERNELS.get(), limit=SYMMETRIC_LIMIT.get()).choice(sizes)


def platform_of(
    fusion: Program, device: str | None = None, machine: str | None = None, hosts: int | None = None
) -> Platform:
    """Return the platform for which strategies are chosen.

    If `machine` or `hosts` is given, they name the platform: see `planned`. So do hosts that the fusion's meshes state,
    unless torchrun started this process or `device` is given. Otherwise the platform is this machine if
    torchrun started this process, if `device` is given, or if this machine has a GPU for each rank. In all other cases
    it is the reference machine.
    """
    if machine is not None or hosts is not None or (stated_hosts(fusion) and device is None and not launched()):
        return planned(fusion, machine or REFERENCE.name, hosts)
    if launched():
        return platform_here("cuda" if joined(device).device.type == "cuda" else "gloo", fusion.ranks)
    if device is None and torch.cuda.device_count() < fusion.ranks:
        return planned(fusion, REFERENCE.name)
    return platform_here("gloo" if device == "cpu" else "cuda", fusion.ranks)
