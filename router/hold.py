"""Requests that wait in the router, for a place or for their replica: ``policies.hold`` driven.

There is one queue. Where all places are taken (``router.admission``) everybody waits in it, and
whoever finds no place in time is shed; where there are places, a request may wait for its replica.

A request that shall wait is a future. Whatever frees a replica calls ``wake``; beside that every
``TICK_S`` is a wake-up, for what nobody calls about: other routers' leases, new replicas, time. The
wake-up takes the lease of each request that goes before it looks at the next, so that one freed
place is given once. With nothing waiting there is no timer, and ``wake`` is one comparison.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from policies.hold import NORMAL, Blocked, HoldEnd, HoldQueue
from policies.prefill import PrefillCost
from router.shed import DrainingError, InflightCapError, QueueFullError, QueueTimeoutError
from state.lease import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.hold import HoldSettings
    from policies.model import Decision
    from router.chooser import Choice, Routed
    from router.shed import ShedError

TICK_S: Final = 0.05
REST_S: Final = 0.002
"""Least time between two wake-ups."""
REST_SHARE: Final = 4.0
"""A wake-up that took long is followed by so many times as much rest: a fifth of a core at most."""


class Places(Protocol):
    """Whether there is a place for a request, among those that may be in flight."""

    pending: int
    queue_timeout_s: float

    def blocked(self, routed: Routed) -> Blocked | None:
        """Return what a request has to wait for; None where there is a place."""
        ...

    def awaited(self, routed: Routed) -> tuple[str, ...]:
        """Return all that it may have to wait for."""
        ...


class Held:
    """One waiting request: ``choice`` gets what was chosen, or why nothing can be."""

    __slots__ = ("choice", "choose", "end", "peek", "routed")

    def __init__(
        self,
        routed: Routed,
        peek: Callable[[], Decision | None],
        choose: Callable[[Decision | None], Choice],
    ) -> None:
        self.routed = routed
        self.peek = peek
        self.choose = choose
        self.choice: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        self.end = HoldEnd.LEFT

    def shed(self, error: ShedError) -> None:
        """Tell the request that it will not be served."""
        if not self.choice.done():
            self.end = HoldEnd.SHED
            self.choice.set_exception(error)


class Hold:
    """The queue of one router. ``note`` is told how each hold ended, and how long it was.

    Without ``places`` there is room for all, and requests wait for their replicas alone.
    """

    def __init__(
        self,
        settings: HoldSettings,
        *,
        clock: Callable[[], float],
        note: Callable[[HoldEnd, float], None],
        tenant_of: Callable[[Routed], str],
        cost: PrefillCost = PrefillCost(),  # noqa: B008 - a frozen value
        places: Places | None = None,
    ) -> None:
        place_wait_s = places.queue_timeout_s if places is not None else None
        self._queue: HoldQueue[Held] = HoldQueue(settings, place_wait_s)
        self._settings = settings
        self._clock = clock
        self._note = note
        self._tenant_of = tenant_of
        self._cost = cost
        self._places = places
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._rest_until_s = 0.0
        self._is_draining = False
        self.is_always_asked = settings.enabled
        """Whether a request may have to wait where there is a place for it."""

    def adopt(self, settings: HoldSettings, cost: PrefillCost) -> None:
        """Go by other settings from now on, and look again at who waits."""
        self._settings, self._cost = settings, cost
        self._queue.adopt(settings, self._places.queue_timeout_s if self._places else None)
        self.is_always_asked = settings.enabled
        self.wake()

    def __len__(self) -> int:
        return len(self._queue)

    async def choose(
        self,
        routed: Routed,
        peek: Callable[[], Decision | None],
        choose: Callable[[Decision | None], Choice],
        priority: int = NORMAL,
    ) -> tuple[Choice, float]:
        """Return what was chosen and how many seconds the request waited for it.

        ``peek`` takes nothing; ``choose`` takes the lease, on what was just peeked at or (None)
        deciding anew, and may raise what goes to the client. Raises ShedError.
        Whoever is cancelled meanwhile holds nothing.
        """
        blocked = self._blocked_behind_others(routed) or self._blocked(routed)
        if blocked is None and not self._may_hold(routed):
            return choose(None), 0.0
        tenant, queue = self._tenant_of(routed), self._queue
        if blocked is not None:
            self._make_room(priority, tenant)
        decision = peek()
        if blocked is None and (decision is None or decision.predicted_wait_ms is None):
            return choose(decision), 0.0
        cached_tokens = decision.predicted_cached_tokens if decision is not None else 0
        uncached_tokens = max(0, routed.prompt_tokens - cached_tokens)
        is_to_wait = blocked is not None or (decision is not None and queue.takes(decision))
        if blocked is None and (not is_to_wait or queue.is_full):
            queue.charge(tenant, uncached_tokens, priority)
            if is_to_wait:
                self._note(HoldEnd.BYPASSED, 0.0)
            return choose(decision), 0.0
        held, now_s = Held(routed, peek, choose), self._clock()
        queue.add(
            held,
            blocked or (decision.replica if decision is not None else ""),
            work_ms=self._cost.ms(uncached_tokens, cached_tokens),
            uncached_tokens=uncached_tokens,
            tenant=tenant,
            now_s=now_s,
            priority=priority,
        )
        self.wake()
        return await self._chosen(held, now_s)

    def wake(self) -> None:
        """Look at the waiting requests again, soon: something became free."""
        if self._queue:
            self._look_within(0.0)

    def drain(self) -> None:
        """Let all go that there is a place for, and hold nobody from now on."""
        self._is_draining = True
        self._queue.drain(self._send, lambda held: self._blocked(held.routed) is not None)

    def shed_all(self) -> None:
        """Give up on everybody who waits: the router ends."""
        for held in list(self._queue.candidates()):
            self._queue.remove(held)
            held.shed(DrainingError("the router ends"))

    def _may_hold(self, routed: Routed) -> bool:
        """Return whether a request that has a place may wait for its replica."""
        return self._settings.enabled and not self._is_draining and bool(routed.prompt.prompts)

    def _blocked(self, routed: Routed) -> Blocked | None:
        return None if self._places is None else self._places.blocked(routed)

    def _blocked_behind_others(self, routed: Routed) -> Blocked | None:
        """Return what others wait for that a newcomer must not take from them."""
        if self._places is None or not self._queue:
            return None
        awaited = self._places.awaited(routed)
        return next((Blocked(what) for what in awaited if self._queue.is_waited_for(what)), None)

    def gives_way(self, priority: int, tenant: str) -> bool:
        """Return whether one who waits would give way to such a newcomer, were there no room."""
        return self._queue.giving_way(priority, tenant) is not None

    def _make_room(self, priority: int, tenant: str) -> None:
        """Let who gives way go without being served, if nobody more may wait; or raise."""
        queue = self._queue
        if self._places is None or len(queue) < self._places.pending:
            return
        if not self._places.pending:
            message = "all places are taken, and requests do not wait here"
            raise InflightCapError(message)
        last = queue.giving_way(priority, tenant)
        error = QueueFullError(f"{len(queue)} requests wait for a place already")
        if last is None:
            raise error
        queue.remove(last)
        last.shed(error)

    async def _chosen(self, held: Held, since_s: float) -> tuple[Choice, float]:
        """Wait until the request has its choice; give that back if it cannot be used any more."""
        try:
            choice = await held.choice
        except asyncio.CancelledError:
            if not self._queue.remove(held):
                held.end = HoldEnd.LEFT
                _give_back(held.choice)
            self.wake()
            raise
        finally:
            held_s = self._clock() - since_s
            self._note(held.end, held_s)
        return choice, held_s

    def _look_within(self, delay_s: float) -> None:
        """Set the timer for the next wake-up, which a rest may put off."""
        now_s = self._clock()
        due_s = max(now_s + delay_s, self._rest_until_s)
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - now_s), self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._clock()
        self._queue.wake(now_s, self._peek, self._send, len(self._queue))
        ended_s = self._clock()
        self._rest_until_s = ended_s + max(REST_S, REST_SHARE * (ended_s - now_s))
        if self._queue:
            self._look_within(TICK_S)

    def _peek(self, held: Held) -> Decision | Blocked | None:
        """Return what would be chosen; a fault in there shows again when the choice is made."""
        if held.choice.done():
            return None  # cancelled, and about to leave
        try:
            blocked = self._blocked(held.routed)
            if blocked is not None or not self._may_hold(held.routed):
                return blocked
            return held.peek()
        except Exception:  # noqa: BLE001 - raised again to the request's own boundary, by ``choose``
            return None

    def _send(self, held: Held, end: HoldEnd) -> None:
        """Choose for ``held`` and wake it up; whatever goes wrong is its own to raise."""
        if held.choice.done():
            return
        held.end = end
        try:
            if end is HoldEnd.TIMED_OUT and self._blocked(held.routed) is not None:
                held.shed(QueueTimeoutError("no place became free in time"))
                return
            choice = held.choose(None)
        except Exception as error:  # noqa: BLE001 - passed on to the request's own boundary
            held.choice.set_exception(error)
        else:
            held.choice.set_result(choice)


def _give_back(chosen: asyncio.Future[Choice]) -> None:
    """Give back a choice that came in the same moment as the cancellation."""
    if chosen.cancelled() or not chosen.done() or chosen.exception() is not None:
        return
    chosen.result().finish(Outcome.CANCELLED, had_first_byte=False)
