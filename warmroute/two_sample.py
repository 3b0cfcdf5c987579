"""Were two samples drawn alike, and are counts those of equal chances? Pure tests, no I/O.

The two-sample test is Kolmogorov's and Smirnov's with its asymptotic p-value, which for samples of
one size is within some percent of the exact one from 50 values on. The test of counts is Pearson's
chi-square.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL: Final = 1.18
"""Up to here the one series is the better one, above it the other."""
_TERMS: Final = range(1, 8)
"""More terms change no digit."""


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest distance between the two distribution functions, from 0 to 1.

    Raises ValueError for an empty sample.
    """
    if not first or not second:
        message = "expected two samples with values in them"
        raise ValueError(message)
    one, other = sorted(first), sorted(second)
    distance, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        value = min(one[i], other[j])
        while i < len(one) and one[i] == value:
            i += 1
        while j < len(other) and other[j] == value:
            j += 1
        distance = max(distance, abs(i / len(one) - j / len(other)))
    return distance


def ks_p_value(distance: float, first_count: int, second_count: int) -> float:
    """Return how likely so large a distance is for samples of one distribution."""
    effective = first_count * second_count / (first_count + second_count)
    return kolmogorov_tail(math.sqrt(effective) * distance)


def kolmogorov_tail(z: float) -> float:
    """Return the probability that Kolmogorov's distribution exceeds ``z``."""
    if z <= 0.0:
        return 1.0
    if z < _SMALL:
        steps = (math.exp(-(((2 * k - 1) * math.pi / z) ** 2) / 8.0) for k in _TERMS)
        return min(1.0, max(0.0, 1.0 - math.sqrt(2.0 * math.pi) / z * sum(steps)))
    terms = (math.copysign(math.exp(-2.0 * (k * z) ** 2), k % 2 - 0.5) for k in _TERMS)
    return 2.0 * sum(terms)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square of so many degrees exceeds ``statistic``."""
    half = statistic / 2.0
    if half <= 0.0:
        return 1.0
    is_odd = degrees % 2
    total = math.erfc(math.sqrt(half)) if is_odd else 0.0
    power = 0.5 if is_odd else 0.0
    while power < degrees / 2.0:
        total += math.exp(power * math.log(half) - half - math.lgamma(power + 1.0))
        power += 1.0
    return min(1.0, total)


def uniform_p_value(counts: Sequence[int]) -> float:
    """Return how likely counts so uneven are where every cell has the same chance.

    Raises ValueError for fewer than two cells, or none counted.
    """
    total = sum(counts)
    if len(counts) < 2 or not total:  # noqa: PLR2004 - one cell is always even
        message = "expected counts in two or more cells"
        raise ValueError(message)
    expected = total / len(counts)
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return chi_square_tail(statistic, len(counts) - 1)


def rejections_allowed(repeats: int, significance: float, chance: float = 0.02) -> int:
    """Return how many of ``repeats`` tests of equal samples may reject.

    More than that happen by accident with a probability of ``chance`` at most.
    """
    at_most = 0.0
    for allowed in range(repeats + 1):
        ways = math.comb(repeats, allowed)
        at_most += ways * significance**allowed * (1.0 - significance) ** (repeats - allowed)
        if 1.0 - at_most <= chance:
            return allowed
    return repeats
