"""When a request that waits for its first byte is sent to a second replica as well.

Only where a second computation does no harm, only before a byte of an answer came, to another
replica that has no more to do than the first one, and never where the router or the fleet is short
of anything. The first to answer is passed on; the other one's connection is closed, which makes an
engine stop. Its lease is given back by the block that took it, like any other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.availability import Standing
from router.error import ReplicaError
from router.race import Race
from router.rank import mates
from router.relay import LeftAfterEndError
from router.server import LOAD_PATHS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

    from router.account import Call
    from router.attempt import Attempts
    from router.chooser import Choice
    from router.fleet import Member
    from router.hedge_setting import HedgeSettings
    from router.proxy import ProxyParts
    from router.race import Lane
    from router.request import Request
    from router.wire import ClientStream
    from state.model import ReplicaId

SAMPLES: Final = 512
"""So many of the last times to the first byte count."""
LEAST_SAMPLES: Final = 50
STREAMS: Final = "streams"
BALANCE_MOST: Final = 20.0
HEDGE_ENDS: Final = ("won", "lost", "failed", "left")
HEDGE_DENIALS: Final = ("budget", "overload", "no_replica")


class Delays:
    """How long first bytes took, streams together and other paths each on their own."""

    def __init__(self, settings: HedgeSettings) -> None:
        self._settings = settings
        self._samples: dict[str, deque[float]] = {}

    def note(self, kind: str, ttft_s: float) -> None:
        """Count one first byte."""
        self._samples.setdefault(kind, deque(maxlen=SAMPLES)).append(ttft_s)

    def delay_s(self, kind: str) -> float | None:
        """Return how long to wait; None while too little is known."""
        settings = self._settings
        if settings.delay_s is not None:
            return settings.delay_s
        samples = self._samples.get(kind, ())
        if len(samples) < LEAST_SAMPLES:
            return None
        ordered = sorted(samples)
        at = min(len(ordered) - 1, int(len(ordered) * settings.percentile / 100.0))
        return max(settings.least_s, ordered[at])


class Hedging(Collector):
    """Runs first attempts. ``is_pressed``: the router has stopped doing something."""

    def __init__(
        self,
        parts: ProxyParts,
        attempts: Attempts,
        inflight: Callable[[ReplicaId], int],
        is_pressed: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._attempts = attempts
        self._inflight = inflight
        self._is_pressed = is_pressed
        self._settings = parts.config.hedge
        self._delays = Delays(self._settings)
        self._balance = 1.0
        self.ends: Counter[str] = Counter()
        self.denied: Counter[str] = Counter()

    def covers(self, call: Call) -> bool:
        """Return whether a request may be hedged at all: its first attempt, if repeatable."""
        return call.is_repeatable and not call.attempts and _kind_of(call) is not None

    async def run(
        self, request: Request, call: Call, choice: Choice, tried: set[ReplicaId]
    ) -> ClientStream:
        """Return the answer of whoever was first; raises the last ReplicaError where all failed.

        The winner's choice, or else the last one that failed, is the last of ``call.choices``.
        """
        race, kind = Race(), _kind_of(call) or STREAMS
        self._balance = min(BALANCE_MOST, self._balance + self._settings.share)
        try:
            self._start(race, request, call, choice)
            delay_s = self._delays.delay_s(kind)
            if delay_s is not None and await self._is_late(race, delay_s):
                await self._hedge(race, request, call, choice, tried)
            answer = await self._first(race, call)
        except asyncio.CancelledError:
            if len(race.lanes) > 1 and race.winner is None:
                self.ends["left"] += 1
            await _end(race)
            if call.relayed is not None and call.outcome == "done":
                raise LeftAfterEndError(call.relayed) from None
            raise
        if call.ttft_s is not None:
            self._delays.note(kind, call.ttft_s)
        return answer

    def _start(
        self, race: Race, request: Request, call: Call, choice: Choice, *, is_hedge: bool = False
    ) -> None:
        lane = race.enter(is_hedge=is_hedge)
        lane.task = asyncio.create_task(
            self._attempts.run(request, call, choice, lane), name="attempt"
        )

    @staticmethod
    async def _is_late(race: Race, delay_s: float) -> bool:
        """Return whether the first attempt has neither ended nor begun to answer by then."""
        tasks = [lane.task for lane in race.lanes if lane.task is not None]
        done, _ = await asyncio.wait(tasks, timeout=delay_s)
        return not done and race.winner is None

    async def _hedge(
        self, race: Race, request: Request, call: Call, first: Choice, tried: set[ReplicaId]
    ) -> None:
        """Begin a second attempt, if there may be one."""
        parts, routed = self._parts, call.routed
        if routed is None:
            return
        members = parts.fleet.members().values()
        known = set(mates(members, first.member))
        candidates = self._candidates(routed.prompt.model or None, known, first)
        if parts.lookup is not None and candidates:
            await parts.lookup.prepare(parts.chooser.questions(routed, candidates))
            if race.winner is not None:
                return
        denial = self._denial(candidates)
        second = None if denial else parts.chooser.choose(routed, candidates)
        if second is None:
            self.denied[denial or "no_replica"] += 1
            return
        self._balance -= 1.0
        second.probe = parts.availability.enter(second.member.replica)
        tried |= known
        call.was_sent = True
        self._start(race, request, call, second, is_hedge=True)

    def _candidates(self, model: str | None, known: set[ReplicaId], first: Choice) -> list[Member]:
        """Return the healthy replicas with a place that have no more to do than the first one."""
        parts, most = self._parts, self._inflight(first.member.replica)
        found = [
            member
            for member in parts.availability.candidates(model, known)
            if self._inflight(member.replica) < most
            and parts.availability.standing(member.replica).standing is Standing.UP
        ]
        return found if parts.admission is None else parts.admission.with_place(found)

    def _denial(self, candidates: list[Member]) -> str | None:
        parts = self._parts
        is_short = bool(parts.availability.short_models) or bool(parts.hold and len(parts.hold))
        if is_short or self._is_pressed():
            return "overload"
        if not candidates:
            return "no_replica"
        return "budget" if self._balance < 1.0 else None

    async def _first(self, race: Race, call: Call) -> ClientStream:
        """Return the first answer; attempts that fail before it are accounted here."""
        open_lanes = list(race.lanes)
        while True:
            tasks = [lane.task for lane in open_lanes if lane.task is not None]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for lane in [each for each in open_lanes if each.task is not None and each.task.done()]:
                open_lanes.remove(lane)
                error = _error_of(lane)
                if error is None and not lane.is_lost:
                    await _end(race)
                    self._count(race, lane)
                    _put_last(call, is_hedge=lane.is_hedge)
                    return _answer_of(lane)
                if error is not None and not open_lanes:
                    self._count(race, None)
                    _put_last(call, is_hedge=lane.is_hedge)
                    raise error
                if isinstance(error, ReplicaError):
                    at = next(
                        i for i, each in enumerate(call.attempts) if each.is_hedge is lane.is_hedge
                    )
                    await self._parts.recovery.lost(error, call, call.choices[at].member)
                elif error is not None:
                    await _end(race)
                    raise error

    def _count(self, race: Race, winner: Lane | None) -> None:
        if len(race.lanes) > 1:
            self.ends["failed" if winner is None else "won" if winner.is_hedge else "lost"] += 1

    def collect(self) -> Iterable[Metric]:
        """Yield how second attempts ended, and why there were none."""
        for name, text, label, values, counts in (
            (
                "hedges",
                "Requests sent to two replicas, by how the second one ended.",
                "end",
                HEDGE_ENDS,
                self.ends,
            ),
            (
                "hedges_denied",
                "Requests that waited for long and were not, by why.",
                "reason",
                HEDGE_DENIALS,
                self.denied,
            ),
        ):
            family = CounterMetricFamily(f"warmroute_{name}", text, labels=[label])
            for value in values:
                family.add_metric([value], float(counts[value]))
            yield family


def _kind_of(call: Call) -> str | None:
    """Return whose first bytes a request's is compared with; None where it says nothing.

    The first byte of an answer that is not streamed comes with its last.
    """
    if call.path in LOAD_PATHS:
        return call.path
    return STREAMS if call.routed is not None and call.routed.prompt.is_stream else None


def _error_of(lane: Lane) -> BaseException | None:
    task = lane.task
    if task is None or task.cancelled():
        return asyncio.CancelledError() if task is not None and not lane.is_lost else None
    return task.exception()


def _answer_of(lane: Lane) -> ClientStream:
    if lane.task is None:
        raise asyncio.CancelledError
    answer: ClientStream = lane.task.result()  # type: ignore[assignment]
    return answer


def _put_last(call: Call, *, is_hedge: bool) -> None:
    """Let the attempt that counts be the last one, as it is where they follow each other."""
    pairs = list(zip(call.attempts, call.choices, strict=True))
    pairs.sort(key=lambda pair: pair[0].is_hedge is is_hedge)
    call.attempts[:] = [attempt for attempt, _ in pairs]
    call.choices[:] = [choice for _, choice in pairs]


async def _end(race: Race) -> None:
    """End what still runs, and wait until it has given everything back."""
    tasks = [lane.task for lane in race.lanes if lane.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
