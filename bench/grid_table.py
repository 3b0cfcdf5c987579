"""The tables of the grid: ratios to the pooled bound, and where our default is not the best."""

from __future__ import annotations

import random
from math import exp, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replay.grid import Cell, Figures

DEFAULT = "expected_ttft"
NEAR = 1.03
DRAWS = 400
MEASURES: dict[str, Callable[[Figures], float]] = {
    "mean TTFT": lambda one: one.mean_s,
    "p50": lambda one: one.p50_s,
    "p90": lambda one: one.p90_s,
    "p99": lambda one: one.p99_s,
    "TPOT": lambda one: one.tpot_s,
}


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values; NaN of none."""
    logs = [log(value) for value in values if value > 0]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


class Runs:
    """All runs by (cell, policy, seed)."""

    def __init__(self, made: Mapping[tuple[Cell, str, int], Figures], bound: str) -> None:
        self.made = made
        self.bound = bound

    def pairs(self, policy: str, *, scenario: str | None = "") -> list[tuple[Figures, Figures]]:
        """Return (run, bound) for each condition; ``scenario`` None for all."""
        return [
            (figures, self.made[(cell, self.bound, seed)])
            for (cell, name, seed), figures in self.made.items()
            if name == policy
            and (scenario is None or cell.scenario == scenario)
            and (cell, self.bound, seed) in self.made
        ]

    def policies(self) -> list[str]:
        """Return all policies, best mean TTFT first."""
        names = {name for _, name, _ in self.made} - {self.bound}
        return sorted(names, key=lambda name: self.ratio(name, MEASURES["mean TTFT"]))

    def ratio(
        self, policy: str, measure: Callable[[Figures], float], scenario: str | None = ""
    ) -> float:
        """Return the geometric mean over conditions of the ratio to the bound."""
        pairs = self.pairs(policy, scenario=scenario)
        return geometric_mean([measure(one) / max(1e-9, measure(bound)) for one, bound in pairs])

    def interval(self, policy: str, scenario: str | None = "") -> tuple[float, float]:
        """Return the 95 % interval of the ratio of mean TTFT, by bootstrap.

        Each draw takes the parts of each run, by arrival, again with repetition, the same parts of
        the run and of its bound: requests near in time are not independent.
        """
        pairs = self.pairs(policy, scenario=scenario)
        draw = random.Random(1)  # noqa: S311 - reproducible
        drawn = sorted(
            geometric_mean([_redrawn(one, bound, draw) for one, bound in pairs])
            for _ in range(DRAWS if pairs else 0)
        )
        if not drawn:
            return float("nan"), float("nan")
        return drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))]

    def shortfalls(
        self, policy: str, measure: Callable[[Figures], float], rivals: Sequence[str]
    ) -> list[tuple[Cell, str, float]]:
        """Return the cells where a rival is better by more than 3 %: who, and by what ratio."""
        found = []
        by_cell: dict[tuple[Cell, int], dict[str, Figures]] = {}
        for (cell, name, seed), figures in self.made.items():
            by_cell.setdefault((cell, seed), {})[name] = figures
        for (cell, _), runs in by_cell.items():
            if policy not in runs or cell.scenario:
                continue
            best = min((name for name in rivals if name in runs), key=lambda n: measure(runs[n]))
            ratio = measure(runs[policy]) / max(1e-9, measure(runs[best]))
            if ratio > NEAR:
                found.append((cell, best, ratio))
        return sorted(found, key=lambda row: -row[2])

    def summary(self) -> dict[str, object]:
        """Return the figures of the tables for a program."""
        return {
            policy: {name: self.ratio(policy, measure) for name, measure in MEASURES.items()}
            for policy in self.policies()
        }


def _redrawn(one: Figures, bound: Figures, draw: random.Random) -> float:
    parts = range(len(one.block_counts))
    chosen = [draw.choice(parts) for _ in parts]
    own = sum(one.block_sums_s[part] for part in chosen)
    least = sum(bound.block_sums_s[part] for part in chosen)
    own_count = sum(one.block_counts[part] for part in chosen)
    least_count = sum(bound.block_counts[part] for part in chosen)
    return (own / max(1, own_count)) / max(1e-9, least / max(1, least_count))


def page(runs: Runs, *, wanted: int, requests: int | None, seeds: int) -> str:
    """Return the page as Markdown."""
    cells = {cell for cell, _, _ in runs.made if not cell.scenario}
    size = "all requests" if requests is None else f"the first {requests:,} requests"
    lines = [
        "# The grid",
        "",
        (
            f"{len(runs.made):,} of {wanted:,} runs, {len(cells)} cells, {size} of each workload, "
            f"seeds: {seeds}. `make grid` makes what is missing."
        ),
        "",
        (
            "Geometric means over the cells of the ratio to the pooled bound; lower is better, but "
            "for the last three."
        ),
        "",
        "| policy | mean TTFT (95 %) | p50 | p90 | p99 | TPOT | hit | in SLO | imbalance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in runs.policies():
        low, high = runs.interval(policy)
        figures = [f"{runs.ratio(policy, measure):.2f}" for measure in MEASURES.values()]
        pairs = runs.pairs(policy)
        if not pairs:
            continue
        hit = geometric_mean([max(one.hit, 1e-6) / max(bound.hit, 1e-6) for one, bound in pairs])
        in_slo = sum(one.in_slo for one, _ in pairs) / len(pairs)
        uneven = sum(one.imbalance for one, _ in pairs) / len(pairs)
        first = f"{figures[0]} ({low:.2f}-{high:.2f})"
        row = [policy, first, *figures[1:], f"{hit:.2f}", f"{in_slo:.3f}", f"{uneven:.2f}"]
        lines.append("| " + " | ".join(row) + " |")
    lines += _shortfall_lines(runs)
    lines += _scenario_lines(runs)
    return "\n".join(lines) + "\n"


def _shortfall_lines(runs: Runs) -> list[str]:
    own = [name for name in runs.policies() if name.startswith(DEFAULT)]
    rivals = [n for n in runs.policies() if not n.startswith(DEFAULT) and n != "infinite"]
    lines = ["", "## Where another policy is better by more than 3 %", ""]
    for policy in own:
        for label in ("mean TTFT", "p99"):
            found = runs.shortfalls(policy, MEASURES[label], rivals)
            lines.append(f"- `{policy}`, {label}: {len(found)} cells")
            lines += [f"  - {cell.name}: `{best}`, {ratio:.2f}" for cell, best, ratio in found[:12]]
    return lines


def _scenario_lines(runs: Runs) -> list[str]:
    scenarios = sorted({cell.scenario for cell, _, _ in runs.made if cell.scenario})
    if not scenarios:
        return []
    policies = [name for name in runs.policies() if name != "infinite"]
    head = ["scenario", *policies]
    lines = ["", "## When something is wrong", "", "Mean TTFT to the pooled bound.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for scenario in scenarios:
        row = [scenario]
        for policy in policies:
            ratio = runs.ratio(policy, MEASURES["mean TTFT"], scenario)
            row.append("" if ratio != ratio else f"{ratio:.2f}")  # noqa: PLR0124 - NaN
        lines.append("| " + " | ".join(row) + " |")
    return lines
