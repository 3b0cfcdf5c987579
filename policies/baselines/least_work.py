"""Least work: the shortest queue of prompt tokens to compute; blind to what anyone holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.baselines.ballot import candidate_of, decided

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest


class LeastWork(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="least_work",
):
    """Score = ``backlog_tokens``: uncached prompt tokens sent there that have no first byte yet.

    The classic join-the-least-work rule, with the queued part of the ``least_load`` policy of SMG
    (smg-project/smg, 2026) as the work; its term for KV occupancy is left out. Random among equals.
    """

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        candidates = tuple(
            candidate_of(view, {"backlog": float(view.backlog_tokens)}) for view in fleet
        )
        return decided(request, candidates)
