"""The router's chores: what it remembers of a replica ends with that replica's life."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from msgspec import structs

from policies.hot import HeatMap, HotSettings
from router.chooser import Knowledge
from router.config import StaticReplica
from router.fleet import FleetTable
from router.upkeep import Upkeep
from state.lease import LeaseBook
from state.memory import MemoryState
from state.model import (
    BlockId,
    Generation,
    LeaseTotals,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
    ReplicaState,
    RouterId,
)
from state.placement import Placements

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, Mapping

    from router.resilience import Resilience

GPU = ReplicaId("gpu-0")
CHAIN = (BlockId(b"a" * 16), BlockId(b"b" * 16))


def record(generation: str) -> ReplicaRecord:
    return ReplicaRecord(
        replica=GPU,
        endpoint="http://127.0.0.1:9",
        generation=Generation(generation),
        identity=ModelIdentity(model="m"),
        page_tokens=16,
        capacity_pages=8,
        sidecar="one",
    )


def rig() -> tuple[MemoryState, Knowledge, Upkeep]:
    state = MemoryState(clock=lambda: 0.0)
    reader = state.reader(RouterId("me"))
    know = Knowledge(
        reader=reader,
        leases=LeaseBook(),
        pending=Placements(2.0),
        guessed=Placements(600.0),
        heat=HeatMap(HotSettings()),
    )
    upkeep = Upkeep(know, FleetTable(reader, ()), 600.0, lambda: 0.0)
    return state, know, upkeep


def guessed(know: Knowledge) -> Mapping[ReplicaId, int]:
    return MappingProxyType(know.guessed.of("").overlap(CHAIN, 0.0))


async def test_a_new_generation_voids_what_was_placed_in_the_old_one() -> None:
    """R-18: a restarted replica is empty, whatever was sent to it before."""
    state, know, upkeep = rig()
    await state.register(record("first"))
    upkeep.tick()
    know.guessed.of("").place(GPU, CHAIN, 0.0)
    know.pending.of("").place(GPU, CHAIN, 0.0)
    upkeep.tick()
    assert guessed(know) == {GPU: 2}
    await state.register(record("second"))
    upkeep.tick()
    assert guessed(know) == {}
    assert know.pending.of("").overlap(CHAIN, 0.0) == {}


async def test_what_a_newcomer_was_sent_before_the_first_look_at_it_counts() -> None:
    state, know, upkeep = rig()
    upkeep.tick()
    await state.register(record("first"))
    know.pending.of("").place(GPU, CHAIN, 0.0)
    upkeep.tick()
    assert know.pending.of("").overlap(CHAIN, 0.0) == {GPU: 2}


async def test_a_fleet_in_which_nothing_changed_is_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty times a second, of a thousand replicas: snapshots that are the same say the same."""
    state, know, upkeep = rig()
    looks = []

    class Snapshot(UserDict[ReplicaId, ReplicaState]):
        def items(self) -> ItemsView[ReplicaId, ReplicaState]:
            looks.append(len(self))
            return super().items()

    await state.register(record("first"))
    for generation in ("first", "second"):
        await state.register(record(generation))
        seen = Snapshot(state.reader(RouterId("me")).replicas())
        monkeypatch.setattr(know.reader, "replicas", lambda seen=seen: seen)
        upkeep.tick()
        assert looks
        looks.clear()
        for _ in range(3):
            upkeep.tick()
        assert not looks


async def test_the_bound_of_guesses_outlives_a_restart() -> None:
    """Eight pages of 16 tokens are two blocks of 64, in every life."""
    state, know, upkeep = rig()
    long_chain = tuple(BlockId(bytes([n]) * 16) for n in range(5))
    for generation in ("first", "second"):
        await state.register(record(generation))
        upkeep.tick()
        know.guessed.of("").place(GPU, long_chain, 0.0)
        assert know.guessed.resident(GPU) == 2


async def test_leases_of_a_replica_that_left_do_not_count_when_it_comes_back() -> None:
    """A25: old leases end without touching the new counts."""
    state, know, upkeep = rig()
    await state.register(record("first"))
    upkeep.tick()
    old = know.leases.acquire(GPU, 100, 0.0)
    await state.deregister(GPU, Generation("first"))
    upkeep.tick()
    await state.register(record("second"))
    upkeep.tick()
    assert know.leases.inflight(GPU) == 0
    know.leases.acquire(GPU, 100, 0.0)
    old.first_byte()
    assert know.leases.inflight(GPU) == 1


async def test_leases_are_published_when_they_change() -> None:
    state, know, upkeep = rig()
    await state.register(record("first"))
    know.leases.acquire(GPU, 100, 0.0)
    upkeep.tick()
    assert state.leases_besides(RouterId("other")) == {
        GPU: LeaseTotals(inflight=1, uncached_tokens=100, prefilling=1)
    }


async def test_a_sidecar_that_comes_or_goes_is_no_other_life_of_its_replica() -> None:
    """Only another generation is: else every replica would start slowly with each router."""
    state, know, _ = rig()
    seen: list[ReplicaId] = []
    resilience = SimpleNamespace(availability=SimpleNamespace(restarted=seen.append), tick=int)
    fleet = FleetTable(know.reader, (StaticReplica(url="http://127.0.0.1:9", name=GPU),))
    upkeep = Upkeep(know, fleet, 600.0, lambda: 0.0, resilience=cast("Resilience", resilience))
    upkeep.tick()
    await state.register(record("first"))
    upkeep.tick()
    await state.deregister(GPU, Generation("first"))
    upkeep.tick()
    assert seen == []
    await state.register(record("second"))
    upkeep.tick()
    assert seen == [GPU]


async def test_what_is_guessed_of_a_replica_outlives_its_sidecar_and_not_its_cache() -> None:
    state, know, upkeep = rig()
    await state.register(structs.replace(record("first"), cache_life="a"))
    upkeep.tick()
    know.guessed.of("").place(GPU, CHAIN, 0.0)
    await state.register(structs.replace(record("second"), cache_life="a"))
    upkeep.tick()
    assert know.guessed.resident(GPU) == 2
    await state.register(structs.replace(record("third"), cache_life="b"))
    upkeep.tick()
    assert know.guessed.resident(GPU) == 0


async def test_a_newcomer_is_told_from_a_replica_that_returns() -> None:
    """Its sidecar was stopped and started: the replica left, and came in the same life."""
    state, know, _ = rig()
    availability = SimpleNamespace(restarted=lambda _: None, has_returned=None)
    resilience = SimpleNamespace(availability=availability, tick=int)
    fleet = FleetTable(know.reader, ())
    upkeep = Upkeep(know, fleet, 600.0, lambda: 0.0, resilience=cast("Resilience", resilience))
    has_returned = cast("Callable[[ReplicaId], bool]", availability.has_returned)
    for generation, life, is_back in (("1", "a", False), ("2", "a", True), ("3", "b", False)):
        await state.register(structs.replace(record(generation), cache_life=life))
        assert has_returned(GPU) is is_back
        upkeep.tick()
        assert has_returned(GPU) is is_back
        await state.deregister(GPU, Generation(generation))
        upkeep.tick()


@pytest.mark.parametrize(
    ("lives", "restarts"),
    [(("", ""), [GPU]), (("a", "b"), [GPU]), (("a", ""), [GPU]), (("a", "a"), [])],
)
async def test_a_store_that_lost_everything_makes_no_cache_cold(
    lives: tuple[str, str], restarts: list[ReplicaId]
) -> None:
    """Else the last replica to register again gets what the fleet had: all others start slowly."""
    state, know, _ = rig()
    seen: list[ReplicaId] = []
    resilience = SimpleNamespace(availability=SimpleNamespace(restarted=seen.append), tick=int)
    fleet = FleetTable(know.reader, ())
    upkeep = Upkeep(know, fleet, 600.0, lambda: 0.0, resilience=cast("Resilience", resilience))
    for generation, life in zip(("first", "second"), lives, strict=True):
        await state.register(structs.replace(record(generation), cache_life=life))
        upkeep.tick()
    assert seen == restarts
