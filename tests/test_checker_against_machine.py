"""The checker and the simulated ranks, held against each other on random programs with random synchronisation.

They share no code: the one compares clocks of unrolled events over symbolic regions, the other runs tasks in many
orders and marks the elements that they touch. What one of them sees, the other must see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hostir as hi
from hostir.ir import HostIRError, Program
from hostir.runtime.sharding import random_inputs
from hostir.runtime.simulated.machine import LocalMachine, rehearse

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
WHOLE = ["%x", "%y", "%t", "%s"]
STREAMS = ["0", "1", "%user"]
PEER = "(%r + 1) % 2"


class Text:
    """A program while it is drawn, statement by statement."""

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

    def row(self, whole: str) -> str:
        """A row of a buffer, which a loop or a rank may choose."""
        row = self.name()
        self.add(f"{row} = select {whole}[{self.pick('0', '1', '%r', '(%r + 1) % 2')}]")
        return row

    def operands(self) -> tuple[str, str]:
        x = self.pick(*WHOLE)
        out = self.pick(*(name for name in WHOLE[1:] if name != x))
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
        """From a mesh of one rank to both: the other rank has nothing to send."""
        handle = self.name()
        self.add(f"{handle} = broadcast %z -> {self.pick('%y', '%t')}")
        self.flights.append(handle)

    def send(self) -> None:
        """One direction, posted by each side on its own."""
        handle, other = self.name(), self.name()
        sender, line = self.draw(st.integers(0, 1)), f"recv {self.pick('%y', '%t')}"
        self.add(f"if %r == {sender} {{ {handle} = send %x to {1 - sender} over didx   wait {handle} }}")
        self.add(f"if %r == {1 - sender} {{ {other} = {line} from {sender} over didx   wait {other} }}")

    def kernel(self) -> None:
        """Rows that a peer, or the rank itself, says are there; what it waits for may stand behind something else."""
        self.kernels += 1
        epoch, order = self.kernels, self.draw(st.permutations(range(3)))
        parts = [
            [f"set_stream {self.pick(*STREAMS)}", f"signal %g[%r] = {epoch} at {PEER} over didx{self.by_sms()}"],
            [f"set_stream {self.pick(*STREAMS)}", f"signal %g[%r] = {epoch} at %r over didx{self.by_sms()}"],
            [f"set_stream {self.pick(*STREAMS)}", f"matmul %s, %k -> %m ready %g >= {epoch} from %r"],
        ]
        if self.draw(st.booleans()):  # rows by SMs, beside which the matmul starts if it comes right behind
            mine, row = self.row("%x"), self.row("%s")
            for part, peer in zip(parts, (PEER, "%r"), strict=False):
                part.insert(1, f"put {mine} -> {row} at {peer} over didx by 4 sms")
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
            self.add(f"put {self.pick(*WHOLE)} -> %s at {PEER} over didx{self.pick('', ' by 4 sms')}")
        else:
            self.add(f"get %s from {PEER} over didx -> {self.pick('%y', '%t')}")

    def signal(self) -> None:
        slot = self.draw(st.integers(0, 1))
        self.epochs[slot] += 1
        self.add(f"signal %f[{slot}] = {self.epochs[slot]} at {PEER} over didx{self.by_sms()}")

    def by_sms(self) -> str:
        """Whether a kernel raises a flag."""
        return self.pick("", " by 1 sms")

    def wait_signal(self) -> None:
        slot = self.draw(st.integers(0, 1))
        latest = self.epochs[slot] + (self.draw(st.integers(0, 5)) == 0)  # perhaps one that is yet to come
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
        """Rounds on alternating streams, each of which may or may not keep to its own row."""
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
    """A program that is sound in structure and otherwise as it happens: about one in five is clean."""
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


def diverges(machine: LocalMachine, seeds: range) -> str:
    """How some schedule goes wrong, or differs from program order; nothing where none does."""
    first: list[torch.Tensor] = []
    for seed in seeds:
        try:
            calls = machine.run(seed)
        except HostIRError as failed:
            return f"seed {seed}: {failed}"
        held = [x for outputs in calls for parts in outputs for x in parts if x is not None]
        first = first or held
        if any(x.isnan().any() for x in held):
            return f"seed {seed}: NaN"
        if not all(torch.equal(x, y) for x, y in zip(held, first, strict=True)):
            return f"seed {seed}: other bits than seed {seeds.start}"
    return ""


def watched(machine: LocalMachine, seed: int) -> str:
    """What the simulated ranks see for themselves."""
    try:
        machine.run(seed, watch=True)
    except HostIRError as seen:
        return str(seen)
    return ""


def test_what_the_checker_says_is_what_the_simulated_ranks_see() -> None:
    met: Counter[str] = Counter()

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(racy_programs())
    def hold(program: Program) -> None:
        findings = [found for found in hi.check(program) if found.level == "error"]
        kinds = {getattr(found, "kind", "structure") for found in findings}
        met.update(kinds or {"clean"})
        if "structure" not in kinds:
            agree(program, kinds, "\n".join(map(str, findings)))

    hold()
    for kind, least in {"clean": 30, "race": 60, "unwritten": 30, "nobody sends": 3, "deadlock": 3}.items():
        assert met[kind] >= least, f"the programs that are drawn say too little: {met}"


def agree(program: Program, kinds: set[str], said: str) -> None:
    """Holds what the checker says of a program against what the simulated ranks do."""
    machine = rehearse(program, [random_inputs(program, {}, seed) for seed in (1, 2)])
    if kinds & {"collectives differ", "messages differ", "message without partner", "barriers differ"}:
        assert diverges(machine, range(1)), f"{said}\n{program}"
        return
    seen = watched(machine, 0)
    if not kinds:
        assert not seen, f"{seen}\n{program}"
        assert not watched(machine, 7), program
        assert not (wrong := diverges(machine, range(50))), f"{wrong}\n{program}"
    elif kinds <= {"race", "unwritten", "use after free"}:
        assert seen, f"only the checker sees:\n{said}\n{program}"
    if kinds & {"deadlock", "nobody sends"}:
        assert "deadlock" in diverges(machine, range(1)), f"{said}\n{program}"
    elif kinds == {"SMs held"}:
        assert "deadlock" in diverges(machine, range(200)), f"{said}\n{program}"
