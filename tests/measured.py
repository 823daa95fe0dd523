"""Results of benchmarks: the files of each benchmark, and the tables that pages show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chosen import ChosenRow, lines_of
from benchmarks.harness import table
from benchmarks.llama_block import HOST_IN_TURN, IN_TURN, ISSUED, REPLAYED, exposed
from benchmarks.scores import cell, cells, in_order
from benchmarks.steps_chart import cases

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
MACHINE = "2xH100"  # the machine of the results in docs/performance.md
LATEST = "2xH200"  # the machine of the latest results of all comparisons with `hi.compile`
MAIN = 'if __name__ == "__main__":'

# The names of each benchmark's results, without ranks and dtypes.
NAMES: Mapping[str, tuple[str, ...]] = {
    "allgather_matmul": ("allgather_matmul",),
    "arrivals": ("arrivals",),
    "all_reduce_norm": ("all_reduce_norm", "all_reduce_norm_fp8"),
    "check": ("check",),
    "chosen": ("chosen",),
    "compiling": ("compiling",),
    "differential": ("differential", "differential_fp8"),
    "host_timeline": ("host_timeline",),
    "hosts": ("hosts",),
    "judge": ("judge",),
    "generate": ("generate",),
    "llama_block": (
        "llama_block",
        "llama_block_sizes",
        "llama_block_issued",
        "llama_block_host",
        "llama_block_host_eager",
        "llama_block_host_pass",
        "llama_block_host_again",
    ),
    "losses": ("losses_100M",),
    "matmul": ("matmul", "fp8_matmul"),
    "matmul_all_reduce": ("matmul_all_reduce", "decode"),
    "matmul_reduce_scatter": ("matmul_reduce_scatter", "matmul_reduce_scatter_as_rank_of"),
    "mlp": ("mlp",),
    "moe": ("moe",),
    "mutation": ("mutation", "mutation_experts", "mutation_sums"),
    "overhead": ("overhead",),
    "patterns": ("patterns",),
    "proofs": ("proofs",),
    "regret": ("regret",),
    "repair": ("repair",),
    "reshard": ("reshard",),
    "scaled_matmul": ("scaled_matmul", "scaled_matmul_scatter", "scaled_matmul_as_rank_of"),
    "soak": ("soak",),
    "structure": ("structure",),
    "tape_entries": ("tape_entries",),
    "timeline": ("timeline", "timeline_cpu"),
    "torch_operators": ("torch_operators",),
    "train": ("train",),
}
OTHERS = {
    "chart": "draws the results of other benchmarks",
    "on_eight": "runs other benchmarks; it has not been run on 8 GPUs",
    "steps_chart": "draws the results of `train`, `llama_block` and `generate`",
    "profile": "draws [pictures](../../docs/images) of kernels",
}


def started() -> list[str]:
    """Return the names of the benchmarks that can be started."""
    return sorted(file.stem for file in ROOT.glob("benchmarks/*.py") if MAIN in file.read_text())


def files_of(name: str) -> list[Path]:
    """Return the committed results of a name, for all ranks, dtypes and machines."""
    known = re.compile(re.escape(name) + r"(_(f16|f32))?(_\d+)?\.json")
    return sorted(file for file in RESULTS.rglob("*.json") if known.fullmatch(file.name))


def stamp(file: Path) -> str:
    """Return the date, commit and machine of results, from the second paragraph of their table."""
    return file.with_suffix(".md").read_text().split("\n\n")[1]


def overview() -> str:
    """Return the page that lists all results."""
    lines = []
    for benchmark in started():
        for name in NAMES.get(benchmark, ()):
            for file in files_of(name):
                path = file.with_suffix(".md").relative_to(RESULTS)
                lines.append([f"`{benchmark}`", f"[{path.with_suffix('')}]({path})", stamp(file)])
        if benchmark in OTHERS:
            lines.append([f"`{benchmark}`", "-", OTHERS[benchmark]])
    head = (
        "# Results of the benchmarks\n\nEach has the stamp of the run that made it. `pytest --accept` makes this list."
    )
    return f"{head}\n\n{table(['benchmark', 'result', 'made'], lines).replace('---:', '---')}\n"


# Tables of pages --------------------------------------------------------------------------------------------------
Rows = list[dict[str, Any]]


def compiled_ratios(rows: Rows) -> list[float]:
    """Return the time of the fastest peer in the same mode, divided by the time of `hi.compile`, for each row."""
    return [row["alike_us"] / row["ours_us"] for row in rows if row.get("alike_us") and row["ours_us"]]


def mode_ratios(rows: Rows, mode: str) -> list[float]:
    """Return the time of the fastest peer, divided by the time of hostir's function, for each row in a mode."""
    both = [row["modes"][mode] for row in rows]
    return [m["score_ours"] / m["score_peer"] for m in both if m["score_ours"] and m["score_peer"]]


def faster(ratios: list[float]) -> int:
    """Count the rows of a result in which hostir is faster."""
    return sum(ratio > 1 for ratio in ratios)


def compared(data: dict[str, Any]) -> str:
    """Return the table that compares `hi.compile` with the peers."""
    rows = in_order(data["rows"])
    dropped = {"floor us", "error", "must reach", "goal", "met"}
    lines = [{name: text for name, text in cells(row).items() if name not in dropped} for row in rows]
    names = {"our score": "its score", "candidate's score": "its score"}
    text = table([names.get(name, name) for name in lines[0]], [[*line.values()] for line in lines])
    if left := data["not_measured"]:
        text += f"\n\nNot measured, as time was short: {', '.join(left)}."
    ratios = compiled_ratios(rows)
    if not ratios:
        return text
    sentence = f"`hi.compile` is faster than the best peer issued alike in {faster(ratios)} of {len(rows)} rows"
    return f"{text}\n\n{sentence}; the median is {median(ratios):.2f} x."


SUMMARY: Mapping[str, str] = {
    "allgather_matmul_2": "all-gather + matmul",
    "matmul_reduce_scatter_2": "matmul + reduce-scatter",
    "mlp_2": "MLP: all-gather, two matmuls, reduce-scatter",
    "matmul_all_reduce_2": "matmul + all-reduce, one and 80 layers",
    "decode_2": "matmul + all-reduce, one and 80 layers",
    "scaled_matmul_2": "fp8: all-gather + matmul, matmul + reduce-scatter",
    "scaled_matmul_scatter_2": "fp8: all-gather + matmul, matmul + reduce-scatter",
    "reshard_2": "collectives alone",
}
BY_MODE = {
    "graph": "functions of `hostir.torch` on 2 H100, replayed",
    "eager": "functions of `hostir.torch` on 2 H100, issued by Python",
}
OURS = {"decoding": ("hostir", "two-shot")}  # hostir's way and the second peer, by kind of step
OF_TRAINING = ("DTensor compiled, hostir's pass", "DTensor compiled, async TP")


def steps(results: Path = RESULTS / MACHINE) -> str:
    """Return the table of steps of models: the time with hostir, and the times of torch's ways as multiples of it."""
    lines = []
    for (kind, model), group in groupby(cases(results), key=lambda case: (case.kind, case.name.partition(", ")[0])):
        alike, columns = [*group], list[str]()
        ours, second = ([case.times[n] for case in alike] for n in OURS.get(kind, OF_TRAINING))
        columns.append(", ".join(f"{us / 1000:.1f}" for us in ours) + " ms")
        for others in ([case.base for case in alike], second):
            ratios = [f"{other / us:.2f}" for other, us in zip(others, ours, strict=True)]
            columns.append(", ".join(ratios) + " x")
        sizes = [case.name.partition(", ")[2] for case in alike]
        lines.append([f"{kind}, {model}: {'; '.join(sizes)}", *columns])
    torchs = ["faster than compiled DTensor, or NCCL", "faster than async TP, or two-shot"]
    return table(["a step of Llama 3 on 2 H100", "hostir", *torchs], lines)


def summary(results: Path = RESULTS / MACHINE, latest: Path = RESULTS / LATEST) -> str:
    """Summarise the results for the README: steps of whole models, and a row for each comparison with peers."""

    def rows_of(folder: Path, name: str) -> Rows:
        return json.loads((folder / f"{name}.json").read_text())["rows"]

    compared: dict[str, tuple[list[float], int]] = {}
    for name, what in SUMMARY.items():
        ratios, count = compared.get(what, ([], 0))
        rows = rows_of(latest, name)
        compared[what] = ratios + compiled_ratios(rows), count + len(rows)
    functions = rows_of(results, "torch_operators_2")
    compared |= {what: (mode_ratios(functions, mode), len(functions)) for mode, what in BY_MODE.items()}
    lines = [[what, f"{faster(rs)} of {n}", f"{median(rs):.2f} x"] for what, (rs, n) in compared.items() if rs]
    text = table(["2 H200", "sizes at which hostir is faster", "median speed-up"], lines)
    return f"{steps(results)}\n\n{text}"


def functions(data: dict[str, Any]) -> str:
    """Return the table that compares the functions of hostir.torch with the peers, by mode."""
    rows = in_order(data["rows"])
    lines = [{n: t for n, t in cells(row).items() if not n.startswith(("floor", "must", "met"))} for row in rows]
    text = table([*lines[0]], [[*line.values()] for line in lines])
    if left := data["not_measured"]:
        text += f"\n\nNot measured, as time was short: {', '.join(left)}."
    summaries = []
    for mode in rows[0]["modes"]:
        if ratios := mode_ratios(rows, mode):
            count = f"faster than the best peer in {faster(ratios)} of {len(rows)} rows"
            summaries.append(f"{mode}: {count}, median {median(ratios):.2f} x")
    return f"{text}\n\n{'; '.join(summaries)}."


def blocks(data: dict[str, Any]) -> str:
    """Return the table of the steps of a Llama-3 block."""
    lines = []
    for row in data["rows"]:
        for name, way in row["ways"].items():
            times = [t for mode in (ISSUED, REPLAYED) for t in (way[mode].get("step"), exposed(way, mode))]
            ran = ", ".join(f"{n} {operator}" for operator, n in sorted(way["operators"].items()))
            case = f"{row['model']}, {row['tokens']} tokens"
            turns = [cell(row[IN_TURN][name], 0)] if row.get(IN_TURN) else []
            lines.append([f"{case}: {name}", *(cell(t, 0) for t in times), cell(way["host_us"], 0), *turns, ran or "-"])
    headers = [f"{what}, {mode}" for mode in (ISSUED, REPLAYED) for what in ("step us", "exposed us")]
    turned = ["step us, issued in turn"] if any(row.get(IN_TURN) for row in data["rows"]) else []
    return table(["way", *headers, "host us", *turned, "fused operators of a step"], lines)


def hosts_in_turn(data: dict[str, Any]) -> str:
    """Return the table of the host's times of the steps of a block, taken in turn."""
    lines = [
        [f"{row['model']}, {row['tokens']} tokens: {way}", cell(us, 0)]
        for row in data["rows"]
        for way, us in row[HOST_IN_TURN].items()
    ]
    return table(["way", "host us, in turn"], lines)


def trained(data: dict[str, Any]) -> str:
    """Return the table of training steps."""
    lines = []
    for row in data["rows"]:
        for way, figures in row["ways"].items():
            modes = [figures[mode] for mode in (REPLAYED, ISSUED)]
            times = [text for mode in modes for text in (cell(mode["us"] / 1000, 1), cell(mode["tokens/s"], 0))]
            name = f"{row['model']}, {row['layers']} layers, {row['tokens']} tokens: {way}"
            lines.append([name, *times, f"{figures['bytes'] / 2**30:.2f}", f"{modes[0]['loss']:.3f}"])
    headers = [f"{what}, {mode}" for mode in (REPLAYED, ISSUED) for what in ("step ms", "tokens/s")]
    return table(["way", *headers, "peak GiB", "loss after the last step"], lines)


def generated(data: dict[str, Any]) -> str:
    """Return the table of decoding steps."""
    lines = []
    for row in data["rows"]:
        for way, figures in row["ways"].items():
            times = [cell(figures[name], 0) for name in ("graph us", "graph tokens/s", "eager us", "eager tokens/s")]
            lines.append([f"{row['model']}, batch {row['batch']}: {way}", *times, f"{figures['error']:.1e}"])
    headers = [f"{what}, {mode}" for mode in (REPLAYED, ISSUED) for what in ("step us", "tokens/s")]
    return table(["way", *headers, "error of the logits"], lines)


def hosts(data: dict[str, Any]) -> str:
    """Return the table of host times, beside the same calls by hand."""
    rows = data["results"]
    lines = [[r["what"], cell(r["ours us"], 0), cell(r.get("by hand us"), 0), cell(r.get("ratio"))] for r in rows]
    return table(["what", "hostir us", "by hand us", "ratio"], lines)


def regrets(data: dict[str, Any]) -> str:
    """Return the table of regrets of the choice by estimates, without the columns that only developers need."""
    shown = ("results", "GPUs", "rows", "regret", "regret, max", "regret, over 1.05", "of 4, max", "within 10%")
    return table([*shown], [[line[name] for name in shown] for line in data["results"]])


def choices(data: dict[str, Any]) -> str:
    """Return the table of what users get by trials, without the columns that only developers need."""
    rows = [ChosenRow(name, **row) for name, row in data["rows"].items()]
    lines = [{name: text for name, text in line.items() if "spread" not in name} for line in lines_of(rows)]
    return table([*lines[0]], [[*line.values()] for line in lines])


TABLES: Mapping[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(("allgather_matmul_2", "matmul_reduce_scatter_2", "matmul_all_reduce_2", "mlp_2"), compared),
    **dict.fromkeys(
        (
            *("decode_2", "reshard_2", "all_reduce_norm_2", "all_reduce_norm_fp8_2"),
            *("scaled_matmul_2", "scaled_matmul_scatter_2"),
        ),
        compared,
    ),
    "torch_operators_2": functions,
    "generate": generated,
    "llama_block": blocks,
    "llama_block_sizes": blocks,
    "llama_block_issued": blocks,
    "llama_block_host": hosts_in_turn,
    "llama_block_host_eager": hosts_in_turn,
    "llama_block_host_pass": hosts_in_turn,
    "llama_block_host_again": hosts_in_turn,
    "train": trained,
    "overhead": hosts,
    "regret": regrets,
    "chosen": choices,
}
MARKED = re.compile(r"<!-- measured: ([\w/]+) -->\n.*?<!-- end -->", re.DOTALL)
SUMMARISED = re.compile(r"(?<=<!-- measured -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def filled(page: str, results: Path = RESULTS / MACHINE) -> str:
    """Return a page with the table of each result that it marks, or `Not measured.` if there is no result.

    A mark is the name of a result in the folder `results`, or another machine and the name of its result.
    """

    def text(mark: re.Match[str]) -> str:
        file = (RESULTS if "/" in mark[1] else results) / f"{mark[1]}.json"
        shown = "Not measured."
        if file.exists():
            shown = f"{TABLES[file.stem](json.loads(file.read_text()))}\n\nMade: {stamp(file)}."
        return f"<!-- measured: {mark[1]} -->\n{shown}\n<!-- end -->"

    return MARKED.sub(text, page)
