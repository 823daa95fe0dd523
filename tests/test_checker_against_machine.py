"""The checker and the simulated ranks agree on random programs with random synchronisation.

They share no code. The checker compares clocks of unrolled events over symbolic regions. The simulated ranks run tasks
in many orders and mark the elements that they access. Each must report what the other reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hostir as hi
from hostir.call.local import rehearse
from hostir.call.random import random_inputs
from hostir.ir import Program
from hostir.machines.simulated.machine import LocalMachine
from tests.judging.simulated import failure_of, outcome

Draw = Callable[..., Any]
HEAD = """hostir 1
mesh @mesh [didx] = 0 1
mesh @root [didx] = 1
program @drawn(%x: f32[2, 4], %w: f32[2@didx, 4], %k: f32[4, 4], %z: f32[2, 4] on @root) -> (%y) streams 2 {
  %user = current_stream
  %r = rank of %x over didx
  %y: f32[2, 4] = allocate
  %t: f32[2, 4] = allocate
  %s: f32[2, 4] = allocate_symmetric
  %f: flag[2] = allocate_symmetric
  %g: flag[2] = allocate_symmetric
  %m: f32[2, 4] = allocate
"""
BUFFERS = ["%x", "%y", "%t", "%s"]
STREAMS = ["0", "1", "%user"]
PEER = "(%r + 1) % 2"


class Text:
    """A program under construction, drawn statement by statement."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.count = 0
        self.flights: list[str] = []
        self.epochs = [0, 0]
        self.kernels = 0

    def pick(self, *choices: str) -> str:
        return str(self.draw(st.sampled_from(choices)))

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def add(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def row(self, buffer: str) -> str:
        """Return a row of a buffer; its index may depend on the rank."""
        row = self.name()
        self.add(f"{row} = select {buffer}[{self.pick('0', '1', '%r', '(%r + 1) % 2')}]")
        return row

    def operands(self) -> tuple[str, str]:
        x = self.pick(*BUFFERS)
        out = self.pick(*(name for name in BUFFERS[1:] if name != x))
        if self.draw(st.booleans()):
            return self.row(x), self.row(out)
        return x, out

    def compute(self) -> None:
        x, out = self.operands()
        line = f"{self.pick('relu', 'gelu')} {x} -> {out}"
        self.add(line if self.draw(st.integers(0, 4)) else f"if %r == 0 {{ {line} }}")

    def stream(self) -> None:
        self.add(f"set_stream {self.pick(*STREAMS)}")

    def synchronize(self) -> None:
        self.add(f"synchronize {self.pick(*STREAMS)}")

    def gather(self) -> None:
        handle = self.name()
        self.add(f"{handle} = allgather %w -> {self.pick('%y', '%t', '%s')} over didx")
        self.flights.append(handle)

    def message(self) -> None:
        handle = self.name()
        self.add(
            f"{handle} = exchange {self.pick('%x', '%t')} to {PEER}, {self.pick('%y', '%s')} from {PEER} over didx"
        )
        self.flights.append(handle)

    def transfer(self) -> None:
        """Add a transfer from a mesh of one rank to a mesh of both."""
        handle = self.name()
        self.add(f"{handle} = broadcast %z -> {self.pick('%y', '%t')}")
        self.flights.append(handle)

    def send(self) -> None:
        """Add a message in one direction, posted by each side in a branch."""
        handle, other = self.name(), self.name()
        sender, line = self.draw(st.integers(0, 1)), f"recv {self.pick('%y', '%t')}"
        self.add(f"if %r == {sender} {{ {handle} = send %x to {1 - sender} over didx   wait {handle} }}")
        self.add(f"if %r == {1 - sender} {{ {other} = {line} from {sender} over didx   wait {other} }}")

    def kernel(self) -> None:
        """Add a matmul that waits for flags of a peer and of its rank; the signals may come before or after it."""
        self.kernels += 1
        epoch, order = self.kernels, self.draw(st.permutations(range(3)))
        parts = [
            [f"set_stream {self.pick(*STREAMS)}", f"signal %g[%r] = {epoch} at {PEER} over didx{self.by_sms()}"],
            [f"set_stream {self.pick(*STREAMS)}", f"signal %g[%r] = {epoch} at %r over didx{self.by_sms()}"],
            [f"set_stream {self.pick(*STREAMS)}", f"matmul %s, %k -> %m ready %g >= {epoch} from %r"],
        ]
        if self.draw(st.booleans()):  # copies by SMs, which the matmul directly after them overlaps
            source, row = self.row("%x"), self.row("%s")
            for part, peer in zip(parts, (PEER, "%r"), strict=False):
                part.insert(1, f"put {source} -> {row} at {peer} over didx by 4 sms")
        for n in order:
            for line in parts[n]:
                self.add(line)
            if not self.draw(st.integers(0, 3)):
                self.compute()

    def wait(self) -> None:
        if self.flights:
            self.add(f"wait {self.flights.pop(self.draw(st.integers(0, len(self.flights) - 1)))}")

    def copy(self) -> None:
        if self.draw(st.booleans()):
            self.add(f"put {self.pick(*BUFFERS)} -> %s at {PEER} over didx{self.pick('', ' by 4 sms')}")
        else:
            self.add(f"get %s from {PEER} over didx -> {self.pick('%y', '%t')}")

    def signal(self) -> None:
        slot = self.draw(st.integers(0, 1))
        self.epochs[slot] += 1
        self.add(f"signal %f[{slot}] = {self.epochs[slot]} at {PEER} over didx{self.by_sms()}")

    def by_sms(self) -> str:
        """Return the suffix of a signal: a kernel or the stream sets the flag."""
        return self.pick("", " by 1 sms")

    def wait_signal(self) -> None:
        slot = self.draw(st.integers(0, 1))
        epoch_ahead = self.draw(st.integers(0, 5)) == 0  # sometimes an epoch that no signal has set yet
        latest = self.epochs[slot] + epoch_ahead
        if latest:
            self.add(f"wait_signal %f[{slot}] >= {self.draw(st.integers(1, latest))}")

    def barrier(self) -> None:
        self.add("barrier of %x over didx")

    def fork(self) -> None:
        self.add("for %i in 0..2 { set_stream %i   synchronize %user }")
        self.stream()

    def join(self) -> None:
        self.add("set_stream %user")
        self.add("for %i in 0..2 { synchronize %i }")

    def loop(self) -> None:
        """Add a loop over streams in which rounds access the same or different rows."""
        x, out = self.pick("%x", "%t"), self.pick("%y", "%t", "%s")
        read, write = self.name(), self.name()
        body = [
            f"set_stream {self.pick('%i', '0', '(%i + 1) % 2')}",
            f"{read} = select {x}[{self.pick('%i', '%i', '0')}]",
            f"{write} = select {out}[{self.pick('%i', '%i', '1')}]",
            f"relu {read} -> {write}",
        ]
        self.lines += ["  for %i in 0..2 {", *(f"    {line}" for line in body), "  }"]


ACTIONS = [
    *(Text.compute, Text.compute, Text.loop, Text.gather, Text.wait, Text.copy, Text.message),
    *(Text.transfer, Text.send, Text.kernel),
    *(Text.stream, Text.synchronize, Text.fork, Text.join, Text.signal, Text.wait_signal, Text.barrier),
]


@st.composite
def racy_programs(draw: Draw) -> Program:
    """Draw a program without structural errors; about one in five has no findings."""
    text = Text(draw)
    for action in draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=9)):
        action(text)
    while text.flights:
        text.wait()
    closing = draw(st.sampled_from([(), (Text.join,), (Text.join, Text.barrier), (Text.join, Text.barrier)]))
    for action in closing:
        action(text)
    if closing:
        text.add("relu %x -> %y")
    return hi.parse(f"{HEAD}" + "\n".join([*text.lines, "  free %t", "  free %m", "}"]) + "\n", "drawn.hir")


def observed_race(machine: LocalMachine, seed: int) -> str:
    """Return the error of the simulated ranks if they watch every access, or ""."""
    result = outcome(machine, seed, watch=True)
    return result if isinstance(result, str) else ""


def test_the_checker_and_the_simulated_ranks_agree_on_random_programs() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(racy_programs())
    def agrees(program: Program) -> None:
        findings = [finding for finding in hi.check(program) if finding.level == "error"]
        kinds = {getattr(finding, "category", "structure") for finding in findings}
        counts.update(kinds or {"clean"})
        if "structure" not in kinds:
            assert_simulated_ranks_agree(program, kinds, "\n".join(map(str, findings)))

    agrees()
    for finding, least in {"clean": 30, "race": 60, "unwritten": 30, "nobody sends": 3, "deadlock": 3}.items():
        assert counts[finding] >= least, f"too few programs of a kind: {counts}"


def assert_simulated_ranks_agree(program: Program, kinds: set[str], messages: str) -> None:
    """Assert that the simulated ranks fail as the findings of the checker say."""
    machine = rehearse(program, [random_inputs(program, {}, seed) for seed in (1, 2)])
    if kinds & {"collectives differ", "messages differ", "message without partner", "barriers differ"}:
        assert failure_of(machine, 1), f"{messages}\n{program}"
        return
    race = observed_race(machine, 0)
    if not kinds:
        assert not race, f"{race}\n{program}"
        assert not observed_race(machine, 7), program
        assert not (failure := failure_of(machine, 50)), f"{failure}\n{program}"
    elif kinds <= {"race", "unwritten", "use after free"}:
        assert race, f"only the checker reports:\n{messages}\n{program}"
    if kinds & {"deadlock", "nobody sends"}:
        assert "deadlock" in failure_of(machine, 1), f"{messages}\n{program}"
    elif kinds == {"SMs held"}:
        assert "deadlock" in failure_of(machine, 200), f"{messages}\n{program}"
