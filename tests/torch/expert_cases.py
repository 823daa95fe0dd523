"""Cases of tensor-parallel experts; test_operators.py starts the ranks."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import hostir as hi
import hostir.torch
from tests.torch.on_ranks import RANK, RANKS, assert_near, broadcast, case, group, main, part, tp_mesh

FEATURES, HIDDEN, EXPERTS, EACH = 12, 8, 5, 2


def mixture(x, experts, weights, gate, up, down):
    """Compute a mixture of experts on one rank, token by token and expert by expert."""
    y = torch.zeros_like(x)
    for e in range(len(gate)):
        out = (F.silu(x @ gate[e]) * (x @ up[e])) @ down[e]
        y = y + out * (weights * (experts == e)).sum(-1, keepdim=True)
    return y


def drawn(tokens: int, choose, dtype=torch.float32):
    """Return the unsharded inputs of a mixture of experts, the same on all ranks."""
    shapes = [(tokens * RANKS, FEATURES), (tokens * RANKS, EACH)]
    shapes += [(EXPERTS, FEATURES, HIDDEN * RANKS)] * 2 + [(EXPERTS, HIDDEN * RANKS, FEATURES)]
    x, weights, gate, up, down = (broadcast(torch.rand(shape) - 0.5).to(dtype) for shape in shapes)
    return x, broadcast(choose(tokens * RANKS)), weights, gate, up, down


ROUTES = {
    "any": lambda n: torch.rand(n, EXPERTS).topk(EACH).indices,
    "one expert": lambda n: torch.full((n, EACH), 3),
    "two of five": lambda n: torch.tensor([[0, 4]]).expand(n, -1).contiguous(),
    "some tokens dropped": lambda n: torch.rand(n, EXPERTS).topk(EACH).indices.where(torch.rand(n, EACH) < 0.7, -1),
    "other experts on each rank": lambda n: (torch.arange(n) * EXPERTS // n)[:, None].expand(-1, EACH).contiguous(),
}


def parts_of(tensors):
    x, experts, weights, gate, up, down = tensors
    return (*(part(t, 0) for t in (x, experts, weights)), part(gate, 2), part(up, 2), part(down, 1))


@case
def experts_match_a_mixture_on_one_rank_with_gradients() -> None:
    for strategy in ("auto", "ring", "fused", "sequential"):
        for tokens in (7, 1):
            for choose in ROUTES.values():
                whole = [t.double().requires_grad_() if t.is_floating_point() else t for t in drawn(tokens, choose)]
                mine = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in parts_of(whole)]
                with hi.torch.install(strict=True, strategy=strategy):
                    with torch.no_grad():  # one program
                        assert_near(hi.torch.expert_mlp(*mine, group()), part(mixture(*whole), 0))
                    y, exact = hi.torch.expert_mlp(*mine, group()), mixture(*whole)
                    assert_near(y.detach(), part(exact.detach(), 0))
                    dy = broadcast(torch.rand(exact.shape).double())
                    exact.backward(dy)
                    y.backward(part(dy, 0))
                gradients = parts_of([t.grad if t.is_floating_point() else t for t in whole])
                for ours, theirs in zip(mine, gradients, strict=True):
                    if ours.is_floating_point():
                        assert_near(ours.grad, theirs)


@case
def experts_in_16_bits_are_close() -> None:
    tensors = drawn(16, ROUTES["any"], torch.bfloat16)
    exact = mixture(*(t.double() if t.is_floating_point() else t for t in tensors))
    assert_near(hi.torch.expert_mlp(*parts_of(tensors), group()), part(exact, 0))


@case
def modules_of_experts_train_like_on_one_rank() -> None:
    torch.manual_seed(7)
    # In float64, because the first step of AdamW moves a parameter by the sign of its gradient, however small this is.
    layer = hi.torch.GroupedExperts(EXPERTS, FEATURES, HIDDEN * RANKS, tp_mesh(), dtype=torch.float64)
    whole = [p.full_tensor().detach().clone().requires_grad_() for p in layer.parameters()]
    ours, theirs = torch.optim.AdamW(layer.parameters(), 1e-2), torch.optim.AdamW(whole, 1e-2)
    for step in range(3):
        x, experts, weights, *_ = drawn(4 + step, ROUTES["any"], torch.float64)  # the number of tokens changes
        y, exact = layer(part(x, 0), part(experts, 0), part(weights, 0)), mixture(x, experts, weights, *whole)
        assert_near(y.detach(), part(exact.detach(), 0))
        ours.zero_grad()
        theirs.zero_grad()
        y.square().sum().backward()
        exact.square().sum().backward()
        ours.step()
        theirs.step()
    for parameter, other in zip(layer.parameters(), whole, strict=True):
        assert_near(parameter.full_tensor().detach(), other.detach())
    shape = f"{EXPERTS} experts, {FEATURES} features, {HIDDEN * RANKS} hidden"
    assert repr(layer) == f"GroupedExperts({shape}, {RANKS} ranks)"


class Experts(nn.Module):
    """Experts on one rank, with parameters under the names and in the layout of the style's arguments."""

    def __init__(self, names=("gate", "up", "down"), transposed=False, activation=F.silu, dtype=torch.float32):
        super().__init__()
        self.names, self.transposed, self.activation = names, transposed, activation
        sizes = ((FEATURES, HIDDEN * RANKS), (FEATURES, HIDDEN * RANKS), (HIDDEN * RANKS, FEATURES))
        for name, size in zip(names, sizes, strict=True):
            matrix = torch.rand(EXPERTS, *size) - 0.5
            self.register_parameter(name, nn.Parameter((matrix.mT if transposed else matrix).contiguous().to(dtype)))

    def matrices(self):
        return [p.mT if self.transposed else p for p in (getattr(self, name) for name in self.names)]

    def rows(self, x, e):
        gate, up, down = (matrix[e] for matrix in self.matrices())
        return (self.activation(x @ gate) * (x @ up)) @ down

    def forward(self, x, experts, weights):
        assert not self.training
        parts = (self.rows(x, e) * (weights * (experts == e)).sum(-1, keepdim=True) for e in range(EXPERTS))
        return sum(parts)


class SortedExperts(Experts):
    """Experts that are called with rows in the order of the experts, as those of torchtitan."""

    def forward(self, x, numbers):
        parts = x.split(numbers.tolist())
        return torch.cat([self.rows(part, e) for e, part in enumerate(parts)])


class CombinedExperts(Experts):
    """Experts with gate and up in one parameter, as those of transformers."""

    def __init__(self, transposed=True):
        super().__init__(transposed=transposed)
        self.names = ("gate_up_proj", "down_proj")
        both = torch.cat([self.gate.detach(), self.up.detach()], 1 if transposed else 2)
        self.gate_up_proj, self.down_proj = nn.Parameter(both), self.down
        del self.gate, self.up, self.down

    def matrices(self):
        both, down = super().matrices()
        return [*both.chunk(2, 2), down]


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(FEATURES, HIDDEN * RANKS, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN * RANKS, FEATURES, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


TITANS = {"gate": "w1", "up": "w3", "down": "w2"}
COMBINED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


@case
def a_style_shards_modules_of_experts() -> None:
    style = hi.torch.TensorParallelExperts
    for make, plan in (
        (Experts, style()),
        (lambda: Experts(("w1", "w3", "w2"), transposed=True), style(**TITANS, transposed=True)),
        (lambda: SortedExperts(("w1", "w3", "w2"), transposed=True), style(**TITANS, transposed=True)),
        (lambda: nn.ModuleList(Expert() for _ in range(EXPERTS)), style(**TITANS)),
        (CombinedExperts, style(**COMBINED, transposed=True)),
        (lambda: CombinedExperts(transposed=False), style(**COMBINED)),
    ):
        torch.manual_seed(RANK)
        model = nn.ModuleDict({"experts": make()})
        module = model["experts"]
        if isinstance(module, nn.ModuleList):
            whole = [torch.stack([getattr(e, n).weight.detach().t() for e in module]) for n in TITANS.values()]
        else:
            whole = [matrix.detach().clone() for matrix in module.matrices()]
        whole = [broadcast(matrix.contiguous()).requires_grad_() for matrix in whole]  # rank 0's
        names = [*dict(module.named_parameters())]
        parallelize_module(model, tp_mesh(), {"experts": plan})
        assert model["experts"] is module
        if not isinstance(module, hi.torch.GroupedExperts):
            if isinstance(module, CombinedExperts):
                names = ["down_proj", "gate_up_proj_gate", "gate_up_proj_up"]
            assert [*dict(module.named_parameters())] == names
            assert type(module).__name__.startswith("Sharded")
        assert module.training
        x, experts, weights, *_ = drawn(4, ROUTES["any"])
        mine = [part(t, 0) for t in (x, experts, weights)]
        y, exact = module(*mine), mixture(x, experts, weights, *whole)
        assert_near(y.detach(), part(exact.detach(), 0))
        exact.square().sum().backward()
        y.square().sum().backward()
        for parameter, other in zip(module.stored.parameters(module), whole, strict=True):
            grad = parameter.grad.full_tensor()
            assert_near(grad.mT if plan.stored.transposed and grad.shape != other.shape else grad, other.grad)
        with torch.no_grad():
            batched = module(*(t.unflatten(0, (2, 2)) for t in mine))
            assert_near(batched.flatten(0, 1), y.detach())
            dtensors = [DTensor.from_local(t, tp_mesh(), [Shard(0)]) for t in mine]
            assert_near(module(*dtensors).full_tensor(), exact.detach())


@case
def a_style_refuses_modules_that_it_would_not_compute() -> None:
    style = hi.torch.TensorParallelExperts
    biased = nn.ModuleList(Expert() for _ in range(3))
    biased[1].w2 = nn.Linear(HIDDEN * RANKS, FEATURES)
    sharded = parallelize_module(Experts(), tp_mesh(), style())
    odd = nn.ModuleList(Expert() for _ in range(2))
    odd[1].w1 = odd[1].w3 = nn.Linear(FEATURES, 2, bias=False)
    named = CombinedExperts()
    named.gate_up_proj_up = nn.Parameter(torch.zeros(1))
    for module, plan, problem in (
        (Experts(activation=F.gelu), style(), r"does not compute down\(silu\(gate\(x\)\) \* up\(x\)\)"),
        (Experts(("up", "gate", "down")), style(), "does not compute"),
        (
            SortedExperts(activation=F.relu),
            style(),
            r"(?s)does not compute.*called as module\(rows, numbers of rows\): it ",
        ),
        (Experts(), style(gate="w1"), "has no parameter 'w1'"),
        (Experts(), style(transposed=True), r"(?s)does not compute.*called as module\(tokens, experts, weights\): "),
        (
            Experts(),
            style(up="down", down="up"),
            r"(?s)has gate \[5, 12, .*expected: two parameters \[experts, features",
        ),
        (biased, style(**TITANS), "expert 1 of ModuleList has no linear layer 'w2' without a bias"),
        (nn.ModuleList(), style(), "ModuleList has no linear layer 'gate'"),
        (odd, style(**TITANS), "the layers 'w1' of ModuleList have several sizes"),
        (sharded, style(), "ShardedExperts is sharded already"),
        (CombinedExperts(), style(**COMBINED | {"down": "down"}, transposed=True), "has no parameter 'down'"),
        (CombinedExperts(), style(**COMBINED), "(?s)has gate_up_proj .5, .*., down_proj.*features, 2 "),
        (CombinedExperts(), style(**COMBINED | {"down": "gate_up_proj"}, transposed=True), "has gate_up_proj .5, "),
        (named, style(**COMBINED, transposed=True), "has 'gate_up_proj_up' already"),
        (Experts().to("meta"), style(), "is on meta"),
    ):
        with pytest.raises(hi.HostIRError, match=problem):
            parallelize_module(module, tp_mesh(), plan)
    narrow = Experts()
    narrow.gate, narrow.up = (nn.Parameter(torch.rand(5, FEATURES, HIDDEN * RANKS + 1)) for _ in range(2))
    narrow.down = nn.Parameter(torch.rand(5, HIDDEN * RANKS + 1, FEATURES))
    with pytest.raises(hi.HostIRError, match="ranks do not divide the hidden features"):
        parallelize_module(narrow, tp_mesh(), style())
    x, experts, weights = (part(t, 0) for t in drawn(4, ROUTES["any"])[:3])
    replicated = DTensor.from_local(x, tp_mesh(), [Replicate()])
    for arguments, problem in (
        ((replicated, experts, weights), r"with the placements \(Replicate\(\),\)"),
        ((x, experts[:, 0], weights[:, 0]), "tokens .* and experts"),
    ):
        with pytest.raises(hi.HostIRError, match=problem):
            sharded(*arguments)


@case
def experts_train_on_a_mesh_of_data_parallel_and_tensor_parallel_ranks() -> None:
    grid = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    layer = hi.torch.GroupedExperts(EXPERTS, FEATURES, HIDDEN * RANKS, grid["tp"])
    whole = [broadcast(p.full_tensor().detach()).requires_grad_() for p in layer.parameters()]
    for parameter, exact in zip(layer.parameters(), whole, strict=True):  # equal matrices on all ranks
        parameter.data.copy_(distribute_tensor(exact.detach(), grid["tp"], parameter.placements))
    fully_shard(layer, mesh=grid["dp"])
    assert all(p.device_mesh == grid for p in layer.parameters())
    for tokens in (3, 5):
        x, experts, weights, *_ = drawn(tokens, ROUTES["any"])
        mine, exact = [part(t, 0)[None] for t in (x, experts, weights)], mixture(x, experts, weights, *whole)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*returned a view")
            y = layer(*mine)[0]
        assert_near(y.detach(), part(exact.detach(), 0))
        y.square().sum().backward()
        exact.square().sum().backward()
        for parameter, other in zip(layer.parameters(), whole, strict=True):
            assert_near(parameter.grad.full_tensor() * 2, other.grad)  # fully_shard averages over dp
            parameter.grad = other.grad = None


@case
def gates_have_gradients_for_the_inputs_that_want_them() -> None:
    for wants in itertools.product((False, True), repeat=3):
        tensors = [torch.randn(3, 5).double(), torch.randn(3, 5).double(), torch.rand(3).double()]
        for t, wanted in zip(tensors, wants, strict=True):
            t.requires_grad_(wanted)
        if any(wants):
            assert torch.autograd.gradcheck(torch.ops.hostir.gate, tensors)
    with pytest.raises(ValueError, match="weights of"):
        torch.ops.hostir.gate(torch.rand(4, 6), torch.rand(4, 6), torch.rand(4, 1))


@case
def operators_of_experts_pass_torchs_opcheck() -> None:
    x, experts, _, gate, up, down = parts_of(drawn(4, ROUTES["any"]))
    name, ops = group(), torch.ops.hostir
    torch.library.opcheck(ops.route, (experts, EXPERTS, name))
    routing = ops.route(experts, EXPERTS, name)
    h, weights = torch.rand(RANKS, 4 * EACH, HIDDEN), torch.rand(RANKS, 4, EACH)
    torch.library.opcheck(ops.expert_mlp, (x, gate, up, down, *routing, weights, name))
    for tensor in (x, gate, up, down, h):
        tensor.requires_grad_()
    torch.library.opcheck(ops.all_gather_grouped_matmul, (x, [gate, up], *routing, name))
    torch.library.opcheck(ops.gate, (h, torch.rand_like(h).requires_grad_(), torch.rand(h.shape[:-1]).requires_grad_()))
    torch.library.opcheck(ops.grouped_matmul_reduce_scatter, ([h, h], [down, down], *routing, name))


@case
def arguments_that_do_not_fit_are_refused() -> None:
    x, experts, weights, gate, up, down = parts_of(drawn(4, ROUTES["any"]))
    whole = DTensor.from_local(gate, tp_mesh(), [Shard(2)])
    for arguments, problem in (
        ((x, experts[:3], weights, gate, up, down), "tokens .* experts .* and weights"),
        ((x, experts.float(), weights, gate, up, down), "experts of torch.float32"),
        ((x, experts, weights, gate[1:], up, down), "matrices of shape"),
        ((x, experts, weights, gate, up, down[:, 1:]), "matrices of shape"),
        (
            (x, experts, weights, gate.double(), up.double(), down.double()),
            "x of torch.float32, .*gate of torch.float64",
        ),
        ((x, experts, weights.int(), gate, up, down), "(?s)weights of torch.int32.*expected: one dtype"),
        ((x, experts[:, :0], weights[:, :0], gate, up, down), "expected: at least one expert for each token"),
        ((x, experts, weights, gate[:0], up[:0], down[:0]), "matrices of shape .0, "),
        ((x.tolist(), experts, weights, gate, up, down), r"(?s)x=\[.*expected: a plain tensor"),
        ((x, None, weights, gate, up, down), "experts=None"),
        ((x, experts, weights, whole, up, down), "(?s)gate=a .*DTensor of shape.*GroupedExperts takes DTensors"),
        ((x, experts, weights, gate.to("meta"), up, down), "tensors on cpu, meta"),
    ):
        with pytest.raises(hi.HostIRError, match=problem):
            hi.torch.expert_mlp(*arguments, group())
    with pytest.raises(hi.HostIRError, match="ranks do not divide the hidden features"):
        hi.torch.GroupedExperts(EXPERTS, FEATURES, HIDDEN * RANKS + 1, tp_mesh())
    for number in (0, True, "5"):
        with pytest.raises(hi.HostIRError, match=f"(?s)experts={number!r}.*expected: a positive integer"):
            hi.torch.GroupedExperts(number, FEATURES, HIDDEN * RANKS, tp_mesh())


@case
def torch_compile_traces_experts_without_graph_breaks_for_any_number_of_tokens() -> None:
    layer = hi.torch.GroupedExperts(EXPERTS, FEATURES, HIDDEN * RANKS, tp_mesh())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (4, 6, 9):
        mine = [part(t, 0) for t in drawn(tokens, ROUTES["any"])[:3]]
        eager = layer(*mine)
        eager.square().sum().backward()
        gradients = [p.grad.full_tensor() for p in layer.parameters()]
        layer.zero_grad()
        y = compiled(*mine)
        assert_near(y.detach(), eager.detach())
        y.square().sum().backward()
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            assert_near(parameter.grad.full_tensor(), gradient)
        layer.zero_grad()
        with torch.no_grad():
            assert_near(compiled(*mine), eager.detach())
    assert counter.frame_count == 2  # with and without gradients
    torch._dynamo.reset()


if __name__ == "__main__":
    main()
