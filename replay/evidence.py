"""How a setting compares to the present one: paired ratios over the same traffic.

The logarithm of the ratio is taken cell by cell, averaged over the loads of one seed, and the means
of the seeds are the sample: loads are chosen and not drawn, so they add nothing to its size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from msgspec import Struct

from replay.interval import Ratio, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.trial import Cell, Figures

Objective: TypeAlias = Literal["ttft_mean", "ttft_p99"]
FigureName: TypeAlias = Literal["ttft_mean", "ttft_p99", "hit_ratio", "imbalance"]
FIGURE_NAMES: Final[tuple[FigureName, ...]] = ("ttft_mean", "ttft_p99", "hit_ratio", "imbalance")


class LoadRatio(Struct, frozen=True, kw_only=True):
    """The two times at one load."""

    load: float
    ttft_mean: Ratio
    ttft_p99: Ratio


class Effect(Struct, frozen=True, kw_only=True):
    """A setting's figures divided by the present setting's: below 1 is better, but for hits.

    None where a figure is 0 on one side only. ``more_failed`` counts requests.
    """

    ttft_mean: Ratio
    ttft_p99: Ratio
    hit_ratio: Ratio | None
    imbalance: Ratio | None
    more_failed: int
    loads: tuple[LoadRatio, ...]

    def of(self, name: FigureName) -> Ratio | None:
        """Return the ratio of one figure."""
        return {
            "ttft_mean": self.ttft_mean,
            "ttft_p99": self.ttft_p99,
            "hit_ratio": self.hit_ratio,
            "imbalance": self.imbalance,
        }[name]

    def time(self, objective: Objective) -> Ratio:
        """Return the ratio of one of the two times."""
        return self.ttft_mean if objective == "ttft_mean" else self.ttft_p99

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """All four so that lower is better; an unknown ratio counts as no change."""
        hits = 1.0 if self.hit_ratio is None else self.hit_ratio.ratio
        imbalance = 1.0 if self.imbalance is None else self.imbalance.ratio
        return self.ttft_mean.ratio, self.ttft_p99.ratio, -hits, imbalance


def figure(figures: Figures, name: FigureName) -> float:
    """Return one figure by its name."""
    return {
        "ttft_mean": figures.ttft_mean_s,
        "ttft_p99": figures.ttft_p99_s,
        "hit_ratio": figures.hit_ratio,
        "imbalance": figures.imbalance,
    }[name]


def effect_of(
    cells: Sequence[Cell], present: Sequence[Figures], changed: Sequence[Figures]
) -> Effect:
    """Return how ``changed`` compares to ``present``, both by cell."""
    by_seed = {name: _by_seed(cells, present, changed, name) for name in FIGURE_NAMES}
    times = by_seed["ttft_mean"], by_seed["ttft_p99"]
    if times[0] is None or times[1] is None:
        message = "a time to first token of 0 s has no ratio"
        raise ValueError(message)
    hits, imbalance = by_seed["hit_ratio"], by_seed["imbalance"]
    return Effect(
        ttft_mean=ratio_interval(times[0]),
        ttft_p99=ratio_interval(times[1]),
        hit_ratio=None if hits is None else ratio_interval(hits),
        imbalance=None if imbalance is None else ratio_interval(imbalance),
        more_failed=sum(one.failed for one in changed) - sum(one.failed for one in present),
        loads=tuple(
            _at_load(load, cells, present, changed)
            for load in dict.fromkeys(cell.load for cell in cells)
        ),
    )


def _at_load(
    load: float, cells: Sequence[Cell], present: Sequence[Figures], changed: Sequence[Figures]
) -> LoadRatio:
    logs: dict[FigureName, list[float]] = {"ttft_mean": [], "ttft_p99": []}
    for cell, before, after in zip(cells, present, changed, strict=True):
        if cell.load == load:
            for name, values in logs.items():
                values.append(math.log(figure(after, name) / figure(before, name)))
    return LoadRatio(
        load=load,
        ttft_mean=ratio_interval(logs["ttft_mean"]),
        ttft_p99=ratio_interval(logs["ttft_p99"]),
    )


def _by_seed(
    cells: Sequence[Cell],
    present: Sequence[Figures],
    changed: Sequence[Figures],
    name: FigureName,
) -> list[float] | None:
    """Return each seed's mean log ratio; None where a cell has none."""
    logs: dict[int, list[float]] = defaultdict(list)
    for cell, before, after in zip(cells, present, changed, strict=True):
        log = _log_ratio(figure(after, name), figure(before, name))
        if log is None:
            return None
        logs[cell.seed].append(log)
    return [fmean(values) for values in logs.values()]


def _log_ratio(after: float, before: float) -> float | None:
    if after == before:
        return 0.0
    return math.log(after / before) if after > 0 and before > 0 else None
