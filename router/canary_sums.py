"""What is counted of a canary: sums of each side's groups, which routers add up.

Times to first token are counted in buckets of an eighth of an octave: a percentile is right within
5 %. A client that left before its first byte counts with the time it waited: it would have taken
longer.
"""

from __future__ import annotations

from math import exp, exp2, floor, log, log2
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from router.split import CANDIDATE, CONTROL, GROUPS, Side
from state.schema import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.split import Assigned
    from router.trace import DecisionRecord

PER_OCTAVE: Final = 8
LEAST_S: Final = 0.000_1
MOST_S: Final = 100_000.0
BUSY_STATUSES: Final = frozenset({429, 503})
CLIENT_ERROR: Final = 400
SERVER_ERROR: Final = 500
NEWEST_WEIGHT: Final = 0.02
"""How much the last time to first token counts in what is usual."""
MOST_REPLICAS: Final = 4_096
MOST_BYTES: Final = 1 << 20
"""Of one router's sums; a fleet of hundreds of replicas has some 100 KB."""
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Bin = Annotated[int, Meta(ge=-128, le=256)]


class Group(Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Requests that ended: ``failed`` of ``requests``, ``ttfts`` of which a first byte is known.

    ``bins`` has those by time; their prompts had ``ttft_prompt_tokens``, and ``usual_s`` is what
    was usual at the moment, added up. ``replicas`` has the requests by who got them last. Of the
    prompts that engines told of, ``cached_tokens`` of ``told_tokens`` were cached.
    """

    requests: Count = 0
    failed: Count = 0
    ttfts: Count = 0
    ttft_s: Amount = 0.0
    ttft_prompt_tokens: Count = 0
    usual_s: Amount = 0.0
    told_tokens: Count = 0
    cached_tokens: Count = 0
    bins: dict[Bin, Count] = {}
    replicas: Annotated[dict[str, Count], Meta(max_length=MOST_REPLICAS)] = {}

    def add(self, other: Group) -> None:
        """Count what another router has, too."""
        self.requests += other.requests
        self.failed += other.failed
        self.ttfts += other.ttfts
        self.ttft_s += other.ttft_s
        self.ttft_prompt_tokens += other.ttft_prompt_tokens
        self.usual_s += other.usual_s
        self.told_tokens += other.told_tokens
        self.cached_tokens += other.cached_tokens
        for at, count in other.bins.items():
            self.bins[at] = self.bins.get(at, 0) + count
        for replica, count in other.replicas.items():
            self.replicas[replica] = self.replicas.get(replica, 0) + count


Groups = Annotated[list[Group], Meta(min_length=GROUPS, max_length=GROUPS)]


class CanarySums(Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Both sides by groups."""

    control: Groups
    candidate: Groups

    def of(self, side: Side) -> list[Group]:
        """Return the groups of a side."""
        return self.candidate if side is CANDIDATE else self.control

    def requests(self, side: Side) -> int:
        """Return the requests of a side."""
        return sum(group.requests for group in self.of(side))

    @property
    def total(self) -> int:
        """The requests of both sides."""
        return self.requests(CONTROL) + self.requests(CANDIDATE)


def no_sums() -> CanarySums:
    """Return sums of nothing."""
    return CanarySums(
        control=[Group() for _ in range(GROUPS)], candidate=[Group() for _ in range(GROUPS)]
    )


def merged(parts: Iterable[CanarySums]) -> CanarySums:
    """Return what all of them add up to."""
    whole = no_sums()
    for part in parts:
        for side in Side:
            for group, more in zip(whole.of(side), part.of(side), strict=True):
                group.add(more)
    return whole


def pack(sums: CanarySums) -> bytes:
    """Return the stored form."""
    return msgspec.msgpack.encode(sums)


_decoder: Final = msgspec.msgpack.Decoder(CanarySums)


def unpack(data: bytes) -> CanarySums | None:
    """Return sums of another router; None for what are none."""
    if len(data) > MOST_BYTES:
        return None
    try:
        return _decoder.decode(data)
    except MALFORMED:
        return None


def has_failed(record: DecisionRecord) -> bool | None:
    """Return whether a request failed, or was shed; None where its client is to blame or left."""
    if record.outcome == "done":
        is_refused = CLIENT_ERROR <= record.status < SERVER_ERROR
        return None if is_refused else record.status >= SERVER_ERROR
    if record.outcome == "refused":
        return True if record.status in BUSY_STATUSES else None
    return None if record.outcome == "cancelled" else True


class Counter:
    """Counts requests that have ended, in one router; ``sums`` are what they add up to."""

    def __init__(self) -> None:
        self.sums = no_sums()
        self._usual_log_s: float | None = None

    def add(self, assigned: Assigned, record: DecisionRecord) -> None:
        """Count one request."""
        group, failed = self.sums.of(assigned.side)[assigned.group], has_failed(record)
        if failed is not None:
            group.requests += 1
            group.failed += failed
        ttft_s, has_left = record.ttft_s, record.outcome == "cancelled"
        if ttft_s is None and has_left:
            ttft_s = record.duration_s
        if ttft_s is not None and not failed and (has_left or record.status < CLIENT_ERROR):
            self._time(group, min(MOST_S, max(LEAST_S, ttft_s)), record.prompt_tokens)
        if record.attempts:
            replica = record.attempts[-1].decision.replica
            if replica in group.replicas or len(group.replicas) < MOST_REPLICAS:
                group.replicas[replica] = group.replicas.get(replica, 0) + 1
        cached, told = record.reported_cached_tokens, record.reported_prompt_tokens
        if cached is not None and told:
            group.told_tokens += told
            group.cached_tokens += min(cached, told)

    def _time(self, group: Group, ttft_s: float, prompt_tokens: int) -> None:
        """Count a time to first token beside what is usual at the moment, for both sides alike."""
        told = log(ttft_s)
        usual = told if self._usual_log_s is None else self._usual_log_s
        self._usual_log_s = usual + NEWEST_WEIGHT * (told - usual)
        group.ttfts += 1
        group.ttft_s += ttft_s
        group.ttft_prompt_tokens += prompt_tokens
        group.usual_s += exp(usual)
        at = floor(PER_OCTAVE * log2(ttft_s))
        group.bins[at] = group.bins.get(at, 0) + 1


def bin_start_s(at: int) -> float:
    """Return the least time that is counted in a bucket."""
    return exp2(at / PER_OCTAVE)
