"""What benchmarks measure row by row, and how that is scored: rows, scores, tables. None of it needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness import table

EAGER, GRAPH = "eager", "graph"
MODES = (EAGER, GRAPH)
COMPILED = "hi.compile"  # the candidate that is taken untuned
BY_HAND, TORCH = "NCCL + cuBLAS", "torch fused"  # peers
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"
HOSTIR = "hostir"  # the candidate that is a function of hostir.torch
NVFUSER = "nvFuser"
# N and K of a rank; for Llama 3 they are those of the first weight of the MLP at tensor parallel 8.
MODELS = {"8B": (1792, 4096), "70B": (3584, 8192), "405B": (6656, 16384), NVFUSER: (8192, 16384)}
LARGE, SMALL = (2048, 4096, 8192, 16384), (512, 64)
SIZES: dict[str, tuple[int, ...]] = {model: (*reversed(SMALL), *LARGE) for model in MODELS} | {NVFUSER: (32768,)}
FIRST = ("70B", "8B", "405B")  # where time is short

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
OF_BEST_PEER = 0.98  # of its score, on small rows
GOAL_OF_BEST_PEER = 1.1

# Scores to reach on 2 or 8 H200 in bf16 by a matmul + reduce-scatter, and the goal on 2.
SCATTERED_MUST = {
    2: {
        "8B": dict(zip(LARGE, (0.58, 0.74, 0.78, 0.80), strict=True)),
        "70B": dict(zip(LARGE, (0.88, 0.90, 0.91, 0.91), strict=True)),
        "405B": dict(zip(LARGE, (0.92, 0.94, 0.95, 0.95), strict=True)),
    },
    8: {
        "8B": dict(zip(LARGE, (0.70, 0.75, 0.83, 0.88), strict=True)),
        "70B": dict(zip(LARGE, (0.75, 0.86, 0.90, 0.90), strict=True)),
        "405B": dict(zip(LARGE, (0.90, 0.92, 0.94, 0.95), strict=True)),
    },
}
SCATTERED_GOAL = {
    "8B": dict(zip(LARGE, (0.70, 0.82, 0.88, 0.90), strict=True)),
    "70B": dict(zip(LARGE, (0.92, 0.94, 0.95, 0.96), strict=True)),
    "405B": dict(zip(LARGE, (0.96, 0.97, 0.98, 0.98), strict=True)),
}
# The same as a rank of 8 meets it, emulated on 2.
DEPARTURES_MUST = {
    "8B": dict(zip(LARGE, (0.62, 0.66, 0.72, 0.78), strict=True)),
    "70B": dict(zip(LARGE, (0.76, 0.86, 0.89, 0.90), strict=True)),
    "405B": dict(zip(LARGE, (0.90, 0.92, 0.93, 0.94), strict=True)),
}
# Scores to reach on 2 H200 in bf16 by a matmul + all-reduce of many rows; fewer are held against the best peer.
REDUCED_MUST, REDUCED_GOAL = {2048: 0.75, 8192: 0.80}, {2048: 0.90, 8192: 0.92}
# The same in fp8, with tensor cores that accumulate.
SCALED_MUST = {
    "gather": dict(zip(LARGE, (0.82, 0.88, 0.90, 0.92), strict=True)),
    "scatter": dict(zip(LARGE, (0.75, 0.80, 0.82, 0.83), strict=True)),
}
OF_AXIS_0 = 1.05  # how many times as long rows may take that are gathered or scattered on another axis
FEW = (1, 16, 64, 128, 512)  # rows
DECODED = (1, 16, 64)
# Shapes that nothing was tuned for: K and N of a rank.
ODD = {
    "K=3696 N=8192": (1536, 6000, 12288),
    "K=2304 N=7168": (4096,),
    "K=4608 N=4608": (3000,),
    "K=768 N=6144": (8000,),
}

Result = dict[str, Any]  # a row's figures, as they stand in the JSON
Asked = tuple[float | None, float | None]  # the score that a row must reach, and the goal


@dataclass(frozen=True)
class Row:
    """One shape: M rows in all, N columns of B on each rank, and K of A on each rank."""

    model: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.model} M={self.M}"


@dataclass(frozen=True)
class Kind:
    """What a benchmark measures.

    Fields:
        title: of its table.
        collective: what stands beside the computation in its floor.
        shape: what the numbers of a row are.
        models: N and K of a rank, by model.
        sizes: M, by model.
        asked: what a measured row must reach, and its goal.
        by_mode: True if ours is held against the fastest peer in each mode; `asked` is then not called.
    """

    title: str
    collective: str
    shape: str
    models: Mapping[str, tuple[int, int]]
    sizes: Mapping[str, tuple[int, ...]]
    asked: Callable[[Result], Asked] = lambda row: (None, None)
    by_mode: bool = False

    def row(self, model: str, m: int) -> Row:
        return Row(model, m, *self.models[model])

    def chosen(self, wanted: str) -> set[tuple[str, int]]:
        """The rows of a list such as `8B:2048,70B`. Raises ValueError for what is none."""
        found = set()
        for part in wanted.split(","):
            model, _, m = part.partition(":")
            sizes = [size for size in self.sizes.get(model, ()) if m in ("", str(size))]
            if not sizes:
                known = "; ".join(f"{name}: {', '.join(map(str, ms))}" for name, ms in self.sizes.items())
                raise ValueError(f"no row '{part}': models and their M are {known}")
            found |= {(model, size) for size in sizes}
        return found

    def rows(self, wanted: str = "", without: Iterable[str] = ()) -> list[Row]:
        """The rows to measure, in order of importance.

        Args:
            wanted: models or rows, such as `8B:2048,70B`; empty for all.
            without: models that are not among all.

        Raises ValueError for what is no row.
        """
        first = [model for model in FIRST if model in self.models]
        order = [(model, m) for model in first for m in LARGE]
        order += [(model, m) for m in SMALL for model in first]
        order += [(model, m) for model, sizes in self.sizes.items() for m in sizes if (model, m) not in order]
        chosen = self.chosen(wanted) if wanted else {(model, m) for model, m in order if model not in without}
        return [self.row(model, m) for model, m in order if (model, m) in chosen and m in self.sizes[model]]


# What is asked of rows --------------------------------------------------------------------------------------------
def _of_gathered(row: Result) -> Asked:
    if row["ranks"] != 8:
        return None, None
    if row["M"] in SMALL:
        return row["score_peer"] and round(OF_BEST_PEER * row["score_peer"], 4), SMALL_GOAL
    return MUST.get(row["model"], {}).get(row["M"]), GOAL.get(row["model"], {}).get(row["M"])


def _of_scattered(row: Result) -> Asked:
    model, m, ranks = row["model"], row["M"], row["ranks"]
    if ranks not in SCATTERED_MUST:
        return None, None
    if m in SCATTERED_MUST[ranks].get(model, {}):
        return SCATTERED_MUST[ranks][model][m], SCATTERED_GOAL[model][m] if ranks == 2 else None
    alike = fastest(row["times"], ours=False, modes=modes_of(row))
    return _of_peers(row, (alike, OF_BEST_PEER, GOAL_OF_BEST_PEER))


def _of_reduced(row: Result) -> Asked:
    m = row["M"]
    if row["ranks"] not in SCATTERED_MUST:
        return None, None
    if m in REDUCED_MUST and (row["model"], row["ranks"]) == ("70B", 2):
        return REDUCED_MUST[m], REDUCED_GOAL[m]
    return _of_peers(row, (fastest(row["times"], ours=False, modes=modes_of(row)), OF_BEST_PEER, 1.15))


def _of_decoded(row: Result) -> Asked:
    return _of_peers(row, (fastest(row["times"], ours=False, modes=modes_of(row)), 1.0, 1.2))


def _of_departures(row: Result) -> Asked:
    return (DEPARTURES_MUST[row["model"]][row["M"]] if row["ranks"] == 8 else None), None


def _of_scaled(row: Result, side: str) -> Asked:
    """What axis 0 takes; of blocks and few rows the best peer's score; else a score, and no less than a peer's."""
    if row["ranks"] != 2:
        return None, None
    if row.get("axis_0_us"):
        score = row["floor_us"] / row["axis_0_us"]
        return round(score / OF_AXIS_0, 4), round(score, 4)
    if row["scales"] == "blocks" or row["M"] in SMALL:
        modes = modes_of(row) if row["M"] in SMALL else MODES
        return _of_peers(row, (fastest(row["times"], ours=False, modes=modes), OF_BEST_PEER, 1.0))
    return (max(SCALED_MUST[side][row["M"]], row["score_peer"] or 0.0) if row["fast"] else None), None


def _of_mlp(row: Result) -> Asked:
    peers = {name: {name: t} for name, t in row["times"].items()}
    by_hand = fastest(peers.get(BY_HAND, {}), ours=False, modes=modes_of(row))
    fused = fastest(peers.get(TORCH, {}), ours=False, modes=(GRAPH,))
    return _of_peers(row, (by_hand, 1.20, 1.35), (fused, 1.03, 1.15))


def _of_reshard(row: Result) -> Asked:
    if row["model"] == "all_reduce":
        return OF_BEST_PEER, GOAL_OF_BEST_PEER
    nccl = {name: t for name, t in row["times"].items() if name == "NCCL"}
    return _of_peers(row, (fastest(nccl, ours=False, modes=modes_of(row)), 1.0, 1.1))


def _of_peers(row: Result, *asked: tuple[tuple[str, str, float] | None, float, float]) -> Asked:
    """Scores that are so many times as high as peers', each given as `fastest` does."""
    ran = [(row["floor_us"] / peer[2], must, goal) for peer, must, goal in asked if peer]
    if not ran:
        return None, None
    return round(max(score * must for score, must, _ in ran), 4), round(max(score * goal for score, _, goal in ran), 4)


def modes_of(row: Result) -> tuple[str, ...]:
    """The mode in which `hi.compile`'s executor runs a call with `out=`; all where there was none."""
    return (row["compiled"]["mode"],) if "compiled" in row else MODES


SHARDED = {model: (k, n) for model, (n, k) in MODELS.items() if model in FIRST}  # the second weight of the MLP
TRAINED = {  # a layer's N and K of a rank, forward alone and with its gradients
    f"{model}-{kind}{trained}": (n, k) if kind == "gather" else (k, n)
    for model, (n, k) in MODELS.items()
    if model in ("8B", "70B")
    for kind in ("gather", "scatter")
    for trained in ("", "-trained")
}
SCALED = {
    f"scaled_{side}{emulated}": Kind(
        f"{title}{' as a rank of more meets it' if emulated else ''}",
        "copies" if emulated else collective,
        shape,
        {"70B": widths["70B"]},
        {"70B": LARGE if emulated else SIZES["70B"]},
        (lambda _: (None, None)) if emulated else partial(_of_scaled, side=side),
    )
    for side, title, collective, shape, widths in (
        ("gather", "All-gather + fp8 matmul", "all-gather", "M,N/rank,K", MODELS),
        ("scatter", "fp8 matmul + reduce-scatter", "reduce-scatter", "M,N,K/rank", SHARDED),
    )
    for emulated in ("", "_emulated")
}
BESIDE = {f"K={k} N={n}": (n, k) for k, n in ((3696, 8192), (2304, 7168), (4608, 4608), (768, 6144))}
KINDS = {
    "allgather": Kind("All-gather + matmul", "all-gather", "M,N/rank,K", MODELS, SIZES, _of_gathered),
    "reduce_scatter": Kind(
        "Matmul + reduce-scatter",
        "reduce-scatter",
        "M,N,K/rank",
        SHARDED | BESIDE,
        {model: SIZES[model] for model in SHARDED} | ODD,
        _of_scattered,
    ),
    "all_reduce": Kind(
        "Matmul + all-reduce",
        "all-reduce",
        "M,N,K/rank",
        SHARDED,
        dict.fromkeys(SHARDED, (*FEW, *LARGE)),
        _of_reduced,
    ),
    "decode": Kind(
        "Decoding: MLP layers in one graph",
        "all-reduce",
        "M,N,K/rank",
        {"70B": SHARDED["70B"]},
        {"70B": DECODED},
        _of_decoded,
    ),
    "departures": Kind(
        "Matmul + reduce-scatter as a rank of more meets it",
        "copies",
        "M,N,K/rank",
        SHARDED,
        dict.fromkeys(SHARDED, LARGE),
        _of_departures,
    ),
    "mlp": Kind(
        "MLP with sequence-sharded ends",
        "collectives",
        "M,H/rank,K",
        {model: MODELS[model] for model in FIRST},
        dict.fromkeys(FIRST, LARGE),
        _of_mlp,
    ),
    "reshard": Kind(
        "Collectives alone",
        "NCCL",
        "M,N,-",
        {"reduce_scatter": (16384, 0), "all_gather": (8192, 0), "all_reduce": (8192, 0)},
        {"reduce_scatter": (8192,), "all_gather": (4096, 16384), "all_reduce": (1, 16, 64, 512, 4096)},
        _of_reshard,
    ),
    "torch_operators": Kind(
        "Functions for torch",
        "collectives",
        "M,N/rank,K/rank",
        TRAINED,
        dict.fromkeys(TRAINED, (16, 64, 256, 1024, 4096, 16384)),
        by_mode=True,
    ),
    **SCALED,
}
GATHERED = KINDS["allgather"]
rows = GATHERED.rows


def kind_of(row: Result) -> Kind:
    """What a row is of; the first results did not say it."""
    return KINDS[row.get("kind", "allgather")]


# Scores -----------------------------------------------------------------------------------------------------------
def scored(found: Result) -> Result:
    """A row with its floor, its best times, their scores, and what was to be reached.

    Args:
        found: has the microseconds of its parts alone, gemm_us and those of collectives, None where one did not run,
            and `times`: for each candidate whether it is `ours`, and the microseconds of the modes in which it ran.
            With `compiled`, the mode of a call of what `hi.compile` gives and its choice, that is what is scored as
            ours, and the best candidate stands beside it.
    """
    gemm, collective = found.get("gemm_us") or 0.0, min(_collectives(found).values(), default=0.0)
    floor = max(gemm, collective)
    shorter = min(gemm, collective)
    times = {
        name: {
            **t,
            **{f"hidden_{m}": round((gemm + collective - t[m]) / shorter, 3) for m in MODES if m in t and shorter},
        }
        for name, t in found["times"].items()
    }
    done = {**found, "times": times, "collective_us": collective, "floor_us": floor}
    for side, best in _sides({**found, "times": times}).items():
        done[f"best_{side}"] = f"{best[0]}, {best[1]}" if best else None
        done[f"{side}_us"] = best[2] if best else None
        done[f"score_{side}"] = round(floor / best[2], 4) if best else None
    return {**done, **wanted_of(done)}


def _collectives(row: Result) -> dict[str, float]:
    """The collectives alone that ran, by name."""
    found = {name: row.get(f"{name}_us") for name in COLLECTIVES}
    return {name: us for name, us in found.items() if us is not None}


def _sides(row: Result) -> dict[str, tuple[str, str, float] | None]:
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
    """Name, mode and time of the fastest of ours or of the peers; None where none ran."""
    ran = [(name, m, t[m]) for name, t in times.items() if t["ours"] is ours for m in modes if m in t]
    return min(ran, key=lambda each: each[2], default=None)


def wanted_of(row: Result) -> Result:
    """The score that a row must reach, the goal, and whether it has been met; None where nothing is asked of it.

    A must above 1 would ask for less time than the floor. It is 1 at most, unless a peer beats the floor. Rows of a
    kind that is scored by mode have these by mode, and `met` says whether all modes meet theirs.
    """
    judged = row["dtype"] == "bf16" and row.get("device", "cuda") == "cuda" and row.get("shrunk", 1) == 1
    if kind_of(row).by_mode:
        modes = {mode: _wanted_in(row, mode, judged) for mode in MODES}
        every = [mode["met"] for mode in modes.values() if mode["met"] is not None]
        return {"modes": modes, "must": None, "goal": None, "met": all(every) if every else None}
    must, goal = kind_of(row).asked(row) if judged else (None, None)
    if must is not None:
        must = min(must, max(1.0, row["score_peer"] or 0.0))
    met = None if must is None else row["score_ours"] is not None and row["score_ours"] >= must
    return {"must": must, "goal": goal, "met": met}


def _wanted_in(row: Result, mode: str, judged: bool) -> Result:
    """The scores in a mode: of the fastest peer, and of ours, which must be almost as fast."""
    peer, ours = fastest(row["times"], ours=False, modes=(mode,)), row["times"].get(HOSTIR, {}).get(mode)
    found: Result = {
        "best_peer": peer and peer[0],
        "score_peer": round(row["floor_us"] / peer[2], 4) if peer else None,
        "score_ours": round(row["floor_us"] / ours, 4) if ours else None,
    }
    must = round(OF_BEST_PEER * found["score_peer"], 4) if peer and judged else None
    met = None if must is None else found["score_ours"] is not None and found["score_ours"] >= must
    return {**found, "must": must, "met": met}


def in_order(results: Iterable[Result]) -> list[Result]:
    """By model, then by M."""
    return sorted(results, key=lambda row: (list(kind_of(row).models).index(row["model"]), row["M"]))


# Words ------------------------------------------------------------------------------------------------------------
def cell(value: float | bool | str | None, digits: int = 2) -> str:
    """A figure for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else f"{value:.{digits}f}"


COLLECTIVES = {"nccl": "NCCL", "copies": "copies", "torch": "torch", "one_shot": ONE_SHOT, "two_shot": TWO_SHOT}


def cells(row: Result) -> dict[str, str]:
    """A row of the table of scores, by column."""
    alone = _collectives(row)
    which = min(alone, key=alone.__getitem__, default="")
    columns = {
        f"model {kind_of(row).shape}": shape(row),
        "GEMM us": cell(row["gemm_us"], 0),
        "collective us": f"{row['collective_us']:.0f} {COLLECTIVES[which]}" if which else "-",
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
    alike = row["alike_us"] / row["ours_us"] if row["alike_us"] and row["ours_us"] else None
    return {
        **columns,
        "hi.compile": f"{row['compiled']['choice']}, {row['compiled']['mode']}",
        "our score": cell(row["score_ours"], 3),
        "error": cell(row["times"].get(COMPILED, {}).get("error"), 3),
        "x the best peer issued alike": cell(alike, 2),
        "best candidate": cell(row["best_candidate"]),
        "candidate's score": cell(row["score_candidate"], 3),
        "must reach": cell(row["must"], 3),
        "goal": cell(row["goal"], 3),
        "met": cell(row["met"]),
    }


def shape(row: Result) -> str:
    """A row's model and extents."""
    return f"{row['model']} {row['M']},{row['N']},{row['K']}"


COLUMNS_OF_CANDIDATES = ["row", "candidate", EAGER, GRAPH, "score", "TFLOP/s", "host eager", "host graph", "hidden"]


def line(row: Result) -> str:
    """A row for the terminal, as soon as it is measured."""
    name, gemm, collective, floor, *figures = cells(row).values()
    left = f"{name:<22} GEMM {gemm:>5}  {kind_of(row).collective} {collective:>11}  floor {floor:>5}"
    if "modes" in row:
        said = "{mode}: {2:>5} hostir  {1:>5} {0:<14}  must {3:>5}  met {4}"
        return "  |  ".join(
            [left, *(said.format(*figures[5 * n : 5 * n + 5], mode=mode) for n, mode in enumerate(row["modes"]))]
        )
    peer, peers, ours, score, *more = figures
    if "compiled" in row:
        error, alike, candidate, best, must, goal, met = more
        right = f"{score:>5} {ours} ({alike} x, error {error})  |  {best:>5} {candidate}  |  "
        right += f"must {must:>5}  goal {goal:>5}  met {met}"
    else:
        right = "{:>5} {:<41}  |  must {:>5}  met {}".format(score, ours, *more)
    return f"{left}  |  {peers:>5} {peer:<24}  |  {right}"


def report(results: Iterable[Result]) -> str:
    """The scores, then every candidate's times, then the matmul kernels alone: Markdown. There is at least one row."""
    ordered = in_order(results)
    other = kind_of(ordered[0]).collective
    parts = [
        _scores(ordered),
        "## Every candidate",
        "Microseconds; the host's are of one call, TFLOP/s of one GPU. *hidden* is the share of the shorter part, GEMM "
        f"or {other}, that runs behind the other: (GEMM + {other} - time) / shorter; the better mode's.",
    ]
    each = [candidate for row in ordered for candidate in _candidates(row)]
    errors = any(len(candidate) > len(COLUMNS_OF_CANDIDATES) for candidate in each)
    if errors:
        parts[2] += " *error* is relative to float64, as a multiple of the error of NCCL + cuBLAS."
    parts.append(table([*COLUMNS_OF_CANDIDATES, *(["error"] if errors else [])], each))
    if alone := [[str(c) for c in _alone(row)] for row in ordered if row.get("triton_us")]:
        parts += ["## The matmul alone", table(["row", "cuBLAS us", "Triton us", "Triton/cuBLAS"], alone)]
    wrong = [f"- {row['model']} M={row['M']}: {what}: {why}" for row in ordered for what, why in row["failed"].items()]
    if wrong:
        parts += ["## Not scored", "\n".join(wrong)]
    return "\n\n".join(parts)


def _scores(ordered: list[Result]) -> str:
    lines = [cells(row) for row in ordered]
    said = {"our score": "its score", "candidate's score": "its score"}  # beside what they are of
    return table([said.get(name, name) for name in lines[0]], [list(each.values()) for each in lines])


def _candidates(row: Result) -> Iterator[list[str]]:
    for name, t in row["times"].items():
        times = [t[m] for m in MODES if m in t]
        hidden = max((t[f"hidden_{m}"] for m in MODES if f"hidden_{m}" in t), default=None)
        figures = [cell(t.get(key), 0) for key in MODES]
        hosts = [cell(t.get(key), 0) for key in ("host_eager_us", "host_graph_us")]
        score = cell(row["floor_us"] / min(times), 3)
        rate = cell(row.get("flops", 2 * row["M"] * row["N"] * row["K"]) / min(times) / 1e6, 0)
        behind = "-" if hidden is None else f"{hidden:.0%}"
        error = [cell(t["error"], 3)] if "error" in t else []
        yield [f"{row['model']} M={row['M']}", name, *figures, score, rate, *hosts, behind, *error]


def _alone(row: Result) -> Iterator[str]:
    yield shape(row)
    yield from (cell(row["gemm_us"], 0), cell(row["triton_us"], 0), cell(row["triton_us"] / row["gemm_us"], 3))


def file_name(stem: str, ranks: int, dtype: str) -> str:
    """What results are called: 8 ranks and bf16 are understood."""
    return "_".join([stem, *([dtype] if dtype != "bf16" else []), *([str(ranks)] if ranks != 8 else [])])
