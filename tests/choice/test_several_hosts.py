"""Plans for several hosts: their number, the times of NICs between them, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hostir as hi
from examples import patterns
from hostir.__main__ import main
from hostir.choice.candidates import candidates_of
from hostir.choice.cost import CostTransfer, Crossing, tasks_of
from hostir.choice.decision import choose, with_hosts_of
from hostir.choice.hardware import H200, Hardware
from hostir.choice.platforms import Platform, planned, reference
from hostir.choice.simulation import Costs
from hostir.ir.program import Program, shared_across, stated_hosts, with_hosts
from hostir.ir.source import HostIRError
from hostir.job.hosts import equal_hosts

FAST_NICS = replace(H200, nic=1e6, nic_latency=0.0)


def gathered(ranks: int, dtype: str = "bf16") -> Program:
    return patterns.allgather_matmul(ranks, S=1, M=64 * ranks, K=256, N=256, dtype=dtype).program()


def transfers(program: Program, hosts: int) -> list[CostTransfer]:
    tasks = tasks_of(program, {}, equal_hosts(program.ranks, hosts))
    return [task.work for task in tasks if task.rank == 0 and isinstance(task.work, CostTransfer)]


def time_of(transfer: CostTransfer, hardware: Hardware) -> float:
    return Costs(hardware, "cublas", 0.0).transfer(transfer)


# The number of hosts --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("machine", "hosts", "ranks", "placed"),
    [
        ("h100x8", 2, 16, equal_hosts(16, 2)),
        ("h100x8", None, 8, ()),
        ("h100x8", None, 4, ()),
        ("h100", 4, 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("h200", None, 8, ()),
        ("h200", None, 16, equal_hosts(16, 2)),
        ("h200", None, 12, equal_hosts(12, 2)),
        ("h200", None, 11, equal_hosts(11, 11)),
        ("cpu", None, 64, ()),
    ],
)
def test_a_host_has_at_most_its_gpus(machine: str, hosts: int | None, ranks: int, placed: Any) -> None:
    platform = planned(gathered(ranks), machine, hosts)
    assert platform.hosts == placed
    assert platform.ranks == (8 if machine == "h100x8" and not hosts else ranks)


def test_the_platform_names_its_hosts() -> None:
    assert str(planned(gathered(16), "h200x8", 2)) == "16 x h200 on 2 hosts as estimated elsewhere"
    assert str(reference(H200, 8)) == "8 x h200 as estimated elsewhere"


@pytest.mark.parametrize(
    ("machine", "hosts", "ranks", "message"),
    [
        ("h100x8", 2, 8, "@allgather_matmul is for 8 ranks, and 2 hosts of h100x8 have 16"),
        ("h100", 3, 8, "@allgather_matmul is for 8 ranks, and 3 hosts of h100 have 6"),
        ("h100x16", None, 16, "16 x h100 in one host"),
        ("h100", 1, 16, "16 x h100 in one host"),
        ("h100x8", 0, 8, "0 hosts"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(machine: str, hosts: int, ranks: int, message: str) -> None:
    with pytest.raises(HostIRError) as refused:
        planned(gathered(ranks), machine, hosts)
    assert refused.value.diagnostics[0].message == message


def stated(ranks: int, hosts: int) -> hi.Fusion:
    with hi.Fusion("stated") as fusion:
        a, b = hi.tensor("a", [ranks, 64, 64], "bf16"), hi.tensor("b", [64, 64], "bf16")
        mesh = hi.DeviceMesh(range(ranks), hosts=hosts)
        c = hi.matmul(a.shard(0, mesh), b)
        c.set_device_mesh(hi.DeviceMesh(range(ranks)))  # one mesh states the hosts for all
        fusion.output(c)
    return fusion


def test_hosts_that_a_mesh_states_are_those_of_the_plan() -> None:
    program = stated(16, 4).program()
    assert [mesh.hosts for mesh in program.meshes] == [4]
    assert planned(program, "h200").hosts == planned(program, "h200x4").hosts == equal_hosts(16, 4)
    assert stated_hosts(hi.lower(program, "sequential")) == 4
    with pytest.raises(HostIRError, match="the meshes of @stated state 4 hosts, not 2"):
        planned(program, "h200x8", 2)


def test_simulated_ranks_stand_for_the_hosts_that_a_mesh_states() -> None:
    choice = choose(stated(4, 2).program(), machine="local", warn=False)
    assert "on 2 hosts" in str(choice)
    assert "stay within one host" in " ".join(choice.fallbacks)


# What crosses ---------------------------------------------------------------------------------------------------------
def test_a_ring_of_all_ranks_crosses_from_each_host_to_the_next() -> None:
    (transfer,) = transfers(hi.lower(gathered(8), "sequential"), 2)
    assert transfer.crossing == Crossing(transfer.bytes * 7 // 8, hosts=2, senders=4, sharers=4)
    (inside,) = transfers(hi.lower(gathered(8), "sequential"), 1)
    assert inside == replace(transfer, crossing=None)


def test_teams_inside_a_host_cross_nothing_and_teams_across_hosts_share_the_nics() -> None:
    text = """hostir 1
mesh @mesh [dp, tp] = (0 1) (2 3)
program @f(%a: f32[2@tp, 8], %b: f32[2@dp, 8]) -> (%x, %y) {
  %x: f32[2, 8] = allocate
  %x_ready = allgather %a -> %x over tp
  wait %x_ready
  %y: f32[2, 8] = allocate
  %y_ready = allgather %b -> %y over dp
  wait %y_ready
}
"""
    inside, across = transfers(hi.parse(text), 2)
    assert inside.crossing is None
    assert across.crossing == Crossing(across.bytes // 2, hosts=2, senders=1, sharers=2)


def test_an_all_to_all_sends_what_other_hosts_need() -> None:
    fusion = patterns.alltoall(ranks=4).program()
    (transfer,) = transfers(hi.lower(fusion, "sequential"), 2)
    assert transfer.crossing == Crossing(transfer.bytes, hosts=2, senders=2, sharers=2)  # half the bytes of two ranks


def test_only_messages_to_other_hosts_cross() -> None:
    def crossings(to: str, source: str) -> list[Crossing | None]:
        text = f"""hostir 1
mesh @mesh [x] = 0 1 2 3
program @f(%a: f32[8]) -> (%y) {{
  %r = rank of %a over x
  %y: f32[8] = allocate
  %sent = exchange %a to {to}, %y from {source} over x
  wait %sent
}}
"""
        tasks = tasks_of(hi.parse(text), {}, equal_hosts(4, 2))
        return [t.work.crossing for t in tasks if isinstance(t.work, CostTransfer)]

    assert crossings("(%r + 1) % 4", "(%r + 3) % 4") == [Crossing(32, hosts=2, senders=1, sharers=2)] * 4
    neighbour = "%r - %r % 2 + (%r + 1) % 2"
    assert crossings(neighbour, neighbour) == [None] * 4


# Times ----------------------------------------------------------------------------------------------------------------
def test_the_slower_of_links_and_nics_counts() -> None:
    inside = CostTransfer("allgather", 1 << 28, 16)
    across = replace(inside, crossing=Crossing((1 << 28) * 15 // 16, hosts=2, senders=8, sharers=8))
    assert time_of(across, FAST_NICS) == time_of(inside, H200)
    slow = replace(H200, nic=4.5)
    assert time_of(across, slow) == pytest.approx(H200.collective + 6.0 + (1 << 28) * 15 / 16 / (8 * 4.5) / 1e3)
    shared = replace(H200, gpus_per_nic=2, nic=9.0)
    assert time_of(across, shared) == pytest.approx(time_of(across, slow))
    assert time_of(across, replace(H200, gpus_per_nic=0, nic=36.0)) == pytest.approx(time_of(across, slow))


def test_each_further_host_and_step_adds_latency() -> None:
    def added(collective: str, hosts: int) -> float:
        inside = CostTransfer(collective, 1 << 10, 32)
        across = replace(inside, crossing=Crossing(0, hosts, senders=4, sharers=4))
        return time_of(across, H200) - time_of(inside, H200)

    assert added("allgather", 2) == pytest.approx(H200.nic_latency)
    assert added("allgather", 8) == pytest.approx(7 * H200.nic_latency)
    assert added("allreduce", 8) == pytest.approx(14 * H200.nic_latency)


def test_a_slow_nic_makes_the_timeline_longer() -> None:
    program = hi.lower(patterns.allgather_matmul(16, S=2, M=8192, K=8192, N=1024, dtype="bf16"), "pipeline")
    across = hi.timeline(program, machine="h100x2", hosts=8)
    assert across.machine == "16 x h100 on 8 hosts"
    assert across.us > 1.5 * hi.timeline(program, machine="h100x8", hosts=2).us


# What is refused ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
def test_a_timeline_of_shared_memory_across_hosts_is_refused(strategy: str) -> None:
    program = hi.lower(gathered(4), strategy)
    assert hi.timeline(program, machine="h100x4").us > 0
    with pytest.raises(
        HostIRError, match="shares memory between ranks: copies, signals and barriers stay within one host"
    ):
        hi.timeline(program, machine="h100x2", hosts=2)


def test_the_choice_for_several_hosts_has_no_shared_memory() -> None:
    platform: Platform = planned(gathered(16), "h200")
    candidates = candidates_of(with_hosts_of(gathered(16), platform), platform)
    assert {c.strategy for c in candidates.programs} == {"sequential", "pipeline", "hierarchical"}
    assert not any(shared_across(program, platform.hosts) for program in candidates.programs.values())
    refused = {it.candidate.strategy: it.reason for it in candidates.impossible}
    assert "stay within one host" in refused["ring"]


def test_each_number_of_slices_is_a_candidate_and_is_lowered_again_to_the_same_program() -> None:
    fusion = with_hosts(patterns.row_parallel(4, M=8192, K=4096, N=4096, dtype="bf16").program(), 2)
    programs = candidates_of(fusion, reference(H200, 4, 2), "cublas").programs
    slices = {c.streams: program for c, program in programs.items() if c.strategy == "hierarchical"}
    assert [*slices] == [2, 4, 8]
    for streams, program in slices.items():
        assert hi.lower(fusion, "hierarchical", streams).body == program.body


def test_the_command_line_plans_for_several_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    source = ["examples/patterns.py:allgather_matmul", "--ranks", "16", "--machine", "h100x8"]
    assert main(["explain", *source, "--hosts", "2"]) == 0
    printed = capsys.readouterr().out
    assert "16 x h100 on 2 hosts as estimated elsewhere" in printed
    assert "ring" in printed.partition("not possible:")[2]
    assert main(["timeline", *source, "--hosts", "2", "--strategy", "pipeline"]) == 0
    assert "on 16 x h100 on 2 hosts" in capsys.readouterr().out
    assert main(["timeline", *source, "--hosts", "2", "--strategy", "ring"]) == 2
    assert "copies, signals and barriers stay within one host" in capsys.readouterr().err
    assert main(["explain", *source, "--hosts", "4"]) == 2
    assert "4 hosts of h100x8 have 32" in capsys.readouterr().err
    assert main(["explain", *source[:3], "--hosts", "2", "--device", "cpu"]) == 2
    assert "--hosts names another machine" in capsys.readouterr().err
