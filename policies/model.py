"""What a policy sees and what it answers: frozen values, of which it is a pure function.

What is made for each candidate is made by place on the hot path: by name, twenty fields cost five
times as much.
"""

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
    """Nobody holds more of the prompt than the others: the load decided."""
    RULE = "rule"
    """The policy does not look at prefixes (round robin, random and the like)."""


class ReplicaView(Struct, frozen=True, gc=False):
    """One candidate. The fleet holds only replicas that may be chosen: live, not draining.

    ``inflight`` counts the open leases of all routers, this request not included. ``queued`` counts
    requests waiting on the engine that no lease explains; None when the engine's load is unknown.
    ``recent_assignments`` is this router's decayed count of requests sent here. ``cached_tokens``
    are the prompt tokens the replica would not compute; ``pending_tokens`` of these are known only
    from placements that the engine has not confirmed yet. ``lower_tier_tokens`` follow them, as far
    as the replica holds the prompt without a gap: it has to fetch them from host memory or disk.

    Work, over the leases of all routers: ``prefilling`` of them have no first byte yet,
    ``backlog_tokens`` are the uncached prompt tokens of these, ``backlog_ms`` the time to prefill
    them at speed 1, less what the oldest has had. ``prefill_load`` is this router's decayed mean
    of prefill sent here, in ms per second. ``speed`` is learned: 2 computes twice as fast.

    Memory: ``held_tokens`` of the cache's ``capacity_tokens`` (None: unknown) are taken by requests
    in flight, for ``hold_s`` each in the mean (None: none ended yet). ``running``, ``waiting`` and
    ``kv_used_fraction`` are the engine's own report. ``placed_tokens`` of the prompt are known from
    this router's own placements alone, whatever the engine says; 0 where no rule asks for it.
    ``resident_tokens`` are known to be in GPU memory; None where no index of them is kept.
    """

    replica: ReplicaId
    inflight: int = 0
    queued: int | None = None
    recent_assignments: float = 0.0
    cached_tokens: int = 0
    pending_tokens: int = 0
    lower_tier_tokens: int = 0
    prefilling: int = 0
    backlog_tokens: int = 0
    backlog_ms: float = 0.0
    prefill_load: float = 0.0
    speed: float = 1.0
    held_tokens: int = 0
    hold_s: float | None = None
    capacity_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used_fraction: float | None = None
    placed_tokens: int = 0
    resident_tokens: int | None = None
    can_fetch: bool = False
    """It takes KV pages of a prefix from another replica that says so, and gives them."""


class Heat(Struct, frozen=True, kw_only=True):
    """The hot prefix that a prompt starts with: where its traffic forks, and who should hold it."""

    prefix_tokens: int
    rate_per_s: float
    holders: frozenset[ReplicaId]


class RoutingRequest(Struct, frozen=True):
    """One decision's input besides the fleet. ``seed`` and ``ordinal`` are drawn at the edge.

    ``popularity`` lists, shallow to deep, the places where the traffic of this prompt's prefixes
    forks: tokens up to there, and the requests of the last half minute that shared so much, this
    one included. ``session`` is what the client said its session is, else None. ``prefix_keys`` are
    the first blocks' ids as numbers, shallow to deep, for rules that hash a prefix.
    """

    ordinal: int
    seed: int
    prompt_tokens: int
    heat: Heat | None = None
    popularity: tuple[tuple[int, float], ...] = ()
    session: str | None = None
    prefix_keys: tuple[int, ...] = ()
    block_tokens: int = 64


class Candidate(Struct, frozen=True, gc=False):
    """How one replica scored: lowest wins. ``terms`` sum to ``score``, in the policy's unit."""

    replica: ReplicaId
    score: float
    terms: dict[str, float]
    cached_tokens: int
    lower_tier_tokens: int = 0


class Decision(Struct, frozen=True):
    """The chosen replica, why, and every candidate with its terms, in fleet order.

    ``predicted_lower_tier_tokens`` come on top of the cached ones: what the replica would fetch.
    """

    replica: ReplicaId
    reason: Reason
    predicted_cached_tokens: int
    candidates: tuple[Candidate, ...]
    predicted_lower_tier_tokens: int = 0
    predicted_wait_ms: float | None = None
    """Time until the prompt's own prefill begins there; None where the policy does not say."""
    kv_source: ReplicaId | None = None
    """The replica that the chosen one is to fetch KV pages from, where the choice counts on it."""


class Policy(Protocol):
    """A rule that picks one replica of a snapshot."""

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        ...
