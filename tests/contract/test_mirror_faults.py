"""What a router's mirror does when the server, a stream or another router fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from state.client import RedisSettings, command_client, run_command
from state.lease import LeaseBook, Outcome
from state.mirror import Mirror
from state.model import Fence, LeaseTotals, ReplicaLoad, RouterId, Rung
from state.redis_writer import RedisWriter
from state.schema import LEASES, REPLICA_INDEX, ReplicaKeys
from state.store import StateError
from state.timing import MirrorTiming, StoreTiming
from support.fleet_state import A, B, batch, block, blocks, record
from support.running_clock import RunningClock
from support.state_backend import FAST_ROUNDS, LASTING, RedisBackend
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

_KEYS = ReplicaKeys(A)


def _mirror(
    server: ValkeyProcess,
    timing: MirrorTiming = FAST_ROUNDS,
    store_timing: StoreTiming = LASTING,
    timeout_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Mirror:
    return Mirror(
        RedisSettings(url=server.url, command_timeout_s=timeout_s, connect_timeout_s=10.0),
        RouterId("r1"),
        clock=clock,
        rng=Random(3),
        timing=timing,
        store_timing=store_timing,
    )


def _rung(mirror: Mirror) -> Rung:
    return mirror.freshness()[0]


_SOON_STALE = MirrorTiming(
    registry_interval_s=0.02,
    lease_interval_s=0.02,
    block_s=0.02,
    stale_after_s=0.3,
    backoff_base_s=0.02,
    backoff_cap_s=0.1,
)


async def test_an_empty_server_makes_a_mirror_ready_at_once(valkey: ValkeyProcess) -> None:
    await valkey.command("FLUSHALL")
    async with _mirror(valkey) as mirror:
        assert await mirror.settle(30)
        assert _rung(mirror) is Rung.LIVE
        assert (mirror.replicas(), mirror.holdings()) == ({}, {})


async def test_without_a_server_a_mirror_is_local_and_costs_nothing(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """R-01: it starts without one, and goes live when one appears."""
    own_server.kill()
    caplog.set_level(logging.INFO, logger="state.mirror")
    async with _mirror(own_server) as mirror:
        await eventually(lambda: mirror.failures >= 3)
        assert _rung(mirror) is Rung.LOCAL
        assert mirror.overlap(blocks(1)) == {}
        assert not await mirror.settle(0.05)
        own_server.start()
        await eventually(lambda: _rung(mirror) is Rung.LIVE)
        # The line follows at the end of the round that made the view live.
        await eventually(lambda: "live" in caplog.text)
    assert [entry.levelname for entry in caplog.records if entry.name == "state.mirror"] == ["INFO"]


async def test_a_server_that_comes_back_empty_does_not_empty_the_fleet(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """C16, R-02, R-06: replicas stay known until their sidecars announce themselves again."""
    caplog.set_level(logging.INFO, logger="state.mirror")
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1), timing=LASTING)
    async with RunningClock() as clock, _mirror(own_server, _SOON_STALE, clock=clock) as mirror:
        await writer.register(record())
        await writer.apply([batch(1, stored=blocks(1, 2))])
        assert await mirror.settle(30)
        own_server.kill()
        with pytest.raises(StateError):
            await writer.heartbeat(record(), None)
        await eventually(lambda: _rung(mirror) is Rung.STALE)
        assert mirror.overlap(blocks(1, 2))[A].gpu_blocks == 2
        own_server.start()
        await eventually(lambda: _rung(mirror) is Rung.LIVE)
        assert list(mirror.replicas()) == [A]
        assert await writer.heartbeat(record(), None) is Fence.UNKNOWN
        await writer.register(record())
        await writer.apply([batch(1, stored=blocks(1, 2, 3), is_clear=True)])
        assert await mirror.settle(30)
        assert mirror.overlap(blocks(1, 2, 3))[A].gpu_blocks == 3
    await client.aclose()
    lines = [
        entry.message.split(",")[0] for entry in caplog.records if entry.name == "state.mirror"
    ]
    told = [line.rsplit(" ", 1)[-1] for line in lines]
    assert told == ["live", "stale", "live"]
    assert not any(entry.exc_info for entry in caplog.records)


async def test_a_forgotten_replica_that_stays_silent_leaves_after_its_grace(
    redis_backend: RedisBackend,
) -> None:
    """R-06: a flushed registry is not taken for an empty fleet, but not for a living one either."""
    timing = MirrorTiming(registry_interval_s=0.02, block_s=0.02, grace_s=0.4)
    mirror = await redis_backend.mirror(timing=timing)
    await redis_backend.writer.register(record())
    assert await mirror.settle(30)
    await run_command(redis_backend.client, "FLUSHALL")
    flushed_s = time.monotonic()
    assert await mirror.settle(30)
    assert list(mirror.replicas()) == [A]
    await eventually(lambda: not mirror.replicas())
    assert time.monotonic() - flushed_s >= 0.4


async def test_a_lapsed_heartbeat_takes_the_replica_out(redis_backend: RedisBackend) -> None:
    timing = StoreTiming(record_ttl_s=0.2)
    writer = RedisWriter(redis_backend.client, clock=time.monotonic, rng=Random(1), timing=timing)
    mirror = await redis_backend.mirror()
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    assert await mirror.settle(30)
    assert mirror.holdings()[A].blocks == 1
    version = mirror.registry_version
    await eventually(lambda: not mirror.replicas())
    assert mirror.overlap(blocks(1)) == {}
    assert mirror.registry_version > version


async def test_a_load_report_ends_with_its_time_to_live(redis_backend: RedisBackend) -> None:
    timing = StoreTiming(load_ttl_s=0.2)
    writer = RedisWriter(redis_backend.client, clock=time.monotonic, rng=Random(1), timing=timing)
    mirror = await redis_backend.mirror()
    await writer.register(record())
    await writer.heartbeat(record(), ReplicaLoad(running=4))
    assert await mirror.settle(30)
    assert mirror.replicas()[A].load == ReplicaLoad(running=4)
    await eventually(lambda: mirror.replicas()[A].load is None)


async def test_a_frozen_server_does_not_hold_up_a_reader(own_server: ValkeyProcess) -> None:
    """R-03: reads go on from the copy, which ages; nothing is lost when the server thaws."""
    store_timing = StoreTiming(record_ttl_s=0.5, load_ttl_s=0.4, lease_ttl_s=0.4)
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1), timing=store_timing)
    async with (
        RunningClock() as clock,
        _mirror(own_server, _SOON_STALE, store_timing, timeout_s=0.05, clock=clock) as mirror,
    ):
        await writer.register(record())
        await writer.heartbeat(record(), ReplicaLoad(running=4))
        await writer.apply([batch(1, stored=blocks(1))])
        assert await mirror.settle(30)
        own_server.freeze()
        try:
            times_s, end_s = [], clock() + 0.8
            while clock() < end_s:
                began_s = time.perf_counter()
                mirror.publish_leases({A: LeaseTotals(inflight=1)})
                assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
                assert list(mirror.replicas()) == [A]
                mirror.foreign_leases()
                times_s.append(time.perf_counter() - began_s)
                await asyncio.sleep(0.002)
            assert statistics.median(times_s) < 0.001
            assert _rung(mirror) is Rung.STALE
            assert mirror.replicas()[A].load is None
        finally:
            own_server.thaw()
        await eventually(lambda: _rung(mirror) is Rung.LIVE)
        await asyncio.sleep(0.1)
        assert list(mirror.replicas()) == [A]
    await client.aclose()


async def test_a_trimmed_stream_leads_to_another_snapshot(
    redis_backend: RedisBackend,
) -> None:
    writer = redis_backend.open_writer(stream_cap_entries=1)
    await writer.register(record())
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    before = mirror.snapshots
    changes = [batch(number, stored=blocks(number)) for number in range(1, 60)]
    removal = batch(60, removed=blocks(7))
    await writer.apply([*changes, removal])
    await run_command(redis_backend.client, "XTRIM", _KEYS.changes, "MAXLEN", 1)
    assert await mirror.settle(30)
    assert mirror.overlap(tuple(map(block, range(1, 60))))[A].gpu_blocks == 6
    assert mirror.snapshots >= before


async def test_a_gap_in_the_sequence_leads_to_another_snapshot(
    redis_backend: RedisBackend,
) -> None:
    writer = redis_backend.writer
    await writer.register(record())
    mirror = await redis_backend.mirror()
    await writer.apply([batch(1, stored=blocks(1))])
    assert await mirror.settle(30)
    before = mirror.snapshots
    suffix = f"g1:{batch(1).namespace}:gpu"
    await run_command(redis_backend.client, "SADD", _KEYS.residency(suffix), block(2))
    await writer.apply([batch(3, stored=blocks(3))])
    await eventually(lambda: mirror.snapshots > before)
    assert await mirror.settle(30)
    assert mirror.overlap(blocks(1, 2, 3))[A].gpu_blocks == 3


async def test_values_that_do_not_decode_are_ignored_and_counted(
    redis_backend: RedisBackend,
) -> None:
    writer, client = redis_backend.writer, redis_backend.client
    await writer.register(record(A))
    await writer.register(record(B))
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    await run_command(client, "HSET", ReplicaKeys(B).record, "value", b"\xff{")
    await run_command(client, "SET", _KEYS.load, "[]", "EX", 60)
    await run_command(client, "ZADD", REPLICA_INDEX, 1, b"no name\xff")
    await run_command(client, "HSET", LEASES, "r9", b"\xc1")
    await run_command(client, "XADD", _KEYS.changes, "*", "e", b"\xc1")
    await run_command(client, "XADD", _KEYS.changes, "*", "other", "field")
    await writer.apply([batch(1, stored=blocks(1))])
    await run_command(client, "SADD", _KEYS.residency(f"g1:{batch(1).namespace}:gpu"), b"short")
    assert await mirror.settle(30)
    assert set(mirror.replicas()) == {A, B}
    assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
    await eventually(lambda: mirror.malformed_values >= 6)
    late = await redis_backend.mirror("r2")
    assert await late.settle(30)
    assert late.holdings()[A].blocks == 1


@pytest.mark.parametrize("key", [_KEYS.record, _KEYS.changes, _KEYS.sets])
async def test_a_key_of_another_type_blinds_the_mirror_for_its_replica_only(
    redis_backend: RedisBackend, key: str
) -> None:
    """S-14: whoever spoils one replica's key must not age the view of the whole fleet."""
    writer, client = redis_backend.writer, redis_backend.client
    await writer.register(record(A))
    await writer.register(record(B))
    await writer.apply([batch(1, stored=blocks(1), replica=B)])
    timing = msgspec.structs.replace(_SOON_STALE, stale_after_s=1.0)  # longer than a pause of ours
    mirror = await redis_backend.mirror(timing=timing)
    assert await mirror.settle(30)
    await run_command(client, "SET", key, "spoiled", "EX", 60)
    late = await redis_backend.mirror("r2", timing=timing)
    await eventually(lambda: B in late.replicas())
    await writer.apply([batch(2, stored=blocks(2), replica=B)])
    for one in (mirror, late):
        await eventually(lambda: one.overlap(blocks(1, 2))[B].gpu_blocks == 2)  # noqa: B023
        await asyncio.sleep(timing.stale_after_s)
        assert _rung(one) is Rung.LIVE
    assert late.malformed_values


_LEASING_ROUTER = """
import asyncio, random, sys, time
from state.client import RedisSettings
from state.mirror import Mirror
from state.model import LeaseTotals, ReplicaId, RouterId
from state.timing import StoreTiming

async def main():
    settings = RedisSettings(url=sys.argv[1], command_timeout_s=10.0, connect_timeout_s=10.0)
    timing = StoreTiming(lease_ttl_s=0.5)
    async with Mirror(settings, RouterId("doomed"), clock=time.monotonic,
                      rng=random.Random(), store_timing=timing) as mirror:
        mirror.publish_leases({ReplicaId("a"): LeaseTotals(inflight=50)})
        await mirror.settle(5)
        print("leased", flush=True)
        while True:
            mirror.publish_leases({ReplicaId("a"): LeaseTotals(inflight=50)})
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


async def test_the_leases_of_a_killed_router_vanish_within_their_time_to_live(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """A22, R-24: SIGKILL with 50 in flight; the others see the 50 go away."""
    mirror = await redis_backend.mirror(store_timing=StoreTiming(lease_ttl_s=0.5))
    router = subprocess.Popen(  # noqa: ASYNC220 - its pipe is read in a thread
        [sys.executable, "-c", _LEASING_ROUTER, valkey.url], stdout=subprocess.PIPE
    )
    try:
        assert router.stdout is not None
        assert await asyncio.to_thread(router.stdout.readline) == b"leased\n"
        await eventually(lambda: mirror.foreign_leases() == {A: LeaseTotals(inflight=50)})
        os.kill(router.pid, signal.SIGKILL)
        await eventually(lambda: not mirror.foreign_leases())
    finally:
        router.kill()
        router.communicate()


async def test_a_router_that_stops_takes_its_leases_along(redis_backend: RedisBackend) -> None:
    mirror = await redis_backend.mirror("r1")
    async with Mirror(
        redis_backend._server.settings, RouterId("r2"), clock=time.monotonic, rng=Random(4)
    ) as other:
        other.publish_leases({A: LeaseTotals(inflight=3)})
        assert await other.settle(30)
        assert await mirror.settle(30)
        assert mirror.foreign_leases() == {A: LeaseTotals(inflight=3)}
    assert await mirror.settle(30)
    assert mirror.foreign_leases() == {}


async def test_routers_have_a_place_each_by_their_names(redis_backend: RedisBackend) -> None:
    """What each takes a part of by its place, none takes twice; a gap closes."""
    one, three = [await redis_backend.mirror(name) for name in ("r1", "r3")]
    async with Mirror(
        redis_backend._server.settings, RouterId("r2"), clock=time.monotonic, rng=Random(4)
    ) as two:
        await eventually(lambda: [each.routers for each in (one, two, three)] == [3, 3, 3])
        assert [each.rank for each in (one, two, three)] == [0, 1, 2]
    await eventually(lambda: [each.routers for each in (one, three)] == [2, 2])
    assert [each.rank for each in (one, three)] == [0, 1]


async def test_an_outage_between_acquire_and_finish_leaves_no_drift(
    own_server: ValkeyProcess,
) -> None:
    """A23: what others see is the present total, never a history of increments."""
    book = LeaseBook()
    async with _mirror(own_server, _SOON_STALE) as ours:
        lease = book.acquire(A, 100, now_s=0.0)
        ours.publish_leases(book.totals())
        assert await ours.settle(30)
        own_server.kill()
        await eventually(lambda: ours.failures > 0)
        lease.finish(Outcome.DONE)
        ours.publish_leases(book.totals())
        own_server.start()
        async with Mirror(
            own_server.settings, RouterId("r2"), clock=time.monotonic, rng=Random(4)
        ) as other:
            assert await ours.settle(30)
            assert await other.settle(30)
            assert other.foreign_leases() == {}
        assert await own_server.keys_without_ttl() == []


async def test_a_large_batch_does_not_hold_up_the_event_loop(redis_backend: RedisBackend) -> None:
    many = tuple(map(block, range(60_000)))
    await redis_backend.writer.register(record())
    await redis_backend.writer.apply([batch(1, stored=many)])
    mirror = await redis_backend.mirror()
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began_s = time.thread_time()  # the loop's own work, on however busy a machine
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    gc.disable()  # a collection over the test runner's own heap is not ours
    watcher = asyncio.create_task(watch())
    try:
        assert await mirror.settle(30)
    finally:
        watcher.cancel()
        gc.enable()
    assert mirror.holdings()[A].blocks == 60_000
    assert longest_s < 0.01
