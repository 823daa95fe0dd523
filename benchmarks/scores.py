"""The rows of the comparisons, their scores, and the tables of rows and scores. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness import table

EAGER, GRAPH = "eager", "graph"
MODES = (EAGER, GRAPH)
COMPILED = "hi.compile"  # the candidate that `hi.compile` chooses in its first calls
CAPTURED = "hi.compile, second call captured"
BY_HAND, NCCL, TORCH = "NCCL + cuBLAS", "NCCL", "torch fused"  # peers
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"
HOSTIR = "hostir"  # the candidate that calls a function of hostir.torch
NVFUSER = "nvFuser"
# N and K of a rank. For Llama 3 they are N and K of the first weight of the MLP with tensor parallelism 8.
MODELS = {"8B": (1792, 4096), "70B": (3584, 8192), "405B": (6656, 16384), NVFUSER: (8192, 16384)}
LARGE, SMALL = (2048, 4096, 8192, 16384), (512, 64)
SIZES: dict[str, tuple[int, ...]] = {model: (*reversed(SMALL), *LARGE) for model in MODELS} | {NVFUSER: (32768,)}
FIRST = ("70B", "8B", "405B")  # the order of the models, in case time is short

# Scores to reach on 8 H200 in bf16.
MUST = {
    "8B": dict(zip(LARGE, (0.68, 0.70, 0.82, 0.88), strict=True)),
    "70B": dict(zip(LARGE, (0.78, 0.90, 0.92, 0.92), strict=True)),
    "405B": dict(zip(LARGE, (0.88, 0.92, 0.95, 0.94), strict=True)),
}
GOAL = {
    "8B": dict(zip(LARGE, (0.85, 0.90, 0.95, 0.95), strict=True)),
    "70B": dict(zip(LARGE, (0.90, 0.97, 0.97, 0.97), strict=True)),
    "405B": dict(zip(LARGE, (0.95, 0.97, 0.98, 0.98), strict=True)),
}
SMALL_GOAL = 0.80
OF_BEST_PEER = 0.98  # the share of the best peer's score that small rows must reach
GOAL_OF_BEST_PEER = 1.1

# Scores for a matmul + reduce-scatter to reach on 2 H100 or H200 or on 8 H200 in bf16, and the goal on 2.
SCATTERED_MUST = {
    2: {
        "8B": dict(zip(LARGE, (0.77, 0.80, 0.80, 0.82), strict=True)),
        "70B": dict(zip(LARGE, (0.87, 0.89, 0.92, 0.93), strict=True)),
        "405B": dict(zip(LARGE, (0.93, 0.96, 0.975, 0.96), strict=True)),
    },
    8: {
        "8B": dict(zip(LARGE, (0.70, 0.75, 0.83, 0.88), strict=True)),
        "70B": dict(zip(LARGE, (0.75, 0.86, 0.90, 0.90), strict=True)),
        "405B": dict(zip(LARGE, (0.90, 0.92, 0.94, 0.95), strict=True)),
    },
}
SCATTERED_GOAL = {
    "8B": dict(zip(LARGE, (0.80, 0.83, 0.86, 0.88), strict=True)),
    "70B": dict(zip(LARGE, (0.91, 0.93, 0.95, 0.96), strict=True)),
    "405B": dict(zip(LARGE, (0.95, 0.97, 0.98, 0.98), strict=True)),
}
# The same for a rank of 8 that is emulated on 2 GPUs.
DEPARTURES_MUST = {
    "8B": dict(zip(LARGE, (0.62, 0.66, 0.72, 0.78), strict=True)),
    "70B": dict(zip(LARGE, (0.76, 0.86, 0.89, 0.90), strict=True)),
    "405B": dict(zip(LARGE, (0.90, 0.92, 0.93, 0.94), strict=True)),
}
# The goal for a matmul + all-reduce of few rows, as a multiple of the score of torch's two-shot in a CUDA graph.
REDUCED_GOAL = {"8B": 1.10, "70B": 1.06, "405B": 1.03}
# Scores to reach on 2 H200 in fp8, with sums in the tensor cores.
SCALED_MUST = {
    "gather": dict(zip(LARGE, (0.82, 0.88, 0.90, 0.92), strict=True)),
    "scatter": dict(zip(LARGE, (0.75, 0.80, 0.82, 0.83), strict=True)),
}
OF_AXIS_0 = 1.05  # the largest time on another axis, as a multiple of the time on axis 0
# N (hidden features of an expert on a rank) and K (features) of mixtures of experts with tensor parallelism 8. Qwen3's
# experts are too narrow to be split: a rank has all their hidden features.
MIXTURES = {"Mixtral": (1792, 4096), "Qwen3": (768, 2048), "DeepSeek": (256, 7168)}
# What is measured of a mixture, with the score to reach and the goal, as multiples of the best peer's score.
MOE_FACTORS = {
    "gather": (1.10, 1.35),
    "scatter": (1.10, 1.35),
    "layer": (1.15, 1.40),
    "trained": (1.05, 1.25),
    "alone": (0.95, 1.05),
    "fp8": (0.95, 1.05),
}
FEW = (1, 16, 64, 128, 512)  # numbers of rows
DECODED = (1, 16, 64)
# Shapes (K and N of a rank) that no kernel was tuned for.
ODD = {
    "K=3696 N=8192": (1536, 6000, 12288),
    "K=2304 N=7168": (4096,),
    "K=4608 N=4608": (3000,),
    "K=768 N=6144": (8000,),
}

Result = dict[str, Any]  # a row's figures, as in the JSON of a run
Target = tuple[float | None, float | None]  # the score that a row must reach, and the goal


@dataclass(frozen=True)
class Row:
    """One shape: M rows on all ranks together, N columns of B on each rank, and K columns of A on each rank."""

    model: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.model} M={self.M}"


@dataclass(frozen=True)
class Benchmark:
    """The rows of one comparison, and the scores that they must reach.

    Fields:
        title: the title of its table.
        collective: the name that reports give to the communication, such as "all-gather". The floor of a row is the
            time of the communication alone or of the computation alone, whichever is longer. A score is floor/time.
        shape: the names of the extents of a row.
        models: N and K of a rank, by model.
        sizes: the values of M, by model.
        target: a function that returns the score that a measured row must reach, and the goal of the row.
        by_mode: True if eager calls and CUDA graphs have separate targets. Each target follows from the score of the
            fastest peer (an implementation other than hostir) in the same mode, and `target` is not called.
    """

    title: str
    collective: str
    shape: str
    models: Mapping[str, tuple[int, int]]
    sizes: Mapping[str, tuple[int, ...]]
    target: Callable[[Result], Target] = lambda row: (None, None)
    by_mode: bool = False

    def row(self, model: str, m: int) -> Row:
        return Row(model, m, *self.models[model])

    def select(self, names: str) -> set[tuple[str, int]]:
        """Return the model and M of each row in a list such as `8B:2048,70B`. Raises ValueError for unknown rows."""
        selected = set()
        for name in names.split(","):
            model, _, m = name.partition(":")
            sizes = [size for size in self.sizes.get(model, ()) if m in ("", str(size))]
            if not sizes:
                valid = "; ".join(f"{model}: {', '.join(map(str, ms))}" for model, ms in self.sizes.items())
                raise ValueError(f"no row '{name}': models and their M are {valid}")
            selected |= {(model, size) for size in sizes}
        return selected

    def rows(self, names: str = "", without: Iterable[str] = ()) -> list[Row]:
        """Return the rows to measure, in order of importance.

        Args:
            names: models or rows, such as `8B:2048,70B`; empty for all rows.
            without: models to leave out unless `names` names them.

        Raises ValueError for unknown rows.
        """
        first = [model for model in FIRST if model in self.models]
        order = [(model, m) for model in first for m in LARGE]
        order += [(model, m) for m in SMALL for model in first]
        order += [(model, m) for model, sizes in self.sizes.items() for m in sizes if (model, m) not in order]
        selected = self.select(names) if names else {(model, m) for model, m in order if model not in without}
        return [self.row(model, m) for model, m in order if (model, m) in selected and m in self.sizes[model]]


def _gathered_target(row: Result) -> Target:
    if row["ranks"] != 8:
        return None, None
    if row["M"] in SMALL:
        return row["score_peer"] and round(OF_BEST_PEER * row["score_peer"], 4), SMALL_GOAL
    return MUST.get(row["model"], {}).get(row["M"]), GOAL.get(row["model"], {}).get(row["M"])


def _scattered_target(row: Result) -> Target:
    model, m, ranks = row["model"], row["M"], row["ranks"]
    if ranks not in SCATTERED_MUST:
        return None, None
    if m in SCATTERED_MUST[ranks].get(model, {}):
        return SCATTERED_MUST[ranks][model][m], SCATTERED_GOAL[model][m] if ranks == 2 else None
    peer = fastest(row["times"], ours=False, modes=modes_of(row))
    return _peer_target(row, (peer, OF_BEST_PEER, GOAL_OF_BEST_PEER))


def _reduced_target(row: Result) -> Target:
    if row["ranks"] not in SCATTERED_MUST:
        return None, None
    alike = fastest(row["times"], ours=False, modes=modes_of(row))
    if row["M"] in FEW:
        goal = REDUCED_GOAL.get(row["model"], 1.0)
        return _peer_target(row, (_two_shot(row, (GRAPH,)), 1.0, goal), (alike, OF_BEST_PEER, 1.0))
    return _peer_target(row, (alike, 1.05, 1.25))


def _decoded_target(row: Result) -> Target:
    alike = fastest(row["times"], ours=False, modes=modes_of(row))
    return _peer_target(row, (_two_shot(row, modes_of(row)), 1.0, 1.04), (alike, OF_BEST_PEER, 1.0))


def _two_shot(row: Result, modes: tuple[str, ...]) -> tuple[str, str, float] | None:
    """Return torch's two-shot all-reduce as a result of `fastest`, or the fastest peer if two-shot did not run."""
    two_shot = {name: t for name, t in row["times"].items() if name == TWO_SHOT}
    return fastest(two_shot or row["times"], ours=False, modes=modes)


def _departures_target(row: Result) -> Target:
    return (DEPARTURES_MUST[row["model"]][row["M"]] if row["ranks"] == 8 else None), None


def _scaled_target(row: Result, side: str) -> Target:
    """Return the target of an fp8 row.

    For an axis other than 0, it follows from the time for axis 0. For block-wise scales, and for few rows, it follows
    from the best peer's score. Otherwise it is a fixed score, or the best peer's score if that is higher.
    """
    if row["ranks"] != 2:
        return None, None
    if row.get("axis_0_us"):
        score = row["floor_us"] / row["axis_0_us"]
        return round(score / OF_AXIS_0, 4), round(score, 4)
    if row["scales"] == "blocks" or row["M"] in SMALL:
        modes = modes_of(row) if row["M"] in SMALL else MODES
        return _peer_target(row, (fastest(row["times"], ours=False, modes=modes), OF_BEST_PEER, 1.0))
    return (max(SCALED_MUST[side][row["M"]], row["score_peer"] or 0.0) if row["fast"] else None), None


def _mlp_target(row: Result) -> Target:
    peers = {name: {name: t} for name, t in row["times"].items()}
    by_hand = fastest(peers.get(BY_HAND, {}), ours=False, modes=modes_of(row))
    fused = fastest(peers.get(TORCH, {}), ours=False, modes=(GRAPH,))
    return _peer_target(row, (by_hand, 1.20, 1.35), (fused, 1.03, 1.15))


def _moe_target(row: Result) -> Target:
    _, part, *_ = row["model"].split("-", 1)
    must, goal = MOE_FACTORS[part.removesuffix("-skewed")]
    return _peer_target(row, (fastest(row["times"], ours=False, modes=modes_of(row)), must, goal))


def _reshard_target(row: Result) -> Target:
    if row["model"] == "all_reduce":
        return OF_BEST_PEER, GOAL_OF_BEST_PEER
    nccl = {name: t for name, t in row["times"].items() if name == NCCL}
    return _peer_target(row, (fastest(nccl, ours=False, modes=modes_of(row)), 1.0, 1.1))


def _norm_target(row: Result) -> Target:
    return _peer_target(row, (fastest(row["times"], ours=False, modes=modes_of(row)), 1.05, 1.3))


def _peer_target(row: Result, *factors: tuple[tuple[str, str, float] | None, float, float]) -> Target:
    """Return a target that depends on the scores of peers.

    `factors` has an item for each peer: its result of `fastest`, and two factors. The peer's score times the first
    factor is a score that hostir must reach. The peer's score times the second factor is a goal. The target has the
    highest of these scores and the highest of these goals, over all peers that ran.
    """
    scores = [(row["floor_us"] / peer[2], must, goal) for peer, must, goal in factors if peer]
    if not scores:
        return None, None
    must = max(score * must for score, must, _ in scores)
    return round(must, 4), round(max(score * goal for score, _, goal in scores), 4)


def modes_of(row: Result) -> tuple[str, ...]:
    """Return the modes to compare: the mode in which `hi.compile` was called, or all modes if it did not run."""
    return (row["compiled"]["mode"],) if "compiled" in row else MODES


SHARDED = {model: (k, n) for model, (n, k) in MODELS.items() if model in FIRST}  # the second weight of the MLP
TRAINED = {  # N and K of a rank of a layer, without and with gradients
    f"{model}-{side}{trained}": (n, k) if side == "gather" else (k, n)
    for model, (n, k) in MODELS.items()
    if model in ("8B", "70B")
    for side in ("gather", "scatter")
    for trained in ("", "-trained")
}
SCALED = {
    f"scaled_{side}{emulated}": Benchmark(
        f"{title}{' as a rank of more meets it' if emulated else ''}",
        "copies" if emulated else collective,
        shape,
        {"70B": widths["70B"]},
        {"70B": LARGE if emulated else SIZES["70B"]},
        (lambda _: (None, None)) if emulated else partial(_scaled_target, side=side),
    )
    for side, title, collective, shape, widths in (
        ("gather", "All-gather + fp8 matmul", "all-gather", "M,N/rank,K", MODELS),
        ("scatter", "fp8 matmul + reduce-scatter", "reduce-scatter", "M,N,K/rank", SHARDED),
    )
    for emulated in ("", "_emulated")
}
MOE = {  # N and K of a rank, by mixture, part and routing
    f"{mixture}-{part}{routing}": widths
    for routing in ("", "-skewed")
    for part in MOE_FACTORS
    for mixture, widths in MIXTURES.items()
}
BESIDE = {f"K={k} N={n}": (n, k) for k, n in ((3696, 8192), (2304, 7168), (4608, 4608), (768, 6144))}
BENCHMARKS = {
    "allgather": Benchmark("All-gather + matmul", "all-gather", "M,N/rank,K", MODELS, SIZES, _gathered_target),
    "reduce_scatter": Benchmark(
        "Matmul + reduce-scatter",
        "reduce-scatter",
        "M,N,K/rank",
        SHARDED | BESIDE,
        {model: SIZES[model] for model in SHARDED} | ODD,
        _scattered_target,
    ),
    "all_reduce": Benchmark(
        "Matmul + all-reduce",
        "all-reduce",
        "M,N,K/rank",
        SHARDED,
        dict.fromkeys(SHARDED, (*FEW, *LARGE)),
        _reduced_target,
    ),
    "decode": Benchmark(
        "Decoding: MLP layers in one graph",
        "all-reduce",
        "M,N,K/rank",
        {"70B": SHARDED["70B"]},
        {"70B": DECODED},
        _decoded_target,
    ),
    "departures": Benchmark(
        "Matmul + reduce-scatter as a rank of more meets it",
        "copies",
        "M,N,K/rank",
        SHARDED,
        dict.fromkeys(SHARDED, LARGE),
        _departures_target,
    ),
    "mlp": Benchmark(
        "MLP with sequence-sharded ends",
        "collectives",
        "M,H/rank,K",
        {model: MODELS[model] for model in FIRST},
        dict.fromkeys(FIRST, LARGE),
        _mlp_target,
    ),
    "moe": Benchmark(
        "Mixtures of experts", "collectives", "M,H/rank,K", MOE, dict.fromkeys(MOE, (2048, 8192)), _moe_target
    ),
    "reshard": Benchmark(
        "Collectives alone",
        "NCCL",
        "M,N,-",
        {"reduce_scatter": (16384, 0), "all_gather": (8192, 0), "all_reduce": (8192, 0)},
        {"reduce_scatter": (8192,), "all_gather": (4096, 16384), "all_reduce": (1, 16, 64, 512, 4096)},
        _reshard_target,
    ),
    "all_reduce_norm": Benchmark(
        "All-reduce + residual + RMS norm",
        "all-reduce",
        "M,N,-",
        {f"N={n}": (n, 0) for n in (4096, 8192)},
        dict.fromkeys(("N=4096", "N=8192"), (1, 16, 64, 128, 256)),
        _norm_target,
    ),
    "torch_operators": Benchmark(
        "Functions for torch",
        "collectives",
        "M,N/rank,K/rank",
        TRAINED,
        dict.fromkeys(TRAINED, (16, 64, 256, 1024, 4096, 16384)),
        by_mode=True,
    ),
    **SCALED,
}
GATHERED = BENCHMARKS["allgather"]
rows = GATHERED.rows


def benchmark_of(row: Result) -> Benchmark:
    """Return the benchmark that a row belongs to. Old results do not name it; they belong to `allgather`."""
    return BENCHMARKS[row.get("kind", "allgather")]


def scored(row: Result) -> Result:
    """Return a measured row with its floor, its best times, their scores, and its targets.

    Args:
        row: the figures of a row. `gemm_us` and the entries of the collectives are the microseconds of each part alone
            (None for a part that did not run). `times` has an entry for each candidate: `ours` is True for hostir, and
            each mode in which the candidate ran has its microseconds. `compiled`, if present, has the choice of
            `hi.compile` and the mode of its calls. Then this call is scored as `ours`, and the best candidate is scored
            as well.
    """
    gemm, collective = row.get("gemm_us") or 0.0, min(_collectives(row).values(), default=0.0)
    floor = max(gemm, collective)
    shorter = min(gemm, collective)
    times = {
        name: {
            **t,
            **{f"hidden_{m}": round((gemm + collective - t[m]) / shorter, 3) for m in MODES if m in t and shorter},
        }
        for name, t in row["times"].items()
    }
    result = {**row, "times": times, "collective_us": collective, "floor_us": floor}
    for side, best in _sides({**row, "times": times}).items():
        result[f"best_{side}"] = f"{best[0]}, {best[1]}" if best else None
        result[f"{side}_us"] = best[2] if best else None
        result[f"score_{side}"] = round(floor / best[2], 4) if best else None
    return {**result, **targets_of(result)}


def regrets(times: Mapping[str, Result]) -> dict[str, float | None]:
    """Return the time of the choice of `hi.compile` as a multiple of the time of hostir's fastest candidate.

    `regret` compares both in their faster modes; a CUDA graph of the choice may be made by its executor or by the
    caller. `captured` compares CUDA graphs, and the choice is that of a caller who captures the second call. An entry
    is None if one of the times is missing.
    """

    def ratio(names: tuple[str, ...], modes: tuple[str, ...]) -> float | None:
        chosen = fastest({n: t for n, t in times.items() if n in names}, ours=True, modes=modes)
        best = fastest(times, ours=True, modes=modes)
        return round(chosen[2] / best[2], 4) if chosen and best else None

    regret = ratio((COMPILED, CAPTURED), MODES) if COMPILED in times else None
    return {"regret": regret, "captured": ratio((CAPTURED,), (GRAPH,))}


def _collectives(row: Result) -> dict[str, float]:
    """Return the microseconds of each collective that ran alone, by name."""
    times = {name: row.get(f"{name}_us") for name in COLLECTIVES}
    return {name: us for name, us in times.items() if us is not None}


def _sides(row: Result) -> dict[str, tuple[str, str, float] | None]:
    """Return the candidates to score, each as a result of `fastest`.

    `peer` is the fastest peer, and `ours` is hostir's fastest candidate. If `hi.compile` ran, `ours` is the call of
    `hi.compile`, `alike` is the fastest peer in the mode of this call, and `candidate` is hostir's fastest candidate.
    """
    times, ours = row["times"], fastest(row["times"], ours=True)
    if "compiled" not in row:
        return {"peer": fastest(times, ours=False), "ours": ours}
    compiled = {name: t for name, t in times.items() if name == COMPILED}
    return {
        "peer": fastest(times, ours=False),
        "alike": fastest(times, ours=False, modes=modes_of(row)),
        "ours": fastest(compiled, ours=True, modes=modes_of(row)),
        "candidate": ours,
    }


def fastest(
    times: Mapping[str, Result], *, ours: bool, modes: tuple[str, ...] = MODES
) -> tuple[str, str, float] | None:
    """Return name, mode and time of the fastest candidate of hostir, or of the peers; None if no candidate ran."""
    candidates = [(name, m, t[m]) for name, t in times.items() if t["ours"] is ours for m in modes if m in t]
    return min(candidates, key=lambda candidate: candidate[2], default=None)


def targets_of(row: Result) -> Result:
    """Return `must` (the score that a row must reach), `goal` and `met`. They are None for a row without a target.

    `must` is at most 1, because a higher score would mean less time than the floor. But if a peer beats the floor,
    `must` may be as high as the peer's score. If a benchmark is scored by mode, there is a target for each mode, and
    `met` is True if all targets are met.
    """
    has_target = row["dtype"] == "bf16" and row.get("device", "cuda") == "cuda" and row.get("shrunk", 1) == 1
    if benchmark_of(row).by_mode:
        modes = {mode: _target_in(row, mode, has_target) for mode in MODES}
        met_by_mode = [mode["met"] for mode in modes.values() if mode["met"] is not None]
        return {"modes": modes, "must": None, "goal": None, "met": all(met_by_mode) if met_by_mode else None}
    must, goal = benchmark_of(row).target(row) if has_target else (None, None)
    if must is not None:
        must = min(must, max(1.0, row["score_peer"] or 0.0))
    met = None if must is None else row["score_ours"] is not None and row["score_ours"] >= must
    return {"must": must, "goal": goal, "met": met}


def _target_in(row: Result, mode: str, has_target: bool) -> Result:
    """Return the scores of the fastest peer and of hostir in a mode, the score that hostir must reach, and `met`."""
    peer, ours = fastest(row["times"], ours=False, modes=(mode,)), row["times"].get(HOSTIR, {}).get(mode)
    scores: Result = {
        "best_peer": peer and peer[0],
        "score_peer": round(row["floor_us"] / peer[2], 4) if peer else None,
        "score_ours": round(row["floor_us"] / ours, 4) if ours else None,
    }
    must = round(OF_BEST_PEER * scores["score_peer"], 4) if peer and has_target else None
    met = None if must is None else scores["score_ours"] is not None and scores["score_ours"] >= must
    return {**scores, "must": must, "met": met}


def in_order(results: Iterable[Result]) -> list[Result]:
    """Return the rows by model, then by M."""
    return sorted(results, key=lambda row: (list(benchmark_of(row).models).index(row["model"]), row["M"]))


def cell(value: float | bool | str | None, digits: int = 2) -> str:
    """Return the text of a table cell for a figure."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else f"{value:.{digits}f}"


COLLECTIVES = {"nccl": "NCCL", "copies": "copies", "torch": "torch", "one_shot": ONE_SHOT, "two_shot": TWO_SHOT}


def cells(row: Result) -> dict[str, str]:
    """Return the cells of a row in the table of scores, by column."""
    collectives = _collectives(row)
    name_of_best = min(collectives, key=collectives.__getitem__, default="")
    columns = {
        f"model {benchmark_of(row).shape}": shape(row),
        "GEMM us": cell(row["gemm_us"], 0),
        "collective us": f"{row['collective_us']:.0f} {COLLECTIVES[name_of_best]}" if name_of_best else "-",
        "floor us": cell(row["floor_us"], 0),
    }
    if "modes" in row:
        for name, mode in row["modes"].items():
            columns |= {
                f"best peer, {name}": cell(mode["best_peer"]),
                f"its score, {name}": cell(mode["score_peer"], 3),
                f"{HOSTIR}, {name}": cell(mode["score_ours"], 3),
                f"must reach, {name}": cell(mode["must"], 3),
                f"met, {name}": cell(mode["met"]),
            }
        return columns
    columns |= {"best peer": cell(row["best_peer"]), "its score": cell(row["score_peer"], 3)}
    if "compiled" not in row:
        columns |= {"best of ours": cell(row["best_ours"]), "our score": cell(row["score_ours"], 3)}
        return columns | {"must reach": cell(row["must"], 3), "met": cell(row["met"])}
    ratio = row["alike_us"] / row["ours_us"] if row["alike_us"] and row["ours_us"] else None
    return {
        **columns,
        "hi.compile": f"{row['compiled']['choice']}, {row['compiled']['mode']}",
        "our score": cell(row["score_ours"], 3),
        "error": cell(row["times"].get(COMPILED, {}).get("error"), 3),
        "x the best peer issued alike": cell(ratio, 2),
        "best candidate": cell(row["best_candidate"]),
        "candidate's score": cell(row["score_candidate"], 3),
        **{name: cell(ratio, 2) for name, ratio in regrets(row["times"]).items()},
        "must reach": cell(row["must"], 3),
        "goal": cell(row["goal"], 3),
        "met": cell(row["met"]),
    }


def shape(row: Result) -> str:
    """Return a row's model and extents."""
    return f"{row['model']} {row['M']},{row['N']},{row['K']}"


COLUMNS_OF_CANDIDATES = ["row", "candidate", EAGER, GRAPH, "score", "TFLOP/s", "host eager", "host graph", "hidden"]
MORE_COLUMNS = {  # columns of results that have such figures, with digits and explanations
    "error": (3, "*error* is relative to float64, as a multiple of the error of NCCL + cuBLAS."),
    "MiB": (0, "*MiB* is the memory that an eager call takes beside its operands, with symmetric buffers."),
}


def line(row: Result) -> str:
    """Return a row as a line for the terminal."""
    name, gemm, collective, floor, *figures = cells(row).values()
    left = f"{name:<22} GEMM {gemm:>5}  {benchmark_of(row).collective} {collective:>11}  floor {floor:>5}"
    if "modes" in row:
        form = "{mode}: {2:>5} hostir  {1:>5} {0:<14}  must {3:>5}  met {4}"
        return "  |  ".join(
            [left, *(form.format(*figures[5 * n : 5 * n + 5], mode=mode) for n, mode in enumerate(row["modes"]))]
        )
    peer, peer_score, ours, score, *more = figures
    if "compiled" in row:
        error, ratio, candidate, candidate_score, regret, captured, must, goal, met = more
        right = f"{score:>5} {ours} ({ratio} x, error {error})  |  {candidate_score:>5} {candidate}, "
        right += f"{regret} x, captured {captured} x  |  "
        right += f"must {must:>5}  goal {goal:>5}  met {met}"
    else:
        right = "{:>5} {:<41}  |  must {:>5}  met {}".format(score, ours, *more)
    return f"{left}  |  {peer_score:>5} {peer:<24}  |  {right}"


def report(results: Iterable[Result]) -> str:
    """Return the scores, the times of every candidate, and the times of the matmul kernels, as Markdown."""
    ordered = in_order(results)
    collective = benchmark_of(ordered[0]).collective
    parts = [
        _scores(ordered),
        "## Every candidate",
        "Microseconds; the host's are of one call, TFLOP/s of one GPU. *hidden* is the share of the shorter part, GEMM "
        f"or {collective}, that runs behind the other: (GEMM + {collective} - time) / shorter; the better mode's.",
    ]
    measured = {key for row in ordered for t in row["times"].values() for key in t}
    more = {key: digits for key, (digits, _) in MORE_COLUMNS.items() if key in measured}
    parts[2] += "".join(f" {text}" for key, (_, text) in MORE_COLUMNS.items() if key in more)
    lines = [candidate for row in ordered for candidate in _candidates(row, more)]
    parts.append(table([*COLUMNS_OF_CANDIDATES, *more], lines))
    if matmuls := [[*_matmul(row)] for row in ordered if row.get("triton_us")]:
        parts += ["## The matmul alone", table(["row", "cuBLAS us", "Triton us", "Triton/cuBLAS"], matmuls)]
    failed = [f"- {row['model']} M={row['M']}: {name}: {why}" for row in ordered for name, why in row["failed"].items()]
    if failed:
        parts += ["## Not scored", "\n".join(failed)]
    return "\n\n".join(parts)


def _scores(ordered: list[Result]) -> str:
    """Return the tables of scores. Rows for which `hi.compile` did not run have other columns, and a separate table."""
    headers = {"our score": "its score", "candidate's score": "its score"}  # the column before names the candidate
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for line in map(cells, ordered):
        tables.setdefault(tuple(line), []).append([*line.values()])
    return "\n\n".join(table([headers.get(name, name) for name in names], lines) for names, lines in tables.items())


def _candidates(row: Result, more: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the line of each candidate. `more` has the further columns, with their digits."""
    for name, t in row["times"].items():
        times = [t[m] for m in MODES if m in t]
        hidden = max((t[f"hidden_{m}"] for m in MODES if f"hidden_{m}" in t), default=None)
        figures = [cell(t.get(key), 0) for key in MODES]
        hosts = [cell(t.get(key), 0) for key in ("host_eager_us", "host_graph_us")]
        score = cell(row["floor_us"] / min(times), 3)
        rate = cell(row.get("flops", 2 * row["M"] * row["N"] * row["K"]) / min(times) / 1e6, 0)
        behind = "-" if hidden is None else f"{hidden:.0%}"
        further = [cell(t.get(key), digits) for key, digits in more.items()]
        yield [f"{row['model']} M={row['M']}", name, *figures, score, rate, *hosts, behind, *further]


def _matmul(row: Result) -> Iterator[str]:
    yield shape(row)
    yield from (cell(row["gemm_us"], 0), cell(row["triton_us"], 0), cell(row["triton_us"] / row["gemm_us"], 3))


def file_name(stem: str, ranks: int, dtype: str) -> str:
    """Return the file name of results. It has the dtype unless it is bf16, and the number of ranks unless it is 8."""
    return "_".join([stem, *([dtype] if dtype != "bf16" else []), *([str(ranks)] if ranks != 8 else [])])
