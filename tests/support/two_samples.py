"""Whether two samples can be told apart: the test of Kolmogorov and Smirnov."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TERMS = 100


def largest_gap(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference between the two shares of values up to any bound."""
    marked = sorted([(value, 0) for value in left] + [(value, 1) for value in right])
    seen, gap = [0, 0], 0.0
    for _, equal in groupby(marked, key=lambda pair: pair[0]):
        for _, side in equal:
            seen[side] += 1
        gap = max(gap, abs(seen[0] / len(left) - seen[1] / len(right)))
    return gap


def likelihood(left: Sequence[float], right: Sequence[float]) -> float:
    """Return p: how likely so large a gap is where both are drawn from one distribution.

    The asymptotic form with Stephens' correction, good from some ten values on.
    """
    root = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    scaled = (root + 0.12 + 0.11 / root) * largest_gap(left, right)
    if scaled < 0.2:  # the series converges slowly, to 1
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2.0 * (k * scaled) ** 2) for k in range(1, _TERMS))
    return min(1.0, max(0.0, 2.0 * sum(terms)))
