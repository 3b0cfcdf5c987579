"""One request on two replicas at a time: who answers first is passed on, the other is ended.

Until the first byte of a body has come nothing goes to the client, not even a head: engines send
that when they take a request, long before they compute. So nothing has to be taken back, and a
client never sees bytes of two replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.error import ReplicaBusyError, ReplicaError
from router.exchange import BUSY_STATUSES, Exchange

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from router.relay import RelayRequest
    from router.reply_head import ReplyHead
    from router.request import Request
    from router.upstream import UpstreamPool

SERVER_ERROR: Final = 500


class Lane:
    """One attempt in a race. ``task`` runs it."""

    __slots__ = ("_race", "is_hedge", "task")

    def __init__(self, race: Race, *, is_hedge: bool) -> None:
        self._race = race
        self.is_hedge = is_hedge
        self.task: asyncio.Task[object] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another attempt answers the client."""
        return self._race.winner not in {None, self}

    def has_rival(self) -> bool:
        """Return whether another attempt may still answer."""
        rivals = (lane.task for lane in self._race.lanes if lane is not self)
        return any(task is not None and not task.done() for task in rivals)

    def win(self) -> bool:
        """Return whether this attempt may answer; if so the others are ended, once."""
        race = self._race
        if race.winner is None:
            race.winner = self
            for lane in race.lanes:
                if lane is not self and lane.task is not None:
                    lane.task.cancel()
        return race.winner is self


class Race:
    """The attempts of one request that run at the same time."""

    __slots__ = ("lanes", "winner")

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.winner: Lane | None = None

    def enter(self, *, is_hedge: bool) -> Lane:
        """Return a new attempt's place."""
        lane = Lane(self, is_hedge=is_hedge)
        self.lanes.append(lane)
        return lane


class RacingExchange(Exchange):
    """Commits with the first byte of the body, and only where no other attempt has."""

    __slots__ = ("_held", "_lane")

    def __init__(
        self,
        request: Request,
        outbound: RelayRequest,
        pool: UpstreamPool,
        on_first_byte: Callable[[], None],
        lane: Lane,
    ) -> None:
        super().__init__(request, outbound, pool, on_first_byte)
        self._lane = lane
        self._held: ReplyHead | None = None

    def on_reply(self, head: ReplyHead, data: bytes) -> None:
        """Hold the head back until there is a byte of the body; a failure gives way to a rival."""
        self.heard_s = self._loop.time()
        if (head.status in BUSY_STATUSES or head.status >= SERVER_ERROR) and self._lane.has_rival():
            if head.status in BUSY_STATUSES:
                self._refuse(ReplicaBusyError(head.status, None))
            else:
                self._refuse(ReplicaError(f"the replica answered {head.status}"))
        elif data or head.framing == "none" or self._is_raised(head):
            self._go(head, data)
        else:
            self._held = head

    def _go(self, head: ReplyHead, data: bytes) -> None:
        self._held = None
        if self._is_raised(head) or self._lane.win():
            super().on_reply(head, data)

    def on_body(self, data: bytes) -> None:
        """Pass on body bytes, the head first."""
        if self._held is not None:
            self._go(self._held, data)
        else:
            super().on_body(data)

    def on_chunk(self, chunk: bytes, content: bytes) -> None:
        """Pass on one chunk, the head first."""
        if self._held is not None:
            self._go(self._held, content)
        elif self.hand is not None:
            super().on_chunk(chunk, content)

    def on_end(self) -> None:
        """End the response, of which there may be nothing but the head."""
        if self._held is not None:
            self._go(self._held, b"")
        if not self._lane.is_lost:
            super().on_end()
