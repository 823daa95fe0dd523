"""What the command line says of choices: `hostir explain`, and `--strategy auto` of the other commands."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from collections.abc import Mapping

from hostir.choice.candidates import check_ranks, check_sizes, fusion_of
from hostir.choice.decision import choose, decide
from hostir.choice.hardware import REFERENCE, named
from hostir.choice.platforms import Platform, here, reference
from hostir.choice.report import describe
from hostir.choice.verdict import Choice
from hostir.ir.notices import FallbackWarning
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.knobs import KERNELS


def explain_command(program: Program, sizes: Mapping[str, int], options: Namespace) -> int:
    """Prints the choice for a fusion; returns the exit code."""
    fusion = fusion_of(program)
    check_sizes(fusion, dict(sizes))
    if options.machine is not None and options.device is not None:
        raise error("--machine names another machine, and --device this one's", hint="leave one of them out")
    platform = platform_of(fusion, options.device, options.machine)
    check_ranks(fusion, platform)
    choice = decide(fusion, platform, sizes, KERNELS.get(options.kernels), options.calls)
    if _speaks():
        print(json.dumps(choice.to_json(), indent=1) if options.json else describe(choice))
    return 0


def chosen(fusion: Program, sizes: Mapping[str, int], options: Namespace) -> Choice:
    """What `--strategy auto` takes: for `run` on the ranks that will run it, else as `explain` would say.

    The caller tells of fallbacks, so they are not warned of.
    """
    if options.command == "run":
        machine = {"cpu": "gloo", "cuda": "cuda", None: None}[options.device] if _launched() else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            return choose(fusion, sizes=sizes, kernels=options.kernels, machine=machine)
    check_sizes(fusion, dict(sizes))
    platform = platform_of(fusion)
    check_ranks(fusion, platform)
    return decide(fusion, platform, sizes, KERNELS.get())


def platform_of(fusion: Program, device: str | None = None, machine: str | None = None) -> Platform:
    """The machine that was named; else this one, if it has the GPUs or was asked for; else a known one."""
    if machine is not None:
        hardware, ranks = named(machine)
        return reference(hardware, ranks or fusion.ranks)
    if _launched():
        from hostir.runtime.session import joined

        return here("cuda" if joined(device).device.type == "cuda" else "gloo", fusion.ranks)
    if device is None and not _has_gpus(fusion.ranks):
        return reference(REFERENCE, fusion.ranks)
    return here("gloo" if device == "cpu" else "cuda", fusion.ranks)


def _has_gpus(count: int) -> bool:
    import torch

    return torch.cuda.device_count() >= count


def _launched() -> bool:
    from hostir.runtime.session import launched

    return launched()


def _speaks() -> bool:
    """Whether this process speaks for all."""
    from hostir.runtime.session import joined

    return not _launched() or joined().rank == 0
