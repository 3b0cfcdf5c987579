"""How long what was announced lives in the store, and how it is renewed before its cap."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from random import Random
from typing import TYPE_CHECKING

import pytest

from sidecar.announce import Announcer
from sidecar.event import RemovedPages, StoredPages
from sidecar.fold import PageFolder
from sidecar.renewal import Renewal
from state.client import RedisSettings, command_client, run_command
from state.model import (
    Generation,
    LeaseTotals,
    ModelIdentity,
    NamespaceId,
    ReplicaFacts,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    Tier,
)
from state.prefix import chain_of, chain_root, pack_tokens
from state.redis_writer import COPY_TTL_S, RedisWriter
from state.schema import ReplicaKeys
from state.timing import StoreTiming
from support.fleet_state import NAMESPACE, A, B, batch, block, blocks, record
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.state_backend import RedisBackend

_KEYS = ReplicaKeys(A)
_SUFFIX = f"g1:{NAMESPACE}:gpu"
_SET, _COPY = _KEYS.residency(_SUFFIX), _KEYS.copy(_SUFFIX)
_HOUR_S = 3600.0


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _writer(backend: RedisBackend, clock: _Clock, timing: StoreTiming | None = None) -> RedisWriter:
    return RedisWriter(backend.client, clock=clock, rng=Random(1), timing=timing or StoreTiming())


async def _ttl_s(backend: RedisBackend, key: str) -> float:
    left_ms: int = await run_command(backend.client, "PTTL", key)
    return left_ms / 1000


async def test_heartbeats_and_changes_extend_a_life_up_to_the_cap_only(
    redis_backend: RedisBackend,
) -> None:
    """S-11: an hour at a time, and never beyond 24 h after the announcement."""
    clock = _Clock()
    writer = _writer(redis_backend, clock)
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    assert 0.8 * _HOUR_S - 5 < await _ttl_s(redis_backend, _SET) <= 1.2 * _HOUR_S
    clock.now_s += 23.5 * _HOUR_S
    await writer.heartbeat(record(), None)
    assert 0.5 * _HOUR_S - 5 < await _ttl_s(redis_backend, _SET) <= 0.5 * _HOUR_S
    assert await _ttl_s(redis_backend, _KEYS.generation) > 0.5 * _HOUR_S
    clock.now_s += 0.25 * _HOUR_S
    await writer.apply([batch(2, stored=blocks(2))])
    assert await _ttl_s(redis_backend, _SET) <= 0.25 * _HOUR_S


async def test_a_swap_begins_a_new_life_and_leaves_no_copy(redis_backend: RedisBackend) -> None:
    clock = _Clock()
    writer = _writer(redis_backend, clock)
    mirror = await redis_backend.mirror()
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1, 2))])
    assert await mirror.settle(30)
    before = mirror.snapshots
    clock.now_s += 23.9 * _HOUR_S
    await writer.copy([batch(0, stored=blocks(1, 2), is_clear=True)])
    assert 0 < await _ttl_s(redis_backend, _COPY) <= COPY_TTL_S
    assert await writer.swap(A, Generation("g1"), {(NAMESPACE, Tier.GPU): 2})
    assert await _ttl_s(redis_backend, _SET) >= 0.8 * _HOUR_S - 5
    assert await run_command(redis_backend.client, "EXISTS", _COPY) == 0
    await writer.apply([batch(2, stored=blocks(3))])
    assert await _ttl_s(redis_backend, _SET) >= 0.8 * _HOUR_S - 5
    late = await redis_backend.mirror("r2")
    for one in (mirror, late):
        assert await one.settle(30)
        assert one.overlap(blocks(1, 2, 3))[A].gpu_blocks == 3
    assert mirror.snapshots == before


async def test_a_copy_that_lost_blocks_is_given_up(redis_backend: RedisBackend) -> None:
    """A server out of memory may evict a copy while it is written."""
    writer = _writer(redis_backend, _Clock())
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1, 2))])
    await writer.copy([batch(0, stored=blocks(1), is_clear=True)])
    await run_command(redis_backend.client, "DEL", _COPY)
    await writer.copy([batch(0, stored=blocks(2))])
    assert not await writer.swap(A, Generation("g1"), {(NAMESPACE, Tier.GPU): 2})
    assert await run_command(redis_backend.client, "SCARD", _SET) == 2
    assert await run_command(redis_backend.client, "EXISTS", _COPY) == 0


async def test_a_copy_that_was_left_behind_does_not_mix_with_the_next(
    redis_backend: RedisBackend,
) -> None:
    writer = _writer(redis_backend, _Clock())
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    await writer.copy([batch(0, stored=blocks(7, 8), is_clear=True)])
    await writer.copy([batch(0, stored=blocks(1), is_clear=True)])
    assert await writer.swap(A, Generation("g1"), {(NAMESPACE, Tier.GPU): 1})
    assert await run_command(redis_backend.client, "SMEMBERS", _SET) == [block(1)]


async def test_a_scan_that_a_swap_overtakes_still_finds_every_block(
    redis_backend: RedisBackend,
) -> None:
    """A mirror may be in the middle of its snapshot: both sets have the same blocks."""
    many = tuple(map(block, range(30_000)))
    writer = _writer(redis_backend, _Clock())
    await writer.register(record())
    await writer.apply([batch(1, stored=many + tuple(map(block, range(30_000, 80_000))))])
    await writer.apply([batch(2, removed=tuple(map(block, range(30_000, 80_000))))])
    await writer.copy([batch(0, stored=many, is_clear=True)])
    found: set[bytes] = set()
    cursor, is_swapped = b"0", False
    for steps in count():
        cursor, members = await run_command(
            redis_backend.client, "SSCAN", _SET, cursor, "COUNT", 1000
        )
        found.update(members)
        if cursor == b"0":
            break
        if steps == 5:
            assert await writer.swap(A, Generation("g1"), {(NAMESPACE, Tier.GPU): 30_000})
            is_swapped = True
    assert is_swapped
    assert found >= set(many)


class _CountingWriter(RedisWriter):
    swaps = 0

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        self.swaps += 1
        return await super().swap(replica, generation, copied_blocks)


def _stored(handle: int, parent: int | None) -> StoredPages:
    return StoredPages(
        handles=(handle,), parent=parent, packed_tokens=pack_tokens([handle]), page_tokens=1
    )


async def test_a_sidecar_renews_before_the_cap_and_no_router_sees_the_replica_cold(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """Several caps pass while blocks come and go; the same generation lives through all."""
    patient = command_client(
        RedisSettings(url=valkey.url, command_timeout_s=10.0, connect_timeout_s=10.0)
    )
    writer = _CountingWriter(patient, clock=time.monotonic, rng=Random(1))
    identity = ModelIdentity(model="m", block_tokens=1)
    folder = PageFolder(identity, 1)
    subject = Announcer(
        writer,
        clock=time.monotonic,
        rng=Random(1),
        heartbeat_interval_s=0.05,
        residency_cap_s=0.6,
    )
    base = ReplicaRecord(
        replica=A,
        endpoint="http://127.0.0.1:8000",
        generation=Generation(""),
        identity=identity,
        page_tokens=1,
        sidecar="s1",
    )
    subject.renew(base, folder)
    subject.add(folder.apply([_stored(handle, handle - 1 or None) for handle in range(1, 101)]))
    chain = chain_of(chain_root(identity, 0), pack_tokens(range(1, 101)), 1, 0)
    mirror = await redis_backend.mirror()
    running = asyncio.create_task(subject.run())
    try:
        await eventually(lambda: bool(mirror.overlap(chain)))
        assert await mirror.settle(30)
        generation, before = mirror.replicas()[A].record.generation, mirror.snapshots
        end_s, number = time.monotonic() + 2.6, 1000
        while time.monotonic() < end_s:
            number += 1
            subject.add(folder.apply([_stored(number, None)]))
            subject.add(folder.apply([RemovedPages(handles=(number - 5,))]))
            await asyncio.sleep(0.01)
            assert mirror.overlap(chain)[A].gpu_blocks == 100
        await asyncio.sleep(0.05)  # the last flush
        late = await redis_backend.mirror("late")
        for one in (mirror, late):
            assert await one.settle(30)
            assert one.holdings()[A].blocks == sum(map(len, folder.resident().values()))
            assert one.overlap(chain)[A].gpu_blocks == 100
            assert one.replicas()[A].record.generation == generation
        assert mirror.snapshots == before
        assert writer.swaps >= 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await patient.aclose()


_FAMILIES = {
    "record": 5.0,
    "load": 3.0,
    "facts": 30.0,
    "generation": 1.2 * _HOUR_S,
    "sets": 1.2 * _HOUR_S,
    "changes": 1.2 * _HOUR_S,
    "blocks": 1.2 * _HOUR_S,
    "copy": COPY_TTL_S,
    "replicas": 120.0,
    "news": 120.0,
    "leases": 6.0,
    "routers": 6.0,
}
"""The bounds that docs/state.md promises, in seconds, by the third part of a key's name."""


async def test_after_a_whole_life_every_key_has_a_time_to_live_within_its_bound(
    redis_backend: RedisBackend,
) -> None:
    """I-8: SCAN over all that registering, storing, clearing, leases and late writes left."""
    writer, client = redis_backend.open_writer(timing=StoreTiming()), redis_backend.client
    mirror = await redis_backend.mirror(store_timing=StoreTiming())
    mirror.publish_leases({A: LeaseTotals(inflight=1)})
    for replica in (A, B):
        await writer.register(record(replica))
        await writer.heartbeat(record(replica), ReplicaLoad(running=1))
        await writer.apply([batch(1, stored=blocks(1, 2), replica=replica)])
        await writer.apply([batch(2, stored=blocks(3), replica=replica, tier=Tier.HOST)])
        await writer.apply([batch(3, removed=blocks(1), replica=replica)])
    await writer.copy([batch(0, stored=blocks(2), is_clear=True)])
    assert await writer.swap(A, Generation("g1"), {(NAMESPACE, Tier.GPU): 1})
    await writer.copy([batch(0, stored=blocks(2), is_clear=True)])
    await writer.apply([batch(4, is_clear=True, replica=B)])
    await writer.apply([batch(5, stored=blocks(4), replica=B)])
    await writer.register(record(B, "g2"))
    await writer.apply([batch(6, stored=blocks(9), replica=B)])  # a paused sidecar's late write
    await writer.deregister(B, Generation("g2"))
    await writer.heartbeat(record(A), ReplicaLoad(running=1), ReplicaFacts(page_tokens=16))
    assert await mirror.settle(30)
    seen, cursor = set(), b"0"
    while True:
        cursor, keys = await run_command(client, "SCAN", cursor, "COUNT", 10)
        for key in keys:
            family = key.decode().split(":")[3]
            left_s = await run_command(client, "PTTL", key) / 1000
            assert 0 < left_s <= _FAMILIES[family], key
            seen.add(family)
        if cursor == b"0":
            break
    assert seen == set(_FAMILIES)


async def test_lives_that_begin_together_do_not_end_together(redis_backend: RedisBackend) -> None:
    """R-20: the times to live of a burst spread evenly over 0.8 to 1.2 hours."""
    writer = redis_backend.writer
    lives_s = []
    for number in range(100):
        replica = ReplicaId(f"n{number}")
        await writer.register(record(replica))
        await writer.apply([batch(1, stored=blocks(1), replica=replica)])
        key = ReplicaKeys(replica).residency(_SUFFIX)
        lives_s.append(await _ttl_s(redis_backend, key))
    assert min(lives_s) > 0.8 * _HOUR_S - 5
    assert max(lives_s) <= 1.2 * _HOUR_S
    width_s = 0.05 * _HOUR_S
    histogram = [0] * 8
    for life_s in lives_s:
        histogram[min(7, int((life_s - 0.8 * _HOUR_S + 5) // width_s))] += 1
    assert all(3 <= bucket <= 30 for bucket in histogram), histogram


@pytest.mark.parametrize("seed", range(3))
async def test_sidecars_that_start_together_do_not_renew_together(seed: int) -> None:
    """R-20: renewals fall between 75 and 90 % of the cap."""
    clock, rng = _Clock(), Random(seed)
    dues = []
    for _ in range(50):
        renewal = Renewal(None, clock, rng, 24 * _HOUR_S)  # type: ignore[arg-type]
        renewal.plan()
        dues.append((renewal.due_s - clock()) / (24 * _HOUR_S))
    assert min(dues) >= 0.75
    assert max(dues) <= 0.9
    assert max(dues) - min(dues) > 0.1
