"""Hand-made snapshots for policies, and what a decision on them says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.model import Decision, Policy, ReplicaView, RoutingRequest
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.model import Candidate

DRAWS = 64
"""So many decisions show all of a few equals: one of two stays away with probability 2^-63."""


def view(name: str, inflight: int = 0, **facts: Any) -> ReplicaView:
    return ReplicaView(replica=ReplicaId(name), inflight=inflight, **facts)


def asked(prompt_tokens: int, ordinal: int = 0, **facts: Any) -> RoutingRequest:
    return RoutingRequest(ordinal=ordinal, seed=7, prompt_tokens=prompt_tokens, **facts)


def decide(policy: Policy, request: RoutingRequest, *fleet: ReplicaView) -> Decision:
    decision = policy.pick(request, fleet)
    assert decision is not None
    return decision


def drawn(policy: Policy, prompt_tokens: int, *fleet: ReplicaView) -> set[str]:
    """Return everyone who is chosen as the ordinal goes on."""
    return {
        decide(policy, asked(prompt_tokens, ordinal), *fleet).replica for ordinal in range(DRAWS)
    }


def scores(decision: Decision) -> dict[str, float]:
    return {candidate.replica: candidate.score for candidate in decision.candidates}


def terms(decision: Decision, name: str) -> dict[str, float]:
    return one_of(decision.candidates, name).terms


def one_of(candidates: Sequence[Candidate], name: str) -> Candidate:
    return next(candidate for candidate in candidates if candidate.replica == name)
