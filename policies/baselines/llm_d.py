"""llm-d's scheduling profiles: weighted scores, and the filter for sticky prefixes.

Rules and defaults: llm-d-router and its guides, 2026. Each scorer gives 0 to 1, the weighted sum
is maximised (negated here), and the max-score picker draws among equals. ``queue`` is
``(max - waiting) / (max - min)``, 1 where all are equal, so one waiting request more than
nobody weighs as much as a hundred; ``kv`` is ``1 - used part``. Both are the engines' own reports,
as old as the last scrape: until the next one, every router sends everything to the same replica.

The trained latency predictor is a model and no formula: there is no baseline of it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.baselines.signal import (
    confirmed_tokens,
    part_of_prompt,
    reported_kv_use,
    reported_waiting,
)

if TYPE_CHECKING:
    from policies.model import Candidate, Decision, ReplicaView, RoutingRequest
    from state.model import ReplicaId

Weight = Annotated[float, Meta(ge=0, le=1_000)]
Part = Annotated[float, Meta(ge=0, le=1)]


class LlmD(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="llm_d"
):
    """The usual profile, 3 : 2 : 2, over the approximate prefix record of the router itself.

    ``prefix`` is the part of the prompt that this router placed there; what the engine evicted
    since then still counts.
    """

    uses_placements: ClassVar[bool] = True
    """Knows caches by the placements of this router alone."""

    w_prefix: Weight = 3.0
    w_queue: Weight = 2.0
    w_kv: Weight = 2.0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        held = {view.replica: part_of_prompt(view.placed_tokens, request) for view in fleet}
        weights = (self.w_prefix, self.w_queue, self.w_kv)
        return decided(request, _weighed(fleet, held, weights), held)


class LlmDPrecise(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="llm_d_precise",
):
    """The profile with the index of KV events, 2 : 1 : 1.

    ``prefix`` is the part of the prompt that events confirm, what follows in a lower tier at
    ``lower_tier_credit``. Speculative entries are off, as by default: a burst of one new prefix
    finds nobody warm.
    """

    w_prefix: Weight = 2.0
    w_queue: Weight = 1.0
    w_kv: Weight = 1.0
    lower_tier_credit: Part = 0.8

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        held = {view.replica: part_of_prompt(self._held_tokens(view), request) for view in fleet}
        weights = (self.w_prefix, self.w_queue, self.w_kv)
        return decided(request, _weighed(fleet, held, weights), held)

    def _held_tokens(self, view: ReplicaView) -> float:
        lower = 0 if view.pending_tokens else view.lower_tier_tokens  # else behind a gap
        return confirmed_tokens(view) + self.lower_tier_credit * lower


class LlmDSticky(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="llm_d_sticky",
):
    """``prefix-cache-affinity-filter``, then the least tokens to prefill (``token-load-scorer``).

    Replicas that hold at least ``affinity_threshold`` of the prompt are the only candidates, unless
    the best of them has a backlog of ``max_penalty_ms`` more than the best of the others (0: never)
    at ``prefill_tokens_per_s``. Score: the predicted TTFT, backlog and uncached prompt at that
    rate. The default rate is llm-d's, of a 32B model on two H100. Below the threshold a long
    match still counts as fewer tokens, and up to the penalty a queue does not count at all.

    Backlog: uncached prompt tokens without a first byte yet, which is what llm-d's in-flight tokens
    are for streams. Exploration (probability 0 by default) is left out.
    """

    affinity_threshold: Part = 0.8
    max_penalty_ms: Annotated[float, Meta(ge=0)] = 18_000.0
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] = 15_928.0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        held = {view.replica: part_of_prompt(confirmed_tokens(view), request) for view in fleet}
        token_ms = 1e3 / self.prefill_tokens_per_s
        candidates = tuple(
            candidate_of(
                view,
                {
                    "queue": token_ms * view.backlog_tokens,
                    "prefill": token_ms * max(0, request.prompt_tokens - confirmed_tokens(view)),
                },
            )
            for view in self._kept(fleet, held, token_ms)
        )
        return decided(request, candidates, held)

    def _kept(
        self, fleet: tuple[ReplicaView, ...], held: dict[ReplicaId, float], token_ms: float
    ) -> tuple[ReplicaView, ...]:
        """Return those that hold enough of the prompt; all where none does or they are too busy."""
        sticky = tuple(view for view in fleet if held[view.replica] >= self.affinity_threshold)
        if not sticky or len(sticky) == len(fleet) or self.max_penalty_ms == 0:
            return sticky or fleet
        others = [view for view in fleet if held[view.replica] < self.affinity_threshold]
        least = min(view.backlog_tokens for view in others)
        penalty_ms = token_ms * (min(view.backlog_tokens for view in sticky) - least)
        return fleet if penalty_ms > self.max_penalty_ms else sticky


def _weighed(
    fleet: tuple[ReplicaView, ...],
    held: dict[ReplicaId, float],
    weights: tuple[float, float, float],
) -> tuple[Candidate, ...]:
    """Return the candidates by the weighted, negated scores of prefix, queue and KV use."""
    w_prefix, w_queue, w_kv = weights
    waiting = reported_waiting(fleet)
    most = max(waiting)
    spread = most - min(waiting)
    return tuple(
        candidate_of(
            view,
            {
                "prefix": -w_prefix * held[view.replica],
                "queue": -w_queue * ((most - queue) / spread if spread else 1.0),
                "kv": -w_kv * (1.0 - used),
            },
        )
        for view, queue, used in zip(fleet, waiting, reported_kv_use(fleet), strict=True)
    )
