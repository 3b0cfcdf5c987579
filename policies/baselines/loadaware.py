"""Loadaware: the part of the prompt that is held, less the load above the fleet's mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.baselines.signal import confirmed_tokens, part_of_prompt
from policies.load import mean_of

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest


class LoadAware(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="loadaware"
):
    """``loadaware`` of vLLM's production-stack (pull request 1035, August 2026), negated.

        score = -held_tokens / prompt_tokens + beta * (load - mean) / max(1, mean)

    With the default ``beta`` a load of twice the mean costs as much as the whole prompt is worth,
    whether that prompt has 100 tokens or 100,000: the form has no unit of work. The load is the
    router's own count of requests in flight, here over all routers; the match is what the
    cache controller says, here the confirmed tokens. Random among equals.
    """

    beta: Annotated[float, Meta(ge=0, le=1_000)] = 1.0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        mean = mean_of([view.inflight for view in fleet])
        per_request = self.beta / max(1.0, mean)
        held = {view.replica: part_of_prompt(confirmed_tokens(view), request) for view in fleet}
        candidates = tuple(
            candidate_of(
                view, {"match": -held[view.replica], "load": per_request * (view.inflight - mean)}
            )
            for view in fleet
        )
        return decided(request, candidates, held)
