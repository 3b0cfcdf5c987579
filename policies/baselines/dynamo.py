"""NVIDIA Dynamo's KV router: blocks to prefill and blocks to decode, with equal weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.baselines.signal import confirmed_tokens

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest

Credit = Annotated[float, Meta(ge=0, le=10)]
Weight = Annotated[float, Meta(ge=0, le=1_000)]


class Dynamo(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="dynamo"
):
    """The cost of Dynamo's KV router (2026) at temperature 0, in blocks of the prompt's index.

        prefill = prefill_load_scale * max(0, (backlog + prompt - credited tokens) / block_tokens)
        decode  = (tokens of requests in flight + prompt) / block_tokens
        cost    = prefill + decode + active_request_weight * inflight

    ``overlap_credit`` per confirmed token, ``lower_tier_credit`` per token that follows in a lower
    tier (Dynamo: 0.75 for host memory, 0.25 for disk; a view does not tell them apart). A request
    that decodes weighs as much as one to prefill, block for block, so a long context far from its
    end drives away the prompts that share it. Random among equals.

    Left out: the decay of the credit (off by default), the credit of a shared cache, taints. Blocks
    that the prompt shares with requests in flight count again; Dynamo counts them once.
    """

    overlap_credit: Credit = 1.0
    lower_tier_credit: Credit = 0.75
    prefill_load_scale: Weight = 1.0
    active_request_weight: Weight = 0.0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        prompt_tokens, block = request.prompt_tokens, request.block_tokens
        held = {view.replica: self._credited_tokens(view) for view in fleet}
        candidates = tuple(
            candidate_of(
                view,
                {
                    "prefill": self.prefill_load_scale
                    * max(0.0, view.backlog_tokens + prompt_tokens - held[view.replica])
                    / block,
                    "decode": (view.held_tokens + prompt_tokens) / block,
                    "active": self.active_request_weight * view.inflight,
                },
            )
            for view in fleet
        )
        return decided(request, candidates, held)

    def _credited_tokens(self, view: ReplicaView) -> float:
        device = confirmed_tokens(view)
        lower = 0 if view.pending_tokens else view.lower_tier_tokens  # else behind a gap
        return self.overlap_credit * device + self.lower_tier_credit * lower
