"""A network in two parts: one router on the far side of the state server, the others well."""

from __future__ import annotations

import socket
from random import Random
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis

from state.client import RedisSettings, command_client
from state.mirror import Mirror
from state.model import LeaseTotals, RouterId, Rung
from state.timing import MirrorTiming, StoreTiming
from support.fleet_state import A, B, batch, blocks, record
from support.parted_link import PartedLink
from support.running_clock import RunningClock
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from support.state_backend import RedisBackend

_TIMING = MirrorTiming(
    registry_interval_s=0.05,
    lease_interval_s=0.05,
    lease_alone_s=0.05,
    block_s=0.05,
    stale_after_s=0.5,
    live_after_s=0.3,
    backoff_base_s=0.05,
    backoff_cap_s=0.5,
)


@pytest.mark.parametrize("replies_only", [False, True])
async def test_a_router_that_is_cut_off_goes_on_alone_and_catches_up(
    valkey: ValkeyProcess,
    redis_backend: RedisBackend,
    replies_only: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """R-11, C-12: what was removed, cleared and registered meanwhile holds within 5 s."""
    writer = redis_backend.writer
    await writer.register(record(A))
    await writer.register(record(B))
    await writer.apply([batch(1, stored=blocks(1, 2, 3)), batch(1, stored=blocks(1), replica=B)])
    near = await redis_backend.mirror("near", _TIMING)
    async with PartedLink(valkey.socket_path) as link:
        settings = RedisSettings(url=link.url, command_timeout_s=0.3, connect_timeout_s=0.5)
        clock = RunningClock()
        far = Mirror(
            settings,
            RouterId("far"),
            clock=clock,
            rng=Random(5),
            timing=_TIMING,
            store_timing=StoreTiming(lease_ttl_s=1.0),
        )
        async with clock, far:
            far.publish_leases({A: LeaseTotals(inflight=4)})
            assert await far.settle(30)
            await eventually(lambda: near.foreign_leases() == {A: LeaseTotals(inflight=4)})
            link.part(replies_only=replies_only)
            await eventually(lambda: far.freshness()[0] is Rung.STALE)
            await writer.apply([batch(2, removed=blocks(3))])
            await writer.register(record(B, generation="g2"))
            assert await near.settle(30)
            assert near.freshness()[0] is Rung.LIVE
            assert near.overlap(blocks(1, 2, 3))[A].gpu_blocks == 2
            assert far.overlap(blocks(1, 2, 3))[A].gpu_blocks == 3  # as it was
            assert set(far.replicas()) == {A, B}
            healed_s = clock()
            link.heal()
            await eventually(lambda: far.freshness()[0] is Rung.LIVE)
            await eventually(lambda: far.overlap(blocks(1, 2, 3))[A].gpu_blocks == 2)
            await eventually(lambda: far.replicas()[B].record.generation == "g2")
            assert B not in far.overlap(blocks(1))
            assert clock() - healed_s < 5.0
            await eventually(lambda: near.foreign_leases() == {A: LeaseTotals(inflight=4)})


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
async def test_what_nobody_acknowledges_ends_a_connection_within_seconds() -> None:
    """R-11: without it the kernel sends again for a quarter of an hour."""
    with ValkeyProcess("--port", "0") as server, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        await server.command("CONFIG", "SET", "port", port)
        client = command_client(
            RedisSettings(
                url=f"redis://127.0.0.1:{port}", command_timeout_s=10.0, connect_timeout_s=10.0
            )
        )
        assert isinstance(client, Redis)
        connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        used = connection._writer.get_extra_info("socket")
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5_000
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        await client.connection_pool.release(connection)
        await client.aclose()
