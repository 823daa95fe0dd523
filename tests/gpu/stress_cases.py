"""Random programs and iterations of calls for tests/gpu/stress_onesided.py, drawn from a seed without a GPU."""

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

ROWS = (1, 3, 16, 33, 64, 100, 129, 160, 256, 512)  # rows of one rank in one slice; most are no multiple of a tile
MOST_ROWS = 2048
DEPTHS = (64, 72, 100, 128, 257, 512, 1000)
COLUMNS = (8, 24, 60, 64, 100, 129, 256, 384)
SMALL = 128  # the largest K and N in f32
GPU_FORMS = ("eager", "out", "captured")
CPU_FORMS = ("eager", "out")
LOW_LATENCY = "sequential by low_latency"
MODES = ("random", "fused_pairs", "allreduces")


@dataclass(frozen=True)
class Product:
    """One right side: `[K, columns]`, or `[columns, K]` if `linear`; `split` shards its columns."""

    columns: int
    linear: bool
    bias: bool
    split: bool

    def __str__(self) -> str:
        return f"{self.columns}{' linear' * self.linear}{' bias' * self.bias}{' split' * self.split}"


@dataclass(frozen=True)
class Config:
    """A program, its strategy and its kernels. A is `[slices, ranks, M, depth]`, or `[ranks, M, depth]` with one slice.

    Either the rows of A are gathered and multiplied, or products of parts along K are reduced. Without products A
    itself is reduced.

    Fields:
        reduced: products are reduced.
        scattered: each rank gets its rows of the sum, instead of all rows.
        steps: of an all-reduce: `blocks` for one step with blocks of any size, `two` for two steps, "" for the default.
        mesh: the ranks that hold parts, in the order of the parts.
        rows: the two values of M in calls. If they are equal, the program has the number in place of the symbol,
            because a rank without parts cannot bind the symbol.
        kept: the gathered A is an output too.
        priorities: priorities of the worker streams; 0 is low, -1 high.
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
        """True if its matmul is a kernel that holds SMs while it waits for peers."""
        return self.strategy in ("fused", "push") and self.kernels == "triton"

    def suits_strategy(self, ranks: int) -> bool:
        """Return True if its strategy can lower it.

        `chain` scatters the rows of products, which may be in any number of pieces. A sum or an all-gather by low
        latency is over all ranks, and its rows are multiples of 16 bytes.
        """
        if self.strategy == "chain":
            return self.scattered and bool(self.products) and all(m % 2 == 0 for m in self.rows)
        widths = [product.columns for product in self.products if self.reduced] or [self.depth]
        even = self.mesh == tuple(range(ranks)) and all(width % 8 == 0 for width in widths)
        return even or self.strategy != LOW_LATENCY

    def shape(self, last: str, mark: str = "") -> str:
        m = "M" if len(set(self.rows)) > 1 else str(self.rows[0])
        return ", ".join([*([str(self.slices)] if self.slices > 1 else []), f"{len(self.mesh)}{mark}", m, last])

    def fusion(self) -> Program:
        """Return the fusion; its outputs are the products, and the gathered A if it is kept."""
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
            operation = "linear" if product.linear else "matmul"
            out = f"%c{i}: {type}[{self.shape(str(product.columns))}] auto"
            body.append(f"  {out} = {operation} %full, %b{i}{bias}")
        outputs = [f"%c{i}" for i in range(len(self.products))] + ["%full"] * self.kept
        return self._parsed(inputs, outputs, body)

    def program(self) -> Program:
        """Return the host program."""
        sizes = {"blocks": {"extra_bytes": 1 << 40}, "two": {"extra_bytes": -1}}.get(self.steps)
        if sizes is None:
            return lower(self.fusion(), self.strategy, 2)
        steps = AllReduceSteps(**sizes, min_rows=1, min_bytes=1)
        form = Fused(2, steps=steps) if self.strategy == "fused" else Push(steps)
        return run_passes(self.fusion(), [*EXPLICIT, form, *FINISH])

    def _reduced(self) -> Program:
        """Return the fusion of a reduction: each rank holds a part of K and gets its rows of the sum, or all rows."""
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
            operation = "linear" if product.linear else "matmul"
            body.append(f"  %c{i}: {type}[{self.shape(n, rows)}] = {operation} %a, %b{i}")
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
        reduction = f"summed{' and scattered' * self.scattered}{steps}: " if self.reduced else ""
        return f"{self.strategy} {self.kernels} {self.dtype} on {mesh}: {reduction}A {a}, times {sides}"


def products_of(
    config: Config, inputs: Sequence[torch.Tensor], rows: int = 1, columns: int = 1
) -> tuple[torch.Tensor, ...]:
    """Compute unsharded outputs by torch, in the dtype of the unsharded inputs.

    The product is computed in pieces of rows, and of columns if they are sharded, with the shapes of one rank: for
    other shapes cuBLAS may choose an algorithm with other rounding. With few columns and a bias in bf16 it rounds
    twice. Each rank's product is rounded before a sum over ranks.
    """
    a, *rest = inputs
    if config.reduced and not config.products:
        return (a,)
    if config.reduced:
        return tuple(_sum_of_products(config, a, product, b) for product, b in zip(config.products, rest, strict=True))
    outputs = []
    for product in config.products:
        b, *rest = rest
        z, rest = (rest[0], rest[1:]) if product.bias else (None, rest)
        parts = a.chunk(rows, dim=int(config.slices > 1))
        # Memory of a rank is aligned to 256 bytes, and cuBLAS chooses by alignment.
        weights = [w.clone() for w in (b if product.linear else b.t()).chunk(columns if product.split else 1)]
        biases = [None] * len(weights) if z is None else [bias.clone() for bias in z.chunk(len(weights))]
        done = [
            torch.cat([torch.nn.functional.linear(part, w, bias) for w, bias in zip(weights, biases, strict=True)], -1)
            for part in parts
        ]
        outputs.append(torch.cat(done, dim=int(config.slices > 1)))
    return (*outputs, a) if config.kept else tuple(outputs)


def _sum_of_products(config: Config, a: torch.Tensor, product: Product, b: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' products, which have the dtype of the inputs, in f32 or better; round once."""
    ranks = len(config.mesh)
    parts = zip(a.chunk(ranks, -1), (b if product.linear else b.t()).chunk(ranks, -1), strict=True)
    wide = torch.promote_types(a.dtype, torch.float32)
    products = [torch.nn.functional.linear(part, weight).to(wide) for part, weight in parts]
    return torch.stack(products).sum(0).to(a.dtype)


def pool(
    seed: int, ranks: int, size: int, kernels: Sequence[str] = ("aten", "triton"), mode: str = "random"
) -> list[Config]:
    """Return configurations of all strategies and kernels, the same on every rank."""
    random = Random(f"pool {seed}")
    pairs = [(strategy, kernel) for kernel in kernels for strategy in ("ring", "fused", "push", LOW_LATENCY)]
    pairs += [("chain", kernel) for kernel in kernels if mode != "allreduces"]
    configs: list[Config] = []
    while len(configs) < size:
        config = _config(random, ranks, *pairs[len(configs) % len(pairs)])
        if not config.suits_strategy(ranks):
            continue
        if mode != "allreduces" or (config.reduced and not config.scattered):
            configs.append(config)
    return configs


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
    steps = random.choice(("", "blocks", "two")) if reduced and not scattered and strategy in ("fused", "push") else ""
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
    """Draw a mesh: mostly all ranks in order, sometimes in another order, or only some ranks."""
    draw = random.random()
    if draw < 0.6 or (ranks == 2 and draw < 0.8):
        return tuple(range(ranks))
    size = ranks if draw < 0.8 or ranks == 2 else random.randrange(2, ranks)
    return tuple(random.sample(range(ranks), size))


def _product(random: Random, ranks: int, most: int) -> Product:
    linear, split = random.random() < 0.5, random.random() < 0.4
    columns = random.choice([n for n in COLUMNS if n <= most])
    if split:
        columns = max(1, columns // ranks) * ranks
    return Product(columns, linear, linear and random.random() < 0.5, split)


@dataclass(frozen=True)
class Job:
    """Successive calls of one configuration on a stream of the caller.

    Fields:
        config: the index in the pool.
        sizes: for each call, the index of its M.
        form: `eager`, `out` (with `out=`) or `captured` (replays of a CUDA graph of the caller).
        slot: the index of the set of tensors for `out` and `captured`.
        again: the first call is repeated eagerly and must give the same bits.
    """

    config: int
    sizes: tuple[int, ...]
    form: str
    slot: int
    again: bool


@dataclass(frozen=True)
class Iteration:
    """One or two concurrent jobs.

    Fields:
        priorities: the priority of each job's stream; None is torch's default stream.
        late: ranks are delayed before calls, independently of each other.
        slow: statements are delayed on their streams.
    """

    jobs: tuple[Job, ...]
    priorities: tuple[int | None, ...]
    late: bool
    slow: bool


def iteration(
    seed: int, number: int, configs: Sequence[Config], forms: Sequence[str], mode: str = "random"
) -> Iteration:
    """Draw one iteration. It is the same on every rank, and independent of earlier iterations.

    Of two concurrent executors, only one may have kernels that hold SMs while they wait. Otherwise each of them could
    hold the SMs that a peer of the other needs. But in mode `fused_pairs`, both have such kernels.
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
    """Return the seed of the inputs of one call; no two calls have the same seed."""
    return ((seed * 1_000_003 + number) * 2 + job) * 8 + call


def share_of_allowed(result: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, depth: int) -> torch.Tensor:
    """Return the error of a result as a share of the allowed error: a scalar on its device, infinite for NaN.

    The error may be 1.1 times torch's error, in the norm and in the largest element, with some slack: single elements
    may round to either side, and sums of `depth` products may have another order in f32.
    """
    if not result.numel():
        return torch.zeros((), dtype=torch.float64, device=result.device)
    ours, theirs = (result.double() - exact).abs(), (plain.double() - exact).abs()
    unit, order = torch.finfo(result.dtype).eps, torch.finfo(torch.float32).eps * depth**0.5
    slack = 1.5 * unit / prod(result.shape) ** 0.5 + order / 4
    norm, largest = torch.linalg.vector_norm, torch.amax
    in_norm = norm(ours) / (1.1 * norm(theirs) + slack * norm(exact))
    in_largest = largest(ours) / (1.1 * largest(theirs) + (unit + order) * largest(exact.abs()))
    return torch.maximum(in_norm, in_largest).nan_to_num(nan=float("inf"))


def differing(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return 0 if all bits are equal, else infinity: a scalar on the device."""
    bits = {2: torch.int16, 4: torch.int32}[result.element_size()]
    odd = (result.contiguous().view(bits) != expected.contiguous().view(bits)).any()
    return torch.where(odd, float("inf"), 0.0).double()


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """Return a 48-bit hash of a tensor's bits, as a scalar on the tensor's device.

    The scalar is an f64, which represents all integers of 48 bits exactly.
    """
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).view(-1).long()
    places = torch.arange(1, len(bits) + 1, device=x.device)
    mixed = (bits * 0x5851F42D4C957F2D) ^ (places * 0x14057B7EF767814F)
    return ((mixed * mixed.bitwise_right_shift(17)).sum() & (1 << 48) - 1).double()


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message if options contradict each other."""
    parser = argparse.ArgumentParser(description="Random one-sided programs on all ranks of a torchrun job.")
    parser.add_argument(
        "mode",
        nargs="?",
        choices=MODES,
        default="random",
        help="fused_pairs: two kernels that wait; allreduces: sums that all ranks hold",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="duration after all programs are compiled")
    parser.add_argument("--iterations", type=int, default=None, help="the most iterations")
    parser.add_argument("--seed", type=int, default=0, help="seed of programs, calls and inputs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first iteration")
    parser.add_argument("--pool", type=int, default=24, help="the number of programs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: processes with gloo")
    parser.add_argument("--json", type=Path, default=None, help="file for the counts")
    chosen = parser.parse_args(arguments)
    if chosen.mode == "fused_pairs" and (chosen.device == "cpu" or chosen.pool < 8):
        parser.error("fused_pairs needs two programs with kernels that wait: GPUs, and a pool of at least 8")
    if chosen.pool < 1 or chosen.first < 0 or (chosen.iterations is not None and chosen.iterations < 1):
        parser.error("--pool and --iterations are at least 1, --first is at least 0")
    return chosen


def to_repeat(chosen: argparse.Namespace, ranks: int, number: int) -> str:
    """Return the command that repeats one iteration."""
    script = f"torchrun --standalone --nproc-per-node {ranks} tests/gpu/stress_onesided.py"
    at = f"--seed {chosen.seed} --pool {chosen.pool} --first {number} --iterations 1 --device {chosen.device}"
    return f"{script} {chosen.mode} {at}"
