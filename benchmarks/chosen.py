"""Show what users get: the regret of the choices of `hi.compile`, over several runs of the comparisons.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.mlp --runs 3 --out results/mlp  # and other comparisons
    python -m benchmarks.chosen results/run1 results/run2 results/run3 --out benchmarks/results/2xH100/chosen

Each folder holds the results of one run. In each run, `hi.compile` begins with an empty cache of choices for each row.
Each number of a row is the median of the runs. The columns:

- *regret* is the time of the choice of `hi.compile` after its first 64 calls, divided by the time of hostir's fastest
  candidate in the same run, each in its faster mode: the geometric mean over the rows, the maximum, and the share of
  rows with at most 1.05. A CUDA graph of the choice may be that of its executor or that of the second call.
- *less spread* is the same, if a row counts as 1 in which all runs have chosen the same candidate, and whose regret
  exceeds 1 by less than its regrets differ between these runs.
- *captured* is the regret of a CUDA graph of the second call, against hostir's fastest candidate in a graph.
- *x NCCL + cuBLAS* and *x best peer* are the speed of the choice as a multiple of the speed of these peers: the lowest
  row. Both are called by Python for each run. For some calls with `out=`, hostir then replays a graph of its own.
- *in a loop x NCCL + cuBLAS* and *in a loop x best peer* are the same for calls in a loop. Such a call takes as
  long as the device or the host, whichever takes longer. With few rows it is the host.
- *captured x NCCL + cuBLAS* and *captured x best peer* are the same for CUDA graphs: the graph of the second call of
  hostir, and a graph of the peer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness import table, write
from benchmarks.scores import BY_HAND, CAPTURED, COMPILED, EAGER, GRAPH, MODES, NCCL, fastest, modes_of, regrets

ALLOWED = 1.05  # a regret that counts as small
Values = dict[str, float]  # figures of a row, by name


@dataclass
class ChosenRow:
    """A row of a comparison, in all runs.

    Fields:
        name: the results and the row.
        runs: the figures of each run: `regret`, `captured`, and the ratios of `figures`. A figure may be missing.
        choices: the candidate that was chosen in each run.
    """

    name: str
    runs: list[Values] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)

    def values(self, figure: str) -> list[float]:
        return [run[figure] for run in self.runs if figure in run]

    def of(self, figure: str) -> float | None:
        """Return the median of a figure over the runs; None if no run has it."""
        values = self.values(figure)
        return median(values) if values else None

    @property
    def regret(self) -> float | None:
        return self.of("regret")

    @property
    def less_spread(self) -> float | None:
        """The regret, or 1 if it exceeds 1 by less than the difference between runs with the same choice."""
        regret, values = self.regret, self.values("regret")
        if regret is None or regret <= 1 or len({*self.choices}) > 1:
            return regret
        return 1.0 if regret - 1 < max(values) - min(values) else regret


def figures(row: Mapping[str, Any]) -> Values:
    """Return the figures of a row of one run.

    `by_hand` and `peer` are the speed of the choice as a multiple of the speed of NCCL + cuBLAS and of the best peer.
    `loop_by_hand` and `loop_peer` are these ratios for a loop of calls, `captured_by_hand` and `captured_peer` for CUDA
    graphs.
    """
    times = row["times"]
    found = regrets(times)
    for prefix, name, modes, mode, by_mode in (
        ("", COMPILED, modes_of(dict(row)), EAGER, times),
        ("loop_", COMPILED, modes_of(dict(row)), EAGER, {name: in_a_loop(t) for name, t in times.items()}),
        ("captured_", CAPTURED, (GRAPH,), GRAPH, times),
    ):
        hands = {name: t for name, t in by_mode.items() if name in (BY_HAND, NCCL)}
        ours = fastest({n: t for n, t in by_mode.items() if n == name}, ours=True, modes=modes)
        for figure, peers in (("by_hand", hands), ("peer", by_mode)):
            other = fastest(peers, ours=False, modes=(mode,))
            found[prefix + figure] = other[2] / ours[2] if other and ours else None
    return {figure: value for figure, value in found.items() if value is not None}


def in_a_loop(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of a candidate in a loop of calls: of the device or the host, whichever is longer."""
    both = {mode: (times[mode], times[f"host_{mode}_us"]) for mode in MODES if f"host_{mode}_us" in times}
    return {"ours": times["ours"], **{mode: max(us) for mode, us in both.items()}}


def results_in(file: Path) -> Iterable[Any]:
    """Return the rows of a file of results. End with a message if the file is not JSON, as after an interrupted run."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        sys.exit(f"error: {file} is not JSON: {problem}\n  hint: remove it, or repeat the run")
    return data.get("rows", ()) if isinstance(data, dict) else ()


def rows_of(folders: Iterable[Path]) -> list[ChosenRow]:
    """Return all rows in which `hi.compile` ran. Each folder is one run."""
    rows: dict[str, ChosenRow] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            for row in results_in(file):
                if isinstance(row, dict) and "compiled" in row and COMPILED in row["times"]:
                    name = f"{file.stem}: {row['model']} M={row['M']}"
                    found = rows.setdefault(name, ChosenRow(name))
                    found.runs.append(figures(row))
                    found.choices.append(row["compiled"]["choice"])
    return list(rows.values())


def summary(rows: Sequence[ChosenRow]) -> dict[str, str]:
    """Return the cells of some rows' line in the table, by the name of the column."""

    def known(figure: Callable[[ChosenRow], float | None]) -> list[float]:
        return [value for row in rows if (value := figure(row)) is not None]

    numbers = sorted({len(row.runs) for row in rows})
    cells = {"rows": str(len(rows)), "runs": " to ".join(dict.fromkeys(map(str, (numbers[0], numbers[-1]))))}
    for name, figure in (("regret", lambda r: r.regret), ("less spread", lambda r: r.less_spread)):
        values = known(figure)
        cells[name] = f"{geometric_mean(values):.3f}" if values else "-"
        cells[f"{name}, max"] = f"{max(values):.2f}" if values else "-"
        cells[f"{name}, <= {ALLOWED}"] = f"{sum(v <= ALLOWED for v in values) / len(values):.0%}" if values else "-"
    captured = known(lambda row: row.of("captured"))
    cells["captured"] = f"{geometric_mean(captured):.3f}" if captured else "-"
    for name, ratio in (("by_hand", f"x {BY_HAND}"), ("peer", "x best peer")):
        for prefix, column in (("", ratio), ("loop_", f"in a loop {ratio}"), ("captured_", f"captured {ratio}")):
            values = known(lambda row, figure=prefix + name: row.of(figure))
            cells[column] = f"{min(values):.2f}" if values else "-"
    return cells


def lines_of(rows: Sequence[ChosenRow]) -> list[dict[str, str]]:
    """Return the lines of the table: one for each comparison, and one for all rows."""
    by_file: dict[str, list[ChosenRow]] = {}
    for row in rows:
        by_file.setdefault(row.name.partition(":")[0], []).append(row)
    lines = [{"results": name, **summary(its)} for name, its in by_file.items()]
    return [*lines, {"results": "all", **summary(rows)}]


def report(rows: Sequence[ChosenRow]) -> str:
    """Return the table."""
    lines = lines_of(rows)
    return table([*lines[0]], [[*line.values()] for line in lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="a folder of results for each run")
    parser.add_argument("--worst", type=int, default=10, help="rows to print that are worst (%(default)s)")
    parser.add_argument("--out", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args(arguments)
    rows = rows_of(options.folders)
    if not rows:
        sys.exit(
            f"error: no row with a choice of hi.compile in {', '.join(map(str, options.folders))}\n"
            "  expected: folders of results that the comparisons have written, one folder for each run"
        )
    print(text := report(rows))
    for row in sorted(rows, key=lambda r: r.regret or 0, reverse=True)[: options.worst]:
        print(f"{row.name}: regret {', '.join(f'{x:.2f}' for x in row.values('regret'))}; {', '.join(row.choices)}")
    if options.out:
        data = {"rows": {row.name: {"runs": row.runs, "choices": row.choices} for row in rows}}
        write(options.out, "Regret of the choices of hi.compile", text, data)


if __name__ == "__main__":
    main()
