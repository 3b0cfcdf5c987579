"""AIBrix's prefix-cache policy: the longest match that is not much busier than the fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, Struct

from policies.baselines.ballot import by_load, candidate_of, decided
from policies.load import mean_of

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest

Amount = Annotated[float, Meta(ge=0, le=1e9)]


class AIBrix(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="aibrix"
):
    """``prefix-cache`` of AIBrix's gateway (vllm-project/aibrix, 2026).

    Candidates hold some of the prompt and have at most ``mean + deviations * sigma`` requests. The
    highest whole percentage wins, equals by fewest requests (``load`` counts for less than a
    percent), then by draw. Without candidates: the fewest requests of all.

    Gate: when the busiest has at least ``gate_gap`` requests more than the idlest, and over
    ``gate_factor * (mean + 1)``, only the idlest may be candidates: the fleet's warm replicas are
    out, a sigma or not. Earlier releases had the gap of 8 alone (``gate_factor`` 0).

    Requests are those the gateway has in flight, here over all routers; the match is its own
    record of placements (the index of KV events is an option there).
    """

    uses_placements: ClassVar[bool] = True
    """Knows caches by the placements of this router alone."""

    gate_gap: Amount = 8
    gate_factor: Amount = 2.0
    deviations: Amount = 1.0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        loads = [float(view.inflight) for view in fleet]
        mean, most, least = mean_of(loads), max(loads), min(loads)
        sigma = mean_of([(load - mean) ** 2 for load in loads]) ** 0.5
        limit = mean + self.deviations * sigma
        if most - least >= self.gate_gap and most > self.gate_factor * (mean + 1):
            limit = least
        prompt_tokens = max(1, request.prompt_tokens)
        held = {
            view.replica: float(min(100, 100 * view.placed_tokens // prompt_tokens))
            for view in fleet
        }
        candidates = tuple(
            candidate_of(view, {"match": -held[view.replica], "load": view.inflight / (1.0 + most)})
            for view in fleet
            if view.placed_tokens > 0 and view.inflight <= limit
        )
        return decided(request, candidates or by_load(fleet, loads), held)
