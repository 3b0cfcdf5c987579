"""A deadline for what others do, which this process must not miss for them.

Where thousands of requests begin at once the loop may be late by more than a deadline, and timers
come before what sockets have: a connection that was made long ago would count as not made. So the
loop looks around some more times before anything is given up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

TURNS: Final = 8
"""Of the loop, after the deadline: a connection takes three from the socket's news on, more with
TLS. A loop that has nothing else to do makes them in no time."""


class Patience:
    """As ``asyncio.timeout``, but for ``TURNS``. One for each use."""

    __slots__ = ("_delay_s", "_limit", "_loop", "_timer", "_turns")

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._limit = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._turns = TURNS

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._delay_s, self._on_due)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _on_due(self) -> None:
        if self._turns:
            self._turns -= 1
            self._timer = self._loop.call_soon(self._on_due)
        else:
            self._limit.reschedule(self._loop.time())
