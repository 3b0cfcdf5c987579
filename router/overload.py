"""When the router process itself is short of memory or time: a ladder of what it stops doing.

From ``shed_low`` on requests of low priority are refused (429), from ``close`` on every answer
ends its connection, and with it what is kept for it, from ``refuse`` on all requests are refused
(503). A rung is taken at once and left ``recover_s`` after its cause fell below ``EASED`` of its
threshold: otherwise what it frees would bring back what it refuses.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from router.memory import group_limit_bytes, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.admission_setting import LagSteps, MemorySteps, OverloadSettings

_log = logging.getLogger(__name__)

TICK_S: Final = 0.1
EASED: Final = 0.95
"""A cause is over below so much of its threshold."""
LAGS: Final = 5
"""Looks that all have to show a lag: one long pause is none."""


class LoadRung(enum.IntEnum):
    """How much the router has stopped doing; each includes those before it."""

    NORMAL = 0
    SHED_LOW = 1
    CLOSE = 2
    REFUSE = 3


def rung_at(value: float, steps: MemorySteps | LagSteps, factor: float = 1.0) -> LoadRung:
    """Return the highest rung whose threshold, times ``factor``, ``value`` reaches."""
    reached = LoadRung.NORMAL
    for rung, threshold in (
        (LoadRung.SHED_LOW, steps.shed_low),
        (LoadRung.CLOSE, steps.close),
        (LoadRung.REFUSE, steps.refuse),
    ):
        if threshold is not None and value >= factor * threshold:
            reached = rung
    return reached


class OverloadLadder:
    """The rung as a function of what was observed; no clock of its own."""

    def __init__(self, settings: OverloadSettings) -> None:
        self._settings = settings
        self._lags_s: deque[float] = deque(maxlen=LAGS)
        self._held_s = 0.0
        self.rung = LoadRung.NORMAL

    def adopt(self, settings: OverloadSettings) -> None:
        """Go by other thresholds from the next look on."""
        self._settings = settings

    def observe(self, memory_share: float | None, lag_s: float, now_s: float) -> LoadRung:
        """Take one look into account; ``memory_share`` is None where memory has no limit."""
        self._lags_s.append(lag_s)
        sustained_s = min(self._lags_s) if len(self._lags_s) == LAGS else 0.0
        reached = self._rung(memory_share, sustained_s, 1.0)
        kept = min(self.rung, self._rung(memory_share, sustained_s, EASED))
        if max(reached, kept) >= self.rung or now_s - self._held_s >= self._settings.recover_s:
            self._held_s = now_s
            self.rung = max(reached, kept)
        return self.rung

    def _rung(self, memory_share: float | None, lag_s: float, factor: float) -> LoadRung:
        of_lag = rung_at(lag_s, self._settings.lag_s, factor)
        if memory_share is None:
            return of_lag
        return max(of_lag, rung_at(memory_share, self._settings.memory, factor))


class Overload:
    """Looks at the process every ``TICK_S``; ``rung`` is what requests look at."""

    def __init__(
        self,
        settings: OverloadSettings,
        *,
        clock: Callable[[], float],
        lag_s: Callable[[], float],
        memory_bytes: Callable[[], int | None] = resident_bytes,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._ladder = OverloadLadder(settings)
        self._clock = clock
        self._lag_s = lag_s
        self._memory_bytes = memory_bytes
        self._tick = tick
        self.limit_bytes = settings.memory_bytes or group_limit_bytes()
        self.used_bytes = memory_bytes()
        self.rung = LoadRung.NORMAL
        self.entered: Counter[LoadRung] = Counter()

    def adopt(self, settings: OverloadSettings) -> None:
        """Go by other thresholds from the next look on; the memory limit stays."""
        self._ladder.adopt(settings)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.look()
            if self._tick is not None:
                self._tick()

    def look(self) -> None:
        """Look once; a change of the rung is one line of the log."""
        lag_s, used_bytes = self._lag_s(), self._memory_bytes()
        self.used_bytes = used_bytes
        share = None
        if used_bytes is not None and self.limit_bytes is not None:
            share = used_bytes / self.limit_bytes
        before, self.rung = self.rung, self._ladder.observe(share, lag_s, self._clock())
        if self.rung is not before:
            self.entered[self.rung] += 1
            level = logging.WARNING if self.rung > before else logging.INFO
            memory = "unknown" if share is None else f"{share:.0%} of its limit"
            text = "rung %s after %s: memory %s, event loop %.0f ms late"
            _log.log(level, text, self.rung.name.lower(), before.name.lower(), memory, 1e3 * lag_s)
