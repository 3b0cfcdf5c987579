"""What a sidecar's writer leaves in a real server, and what it does when the server fails."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from state.client import RedisSettings, command_client, run_command
from state.model import Fence, Generation, LeaseTotals, ReplicaLoad
from state.redis_writer import RedisWriter
from state.schema import ReplicaKeys
from state.store import StateError
from state.timing import StoreTiming
from support.fleet_state import A, B, batch, blocks, record
from support.running_clock import RunningClock

if TYPE_CHECKING:
    from support.state_backend import RedisBackend
    from support.valkey import ValkeyProcess

_KEYS = ReplicaKeys(A)


async def test_a_writer_gives_up_on_a_frozen_server_in_time(own_server: ValkeyProcess) -> None:
    """F7: with the library's defaults this takes a minute."""
    client = command_client(RedisSettings(url=own_server.url))
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
    own_server.freeze()
    try:
        async with RunningClock() as clock:
            began_s = clock()
            with pytest.raises(StateError):
                await writer.register(record())
            assert clock() - began_s < 1.0
    finally:
        own_server.thaw()
        await client.aclose()


async def test_every_key_has_a_time_to_live(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    writer = redis_backend.writer
    mirror = await redis_backend.mirror()
    mirror.publish_leases({A: LeaseTotals(inflight=1)})
    await writer.register(record(A))
    await writer.register(record(B))
    await writer.heartbeat(record(A), ReplicaLoad(running=1))
    await writer.apply([batch(1, stored=blocks(1)), batch(2, is_clear=True)])
    await writer.apply([batch(3, stored=blocks(1)), batch(9, stored=blocks(2), generation="g0")])
    await writer.register(record(B, "g2"))
    await writer.deregister(B, Generation("g2"))
    assert await mirror.settle(30)
    assert len(await valkey.command("KEYS", "*")) >= 8
    assert await valkey.keys_without_ttl() == []


async def test_a_new_generation_leaves_no_key_of_the_old_one(redis_backend: RedisBackend) -> None:
    writer, client = redis_backend.writer, redis_backend.client
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    assert await run_command(client, "KEYS", "*:blocks:*")
    await writer.register(record(generation="g/2 {x}"))
    assert await run_command(client, "KEYS", "*:blocks:*") == []
    await writer.apply([batch(1, stored=blocks(1), generation="g/2 {x}")])
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
    await writer.deregister(A, Generation("g/2 {x}"))
    assert await run_command(client, "KEYS", "*{a}*") == [_KEYS.changes.encode()]


async def test_a_heartbeat_extends_residency_only_now_and_then(
    redis_backend: RedisBackend,
) -> None:
    now_s = 100.0
    timing = StoreTiming(residency_ttl_s=1000.0)
    writer = RedisWriter(redis_backend.client, clock=lambda: now_s, rng=Random(1), timing=timing)
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    await writer.heartbeat(record(), None)
    key = _KEYS.residency(f"g1:{batch(1).namespace}:gpu")
    for passed_s, is_extended in ((100.0, False), (160.0, True)):
        await run_command(redis_backend.client, "PEXPIRE", key, 5_000)
        now_s += passed_s
        await writer.heartbeat(record(), None)
        left_ms = await run_command(redis_backend.client, "PTTL", key)
        assert (left_ms > 700_000) is is_extended


async def test_scripts_come_back_after_the_server_lost_them(redis_backend: RedisBackend) -> None:
    """R-07: NOSCRIPT, also within a pipeline, heals unseen."""
    writer, client = redis_backend.writer, redis_backend.client
    mirror = await redis_backend.mirror()
    await writer.register(record())
    await run_command(client, "SCRIPT", "FLUSH")
    assert await writer.heartbeat(record(), None) is Fence.HELD
    await run_command(client, "SCRIPT", "FLUSH")
    await writer.register(record(generation="g2"))
    await run_command(client, "SCRIPT", "FLUSH")
    assert await mirror.settle(30)
    assert mirror.replicas()[A].record.generation == "g2"
    assert mirror.failures == 0
