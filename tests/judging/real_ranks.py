"""Programs on real CPU processes with one slow rank, compared with simulated ranks in program order.

The processes do not know the memory model: streams are threads, gloo carries the bytes, and only the waits of the
program order them. If the model guarantees too much, results have other bits, NaN, an error, or a hang.

One process forks a job of ranks for many programs, and a new job for the remaining programs if one hangs or dies. Every
call has fresh random inputs, and new memory holds NaN, or integers that are no valid index. The caller acts on its
stream, as on a GPU: it writes the inputs when that stream starts; when it ends, it reads the outputs and makes inputs
and outputs undefined.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from hostir.call.executor import Executor
from hostir.call.local import rehearse
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.session import session
from hostir.kernels.dtypes import BITS
from hostir.machines.gloo.lanes import LaneKey, Waits
from hostir.machines.gloo.machine import GlooPlan
from hostir.machines.simulated.memory import make_undefined
from hostir.plan.operations import CALLER
from tests.launch import fork_ranks

CALLS = 6
BUDGET = 0.03  # seconds that the slow rank sleeps in a call, about
PATIENCE = 20.0  # timeout of a communication in seconds
GRACE = 3.0  # seconds that the other ranks have to end, once one has failed
Parts = list[torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """A program to run, with the number of calls and the seed of delays and inputs."""

    program: Program
    seed: int
    calls: int = CALLS
    sizes: dict[str, int] = field(default_factory=dict)

    def inputs(self, call: int) -> list[torch.Tensor]:
        return random_inputs(self.program, self.sizes, seed=1_000_003 * self.seed + call)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a case: `wrong` is empty if every call gave the bits of the simulated ranks.

    Fields:
        calls: the number of wrong calls.
        slow: the rank, stream or step that was delayed in the first wrong call.
    """

    case: Case
    wrong: str = ""
    calls: int = 0
    slow: str = ""

    def __str__(self) -> str:
        of = f" ({self.calls} of {self.case.calls} calls; slow: {self.slow})" if self.slow else ""
        return f"{self.wrong}{of}"


# Slowness ---------------------------------------------------------------------------------------------------------
class Slowness:
    """Random delays of one rank's steps, drawn equally on all ranks and anew for each call."""

    def __init__(self, plan: GlooPlan, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.lanes = sorted(plan.lanes.values(), key=lambda lane: str(lane.key))
        self.delays: dict[tuple[str, int], float] = {}
        for lane in self.lanes:
            lane.steps = [self.delayed(str(lane.key), i, step) for i, step in enumerate(lane.steps)]

    def delayed(self, lane: str, at: int, step: Callable[[], None]) -> Callable[[], None]:
        def delayed_step() -> None:
            if seconds := self.delays.get((lane, at)):
                time.sleep(seconds)
            step()

        return delayed_step

    def draw(self, seed: int) -> str:
        """Delay all steps of a rank, the steps of one of its lanes, or a single step; return a description."""
        self.delays.clear()
        random = Random(seed)
        slow, extent = random.randrange(self.ranks), random.choice(("rank", "lane", "lane", "step", "step"))
        if slow != self.rank:
            return f"rank {slow}"
        lanes, description = [lane for lane in self.lanes if lane.steps], f"rank {slow}"
        if extent != "rank":
            lanes = [random.choice(lanes)]
            description += f", {_name(lanes[0].key)}"
        steps = [(str(lane.key), i) for lane in lanes for i in range(len(lane.steps))]
        if extent == "step":
            steps = [random.choice(steps)]
            description += f", step {steps[0][1]}"
        self.delays = dict.fromkeys(steps, BUDGET / len(steps))
        return description


def _name(lane: LaneKey) -> str:
    """Return the name of a lane in messages."""
    if not isinstance(lane, int):
        return f"team {lane}"
    return "the caller's stream" if lane == CALLER else f"stream {lane}"


class Caller:
    """The caller's work on its stream: it writes inputs before each call and reads outputs after it."""

    def __init__(self, plan: GlooPlan) -> None:
        self.plan = plan
        self.inputs: Sequence[torch.Tensor | None] = ()
        self.outputs: Parts = []
        lane = plan.lanes[CALLER]
        first, last = (lane.ops or plan.unrolled.ops)[:1], (lane.ops or plan.unrolled.ops)[-1:]
        lane.steps[:] = [self.write, *lane.steps, self.read]
        lane.ops[:] = [*first, *lane.ops, *last]
        lane.waits[:] = [Waits.NOTHING, *lane.waits, Waits.NOTHING]
        lane.notes = {i + 1: note for i, note in lane.notes.items()}

    def write(self) -> None:
        registers = self.plan.unrolled.inputs
        for register, x in zip(range(registers.start, registers.stop), self.inputs, strict=True):
            if x is not None:
                self.plan.registers[register].copy_(x)

    def read(self) -> None:
        registers, unrolled = self.plan.registers, self.plan.unrolled
        self.outputs = [None if registers[i] is None else registers[i].clone() for i in unrolled.outputs]
        for i in (*range(unrolled.inputs.start, unrolled.inputs.stop), *unrolled.outputs):
            if registers[i] is not None:
                make_undefined(registers[i])


# A rank -----------------------------------------------------------------------------------------------------------
class Rank:
    """One rank of a job, and the first failure and wrong calls of the current case."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wrong: dict[str, Any] = {}

    def run(self, case: Case, expected: list[list[Parts]]) -> None:
        """Run all calls of a case; raise HostIRError if the program does."""
        self.wrong = {}
        executor = Executor(case.program, sizes=case.sizes, machine="gloo", check=False, kernels="aten")
        inputs = self.parts(case, 0)
        for x in (x for x in inputs if x is not None):
            make_undefined(x)
        with executor.calls.lock:
            plan = executor._choose(None, inputs)
        assert isinstance(plan, GlooPlan)
        assert executor.watchdog is not None
        executor.watchdog.observe(plan)
        caller, slowness = Caller(plan), Slowness(plan, self.rank, case.program.ranks)
        for call in range(case.calls):
            caller.inputs = self.parts(case, call)
            slow = slowness.draw(1_000_003 * case.seed + call)
            with torch.no_grad():
                plan.run(inputs)
            ends = zip(case.program.outputs, caller.outputs, expected[call], strict=True)
            errors = [f"{v}: {error}" for v, y, true in ends if (error := difference(y, true[self.rank]))]
            if errors and not self.wrong:
                self.wrong = {"error": f"call {call}, rank {self.rank}, {errors[0]}", "slow": slow, "calls": []}
            if errors:
                self.wrong["calls"].append(call)

    def parts(self, case: Case, call: int) -> Parts:
        """Return this rank's inputs of a call."""
        pairs = zip(case.inputs(call), case.program.inputs, strict=True)
        return [shard(x, v.tensor, self.rank, case.sizes) for x, v in pairs]


def difference(part: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    """Describe the difference of a rank's part of an output; return "" if the bits are equal."""
    if part is None or expected is None:
        return "" if part is expected else "one of them is None"
    bits = BITS[expected.element_size()]
    odd = int((part.contiguous().view(bits) != expected.contiguous().view(bits)).sum())
    return f"{odd} of {part.numel()} elements differ, {int(part.isnan().sum())} are NaN" if odd else ""


# Jobs -------------------------------------------------------------------------------------------------------------
def expected(case: Case) -> list[list[Parts]]:
    """Return the outputs of simulated ranks in program order, as `expected[call][output][rank]`."""
    machine = rehearse(case.program, [case.inputs(call) for call in range(case.calls)], case.sizes, "aten")
    outputs = machine.run(0)
    kept = [[[None if x is None else x.clone() for x in parts] for parts in call] for call in outputs]
    machine.release()
    return kept


class Job:
    """Processes of ranks that run cases one after another, while this process goes on.

    `verdicts` waits for them, and starts new processes for the cases after one that hangs or raises.
    """

    def __init__(self, cases: Sequence[Case], patience: float = PATIENCE) -> None:
        self.patience = patience
        self.done: dict[int, Verdict] = {}
        self.left: list[tuple[int, Case, list[list[Parts]]]] = []
        self.cases = list(cases)
        for i, case in enumerate(self.cases):
            try:
                truth = expected(case)
            except HostIRError as refused:
                self.done[i] = Verdict(case, f"simulated ranks: {refused.diagnostics[0].message}", 1)
                continue
            if any(x is not None and x.isnan().any() for call in truth for parts in call for x in parts):
                self.done[i] = Verdict(case, "simulated ranks: NaN in program order", 1)
                continue
            self.left.append((i, case, truth))
        self.ranks = max((case.program.ranks for case in self.cases), default=0)
        self.start()

    def start(self) -> None:
        self.process = 0
        if not self.left:
            return
        self.messages, writer = os.pipe()
        self.printed = tempfile.TemporaryFile("w+")  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            _job(self.ranks, [(case, truth) for _, case, truth in self.left], writer, self.printed, self.patience)
        os.close(writer)

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each case, in order."""
        while self.process:
            messages = self.listen()
            self.printed.seek(0)
            printed = self.printed.read()
            self.printed.close()
            self.record(messages, printed)
            self.start()
        return [self.done[i] for i in range(len(self.cases))]

    def listen(self) -> list[dict[str, Any]]:
        """Return the messages of the ranks after all have ended."""
        text, last, failed = b"", time.monotonic(), 0.0
        most = 4 * self.patience + 30
        while True:
            now = time.monotonic()
            if now - last > most or (failed and now - failed > GRACE):
                break
            if not select.select([self.messages], [], [], 0.2)[0]:
                continue
            data = os.read(self.messages, 1 << 16)
            if not data:
                break
            text, last = text + data, now
            failed = failed or (now if b'"ended": false' in data else 0.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.messages)
        return [json.loads(line) for line in text.decode().splitlines() if line.endswith("}")]

    def record(self, messages: list[dict[str, Any]], printed: str) -> None:
        """Record verdicts from the messages; the first case that not all ranks have finished hangs."""
        for n, (i, case, _) in enumerate(self.left):
            of_case = [m for m in messages if m["case"] == n]
            ended = len([m for m in of_case if m["ended"]]) == self.ranks
            failed = [m["failed"] for m in of_case if not m["ended"]]
            wrong = sorted((m["wrong"] for m in of_case if m["wrong"]), key=lambda w: w["calls"][0])
            if failed or not ended:
                self.done[i] = Verdict(case, failed[0] if failed else _headline(printed), 1)
                self.left = self.left[n + 1 :]
                return
            calls = {call for w in wrong for call in w["calls"]}
            self.done[i] = Verdict(case, wrong[0]["error"], len(calls), wrong[0]["slow"]) if wrong else Verdict(case)
        self.left = []


def _headline(printed: str) -> str:
    errors = [line for line in printed.splitlines() if "error:" in line]
    return "hangs: " + (errors[0] if errors else printed.strip()[-300:] or "no rank says where")


def _job(ranks: int, cases: list[Any], writer: int, printed: Any, patience: float) -> None:
    """Run the process that holds the store of the ranks, and fork the ranks; never return."""
    code = 1
    try:
        os.setsid()
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if children := fork_ranks(ranks, port):
            from torch.distributed import TCPStore

            os.close(writer)
            store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            while children:
                children.discard(os.waitpid(-1, 0)[0])
            del store
        else:
            listening.close()
            _rank(cases, writer, patience)
        code = 0
    except BaseException as problem:
        print(f"error: {type(problem).__name__}: {problem}", flush=True)
    finally:
        os._exit(code)


def _rank(cases: list[Any], writer: int, patience: float) -> None:
    """Run all cases on one rank, until one raises."""
    here = Rank(int(os.environ["RANK"]))
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    with session("cpu", patience):
        for at, (case, truth) in enumerate(cases):
            failed = ""
            try:
                here.run(case, truth)
            except HostIRError as failure:
                failed = str(failure).split("\n")[0][:500]
            message = {"case": at, "ended": not failed, "failed": failed, "wrong": here.wrong}
            os.write(writer, (json.dumps(message) + "\n").encode())
            if failed:
                time.sleep(GRACE)
                os._exit(1)


def judged(cases: Sequence[Case], patience: float = PATIENCE) -> list[Verdict]:
    """Return the verdict on each case; cases of equally many ranks share processes."""
    verdicts: dict[int, Verdict] = {}
    for ranks in sorted({case.program.ranks for case in cases}):
        places = [i for i, case in enumerate(cases) if case.program.ranks == ranks]
        verdicts |= zip(places, Job([cases[i] for i in places], patience).verdicts(), strict=True)
    return [verdicts[i] for i in range(len(cases))]
