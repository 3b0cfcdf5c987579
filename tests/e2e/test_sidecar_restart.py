"""A sidecar that starts again beside an engine that goes on, as routers see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support.fleet import FleetPlan, LocalFleet, until

if TYPE_CHECKING:
    from pathlib import Path

RAMP_S = 1.0


def slow_starts(fleet: LocalFleet) -> int:
    """Return how often the router began a replica's slow start."""
    log = fleet.routers[0].child.log.read_text(encoding="utf-8", errors="replace")
    return log.count("w0: slow start")


async def is_back(fleet: LocalFleet, before: str | None) -> bool:
    """Return whether the replica is there, in another generation."""
    seen = await fleet.seen()
    return (
        "w0" in seen and bool(seen["w0"]["up"]) and seen["w0"]["generation"] not in {before, None}
    )


async def test_a_sidecar_that_starts_again_does_not_make_its_replica_cold(tmp_path: Path) -> None:
    """Killed, and stopped; an engine that starts again does."""
    plan = FleetPlan(replicas=2, config={"health": {"slow_start_s": RAMP_S, "interval_s": 0.2}})
    async with LocalFleet(tmp_path, plan) as fleet:
        await asyncio.sleep(2 * RAMP_S)  # before, the router takes nobody for a newcomer
        replica = fleet.replicas[0]
        for is_killed in (True, False):
            before = (await fleet.seen())["w0"]["generation"]
            if is_killed:
                replica.sidecar.process.kill()
            else:
                replica.sidecar.process.terminate()
            await asyncio.to_thread(replica.sidecar.process.wait)
            if not is_killed:
                await until(lambda: has_left(fleet), "the replica left")
            replica.sidecar = await fleet.start_sidecar("w0", replica.url).ready()
            await until(lambda old=before: is_back(fleet, old), "the replica is back")  # type: ignore[misc]
            assert slow_starts(fleet) == 0
        port, before = replica.port, (await fleet.seen())["w0"]["generation"]
        replica.worker.process.kill()
        await asyncio.to_thread(replica.worker.process.wait)
        replica.worker = await fleet.start_worker("w0", "--port", str(port)).ready()
        await until(lambda: is_back(fleet, before), "the engine is back")
        await until(lambda: began(fleet), "its slow start")


async def has_left(fleet: LocalFleet) -> bool:
    """Return whether the router has forgotten the replica."""
    return "w0" not in await fleet.seen()


async def began(fleet: LocalFleet) -> bool:
    """Return whether a slow start was told."""
    return slow_starts(fleet) > 0
