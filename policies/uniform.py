"""Random: every replica is equally likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.draw import draw_near_best
from policies.model import Candidate, Decision, Reason

if TYPE_CHECKING:
    from policies.model import ReplicaView, RoutingRequest


class Uniform(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="random"
):
    """All candidates score 0 and have no terms: the draw decides."""

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        candidates = tuple(
            Candidate(
                replica=view.replica,
                score=0.0,
                terms={},
                cached_tokens=view.cached_tokens,
                lower_tier_tokens=view.lower_tier_tokens,
            )
            for view in fleet
        )
        winner = draw_near_best(candidates, 0.0, request)
        return Decision(
            replica=winner.replica,
            reason=Reason.RULE,
            predicted_cached_tokens=winner.cached_tokens,
            predicted_lower_tier_tokens=winner.lower_tier_tokens,
            candidates=candidates,
        )
