"""How long things known about the fleet stay true, and how often they are renewed."""

from __future__ import annotations

from msgspec import Struct


class StoreTiming(Struct, frozen=True, kw_only=True):
    """Times to live in the state store; all processes of a deployment use the same.

    ``residency_ttl_s`` is the mean: each key's own is drawn from 0.8 to 1.2 of it, so that what was
    written together does not expire together. ``residency_cap_s`` is the longest that heartbeats
    and changes keep what one announcement of a cache wrote; the sidecar announces again before.
    ``facts_ttl_s`` is that of what a sidecar detected of its engine.
    """

    record_ttl_s: float = 5.0
    load_ttl_s: float = 3.0
    residency_ttl_s: float = 3600.0
    residency_cap_s: float = 86_400.0
    lease_ttl_s: float = 2.5
    facts_ttl_s: float = 30.0


class MirrorTiming(Struct, frozen=True, kw_only=True):
    """The rhythm of a mirror's background work.

    Leases are exchanged every ``lease_interval_s`` while there are other routers, and else looked
    for every ``lease_alone_s``.
    ``grace_s`` is how long a replica stays known that the store itself has forgotten. A copy is
    ``stale`` from the age ``stale_after_s`` on and not believed from ``local_after_s`` on; it is
    ``live`` again after ``live_after_s`` without any failure.
    """

    registry_interval_s: float = 0.25
    lease_interval_s: float = 0.05
    lease_alone_s: float = 0.5
    lease_heartbeat_s: float = 1.0
    block_s: float = 0.1
    stale_after_s: float = 1.0
    live_after_s: float = 1.0
    local_after_s: float = 60.0
    grace_s: float = 30.0
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 5.0

    @property
    def longest_block_s(self) -> float:
        """How long a read of change streams waits where none is about to be added to them."""
        return max(self.block_s, self.registry_interval_s)


class LookupTiming(Struct, frozen=True, kw_only=True):
    """How long a request waits for a direct lookup, and when lookups rest.

    They rest after ``max_errors`` in a row or ``max_silence_s`` without an answer in time; then one
    is tried after each backoff.
    """

    wait_s: float = 0.005
    max_errors: int = 3
    max_silence_s: float = 1.0
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 5.0
