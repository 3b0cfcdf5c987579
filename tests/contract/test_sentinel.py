"""Sentinels: the primary is found, followed to its successor, and nothing hangs meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from sidecar.announce import Announcer
from sidecar.fold import PageFolder
from state.client import RedisSettings, command_client, run_command
from state.mirror import Mirror
from state.model import ReplicaRecord, RouterId, Rung
from state.redis_writer import RedisWriter
from state.sentinel import SentinelClient
from state.store import StateError
from state.timing import MirrorTiming
from support.announced import BASE, IDENTITY, chain, page
from support.fleet_state import A, batch, blocks, record
from support.running_clock import RunningClock
from support.state_backend import LASTING
from support.valkey import eventually
from support.valkey_sentinel import SERVICE, ValkeySentinel

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMING = MirrorTiming(
    registry_interval_s=0.05,
    lease_interval_s=0.05,
    block_s=0.05,
    stale_after_s=0.4,
    live_after_s=0.3,
    backoff_base_s=0.05,
    backoff_cap_s=0.3,
)


@pytest.fixture
def own_sentinel() -> Iterator[ValkeySentinel]:
    """Start servers that a test may kill."""
    with ValkeySentinel(down_after_ms=500) as setup:
        yield setup


async def test_a_killed_primary_costs_a_while_of_stale_view_and_no_read(
    own_sentinel: ValkeySentinel, caplog: pytest.LogCaptureFixture
) -> None:
    """R-08, R-12: the replica takes over; sidecar and routers follow, all is announced again."""
    caplog.set_level(logging.INFO, logger="state.mirror")
    client = command_client(own_sentinel.settings)
    folder, registered = PageFolder(IDENTITY, 1), list[ReplicaRecord]()
    announcer = Announcer(
        RedisWriter(client, clock=time.monotonic, rng=Random(1)),
        clock=time.monotonic,
        rng=Random(1),
        heartbeat_interval_s=0.2,
        on_registered=registered.append,
    )
    announcer.renew(BASE, folder)
    announcer.add(folder.apply([page(handle) for handle in range(1, 51)]))
    pages = chain(60)
    running = asyncio.create_task(announcer.run())
    old, new = own_sentinel.servers
    rungs: list[Rung] = []
    clock = RunningClock()
    mirror = Mirror(
        own_sentinel.settings, RouterId("r"), clock=clock, rng=Random(2), timing=_TIMING
    )

    def warmth() -> int:
        rung, _ = mirror.freshness()
        if not rungs or rungs[-1] is not rung:
            rungs.append(rung)
        overlap = mirror.overlap(pages).get(A)
        return overlap.gpu_blocks if overlap else 0

    try:
        async with clock, mirror:
            await eventually(lambda: warmth() == 50 and registered)
            own_sentinel.kill(old)
            announcer.add(folder.apply([page(handle) for handle in range(51, 61)]))
            end_s = time.monotonic() + 60
            while mirror.freshness()[0] is not Rung.STALE or own_sentinel.named() == old:
                assert warmth() >= 50  # nothing is forgotten
                assert list(mirror.replicas()) == [A]
                assert time.monotonic() < end_s
                await asyncio.sleep(0.02)
            await eventually(lambda: warmth() == 60 and rungs[-1] is Rung.LIVE)
            assert own_sentinel.named() == new
            await eventually(lambda: len(registered) > 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.aclose()
    assert rungs[-3:] == [Rung.LIVE, Rung.STALE, Rung.LIVE]
    lines = [line.getMessage() for line in caplog.records if line.name == "state.mirror"]
    told = [line.split(" is ")[1].split(",")[0] for line in lines]
    assert told == ["live", "stale", "live"]


@pytest.mark.heavy
async def test_two_primaries_cost_hints_only(own_sentinel: ValkeySentinel) -> None:
    """R-12: the old one comes back, takes a write of nobody's, and is made a replica: all agree."""
    old, new = own_sentinel.servers
    client = command_client(
        RedisSettings(url=own_sentinel.url, command_timeout_s=0.5, connect_timeout_s=1.0)
    )
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1), timing=LASTING)
    mirror = Mirror(
        own_sentinel.settings, RouterId("r"), clock=time.monotonic, rng=Random(2), timing=_TIMING
    )

    async def write(generation: str) -> None:
        """Announce as a sidecar does: all of it again, until it is stored."""
        async with asyncio.timeout(20):
            while True:
                with suppress(StateError):
                    await writer.register(record(generation=generation))
                    await writer.apply(
                        [batch(1, stored=blocks(1, 2), generation=generation, is_clear=True)]
                    )
                    return
                await asyncio.sleep(0.1)

    async with mirror:
        await write("before")
        assert await mirror.settle(30)
        own_sentinel.freeze(old)
        try:
            await write("meanwhile")
            assert own_sentinel.named() == new
            await eventually(lambda: mirror.replicas()[A].record.generation == "meanwhile")
        finally:
            own_sentinel.thaw(old)
        with suppress(RedisError):
            await own_sentinel.command_on(old, "SET", "wr:1:{a}:lost", "1", "EX", 60)
        end_s = time.monotonic() + 60
        while b"slave" not in (await own_sentinel.command_on(old, "ROLE"))[0]:
            assert mirror.replicas()[A].record.generation == "meanwhile"
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)
        await write("after")
        await eventually(lambda: mirror.replicas()[A].record.generation == "after")
        await eventually(lambda: mirror.overlap(blocks(1, 2))[A].gpu_blocks == 2)
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        assert mirror.malformed_values == 0
    await client.aclose()


async def test_a_planned_failover_is_told_to_each_client_once_and_dead_sentinels_cost_nothing(
    own_sentinel: ValkeySentinel,
) -> None:
    """R-12: what the old primary confirmed last may be lost, so its sidecar has to write again."""
    client = command_client(own_sentinel.settings)
    assert isinstance(client, SentinelClient)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
    await writer.register(record())
    old, new = own_sentinel.servers
    assert client.address == old
    own_sentinel.fail_over()
    end_s = time.monotonic() + 60
    refusals = 0
    while client.address == old or not refusals:
        try:
            await writer.apply([batch(1, stored=blocks(1))])
        except StateError:
            refusals += 1
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)
    assert client.address == new

    async def is_well() -> bool:
        try:
            await writer.register(record())
        except StateError:
            return False
        return True

    while not await is_well():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)
    own_sentinel.kill_sentinels()
    for _ in range(20):
        assert await run_command(client, "PING") == b"PONG"
    client._is_doubted = True  # they are asked, in vain; what is known holds
    assert await run_command(client, "PING") == b"PONG"
    await client.aclose()


async def test_a_name_that_no_sentinel_knows_is_said(valkey_sentinel: ValkeySentinel) -> None:
    url = valkey_sentinel.url.replace(f"/{SERVICE}", "/other")
    client = command_client(RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0))
    with pytest.raises(RedisError, match="knows of no primary of other"):
        await run_command(client, "PING")
    await client.aclose()


async def test_sentinels_that_do_not_answer_are_passed_over(
    valkey_sentinel: ValkeySentinel,
) -> None:
    url = valkey_sentinel.url.replace("://", "://127.0.0.1:1,")
    client = command_client(RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0))
    assert await run_command(client, "PING") == b"PONG"
    assert isinstance(client, SentinelClient)
    assert client._sentinels[0] != "127.0.0.1:1"  # the next look begins elsewhere
    await client.aclose()
    nobody = command_client(RedisSettings(url=f"redis+sentinel://127.0.0.1:1/{SERVICE}"))
    with pytest.raises(RedisConnectionError):
        await run_command(nobody, "PING")
    await nobody.aclose()


async def test_a_sentinel_that_names_a_replica_is_not_believed(
    valkey_sentinel: ValkeySentinel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-12: one on the wrong side of a partition names the server that was the primary before."""
    primary, replica = valkey_sentinel.servers
    client = command_client(valkey_sentinel.settings)
    assert isinstance(client, SentinelClient)
    answers = iter((replica, replica, primary))

    async def ask(_: str) -> str:
        return next(answers)

    monkeypatch.setattr(client, "_ask", ask)
    assert await run_command(client, "SET", "k", "v", "EX", 60) == b"OK"
    assert client.address == primary
    await client.aclose()


async def test_a_primary_that_was_given_up_and_still_answers_is_left(
    valkey_sentinel: ValkeySentinel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-12: no command fails, only the sentinels know; they are asked again within seconds."""
    primary, replica = valkey_sentinel.servers
    client = command_client(valkey_sentinel.settings)
    assert isinstance(client, SentinelClient)
    assert await run_command(client, "PING") == b"PONG"

    async def ask(_: str) -> str:
        return replica

    async def no_role(*_: object) -> None:
        return None

    monkeypatch.setattr(client, "_ask", ask)
    monkeypatch.setattr(client, "_check_role", no_role)
    client._due_s = 0.0
    end_s = time.monotonic() + 5
    heard: list[str] = []
    while client.address == primary or not any(replica in text for text in heard):
        try:
            await run_command(client, "PING")
        except RedisConnectionError as error:  # one may be under way at the old one
            heard.append(str(error))
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    for _ in range(5):
        assert await run_command(client, "PING") == b"PONG"
    assert len(heard) <= 2
    with suppress(RedisError):
        await client.aclose()
