"""What tests/gpu/stress_onesided.py runs, drawn from a seed: programs, and iterations of calls of them. No GPU here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from random import Random

import torch

from hostir.ir import parse
from hostir.ir.program import Program
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.fused import Fused, Push
from hostir.lower.strategies import EXPLICIT, FINISH, lower, run_passes

ROWS = (1, 3, 16, 33, 64, 100, 129, 160, 256, 512)  # of one rank in one slice: no block divides most of them
MOST_ROWS = 2048
DEPTHS = (64, 72, 100, 128, 257, 512, 1000)
COLUMNS = (8, 24, 60, 64, 100, 129, 256, 384)
SMALL = 128  # the most of K and N in f32
GPU_FORMS = ("eager", "out", "captured")
CPU_FORMS = ("eager", "out")
MODES = ("random", "fused_pairs", "allreduces")


# Programs ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Product:
    """One right-hand side: `[K, columns]`, or `[columns, K]` where it is `linear`; `split` over the ranks or not."""

    columns: int
    linear: bool
    bias: bool
    split: bool

    def __str__(self) -> str:
        return f"{self.columns}{' linear' * self.linear}{' bias' * self.bias}{' split' * self.split}"


@dataclass(frozen=True)
class Config:
    """A program and what computes it. A is `[slices, ranks, M, depth]`, with one slice `[ranks, M, depth]`.

    Either its rows are gathered and multiplied, or the products of parts along K are reduced, and scattered or not.
    With no products A itself is reduced.

    Fields:
        reduced: the latter.
        scattered: each rank gets rows of the sum, instead of all of it.
        steps: of an allreduce: `blocks` in one step, as small as they like; `two`, in chunks where copy engines send;
            else as the strategy chooses.
        mesh: the ranks that hold parts, in the order of their parts.
        rows: the two M that it is called with; where they are one, the program has the number in the place of a symbol,
            which a rank that holds nothing could not bind.
        kept: whether the gathered A is an output too.
        priorities: of its worker streams, from the first on; 0 is low, -1 high.
    """

    strategy: str
    kernels: str
    dtype: str
    mesh: tuple[int, ...]
    slices: int
    rows: tuple[int, int]
    depth: int
    products: tuple[Product, ...]
    kept: bool
    priorities: tuple[int, ...]
    reduced: bool = False
    scattered: bool = False
    steps: str = ""

    @property
    def spins(self) -> bool:
        """Whether its matmul is a kernel that holds SMs while it waits for peers."""
        return self.strategy in ("fused", "push") and self.kernels == "triton"

    def shape(self, last: str, mark: str = "") -> str:
        m = "M" if len(set(self.rows)) > 1 else str(self.rows[0])
        return ", ".join([*([str(self.slices)] if self.slices > 1 else []), f"{len(self.mesh)}{mark}", m, last])

    def fusion(self) -> Program:
        """What is computed, before lowering: its outputs are the products, then the gathered A where it is kept."""
        if self.reduced:
            return self._reduced()
        type, k = self.dtype, str(self.depth)
        inputs = [f"%a: {type}[{self.shape(k, '@tp')}]"]
        body = [f"  %full: {type}[{self.shape(k)}] = allgather %a over tp"]
        for i, product in enumerate(self.products):
            columns = f"{product.columns}{'@tp' * product.split}"
            inputs.append(f"%b{i}: {type}[{f'{columns}, {k}' if product.linear else f'{k}, {columns}'}]")
            bias = f", %z{i}" if product.bias else ""
            if product.bias:
                inputs.append(f"%z{i}: {type}[{columns}]")
            kind = "linear" if product.linear else "matmul"
            out = f"%c{i}: {type}[{self.shape(str(product.columns))}] auto"
            body.append(f"  {out} = {kind} %full, %b{i}{bias}")
        outputs = [f"%c{i}" for i in range(len(self.products))] + ["%full"] * self.kept
        return self._parsed(inputs, outputs, body)

    def program(self) -> Program:
        """The host program."""
        sizes = {"blocks": {"extra_bytes": 1 << 40}, "two": {"extra_bytes": -1}}.get(self.steps)
        if sizes is None:
            return lower(self.fusion(), self.strategy)
        steps = AllReduceSteps(**sizes, min_rows=1, min_bytes=1)
        form = Fused(2, steps=steps) if self.strategy == "fused" else Push(steps)
        return run_passes(self.fusion(), [*EXPLICIT, form, *FINISH])

    def _reduced(self) -> Program:
        """Every rank holds a part of all K; its rows of the sum, or all, are what a rank gets."""
        type, k, rows = self.dtype, f"{self.depth}@tp", "@tp" * self.scattered
        if not self.products:
            n = str(self.depth)
            moved = f"{'reduce_scatter' if self.scattered else 'allreduce'} %a over tp"
            body = [f"  %c: {type}[{self.shape(n, rows)}] = {moved}"]
            return self._parsed([f"%a: {type}[{self.shape(n)}] partial(tp)"], ["%c"], body)
        inputs, body = [f"%a: {type}[{self.shape(k)}]"], []
        for i, product in enumerate(self.products):
            n = str(product.columns)
            inputs.append(f"%b{i}: {type}[{f'{n}, {k}' if product.linear else f'{k}, {n}'}]")
            kind = "linear" if product.linear else "matmul"
            body.append(f"  %c{i}: {type}[{self.shape(n, rows)}] = {kind} %a, %b{i}")
        return self._parsed(inputs, [f"%c{i}" for i in range(len(self.products))], body)

    def _parsed(self, inputs: list[str], outputs: list[str], body: list[str]) -> Program:
        head = f"fusion @stress({', '.join(inputs)}) -> ({', '.join(outputs)}) {{"
        mesh = f"mesh @mesh [tp] = {' '.join(map(str, self.mesh))}"
        return parse("\n".join(["hostir 1", mesh, head, *body, "}\n"]))

    def __str__(self) -> str:
        sides = " and ".join(map(str, self.products)) or "1"
        m = f", M {self.rows[0]} or {self.rows[1]}" if len(set(self.rows)) > 1 else ""
        a = f"[{self.shape(str(self.depth))}]{m}{', kept' * self.kept}"
        mesh = " ".join(map(str, self.mesh))
        steps = f" in {self.steps}" if self.steps else ""
        what = f"summed up{' and scattered' * self.scattered}{steps}: " if self.reduced else ""
        return f"{self.strategy} {self.kernels} {self.dtype} on {mesh}: {what}A {a}, times {sides}"


def products_of(
    config: Config, wholes: Sequence[torch.Tensor], rows: int = 1, columns: int = 1
) -> tuple[torch.Tensor, ...]:
    """The whole outputs, by torch alone, in the dtype of the whole inputs.

    In so many pieces of rows, and of columns where these are split over the ranks, as each rank would multiply those
    that it holds: for other shapes cuBLAS may take another algorithm, which rounds in other places. Of few columns with
    a bias in bf16 it rounds twice. Where ranks' products are summed up, each of these is rounded.
    """
    a, *rest = wholes
    if config.reduced and not config.products:
        return (a,)
    if config.reduced:
        return tuple(_sum_of_products(config, a, product, b) for product, b in zip(config.products, rest, strict=True))
    outputs = []
    for product in config.products:
        b, *rest = rest
        z, rest = (rest[0], rest[1:]) if product.bias else (None, rest)
        parts = a.chunk(rows, dim=int(config.slices > 1))
        # A rank's own memory begins on 256 bytes, which also decides what cuBLAS takes.
        weights = [w.clone() for w in (b if product.linear else b.t()).chunk(columns if product.split else 1)]
        biases = [None] * len(weights) if z is None else [bias.clone() for bias in z.chunk(len(weights))]
        done = [
            torch.cat([torch.nn.functional.linear(part, w, bias) for w, bias in zip(weights, biases, strict=True)], -1)
            for part in parts
        ]
        outputs.append(torch.cat(done, dim=int(config.slices > 1)))
    return (*outputs, a) if config.kept else tuple(outputs)


def _sum_of_products(config: Config, a: torch.Tensor, product: Product, b: torch.Tensor) -> torch.Tensor:
    """Each rank's product, in the dtype of the inputs, and their sum in f32 or better, rounded once."""
    ranks = len(config.mesh)
    parts = zip(a.chunk(ranks, -1), (b if product.linear else b.t()).chunk(ranks, -1), strict=True)
    wide = torch.promote_types(a.dtype, torch.float32)
    products = [torch.nn.functional.linear(part, weight).to(wide) for part, weight in parts]
    return torch.stack(products).sum(0).to(a.dtype)


def pool(
    seed: int, ranks: int, size: int, kernels: Sequence[str] = ("aten", "triton"), mode: str = "random"
) -> list[Config]:
    """Configurations of all strategies and kernels, the same on every rank."""
    random = Random(f"pool {seed}")
    kinds = [(strategy, kernel) for kernel in kernels for strategy in ("ring", "fused", "push")]
    found: list[Config] = []
    while len(found) < size:
        config = _config(random, ranks, *kinds[len(found) % len(kinds)])
        if mode != "allreduces" or (config.reduced and not config.scattered):
            found.append(config)
    return found


def _config(random: Random, ranks: int, strategy: str, kernels: str) -> Config:
    dtype, mesh, slices = (
        random.choice(("bf16", "bf16", "f16", "f32")),
        _mesh(random, ranks),
        random.choice((1, 1, 2, 3)),
    )
    most = SMALL if dtype == "f32" else max(DEPTHS)
    rows = [m for m in ROWS if m * slices * len(mesh) <= MOST_ROWS]
    m, reduced = random.choice(rows), random.random() < 0.5
    depth = random.choice([k for k in DEPTHS if k <= most])
    products = [_product(random, len(mesh), most) for _ in range(random.choice((1, 1, 2)))]
    if reduced and random.random() < 0.2:
        products = []
    scattered = reduced and random.random() < 0.4
    steps = random.choice(("", "blocks", "two")) if reduced and not scattered and strategy != "ring" else ""
    return Config(
        *(strategy, kernels, dtype, mesh, slices),
        rows=(m, random.choice(rows) if len(mesh) == ranks else m),
        depth=max(1, depth // len(mesh)) * len(mesh) if reduced else depth,
        products=tuple(replace(p, bias=False, split=False) if reduced else p for p in products),
        kept=random.random() < 0.3 and not reduced,
        priorities=tuple(random.choice((0, -1)) for _ in range(8)),
        reduced=reduced,
        scattered=scattered,
        steps=steps,
    )


def _mesh(random: Random, ranks: int) -> tuple[int, ...]:
    """All ranks in order, mostly; else in another order, or only some of them."""
    kind = random.random()
    if kind < 0.6 or (ranks == 2 and kind < 0.8):
        return tuple(range(ranks))
    size = ranks if kind < 0.8 or ranks == 2 else random.randrange(2, ranks)
    return tuple(random.sample(range(ranks), size))


def _product(random: Random, ranks: int, most: int) -> Product:
    linear, split = random.random() < 0.5, random.random() < 0.4
    columns = random.choice([n for n in COLUMNS if n <= most])
    if split:
        columns = max(1, columns // ranks) * ranks
    return Product(columns, linear, linear and random.random() < 0.5, split)


# Iterations -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """Calls back to back of one configuration, on one of the caller's streams.

    Fields:
        config: its number in the pool.
        sizes: for each call, which of its two M.
        form: `eager`, `out` (with `out=`) or `captured` (replays of the caller's own CUDA graph).
        slot: which of two sets of tensors, where the form has them.
        again: whether the first call is repeated, eagerly, and must give the same bits.
    """

    config: int
    sizes: tuple[int, ...]
    form: str
    slot: int
    again: bool


@dataclass(frozen=True)
class Iteration:
    """One or two jobs at once.

    Fields:
        priorities: of the caller's streams, one a job; None is the stream that torch begins with.
        late: whether ranks are held up before calls, each on its own.
        slow: whether statements are held up, on their streams.
    """

    jobs: tuple[Job, ...]
    priorities: tuple[int | None, ...]
    late: bool
    slow: bool


def iteration(
    seed: int, number: int, configs: Sequence[Config], forms: Sequence[str], mode: str = "random"
) -> Iteration:
    """One iteration, the same on every rank, whatever came before.

    Of two executors at once only one may have kernels that hold SMs while they wait: two such can keep each other's
    peers from the SMs. Mode `fused_pairs` draws nothing else.
    """
    random = Random(f"iteration {seed} {number}")
    chosen = [random.randrange(len(configs))]
    others = [i for i, c in enumerate(configs) if i != chosen[0] and not (c.spins and configs[chosen[0]].spins)]
    if mode == "fused_pairs":
        chosen = random.sample([i for i, config in enumerate(configs) if config.spins], 2)
    elif others and random.random() < 0.3:
        chosen.append(random.choice(others))
    at_once = len(chosen) > 1
    return Iteration(
        tuple(_job(random, config, forms) for config in chosen),
        tuple(random.choice((0, -1) if at_once else (0, -1, None)) for _ in chosen),
        late=random.random() < 0.6,
        slow=random.random() < 0.5,
    )


def _job(random: Random, config: int, forms: Sequence[str]) -> Job:
    first, calls = random.randrange(2), random.randrange(1, 5)
    between = random.random() < 0.3
    sizes = tuple(1 - first if between and call == 1 else first for call in range(calls))
    return Job(config, sizes, random.choice(list(forms)), random.randrange(2), random.random() < 0.5)


def inputs_seed(seed: int, number: int, job: int, call: int) -> int:
    """Of the random inputs of one call, which no other call shares."""
    return ((seed * 1_000_003 + number) * 2 + job) * 8 + call


# Checking ---------------------------------------------------------------------------------------------------------
def share_of_allowed(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, depth: int) -> torch.Tensor:
    """How much of the allowed error a result has: a scalar on its device, infinite for NaN.

    Its error may be 1.1 times that of torch's, in the norm and in the largest element, and a little by chance: single
    elements round either way, and sums of `depth` products have another order in f32.
    """
    if not found.numel():
        return torch.zeros((), dtype=torch.float64, device=found.device)
    ours, theirs = (found.double() - exact).abs(), (plain.double() - exact).abs()
    unit, order = torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps * depth**0.5
    by_chance = 1.5 * unit / prod(found.shape) ** 0.5 + order / 4
    norm, largest = torch.linalg.vector_norm, torch.amax
    in_norm = norm(ours) / (1.1 * norm(theirs) + by_chance * norm(exact))
    in_one = largest(ours) / (1.1 * largest(theirs) + (unit + order) * largest(exact.abs()))
    return torch.maximum(in_norm, in_one).nan_to_num(nan=float("inf"))


def differing(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """0 where all bits are equal, infinite where one is not: a scalar on their device."""
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    odd = (found.contiguous().view(bits) != expected.contiguous().view(bits)).any()
    return torch.where(odd, float("inf"), 0.0).double()


def fingerprint(found: torch.Tensor) -> torch.Tensor:
    """A number below 2^48 that hardly two tensors of different bits share: a scalar in f64 on their device."""
    bits = found.contiguous().view({2: torch.int16, 4: torch.int32}[found.element_size()]).view(-1).long()
    places = torch.arange(1, len(bits) + 1, device=found.device)
    mixed = (bits * 0x5851F42D4C957F2D) ^ (places * 0x14057B7EF767814F)
    return ((mixed * mixed.bitwise_right_shift(17)).sum() & (1 << 48) - 1).double()


# Options ----------------------------------------------------------------------------------------------------------
def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's; exits with a message where it makes no sense."""
    parser = argparse.ArgumentParser(description="Random one-sided programs on all ranks of a torchrun job.")
    parser.add_argument(
        "mode",
        nargs="?",
        choices=MODES,
        default="random",
        help="fused_pairs: two kernels that wait; allreduces: sums that all ranks hold",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long, once all programs are compiled")
    parser.add_argument("--iterations", type=int, default=None, help="at most as many")
    parser.add_argument("--seed", type=int, default=0, help="of programs, calls and inputs")
    parser.add_argument("--first", type=int, default=0, help="the number of the iteration to begin with")
    parser.add_argument("--pool", type=int, default=24, help="how many programs there are to draw from")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: processes that talk through gloo"
    )
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    chosen = parser.parse_args(arguments)
    if chosen.mode == "fused_pairs" and (chosen.device == "cpu" or chosen.pool < 8):
        parser.error("fused_pairs needs two programs with kernels that wait: GPUs, and a pool of at least 8")
    if chosen.pool < 1 or chosen.first < 0 or (chosen.iterations is not None and chosen.iterations < 1):
        parser.error("--pool and --iterations are at least 1, --first is at least 0")
    return chosen


def to_repeat(chosen: argparse.Namespace, ranks: int, number: int) -> str:
    """The command that runs one iteration again."""
    script = f"torchrun --standalone --nproc-per-node {ranks} tests/gpu/stress_onesided.py"
    at = f"--seed {chosen.seed} --pool {chosen.pool} --first {number} --iterations 1 --device {chosen.device}"
    return f"{script} {chosen.mode} {at}"
