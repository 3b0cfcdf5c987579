"""Traces made of traces: faster, longer, cut, mixed. Requests go in and come out by arrival.

Nothing is held but what a step must look ahead at. What comes out can be read again where what went
in can, so that steps can be put on each other.
"""

from __future__ import annotations

import heapq
import math
import random
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING

import xxhash
from msgspec.structs import replace

from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from replay.trace import TraceRequest


class Requests:
    """Requests that are made anew, the same, by every ``for`` over them."""

    def __init__(self, make: Callable[[], Iterator[TraceRequest]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival."""
        return self._make()


def speed_up(requests: Iterable[TraceRequest], factor: float) -> Requests:
    """Return the requests ``factor`` times as fast; slower below 1."""
    _demand("factor", 0 < factor < math.inf, "above 0 and finite")
    return Requests(partial(_faster, requests, factor))


def at_rate(requests: Iterable[TraceRequest], requests_per_s: float) -> Requests:
    """Return the requests as fast or slow as gives this mean rate: one over the mean gap.

    Reads them now to learn their rate. Raises ValueError where they all arrive at once.
    """
    _demand("requests_per_s", 0 < requests_per_s < math.inf, "above 0 and finite")
    count, span_s = _extent(requests)
    if count <= 1:
        return Requests(partial(iter, requests))
    _demand("requests", span_s > 0, "more than one arrival time")
    return speed_up(requests, requests_per_s / ((count - 1) / span_s))


def with_jitter(requests: Iterable[TraceRequest], quantum_s: float, seed: int) -> Requests:
    """Return requests that share an arrival spread at random behind it, in their order.

    They reach as far as the next arrival, and ``quantum_s`` at most: the step of the trace's clock.
    """
    _demand("quantum_s", 0 <= quantum_s < math.inf, "at least 0 and finite")
    return Requests(partial(_spread, requests, quantum_s, seed))


def limit(requests: Iterable[TraceRequest], count: int) -> Requests:
    """Return the first ``count`` requests."""
    _demand("count", count >= 1, "at least 1")
    return Requests(lambda: islice(requests, count))


def cloned(
    requests: Iterable[TraceRequest], copies: int, seed: int, *, within_s: float = 60.0
) -> Requests:
    """Return the requests and ``copies - 1`` copies of them, which share nothing with each other.

    The prefixes of a copy have other ids, and its sessions other names. A session comes later in a
    copy by a time drawn once from up to ``within_s``; requests without a session all by the same.
    """
    _demand("copies", copies >= 1, "at least 1")
    _demand("within_s", 0 <= within_s < math.inf, "at least 0 and finite")
    return Requests(partial(_copied, requests, copies, seed, within_s))


def with_arrivals_of(
    chains_from: Iterable[TraceRequest], arrivals_from: Iterable[TraceRequest], block_tokens: int
) -> Requests:
    """Return arrivals and lengths of one trace on the prefixes of another, pair by pair.

    A chain is cut to the full blocks of ``block_tokens`` that its new prompt has; a prompt that is
    longer goes on behind its chain with tokens of its own. Ends where the shorter trace ends.
    """
    _demand("block_tokens", block_tokens >= 1, "at least 1")
    return Requests(partial(_paired, chains_from, arrivals_from, block_tokens))


def held_out(requests: Iterable[TraceRequest], fraction: float) -> tuple[Requests, Requests]:
    """Return the part before and the part after a moment: to tune on, and to judge by.

    The second lasts for ``fraction`` of the time and counts arrivals from its own first one. Reads
    the requests now. Raises ValueError where a part would be empty.
    """
    _demand("fraction", 0 < fraction < 1, "above 0 and below 1")
    _, span_s = _extent(requests)
    cut_s = span_s * (1 - fraction)
    before = Requests(lambda: (one for one in requests if one.arrival_s < cut_s))
    after = Requests(lambda: _rebased(one for one in requests if one.arrival_s >= cut_s))
    is_split = next(iter(before), None) is not None
    _demand("requests", is_split, "some on either side of the cut")
    return before, after


def _demand(name: str, holds: object, what: str) -> None:
    if not holds:
        message = f"{name}: expected {what}"
        raise ValueError(message)


def _extent(requests: Iterable[TraceRequest]) -> tuple[int, float]:
    """Return how many requests there are and the seconds between first and last."""
    _demand("requests", iter(requests) is not requests, "a trace that can be read twice")
    count, first_s, last_s = 0, 0.0, 0.0
    for request in requests:
        count += 1
        last_s = request.arrival_s
        if count == 1:
            first_s = last_s
    return count, last_s - first_s


def _rebased(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    first_s: float | None = None
    for request in requests:
        if first_s is None:
            first_s = request.arrival_s
        yield replace(request, arrival_s=request.arrival_s - first_s) if first_s else request


def _faster(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    for request in requests:
        yield replace(request, arrival_s=request.arrival_s / factor)


def _spread(
    requests: Iterable[TraceRequest], quantum_s: float, seed: int
) -> Iterator[TraceRequest]:
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    groups = groupby(requests, key=lambda request: request.arrival_s)
    held = [(arrival_s, list(group)) for arrival_s, group in islice(groups, 1)]
    first_s: float | None = None
    while held:
        arrival_s, together = held.pop()
        held = [(next_s, list(group)) for next_s, group in islice(groups, 1)]
        room_s = min(quantum_s, held[0][0] - arrival_s) if held else quantum_s
        offsets = sorted(draw.random() * room_s for _ in together)
        for request, offset_s in zip(together, offsets, strict=True):
            spread_s = arrival_s + offset_s
            if first_s is None:
                first_s = spread_s
            yield replace(request, arrival_s=spread_s - first_s)


def _copied(
    requests: Iterable[TraceRequest], copies: int, seed: int, within_s: float
) -> Iterator[TraceRequest]:
    pending: list[tuple[float, int, int, TraceRequest]] = []
    for ordinal, request in enumerate(requests):
        while pending and pending[0][0] < request.arrival_s:
            yield heapq.heappop(pending)[-1]
        for copy in range(copies):
            one = _copy_of(request, copy, seed, within_s) if copy else request
            heapq.heappush(pending, (one.arrival_s, ordinal, copy, one))
    while pending:
        yield heapq.heappop(pending)[-1]


def _copy_of(request: TraceRequest, copy: int, seed: int, within_s: float) -> TraceRequest:
    """Return the request as it stands in copy number ``copy``."""
    digest = xxhash.xxh3_128_digest
    key = digest(f"warmroute trace copy {seed} {copy}".encode())
    later = xxhash.xxh3_64_intdigest(key + request.session.encode("utf-8", "surrogatepass"))
    return replace(
        request,
        arrival_s=request.arrival_s + later / 2**64 * within_s,
        chain=tuple(BlockId(digest(key + block)) for block in request.chain),
        session=f"{request.session} (copy {copy})" if request.session else "",
    )


def _paired(
    chains_from: Iterable[TraceRequest], arrivals_from: Iterable[TraceRequest], block_tokens: int
) -> Iterator[TraceRequest]:
    for shared, timed in zip(chains_from, arrivals_from, strict=False):
        yield replace(
            shared,
            arrival_s=timed.arrival_s,
            prompt_tokens=timed.prompt_tokens,
            output_tokens=timed.output_tokens,
            chain=shared.chain[: timed.prompt_tokens // block_tokens],
        )
