"""The failure catalogue of the shared store: slow, flapping, flushed, read-only servers.

Rows R-01 to R-03 and more of R-06 are in ``test_mirror_faults``; whole routers are in
``tests/e2e/test_field_state``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from sidecar.announce import Announcer
from sidecar.fold import PageFolder
from state.client import command_client, run_command
from state.mirror import Mirror
from state.model import (
    Fence,
    Generation,
    LeaseTotals,
    ReplicaLoad,
    ReplicaRecord,
    RouterId,
    Rung,
)
from state.redis_writer import RedisWriter
from state.residency import MIN_BYTES
from state.schema import ReplicaKeys
from state.store import StateError
from state.timing import MirrorTiming, StoreTiming
from support.announced import BASE, IDENTITY, chain, page
from support.fleet_state import A, batch, blocks, record
from support.running_clock import RunningClock
from support.slow_link import SlowLink
from support.state_backend import FAST_ROUNDS
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from state.client import RedisSettings
    from support.state_backend import RedisBackend


def _mirror(
    settings: RedisSettings,
    router: str = "r1",
    timing: MirrorTiming = FAST_ROUNDS,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 3,
) -> Mirror:
    return Mirror(settings, RouterId(router), clock=clock, rng=Random(seed), timing=timing)


async def test_a_slow_server_ages_the_view_and_costs_a_reader_nothing(
    valkey: ValkeyProcess, redis_backend: RedisBackend
) -> None:
    """R-04: 50 ms each way. Reads wait for nothing; the age shows the delay."""
    writer = redis_backend.writer
    await writer.register(record())
    async with (
        SlowLink(valkey.socket_path, lambda: 0.05) as link,
        _mirror(link.settings(timeout_s=10.0)) as mirror,
    ):
        await writer.apply([batch(1, stored=blocks(1))])
        assert await mirror.settle(30)
        ages_s = []
        for number in range(2, 60):
            await writer.apply([batch(number, stored=blocks(number))])
            rung, age_s = mirror.freshness()
            ages_s.append(age_s)
            assert rung is Rung.LIVE
            assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
            await asyncio.sleep(0.005)
        assert max(ages_s) >= 0.1
        assert await mirror.settle(30)
        assert mirror.overlap(blocks(*range(1, 60)))[A].gpu_blocks == 59
        assert mirror.failures == 0


async def test_a_flapping_server_makes_a_line_per_transition_and_few_of_them(
    valkey: ValkeyProcess, redis_backend: RedisBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """C68, R-05: round trips of 20 and of 240 ms by turns, a limit of 100 ms, 4 s long."""
    caplog.set_level(logging.INFO)
    await redis_backend.writer.register(record())
    timing = MirrorTiming(
        registry_interval_s=0.02,
        lease_interval_s=0.02,
        block_s=0.02,
        stale_after_s=0.25,
        live_after_s=1.0,
        backoff_base_s=0.02,
        backoff_cap_s=0.1,
    )
    async with (
        RunningClock() as clock,
        SlowLink(valkey.socket_path) as link,
        _mirror(link.settings(timeout_s=0.1), timing=timing, clock=clock) as mirror,
    ):
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        link.delay_s = lambda: 0.12 if clock() % 0.8 < 0.4 else 0.01
        end_s = clock() + 4
        while clock() < end_s:
            assert list(mirror.replicas()) == [A]
            await asyncio.sleep(0.01)
        assert mirror.failures > 5
        link.delay_s = float
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        entered = dict(mirror.figures().rungs_entered)
    lines = [entry for entry in caplog.records if entry.name == "state.mirror"]
    assert len(lines) == sum(entered.values())
    assert entered[Rung.STALE] <= 3
    assert not any(entry.exc_info for entry in caplog.records)


async def test_after_a_flush_under_load_the_sidecar_announces_once_and_all_is_warm_again(
    valkey: ValkeyProcess, redis_backend: RedisBackend
) -> None:
    """R-06: within two heartbeats, by one registration and one snapshot per router."""
    folder = PageFolder(IDENTITY, 1)
    registered: list[ReplicaRecord] = []
    subject = Announcer(
        redis_backend.writer,
        clock=time.monotonic,
        rng=Random(1),
        heartbeat_interval_s=0.2,
        on_registered=registered.append,
    )
    subject.renew(BASE, folder)
    subject.add(folder.apply([page(handle) for handle in range(1, 201)]))
    pages = chain(200)
    mirror, other = await redis_backend.mirror("r1"), await redis_backend.mirror("r2")
    running = asyncio.create_task(subject.run())

    def warmth(one: Mirror) -> int:
        overlap = one.overlap(pages).get(A)
        return overlap.gpu_blocks if overlap else 0

    async def load() -> None:
        handle = 1000
        while True:
            handle += 1
            first = msgspec.structs.replace(page(handle), parent=None)
            subject.add(folder.apply([first]))
            await asyncio.sleep(0.005)

    loading = asyncio.create_task(load())
    try:
        # A mirror may know the blocks before their writer has the answer, and counts.
        await eventually(lambda: registered and warmth(mirror) == warmth(other) == 200)
        before = mirror.snapshots, len(registered)
        await valkey.flush()
        await eventually(lambda: len(registered) > before[1])
        assert list(mirror.replicas()) == [A]
        await eventually(lambda: warmth(mirror) == warmth(other) == 200)
        await asyncio.sleep(0.5)
        assert len(registered) == before[1] + 1
        assert mirror.snapshots - before[0] <= 2
        late = await redis_backend.mirror("late")
        assert await late.settle(30)
        assert warmth(late) == 200
    finally:
        for task in (loading, running):
            task.cancel()
        await asyncio.gather(loading, running, return_exceptions=True)


async def test_lost_scripts_are_sent_again_for_every_kind_of_call(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """R-07: after SCRIPT FLUSH each script of writer and mirror heals in the same call."""
    writer = redis_backend.writer
    mirror = await redis_backend.mirror()
    mirror.publish_leases({A: LeaseTotals(inflight=1)})

    async def flush() -> None:
        await valkey.command("SCRIPT", "FLUSH")

    await flush()
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    await writer.copy([batch(0, stored=blocks(1), is_clear=True)])
    await flush()
    namespace, tier = batch(1).namespace, batch(1).tier
    assert await writer.swap(A, Generation("g1"), {(namespace, tier): 1})
    await flush()
    assert await writer.heartbeat(record(), ReplicaLoad(running=1)) is Fence.HELD
    await flush()
    late = await redis_backend.mirror("late")
    assert await late.settle(30)
    assert late.overlap(blocks(1))[A].gpu_blocks == 1
    assert late.foreign_leases() == {A: LeaseTotals(inflight=1)}
    await flush()
    await writer.deregister(A, Generation("g1"))
    assert (mirror.failures, late.failures) == (0, 0)


async def test_a_read_only_server_fails_writes_and_is_read_on(own_server: ValkeyProcess) -> None:
    """R-08: REPLICAOF on and off; the view stays, and writing goes on afterwards."""
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    async with _mirror(own_server.settings) as mirror:
        assert await mirror.settle(30)
        await own_server.command("REPLICAOF", "127.0.0.1", "1")
        for attempt in (
            writer.register(record()),
            writer.heartbeat(record(), None),
            writer.apply([batch(2, stored=blocks(2))]),
        ):
            with pytest.raises(StateError, match="ReadOnly"):
                await attempt
        await eventually(lambda: mirror.failures > 0)
        assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
        failures, began_s = mirror.failures, time.monotonic()
        await asyncio.sleep(0.5)
        per_s = (mirror.failures - failures) / (time.monotonic() - began_s)
        assert per_s < 100  # it backs off, it does not spin
        await own_server.command("REPLICAOF", "NO", "ONE")
        await writer.register(record())
        await writer.apply([batch(1, stored=blocks(1, 2))])
        await eventually(lambda: mirror.overlap(blocks(1, 2))[A].gpu_blocks == 2)
    await client.aclose()


async def test_after_a_failover_writers_and_mirrors_dial_again(
    own_server: ValkeyProcess, valkey: ValkeyProcess
) -> None:
    """R-08: the old primary lives on as a replica; its address leads to the new one by now."""
    await valkey.flush()
    async with SlowLink(own_server.socket_path) as link:
        client = command_client(link.settings(timeout_s=10.0))
        writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
        await writer.register(record())
        async with _mirror(link.settings(timeout_s=10.0)) as mirror:
            assert await mirror.settle(30)
            await own_server.command("REPLICAOF", "127.0.0.1", "1")
            link.target = valkey.socket_path
            with pytest.raises(StateError):
                await writer.register(record(generation="g2"))
            await writer.register(record(generation="g2"))
            assert await valkey.command("EXISTS", ReplicaKeys(A).record) == 1
            await eventually(lambda: mirror.replicas()[A].record.generation == "g2")
        await client.aclose()


async def test_no_clock_is_compared_with_that_of_another_host(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """R-19: sidecar and routers an hour apart see each other, and nothing ends early or late."""
    timing = StoreTiming(record_ttl_s=0.6, load_ttl_s=0.6, lease_ttl_s=0.6)
    behind = RedisWriter(
        redis_backend.client,
        clock=lambda: time.monotonic() - 3600,
        rng=Random(1),
        timing=timing,
    )
    clocks = (lambda: time.monotonic() + 3600, lambda: time.monotonic() - 3600)
    ahead, back = (
        Mirror(
            valkey.settings,
            RouterId(f"r{number}"),
            clock=clock,
            rng=Random(number),
            timing=FAST_ROUNDS,
            store_timing=timing,
        )
        for number, clock in enumerate(clocks)
    )
    async with ahead, back:
        await behind.register(record())
        ahead.publish_leases({A: LeaseTotals(inflight=2)})
        end_s = time.monotonic() + 1.5
        assert await ahead.settle(30)
        assert await back.settle(30)
        while time.monotonic() < end_s:
            await behind.heartbeat(record(), ReplicaLoad(running=1))
            for mirror in (ahead, back):
                assert mirror.replicas()[A].record.generation == "g1"
                assert mirror.freshness()[0] is Rung.LIVE
            assert back.foreign_leases() == {A: LeaseTotals(inflight=2)}
            await asyncio.sleep(0.05)
        await eventually(lambda: not ahead.replicas() and not back.replicas())


async def test_a_router_that_starts_on_more_than_it_may_hold_stays_within_its_bound(
    redis_backend: RedisBackend,
) -> None:
    """The bound holds through a snapshot, and what it evicts starts no further snapshot."""
    numbers = range(40_000)
    await redis_backend.writer.register(record())
    await redis_backend.writer.apply([batch(1, stored=blocks(*numbers))])
    mirror = await redis_backend.mirror()
    mirror.limit_memory(MIN_BYTES)
    assert await mirror.settle(30)
    before = mirror.figures()
    assert before.index_bytes <= MIN_BYTES
    assert mirror.holdings()[A].blocks + before.evicted_blocks == 40_000
    await redis_backend.writer.apply([batch(2, removed=blocks(*range(3000)))])
    await redis_backend.writer.apply([batch(3, stored=blocks(*range(50_000, 50_100)))])
    assert await mirror.settle(30)
    await asyncio.sleep(0.3)
    assert mirror.overlap(blocks(*range(50_000, 50_100)))[A].gpu_blocks == 100
    assert mirror.figures().snapshots == before.snapshots
    assert await run_command(redis_backend.client, "EXISTS", ReplicaKeys(A).record) == 1


async def test_a_copy_that_is_too_old_is_not_believed_until_the_server_is_back(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """R-03, the whole ladder: live, stale, local and live again, a line and a count for each."""
    caplog.set_level(logging.INFO, logger="state.mirror")
    timing = MirrorTiming(
        registry_interval_s=0.02,
        lease_interval_s=0.02,
        block_s=0.02,
        stale_after_s=0.4,
        local_after_s=1.0,
        live_after_s=0.3,
        backoff_base_s=0.02,
        backoff_cap_s=0.1,
    )
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    seen: list[tuple[Rung, bool]] = []

    def note(one: Mirror) -> Rung:
        rung, age_s = one.freshness()
        believed = bool(one.overlap(blocks(1)))
        if not seen or seen[-1] != (rung, believed):
            seen.append((rung, believed))
            assert age_s >= {Rung.STALE: 0.4, Rung.LOCAL: 1.0}.get(rung, 0.0)
        return rung

    async with (
        RunningClock() as clock,
        _mirror(own_server.settings, timing=timing, clock=clock) as mirror,
    ):
        assert await mirror.settle(30)
        assert note(mirror) is Rung.LIVE
        own_server.freeze()
        try:
            await eventually(lambda: note(mirror) is Rung.LOCAL)
            assert list(mirror.replicas()) == [A]
        finally:
            own_server.thaw()
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        assert note(mirror) is Rung.LIVE
        entered = mirror.figures().rungs_entered
    await client.aclose()
    assert seen == [
        (Rung.LIVE, True),
        (Rung.STALE, True),
        (Rung.LOCAL, False),
        (Rung.LIVE, True),
    ]
    assert entered == {Rung.LIVE: 2, Rung.STALE: 1, Rung.LOCAL: 1}
    told = [entry.message.split(" is ")[1].split(",")[0] for entry in caplog.records]
    assert told == ["live", "stale", "local", "live"]
