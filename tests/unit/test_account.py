"""The report of all tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.account import MOST_TENANTS, OTHER, kv_report
from sidecar.cache import PagedCache
from sidecar.scheduler import Scheduler
from sidecar.step import SchedulerLimits
from support.engine_rig import EngineRig

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.report import KvReport

LONG = range(17)


def _report(cache: PagedCache) -> KvReport:
    return kv_report(Scheduler(cache, SchedulerLimits()), 100, None)


def test_free_runs_and_fragmentation_follow_from_the_pages_in_use() -> None:
    cache = PagedCache(8, 4)
    pages = cache.pool.take(5).pages
    cache.pool.release(pages[1:3])
    (device,) = _report(cache).tiers
    assert (device.states["free"], device.largest_free_run_pages) == (5, 3)
    assert device.fragmentation == 1 - 3 / 5
    cache.pool.take(5)
    (device,) = _report(cache).tiers
    assert (device.largest_free_run_pages, device.fragmentation) == (0, 0.0)


def test_tenants_are_named_as_far_as_the_bound_and_the_rest_is_added_up() -> None:
    cache = PagedCache(64, 4)
    for number in range(MOST_TENANTS + 3):
        cache.pool.take(1 + (number < 3), f"tenant-{number}")
    cache.pool.take(4)
    (device,) = _report(cache).tiers
    assert len(device.tenants) == MOST_TENANTS + 1
    assert all(device.tenants[f"tenant-{number}"]["allocated"] == 2 for number in range(3))
    assert device.tenants[OTHER]["allocated"] == 3
    named_pages = sum(sum(states.values()) for states in device.tenants.values())
    assert named_pages == sum(device.states.values()) - device.states["free"] - 4


async def test_every_tier_reports_what_moved_through_it(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=5, host_slots=5, disk_slots=64)
    page_bytes = rig.runner.page_bytes
    async with rig.running():
        await rig.answer(LONG)
        for number in range(1, 4):
            await rig.answer(range(1000 * number, 1000 * number + 17))
            await rig.settled()
        await rig.answer(LONG)
        await rig.settled()
        device, host, disk = rig.engine.kv_report().tiers
        for tier in (device, host, disk):
            assert sum(tier.states.values()) == tier.total_pages
            assert tier.page_bytes == page_bytes
        assert [tier.tier for tier in (device, host, disk)] == ["device", "host", "disk"]
        assert host.moved_in_bytes == rig.runner.saved_pages * page_bytes
        assert disk.moved_in_bytes == disk.states["evictable"] * page_bytes
        assert (disk.hits, disk.hit_pages) == (1, 4)
        assert disk.moved_out_bytes == 4 * page_bytes
        assert disk.saved_ms > 0
        assert disk.spent_ms > 0
        assert host.hits == device.hits == 0
        assert host.latency_ms is disk.latency_ms is None
        assert rig.mover is not None
        for _ in range(3):
            rig.mover._costs.observe_fetch("disk", 4, 0.02)
        measured = rig.engine.kv_report().tiers[2]
        assert measured.bytes_per_s is not None
        assert measured.latency_ms is not None
        taken_ms = measured.latency_ms + 4e3 * page_bytes / measured.bytes_per_s
        assert taken_ms == pytest.approx(20, rel=0.2)
        await rig.answer(LONG)
        assert (rig.engine.kv_report().tiers[0].hits, disk.dropped) == (1, 0)
    rig.proven()
