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


ABOUT = (
    "# The grid",
    "",
    "Policies on a [fleet in virtual time](replay.md), all on the same requests at the same times.",
    "Replicas are the 70B preset (Llama 3.1 70B in FP8 on two H100, by arithmetic).",
    "",
    "- *Workloads*: Mooncake's conversation and synthetic traces; coding agents, whose sessions",
    "  are copied with distinct roots; Azure's arrivals and lengths on Mooncake's prefixes.",
    "- *Loads*: prefill that even one endless cache would not save takes 15, 30 or 45 % of the",
    "  fleet's time.",
    "- *Caches* of a replica: S 440,000 tokens, M 1,080,000, L as S with 3,000,000 in host memory.",
    "- *pooled*: the same replicas on one memory of their common size. Blocks that one computes",
    "  are there for the others at once, so it is a little better than any fleet could be.",
    "- *infinite*: the same with room for the whole trace. *in SLO*: TTFT 2 s, TPOT 0.1 s.",
    "- Intervals: bootstrap over 20 parts of each run, by arrival, together with the bound's.",
    "- The rules of other routers have their published defaults ([how](policies.md)); their",
    "  products may do better where they tune. Ours was tuned on such traces: an advantage.",
)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values; NaN of none."""
    logs = [log(value) for value in values if value > 0]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


class Runs:
    """All runs by (cell, policy, seed)."""

    def __init__(self, made: Mapping[tuple[Cell, str, int], Figures], bound: str) -> None:
        self.made = made
        self.bound = bound

    def common(self) -> Runs:
        """Return the ordinary runs of the conditions that every policy ran in."""
        everybody = {name for _, name, _ in self.made}
        ran: dict[tuple[Cell, int], set[str]] = {}
        for cell, name, seed in self.made:
            ran.setdefault((cell, seed), set()).add(name)
        whole = {key for key, names in ran.items() if names == everybody and not key[0].scenario}
        made = {key: one for key, one in self.made.items() if (key[0], key[2]) in whole}
        return Runs(made, self.bound)

    def cells(self) -> int:
        """Return the number of conditions of the bound, besides scenarios."""
        return sum(1 for cell, name, _ in self.made if name == self.bound and not cell.scenario)

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
            there = [name for name in rivals if name in runs]
            if policy not in runs or cell.scenario or not there:
                continue
            best = min(there, key=lambda name: measure(runs[name]))
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
    size = "all requests" if requests is None else f"the first {requests:,} requests"
    common = runs.common()
    lines = [
        *ABOUT,
        "",
        (
            f"{len(runs.made):,} of {wanted:,} runs; {size} of each workload; seeds: {seeds}. "
            "`make grid` makes what is missing."
        ),
        "",
        (
            f"Geometric means over the {common.cells()} conditions in which every policy ran, of "
            "the ratio to the pooled bound; lower is better, but for the last three."
        ),
        "",
        "| policy | mean TTFT (95 %) | p50 | p90 | p99 | TPOT | hit | in SLO | imbalance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in common.policies():
        low, high = common.interval(policy)
        figures = [f"{common.ratio(policy, measure):.2f}" for measure in MEASURES.values()]
        pairs = common.pairs(policy)
        hit = geometric_mean([max(one.hit, 1e-6) / max(bound.hit, 1e-6) for one, bound in pairs])
        in_slo = sum(one.in_slo for one, _ in pairs) / len(pairs)
        uneven = sum(one.imbalance for one, _ in pairs) / len(pairs)
        first = f"{figures[0]} ({low:.2f}-{high:.2f})"
        row = [policy, first, *figures[1:], f"{hit:.2f}", f"{in_slo:.3f}", f"{uneven:.2f}"]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", f"Over all {runs.cells()} conditions:", ""]
    for policy in [name for name in runs.policies() if name.startswith(DEFAULT)]:
        mean, p99 = MEASURES["mean TTFT"], MEASURES["p99"]
        found = f"mean {runs.ratio(policy, mean):.2f}, p99 {runs.ratio(policy, p99):.2f}"
        lines.append(f"- `{policy}`: {found}")
    lines += _shortfall_lines(common)
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
