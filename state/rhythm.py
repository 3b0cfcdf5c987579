"""The rhythm of background loops: when the next round begins, and who waits for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


def check_cancelled() -> None:
    """Raise the cancellation of the current task that a library swallowed on its way.

    ``asyncio.wait_for`` of CPython 3.11 does, when what it waits for ends in the same moment; the
    store's client uses it. A loop that never ends has to ask, or who cancels it waits for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Backoff:
    """Full-jitter delays that double up to a cap until ``reset``."""

    __slots__ = ("_base_s", "_cap_s", "_failures", "_rng")

    def __init__(self, base_s: float, cap_s: float, rng: Random) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng
        self._failures = 0

    def next_s(self) -> float:
        """Return the delay after one more failure."""
        ceiling_s = min(self._cap_s, self._base_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return self._rng.uniform(0.0, ceiling_s)

    def reset(self) -> None:
        """Start from the base again."""
        self._failures = 0


class Signal:
    """Wakes all who wait at the moment; they look for themselves whether it concerns them."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def send(self) -> None:
        """Wake everyone who waits."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until ``is_true`` holds; it is looked at once per signal."""
        while not is_true():
            await self._event.wait()


class Beat:
    """One loop's rounds: rest between them, cut a rest short, wait for a full round."""

    __slots__ = ("_ended", "_ended_rounds", "_rounds", "_wake")

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._ended = Signal()
        self._rounds = 0
        self._ended_rounds = 0

    def begin(self) -> None:
        """Note that a round begins; one that fails simply never ends."""
        self._rounds += 1

    def end(self) -> None:
        """Note that the round that began last succeeded."""
        self._ended_rounds = self._rounds
        self._ended.send()

    def nudge(self) -> None:
        """Let the next round begin at once."""
        self._wake.set()

    async def rest(self, interval_s: float) -> None:
        """Wait for the interval or a nudge."""
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):  # wait_for may swallow a cancellation
                await self._wake.wait()
        self._wake.clear()

    async def full_round(self) -> None:
        """Wait until a round that began after this call has succeeded."""
        wanted = self._rounds + 1
        self.nudge()
        await self._ended.until(lambda: self._ended_rounds >= wanted)
