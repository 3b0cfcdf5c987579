"""Requests that wait in the router for their replica: ``policies.hold`` with timers and futures.

A request that shall wait is a future. Whatever frees a replica calls ``wake``; beside that every
``TICK_S`` is a wake-up, for what nobody calls about: other routers' leases, new replicas, time. The
wake-up takes the lease of each request that goes before it looks at the next, so that one freed
place is given once. With nothing waiting there is no timer, and ``wake`` is one comparison.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from policies.hold import HoldEnd, HoldQueue
from policies.prefill import PrefillCost
from state.lease import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.hold import HoldSettings
    from policies.model import Decision
    from router.chooser import Choice, Routed

TICK_S: Final = 0.05
REST_S: Final = 0.002
"""Least time between two wake-ups."""
REST_SHARE: Final = 4.0
"""A wake-up that took long is followed by so many times as much rest: a fifth of a core at most."""


class Held:
    """One waiting request: ``choice`` gets what was chosen, or why nothing can be."""

    __slots__ = ("choice", "choose", "end", "peek")

    def __init__(
        self, peek: Callable[[], Decision | None], choose: Callable[[Decision | None], Choice]
    ) -> None:
        self.peek = peek
        self.choose = choose
        self.choice: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        self.end = HoldEnd.LEFT


class Hold:
    """The queue of one router. ``note`` is told how each hold ended, and how long it was."""

    def __init__(
        self,
        settings: HoldSettings,
        *,
        clock: Callable[[], float],
        note: Callable[[HoldEnd, float], None],
        tenant_of: Callable[[Routed], str],
        cost: PrefillCost = PrefillCost(),  # noqa: B008 - a frozen value
    ) -> None:
        self._queue: HoldQueue[Held] = HoldQueue(settings)
        self._clock = clock
        self._note = note
        self._tenant_of = tenant_of
        self._cost = cost
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._rest_until_s = 0.0
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._queue)

    async def choose(
        self,
        routed: Routed,
        peek: Callable[[], Decision | None],
        choose: Callable[[Decision | None], Choice],
    ) -> tuple[Choice, float]:
        """Return what was chosen and how many seconds the request waited for it.

        ``peek`` takes nothing; ``choose`` takes the lease, on what was just peeked at or (None)
        deciding anew, and may raise what goes to the client.
        Whoever is cancelled meanwhile holds nothing.
        """
        if self._is_draining or not routed.prompt.prompts:
            return choose(None), 0.0
        decision = peek()
        if decision is None or decision.predicted_wait_ms is None:
            return choose(decision), 0.0
        cached_tokens = decision.predicted_cached_tokens
        uncached_tokens = max(0, routed.prompt_tokens - cached_tokens)
        tenant = self._tenant_of(routed)
        queue = self._queue
        is_to_wait = queue.takes(decision)
        if not is_to_wait or queue.is_full:
            queue.charge(tenant, uncached_tokens)
            if is_to_wait:
                self._note(HoldEnd.BYPASSED, 0.0)
            return choose(decision), 0.0
        held, now_s = Held(peek, choose), self._clock()
        queue.add(
            held,
            decision.replica,
            work_ms=self._cost.ms(uncached_tokens, cached_tokens),
            uncached_tokens=uncached_tokens,
            tenant=tenant,
            now_s=now_s,
        )
        self.wake()
        return await self._chosen(held, now_s)

    def wake(self) -> None:
        """Look at the waiting requests again, soon: something became free."""
        if self._queue:
            self._look_within(0.0)

    def drain(self) -> None:
        """Let all go where they are to go now, and hold nobody from now on."""
        self._is_draining = True
        self._queue.drain(_send)

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
        self._queue.wake(now_s, _peek, _send)
        ended_s = self._clock()
        self._rest_until_s = ended_s + max(REST_S, REST_SHARE * (ended_s - now_s))
        if self._queue:
            self._look_within(TICK_S)


def _peek(held: Held) -> Decision | None:
    """Return what would be chosen; a fault in there shows again when the choice is made."""
    if held.choice.done():
        return None  # cancelled, and about to leave
    try:
        return held.peek()
    except Exception:  # noqa: BLE001 - raised again to the request's own boundary, by ``choose``
        return None


def _send(held: Held, end: HoldEnd) -> None:
    """Choose for ``held`` and wake it up; whatever goes wrong is its own to raise."""
    if held.choice.done():
        return
    held.end = end
    try:
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
