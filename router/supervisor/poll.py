"""What the supervisor hears from its processes: asked every second, and when somebody looks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from router.live import Live
from router.snapshot import Snapshot
from router.supervisor.ask import TIMEOUT_S, AskError, fetch
from router.supervisor.census import read
from router.supervisor.pulse import ARRIVED, METRICS_PATH, PULSE_PATH, WATCHED, read_pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from router.history import History
    from router.supervisor.ask import Answer
    from router.supervisor.census import Census
    from router.supervisor.child import Child
    from router.supervisor.glance import Glance
    from router.trace import DecisionRecord

_log = logging.getLogger(__name__)

PULSE_S: Final = 1.0
WATCHED_S: Final = 0.5
"""The same while somebody looks at the dashboard."""
COUNT_S: Final = 2.0
"""A process that is killed takes along what it counted in this time at most."""
COUNT_TIMEOUT_S: Final = 4.0
"""Less than Prometheus waits: a process that hangs is told as it was last."""
FRESH_S: Final = 0.5
SNAPSHOT_PATH: Final = "/admin/snapshot"
DECISIONS_PATH: Final = "/debug/decisions"


class Told:
    """The last decisions as they were asked for; what ``Live`` shows first."""

    def __init__(self) -> None:
        self.records: Sequence[DecisionRecord] = ()

    def latest(self, count: int) -> Iterator[DecisionRecord]:
        """Yield up to ``count`` records, newest first."""
        yield from self.records[:count]


class Poll:
    """Asks ``children``; whoever does not answer is left out."""

    def __init__(
        self,
        children: Callable[[], Sequence[Child]],
        census: Census,
        history: History,
        glance: Glance,
        clock: Callable[[], float],
    ) -> None:
        self._children = children
        self._census = census
        self._history = history
        self._glance = glance
        self._clock = clock
        self._counting = asyncio.Lock()
        self._counted_s = self._seen_s = float("-inf")
        self._open: dict[int, int] = {}
        self._lags_s: dict[int, float] = {}
        self._arrived: dict[int, int] = {}
        """The last pulse of each process."""
        self.told = Told()
        self.live = Live(history, glance, self.told, self._sample, clock)

    @property
    def has_seen(self) -> bool:
        """Whether there is a snapshot of any process."""
        return bool(self._glance.told)

    async def everyone(
        self, target: str, within_s: float = TIMEOUT_S
    ) -> list[tuple[Child, Answer]]:
        """Return the answer of each process to a GET, of those that answer in time."""

        async def one(child: Child) -> tuple[Child, Answer] | None:
            try:
                return child, await fetch(child.path, target, within_s=within_s)
            except AskError as error:
                if child.is_accepting:
                    _log.warning("process %d does not answer: %s", child.number, error)
                return None

        found = await asyncio.gather(*(one(child) for child in self._children()))
        return [answer for answer in found if answer is not None]

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            is_watched = self._glance.viewers() > 0
            await asyncio.sleep(WATCHED_S if is_watched else PULSE_S)
            await self._feel(is_watched=is_watched)
            if is_watched:
                await self.look()
            if self._clock() - self._counted_s >= COUNT_S:
                await self.count()

    async def count(self) -> None:
        """Take in the metrics as they are."""
        async with self._counting:
            told = {}
            for child, answer in await self.everyone(METRICS_PATH, COUNT_TIMEOUT_S):
                try:
                    told[child.life] = read(answer.body)
                except msgspec.DecodeError as error:
                    _log.warning("process %d: metrics: %s", child.number, error)
            there = {child.life for child in self._children()}  # others are counted for good
            self._census.note({life: one for life, one in told.items() if life in there})
            self._counted_s = self._clock()

    async def look(self, fresh_s: float = 0.0) -> None:
        """Take in the snapshots, unless those that are there are fresh enough."""
        if self._clock() - self._seen_s <= fresh_s and self._glance.told:
            return
        told = []
        for _, answer in await self.everyone(SNAPSHOT_PATH):
            try:
                told.append(msgspec.json.decode(answer.body, type=Snapshot))
            except msgspec.DecodeError as error:
                _log.warning("a snapshot cannot be read: %s", error)
        if told:
            self._glance.told, self._seen_s = told, self._clock()

    def buried(self, child: Child) -> None:
        """Keep what a process said last."""
        self._open.pop(child.life, None)
        self._lags_s.pop(child.life, None)
        last, arrived = child.farewell, self._arrived.pop(child.life, 0)
        if last is not None:
            try:
                self._census.note({child.life: read(last.metrics)})
                pulse = read_pulse(last.pulse)
                self._history.take(pulse.batch)
                if pulse.unseen is not None and pulse.number != arrived:
                    self._history.take(pulse.unseen)
            except msgspec.DecodeError as error:
                _log.warning("process %d: its last words: %s", child.number, error)
        self._census.ended(child.life)

    async def _feel(self, *, is_watched: bool) -> None:
        await asyncio.gather(*(self._feel_one(one, is_watched) for one in self._children()))

    async def _feel_one(self, child: Child, is_watched: bool) -> None:  # noqa: FBT001 - of all
        query = f"{WATCHED}={int(is_watched)}&{ARRIVED}={self._arrived.get(child.life, 0)}"
        try:
            answer = await fetch(child.path, f"{PULSE_PATH}?{query}")
            pulse = read_pulse(answer.body)
        except AskError:
            return  # what it had to tell it tells the next time
        except msgspec.DecodeError as error:
            _log.warning("process %d: pulse: %s", child.number, error)
            return
        if child.ended.is_set():
            return  # its last words had this, too
        self._arrived[child.life] = pulse.number
        self._open[child.life] = pulse.open_requests
        self._lags_s[child.life] = pulse.loop_lag_s
        self._history.take(pulse.batch)
        if self._history.on_records is not None and pulse.decisions:
            self._history.on_records(list(pulse.decisions))

    def _sample(self) -> tuple[int, float]:
        return sum(self._open.values()), max(self._lags_s.values(), default=0.0)
