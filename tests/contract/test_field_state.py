"""Faults that users reported of shared indexes, on every backend of the shared state."""

from __future__ import annotations

import asyncio
import itertools
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from state.client import run_command
from state.model import Fence, Generation, ReplicaId, Tier
from state.redis_writer import RedisWriter
from state.schema import ReplicaKeys
from state.timing import StoreTiming
from support.fleet import until
from support.fleet_state import A, B, batch, block, blocks, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from state.model import BlockId
    from state.store import FleetReader
    from support.state_backend import Backend, RedisBackend
    from support.valkey import ValkeyProcess


async def settled(backend: Backend, router: str = "r1") -> FleetReader:
    reader = await backend.reader(router)
    assert await reader.settle(30)
    return reader


async def runs(
    backend: Backend, reader: FleetReader, chain: Sequence[BlockId]
) -> dict[ReplicaId, int]:
    found = await backend.overlap(reader, chain)
    return {name: overlap.gpu_blocks for name, overlap in found.items()}


async def test_what_a_removed_replica_said_late_never_brings_it_back(backend: Backend) -> None:
    """B02, B03: stored, removed, and a queued store arrives; nor does its next life hold it."""
    await backend.writer.register(record())
    await backend.writer.apply([batch(1, stored=blocks(1, 2))])
    reader = await settled(backend)
    assert await runs(backend, reader, blocks(1, 2)) == {A: 2}
    await backend.writer.deregister(A, Generation("g1"))
    await backend.writer.apply([batch(2, stored=blocks(3)), batch(3, stored=blocks(1))])
    for view in (reader, await settled(backend, "r2")):
        assert await view.settle(30)
        assert view.replicas() == {}
        assert await backend.overlap(view, blocks(1, 2)) == {}
        assert await backend.overlap(view, blocks(3)) == {}
    await backend.writer.register(record(generation="g2"))
    await backend.writer.apply([batch(4, stored=blocks(3))])
    await backend.writer.apply([batch(1, stored=blocks(2), generation="g2")])
    for view in (reader, await settled(backend, "r3")):
        assert await view.settle(30)
        assert await backend.overlap(view, blocks(1)) == {}
        assert await backend.overlap(view, blocks(3)) == {}
        assert await runs(backend, view, blocks(2)) == {A: 1}


async def test_a_clear_empties_one_replica_in_every_tier_and_no_other(backend: Backend) -> None:
    """B04, C32: two replicas hold the same; one clears."""
    chain = blocks(1, 2, 3, 4)
    for name in (A, B):
        await backend.writer.register(record(name))
        await backend.writer.apply([batch(1, stored=chain[:2], replica=name)])
        await backend.writer.apply([batch(2, stored=chain[2:], replica=name, tier=Tier.HOST)])
    reader = await settled(backend)
    before = await backend.overlap(reader, chain)
    assert {overlap.any_tier_blocks for overlap in before.values()} == {4}
    await backend.writer.apply([batch(3, is_clear=True)])
    for view in (reader, await settled(backend, "r2")):
        assert await view.settle(30)
        found = await backend.overlap(view, chain)
        assert set(found) == {B}
        assert (found[B].gpu_blocks, found[B].any_tier_blocks) == (2, 4)


ORDERS = [order for order in itertools.permutations(range(3)) if order.index(1) < order.index(2)]
"""Of a store on A and two on B, which keep their own order."""


@pytest.mark.parametrize("order", ORDERS)
async def test_every_holder_is_found_with_its_own_run(
    backend: Backend, order: tuple[int, ...]
) -> None:
    """B28: block 1 is held by A and B, block 2 by B alone; whoever came first does not matter."""
    for name in (A, B) if order[0] == 0 else (B, A):
        await backend.writer.register(record(name))
    stores = [
        batch(1, stored=blocks(1), replica=A),
        batch(1, stored=blocks(1), replica=B),
        batch(2, stored=blocks(2), replica=B),
    ]
    for index in order:
        await backend.writer.apply([stores[index]])
    reader = await settled(backend)
    assert await runs(backend, reader, blocks(1, 2)) == {A: 1, B: 2}
    assert await runs(backend, reader, blocks(1)) == {A: 1, B: 1}
    assert await runs(backend, reader, blocks(2)) == {B: 1}


@pytest.mark.parametrize("replicas", [32, 130])
async def test_all_holders_of_a_block_are_seen_however_many(
    backend: Backend, replicas: int
) -> None:
    """C17, C28, B48: no list of the first ten, and no machine word that is full."""
    names = [ReplicaId(f"r{number}") for number in range(replicas)]
    for number, name in enumerate(names):
        await backend.writer.register(record(name))
        stored = blocks(1) if number % 2 else blocks(1, 2)
        await backend.writer.apply([batch(1, stored=stored, replica=name)])
    reader = await settled(backend)
    expected = {name: 2 - number % 2 for number, name in enumerate(names)}
    assert await runs(backend, reader, blocks(1, 2, 3)) == expected
    await backend.writer.apply([batch(2, removed=blocks(1), replica=names[7])])
    assert await reader.settle(30)
    del expected[names[7]]
    assert await runs(backend, reader, blocks(1, 2, 3)) == expected


async def test_of_writers_that_race_one_holds_and_the_others_are_fenced(backend: Backend) -> None:
    """A91: what is compared and what is set is one step; a loser changes nothing any more."""
    writers = 8
    for race in range(10):
        mine = [
            record(generation=f"g{race}-{number}", sidecar=f"s{number}")
            for number in range(writers)
        ]

        await asyncio.gather(*(backend.writer.register(one) for one in mine))
        beats = await asyncio.gather(*(backend.writer.heartbeat(one, None) for one in mine))
        assert sorted(beats) == sorted([Fence.HELD] + [Fence.FENCED] * (writers - 1))
        holder = mine[beats.index(Fence.HELD)]
        losers = [one for one in mine if one is not holder]
        writes = [
            batch(1, stored=blocks(race), generation=one.generation, is_clear=True)
            for one in losers
        ]
        await asyncio.gather(
            backend.writer.apply([batch(1, stored=blocks(100), generation=holder.generation)]),
            *(backend.writer.deregister(A, one.generation) for one in losers),
            *(backend.writer.apply([write]) for write in writes),
        )
        reader = await settled(backend, f"r{race}")
        assert reader.replicas()[A].record == holder
        assert await backend.overlap(reader, blocks(race)) == {}
        assert await runs(backend, reader, blocks(100)) == {A: 1}


async def test_heartbeats_to_an_emptied_store_take_no_replica_out(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """A85: it stays until its sidecar registers again, however long that takes it."""
    writer, mirror = redis_backend.writer, await redis_backend.mirror()
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    assert await mirror.settle(30)
    await valkey.command("FLUSHALL")
    for _ in range(4):
        assert await writer.heartbeat(record(), None) is Fence.UNKNOWN
        assert await mirror.settle(30)
        assert list(mirror.replicas()) == [A]
        assert mirror.overlap(blocks(1))[A].gpu_blocks == 1
    await writer.register(record(generation="g2"))
    await writer.apply([batch(1, stored=blocks(2), generation="g2")])
    assert await mirror.settle(30)
    assert mirror.overlap(blocks(1)) == {}
    assert mirror.overlap(blocks(2))[A].gpu_blocks == 1


REPLICAS, HELD_BLOCKS = 10, 4_000


async def used_bytes(valkey: ValkeyProcess) -> int:
    """Return what the server's data takes."""
    info = (await valkey.command("INFO", "memory")).decode()
    return int(info.partition("used_memory_dataset:")[2].split()[0])


async def commands_used(valkey: ValkeyProcess) -> set[str]:
    """Return the commands that were used since the statistics were reset."""
    info = (await valkey.command("INFO", "commandstats")).decode()
    lines = [line for line in info.splitlines() if line.startswith("cmdstat_")]
    return {line.removeprefix("cmdstat_").partition(":")[0] for line in lines}


async def test_the_index_of_replicas_that_vanish_goes_without_a_scan(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """B47: half deregister, half just stop; bytes and keys return to what they were."""
    timing = StoreTiming(record_ttl_s=1.0, residency_ttl_s=1.5)
    writer = RedisWriter(redis_backend.client, clock=time.monotonic, rng=Random(1), timing=timing)
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    await valkey.command("CONFIG", "RESETSTAT")
    base_bytes = await used_bytes(valkey)
    names = [ReplicaId(f"r{number}") for number in range(REPLICAS)]

    async def is_mirrored() -> bool:
        return sum(holding.blocks for holding in mirror.holdings().values()) == (
            REPLICAS * HELD_BLOCKS
        )

    for number, name in enumerate(names):
        held = tuple(map(block, range(number * 1_000, number * 1_000 + HELD_BLOCKS)))
        await writer.register(record(name))
        await writer.apply([batch(1, stored=held, replica=name)])
    await until(is_mirrored, "every block is mirrored")
    peak_bytes = await used_bytes(valkey)
    assert peak_bytes - base_bytes > 40 * REPLICAS * HELD_BLOCKS
    for name in names[::2]:
        await writer.deregister(name, Generation("g1"))
        key = ReplicaKeys(name).residency(f"g1:{batch(1).namespace}:gpu")
        assert not await run_command(redis_backend.client, "EXISTS", key)

    async def is_gone() -> bool:
        keys = [ReplicaKeys(name) for name in names]
        wanted = [key for one in keys for key in (one.record, one.sets, one.changes)]
        wanted += [one.residency(f"g1:{batch(1).namespace}:gpu") for one in keys]
        left = await asyncio.gather(
            *(run_command(redis_backend.client, "EXISTS", key) for key in wanted)
        )
        return not any(left) and not mirror._residency.indexed_blocks

    await until(is_gone, "no key and no block of any replica")
    assert await used_bytes(valkey) - base_bytes < (peak_bytes - base_bytes) / 3
    assert await valkey.command("DBSIZE") <= 4  # replicas, their news, routers, leases
    assert mirror._residency.retired_blocks == 0
    stats = await commands_used(valkey)
    assert "zrange" in stats
    assert not stats & {"keys", "scan", "flushall", "flushdb", "randomkey"}
