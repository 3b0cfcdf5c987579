"""Round robin: replicas take turns in the order of their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.model import Candidate, Decision, Reason

if TYPE_CHECKING:
    from policies.model import ReplicaView, RoutingRequest


class RoundRobin(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="round_robin",
):
    """The request's ordinal decides. ``turn`` of a candidate: requests until it is next, 0 = now.

    Each router counts its own ordinals, so several routers interleave and do not alternate.
    """

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        by_name = sorted(fleet, key=lambda view: view.replica)
        turns = {
            view.replica: float((place - request.ordinal) % len(fleet))
            for place, view in enumerate(by_name)
        }
        chosen = by_name[request.ordinal % len(fleet)]
        return Decision(
            replica=chosen.replica,
            reason=Reason.RULE,
            predicted_cached_tokens=chosen.cached_tokens,
            predicted_lower_tier_tokens=chosen.lower_tier_tokens,
            candidates=tuple(
                Candidate(
                    replica=view.replica,
                    score=turns[view.replica],
                    terms={"turn": turns[view.replica]},
                    cached_tokens=view.cached_tokens,
                    lower_tier_tokens=view.lower_tier_tokens,
                )
                for view in fleet
            ),
        )
