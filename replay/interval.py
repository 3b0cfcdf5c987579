"""How sure a ratio is: Student's t on the logarithms of paired ratios."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE: Final = 0.95
HALVINGS: Final = 80


class Ratio(Struct, frozen=True, kw_only=True):
    """A geometric mean of paired ratios and its interval; ends are None with fewer than two."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def is_below_one(self) -> bool:
        """Whether the whole interval is."""
        return self.high is not None and self.high < 1.0

    @property
    def is_above_one(self) -> bool:
        """Whether the whole interval is."""
        return self.low is not None and self.low > 1.0


def student_within(t: float, freedom: int) -> float:
    """Return P(-t < T < t) of Student's t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    first = 1 if is_odd else 0
    for power in range(first, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2.0 / math.pi * (angle + sine * total) if is_odd else sine * total


def student_quantile(within: float, freedom: int) -> float:
    """Return the t for which P(-t < T < t) is ``within``."""
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if student_within(math.tan(middle) * math.sqrt(freedom), freedom) < within:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def ratio_interval(logs: Sequence[float]) -> Ratio:
    """Return the ratio whose logarithm is the mean of ``logs``, which are not empty."""
    mean = fmean(logs)
    if len(logs) < 2:  # noqa: PLR2004 - one value has no spread
        return Ratio(ratio=math.exp(mean))
    freedom = len(logs) - 1
    half = student_quantile(CONFIDENCE, freedom) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(ratio=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))
