"""How few of many stand for how much: the Gini coefficient and the share of the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def gini(amounts: Iterable[float]) -> float | None:
    """Return the Gini coefficient: the mean absolute difference over twice the mean.

    With x ascending and i from 1, it is sum((2i - n - 1) * x_i) / (n * sum(x)); None when all is 0.
    """
    ordered = sorted(amounts)
    total = sum(ordered)
    if total <= 0:
        return None
    count = len(ordered)
    weighted = sum((2 * i - count - 1) * x for i, x in enumerate(ordered, start=1))
    return weighted / (count * total)


def top_share(amounts: Iterable[float], groups: int) -> float | None:
    """Return the share of the largest ``groups``; None when all is 0."""
    ordered = sorted(amounts, reverse=True)
    total = sum(ordered)
    return sum(ordered[:groups]) / total if total > 0 else None
