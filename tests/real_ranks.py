"""Runs programs on real CPU processes, one of which is slow, against simulated ranks in program order.

The processes share nothing of the memory model: streams are threads, gloo carries the bytes, and what they wait for is
what the program says. So what the model promises and they do not keep shows here: other bits, NaN, an error, or a hang.

One process forks a job of ranks for many programs, and another for what is left where a job hangs or dies. Every call
has fresh random inputs; what it allocates holds NaN at first. The caller acts on its stream, as on a GPU: it writes the
inputs when that stream begins, and when it ends reads the outputs and overwrites inputs and outputs with NaN.
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

from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.runtime.executor import Executor
from hostir.runtime.gloo.machine import GlooPlan
from hostir.runtime.gloo.onesided import LaneKey, Waits
from hostir.runtime.order import CALLER
from hostir.runtime.session import session
from hostir.runtime.sharding import BITS, random_inputs, shard
from hostir.runtime.simulated.machine import rehearse
from tests.launch import forked

CALLS = 6
BUDGET = 0.03  # seconds that a rank sleeps in a call, about
PATIENCE = 20.0  # seconds that a communication may stand still
GRACE = 3.0  # seconds that the other ranks have to end, once one has failed
NAN = float("nan")
Parts = list[torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """A program to be run: so many calls, with delays and inputs of a seed."""

    program: Program
    seed: int
    calls: int = CALLS
    sizes: dict[str, int] = field(default_factory=dict)

    def inputs(self, call: int) -> list[torch.Tensor]:
        return random_inputs(self.program, self.sizes, seed=1_000_003 * self.seed + call)


@dataclass(frozen=True)
class Verdict:
    """How a case went: `wrong` is empty where every call gave the bits of the simulated ranks.

    Fields:
        calls: how many calls went wrong, of those that were made.
        slow: what was slow in the first of them.
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
    """Delays of one rank's steps, other ones in each call, drawn alike on all ranks."""

    def __init__(self, plan: GlooPlan, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.lanes = sorted(plan.lanes.values(), key=lambda lane: str(lane.key))
        self.delays: dict[tuple[str, int], float] = {}
        for lane in self.lanes:
            lane.steps = [self.delayed(str(lane.key), i, step) for i, step in enumerate(lane.steps)]

    def delayed(self, lane: str, at: int, step: Callable[[], None]) -> Callable[[], None]:
        def late() -> None:
            if seconds := self.delays.get((lane, at)):
                time.sleep(seconds)
            step()

        return late

    def draw(self, seed: int) -> str:
        """Draws the delays of a call: all steps of a rank, those of one of its lanes, or a single one; says which."""
        self.delays.clear()
        random = Random(seed)
        slow, kind = random.randrange(self.ranks), random.choice(("rank", "lane", "lane", "step", "step"))
        if slow != self.rank:
            return f"rank {slow}"
        lanes, said = [lane for lane in self.lanes if lane.steps], f"rank {slow}"
        if kind != "rank":
            lanes = [random.choice(lanes)]
            said += f", {_name(lanes[0].key)}"
        steps = [(str(lane.key), i) for lane in lanes for i in range(len(lane.steps))]
        if kind == "step":
            steps = [random.choice(steps)]
            said += f", step {steps[0][1]}"
        self.delays = dict.fromkeys(steps, BUDGET / len(steps))
        return said


def _name(lane: LaneKey) -> str:
    """Of a lane, for people."""
    if not isinstance(lane, int):
        return f"team {lane}"
    return "the caller's stream" if lane == CALLER else f"stream {lane}"


class Caller:
    """What the caller does on its stream at the beginning and at the end of each call."""

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
        held = self.plan.unrolled.inputs
        for register, x in zip(range(held.start, held.stop), self.inputs, strict=True):
            if x is not None:
                self.plan.registers[register].copy_(x)

    def read(self) -> None:
        registers, unrolled = self.plan.registers, self.plan.unrolled
        self.outputs = [None if registers[i] is None else registers[i].clone() for i in unrolled.outputs]
        for i in (*range(unrolled.inputs.start, unrolled.inputs.stop), *unrolled.outputs):
            if registers[i] is not None:
                registers[i].fill_(NAN)


# A rank -----------------------------------------------------------------------------------------------------------
class Rank:
    """One rank of a job, and what went wrong in its calls of the case at hand."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wrong: dict[str, Any] = {}

    def run(self, case: Case, expected: list[list[Parts]]) -> None:
        """All calls of a case; raises HostIRError where the program raises."""
        self.wrong = {}
        executor = Executor(case.program, sizes=case.sizes, machine="gloo", check=False, kernels="aten")
        given = [None if x is None else torch.full_like(x, NAN) for x in self.parts(case, 0)]
        with executor.calls.lock:
            plan = executor._choose(None, given)
        assert isinstance(plan, GlooPlan)
        assert executor.watchdog is not None
        executor.watchdog.observe(plan)
        caller, slowness = Caller(plan), Slowness(plan, self.rank, case.program.ranks)
        for call in range(case.calls):
            caller.inputs = self.parts(case, call)
            slow = slowness.draw(1_000_003 * case.seed + call)
            with torch.no_grad():
                plan.run(given)
            ends = zip(case.program.outputs, caller.outputs, expected[call], strict=True)
            said = [f"{v}: {wrong}" for v, found, true in ends if (wrong := differs(found, true[self.rank]))]
            if said and not self.wrong:
                self.wrong = {"said": f"call {call}, rank {self.rank}, {said[0]}", "slow": slow, "calls": []}
            if said:
                self.wrong["calls"].append(call)

    def parts(self, case: Case, call: int) -> Parts:
        """This rank's inputs of a call."""
        pairs = zip(case.inputs(call), case.program.inputs, strict=True)
        return [shard(x, v.tensor, self.rank, case.sizes) for x, v in pairs]


def differs(found: torch.Tensor | None, true: torch.Tensor | None) -> str:
    """How what a rank holds of an output is not what simulated ranks hold; nothing where the bits are the same."""
    if found is None or true is None:
        return "" if found is true else "is there, or is not"
    bits = BITS[true.element_size()]
    odd = int((found.contiguous().view(bits) != true.contiguous().view(bits)).sum())
    return f"{odd} of {found.numel()} elements differ, {int(found.isnan().sum())} are NaN" if odd else ""


# Jobs -------------------------------------------------------------------------------------------------------------
def expected(case: Case) -> list[list[Parts]]:
    """What simulated ranks give in program order: `expected[call][output][rank]`. Raises HostIRError."""
    machine = rehearse(case.program, [case.inputs(call) for call in range(case.calls)], case.sizes, "aten")
    outputs = machine.run(0)
    kept = [[[None if x is None else x.clone() for x in parts] for parts in call] for call in outputs]
    machine.release()
    return kept


class Job:
    """Ranks that run cases one after another in processes of their own, while this process does something else.

    `verdicts` waits for them, and starts anew for those behind a case that hangs or raises.
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
        self.heard, tells = os.pipe()
        self.printed = tempfile.TemporaryFile("w+")  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            _job(self.ranks, [(case, truth) for _, case, truth in self.left], tells, self.printed, self.patience)
        os.close(tells)

    def verdicts(self) -> list[Verdict]:
        """The verdict on each case, in their order."""
        while self.process:
            told = self.listen()
            self.printed.seek(0)
            printed = self.printed.read()
            self.printed.close()
            self.take(told, printed)
            self.start()
        return [self.done[i] for i in range(len(self.cases))]

    def listen(self) -> list[dict[str, Any]]:
        """What the ranks tell, until they have all ended."""
        text, last, failed = b"", time.monotonic(), 0.0
        most = 4 * self.patience + 30
        while True:
            now = time.monotonic()
            if now - last > most or (failed and now - failed > GRACE):
                break
            if not select.select([self.heard], [], [], 0.2)[0]:
                continue
            data = os.read(self.heard, 1 << 16)
            if not data:
                break
            text, last = text + data, now
            failed = failed or (now if b'"ended": false' in data else 0.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.heard)
        return [json.loads(line) for line in text.decode().splitlines() if line.endswith("}")]

    def take(self, told: list[dict[str, Any]], printed: str) -> None:
        """Verdicts from what was told; the first case that not all ranks have ended is the one that hangs."""
        for n, (i, case, _) in enumerate(self.left):
            mine = [t for t in told if t["case"] == n]
            ended = len([t for t in mine if t["ended"]]) == self.ranks
            failed = [t["failed"] for t in mine if not t["ended"]]
            wrong = sorted((t["wrong"] for t in mine if t["wrong"]), key=lambda w: w["calls"][0])
            if failed or not ended:
                self.done[i] = Verdict(case, failed[0] if failed else _headline(printed), 1)
                self.left = self.left[n + 1 :]
                return
            calls = {call for w in wrong for call in w["calls"]}
            self.done[i] = Verdict(case, wrong[0]["said"], len(calls), wrong[0]["slow"]) if wrong else Verdict(case)
        self.left = []


def _headline(printed: str) -> str:
    found = [line for line in printed.splitlines() if "error:" in line]
    return "hangs: " + (found[0] if found else printed.strip()[-300:] or "no rank says where")


def _job(ranks: int, cases: list[Any], tells: int, printed: Any, patience: float) -> None:
    """The process that holds the ranks' store, and the ranks; never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if children := forked(ranks, port):
            from torch.distributed import TCPStore

            os.close(tells)
            store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            while children:
                children.discard(os.waitpid(-1, 0)[0])
            del store
        else:
            listening.close()
            _rank(cases, tells, patience)
        code = 0
    except BaseException as problem:
        print(f"error: {type(problem).__name__}: {problem}", flush=True)
    finally:
        os._exit(code)


def _rank(cases: list[Any], tells: int, patience: float) -> None:
    """All that a rank does: case after case, until one raises."""
    here = Rank(int(os.environ["RANK"]))
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    with session("cpu", patience):
        for at, (case, truth) in enumerate(cases):
            failed = ""
            try:
                here.run(case, truth)
            except HostIRError as failure:
                failed = str(failure).split("\n")[0][:500]
            told = {"case": at, "ended": not failed, "failed": failed, "wrong": here.wrong}
            os.write(tells, (json.dumps(told) + "\n").encode())
            if failed:
                time.sleep(GRACE)
                os._exit(1)


def judged(cases: Sequence[Case], patience: float = PATIENCE) -> list[Verdict]:
    """The verdict on each of these; those on as many ranks run in the same processes."""
    found: dict[int, Verdict] = {}
    for ranks in sorted({case.program.ranks for case in cases}):
        places = [i for i, case in enumerate(cases) if case.program.ranks == ranks]
        found |= zip(places, Job([cases[i] for i in places], patience).verdicts(), strict=True)
    return [found[i] for i in range(len(cases))]
