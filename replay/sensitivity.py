"""What each weight does by itself, read off the hypercube: first order, no interactions."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from replay.evidence import FIGURE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.evidence import Effect, Objective
    from replay.space import Dimension, Point

FEWEST: Final = 6
"""With fewer points, two for each third, nothing is said."""


class Sensitivity(Struct, frozen=True, kw_only=True):
    """One weight. ``ranks`` is Spearman's correlation with each figure, None where it is constant.

    ``thirds`` are the objective's ratios to the present setting (geometric means) over the points
    in the low, middle and high third of the weight's range, whatever the other weights were.
    """

    name: str
    low: float
    high: float
    ranks: dict[str, float | None]
    thirds: tuple[float, float, float]

    @property
    def range_effect(self) -> float:
        """The highest third divided by the lowest: 1 is a weight that does nothing."""
        return max(self.thirds) / min(self.thirds)


def sensitivities(
    space: Sequence[Dimension],
    points: Sequence[Point],
    effects: Sequence[Effect],
    objective: Objective,
) -> tuple[Sensitivity, ...]:
    """Return what each dimension does, strongest first; nothing where the points are too few."""
    if len(points) < FEWEST:
        return ()
    logs = [math.log(effect.time(objective).ratio) for effect in effects]
    found = []
    for axis, dimension in enumerate(space):
        values = [point[axis] for point in points]
        ranks: dict[str, float | None] = {}
        for name in FIGURE_NAMES:
            ratios = [effect.of(name) for effect in effects]
            known = [(v, r.ratio) for v, r in zip(values, ratios, strict=True) if r is not None]
            ranks[name] = rank_correlation([v for v, _ in known], [r for _, r in known])
        found.append(
            Sensitivity(
                name=dimension.name,
                low=dimension.low,
                high=dimension.high,
                ranks=ranks,
                thirds=_thirds(values, logs),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.range_effect))


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None where one is constant."""
    ranks = _ranks(xs), _ranks(ys)
    means = [fmean(one) if one else 0.0 for one in ranks]
    products = squares_x = squares_y = 0.0
    for x, y in zip(*ranks, strict=True):
        products += (x - means[0]) * (y - means[1])
        squares_x += (x - means[0]) ** 2
        squares_y += (y - means[1]) ** 2
    if not squares_x or not squares_y:
        return None
    return products / math.sqrt(squares_x * squares_y)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + end - 1) / 2
        start = end
    return ranks


def _thirds(values: Sequence[float], logs: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio in each third of the points, ordered by their value."""
    ordered = [log for _, log in sorted(zip(values, logs, strict=True))]
    first, second = len(ordered) // 3, len(ordered) - len(ordered) // 3
    parts = ordered[:first], ordered[first:second], ordered[second:]
    low, middle, high = (math.exp(fmean(part)) for part in parts)
    return low, middle, high
