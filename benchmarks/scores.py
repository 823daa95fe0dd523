"""What `benchmarks/allgather_matmul.py` measures and how it is scored: rows, scores, tables. None of it needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import table

EAGER, GRAPH = "eager", "graph"
NVFUSER = "nvFuser"
# N and K of a rank; for Llama 3 they are those of the first weight of the MLP at tensor parallel 8.
MODELS = {"8B": (1792, 4096), "70B": (3584, 8192), "405B": (6656, 16384), NVFUSER: (8192, 16384)}
LARGE, SMALL = (2048, 4096, 8192, 16384), (512, 64)
SIZES = {model: (*reversed(SMALL), *LARGE) for model in MODELS} | {NVFUSER: (32768,)}
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

Result = dict[str, Any]  # a row's figures, as they stand in the JSON


@dataclass(frozen=True)
class Row:
    """One shape: M rows of A in all, N columns of B on each rank."""

    model: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.model} M={self.M}"


def rows(wanted: str = "") -> list[Row]:
    """The rows to measure, in order of importance.

    Args:
        wanted: models or rows, such as `8B:2048,70B`; empty for all.

    Raises ValueError for what is none.
    """
    order = [(model, m) for model in FIRST for m in LARGE]
    order += [(model, m) for m in SMALL for model in FIRST]
    order += [(NVFUSER, m) for m in SIZES[NVFUSER]]
    chosen = set(_chosen(wanted)) if wanted else set(order)
    return [Row(model, m, *MODELS[model]) for model, m in order if (model, m) in chosen]


def _chosen(wanted: str) -> Iterator[tuple[str, int]]:
    for part in wanted.split(","):
        model, _, m = part.partition(":")
        sizes = [size for size in SIZES.get(model, ()) if m in ("", str(size))]
        if not sizes:
            raise ValueError(f"no row '{part}': models are {', '.join(MODELS)}, M is one of {SIZES['8B']}")
        yield from ((model, size) for size in sizes)


# Scores -----------------------------------------------------------------------------------------------------------
def scored(found: Result) -> Result:
    """A row with its floor, its best times, their scores, and what was to be reached.

    Args:
        found: has gemm_us, nccl_us, copies_us, and `times`: for each candidate whether it is `ours`, and the
            microseconds of the modes in which it ran.
    """
    gemm, collective = found["gemm_us"], min(found["nccl_us"], found["copies_us"])
    floor = max(gemm, collective)
    shorter = min(gemm, collective)
    times = {
        name: {**t, **{f"hidden_{m}": round((gemm + collective - t[m]) / shorter, 3) for m in (EAGER, GRAPH) if m in t}}
        for name, t in found["times"].items()
    }
    done = {**found, "times": times, "collective_us": collective, "floor_us": floor}
    for side, ours in (("peer", False), ("ours", True)):
        best = fastest(times, ours=ours)
        done[f"best_{side}"] = f"{best[0]}, {best[1]}" if best else None
        done[f"{side}_us"] = best[2] if best else None
        done[f"score_{side}"] = round(floor / best[2], 4) if best else None
    return {**done, **wanted_of(done)}


def fastest(times: dict[str, Result], *, ours: bool) -> tuple[str, str, float] | None:
    """Name, mode and time of the fastest of ours or of the peers; None where none ran."""
    ran = [(name, m, t[m]) for name, t in times.items() if t["ours"] is ours for m in (EAGER, GRAPH) if m in t]
    return min(ran, key=lambda each: each[2], default=None)


def wanted_of(row: Result) -> Result:
    """The score that a row must reach, the goal, and whether it has been met; None where nothing is asked of it."""
    must = goal = None
    if row["ranks"] == 8 and row["dtype"] == "bf16":
        must = MUST.get(row["model"], {}).get(row["M"])
        goal = GOAL.get(row["model"], {}).get(row["M"])
        if row["M"] in SMALL:
            must, goal = row["score_peer"] and round(OF_BEST_PEER * row["score_peer"], 4), SMALL_GOAL
    met = None if must is None else row["score_ours"] is not None and row["score_ours"] >= must
    return {"must": must, "goal": goal, "met": met}


def in_order(results: Iterable[Result]) -> list[Result]:
    """By model, then by M."""
    return sorted(results, key=lambda row: (list(MODELS).index(row["model"]), row["M"]))


# Words ------------------------------------------------------------------------------------------------------------
def cell(value: float | bool | str | None, digits: int = 2) -> str:
    """A figure for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def cells(row: Result) -> list[str]:
    """A row of the table of scores."""
    which = "NCCL" if row["nccl_us"] <= row["copies_us"] else "copies"
    return [
        f"{row['model']} {row['M']},{row['N']},{row['K']}",
        cell(row["gemm_us"], 0),
        f"{row['collective_us']:.0f} {which}",
        cell(row["floor_us"], 0),
        cell(row["best_peer"]),
        cell(row["score_peer"], 3),
        cell(row["best_ours"]),
        cell(row["score_ours"], 3),
        cell(row["must"], 3),
        cell(row["met"]),
    ]


HEADERS = [
    "model M,N/rank,K",
    "GEMM us",
    "collective us",
    "floor us",
    "best peer",
    "its score",
    "best of ours",
    "its score",
    "must reach",
    "met",
]
HEADERS_OF_CANDIDATES = ["row", "candidate", EAGER, GRAPH, "score", "TFLOP/s", "host eager", "host graph", "hidden"]


def line(row: Result) -> str:
    """A row for the terminal, as soon as it is measured."""
    shape, gemm, collective, floor, peer, peers, ours, score, must, met = cells(row)
    left = f"{shape:<22} GEMM {gemm:>5}  all-gather {collective:>11}  floor {floor:>5}"
    return f"{left}  |  {peers:>5} {peer:<24}  |  {score:>5} {ours:<41}  |  must {must:>5}  met {met}"


def report(results: Iterable[Result]) -> str:
    """The scores, then every candidate's times, then the matmul kernels alone: Markdown."""
    ordered = in_order(results)
    each = [candidate for row in ordered for candidate in _candidates(row)]
    alone = [[str(c) for c in _alone(row)] for row in ordered if row.get("triton_us")]
    wrong = [f"- {row['model']} M={row['M']}: {what}: {why}" for row in ordered for what, why in row["failed"].items()]
    parts = [
        table(HEADERS, [cells(row) for row in ordered]),
        "## Every candidate",
        "Microseconds; the host's are of one call, TFLOP/s of one GPU. *hidden* is the share of the shorter part, GEMM "
        "or all-gather, that runs behind the other: (GEMM + all-gather - time) / shorter; the better mode's.",
        table(HEADERS_OF_CANDIDATES, each),
        "## The matmul alone",
        table(["row", "cuBLAS us", "Triton us", "Triton/cuBLAS"], alone),
    ]
    if wrong:
        parts += ["## Not scored", "\n".join(wrong)]
    return "\n\n".join(parts)


def _candidates(row: Result) -> Iterator[list[str]]:
    for name, t in row["times"].items():
        times = [t[m] for m in (EAGER, GRAPH) if m in t]
        hidden = max(t[f"hidden_{m}"] for m in (EAGER, GRAPH) if m in t)
        figures = [cell(t.get(key), 0) for key in (EAGER, GRAPH)]
        hosts = [cell(t.get(key), 0) for key in ("host_eager_us", "host_graph_us")]
        score = cell(row["floor_us"] / min(times), 3)
        rate = cell(2 * row["M"] * row["N"] * row["K"] / min(times) / 1e6, 0)
        yield [f"{row['model']} M={row['M']}", name, *figures, score, rate, *hosts, f"{hidden:.0%}"]


def _alone(row: Result) -> Iterator[str]:
    yield f"{row['model']} {row['M']},{row['N']},{row['K']}"
    yield from (cell(row["gemm_us"], 0), cell(row["triton_us"], 0), cell(row["triton_us"] / row["gemm_us"], 3))


def file_name(stem: str, ranks: int, dtype: str) -> str:
    """What results are called: 8 ranks and bf16 are understood."""
    return "_".join([stem, *([dtype] if dtype != "bf16" else []), *([str(ranks)] if ranks != 8 else [])])
