"""A clock that stands still when the machine does.

A busy machine makes a test late by seconds. A bound of time on what the product took, and what the
product itself concludes from an age, must not depend on that where it runs in the test's process.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

BEAT_S: Final = 0.005
MOST_S: Final = 0.02
"""Of the time between two beats so much counts."""


class RunningClock:
    """``async with RunningClock() as clock``: ``clock()`` are seconds in which the loop ran."""

    def __init__(self) -> None:
        self._now_s = 1_000.0

    def __call__(self) -> float:
        return self._now_s

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def _beat(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            self._now_s += min(now_s - last_s, MOST_S)
            last_s = now_s
