"""Mixtures of experts with tensor parallelism: `hi.compile`, all its candidates, and NCCL + grouped matmuls of torch.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.moe --out benchmarks/results/moe
    torchrun --standalone --nproc-per-node 2 -m benchmarks.moe --rows Mixtral-layer,Qwen3-trained-skewed:2048
    torchrun --standalone --nproc-per-node 2 -m benchmarks.moe --device cpu --shrink 32 --rows Mixtral-layer:2048

A row of the table is a part of a layer with M tokens on all ranks together, and with the widths of a rank of 8:

    Mixtral    Mixtral 8x7B: 8 experts, of which 2 compute each token
    Qwen3      Qwen3-30B-A3B: 128 experts, of which 8 compute each token; each rank has all hidden features of an expert
    DeepSeek   DeepSeek-V3 with 16 of its experts, of which 2 compute each token

The parts:

    alone      the grouped matmul of gate and up, on each rank without the others: hostir's Triton kernel
    fp8        the same in fp8, with a scale for each row and for each column of each matrix; the result is bf16
    gather     all-gather of the tokens, and this matmul
    scatter    the grouped matmul of down, the weighted sum of each token's rows, and reduce-scatter of the sums
    layer      the layer after the router, forward: gather, gate and up, silu, down, weighted sum, scatter
    trained    the same with gradients of tokens, weights and matrices, by `hi.torch.expert_mlp`; it includes the
               exchange of the router's choices

The router's choices are drawn on the device. They are uniform, or half of all rows go to a tenth of the experts
(`-skewed`). floor = max(the computation by torch, the collectives by NCCL one after another). For hostir, a call with
`out=` of what `hi.compile` has chosen in its trial is scored; in the parts `alone`, `fp8` and `trained`, a call of the
kernel and of the function.

The peers:

    NCCL + cuBLAS               a matmul for each expert; the host waits for the numbers of rows
    NCCL + grouped_mm           torch._grouped_mm, in which the rows of all ranks are sorted by expert together; in fp8
                                torch._scaled_grouped_mm
    NCCL + grouped_mm compiled  the same, with torch.compile for the computation between the collectives; only on GPUs
    DTensor                     tokens and matrices are DTensors
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import hostir as hi
from benchmarks.comparison import (
    SAMPLE,
    Candidate,
    Entrant,
    Judge,
    NotPossibleError,
    Subject,
    Work,
    compare,
    options_parser,
    summed_rows,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, GRAPH, HOSTIR, Result, Row
from benchmarks.torch_operators import ours
from hostir.choice.platforms import Platform
from hostir.job.session import Session
from hostir.kernels.table import kernel_table
from hostir.torch import expert_mlp

GROUPED, COMPILED_GROUPED, DTENSOR = "NCCL + grouped_mm", "NCCL + grouped_mm compiled", "DTensor"
EXPERTS = {"Mixtral": (8, 2), "Qwen3": (128, 8), "DeepSeek": (16, 2)}  # all experts, and the experts of a token
SHARDED = {"x": 0, "h": 2, "first": 2, "gate": 2, "up": 2, "down": 1}  # axes of inputs of fusions
SOME = 3  # experts, and hidden features of each, whose gradients are compared with float64
FP8 = torch.float8_e4m3fn
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]  # (rows [S, K], matrices [E, K, N], offsets [E + 1]) -> [S, N]


@dataclass(frozen=True)
class Route:
    """The rows of tokens, sorted by expert. Leading axes are sources; each source has its own tokens and rows.

    Fields:
        order: `[..., S]`, the token of each row.
        offsets: `[..., experts + 1]`, the first row of each expert, and the number of rows.
        places: `[..., T, k]`, the row of each token and expert.
    """

    order: Tensor
    offsets: Tensor
    places: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Route:
        """Return the route of tokens `[..., T, k]`, each with the numbers of its k experts."""
        in_order, rows = chosen.flatten(-2).sort(stable=True, dim=-1)
        begins = torch.arange(experts + 1, device=chosen.device).expand(*chosen.shape[:-2], -1).contiguous()
        numbers = torch.arange(rows.shape[-1], device=chosen.device).expand_as(rows)
        places = torch.empty_like(rows).scatter_(-1, rows, numbers).view(chosen.shape)
        offsets = torch.searchsorted(in_order, begins, out_int32=True)
        return cls((rows // chosen.shape[-1]).int(), offsets, places.int())

    def copy_(self, other: Route) -> None:
        """Overwrite the tensors, so that captured graphs read the new route."""
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def sort(self, rows: Tensor) -> Tensor:
        """Return rows `[..., T, k, N]` of tokens and experts as `[..., S, N]`, in the order of the route."""
        flat = rows.flatten(-3, -2)
        return torch.empty_like(flat).scatter_(-2, self.places.flatten(-2)[..., None].long().expand_as(flat), flat)

    def by_token(self, rows: Tensor) -> Tensor:
        """Return sorted rows `[..., S, N]` as `[..., T * k, N]`, in the order of tokens: the inverse of `sort`."""
        return rows.gather(-2, self.places.flatten(-2)[..., None].long().expand(*rows.shape[:-2], -1, rows.shape[-1]))


def draw(tokens: int, experts: int, each: int, *, skewed: bool, device: torch.device) -> Tensor:
    """Return `each` different experts for each token. If `skewed`, half of them are among the first tenth of all."""
    popular, from_popular = (max(experts // 10, 1), each // 2) if skewed else (0, 0)
    few = torch.rand(tokens, popular, device=device).topk(from_popular).indices
    others = torch.rand(tokens, experts - popular, device=device).topk(each - from_popular).indices
    return torch.cat([few, popular + others], 1)


def gather(local: Tensor) -> Tensor:
    """All-gather a tensor along its first axis."""
    full = local.new_empty(local.shape[0] * dist.get_world_size(), *local.shape[1:])
    dist.all_gather_into_tensor(full, local.contiguous())
    return full


def scatter(sums: Tensor) -> Tensor:
    """Return this rank's rows of the sum over the ranks."""
    y = sums.new_empty(sums.shape[0] // dist.get_world_size(), *sums.shape[1:])
    dist.reduce_scatter_tensor(y, sums.contiguous())
    return y


# What the peers compute -------------------------------------------------------------------------------------------
def one_by_one(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return each row times the matrix of its expert, with a matmul for each expert."""
    begins = offsets.tolist()
    return torch.cat([rows[i:j] @ w for i, j, w in zip(begins, begins[1:], matrices, strict=False)])


def by_torch(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return the same by torch's operator, which takes the end of each group."""
    return torch._grouped_mm(rows, matrices, offs=offsets[1:])


class Gathering(torch.autograd.Function):
    """All-gather of tokens by NCCL, with gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return gather(local)

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor) -> Tensor:
        return scatter(d_tokens)


class Scattering(torch.autograd.Function):
    """Reduce-scatter of sums by NCCL, with gradients."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor) -> Tensor:
        return scatter(sums)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return gather(dy)


def waited(x: Tensor) -> Tensor:
    """Wait for the collective that writes a tensor of DTensor."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def multiplied(grouped: Grouped, tokens: Tensor, route: Route, *first: Tensor) -> list[Tensor]:
    """Return the products of the rows of tokens and several matrices."""
    rows = tokens[route.order]
    return [grouped(rows, matrices, route.offsets) for matrices in first]


def activated(products: Sequence[Tensor]) -> Tensor:
    """Return the rows after the activation. The products of gate and up are separate, or side by side."""
    gate, up = products if len(products) > 1 else products[0].chunk(2, dim=-1)
    return F.silu(gate) * up


def combined(grouped: Grouped, h: Tensor, route: Route, weights: Tensor, down: Tensor) -> Tensor:
    """Return the products of the rows `h` and `down`, weighted and added up for each token."""
    return (grouped(h, down, route.offsets)[route.places] * weights[..., None]).sum(1)


def mixture(grouped: Grouped, tokens: Tensor, route: Route, weights: Tensor, down: Tensor, *first: Tensor) -> Tensor:
    """Return the result of a layer for all its tokens."""
    return combined(grouped, activated(multiplied(grouped, tokens, route, *first)), route, weights, down)


def weighted_before(tokens: Tensor, route: Route, weights: Tensor, down: Tensor, first: Tensor) -> Tensor:
    """Return the same result by a matmul for each expert, but with weights applied before the matrices `down`."""
    h = activated(multiplied(one_by_one, tokens, route, first)) * route.sort(weights[..., None])
    return one_by_one(h, down, route.offsets)[route.places].sum(1)


def exact_mixture(tokens: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, down: Tensor) -> Tensor:
    """Return the result of a layer for tokens and weights in float64, expert by expert."""
    y = torch.zeros_like(tokens)
    for expert in chosen.unique().tolist():
        some = (chosen == expert).any(1).nonzero()[:, 0]
        h = activated([tokens[some] @ first[expert].double()])
        weight = (weights * (chosen == expert)).sum(1)[some, None]
        y = y.index_add(0, some, weight * (h @ down[expert].double()))
    return y


# The parts of a layer ---------------------------------------------------------------------------------------------
class Mixture(Subject):
    """The tensors of a row on this rank. N is the number of hidden features of an expert on a rank.

    Fields:
        gathers, scatters: True if the part gathers the tokens, and if it scatters the result.
        names: the inputs of the part's fusion.
        matrices: the number of matrices `[K, N]` by which the part multiplies each row.
        x: `[M / ranks, K]`, this rank's tokens; on GPUs in symmetric memory.
        tokens: `[M, K]`, the tokens of all ranks.
        chosen, weights: `[M, each]`, the experts of all tokens, and their weights.
        together: the route of all tokens.
        by_rank: the route of the tokens `[ranks, M / ranks]`, in which each rank is a source.
        first: `[experts, K, 2 * N]`, this rank's columns of the matrices gate and up, side by side.
        gate, up: `[experts, K, N]`, the same columns.
        down: `[experts, N, K]`, this rank's rows of the matrices after the activation.
        y: `[M / ranks, K]`, this rank's tokens of the result.
    """

    gathers, scatters = True, True
    names: tuple[str, ...] = ()
    matrices = 3

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
        M, N, K = row.M, row.N, row.K
        empty = partial(torch.empty, dtype=dtype, device=self.device)
        self.x = self.shared(M // self.ranks, K)
        self.tokens, self.y = empty(M, K), empty(M // self.ranks, K)
        self.first = empty(self.experts, K, 2 * N).normal_(std=K**-0.5)
        self.down = empty(self.experts, N, K).normal_(std=N**-0.5)
        self.gate, self.up = (half.contiguous() for half in self.first.chunk(2, dim=2))
        self.chosen, self.weights = gather(self.draw()), empty(M, self.each)
        self.together, self.by_rank = self.routes()
        self.renew()

    @property
    def experts(self) -> int:
        """The number of experts."""
        return EXPERTS[self.row.model.split("-")[0]][0]

    @property
    def each(self) -> int:
        """The number of experts that compute a token."""
        return EXPERTS[self.row.model.split("-")[0]][1]

    @property
    def skewed(self) -> bool:
        """True if half of all rows go to a tenth of the experts."""
        return self.row.model.endswith("-skewed")

    def draw(self) -> Tensor:
        """Return new experts for each token of this rank."""
        tokens = self.row.M // self.ranks
        return draw(tokens, self.experts, self.each, skewed=self.skewed, device=self.device)

    def routes(self) -> tuple[Route, Route]:
        """Return the route of all tokens together, and the route in which each rank is a source."""
        by_rank = self.chosen.view(self.ranks, -1, self.each)
        return Route.of(self.chosen, self.experts), Route.of(by_rank, self.experts)

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.x.normal_()
        shares = torch.rand(len(self.x), self.each, device=self.device).softmax(1)
        self.chosen.copy_(gather(self.draw()))
        self.weights.copy_(gather(shares))
        for route, new in zip((self.together, self.by_rank), self.routes(), strict=True):
            route.copy_(new)
        dist.all_gather_into_tensor(self.tokens, self.x.detach())

    def about(self) -> Result:
        flops = 2 * self.row.M * self.each * self.row.N * self.row.K * self.matrices
        return {"flops": flops, "experts": self.experts, "each": self.each, "skewed": self.skewed}

    # The peers
    def compute(self, grouped: Grouped) -> Any:
        """Return this rank's result for all tokens, without communication."""
        raise NotImplementedError

    def parts(self) -> Mapping[str, Work]:
        sums = torch.zeros_like(self.tokens)
        return {"gemm": partial(self.compute, by_torch), "nccl": partial(self.in_sequence, lambda: sums)}

    def in_sequence(self, compute: Callable[[], Tensor]) -> Tensor:
        """Gather the tokens, compute, and scatter the result."""
        if self.gathers:
            dist.all_gather_into_tensor(self.tokens, self.x.detach())
        result = compute()
        if not self.scatters:
            return result
        dist.reduce_scatter_tensor(self.y, result)
        return self.y

    def peers(self) -> Mapping[str, Callable[[], Any]]:
        computations = {
            BY_HAND: partial(self.compute, one_by_one),
            GROUPED: partial(self.compute, by_torch),
            COMPILED_GROUPED: compiled(partial(self.compute, by_torch), self.device),
        }
        calls = {name: partial(self.in_sequence, compute) for name, compute in computations.items()}
        return {**calls, DTENSOR: self.by_dtensor}

    def peers_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        for entrant in super().peers_in(modes):
            waits = (entrant.name, entrant.mode) == (BY_HAND, GRAPH)
            yield replace(entrant, make=no_graph) if waits else entrant

    def by_dtensor(self) -> Any:
        """Return the result of the part by DTensor."""
        raise NotImplementedError

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.ranks,))

    def distributed(self, x: Tensor, placement: Placement) -> Any:
        """Return a DTensor, of which `x` is this rank's part."""
        return DTensor.from_local(x, self.mesh, [placement], run_check=False)

    def replicated(self, x: Any) -> Any:
        """Return a DTensor that all ranks hold. `x` is a tensor that is equal on all ranks, or a DTensor."""
        if not isinstance(x, DTensor):
            return self.distributed(x, Replicate())
        return x.redistribute(placements=[Replicate()])

    def replicated_route(self, route: Route) -> Route:
        """Return a route as DTensors."""
        return Route(*(self.replicated(t) for t in vars(route).values()))

    # hostir
    @property
    def operands(self) -> dict[str, Tensor]:
        """This rank's parts of the inputs of fusions, by name."""
        matrices = {"first": self.first, "gate": self.gate, "up": self.up, "down": self.down}
        weights = self.weights.view(self.by_rank.places.shape)
        return {"x": self.x[None], **vars(self.by_rank), "weights": weights, **matrices}

    @property
    def shapes(self) -> dict[str, Sequence[int]]:
        """The shapes of the inputs of fusions, by name."""
        ranks, E, N, K = self.ranks, self.experts, self.row.N * self.ranks, self.row.K
        M, S = self.row.M // ranks, self.row.M // ranks * self.each
        route = {"order": (ranks, S), "offsets": (ranks, E + 1), "places": (ranks, M, self.each)}
        matrices = {"first": (E, K, 2 * N), "gate": (E, K, N), "up": (E, K, N), "down": (E, N, K)}
        return {"x": (ranks, M, K), "h": (ranks, S, N), **route, "weights": route["places"], **matrices}

    def define(self, mesh: hi.DeviceMesh, **inputs: hi.Tensor) -> tuple[hi.Tensor, int]:
        """Define the result of the part's fusion. Return it, and the axis on which it is sharded."""
        raise NotImplementedError

    def fusion(self, slices: int) -> hi.Fusion:
        mesh, inputs = hi.DeviceMesh(range(self.ranks)), {}
        with hi.Fusion("experts") as fusion:
            for name in self.names:
                dtype = "i32" if name in ("order", "offsets", "places") else self.dtype_name
                inputs[name] = hi.tensor(name, self.shapes[name], dtype)
            y, sharded = self.define(mesh, **inputs)
            fusion.output(y)
        y.shard(sharded, mesh)
        for name in self.names:
            if name in SHARDED:
                inputs[name].shard(SHARDED[name], mesh)
        return fusion

    def inputs(self, slices: int) -> Sequence[Tensor]:
        return [self.operands[name] for name in self.names]

    def out(self, slices: int) -> Tensor:
        return self.y[None]

    # Right or wrong
    @property
    def rows_by_token(self) -> Tensor:
        """The input of `piece`, for all tokens."""
        return self.tokens

    def piece(self, rows: Tensor, route: Route, weights: Tensor) -> Tensor:
        """Return what NCCL + cuBLAS computes for some tokens, in their order. `rows` are rows of `rows_by_token`."""
        raise NotImplementedError

    def in_pieces(self, pieces: int) -> Tensor:
        """Return the results of `piece` for so many parts of the tokens, one after another."""
        parts = zip(*(t.chunk(pieces) for t in (self.rows_by_token, self.chosen, self.weights)), strict=True)
        return torch.cat([self.piece(rows, Route.of(chosen, self.experts), w) for rows, chosen, w in parts])

    @property
    def pieces(self) -> Sequence[int]:
        """Numbers of parts of the tokens, from 1 on."""
        return sorted({1, 2, self.ranks})

    def exact(self, tokens: Tensor) -> Tensor:
        """Return this rank's addend of the result for some tokens, in float64."""
        raise NotImplementedError

    def judge(self) -> Judge:
        sample, exact = summed_rows(self.row.M, self.ranks, self.rank, self.exact, self.device)
        results = []
        for n in self.pieces:
            dist.reduce_scatter_tensor(self.y, self.in_pieces(n))
            results.append(self.y.clone())
        return Judge(sample, exact, results[0], results[1:])


def no_graph() -> Candidate:
    """Refuse to make a candidate in mode `graph`."""
    raise NotPossibleError("no CUDA graph, because the host waits for the numbers of rows")


def compiled(compute: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return what torch.compile makes of a computation; on a CPU, a function that refuses."""

    def refuse(*_: Any) -> Any:
        raise NotPossibleError("torch.compile is measured on GPUs only")

    if device.type != "cuda":
        return refuse
    torch._dynamo.reset()  # with the code of many rows, it would compile no more, and run this row's eagerly
    return torch.compile(lambda *operands: compute(*operands), dynamic=False)


class Gathered(Mixture):
    """All-gather of the tokens, and the grouped matmul of gate and up.

    Fields:
        products: `[ranks, S, 2 * N]`, the result, by source.
    """

    scatters, matrices = False, 2
    names = ("x", "order", "offsets", "first")

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
        self.products = self.tokens.new_empty(self.ranks, row.M * self.each // self.ranks, 2 * row.N)

    def compute(self, grouped: Grouped) -> Any:
        return multiplied(grouped, self.tokens, self.together, self.first)[0]

    def by_dtensor(self) -> Any:
        tokens, first = self.replicated(self.distributed(self.x, Shard(0))), self.distributed(self.first, Shard(2))
        return multiplied(by_torch, tokens, self.replicated_route(self.together), first)[0].to_local()

    def define(self, mesh: hi.DeviceMesh, **inputs: hi.Tensor) -> tuple[hi.Tensor, int]:
        rows = hi.permute_rows(inputs["x"], inputs["order"])
        rows.set_device_mesh(mesh)  # so that tokens are gathered: they are fewer than rows
        return hi.grouped_matmul(rows, inputs["first"], inputs["offsets"]), 2

    def out(self, slices: int) -> Tensor:
        return self.products

    def piece(self, rows: Tensor, route: Route, weights: Tensor) -> Tensor:
        return route.by_token(multiplied(one_by_one, rows, route, self.first)[0])

    def judge(self) -> Judge:
        sample = torch.randint(self.chosen.numel(), (SAMPLE,), device=self.device).unique()
        numbers, rows = self.chosen.flatten()[sample], self.exact_rows(sample // self.each)
        exact = rows.new_empty(len(sample), 2 * self.row.N)
        for expert in numbers.unique().tolist():
            exact[numbers == expert] = rows[numbers == expert] @ self.exact_matrix(expert)
        unfused, *others = map(self.in_pieces, self.pieces)
        return RowsJudge(self, sample, exact, unfused, others)

    def exact_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens in float64, as the matmul reads them."""
        return self.tokens[tokens].double()

    def exact_matrix(self, expert: int) -> Tensor:
        """Return the matrix of an expert in float64, as the matmul reads it."""
        return self.first[expert].double()


class RowsJudge(Judge):
    """Compares rows in the order of the tokens. hostir sorts each rank's rows; the peers sort all rows together."""

    def __init__(
        self, of: Mixture, sample: Tensor, exact: Tensor, unfused: Tensor, in_pieces: Sequence[Tensor]
    ) -> None:
        super().__init__(sample, exact, unfused, in_pieces)
        self.of = of

    def rows_of(self, c: Tensor) -> Tensor:
        route = self.of.together if c.ndim == 2 else self.of.by_rank
        return super().rows_of(route.by_token(c))


class Alone(Gathered):
    """The grouped matmul of gate and up alone. Rows are sorted before, and no rank communicates.

    Fields:
        rows: `[M * each, K]`, the rows of all tokens, sorted by expert.
    """

    gathers = False

    def renew(self) -> None:
        super().renew()
        rows = self.tokens[self.together.order]
        self.rows: Tensor = self.rows.copy_(rows) if hasattr(self, "rows") else rows

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": partial(self.compute, by_torch)}

    def compute(self, grouped: Grouped) -> Any:
        return grouped(self.rows, self.first, self.together.offsets)

    @property
    def kernel_operands(self) -> tuple[Tensor | None, ...]:
        """The operands of hostir's kernel."""
        return self.rows, self.first, self.together.offsets

    def peers(self) -> Mapping[str, Callable[[], Any]]:
        return {name: call for name, call in super().peers().items() if name in (BY_HAND, GROUPED)}

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        yield from self.peers_in(modes)
        family = "triton" if self.on_gpu else "aten"
        kernel, out = kernel_table(family, self.device.type)["grouped_matmul"], self.products.flatten(0, 1)
        operands = self.kernel_operands

        def call() -> Tensor:
            kernel(out, *operands)
            return out

        name = f"{HOSTIR} {family}"
        yield from (Entrant(name, mode, partial(ours, name, mode, call)) for mode in modes)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in fp8, and the scale of each row."""
    limit = torch.finfo(FP8).max
    scales = (x.float().abs().amax(-1, keepdim=True) / limit).clamp_min(2.0**-126)
    return (x.float() / scales).clamp(-limit, limit).to(FP8), scales


class AloneInFp8(Alone):
    """The same in fp8. Rows and matrices are quantized before.

    Fields:
        narrow: the rows and the matrices in fp8. The columns of the matrices are contiguous.
        scales: the scales of the rows and of the columns.
    """

    def renew(self) -> None:
        super().renew()
        (rows, of_rows), (columns, of_columns) = quantized(self.rows), quantized(self.first.mT.contiguous())
        operands = rows, columns, of_rows, of_columns
        if not hasattr(self, "scales"):
            self.narrow, self.scales = (rows, columns.mT), (of_rows, of_columns.mT)
        for old, new in zip((self.narrow[0], self.narrow[1].mT, *self.scales), operands, strict=True):
            old.view(new.shape).copy_(new)

    @property
    def kernel_operands(self) -> tuple[Tensor | None, ...]:
        return *self.narrow, self.together.offsets, None, *self.scales

    def compute(self, grouped: Grouped) -> Any:
        return IN_FP8[grouped](*self.narrow, *self.scales, self.together.offsets)

    def piece(self, rows: Tensor, route: Route, weights: Tensor) -> Tensor:
        narrow, scales = quantized(rows[route.order])
        return route.by_token(scaled_one_by_one(narrow, self.narrow[1], scales, self.scales[1], route.offsets))

    def exact_rows(self, tokens: Tensor) -> Tensor:
        narrow, scales = quantized(self.tokens[tokens])
        return narrow.double() * scales

    def exact_matrix(self, expert: int) -> Tensor:
        return self.narrow[1][expert].double() * self.scales[1][expert]


def scaled_one_by_one(rows: Tensor, matrices: Tensor, of_rows: Tensor, of_columns: Tensor, offsets: Tensor) -> Tensor:
    """Return each row times the matrix of its expert in fp8, with a matmul for each expert; on CPUs computed in f32."""
    begins, parts = offsets.tolist(), []
    for i, j, w, s in zip(begins, begins[1:], matrices, of_columns, strict=False):
        if not rows.is_cuda:
            parts.append(((rows[i:j].float() @ w.float()) * of_rows[i:j] * s).bfloat16())
        elif i < j:  # cuBLAS takes multiples of 16 rows
            fit = F.pad(rows[i:j].view(torch.uint8), (0, 0, 0, (i - j) % 16)).view(FP8)
            scales = F.pad(of_rows[i:j], (0, 0, 0, (i - j) % 16))
            parts.append(torch._scaled_mm(fit, w, scales, s, out_dtype=torch.bfloat16)[: j - i])
    return torch.cat(parts)


def scaled_by_torch(rows: Tensor, matrices: Tensor, of_rows: Tensor, of_columns: Tensor, offsets: Tensor) -> Tensor:
    """Return the same by torch's operator; on CPUs as `scaled_one_by_one`."""
    if not rows.is_cuda:
        return scaled_one_by_one(rows, matrices, of_rows, of_columns, offsets)
    scales = of_rows[:, 0], of_columns[:, 0]
    return torch._scaled_grouped_mm(rows, matrices, *scales, offs=offsets[1:], out_dtype=torch.bfloat16)


IN_FP8: Mapping[Grouped, Callable[..., Tensor]] = {one_by_one: scaled_one_by_one, by_torch: scaled_by_torch}


class Scattered(Mixture):
    """The grouped matmul of down, the weighted sum of the rows of each token, and reduce-scatter of the sums.

    Fields:
        rows: `[M, each, N]`, the rows of each token after the activation.
        h, h_by_rank: the same rows, sorted by expert, for the routes `together` and `by_rank`.
    """

    gathers, matrices = False, 1
    names = ("h", "offsets", "places", "weights", "down")

    def renew(self) -> None:
        super().renew()
        rows = torch.randn(self.row.M, self.each, self.row.N, device=self.device).to(self.dtype)
        h, h_by_rank = self.together.sort(rows), self.by_rank.sort(rows.unflatten(0, (self.ranks, -1)))
        if not hasattr(self, "rows"):
            self.rows, self.h, self.h_by_rank = rows, h, h_by_rank
        for old, new in ((self.rows, rows), (self.h, h), (self.h_by_rank, h_by_rank)):
            old.copy_(new)

    @property
    def rows_by_token(self) -> Tensor:
        return self.rows

    @property
    def operands(self) -> dict[str, Tensor]:
        return {**super().operands, "h": self.h_by_rank}

    def compute(self, grouped: Grouped) -> Any:
        return combined(grouped, self.h, self.together, self.weights, self.down)

    def by_dtensor(self) -> Any:
        h, down = self.distributed(self.h, Shard(1)), self.distributed(self.down, Shard(1))
        y = combined(by_torch, h, self.replicated_route(self.together), self.replicated(self.weights), down)
        return waited(y.redistribute(placements=[Shard(0)]).to_local())

    def define(self, mesh: hi.DeviceMesh, **inputs: hi.Tensor) -> tuple[hi.Tensor, int]:
        rows = hi.grouped_matmul(inputs["h"], inputs["down"], inputs["offsets"])
        return hi.combine_rows(rows, inputs["places"], inputs["weights"]), 0

    def piece(self, rows: Tensor, route: Route, weights: Tensor) -> Tensor:
        return combined(one_by_one, route.sort(rows), route, weights, self.down)

    def exact(self, tokens: Tensor) -> Tensor:
        rows, chosen, weights = self.rows[tokens].double(), self.chosen[tokens], self.weights[tokens].double()
        y = rows.new_zeros(len(tokens), self.row.K)
        for expert in chosen.unique().tolist():
            y += (rows * (weights * (chosen == expert))[..., None]).sum(1) @ self.down[expert].double()
        return y


class Layer(Mixture):
    """The layer after the router, forward."""

    names = ("x", "order", "offsets", "places", "weights", "gate", "up", "down")

    def compute(self, grouped: Grouped) -> Any:
        return mixture(grouped, self.tokens, self.together, self.weights, self.down, self.first)

    def by_dtensor(self) -> Any:
        return waited(self.distributed_layer(self.x, self.replicated(self.weights), self.together))

    def distributed_layer(self, x: Tensor, weights: Any, route: Route) -> Any:
        """Return this rank's tokens of the layer's result by DTensor. `weights` is a DTensor."""
        tokens, rows = self.replicated(self.distributed(x, Shard(0))), self.replicated_route(route)
        gate, up, down = (self.distributed(w, Shard(n)) for w, n in ((self.gate, 2), (self.up, 2), (self.down, 1)))
        y: Any = mixture(by_torch, tokens, rows, weights, down, gate, up)
        return y.redistribute(placements=[Shard(0)]).to_local()

    def define(self, mesh: hi.DeviceMesh, **inputs: hi.Tensor) -> tuple[hi.Tensor, int]:
        rows, offsets = hi.permute_rows(inputs["x"], inputs["order"]), inputs["offsets"]
        rows.set_device_mesh(mesh)
        gate, up = (hi.grouped_matmul(rows, inputs[name], offsets) for name in ("gate", "up"))
        y = hi.grouped_matmul(hi.silu(gate) * up, inputs["down"], offsets)
        return hi.combine_rows(y, inputs["places"], inputs["weights"]), 0

    def piece(self, rows: Tensor, route: Route, weights: Tensor) -> Tensor:
        return mixture(one_by_one, rows, route, weights, self.down, self.first)

    def exact(self, tokens: Tensor) -> Tensor:
        operands = self.tokens[tokens].double(), self.chosen[tokens], self.weights[tokens].double()
        return exact_mixture(*operands, self.first, self.down)


class Trained(Layer):
    """The layer forward and backward, with the exchange of the router's choices. The gradients are the result.

    Fields:
        local_chosen, local_weights: `[M / ranks, each]`, the experts of this rank's tokens, and their weights.
        dy: `[M / ranks, K]`, the gradient of this rank's tokens of the layer's result.
        all_dy: `[M, K]`, the same for all tokens.
    """

    matrices = 9

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
        for t in (self.x, self.local_weights, self.first, self.gate, self.up, self.down):
            t.requires_grad_()

    def renew(self) -> None:
        super().renew()
        chosen, weights = (t.chunk(self.ranks)[self.rank] for t in (self.chosen, self.weights))
        if not hasattr(self, "dy"):
            self.local_chosen, self.local_weights = chosen.clone(), weights.clone()
            self.dy, self.all_dy = torch.empty_like(self.y), torch.empty_like(self.tokens)
        self.local_chosen.copy_(chosen)
        self.local_weights.copy_(weights)
        dist.all_gather_into_tensor(self.all_dy, self.dy.normal_())

    def compute(self, grouped: Grouped) -> Any:
        with torch.enable_grad():
            tokens, weights = (t.detach().requires_grad_() for t in (self.tokens, self.weights))
            y = mixture(grouped, tokens, self.together, weights, self.down, self.first)
            return torch.autograd.grad(y, (tokens, weights, self.first, self.down), self.all_dy)

    def parts(self) -> Mapping[str, Work]:
        both, sums = super().parts(), torch.zeros_like(self.tokens)
        once = partial(self.in_sequence, lambda: sums)
        return {**both, "nccl": lambda: (once(), once())}

    def peers(self) -> Mapping[str, Callable[[], Any]]:
        one, grouped = (partial(self.mixture_of, way) for way in (one_by_one, by_torch))
        layers = {BY_HAND: one, GROUPED: grouped, COMPILED_GROUPED: compiled(grouped, self.device)}
        return {**{name: partial(self.trained, layer) for name, layer in layers.items()}, DTENSOR: self.by_dtensor}

    def mixture_of(self, grouped: Grouped, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's addend of the layer's result for tokens and the router's choices."""
        return mixture(grouped, tokens, Route.of(chosen, self.experts), weights, self.down, self.first)

    def weighted_before(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the same as `mixture_of`, with other roundings."""
        return weighted_before(tokens, Route.of(chosen, self.experts), weights, self.down, self.first)

    def trained(self, layer: Callable[..., Tensor], pieces: int = 1) -> tuple[Tensor, ...]:
        """Return the gradients by a peer. `layer` computes this rank's addend of some tokens."""
        with torch.enable_grad():
            tokens, weights = Gathering.apply(self.x), Gathering.apply(self.local_weights)
            operands = tokens, gather(self.local_chosen), weights
            parts = zip(*(t.chunk(pieces) for t in operands), strict=True)
            sums = layer(*operands) if pieces == 1 else torch.cat([layer(*part) for part in parts])
            y = Scattering.apply(sums)
            return torch.autograd.grad(y, (self.x, self.local_weights, self.first, self.down), self.dy)

    def by_dtensor(self) -> Any:
        with torch.enable_grad():
            weights = self.replicated(self.distributed(self.local_weights, Shard(0)))
            y = self.distributed_layer(self.x, weights, Route.of(gather(self.local_chosen), self.experts))
            waited(y)
            gradients = torch.autograd.grad(y, self.leaves, self.dy)
            return tuple(waited(gradient) for gradient in gradients)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors whose gradients are computed, if gate and up are separate."""
        return self.x, self.local_weights, self.gate, self.up, self.down

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        yield from self.peers_in(modes)
        yield from (Entrant(HOSTIR, mode, partial(ours, HOSTIR, mode, self.by_hostir)) for mode in modes)

    def by_hostir(self) -> tuple[Tensor, ...]:
        """Return the gradients by hostir."""
        with torch.enable_grad():
            routed = self.x, self.local_chosen, self.local_weights
            y = expert_mlp(*routed, self.gate, self.up, self.down, dist.group.WORLD)
            return torch.autograd.grad(y, self.leaves, self.dy)

    def judge(self) -> Judge:
        layer = partial(self.mixture_of, one_by_one)
        unfused, *others = (self.trained(layer, n) for n in self.pieces)
        others.append(self.trained(self.weighted_before))
        sample, exact = summed_rows(self.row.M, self.ranks, self.rank, self.exact, self.device)
        numbers, rows = self.exact_matrices()
        return MixtureJudge(torch.cat([sample, numbers]), torch.cat([exact, rows]), unfused, others)

    def exact(self, tokens: Tensor) -> Tensor:
        """Return this rank's addend of the gradient of some tokens, in float64."""
        with torch.enable_grad():
            x = self.tokens[tokens].double().requires_grad_()
            y = exact_mixture(x, self.chosen[tokens], self.weights[tokens].double(), self.first, self.down)
            return torch.autograd.grad(y, x, self.all_dy[tokens].double())[0]

    def exact_matrices(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of a few hidden features of a few experts in float64, with the numbers of these rows.

        The hidden features of an expert do not depend on each other. So the gradients of some follow from these alone.
        """
        numbers, gradients, N = [], [], self.row.N
        for expert in self.chosen.unique()[:SOME].tolist():
            some = (self.chosen == expert).any(1).nonzero()[:, 0]
            weight = (self.weights * (self.chosen == expert)).sum(1)[some, None].double()
            features = torch.randint(N, (SOME,), device=self.device).unique()
            first = self.first[expert][:, torch.cat([features, N + features])].double().requires_grad_()
            down = self.down[expert][features].double().requires_grad_()
            with torch.enable_grad():
                y = weight * (activated([self.tokens[some].double() @ first]) @ down)
                d_first, d_down = torch.autograd.grad(y, (first, down), self.all_dy[some].double())
            begin = len(self.x) + 2 * N * expert
            numbers += [begin + features, begin + N + features]
            numbers.append(len(self.x) + 2 * N * self.experts + N * expert + features)
            gradients += [d_first.t(), d_down]
        return torch.cat(numbers), torch.cat(gradients)


def blocks(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of tokens, gate and up, down, and weights, each as rows of K elements.

    The gradients of gate and up are separate, or side by side.
    """
    d_x, d_weights, *d_first, d_down = gradients
    first, size = torch.cat(d_first, 2).transpose(1, 2), d_x.shape[1]
    last = F.pad(d_weights.flatten(), (0, -d_weights.numel() % size))
    return [d_x, *(t.reshape(-1, size) for t in (first, d_down, last))]


class MixtureJudge(Judge):
    """Compares the gradients of a layer.

    A row is a token, a hidden feature of an expert, or weights. The rows of experts with few tokens may be short.
    """

    def __init__(
        self, sample: Tensor, exact: Tensor, unfused: Sequence[Tensor], in_pieces: Sequence[Sequence[Tensor]]
    ) -> None:
        self.sizes = [len(block) for block in blocks(unfused)]
        super().__init__(sample, exact, self.rows_of(unfused), [self.rows_of(c) for c in in_pieces])

    def rows_of(self, c: Any) -> Tensor:
        return torch.cat(blocks(c))

    def lengths(self) -> Tensor:
        """Return the length of each row, but at least the mean length of the rows of its tensor."""
        parts = super().lengths().split(self.sizes)
        return torch.cat([lengths.clamp(min=float(lengths.mean())) for lengths in parts])

    def spoil(self, c: Any) -> None:
        for gradient in c:
            super().spoil(gradient)


PARTS: Mapping[str, type[Mixture]] = {
    "alone": Alone,
    "fp8": AloneInFp8,
    "gather": Gathered,
    "scatter": Scattered,
    "layer": Layer,
    "trained": Trained,
}


def subject(row: Row, dtype: torch.dtype, job: Session) -> Mixture:
    """Return the subject of a row."""
    return PARTS[row.model.split("-")[1]](row, dtype, job)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    return options_parser(__doc__, "moe").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    compare(parse_options(arguments), "moe", subject)


if __name__ == "__main__":
    main()
