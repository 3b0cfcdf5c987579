"""How fast each replica prefills, learned from when its first bytes came.

A replica at speed 2 needs half the time that the cost model says. Two things are learned: the speed
of the fleet, which every first byte tells, and what a replica differs by, which only its own do and
which counts little while they are few. So a cost model that is wrong for everybody makes no replica
look better than another, and a newcomer counts as the others do.

Each is a running median of the logarithm of (predicted / observed): an observation moves it by a
step in its direction, never by how far off it was, so that one stalled request teaches no more than
any other. Steps are large while little is known. Short waits say little about speed, and more about
the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from state.model import ReplicaId

SLOWEST: Final = 0.2
FASTEST: Final = 8.0
TELLING_MS: Final = 50.0
"""A prediction shorter than this teaches nothing."""
DOUBTED: Final = 8.0
"""After so many observations of a replica, half of what it seems to differ by is believed."""
_FIRST_STEP: Final = 0.25
_LAST_STEP: Final = 0.02
_LINEAR: Final = 0.2
"""Errors of the logarithm below this move the estimate in proportion."""
_LEAST: Final = math.log(SLOWEST)
_MOST: Final = math.log(FASTEST)


@dataclass(slots=True)
class _Median:
    """A running median, within the bounds of speeds."""

    value: float = 0.0
    count: int = 0

    def move(self, error: float) -> None:
        step = max(_LAST_STEP, _FIRST_STEP / (1 + self.count / 4))
        self.value += step * max(-1.0, min(1.0, error / _LINEAR))
        self.value = max(_LEAST, min(_MOST, self.value))
        self.count += 1


class Speeds:
    """The learned speed of every replica; 1 where nothing was learned of any."""

    __slots__ = ("_fleet", "_known", "_replicas")

    def __init__(self) -> None:
        self._fleet = _Median()
        self._replicas: dict[ReplicaId, _Median] = {}
        self._known: dict[ReplicaId, float] = {}

    def of(self, replica: ReplicaId) -> float:
        """Return the speed of ``replica``, between ``SLOWEST`` and ``FASTEST``."""
        speed = self._known.get(replica)
        if speed is None:
            speed = self._known[replica] = self._estimate(replica)
        return speed

    def observe(self, replica: ReplicaId, predicted_ms: float, observed_ms: float) -> None:
        """Learn from a first byte after ``observed_ms`` that was due after ``predicted_ms``.

        ``predicted_ms`` is at speed 1.
        """
        if predicted_ms < TELLING_MS or observed_ms <= 0.0:
            return
        seen = math.log(predicted_ms / observed_ms)
        own = self._replicas.get(replica)
        if own is None:
            own = self._replicas[replica] = _Median()
        self._fleet.move(seen - self._fleet.value)
        own.move(seen - self._fleet.value - own.value)
        self._known.clear()

    def forget(self, replica: ReplicaId) -> None:
        """Forget what was learned of ``replica`` alone."""
        self._replicas.pop(replica, None)
        self._known.clear()

    def _estimate(self, replica: ReplicaId) -> float:
        own = self._replicas.get(replica)
        value = self._fleet.value
        if own is not None:
            value += own.value * own.count / (own.count + DOUBTED)
        return math.exp(max(_LEAST, min(_MOST, value)))
