"""A schedule is a page of text: dump it, read it, change it by hand, check it and run it. A mistake shows what fails.

python examples/edit_a_dump.py                          4 simulated ranks
torchrun --nproc-per-node 4 examples/edit_a_dump.py     the correct versions on 4 real ranks as well
hostir lower examples/edit_a_dump.py -o mine.hir        the same with an editor: change mine.hir, then
hostir check mine.hir, and hostir run mine.hir --compare
"""

from __future__ import annotations

import torch

import hostir as hi


def gathered(ranks: int = 4, S: int = 6, M: int = 16, K: int = 64, N: int = 32) -> hi.Fusion:
    with hi.Fusion("gathered") as fusion:
        a = hi.tensor("a", [S, ranks, M, K], "f32")
        b = hi.tensor("b", [K, N], "f32")
        c = hi.matmul(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(hi.ParallelType.DIDx)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


# By hand: three streams instead of two, and the last slice first.
BY_HAND = {
    "streams 2": "streams 3",
    "for %s in 0..2": "for %s in 0..3",
    "set_stream %i % 2": "set_stream %i % 3",
    "%a_dense[%i]": "%a_dense[5 - %i]",
    "%a_full[%i]": "%a_full[5 - %i]",
    "%c[%i]": "%c[5 - %i]",
}
# A mistake: the wait comes after the matmul, so the matmul races with the allgather of its slice.
TOO_LATE = {
    "    wait %a_full_i_ready\n": "",
    "matmul %a_full_i, %b -> %c_i\n": "matmul %a_full_i, %b -> %c_i\n    wait %a_full_i_ready\n",
}


def changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def edit(text: str, changes: dict[str, str]) -> hi.Program:
    """Change the text and parse it. Raises if the text no longer parses or check finds a mistake."""
    program = hi.parse(changed(text, changes), "edited.hir")
    if findings := hi.check(program):
        raise hi.HostIRError(*findings)
    return program


def main() -> None:
    with hi.session() as job:  # this rank of torchrun's job; None without torchrun
        ranks, device = (job.size, job.device) if job else (4, "cpu")
        torch.manual_seed(0)
        a, b = torch.randn(6, ranks, 16, 64, device=device), torch.randn(64, 32, device=device)
        exact = a.double() @ b.double()

        text = str(hi.lower(gathered(ranks), streams=2))
        by_hand = edit(text, BY_HAND)
        (c,) = hi.run(by_hand, a, b)
        if job and job.rank:
            return
        print(by_hand)
        print(f"by hand: relative error {(c - exact).norm() / exact.norm():.1e}")

        try:
            edit(text, {"    wait %a_full_i_ready\n": ""})
        except hi.HostIRError as wrong:
            print(f"\nno wait at all:\n{wrong}\n")
        try:
            edit(text, TOO_LATE)
        except hi.HostIRError as wrong:
            print(f"wait too late:\n{wrong}\n")
        too_late = hi.parse(changed(text, TOO_LATE), "edited.hir")
        for seed in range(6):  # each seed is an order that the hardware could choose; buffers start as NaN
            try:
                (c,) = hi.run(too_late, a.cpu(), b.cpu(), machine="local", seed=seed, check=False)
                found = f"relative error {(c - exact.cpu()).norm() / exact.norm().cpu():.1e}"
            except hi.HostIRError as wrong:
                found = wrong.diagnostics[0].message
            print(f"wait too late, schedule {seed}: {found}")


if __name__ == "__main__":
    main()
