"""One timer for all open exchanges: most end long before any of their deadlines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.endpoint import Endpoint


class Watched(Protocol):
    """What has deadlines of its own.

    ``heard_s`` is when its replica sent something last, in the loop's time; 0 before.
    """

    @property
    def endpoint(self) -> Endpoint | None:
        """Where its replica is."""
        ...

    @property
    def heard_s(self) -> float:  # noqa: D102
        ...

    def lose(self) -> None:
        """End it: its replica is lost."""
        ...

    def look(self, now_s: float) -> None:
        """Act on a deadline that has passed."""
        ...

    def lighten(self, now_s: float) -> bool:
        """Let go of what it needs no more; return False where it is to be asked again."""
        ...

    def end_now(self) -> None:
        """End, as far as possible with a word to the client: the router ends."""
        ...


SLICE_S = 0.001
"""So long it looks at a time: with ten thousand streams the loop has others to serve between."""
SLICE_LEAST = 16
LIGHTEN_S = 0.5
"""How often those that still have what they may let go of are asked to."""


class _Rounds:
    """Hands each of its members to ``look``, once per ``interval_s``, a few of them at a time."""

    __slots__ = ("_interval_s", "_left", "_look", "_timer", "members")

    def __init__(self, interval_s: float, look: Callable[[Watched, float], None]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._left: list[Watched] = []
        """Those that are still to be looked at in this round."""
        self.members: set[Watched] = set()

    def add(self, watched: Watched) -> None:
        """Look at it from now on."""
        self.members.add(watched)
        if self._timer is None and not self._left:
            self._rest()

    def close(self) -> None:
        """Look no more."""
        self.members.clear()
        self._left.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._left = list(self.members)
        self._go_on()

    def _go_on(self) -> None:
        """Look at those that are left, for a while; the others follow in the next turn."""
        loop, left = asyncio.get_running_loop(), self._left
        now_s = began_s = loop.time()
        try:
            while left and now_s - began_s <= SLICE_S:
                some = left[-SLICE_LEAST:]
                del left[-SLICE_LEAST:]
                for watched in some:
                    if watched in self.members:
                        self._look(watched, now_s)
                now_s = loop.time()
        finally:
            if left:
                loop.call_soon(self._go_on)
            elif self.members and self._timer is None:
                self._rest()


class Watch:
    """Looks at everything that is watched once per ``interval_s``: that late a deadline may be."""

    def __init__(self, interval_s: float) -> None:
        self._all = _Rounds(interval_s, lambda watched, now_s: watched.look(now_s))
        self._heavy = _Rounds(LIGHTEN_S, self._lighten)

    def add(self, watched: Watched) -> None:
        """Look at it from now on."""
        self._all.add(watched)
        self._heavy.add(watched)

    def discard(self, watched: Watched) -> None:
        """Look at it no more."""
        self._all.members.discard(watched)
        self._heavy.members.discard(watched)

    def on(self, endpoint: Endpoint) -> list[Watched]:
        """Return what waits for the replica at ``endpoint``."""
        return [watched for watched in self._all.members if watched.endpoint == endpoint]

    def end_all(self) -> None:
        """End everything that is watched: the router ends."""
        for watched in list(self._all.members):
            watched.end_now()

    def _lighten(self, watched: Watched, now_s: float) -> None:
        if watched.lighten(now_s):
            self._heavy.members.discard(watched)

    def close(self) -> None:
        """Look no more."""
        self._all.close()
        self._heavy.close()
