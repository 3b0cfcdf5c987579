"""Two policies on one snapshot: how each scored both choices, and what each choice would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.model import Candidate

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView
    from policies.prefill import PrefillCost


class Weighed(Struct, frozen=True, kw_only=True):
    """One policy's choice, and how it scored both: lowest wins, in that policy's unit.

    A candidate is None where the policy did not score that replica.
    """

    replica: str
    reason: str
    cached_tokens: int
    lower_tier_tokens: int
    wait_ms: float | None
    own: Candidate | None
    other: Candidate | None


def weighed(decision: Decision, other: str) -> Weighed:
    """Return a choice beside the replica that the other policy chose."""
    return Weighed(
        replica=decision.replica,
        reason=decision.reason.value,
        cached_tokens=decision.predicted_cached_tokens,
        lower_tier_tokens=decision.predicted_lower_tier_tokens,
        wait_ms=decision.predicted_wait_ms,
        own=scored(decision, decision.replica),
        other=scored(decision, other),
    )


def scored(decision: Decision, replica: str) -> Candidate | None:
    """Return how the policy scored ``replica``; None where it did not."""
    for candidate in decision.candidates:
        if candidate.replica == replica:
            return candidate
    return None


def predicted_ttft_ms(view: ReplicaView, prompt_tokens: int, cost: PrefillCost) -> float:
    """Return the time to the first token on a replica: one yardstick for every policy's choice.

    That is the prefill before it and its own, at the replica's speed. What lies in a lower tier is
    fetched at no cost, as in the router's leases.
    """
    held = view.cached_tokens + view.lower_tier_tokens
    left_tokens = max(min(1, prompt_tokens), prompt_tokens - held)
    work_ms = cost.ms(left_tokens, prompt_tokens - left_tokens)
    return (view.backlog_ms + work_ms) / view.speed
