"""The report of all tiers: states, tenants, hits, bytes moved, time saved and spent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidecar.bandwidth import FIRST_FIT
from sidecar.report import KvReport, PeerReport, TierReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.bandwidth import TransferModel
    from sidecar.mover import Mover
    from sidecar.pool import PagePool
    from sidecar.scheduler import Scheduler
    from sidecar.tier import LowerTier

MOST_TENANTS: Final = 16
OTHER: Final = "other"


def kv_report(scheduler: Scheduler, page_bytes: int, mover: Mover | None) -> KvReport:
    """Return what the pools and the mover have counted."""
    cache = scheduler.cache
    device = _tier_report(
        cache.pool,
        page_bytes,
        hits=cache.hits,
        hit_pages=cache.hit_pages,
        saved_ms=cache.saved_ms,
    )
    reports = [device]
    if cache.exchange is not None and mover is not None:
        tiers = cache.exchange.tiers
        reports += [
            _lower_report(tier, page_bytes, mover)
            for tier in (tiers.host, tiers.disk)
            if tier is not None
        ]
    return KvReport(reports, None if mover is None else _peer_report(mover, page_bytes))


def _peer_report(mover: Mover, page_bytes: int) -> PeerReport:
    counts = mover.counts["peer"]
    return PeerReport(
        hits=counts.hits,
        hit_pages=counts.hit_pages,
        moved_out_bytes=counts.moved_out_pages * page_bytes,
        saved_ms=counts.saved_ms,
        spent_ms=counts.spent_ms,
        **_speed(mover.link("peer")),
    )


def _speed(link: TransferModel) -> dict[str, Any]:
    """Return latency and rate, once they are more than assumed."""
    if link.observations < FIRST_FIT:
        return {}
    return {"latency_ms": link.latency_ms, "bytes_per_s": link.bytes_per_s}


def _lower_report(tier: LowerTier, page_bytes: int, mover: Mover) -> TierReport:
    counts = mover.counts["host" if tier.name == "host" else "disk"]
    return _tier_report(
        tier.pool,
        page_bytes,
        hits=counts.hits,
        hit_pages=counts.hit_pages,
        saved_ms=counts.saved_ms,
        moved_in_bytes=counts.moved_in_pages * page_bytes,
        moved_out_bytes=counts.moved_out_pages * page_bytes,
        spent_ms=counts.spent_ms,
        **_speed(mover.link("host" if tier.name == "host" else "disk")),
        dropped=counts.dropped + tier.dropped,
    )


def _tier_report(pool: PagePool, page_bytes: int, **counted: Any) -> TierReport:
    largest_pages = pool.largest_free_run_pages()
    free_pages = pool.free_pages
    return TierReport(
        tier=pool.tier,
        page_bytes=page_bytes,
        total_pages=pool.total_pages,
        states=pool.states(),
        tenants=_bounded(pool.tenants()),
        largest_free_run_pages=largest_pages,
        fragmentation=1 - largest_pages / free_pages if free_pages else 0.0,
        **counted,
    )


def _bounded(tenants: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the tenants with the most pages, the rest added up."""
    named = {tenant: states for tenant, states in tenants.items() if tenant}
    ordered = sorted(named, key=lambda tenant: -sum(named[tenant].values()))
    shown = {tenant: named[tenant] for tenant in ordered[:MOST_TENANTS]}
    for tenant in ordered[MOST_TENANTS:]:
        rest = shown.setdefault(OTHER, dict.fromkeys(named[tenant], 0))
        for state, pages in named[tenant].items():
            rest[state] += pages
    return shown
