"""A server that is read as ever and takes no writes: full, without replicas, a replica itself."""

from __future__ import annotations

import asyncio
import logging
import time
from random import Random

import msgspec
import pytest

from state.client import command_client
from state.mirror import Mirror
from state.model import LeaseTotals, RouterId, Rung
from state.redis_writer import RedisWriter
from state.store import StateError
from state.timing import StoreTiming
from support.fleet_state import A, batch, blocks, record
from support.running_clock import RunningClock
from support.state_backend import SOON_STALE
from support.valkey import ValkeyProcess, eventually

_TIMING = msgspec.structs.replace(SOON_STALE, grace_s=0.3)
_STORE_TIMING = StoreTiming(record_ttl_s=0.5)
_REFUSALS = {
    "OutOfMemory": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
    "ReadOnly": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.parametrize("refusal", _REFUSALS)
async def test_a_server_that_refuses_writes_empties_no_fleet(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    """Records lapse because no heartbeat is taken: that is no proof, however long it lasts."""
    caplog.set_level(logging.INFO, logger="state.mirror")
    refuse, allow = _REFUSALS[refusal]
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1), timing=_STORE_TIMING)
    async with (
        RunningClock() as clock,
        Mirror(
            own_server.settings,
            RouterId("r1"),
            clock=clock,
            rng=Random(3),
            timing=_TIMING,
            store_timing=_STORE_TIMING,
        ) as mirror,
    ):
        await writer.register(record())
        await writer.apply([batch(1, stored=blocks(1))])
        assert await mirror.settle(30)
        await own_server.command(*refuse)
        with pytest.raises(StateError) as failed:
            await writer.apply([batch(2, stored=blocks(2))])
        await eventually(lambda: mirror.freshness()[0] is Rung.STALE)
        end_s = time.monotonic() + _STORE_TIMING.record_ttl_s + 2 * _TIMING.grace_s
        while time.monotonic() < end_s:
            mirror.publish_leases({A: LeaseTotals(inflight=1)})
            assert list(mirror.replicas()) == [A]
            assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
            await asyncio.sleep(0.02)
        await own_server.command(*allow)
        await writer.register(record())
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        await eventually(lambda: not mirror.replicas())  # it sends no heartbeats: now that counts
    await client.aclose()
    lines = [entry.message for entry in caplog.records if entry.name == "state.mirror"]
    told = [line.split(",")[0].rsplit(" ", 1)[-1] for line in lines]
    assert told == ["live", "stale", "live"]
    assert refusal in lines[1]
    for text in (str(failed.value), *lines):
        assert text.isprintable()
        assert len(text) < 400
    assert "SADD" not in str(failed.value)  # nor what was to be stored
