"""Epochs of scopes in a real store: agreed on by all routers, and never taken back by a loss."""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from state.client import command_client, run_command
from state.mirror import Mirror
from state.model import NamespaceId, RouterId, Rung, Tier
from state.schema import ReplicaKeys, residency_suffix
from state.scope_book import EpochBook, ended_names
from state.scope_epoch import VERSION_KEY, EpochCodec, ScopeEpoch
from state.scope_purge import PORTION_BLOCKS, purge_namespaces
from state.script import Script, run_scripts
from support.fleet_state import A, B, batch, block, blocks, record
from support.state_backend import FAST_ROUNDS
from support.valkey import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from state.client import Client
    from state.model import ChangeBatch
    from support.state_backend import RedisBackend, StateServer
    from support.valkey import ValkeyProcess

SECRET = b"a deployment key of thirty-two bytes and more"
SCOPE, OTHER = "tenant:a", "group:b"


def book(*scopes: str, known: dict[str, ScopeEpoch] | None = None) -> EpochBook:
    """Return what one router knows, with a file or from one."""
    return EpochBook(
        EpochCodec(SECRET),
        scopes or (SCOPE, OTHER),
        known or {},
        opens_new=True,
        clock=time.monotonic,
    )


@pytest.fixture
async def client(state_server: StateServer) -> AsyncIterator[Client]:
    await state_server.flush()
    client = command_client(state_server.settings)
    yield client
    await client.aclose()


async def rounds(client: Client, *books: EpochBook, times: int = 2) -> None:
    """Let every router do some rounds."""
    for _ in range(times):
        for one in books:
            await one.exchange(client)


async def test_routers_agree_on_the_first_epoch_and_on_every_later_one(client: Client) -> None:
    """Also one that was not there when the epoch began; no scope has another's epoch."""
    routers = [book(), book()]
    assert routers[0].of(SCOPE) != routers[1].of(SCOPE), "nothing was agreed on yet"
    await rounds(client, *routers)
    routers.append(book())
    await rounds(client, *routers)
    assert len({one.of(SCOPE) for one in routers}) == 1
    assert len({one.of(OTHER) for one in routers}) == 1
    first = routers[0].of(SCOPE)
    assert first != routers[0].of(OTHER)
    begun = routers[1].begin(SCOPE, keeps_previous=False)
    await rounds(client, *routers)
    assert {one.of(SCOPE) for one in routers} == {begun.name}
    assert begun.name != first
    assert begun.live_names == (begun.name,)


async def test_a_flushed_store_gets_the_newest_epoch_back_from_any_router(
    client: Client, state_server: StateServer
) -> None:
    """One that comes from its file with an older epoch does not win because the store is empty."""
    router = book()
    await rounds(client, router)
    old = router.epochs()
    router.begin(SCOPE, keeps_previous=False)
    await rounds(client, router)
    deleted, now = old[SCOPE], router.epoch(SCOPE)
    await state_server.flush()
    late = book(known=old)
    await late.exchange(client)
    assert late.epoch(SCOPE) == deleted, "it cannot know better yet"
    await rounds(client, router, late)
    assert late.epoch(SCOPE) == router.epoch(SCOPE) == now


async def test_a_deletion_of_a_router_that_was_cut_off_ends_what_the_others_began_since(
    client: Client,
) -> None:
    """It could not count further than it knew: its deletion comes after theirs all the same."""
    routers = [book(), book()]
    await rounds(client, *routers)
    cut_off, other = routers
    for _ in range(3):
        other.begin(SCOPE, keeps_previous=False)
        await rounds(client, other)
    theirs = other.epoch(SCOPE)
    ended: list[str] = []
    cut_off.on_change = lambda _, before, now: ended.extend(ended_names(before, now))
    cut_off.begin(SCOPE, keeps_previous=False)
    await rounds(client, cut_off, other)
    assert cut_off.epoch(SCOPE) == other.epoch(SCOPE)
    assert other.epoch(SCOPE).is_later(theirs)
    assert theirs.name in ended
    await cut_off.shared(SCOPE)


async def test_a_rotation_leaves_the_epoch_before_alive_and_only_that(client: Client) -> None:
    """S-03: two epochs live. A deletion ends both."""
    routers = [book(), book()]
    await rounds(client, *routers)
    names = [routers[0].of(SCOPE)]
    for _ in range(2):
        names.append(routers[0].begin(SCOPE, keeps_previous=True).name)
        await rounds(client, *routers)
    assert routers[1].epoch(SCOPE).live_names == (names[2], names[1])
    ended: list[str] = []
    routers[1].on_change = lambda _, before, now: ended.extend(ended_names(before, now))
    routers[0].begin(SCOPE, keeps_previous=False)
    await rounds(client, *routers)
    assert sorted(ended) == sorted(names[1:])


@pytest.mark.parametrize("planted", [b"", b"x" * 56, b"\xff" * 56, b"0" * 4096])
async def test_a_value_that_no_router_sealed_is_replaced_and_never_believed(
    client: Client, planted: bytes
) -> None:
    """Nor one that a router sealed for another scope. Whoever writes the store renews nothing."""
    router = book()
    await rounds(client, router)
    now, key = router.epoch(SCOPE), EpochCodec(SECRET).key(SCOPE)
    others = await run_command(client, "GET", EpochCodec(SECRET).key(OTHER))
    for value in (planted, others):
        await run_command(client, "SET", key, value, "EX", 60)
        await run_command(client, "SET", VERSION_KEY, b"changed", "EX", 60)
        await rounds(client, router)
        assert router.epoch(SCOPE) == now
        stored = await run_command(client, "GET", key)
        assert EpochCodec(SECRET).decode(SCOPE, stored) == now
    assert router.malformed_values == 2


async def test_a_key_of_another_type_is_replaced(client: Client) -> None:
    """A list where the epoch should be stops no round."""
    router = book()
    await rounds(client, router)
    key = EpochCodec(SECRET).key(SCOPE)
    await run_command(client, "UNLINK", key)
    await run_command(client, "RPUSH", key, b"x")
    await run_command(client, "UNLINK", VERSION_KEY)
    await rounds(client, router)
    stored = await run_command(client, "GET", key)
    assert EpochCodec(SECRET).decode(SCOPE, stored) == router.epoch(SCOPE)


async def test_an_epoch_that_came_in_between_is_not_overwritten(client: Client) -> None:
    """Whoever read before it learns of it in place of putting its own."""
    router, other = book(), book()
    await rounds(client, router, other)
    key = EpochCodec(SECRET).key(SCOPE)
    read = await run_command(client, "GET", key)
    now = other.begin(SCOPE, keeps_previous=False)
    await rounds(client, other)
    late = EpochCodec(SECRET).encode(SCOPE, ScopeEpoch(2, b"\xff" * 16))
    call = Script("scope_put").call([key, VERSION_KEY], [read, late, b"v", 1000])
    [there] = await run_scripts(client, [call])
    assert EpochCodec(SECRET).decode(SCOPE, there) == now
    assert await run_command(client, "GET", key) == there


async def test_names_and_values_of_the_store_tell_nothing_of_a_scope(client: Client) -> None:
    """The name of a tenant is in no key and in no value, and every key dies by itself."""
    await rounds(client, book("tenant:acme-corporation"))
    keys = [EpochCodec(SECRET).key("tenant:acme-corporation"), VERSION_KEY]
    for key in keys:
        value = await run_command(client, "GET", key)
        assert b"acme" not in key.encode() + value
        assert 0 < await run_command(client, "PTTL", key) <= 86_400_000
    assert EpochCodec(b"another key of the same length" * 2).key("tenant:a") not in keys


async def test_between_changes_a_round_asks_for_the_version_alone(
    own_server: ValkeyProcess,
) -> None:
    """Many scopes cost nothing while nothing happens."""
    client = command_client(own_server.settings)
    router = book(*(f"tenant:{number}" for number in range(600)))
    await rounds(client, router)
    before = await _calls(client)
    await rounds(client, router, times=10)
    after = await _calls(client)
    assert {name: after[name] - before[name] for name in ("get", "pexpire")} == {
        "get": 10,
        "pexpire": 0,
    }
    await client.aclose()


async def _calls(client: Client) -> dict[str, int]:
    text = (await run_command(client, "INFO", "commandstats")).decode()
    rows = [line.removeprefix("cmdstat_") for line in text.split() if line.startswith("cmdstat_")]
    return {
        row.partition(":")[0]: int(row.partition("calls=")[2].partition(",")[0]) for row in rows
    }


async def test_a_store_that_takes_no_writes_is_still_read(own_server: ValkeyProcess) -> None:
    """R-08: a later epoch is learned from a server that became a replica; ours waits."""
    client = command_client(own_server.settings)
    router, other = book(), book()
    await rounds(client, router, other)
    now = router.begin(SCOPE, keeps_previous=False)
    await rounds(client, router)
    await run_command(client, "REPLICAOF", "127.0.0.1", "1")
    await rounds(client, other)
    assert other.epoch(SCOPE) == now
    begun = other.begin(OTHER, keeps_previous=False)
    await rounds(client, other)
    await run_command(client, "REPLICAOF", "NO", "ONE")
    await rounds(client, other, router)
    assert router.epoch(OTHER) == begun
    await client.aclose()


@pytest.fixture(params=["redis_backend", "cluster_backend"])
def redis(request: pytest.FixtureRequest) -> RedisBackend:
    """Return one server, then a cluster."""
    backend: RedisBackend = request.getfixturevalue(request.param)
    return backend


async def test_a_purge_takes_one_scope_out_of_the_store_and_of_every_mirror(
    redis: RedisBackend,
) -> None:
    """S-10: other namespaces of the same replicas stay, tiers go too, and what follows is heard."""
    doomed = NamespaceId("deadbeefdeadbeef")
    many = tuple(block(1_000 + number) for number in range(PORTION_BLOCKS + 10))
    for replica in (A, B):
        await redis.writer.register(record(replica))
        await redis.writer.apply([batch(1, stored=blocks(1, 2), replica=replica)])
        await redis.writer.apply([_of(doomed, batch(2, stored=many, replica=replica))])
    await redis.writer.apply([_of(doomed, batch(3, stored=blocks(7), tier=Tier.DISK))])
    readers = [await redis.reader("r1"), await redis.reader("r2")]
    for reader in readers:
        assert await reader.settle(30)
        assert len(await redis.overlap(reader, many)) == 2
    client = redis.client
    purged = await purge_namespaces(client, (A, B), {doomed})
    assert (purged.keys, purged.blocks, purged.replicas) == (3, 2 * len(many) + 1, 2)
    for replica in (A, B):
        keys = ReplicaKeys(replica)
        assert not [m for m in await run_command(client, "SMEMBERS", keys.sets) if b"dead" in m]
        for tier in Tier:
            suffix = residency_suffix(record().generation, doomed, tier)
            assert not await run_command(client, "EXISTS", keys.residency(suffix))
        assert await run_command(client, "PTTL", keys.changes) > 0
    for reader in readers:
        assert await reader.settle(30)
        assert await redis.overlap(reader, many) == {}
        assert await redis.overlap(reader, blocks(7)) == {}
        assert len(await redis.overlap(reader, blocks(1, 2))) == 2
        assert reader.holdings()[A].blocks == 2
    await redis.writer.apply([batch(4, stored=blocks(3))])
    for reader in readers:
        assert await reader.settle(30)
        found = await redis.overlap(reader, blocks(1, 2, 3))
        assert found[A].gpu_blocks == 3
    assert (await purge_namespaces(client, (A, B), {doomed})).keys == 0
    await redis.writer.apply([_of(doomed, batch(5, stored=blocks(8)))])
    await run_command(client, "UNLINK", ReplicaKeys(A).changes)
    assert (await purge_namespaces(client, (A, B), {doomed})).blocks == 1
    assert await run_command(client, "PTTL", ReplicaKeys(A).changes) > 0


async def test_a_view_is_not_live_before_the_epochs_were_read(own_server: ValkeyProcess) -> None:
    """S-10: after an outage, too: whoever was cut off knows of a deletion first."""
    gate = asyncio.Event()
    gate.set()
    reads = 0

    async def read_first(_: Client) -> None:
        nonlocal reads
        reads += 1
        await gate.wait()

    timing = structs.replace(FAST_ROUNDS, stale_after_s=0.1, live_after_s=0.0)
    mirror = Mirror(
        own_server.settings,
        RouterId("r"),
        clock=time.monotonic,
        rng=Random(1),
        timing=timing,
    )
    mirror.read_first = read_first
    async with mirror:
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        gate.clear()
        await eventually(lambda: mirror.freshness()[0] is Rung.STALE)
        own_server.kill()
        gate.set()
        await asyncio.sleep(0.05)
        gate.clear()
        own_server.start()
        before = reads
        await eventually(lambda: reads > before)
        await asyncio.sleep(0.2)
        assert mirror.freshness()[0] is Rung.STALE
        gate.set()
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)


def test_only_an_agreed_epoch_is_stored_and_any_agreed_one_is_later_than_our_own() -> None:
    """A router that began alone never ends the epoch of the others."""
    own = book().epoch(SCOPE)
    assert own.counter == 0
    assert ScopeEpoch(1, b"\x01" * 16).is_later(own)


def _of(namespace: NamespaceId, changed: ChangeBatch) -> ChangeBatch:
    return structs.replace(changed, namespace=namespace)
