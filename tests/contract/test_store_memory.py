"""A server that is full, or set up so that it will be: told, counted, and read as before."""

from __future__ import annotations

import asyncio
import logging
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from sidecar.announce import Announcer
from sidecar.fold import PageFolder
from sidecar.metrics import SidecarMetrics
from state.client import command_client
from state.eviction_check import EvictionCheck
from state.fault import Fault
from state.mirror import Mirror
from state.model import LeaseTotals, RouterId, Rung
from state.redis_writer import RedisWriter
from support.announced import BASE, IDENTITY, chain, page
from support.fleet_state import A
from support.state_backend import SOON_STALE
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from support.state_backend import StateServer

_CHAIN = chain(2)


def _mirror(server: StateServer) -> Mirror:
    mirror = Mirror(
        server.settings, RouterId("r"), clock=time.monotonic, rng=Random(2), timing=SOON_STALE
    )
    mirror.server_check = EvictionCheck(server.url).run
    return mirror


async def test_writes_to_a_full_server_are_dropped_counted_and_told_once(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """R-09: reads go on, one line by router and sidecar each; after it all is announced again."""
    caplog.set_level(logging.INFO)
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
    announcer = Announcer(writer, clock=time.monotonic, rng=Random(1), heartbeat_interval_s=0.1)
    metrics = SidecarMetrics(A, lambda: announcer.failed_writes)
    folder = PageFolder(IDENTITY, 1)
    announcer.renew(BASE, folder)
    announcer.add(folder.apply([page(1)]))
    running = asyncio.create_task(announcer.run())
    try:
        async with _mirror(own_server) as mirror:
            await eventually(lambda: mirror.overlap(_CHAIN)[A].gpu_blocks == 1)
            caplog.clear()
            await own_server.command("CONFIG", "SET", "maxmemory", "1")
            announcer.add(folder.apply([page(2)]))
            mirror.publish_leases({A: LeaseTotals(inflight=1)})
            await eventually(lambda: mirror.freshness()[0] is Rung.STALE)
            await eventually(lambda: announcer.failed_writes > 2)
            reads = mirror._registry_beat._ended_rounds
            await eventually(lambda: mirror._registry_beat._ended_rounds > reads + 5)
            assert mirror.overlap(_CHAIN)[A].gpu_blocks == 1
            assert mirror.figures().faults[Fault.REFUSED] > 0
            told = [line for line in caplog.records if line.levelno >= logging.WARNING]
            assert sorted(line.name for line in told) == ["state.mirror", "warmroute.sidecar"]
            assert all("OutOfMemory" in line.getMessage() for line in told)
            await own_server.command("CONFIG", "SET", "maxmemory", "0")
            await eventually(lambda: mirror.overlap(_CHAIN)[A].gpu_blocks == 2)
            await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.aclose()
    counted = (
        f'warmroute_sidecar_failed_state_writes_total{{replica="a"}} {announcer.failed_writes}'
    )
    assert counted.encode() in metrics.render()


_WRONG = {
    "has no maxmemory": ("0", "volatile-lru"),
    "noeviction": ("100mb", "noeviction"),
    "volatile-ttl": ("100mb", "volatile-ttl"),
    "": ("100mb", "volatile-lru"),
}


@pytest.mark.parametrize("said", _WRONG)
async def test_settings_that_lose_or_refuse_are_warned_of_at_the_start(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    """R-10: once, whatever else happens to the connection."""
    limit, policy = _WRONG[said]
    await own_server.command("CONFIG", "SET", "maxmemory", limit)
    await own_server.command("CONFIG", "SET", "maxmemory-policy", policy)
    async with _mirror(own_server) as mirror:
        assert await mirror.settle(30)
        await own_server.command("CLIENT", "KILL", "TYPE", "normal")
        await mirror.settle(30)
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
    warned = [line.getMessage() for line in caplog.records if line.name == "state.eviction_check"]
    assert len(warned) == (said != "")
    assert all(said in line for line in warned)


async def test_every_node_of_a_cluster_is_looked_at_and_the_same_is_said_once(
    valkey_cluster: StateServer, caplog: pytest.LogCaptureFixture
) -> None:
    await valkey_cluster.flush()
    async with _mirror(valkey_cluster) as mirror:
        assert await mirror.settle(30)
    warned = [line for line in caplog.records if line.name == "state.eviction_check"]
    assert len(warned) == 1
