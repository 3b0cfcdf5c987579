"""A mean that grows by one value at a time, and how sure it is: Student's t over batch means.

Requests that follow each other are alike, so that single values would claim too much. Means of
batches hardly depend on each other (Law, Simulation Modeling and Analysis, 9.5.3).
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

BATCH: Final = 32
MIN_BATCHES: Final = 10
_Z: Final = 1.959963984540054
"""Standard normal, 97.5 %."""


class Mean(Struct, frozen=True, kw_only=True):
    """A mean over ``count`` values, and its 95 % interval; ends are None with too few batches."""

    count: int
    mean: float | None
    low: float | None = None
    high: float | None = None


class RunningMean:
    """Adds up values in the order they come."""

    __slots__ = ("_batch_count", "_batch_sum", "_batches", "_count", "_mean", "_squares", "_sum")

    def __init__(self) -> None:
        self._count = self._batch_count = self._batches = 0
        self._sum = self._batch_sum = 0.0
        self._mean = self._squares = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self._count += 1
        self._sum += value
        self._batch_count += 1
        self._batch_sum += value
        if self._batch_count == BATCH:
            mean = self._batch_sum / BATCH
            self._batch_count, self._batch_sum = 0, 0.0
            self._batches += 1
            apart = mean - self._mean
            self._mean += apart / self._batches
            self._squares += apart * (mean - self._mean)

    def told(self) -> Mean:
        """Return the mean of all values, and the interval of whole batches around it."""
        if not self._count:
            return Mean(count=0, mean=None)
        mean = self._sum / self._count
        if self._batches < MIN_BATCHES:
            return Mean(count=self._count, mean=mean)
        freedom = self._batches - 1
        half = student_975(freedom) * math.sqrt(self._squares / freedom / self._batches)
        return Mean(count=self._count, mean=mean, low=mean - half, high=mean + half)


def student_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5); 9 at least."""
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / freedom + second / freedom**2 + third / freedom**3
