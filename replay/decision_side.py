"""What the decisions of one policy on logged snapshots add up to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from policies.model import Decision, ReplicaView, RoutingRequest


class Side(Struct, frozen=True, kw_only=True):
    """One policy's choices. Tokens are predicted, sums over all decisions.

    ``imbalance_*`` is the most that one replica got over the mean of all that were candidates;
    None where nobody got any. ``wait_ms`` is the mean over the ``waits`` decisions that predict it.
    """

    decisions: int
    reasons: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    lower_tier_tokens: int
    waits: int
    wait_ms: float | None
    requests_by_replica: dict[str, int]
    prefill_by_replica: dict[str, int]
    imbalance_requests: float | None
    imbalance_prefill: float | None


class SideTally:
    """Adds up one policy's decisions."""

    def __init__(self) -> None:
        self._decisions = 0
        self._reasons: dict[str, int] = {}
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._lower_tier_tokens = 0
        self._waits = 0
        self._wait_ms = 0.0
        self._requests: dict[str, int] = {}
        self._prefill: dict[str, int] = {}

    def add(
        self, request: RoutingRequest, views: Iterable[ReplicaView], decision: Decision
    ) -> None:
        """Count one decision; every replica that could be chosen counts, chosen or not."""
        for view in views:
            self._requests.setdefault(view.replica, 0)
            self._prefill.setdefault(view.replica, 0)
        replica, reason = decision.replica, decision.reason.value
        cached, lower = decision.predicted_cached_tokens, decision.predicted_lower_tier_tokens
        self._decisions += 1
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        self._prompt_tokens += request.prompt_tokens
        self._cached_tokens += cached
        self._lower_tier_tokens += lower
        if decision.predicted_wait_ms is not None:
            self._waits += 1
            self._wait_ms += decision.predicted_wait_ms
        self._requests[replica] = self._requests.get(replica, 0) + 1
        to_compute = max(0, request.prompt_tokens - cached - lower)
        self._prefill[replica] = self._prefill.get(replica, 0) + to_compute

    def side(self) -> Side:
        """Return the sums."""
        return Side(
            decisions=self._decisions,
            reasons=dict(sorted(self._reasons.items())),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            lower_tier_tokens=self._lower_tier_tokens,
            waits=self._waits,
            wait_ms=self._wait_ms / self._waits if self._waits else None,
            requests_by_replica=dict(sorted(self._requests.items())),
            prefill_by_replica=dict(sorted(self._prefill.items())),
            imbalance_requests=imbalance(self._requests),
            imbalance_prefill=imbalance(self._prefill),
        )


def imbalance(shares: Mapping[str, int]) -> float | None:
    """Return the largest share over the mean: 1 is even; None where there is nothing to share."""
    total = sum(shares.values())
    return max(shares.values()) * len(shares) / total if total else None
