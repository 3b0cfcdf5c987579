"""One timer for all open exchanges: most end long before any of their deadlines."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Watched(Protocol):
    """What has deadlines of its own."""

    def look(self, now_s: float) -> None:
        """Act on a deadline that has passed."""
        ...

    def end_now(self) -> None:
        """End, as far as possible with a word to the client: the router ends."""
        ...


class Watch:
    """Looks at everything that is watched once per ``interval_s``: that late a deadline may be."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watched: Watched) -> None:
        """Look at it from now on."""
        self._watched.add(watched)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._look)

    def discard(self, watched: Watched) -> None:
        """Look at it no more."""
        self._watched.discard(watched)

    def end_all(self) -> None:
        """End everything that is watched: the router ends."""
        for watched in list(self._watched):
            watched.end_now()

    def _look(self) -> None:
        self._timer = None
        if self._watched:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._look)
            now_s = loop.time()
            for watched in list(self._watched):
                watched.look(now_s)

    def close(self) -> None:
        """Look no more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
