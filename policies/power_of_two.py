"""Power of two choices: draw two replicas, take the less loaded one (Mitzenmacher 2001)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.draw import draw_below, draw_near_best
from policies.least_loaded import load_candidates
from policies.model import Decision, Reason

if TYPE_CHECKING:
    from policies.model import ReplicaView, RoutingRequest

_FIRST_DRAW = 1
_SECOND_DRAW = 2


class PowerOfTwo(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="power_of_two",
):
    """Score = ``inflight`` + ``queued``, in requests. Only the two drawn replicas are candidates.

    Draws have streams of their own: stream 0 breaks the tie between the two.
    """

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        loaded = load_candidates(fleet)
        names = sorted(candidate.replica for candidate in loaded)
        drawn = {names[place] for place in _drawn_places(request, len(fleet))}
        candidates = tuple(candidate for candidate in loaded if candidate.replica in drawn)
        winner = draw_near_best(candidates, 0.0, request)
        return Decision(
            replica=winner.replica,
            reason=Reason.RULE,
            predicted_cached_tokens=winner.cached_tokens,
            predicted_lower_tier_tokens=winner.lower_tier_tokens,
            candidates=candidates,
        )


def _drawn_places(request: RoutingRequest, fleet_size: int) -> set[int]:
    """Return two distinct places, every pair as likely; the only one in a fleet of one."""
    first = draw_below(fleet_size, request, _FIRST_DRAW)
    if fleet_size == 1:
        return {first}
    second = draw_below(fleet_size - 1, request, _SECOND_DRAW)
    return {first, second if second < first else second + 1}
