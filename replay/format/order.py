"""Arrivals in order: those that must be, and those that are put in order within a window."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeVar

import msgspec

from replay.format.fault import BadLineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from replay.format.fault import Faults
    from replay.trace import TraceRequest

Item = TypeVar("Item")


class Forward:
    """Times of a file whose lines stand in order, as seconds since its first one."""

    def __init__(self, field: str, units_per_s: int) -> None:
        self._field = field
        self._units_per_s = units_per_s
        self._first: float | None = None
        self._last: float = 0

    def since_first_s(self, time: float) -> float:
        """Return seconds since the first line's time; raises BadLineError for one before the last.

        Integers are subtracted exactly, also those since 1970 in nanoseconds.
        """
        if self._first is None:
            self._first = self._last = time
        if time < self._last:
            message = f"{self._field}: expected at least {self._last}, got {time}: it goes back"
            raise BadLineError(message)
        self._last = time
        return (time - self._first) / self._units_per_s


def in_order(
    items: Iterable[tuple[float, int, Item]], window: int, faults: Faults
) -> Iterator[tuple[float, int, Item]]:
    """Yield ``items`` (time, line, anything) by time, then line; ``window`` of them are held.

    One that comes more than ``window`` places too late is a fault.
    """
    held: list[tuple[float, int, Item]] = []
    last = (float("-inf"), 0)
    for item in items:
        if item[:2] < last:
            faults.add(
                item[1],
                f"its time is before that of line {last[1]}, which is more than {window} lines"
                f" away: expected lines nearly in order",
            )
            continue
        if len(held) < window:
            heapq.heappush(held, item)
            continue
        item = heapq.heappushpop(held, item)  # noqa: PLW2901 - one in, one out
        last = item[:2]
        yield item
    while held:
        yield heapq.heappop(held)


def from_first(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield ``requests``, which come by arrival, with arrivals that count from the first one."""
    first_s: float | None = None
    for request in requests:
        if first_s is None:
            first_s = request.arrival_s
        if first_s:
            yield msgspec.structs.replace(request, arrival_s=request.arrival_s - first_s)
        else:
            yield request
