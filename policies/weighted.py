"""The weighted mix of load and cold prefix: one score per replica, the lowest wins.

    score = w_queue  * (inflight + queued) / max(1, fleet mean of inflight + queued)
          + w_prefix * uncached_tokens / tokens_scale
          + w_recent * min(2, recent_assignments / max(1, fleet mean of recent_assignments))

``uncached_tokens`` are those of the prompt that the replica does not hold, at least the last one; a
token that only its host memory or disk holds counts as held by ``lower_tier_credit``.

A score of 1 is one average queue, or ``tokens_scale`` prompt tokens to compute. The recent term
keeps paced clients, who never meet a queue, from pinning one replica. Its ratio is capped, because
a lone session in a fleet of n has n times the mean: the bound makes the whole term worth at most
``2 * w_recent * tokens_scale`` tokens of prefix, in a fleet of any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct

from policies.draw import draw_near_best
from policies.load import assumed_queues, mean_of
from policies.model import Candidate, Decision, Reason

if TYPE_CHECKING:
    from policies.model import ReplicaView, RoutingRequest

RECENT_RATIO_CAP: Final = 2.0

Weight = Annotated[float, Meta(ge=0, le=1_000)]


class Weighted(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="weighted"
):
    """Least (queue + cold prefix + recent share), random among near-ties.

    ``tokens_scale``: how many uncached tokens weigh as much as one average queue. ``tie_margin``:
    scores this close to the lowest are equal. ``lower_tier_credit``: what a token that has to be
    fetched from a lower tier counts beside one in GPU memory; 0 lets lower tiers count for nothing.
    """

    w_queue: Weight = 1.0
    w_prefix: Weight = 1.0
    w_recent: Weight = 0.2
    tokens_scale: Annotated[float, Meta(gt=0, le=1e9)] = 2_000.0
    tie_margin: Annotated[float, Meta(ge=0, le=10)] = 0.02
    lower_tier_credit: Annotated[float, Meta(ge=0, le=1)] = 0.7

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        candidates, held_tokens = self._scored(request, fleet)
        winner = draw_near_best(candidates, self.tie_margin, request)
        return Decision(
            replica=winner.replica,
            reason=self._reason(winner, held_tokens),
            predicted_cached_tokens=winner.cached_tokens,
            predicted_lower_tier_tokens=winner.lower_tier_tokens,
            candidates=candidates,
        )

    def _scored(
        self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
    ) -> tuple[tuple[Candidate, ...], list[float]]:
        """Return the candidates, and the tokens that count as held by each.

        A replica that is to hold a hot prefix is scored as if it held it already: among the
        holders, cold and warm, the load decides. At least the last token is to compute.
        """
        queues = assumed_queues(fleet)
        loads = [view.inflight + queue for view, queue in zip(fleet, queues, strict=True)]
        per_request = self.w_queue / max(1.0, mean_of(loads))
        per_token = self.w_prefix / self.tokens_scale
        mean_recent = max(1.0, mean_of([view.recent_assignments for view in fleet]))
        per_share = self.w_recent
        prompt_tokens, heat = request.prompt_tokens, request.heat
        scored = []
        all_held_tokens = []
        for view, load in zip(fleet, loads, strict=True):
            held_tokens: float = view.cached_tokens
            if view.lower_tier_tokens:
                held_tokens = self._held_tokens(view)
            all_held_tokens.append(held_tokens)
            if heat is not None and view.replica in heat.holders:
                held_tokens = max(held_tokens, heat.prefix_tokens)
            queue = per_request * load
            prefix = per_token * max(1, prompt_tokens - held_tokens)
            recent = per_share * min(RECENT_RATIO_CAP, view.recent_assignments / mean_recent)
            scored.append(
                Candidate(
                    replica=view.replica,
                    score=queue + prefix + recent,
                    terms={"queue": queue, "prefix": prefix, "recent": recent},
                    cached_tokens=view.cached_tokens,
                    lower_tier_tokens=view.lower_tier_tokens,
                )
            )
        return tuple(scored), all_held_tokens

    def _held_tokens(self, one: ReplicaView | Candidate) -> float:
        return one.cached_tokens + self.lower_tier_credit * one.lower_tier_tokens

    def _reason(self, winner: Candidate, held_tokens: list[float]) -> Reason:
        most_tokens = max(held_tokens)
        if min(held_tokens) == most_tokens:
            return Reason.LOAD
        is_warmest = self._held_tokens(winner) == most_tokens
        return Reason.PREFIX if is_warmest else Reason.SPILL
