"""What a policy sees and what it answers: frozen values, of which it is a pure function."""

from __future__ import annotations

import enum
from typing import Protocol

from msgspec import Struct

from state.model import ReplicaId


class Reason(enum.StrEnum):
    """Why a replica was chosen; the same label goes to metric, header, log and trace."""

    PREFIX = "prefix"
    """It holds the longest part of the prompt, and its queue does not cost more."""
    SPILL = "spill"
    """Another replica holds more of the prompt; this one costs less, or is to hold it too."""
    LOAD = "load"
    """Nobody holds any of the prompt: the load decided."""
    RULE = "rule"
    """The policy does not look at prefixes (round robin, random and the like)."""


class ReplicaView(Struct, frozen=True, kw_only=True):
    """One candidate. The fleet holds only replicas that may be chosen: live, not draining.

    ``inflight`` counts the open leases of all routers, this request not included. ``queued`` counts
    requests waiting on the engine that no lease explains; None when the engine's load is unknown.
    ``recent_assignments`` is this router's decayed count of requests sent here. ``cached_tokens``
    are the prompt tokens the replica would not compute; ``pending_tokens`` of these are known only
    from placements that the engine has not confirmed yet. ``lower_tier_tokens`` follow them, as far
    as the replica holds the prompt without a gap: it has to fetch them from host memory or disk.
    """

    replica: ReplicaId
    inflight: int = 0
    queued: int | None = None
    recent_assignments: float = 0.0
    cached_tokens: int = 0
    pending_tokens: int = 0
    lower_tier_tokens: int = 0


class Heat(Struct, frozen=True, kw_only=True):
    """The hot prefix that a prompt starts with: where its traffic forks, and who should hold it."""

    prefix_tokens: int
    rate_per_s: float
    holders: frozenset[ReplicaId]


class RoutingRequest(Struct, frozen=True, kw_only=True):
    """One decision's input besides the fleet. ``seed`` and ``ordinal`` are drawn at the edge."""

    ordinal: int
    seed: int
    prompt_tokens: int
    heat: Heat | None = None


class Candidate(Struct, frozen=True, kw_only=True):
    """How one replica scored: lowest wins. ``terms`` sum to ``score``, in the policy's unit."""

    replica: ReplicaId
    score: float
    terms: dict[str, float]
    cached_tokens: int
    lower_tier_tokens: int = 0


class Decision(Struct, frozen=True, kw_only=True):
    """The chosen replica, why, and every candidate with its terms, in fleet order.

    ``predicted_lower_tier_tokens`` come on top of the cached ones: what the replica would fetch.
    """

    replica: ReplicaId
    reason: Reason
    predicted_cached_tokens: int
    candidates: tuple[Candidate, ...]
    predicted_lower_tier_tokens: int = 0


class Policy(Protocol):
    """A rule that picks one replica of a snapshot."""

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        ...
