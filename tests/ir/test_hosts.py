"""The number of hosts that meshes state: its text, and numbers that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

import hostir as hi
from hostir.ir.program import stated_hosts
from hostir.ir.source import HostIRError

TEXT = """hostir 1
mesh @mesh [didx] = 0 1 2 3 hosts 2
mesh @half [didx] = 0 1 hosts 2
fusion @f(%a: f32[4@didx, 8], %b: f32[2@didx, 8] on @half) -> (%c) {
  %c: f32[4@didx, 8] = relu %a
}
"""


def test_the_text_of_a_mesh_has_its_hosts() -> None:
    program = hi.parse(TEXT)
    assert str(program) == TEXT
    assert stated_hosts(program) == 2
    plain = hi.parse(TEXT.replace(" hosts 2", ""))
    assert stated_hosts(plain) == 0
    assert plain != program


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("0 1 hosts 2", "0 1 hosts 4", "the meshes of a program state different hosts: 2 and 4"),
        ("0 1 hosts 2", "0 1", "the meshes of a program state different hosts: none and 2"),
        ("hosts 2", "hosts 3", "4 ranks on 3 hosts"),
        ("hosts 2", "hosts 0", "0 hosts"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(HostIRError) as refused:
        hi.parse(TEXT.replace(before, after))
    assert refused.value.diagnostics[0].message == message


@pytest.mark.parametrize("hosts", [0, -1, True, 2.0, "2"])
def test_a_mesh_takes_only_a_number_of_hosts(hosts: Any) -> None:
    with pytest.raises(HostIRError, match="hosts="):
        hi.DeviceMesh(range(4), hosts=hosts)


def fusion_on(*meshes: hi.DeviceMesh) -> hi.Fusion:
    with hi.Fusion("f") as fusion:
        for n, mesh in enumerate(meshes):
            x = hi.tensor(f"x{n}", [4, 8], "f32")
            x.set_device_mesh(mesh)
            fusion.output(hi.relu(x))
    return fusion


def test_meshes_of_a_fusion_state_one_number() -> None:
    with pytest.raises(HostIRError, match="the meshes of @f state 2 and 4 hosts"):
        fusion_on(hi.DeviceMesh(range(4), hosts=2), hi.DeviceMesh(range(4), hosts=4)).program()
    with pytest.raises(HostIRError, match="4 ranks on 3 hosts"):
        fusion_on(hi.DeviceMesh(range(4), hosts=3)).program()
    both = fusion_on(hi.DeviceMesh(range(4), hosts=2), hi.DeviceMesh([0, 1])).program()
    assert [mesh.hosts for mesh in both.meshes] == [2, 2]
