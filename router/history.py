"""The last minutes in figures: a bounded ring of points, filled from requests that have ended.

A request costs one append when it ends. What is waiting is added up four times a second, or as
soon as there are ``FOLD_REQUESTS`` of them, so that no burst makes one long pause of it. Seconds
are kept for ``SECONDS_KEPT`` and tens of seconds for ``TENS_KEPT`` points.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.sums import Batch, Minute, Sums, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from router.trace import DecisionRecord
    from state.model import ReplicaId

SECONDS_KEPT: Final = 120
TENS_KEPT: Final = 90
TEN: Final = 10
MINUTE_SLOTS: Final = 6
"""Tens of seconds that figures of the last minute cover, the one that is open besides."""
FOLD_REQUESTS: Final = 256
PREFIXES_MOST: Final = 64
"""Hot prefixes that are counted by name in ten seconds: there are never many."""
TENANTS_MOST: Final = 1_024


class Point(Struct, frozen=True, kw_only=True):
    """What happened in ``span_s`` from ``start_unix_s`` on. Percentiles are None without any.

    ``failed``: the router or a replica failed; ``shed``: nothing was tried, as there was no room or
    no replica (429, 503); ``refused``: another fault of the client; ``cancelled``: it left.
    ``spills`` are decisions against the warmest replica. Of ``told`` requests the engine said how
    much it had cached: ``hits`` of them had something, ``reported_tokens`` of their
    ``told_tokens`` of prompt. ``inflight`` is that at the end, ``loop_lag_s`` the longest.
    """

    start_unix_s: float
    span_s: int
    requests: int
    failed: int
    shed: int
    refused: int
    cancelled: int
    retries: int
    spills: int
    prompt_tokens: int
    predicted_tokens: int
    told: int
    hits: int
    told_tokens: int
    reported_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    inflight: int
    loop_lag_s: float


class Traffic(Struct, frozen=True, kw_only=True):
    """Requests of one hot prefix in the last minute; ``spills`` went past its warmest replica."""

    requests: int
    spills: int


class HistoryView(Struct, frozen=True, kw_only=True):
    """Both rings, oldest first; what ``/admin/history`` answers."""

    seconds: tuple[Point, ...]
    tens: tuple[Point, ...]


class _Slot(Batch):
    """Ten seconds: the router's sums besides each replica's, tenant's and hot prefix's."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        super().__init__()
        self.all = Sums()


class History:
    """Takes requests in and tells of the last minutes. ``clock`` never goes back."""

    def __init__(self, clock: Callable[[], float], unix_s: float) -> None:
        self._clock = clock
        self._origin_s = clock()
        self._origin_unix_s = unix_s
        self._second = 0
        self._open = Sums()
        self._inflight = 0
        self._lag_s = self._ten_lag_s = 0.0
        self._waiting: list[tuple[DecisionRecord, bytes]] = []
        self._slots: deque[_Slot] = deque([_Slot()], maxlen=MINUTE_SLOTS)
        self._seconds: deque[Point] = deque(maxlen=SECONDS_KEPT)
        self._tens: deque[Point] = deque(maxlen=TENS_KEPT)
        self.on_records: Callable[[list[DecisionRecord]], None] | None = None
        """Gets the requests that were added up, where somebody looks at them as they happen."""
        self.untold: Batch | None = None
        """What another process has not been told yet, where one is."""

    def note(self, record: DecisionRecord, prefix: bytes = b"") -> None:
        """Take a request that has ended; ``prefix`` names the hot prefix that it began with."""
        self._waiting.append((record, prefix))
        if len(self._waiting) >= FOLD_REQUESTS:
            self.fold()

    def fold(self) -> None:
        """Add up what is waiting."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        batch = Batch()
        for record, prefix in waiting:
            batch.add(record, prefix)
        self.take(batch)
        if self.untold is not None:
            self.untold.merge(batch, TENANTS_MOST, PREFIXES_MOST)
        if self.on_records is not None:
            self.on_records([record for record, _ in waiting])

    def take(self, batch: Batch) -> None:
        """Take in what was added up, here or by another process."""
        self._slots[-1].merge(batch, TENANTS_MOST, PREFIXES_MOST)
        for sums in batch.replicas.values():
            self._open.merge(sums)

    def sample(self, inflight: int, loop_lag_s: float) -> None:
        """Note what is measured and not counted."""
        self._inflight = inflight
        self._lag_s = max(self._lag_s, loop_lag_s)

    def advance(self) -> int:
        """Close the seconds that are over; return how many."""
        now = int(self._clock() - self._origin_s)
        closed = now - self._second
        if closed > SECONDS_KEPT + TEN * TENS_KEPT:  # the process stood still: nothing to draw
            self._second = now - SECONDS_KEPT
        while self._second < now:
            self._close_second()
        return closed

    def _close_second(self) -> None:
        sums, self._open = self._open, Sums()
        self._slots[-1].all.merge(sums)
        self._seconds.append(self._point(sums, self._second, 1, self._lag_s))
        self._ten_lag_s, self._lag_s = max(self._ten_lag_s, self._lag_s), 0.0
        self._second += 1
        if self._second % TEN == 0:
            start = self._second - TEN
            self._tens.append(self._point(self._slots[-1].all, start, TEN, self._ten_lag_s))
            self._ten_lag_s = 0.0
            self._slots.append(_Slot())

    def _point(self, sums: Sums, second: int, span_s: int, loop_lag_s: float) -> Point:
        return Point(
            start_unix_s=self._origin_unix_s + second,
            span_s=span_s,
            requests=sums.requests,
            failed=sums.failed,
            shed=sums.shed,
            refused=sums.refused,
            cancelled=sums.cancelled,
            retries=sums.retries,
            spills=sums.spills,
            prompt_tokens=sums.prompt_tokens,
            predicted_tokens=sums.predicted_tokens,
            told=sums.told,
            hits=sums.hits,
            told_tokens=sums.told_tokens,
            reported_tokens=sums.reported_tokens,
            ttft_p50_s=sums.ttft_s(0.5),
            ttft_p95_s=sums.ttft_s(0.95),
            ttft_p99_s=sums.ttft_s(0.99),
            inflight=self._inflight,
            loop_lag_s=round(loop_lag_s, 6),
        )

    # Looking.

    @property
    def span_s(self) -> float:
        """How long the last minute is at the moment."""
        return min(
            (len(self._slots) - 1) * TEN + self._second % TEN + self._age_s(),
            self._age_s(whole=True),
        )

    def _age_s(self, *, whole: bool = False) -> float:
        """Return the age of the open second, or of everything."""
        age_s = self._clock() - self._origin_s
        return age_s if whole else max(0.0, age_s - self._second)

    def view(self) -> HistoryView:
        """Return both rings."""
        return HistoryView(seconds=tuple(self._seconds), tens=tuple(self._tens))

    def last(self, span_s: int) -> Point | None:
        """Return the newest point of a ring: ``span_s`` is 1 or ``TEN``."""
        ring = self._seconds if span_s == 1 else self._tens
        return ring[-1] if ring else None

    def rates(self) -> tuple[int, ...]:
        """Return the requests of each of the last 60 s, oldest first."""
        return tuple(point.requests for point in list(self._seconds)[-60:])

    def minute(self) -> Minute:
        """Return the last minute of the router."""
        total = merged(slot.all for slot in self._slots)
        total.merge(self._open)
        return total.minute(self.span_s)

    def replica_minutes(self, replicas: Collection[ReplicaId]) -> dict[ReplicaId, Minute]:
        """Return the last minute of each of ``replicas`` that had any request."""
        span_s, slots = self.span_s, [slot.replicas for slot in self._slots]
        return {
            replica: merged(slot[replica] for slot in slots if replica in slot).minute(span_s)
            for replica in replicas
            if any(replica in slot for slot in slots)
        }

    def tenant_minutes(self) -> dict[str, Minute]:
        """Return the last minute of each tenant that had any request."""
        span_s, slots = self.span_s, [slot.tenants for slot in self._slots]
        names = {name for slot in slots for name in slot}
        return {
            name: merged(slot[name] for slot in slots if name in slot).minute(span_s)
            for name in names
        }

    def prefix_traffic(self) -> Mapping[bytes, Traffic]:
        """Return the last minute of each hot prefix, by its name."""
        sums: dict[bytes, list[int]] = {}
        for slot in self._slots:
            for name, (requests, spills) in slot.prefixes.items():
                counts = sums.setdefault(name, [0, 0])
                counts[0] += requests
                counts[1] += spills
        return {name: Traffic(requests=one, spills=two) for name, (one, two) in sums.items()}
