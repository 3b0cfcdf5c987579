"""A replay in slices: over the time of arrival, per tenant, and as a distribution."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct

from replay.score import answered, imbalance, percentile, ratio, spread, token_hit_ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.outcome import Outcome, ReplayRun

MAX_BUCKETS = 48
BUCKET_REQUESTS = 10
"""Fewer requests than this in the mean say little; then there are fewer buckets."""
POINTS = 200


class Bucket(Struct, frozen=True, kw_only=True):
    """The requests that arrived in one stretch of time, with what became of them whenever it did.

    ``rate_per_s`` is of arrivals; None where all arrived at once.
    """

    start_s: float
    end_s: float
    requests: int
    failed: int
    rate_per_s: float | None
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    token_hit_ratio: float | None
    imbalance_requests: float | None


class TenantScore(Struct, frozen=True, kw_only=True):
    """One tenant's requests; "" are those that name none."""

    tenant: str
    requests: int
    failed: int
    token_hit_ratio: float | None
    ttft_mean_s: float | None
    ttft_p99_s: float | None


class CdfPoint(Struct, frozen=True, kw_only=True):
    """``share`` of the known times are at most ``time_s`` (linear between ranks)."""

    share: float
    time_s: float


def timeline(run: ReplayRun, buckets: int | None = None) -> tuple[Bucket, ...]:
    """Return ``buckets`` equal stretches from the first arrival to the last one.

    None: as many as there are requests for, at most 48.
    """
    if not run.outcomes:
        return ()
    arrivals_s = [outcome.arrival_s for outcome in run.outcomes]
    first_s, last_s = min(arrivals_s), max(arrivals_s)
    wanted = buckets or max(1, min(MAX_BUCKETS, len(arrivals_s) // BUCKET_REQUESTS))
    count = wanted if last_s > first_s else 1
    width_s = (last_s - first_s) / count
    slices: list[list[Outcome]] = [[] for _ in range(count)]
    for outcome in run.outcomes:
        place = int((outcome.arrival_s - first_s) / width_s) if width_s else 0
        slices[min(place, count - 1)].append(outcome)
    replicas = len({*run.replicas, *(o.replica for o in run.outcomes if o.replica)})
    return tuple(
        _bucket(outcomes, first_s + width_s * index, first_s + width_s * (index + 1), replicas)
        for index, outcomes in enumerate(slices)
    )


def _bucket(outcomes: Sequence[Outcome], start_s: float, end_s: float, replicas: int) -> Bucket:
    good = answered(outcomes)
    ttft = spread(outcome.ttft_s for outcome in good)
    sent = Counter(outcome.replica for outcome in outcomes if outcome.replica)
    return Bucket(
        start_s=start_s,
        end_s=end_s,
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        rate_per_s=ratio(len(outcomes), end_s - start_s),
        ttft_mean_s=ttft.mean_s,
        ttft_p99_s=ttft.p99_s,
        token_hit_ratio=token_hit_ratio(good),
        imbalance_requests=imbalance(sent.values(), replicas),
    )


def tenant_scores(run: ReplayRun) -> tuple[TenantScore, ...]:
    """Return each tenant's figures, the one with the most requests first."""
    sent: dict[str, list[Outcome]] = {}
    for outcome in run.outcomes:
        sent.setdefault(outcome.tenant, []).append(outcome)
    found = []
    for tenant, outcomes in sorted(sent.items(), key=lambda item: (-len(item[1]), item[0])):
        good = answered(outcomes)
        ttft = spread(outcome.ttft_s for outcome in good)
        found.append(
            TenantScore(
                tenant=tenant,
                requests=len(outcomes),
                failed=len(outcomes) - len(good),
                token_hit_ratio=token_hit_ratio(good),
                ttft_mean_s=ttft.mean_s,
                ttft_p99_s=ttft.p99_s,
            )
        )
    return tuple(found)


def ttft_cdf(run: ReplayRun, points: int = POINTS) -> tuple[CdfPoint, ...]:
    """Return the distribution of the known TTFT at evenly spaced shares, from least to largest."""
    ordered = sorted(o.ttft_s for o in answered(run.outcomes) if o.ttft_s is not None)
    shares = [index / points for index in range(points + 1)]
    return tuple(
        CdfPoint(share=share, time_s=time_s)
        for share in shares
        if (time_s := percentile(ordered, share)) is not None
    )
