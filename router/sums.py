"""Requests of a time added up, and what is told of them.

Times to first token are counted in buckets of an eighth of an octave: a percentile is right within
5 %, and of several processes it is that of all their requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp2, floor, log2
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from policies.model import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.trace import DecisionRecord

PER_OCTAVE: Final = 8
LEAST_S: Final = 0.000_1
BUSY_STATUSES: Final = frozenset({429, 503})
CLIENT_ERROR: Final = 400
SERVER_ERROR: Final = 500
SPILL: Final = Reason.SPILL
"""By a name of its own: an enumeration's members are slow to reach."""


class Minute(Struct, frozen=True, kw_only=True):
    """What one replica, or the router, did in the last 50 to 60 s. Shares are None without any.

    ``predicted_share`` is that of prompt tokens that were predicted to be cached, and
    ``measured_share`` that which engines reported, of the prompts that they told of.
    ``hit_share`` is that of requests of which the engine had anything.
    """

    span_s: float
    requests: int
    failed: int
    shed: int
    spills: int
    retries: int
    predicted_share: float | None
    measured_share: float | None
    hit_share: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None


@dataclass(slots=True)
class Sums:
    """Requests of a time, added up."""

    requests: int = 0
    failed: int = 0
    shed: int = 0
    refused: int = 0
    cancelled: int = 0
    retries: int = 0
    spills: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    told: int = 0
    hits: int = 0
    told_tokens: int = 0
    reported_tokens: int = 0
    ttft: dict[int, int] = field(default_factory=dict)

    def add(self, record: DecisionRecord) -> None:
        """Count one request."""
        self.requests += 1
        outcome, attempts = record.outcome, record.attempts
        if outcome != "done":
            is_busy = record.status in BUSY_STATUSES
            if outcome == "cancelled":
                self.cancelled += 1
            elif is_busy and not attempts:
                self.shed += 1
            elif outcome == "refused":
                self.refused += 1
            else:
                self.failed += 1
        elif record.status >= SERVER_ERROR:
            self.failed += 1
        elif record.status >= CLIENT_ERROR:
            self.refused += 1
        if record.ttft_s is not None:
            bucket = floor(PER_OCTAVE * log2(max(LEAST_S, record.ttft_s)))
            self.ttft[bucket] = self.ttft.get(bucket, 0) + 1
        if not attempts:
            return
        decision = attempts[-1].decision
        self.retries += len(attempts) - 1
        self.spills += decision.reason is SPILL
        self.prompt_tokens += record.prompt_tokens
        self.predicted_tokens += decision.predicted_cached_tokens
        cached, counted = record.reported_cached_tokens, record.reported_prompt_tokens
        if cached is not None and counted:
            self.told += 1
            self.hits += cached > 0
            self.told_tokens += counted
            self.reported_tokens += min(cached, counted)

    def merge(self, other: Sums) -> None:
        """Add what another time had."""
        self.requests += other.requests
        self.failed += other.failed
        self.shed += other.shed
        self.refused += other.refused
        self.cancelled += other.cancelled
        self.retries += other.retries
        self.spills += other.spills
        self.prompt_tokens += other.prompt_tokens
        self.predicted_tokens += other.predicted_tokens
        self.told += other.told
        self.hits += other.hits
        self.told_tokens += other.told_tokens
        self.reported_tokens += other.reported_tokens
        for bucket, count in other.ttft.items():
            self.ttft[bucket] = self.ttft.get(bucket, 0) + count

    def ttft_s(self, share: float) -> float | None:
        """Return the time within which this share of the answers began, at a bucket's middle."""
        total = sum(self.ttft.values())
        seen = 0
        for bucket in sorted(self.ttft):
            seen += self.ttft[bucket]
            if seen >= share * total:
                return round(exp2((bucket + 0.5) / PER_OCTAVE), 6)
        return None

    def minute(self, span_s: float) -> Minute:
        """Return the figures for people."""
        return Minute(
            span_s=round(span_s, 2),
            requests=self.requests,
            failed=self.failed,
            shed=self.shed,
            spills=self.spills,
            retries=self.retries,
            predicted_share=_share(self.predicted_tokens, self.prompt_tokens),
            measured_share=_share(self.reported_tokens, self.told_tokens),
            hit_share=_share(self.hits, self.told),
            ttft_p50_s=self.ttft_s(0.5),
            ttft_p95_s=self.ttft_s(0.95),
            ttft_p99_s=self.ttft_s(0.99),
        )


@dataclass(slots=True)
class Batch:
    """Requests that were added up together: by replica, "" for none, by tenant, by hot prefix.

    Of a prefix there are two counts: requests, and spills among them.
    """

    replicas: dict[str, Sums] = field(default_factory=dict)
    tenants: dict[str, Sums] = field(default_factory=dict)
    prefixes: dict[bytes, list[int]] = field(default_factory=dict)

    def add(self, record: DecisionRecord, prefix: bytes) -> None:
        """Count one request, which began with the hot ``prefix``, if with any."""
        attempts = record.attempts
        replica = attempts[-1].decision.replica if attempts else ""
        sums = self.replicas.get(replica)
        if sums is None:
            sums = self.replicas[replica] = Sums()
        sums.add(record)
        if record.tenant is not None:
            self.tenants.setdefault(record.tenant, Sums()).add(record)
        if attempts and prefix:
            counts = self.prefixes.setdefault(prefix, [0, 0])
            counts[0] += 1
            counts[1] += attempts[-1].decision.reason is SPILL

    def merge(self, other: Batch, tenants_most: int, prefixes_most: int) -> None:
        """Add what another one has; no more tenants and prefixes than so many."""
        for replica, sums in other.replicas.items():
            self.replicas.setdefault(replica, Sums()).merge(sums)
        for tenant, sums in other.tenants.items():
            if tenant in self.tenants or len(self.tenants) < tenants_most:
                self.tenants.setdefault(tenant, Sums()).merge(sums)
        for prefix, (requests, spills) in other.prefixes.items():
            if prefix in self.prefixes or len(self.prefixes) < prefixes_most:
                counts = self.prefixes.setdefault(prefix, [0, 0])
                counts[0] += requests
                counts[1] += spills


def merged(parts: Iterable[Sums]) -> Sums:
    """Return the sum of all parts."""
    total = Sums()
    for part in parts:
        total.merge(part)
    return total


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None
