"""Calibrate the cost model: time four small programs on this machine, and scale the constants by the results.

Each program stands for some constants. They are scaled by the ratio of the program's time to its estimate. The times
are kept in the folder of the measurements, in one file for each name of a device.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hostir.choice import cache, simulation
from hostir.choice.cost import tasks_of
from hostir.choice.hardware import Hardware
from hostir.dsl import DeviceMesh, Fusion, matmul, relu, reshard, tensor
from hostir.ir.program import Program
from hostir.lower import lower

if TYPE_CHECKING:
    from hostir.job.session import Session

RUNS = 15  # timed runs of each program
WARM = 5
COMPUTATIONS = 16  # in the program of `launch`
PATIENCE = 60.0  # seconds that a rank waits for the others
Times = Mapping[str, float]  # microseconds, by the name of the program


def programs(device: str, ranks: int) -> dict[str, Program]:
    """Return the programs, by name. `device` is the type of the device.

    `memory` reads and writes a tensor, `matmul` multiplies square matrices, and `gather` gathers rows of all ranks.
    `launch` computes so little that the host takes longer than the device.
    """
    rows, edge, dtype = (65536, 8192, "bf16") if device == "cuda" else (1024, 256, "f32")
    mesh, fusions = DeviceMesh(range(ranks)), [Fusion(name) for name in ("memory", "matmul", "gather", "launch")]
    for fusion in fusions:
        with fusion:
            shapes = {"memory": [rows, 1024], "matmul": [edge, edge], "gather": [rows * ranks, 1024], "launch": [1, 64]}
            x = tensor("x", shapes[fusion.name], dtype)
            x.set_device_mesh(mesh)
            if fusion.name == "matmul":
                w = tensor("w", [edge, edge], dtype)
                w.set_device_mesh(mesh)
                y = matmul(x, w)
            elif fusion.name == "gather":
                x.shard(0, mesh)
                y = reshard(x)
                y.set_device_mesh(mesh)
            else:
                y = relu(x)
                for _ in range(COMPUTATIONS - 1 if fusion.name == "launch" else 0):
                    y = relu(y)
            fusion.output(y)
    return {fusion.name: lower(fusion, "sequential") for fusion in fusions if ranks > 1 or fusion.name != "gather"}


def estimates_of(hardware: Hardware, device: str, ranks: int) -> Times:
    """Return the estimates for the programs on a machine; no estimate for `launch` if its host times are not known."""
    times = {}
    for name, program in programs(device, ranks).items():
        tasks = tasks_of(program, {})
        if name == "launch":
            costs = simulation.Costs(hardware, "aten", 0.0)
            times[name] = simulation.HostCosts(costs).call(tasks)
        else:
            times[name] = simulation.estimates(tasks, hardware, "aten")[simulation.GRAPH]
    return {name: us for name, us in times.items() if us > 0}


def scaled(hardware: Hardware, times: Times, device: str, ranks: int, *, known: bool) -> Hardware:
    """Return the constants of a machine, scaled by the times of the programs.

    If the constants of its GPU are known, only the host times are scaled. The other constants were fitted to many
    calls, and are better than what four programs show.
    """
    slower = {name: times[name] / us for name, us in estimates_of(hardware, device, ranks).items() if name in times}
    launch = {name: us * slower.get("launch", 1.0) for name, us in hardware.launch.items()}
    hardware = replace(hardware, launch=launch)
    if known:
        return hardware
    on_device, gather = slower.get("matmul", 1.0), slower.get("gather", 1.0)
    return replace(
        hardware,
        kernels={name: replace(k, rates=k.rates.scaled(1 / on_device)) for name, k in hardware.kernels.items()},
        memory=hardware.memory / slower.get("memory", 1.0),
        operands=hardware.operands / slower.get("memory", 1.0),
        rates={name: rate / gather for name, rate in hardware.rates.items()},
        link=hardware.link / gather,
        sm_rate=hardware.sm_rate / gather,
    )


def read(device: str) -> tuple[Times, int]:
    """Read the times that `write` stored for a device. Return them, and the number of ranks that measured them.

    `device` is the name of the device. If this machine was not calibrated, or if the file cannot be used, the mapping
    is empty and the number is 1.
    """
    times = dict(cache.read_times({"calibration": device}))
    return times, int(times.pop("ranks", 1))


def write(device: str, times: Times, ranks: int) -> Path:
    """Keep the times of the programs for the name of a device, and return the path of the file."""
    return cache.write_times({"calibration": device}, "calibration", {**times, "ranks": ranks})


def measure(session: Session) -> dict[str, float]:
    """Return the microseconds of each program, on the slowest rank. All ranks call this together."""
    from hostir.call.executor import Executor
    from hostir.choice.measure import CudaClock, WallClock, random_parts

    clock = CudaClock(session.device) if session.device.type == "cuda" else WallClock()
    mine = {}
    for name, program in programs(session.device.type, session.size).items():
        executor, inputs = Executor(program, kernels="aten"), random_parts(program, {}, 0, session)
        work = partial(executor, *inputs)
        for _ in range(WARM):
            work()
        executor.synchronize()
        if name == "launch":
            mine[name] = statistics.median(_host_time(work, executor.synchronize) for _ in range(RUNS))
        else:
            mine[name] = statistics.median(clock.run(work)() for _ in range(RUNS))
    by_rank = [json.loads(text) for text in session.exchange("calibration", json.dumps(mine), PATIENCE)]
    return {name: round(max(times[name] for times in by_rank), 3) for name in mine}


def _host_time(work: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the microseconds in which the host issues `work`, then wait until the device has done it."""
    begin = time.perf_counter()
    work()
    elapsed = (time.perf_counter() - begin) * 1e6
    synchronize()
    return elapsed
