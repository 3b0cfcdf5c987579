"""Mooncake's conductor: the least estimated time to first token, copying the longest prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, structs

from policies.baselines.ballot import candidate_of, decided
from policies.prefill import PrefillCost

if TYPE_CHECKING:
    from policies.model import Candidate, Decision, ReplicaView, RoutingRequest


class Mooncake(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mooncake"
):
    """Algorithm 1 of Mooncake (FAST 2025), for replicas that prefill and decode themselves.

        score = transfer + queue + prefill(prompt - prefix)                              [ms]

    ``queue`` is the backlog. Where the longest prefix that another replica can give is over
    ``balancing_threshold`` times the replica's own, ``prefix`` is the longest and ``transfer`` the
    copy of the difference, else its own and 0. Only replicas that fetch from each other
    (``can_fetch``) copy; the chosen one is then told from whom. A copy stays, and that is how a hot
    prefix spreads: the rule has no notion of popularity, and cold replicas idle until the warm
    ones queue. Random among equals.

    Held is what any tier holds and what is on its way, as in its pool; loading it from a lower tier
    costs nothing. The paper does not publish its threshold: 1.25 is ours, low, so that little is
    computed that a copy would save. ``transfer_token_ms``: 128 KiB per token at 100 Gbit/s, the
    rate from which on it finds transfers useful. Nothing is rejected: there is no TTFT objective.
    """

    prefill: PrefillCost = PrefillCost()
    balancing_threshold: Annotated[float, Meta(ge=1)] = 1.25
    transfer_token_ms: Annotated[float, Meta(ge=0)] = 0.0105

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        prompt_tokens = request.prompt_tokens
        own = {view.replica: min(_held_tokens(view), prompt_tokens) for view in fleet}
        givers = [view for view in fleet if view.can_fetch]
        givers.sort(key=lambda view: (-own[view.replica], view.inflight, view.replica))
        longest = own[givers[0].replica] if givers else 0
        copying = {
            view.replica
            for view in givers
            if longest > self.balancing_threshold * own[view.replica]
        }
        candidates = tuple(
            self._candidate(
                view,
                prompt_tokens,
                own[view.replica],
                longest if view.replica in copying else own[view.replica],
            )
            for view in fleet
        )
        held = {replica: float(tokens) for replica, tokens in own.items()}
        decision = decided(request, candidates, held)
        chosen = decision.replica
        return structs.replace(
            decision,
            predicted_wait_ms=next(view.backlog_ms for view in fleet if view.replica == chosen),
            kv_source=givers[0].replica if chosen in copying else None,
        )

    def _candidate(
        self, view: ReplicaView, prompt_tokens: int, own_tokens: int, prefix_tokens: int
    ) -> Candidate:
        return candidate_of(
            view,
            {
                "transfer": self.transfer_token_ms * (prefix_tokens - own_tokens),
                "queue": view.backlog_ms,
                "prefill": self.prefill.ms(prompt_tokens - prefix_tokens, prefix_tokens),
            },
        )


def _held_tokens(view: ReplicaView) -> int:
    return view.cached_tokens + view.lower_tier_tokens
