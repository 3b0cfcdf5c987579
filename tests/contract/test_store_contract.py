"""What every backend of the shared state promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from state.model import Fence, Generation, LeaseTotals, ReplicaLoad, Rung, Tier
from support.fleet_state import A, B, batch, block, blocks, record

if TYPE_CHECKING:
    from state.store import FleetReader
    from support.state_backend import Backend


async def _settled(backend: Backend, router: str = "r1") -> FleetReader:
    reader = await backend.reader(router)
    assert await reader.settle(30)
    return reader


async def test_a_registered_replica_is_seen_with_its_load(backend: Backend) -> None:
    reader = await _settled(backend)
    assert reader.replicas() == {}
    await backend.writer.register(record())
    load = ReplicaLoad(running=3, queued=0)
    assert await backend.writer.heartbeat(record(), load) is Fence.HELD
    assert await reader.settle(30)
    state = reader.replicas()[A]
    assert (state.record, state.load) == (record(), load)
    assert reader.freshness()[0] is Rung.LIVE


async def test_a_snapshot_of_the_fleet_does_not_change(backend: Backend) -> None:
    reader = await _settled(backend)
    before = reader.replicas()
    await backend.writer.register(record())
    assert await reader.settle(30)
    assert before == {}


async def test_a_heartbeat_stores_that_the_replica_drains(backend: Backend) -> None:
    await backend.writer.register(record())
    assert await backend.writer.heartbeat(record(is_draining=True), None) is Fence.HELD
    reader = await _settled(backend)
    state = reader.replicas()[A]
    assert state.record.is_draining
    assert state.load is None


async def test_a_heartbeat_without_a_record_is_unknown(backend: Backend) -> None:
    assert await backend.writer.heartbeat(record(), None) is Fence.UNKNOWN
    await backend.writer.register(record())
    await backend.lapse(A)
    assert await backend.writer.heartbeat(record(), None) is Fence.UNKNOWN
    reader = await _settled(backend)
    assert reader.replicas() == {}


@pytest.mark.parametrize(
    "other", [record(generation="g2"), record(sidecar="s2")], ids=["generation", "sidecar"]
)
async def test_a_heartbeat_is_fenced_after_another_registration(
    backend: Backend, other: object
) -> None:
    await backend.writer.register(record())
    await backend.writer.register(other)  # type: ignore[arg-type]
    assert await backend.writer.heartbeat(record(is_draining=True), None) is Fence.FENCED
    reader = await _settled(backend)
    assert reader.replicas()[A].record == other


async def test_residency_follows_the_changes_in_order(backend: Backend) -> None:
    await backend.writer.register(record())
    reader = await _settled(backend)
    await backend.writer.apply(
        [batch(1, stored=blocks(1, 2, 3)), batch(2, stored=blocks(4), removed=blocks(3))]
    )
    assert await reader.settle(30)
    assert (await backend.overlap(reader, blocks(1, 2, 3, 4)))[A].gpu_blocks == 2
    await backend.writer.apply([batch(3, stored=blocks(3))])
    assert await reader.settle(30)
    assert (await backend.overlap(reader, blocks(1, 2, 3, 4)))[A].gpu_blocks == 4
    await backend.writer.apply([batch(4, stored=blocks(1), is_clear=True)])
    for view in (reader, await _settled(backend, "r2")):
        assert await view.settle(30)
        assert (await backend.overlap(view, blocks(1, 2, 3, 4)))[A].gpu_blocks == 1


async def test_a_hole_ends_the_overlap(backend: Backend) -> None:
    """B26, A61: A holds b0 and b2, B holds b0 and b1; the chain is worth 1 on A and 2 on B."""
    await backend.writer.register(record(A))
    await backend.writer.register(record(B))
    await backend.writer.apply([batch(1, stored=blocks(0, 2), replica=A)])
    await backend.writer.apply([batch(1, stored=blocks(0, 1), replica=B)])
    reader = await _settled(backend)
    found = await backend.overlap(reader, blocks(0, 1, 2))
    assert {name: overlap.gpu_blocks for name, overlap in found.items()} == {A: 1, B: 2}


async def test_lower_tiers_count_apart_from_the_gpu(backend: Backend) -> None:
    await backend.writer.register(record())
    await backend.writer.apply(
        [batch(1, stored=blocks(1)), batch(2, stored=blocks(2, 3), tier=Tier.HOST)]
    )
    reader = await _settled(backend)
    overlap = (await backend.overlap(reader, blocks(1, 2, 3, 4)))[A]
    assert (overlap.gpu_blocks, overlap.any_tier_blocks) == (1, 3)


async def test_a_new_generation_starts_with_nothing_resident(backend: Backend) -> None:
    await backend.writer.register(record())
    await backend.writer.apply([batch(1, stored=blocks(1, 2))])
    reader = await _settled(backend)
    assert await backend.overlap(reader, blocks(1))
    await backend.writer.register(record(generation="g2"))
    assert await reader.settle(30)
    assert await backend.overlap(reader, blocks(1)) == {}


async def test_a_late_write_of_a_dead_generation_has_no_effect(backend: Backend) -> None:
    await backend.writer.register(record())
    reader = await _settled(backend)
    await backend.writer.register(record(generation="g2"))
    await backend.writer.apply([batch(1, stored=blocks(1), generation="g2")])
    assert await reader.settle(30)
    await backend.writer.apply([batch(2, stored=blocks(2)), batch(3, is_clear=True)])
    for view in (reader, await _settled(backend, "r2")):
        assert await view.settle(30)
        assert (await backend.overlap(view, blocks(1, 2)))[A].gpu_blocks == 1
        assert await backend.overlap(view, blocks(2)) == {}


async def test_the_same_generation_registers_again_and_keeps_its_residency(
    backend: Backend,
) -> None:
    await backend.writer.register(record())
    await backend.writer.apply([batch(1, stored=blocks(1))])
    reader = await _settled(backend)
    await backend.lapse(A)
    assert await reader.settle(30)
    assert (reader.replicas(), await backend.overlap(reader, blocks(1))) == ({}, {})
    await backend.writer.register(record(sidecar="s2"))
    assert await reader.settle(30)
    assert (await backend.overlap(reader, blocks(1)))[A].gpu_blocks == 1


async def test_deregistering_leaves_nothing_and_a_dead_generation_cannot(
    backend: Backend,
) -> None:
    await backend.writer.register(record(generation="g2"))
    await backend.writer.apply([batch(1, stored=blocks(1), generation="g2")])
    reader = await _settled(backend)
    await backend.writer.deregister(A, Generation("g1"))
    assert await reader.settle(30)
    assert A in reader.replicas()
    await backend.writer.deregister(A, Generation("g2"))
    assert await reader.settle(30)
    assert (reader.replicas(), await backend.overlap(reader, blocks(1))) == ({}, {})
    await backend.writer.register(record(generation="g2"))
    assert await reader.settle(30)
    assert await backend.overlap(reader, blocks(1)) == {}


async def test_a_batch_of_many_blocks_arrives_whole(backend: Backend) -> None:
    many = tuple(map(block, range(10_000)))
    await backend.writer.register(record())
    reader = await _settled(backend)
    await backend.writer.apply([batch(1, stored=many)])
    assert await reader.settle(30)
    assert (await backend.overlap(reader, many))[A].gpu_blocks == 10_000
    await backend.writer.apply([batch(2, stored=blocks(10_000), removed=many[5_000:])])
    for view in (reader, await _settled(backend, "r2")):
        assert await view.settle(30)
        assert (await backend.overlap(view, many))[A].gpu_blocks == 5_000


async def test_routers_see_the_sum_of_the_others_leases(backend: Backend) -> None:
    first, second, third = [await _settled(backend, name) for name in ("r1", "r2", "r3")]
    first.publish_leases({A: LeaseTotals(inflight=2, uncached_tokens=70)})
    second.publish_leases({A: LeaseTotals(inflight=1), B: LeaseTotals(inflight=5)})
    for reader in (first, second, third, first):
        assert await reader.settle(30)
    assert first.foreign_leases() == {A: LeaseTotals(inflight=1), B: LeaseTotals(inflight=5)}
    assert await third.settle(30)
    assert third.foreign_leases()[A] == LeaseTotals(inflight=3, uncached_tokens=70)
    first.publish_leases({})
    assert await first.settle(30)
    assert await third.settle(30)
    assert third.foreign_leases()[A] == LeaseTotals(inflight=1)
