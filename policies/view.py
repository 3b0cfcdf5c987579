"""How a replica's books become what a policy sees: the same in the router and in a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from policies.model import ReplicaView
from state.model import ReplicaLoad

if TYPE_CHECKING:
    from state.model import LeaseTotals, ReplicaId, ReplicaWork


def unexplained_queue(load: ReplicaLoad | None, inflight: int) -> int | None:
    """Return how many requests wait on the engine beyond those that leases explain.

    None when the engine does not tell. The engine's own counts include our requests, so only what
    exceeds them is somebody else's.
    """
    if load is None or load.queued is None:
        return None
    return max(0, min(load.queued, load.queued + (load.running or 0) - inflight))


class Warmth(Struct, frozen=True, gc=False):
    """What a replica holds of a prompt, in tokens; see ``ReplicaView`` for each."""

    cached_tokens: int = 0
    pending_tokens: int = 0
    lower_tier_tokens: int = 0
    placed_tokens: int = 0


class Facts(Struct, frozen=True):
    """What is known of a replica besides our own leases; see ``ReplicaView`` for each."""

    load: ReplicaLoad | None = None
    speed: float = 1.0
    held_tokens: int = 0
    capacity_tokens: int | None = None
    can_fetch: bool = False
    resident_tokens: int | None = None


def view_of(
    replica: ReplicaId,
    work: ReplicaWork,
    foreign: LeaseTotals | None,
    warmth: Warmth,
    facts: Facts,
) -> ReplicaView:
    """Return the view of a replica: this router's ``work`` there and that of the others."""
    inflight, prefilling = work.inflight, work.prefilling
    backlog_tokens, backlog_ms = work.backlog_tokens, work.backlog_ms
    if foreign is not None:
        inflight += foreign.inflight
        prefilling += foreign.prefilling
        backlog_tokens += foreign.uncached_tokens
        backlog_ms += foreign.backlog_ms
    load = facts.load
    return ReplicaView(
        replica,
        inflight,
        unexplained_queue(load, inflight) if load is not None else None,
        work.recent_assignments,
        warmth.cached_tokens,
        warmth.pending_tokens,
        warmth.lower_tier_tokens,
        prefilling,
        backlog_tokens,
        backlog_ms,
        work.prefill_load,
        facts.speed,
        facts.held_tokens,
        work.hold_s,
        facts.capacity_tokens,
        load.running if load is not None else None,
        load.queued if load is not None else None,
        load.kv_used_fraction if load is not None else None,
        warmth.placed_tokens,
        facts.resident_tokens,
        facts.can_fetch,
    )
