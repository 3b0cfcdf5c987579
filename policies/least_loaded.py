"""Least loaded: the fewest requests in flight and queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.draw import draw_near_best
from policies.load import assumed_queues
from policies.model import Candidate, Decision, Reason

if TYPE_CHECKING:
    from policies.model import ReplicaView, RoutingRequest


class LeastLoaded(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="least_loaded",
):
    """Score = ``inflight`` + ``queued``, in requests; random among equals."""

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        candidates = load_candidates(fleet)
        winner = draw_near_best(candidates, 0.0, request)
        return Decision(
            replica=winner.replica,
            reason=Reason.RULE,
            predicted_cached_tokens=winner.cached_tokens,
            predicted_lower_tier_tokens=winner.lower_tier_tokens,
            candidates=candidates,
        )


def load_candidates(fleet: tuple[ReplicaView, ...]) -> tuple[Candidate, ...]:
    """Return the replicas scored by requests in flight and queued, in fleet order."""
    return tuple(
        Candidate(
            replica=view.replica,
            score=view.inflight + queued,
            terms={"inflight": float(view.inflight), "queued": queued},
            cached_tokens=view.cached_tokens,
            lower_tier_tokens=view.lower_tier_tokens,
        )
        for view, queued in zip(fleet, assumed_queues(fleet), strict=True)
    )
