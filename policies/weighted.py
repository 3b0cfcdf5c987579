"""The weighted mix of load and cold prefix: one score per replica, the lowest wins.

    score = w_queue  * (inflight + queued) / max(1, fleet mean of inflight + queued)
          + w_prefix * uncached_tokens / tokens_scale
          + w_recent * min(2, recent_assignments / max(1, fleet mean of recent_assignments))

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
    scores this close to the lowest are equal.
    """

    w_queue: Weight = 1.0
    w_prefix: Weight = 1.0
    w_recent: Weight = 0.2
    tokens_scale: Annotated[float, Meta(gt=0, le=1e9)] = 2_000.0
    tie_margin: Annotated[float, Meta(ge=0, le=10)] = 0.02

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        candidates = self._scored(request, fleet)
        winner = draw_near_best(candidates, self.tie_margin, request)
        return Decision(
            replica=winner.replica,
            reason=_reason(winner, candidates),
            predicted_cached_tokens=winner.cached_tokens,
            candidates=candidates,
        )

    def _scored(
        self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
    ) -> tuple[Candidate, ...]:
        queues = assumed_queues(fleet)
        loads = [view.inflight + queue for view, queue in zip(fleet, queues, strict=True)]
        per_request = self.w_queue / max(1.0, mean_of(loads))
        per_token = self.w_prefix / self.tokens_scale
        mean_recent = max(1.0, mean_of([view.recent_assignments for view in fleet]))
        per_share = self.w_recent
        scored = []
        for view, load in zip(fleet, loads, strict=True):
            queue = per_request * load
            prefix = per_token * _uncached_tokens(request, view)
            recent = per_share * min(RECENT_RATIO_CAP, view.recent_assignments / mean_recent)
            terms = {"queue": queue, "prefix": prefix, "recent": recent}
            score = queue + prefix + recent
            scored.append(
                Candidate(
                    replica=view.replica, score=score, terms=terms, cached_tokens=view.cached_tokens
                )
            )
        return tuple(scored)


def _uncached_tokens(request: RoutingRequest, view: ReplicaView) -> int:
    """Return the tokens to compute, at least the last one.

    A replica that is to hold a hot prefix counts as if it held it already: among the holders, cold
    and warm, the load decides.
    """
    cached_tokens = view.cached_tokens
    if request.heat is not None and view.replica in request.heat.holders:
        cached_tokens = max(cached_tokens, request.heat.prefix_tokens)
    return max(1, request.prompt_tokens - cached_tokens)


def _reason(winner: Candidate, candidates: tuple[Candidate, ...]) -> Reason:
    most_cached_tokens = max([candidate.cached_tokens for candidate in candidates])
    if most_cached_tokens == 0:
        return Reason.LOAD
    return Reason.PREFIX if winner.cached_tokens == most_cached_tokens else Reason.SPILL
