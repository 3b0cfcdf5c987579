"""What the engine tells of its KV pages at one moment: values only.

Pages of a tier are free or in one of five states (see ``sidecar.pool``); ``states`` adds up to
``total_pages``. ``tenants`` splits the states among tenants, by digest: at most 16 and ``other``;
what is missing there belongs to no tenant.
"""

from __future__ import annotations

from msgspec import Struct, field


class TierReport(Struct, frozen=True, kw_only=True):
    """One tier, counted since the start.

    ``hits`` are look-ups that found a prefix here, ``hit_pages`` the pages of these.
    ``moved_in_bytes`` came from the tier above and ``moved_out_bytes`` went back to the device.
    ``saved_ms`` is the prefill that was not computed, ``spent_ms`` what moving the pages took.
    ``dropped`` counts pages that were not taken in, because there was no room or time.
    ``fragmentation`` is 1 - largest free run / free pages, 0 where nothing is free.
    ``latency_ms`` and ``bytes_per_s`` are what a fetch from here takes, as measured; None for the
    device, and until something was fetched three times.
    """

    tier: str
    page_bytes: int
    total_pages: int
    states: dict[str, int]
    tenants: dict[str, dict[str, int]] = field(default_factory=dict)
    largest_free_run_pages: int = 0
    fragmentation: float = 0.0
    latency_ms: float | None = None
    bytes_per_s: float | None = None
    hits: int = 0
    hit_pages: int = 0
    moved_in_bytes: int = 0
    moved_out_bytes: int = 0
    saved_ms: float = 0.0
    spent_ms: float = 0.0
    dropped: int = 0


class PeerReport(Struct, frozen=True, kw_only=True):
    """What was fetched from other workers since the start, in the terms of ``TierReport``."""

    hits: int = 0
    hit_pages: int = 0
    moved_out_bytes: int = 0
    saved_ms: float = 0.0
    spent_ms: float = 0.0
    latency_ms: float | None = None
    bytes_per_s: float | None = None


class KvReport(Struct, frozen=True):
    """All tiers, the device first and each below the one before; ``peers`` None: none are asked."""

    tiers: list[TierReport]
    peers: PeerReport | None = None
