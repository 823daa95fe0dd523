"""Transfers serve collectives of any kind: here a reduce-scatter, of which no strategy knows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import hostir as hi
from hostir.ir import Program
from hostir.ir.comm_ops import Communication, ReduceScatter
from hostir.ir.host_ops import Chunk, For, Select
from hostir.ir.onesided_ops import Barrier, Put, Signal, WaitSignal
from hostir.ir.op import Bin, Lit, Value
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Sum
from hostir.ir.types import Axis
from hostir.lower import Pass, run_passes
from hostir.lower.host import Host
from hostir.lower.strategies import EXPLICIT, FINISH
from hostir.lower.transfers import Blocks, Transfers
from hostir.runtime.reference import compare, reference
from hostir.runtime.sharding import random_inputs
from tests.mutation import convicted
from tests.runtime.whole import run_whole


@dataclass(frozen=True)
class PutAndSum(Pass):
    """Puts each block of a partial sum to the rank that is to have it, which adds up the blocks of all ranks."""

    name = "put_and_sum"

    def run(self, program: Program) -> Program:
        host = Host(program)
        for s in program.body:
            if isinstance(s, ReduceScatter):
                self.scatter(host, s)
            else:
                host.whole(s)
        return host.finished()

    def scatter(self, host: Host, s: ReduceScatter) -> None:
        partial, out = host.values[s.x.name], host.destination(s.out)
        ranks = Size(s.mesh.size(s.over))
        room = out.tensor.with_axes([Axis.of(ranks), *out.tensor.axes])
        transfers = Transfers(host, s, Value(host.names.fresh("blocks"), room), flags=ranks)
        team, turn, source = transfers.team, host.index("i"), host.index("j")
        to = team.peer(Bin("+", turn, Lit(1)))  # the own block last

        def chunk(out: Value) -> Chunk:
            return Chunk(partial, out, to, ranks, 0)

        block = Value(host.names.fresh("block"), chunk(partial).infer())
        mine = Value(host.names.fresh("mine"), out.tensor)
        put = transfers.put_and_signal(Blocks(block, mine, (), flag=team.rank), to, "the sum of this rank for another")
        host.body += [
            *transfers.reuse_barrier(),
            Select(transfers.buffer, mine, team.rank),
            For(turn.value, ranks, (chunk(block), *put)),
            For(source.value, ranks, (transfers.wait(source),)),
            Sum(out=out, x=transfers.buffer, axis=0),
        ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_reduce_scatter_by_transfers_is_proved_and_gives_the_unsharded_result(ranks: int) -> None:
    fusion = hi.parse(f"""hostir 1
mesh @mesh [tp] = {" ".join(map(str, range(ranks)))}
fusion @f(%x: f32[{2 * ranks}, {4 * ranks}@tp], %w: f32[{4 * ranks}@tp, 6]) -> (%y) {{
  %p: f32[{2 * ranks}, 6] partial(tp) = matmul %x, %w
  %y: f32[{2 * ranks}@tp, 6] = reduce_scatter %p over tp
}}
""")
    program = run_passes(fusion, [*EXPLICIT, PutAndSum(), *FINISH])
    assert hi.parse(str(program)) == program
    kinds = {type(s) for s in program.walk()}
    assert {Put, Signal, WaitSignal, Barrier} <= kinds
    assert not any(issubclass(kind, Communication) for kind in kinds)
    assert convicted(program, ranks) == ""
    inputs = random_inputs(fusion, {}, seed=ranks)
    plain, exact = reference(fusion, inputs, dtype=None), reference(fusion, inputs)
    for seed in range(4):
        assert all(found.good for found in compare(program, run_whole(program, inputs, seed=seed), plain, exact))
