"""What every baseline does with its scores: candidates from terms, and why one was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.draw import draw_near_best
from policies.model import Candidate, Decision, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from policies.model import ReplicaView, RoutingRequest
    from state.model import ReplicaId


def candidate_of(view: ReplicaView, terms: dict[str, float]) -> Candidate:
    """Return the candidate whose score is the sum of ``terms``; a rule that maximises negates."""
    return Candidate(
        replica=view.replica,
        score=sum(terms.values()),
        terms=terms,
        cached_tokens=view.cached_tokens,
        lower_tier_tokens=view.lower_tier_tokens,
    )


def by_load(fleet: Iterable[ReplicaView], loads: Iterable[float]) -> tuple[Candidate, ...]:
    """Return the candidates of a rule that has fallen back to the load alone."""
    return tuple(
        candidate_of(view, {"load": float(load)}) for view, load in zip(fleet, loads, strict=True)
    )


def decided(
    request: RoutingRequest,
    candidates: tuple[Candidate, ...],
    held: Mapping[ReplicaId, float] | None = None,
) -> Decision:
    """Return the decision for the lowest score, one of them drawn where several are equal.

    ``held``: how much of the prompt the rule believes each replica to hold, those included that it
    left out. None for a rule that does not look.
    """
    winner = draw_near_best(candidates, 0.0, request)
    return Decision(
        replica=winner.replica,
        reason=Reason.RULE if held is None else _reason(winner.replica, held),
        predicted_cached_tokens=winner.cached_tokens,
        predicted_lower_tier_tokens=winner.lower_tier_tokens,
        candidates=candidates,
    )


def _reason(chosen: ReplicaId, held: Mapping[ReplicaId, float]) -> Reason:
    most = max(held.values())
    if most <= 0 or min(held.values()) == most:
        return Reason.LOAD
    return Reason.PREFIX if held[chosen] == most else Reason.SPILL
