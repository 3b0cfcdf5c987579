"""How many requests a replica may have in flight, learned from its times to first token.

An engine that has room starts a prompt at once; one that has none lets it wait, and the first token
comes later by just that. So the sign of too many is the ratio of a time to first token to that of
the same work on the idle replica. Work is the uncached prefill, in ms at speed 1: prompts of 100
and of 100,000 tokens are each compared with their like, and a burst of either is no sign.

The limit follows the gradient, as in Netflix' concurrency-limits: ``limit * tolerance / ratio`` and
room for ``sqrt(limit)`` more, while at least half of it is used. Both terms balance where first
tokens take a little over ``tolerance`` times as long as idle ones. Medians over groups of samples
stand against single prompts that were cached against all prediction, or not cached.

No clock, no enforcement: whoever enforces a limit says how each request began and ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Final

GROUP: Final = 8
"""Samples of like work of which one idle time is made."""
WINDOW: Final = 10
"""Samples between two changes of a limit."""
WINDOW_S: Final = 0.25
"""And the least time between two."""
RATIOS_KEPT: Final = 64
SMOOTHING: Final = 0.3
LEAST_GRADIENT: Final = 0.5
LOWEST: Final = 4
"""Where ``LEAST_GRADIENT`` and the square root balance: no sign is bad enough for less."""
DROP_FACTOR: Final = 0.9
RAISE: Final = 0.05
"""How far one sample of a replica that should be idle lifts what idle times are believed to be."""
RAISE_MOST: Final = 2.0
_LEAST_MS: Final = 1.0


@dataclass(slots=True)
class _Group:
    """Samples of one octave of work, and the best median so far at scale 1."""

    works_ms: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    work_ms: float = 0.0
    idle_ms: float | None = None


class IdleTimes:
    """What a time to first token is where nothing waits, by work.

    It does not shrink with the work, and does not grow faster than the work: so an octave that was
    seen bounds those that were not, and those first seen under load.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._scale = 1.0

    def expected_ms(self, work_ms: float) -> float | None:
        """Return the least that is known of; None where nothing is."""
        work_ms = max(_LEAST_MS, work_ms)
        bounds = [
            group.idle_ms * max(1.0, work_ms / group.work_ms)
            for group in self._groups.values()
            if group.idle_ms is not None
        ]
        return min(bounds) * self._scale if bounds else None

    def add(self, work_ms: float, ttft_ms: float) -> None:
        """Note one time to first token."""
        work_ms = max(_LEAST_MS, work_ms)
        group = self._groups.setdefault(int(math.log2(work_ms)), _Group())
        group.works_ms.append(work_ms)
        group.times_ms.append(max(_LEAST_MS, ttft_ms) / self._scale)
        if len(group.times_ms) < GROUP:
            return
        idle_ms = median(group.times_ms)
        if group.idle_ms is None or idle_ms < group.idle_ms:
            group.idle_ms, group.work_ms = idle_ms, median(group.works_ms)
        group.works_ms.clear()
        group.times_ms.clear()

    def lift(self, ratio: float) -> None:
        """Believe a little that an idle replica takes ``ratio`` times as long as it did."""
        self._scale *= 1.0 + RAISE * (min(ratio, RAISE_MOST) - 1.0)


class LearnedLimit:
    """The limit of one replica, in requests."""

    def __init__(
        self, *, initial: int, minimum: int, maximum: int | None, tolerance: float
    ) -> None:
        self._minimum = float(minimum)
        self._maximum = math.inf if maximum is None else float(max(maximum, minimum))
        self._tolerance = tolerance
        self._limit = min(self._maximum, max(self._minimum, float(initial)))
        self._idle = IdleTimes()
        self._ratios: list[float] = []
        self._most_inflight = 0
        self._changed_s = -math.inf
        self._dropped_s = -math.inf
        self.ratio: float | None = None
        """Of the last window; None until there was one."""

    @property
    def requests(self) -> int:
        """How many may be in flight."""
        return int(self._limit)

    def succeed(self, work_ms: float, ttft_ms: float, inflight: int, now_s: float) -> None:
        """Note a first token; ``inflight`` counts the requests there when it was sent, with it."""
        expected_ms = self._idle.expected_ms(work_ms)
        self._idle.add(work_ms, ttft_ms)
        if expected_ms is None:
            return
        ratio = ttft_ms / expected_ms
        if ratio > 1.0 and (inflight <= 1 or self.requests <= max(LOWEST, self._minimum)):
            self._idle.lift(ratio)
        self._ratios.append(ratio)
        self._most_inflight = max(self._most_inflight, inflight)
        is_whole = len(self._ratios) >= WINDOW and now_s - self._changed_s >= WINDOW_S
        if is_whole or len(self._ratios) >= RATIOS_KEPT:
            self._change(now_s)

    def drop(self, now_s: float) -> None:
        """Note a request that the replica had no room for, and said so."""
        if now_s - self._dropped_s >= WINDOW_S:
            self._dropped_s = now_s
            self._limit = max(self._minimum, self._limit * DROP_FACTOR)

    def _change(self, now_s: float) -> None:
        ratio = self.ratio = median(self._ratios)
        most_inflight, limit = self._most_inflight, self._limit
        self._ratios.clear()
        self._most_inflight = 0
        self._changed_s = now_s
        if 2 * most_inflight < limit:  # what was not used says nothing
            return
        gradient = min(1.0, max(LEAST_GRADIENT, self._tolerance / ratio))
        wanted = gradient * limit + math.sqrt(limit)
        limit += SMOOTHING * (wanted - limit)
        self._limit = min(self._maximum, max(self._minimum, limit))
