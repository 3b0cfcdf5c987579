"""Counts that cost one dict update or one bisection each, in Prometheus form when scraped.

For one thread, as the router's event loop is: a counter of ``prometheus_client`` takes a lock and
looks its labels up again each time, some 1 us.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import Metric


class Tally:
    """A counter by label values; without ``labels`` it exists from the start."""

    __slots__ = ("_labels", "_name", "_text", "_values")

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._values[()] = 0.0

    def add(self, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """Count ``amount`` more under these label values."""
        self._values[labels] += amount

    def metric(self) -> Metric:
        """Return what is counted so far."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Spread:
    """A histogram; ``bounds`` are the upper ends of its buckets, ascending.

    Each bucket keeps the last value that came with a trace, as its exemplar.
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(
        self, value: float, trace_id: str | None = None, unix_s: float | None = None
    ) -> None:
        """Count one value, of ``trace_id`` at ``unix_s``; one that equals a bound is within it."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if trace_id is not None:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, unix_s)

    def metric(self) -> Metric:
        """Return what is counted so far."""
        ends = [*map(str, self._bounds), "+Inf"]
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for bucket, (end, count) in enumerate(zip(ends, accumulate(self._counts), strict=True)):
            exemplar = self._exemplars.get(bucket)
            buckets.append((end, count) if exemplar is None else (end, count, exemplar))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return family
