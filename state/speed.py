"""How fast each replica prefills, learned from when its first bytes came.

A replica at speed 2 needs half the time that the cost model says. The estimate is a running median
of the logarithm of (predicted / observed): each observation moves it by a step in its direction,
never by how far off it was, so that one stalled request teaches no more than any other. Steps are
large while little is known. Short waits say little about speed, and more about the network.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from state.model import ReplicaId

SLOWEST: Final = 0.2
FASTEST: Final = 8.0
TELLING_MS: Final = 50.0
"""A prediction shorter than this teaches nothing."""
_FIRST_STEP: Final = 0.25
_LAST_STEP: Final = 0.02
_LINEAR: Final = 0.2
"""Errors of the logarithm below this move the estimate in proportion."""


class Speeds:
    """The learned speed of every replica; 1 where nothing was learned."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[ReplicaId, tuple[float, float, int]] = {}

    def of(self, replica: ReplicaId) -> float:
        """Return the speed of ``replica``, between ``SLOWEST`` and ``FASTEST``."""
        known = self._known.get(replica)
        return known[0] if known is not None else 1.0

    def observe(self, replica: ReplicaId, predicted_ms: float, observed_ms: float) -> None:
        """Learn from a first byte after ``observed_ms`` that was due after ``predicted_ms``.

        ``predicted_ms`` is at speed 1.
        """
        if predicted_ms < TELLING_MS or observed_ms <= 0.0:
            return
        _, log_speed, count = self._known.get(replica, (1.0, 0.0, 0))
        error = math.log(predicted_ms / observed_ms) - log_speed
        step = max(_LAST_STEP, _FIRST_STEP / (1 + count / 4))
        log_speed += step * max(-1.0, min(1.0, error / _LINEAR))
        log_speed = max(math.log(SLOWEST), min(math.log(FASTEST), log_speed))
        self._known[replica] = (math.exp(log_speed), log_speed, count + 1)

    def forget(self, replica: ReplicaId) -> None:
        """Forget what was learned of ``replica``."""
        self._known.pop(replica, None)
