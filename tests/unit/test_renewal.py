"""Renewing what was announced while the engine goes on storing and removing."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from sidecar.announce import Announcer
from sidecar.event import RemovedPages, StoredPages
from sidecar.fold import PageFolder
from state.model import Fence, Generation, ModelIdentity, ReplicaId, ReplicaRecord
from state.prefix import pack_tokens
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from state.model import BlockId, ChangeBatch, NamespaceId, ReplicaFacts, ReplicaLoad, Tier

CAP_S = 1000.0
IDENTITY = ModelIdentity(model="m", block_tokens=1)
RECORD = ReplicaRecord(
    replica=ReplicaId("r1"),
    endpoint="http://127.0.0.1:1",
    generation=Generation(""),
    identity=IDENTITY,
    page_tokens=1,
    sidecar="s1",
)


class _Store:
    """What a store would hold, its copy, and a hook between the two."""

    def __init__(self) -> None:
        self.held: set[BlockId] = set()
        self.copied: set[BlockId] = set()
        self.generations: list[Generation] = []
        self.heartbeats = self.copies = self.swaps = 0
        self.while_copying: Callable[[], None] = lambda: None
        self.is_broken = False
        self.loses_copies = False

    async def register(self, record: ReplicaRecord) -> None:
        self.generations.append(record.generation)
        self.held = set()

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        del record, load, facts
        self.heartbeats += 1
        return Fence.HELD

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        for batch in changes:
            self.held = (self.held - set(batch.removed)) | set(batch.stored)

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        del replica, generation

    async def copy(self, changes: Sequence[ChangeBatch]) -> None:
        self.copies += 1
        self.while_copying()
        if self.is_broken:
            message = "broken on purpose"
            raise StateError(message)
        for batch in changes:
            self.copied = set() if batch.is_clear else self.copied
            self.copied |= set(batch.stored)

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        del replica, generation
        if self.loses_copies or sum(copied_blocks.values()) != len(self.copied):
            return False
        self.held = self.copied
        self.swaps += 1
        return True


class _Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = _Store()
        self.folder = PageFolder(IDENTITY, 1)
        self.announcer = Announcer(
            self.store,
            clock=lambda: self.now_s,
            rng=Random(1),
            heartbeat_interval_s=1.0,
            residency_cap_s=CAP_S,
        )

    def store_pages(self, *handles: int) -> None:
        for handle in handles:
            page = StoredPages(
                handles=(handle,), parent=None, packed_tokens=pack_tokens([handle]), page_tokens=1
            )
            self.announcer.add(self.folder.apply([page]))

    def remove_pages(self, *handles: int) -> None:
        self.announcer.add(self.folder.apply([RemovedPages(handles=handles)]))

    def resident(self) -> set[BlockId]:
        return {block for blocks in self.folder.resident().values() for block in blocks}

    async def steps(self, count: int) -> None:
        """Let the announcer do so many of its most urgent things."""
        for _ in range(count):
            async with asyncio.timeout(20):
                await self.announcer._step()

    async def start(self, *handles: int) -> None:
        self.announcer.renew(RECORD, self.folder)
        self.store_pages(*handles)
        await self.steps(1)
        assert self.store.held == self.resident()

    async def pass_until_due(self) -> None:
        """Let the time come, with the heartbeat that is due as well."""
        self.now_s += CAP_S * 0.9
        await self.steps(1)


async def test_everything_is_copied_and_swapped_in_before_the_cap_in_the_same_generation() -> None:
    rig = _Rig()
    await rig.start(1, 2, 3)
    rig.now_s += CAP_S * 0.7
    await rig.steps(1)
    assert rig.store.copies == 0
    rig.now_s += CAP_S * 0.2
    await rig.steps(2)
    assert (rig.store.copies, rig.store.swaps, len(rig.store.generations)) == (1, 1, 1)
    assert rig.store.held == rig.resident()


async def test_a_page_stored_before_and_removed_during_the_copy_does_not_come_back() -> None:
    """The two would cancel each other out if they were written together."""
    rig = _Rig()
    await rig.start(1, 2)
    await rig.pass_until_due()
    rig.store_pages(3)
    rig.store.while_copying = lambda: rig.remove_pages(3)
    await rig.steps(1)
    assert rig.store.swaps == 1
    rig.now_s += 0.5
    await rig.steps(1)
    assert rig.store.held == rig.resident()


async def test_changes_during_the_copy_are_written_after_the_swap() -> None:
    rig = _Rig()
    await rig.start(*range(1, 6))
    await rig.pass_until_due()

    def change() -> None:
        rig.remove_pages(1)
        rig.store_pages(9)

    rig.store.while_copying = change
    await rig.steps(1)
    assert rig.store.swaps == 1
    rig.now_s += 0.5
    await rig.steps(1)
    assert rig.store.held == rig.resident()


@pytest.mark.parametrize("fault", ["is_broken", "loses_copies"])
async def test_a_renewal_that_fails_is_tried_again_and_voids_nothing(fault: str) -> None:
    rig = _Rig()
    await rig.start(1, 2)
    setattr(rig.store, fault, True)
    await rig.pass_until_due()
    await rig.steps(1)
    assert (rig.store.copies, rig.store.swaps) == (1, 0)
    assert rig.store.held == rig.resident()
    setattr(rig.store, fault, False)
    rig.now_s += CAP_S * 0.011
    await rig.steps(2)
    assert (rig.store.swaps, len(rig.store.generations)) == (1, 1)


async def test_heartbeats_go_on_during_a_long_copy() -> None:
    rig = _Rig()
    await rig.start(*range(1, 12_002))
    await rig.pass_until_due()
    before = rig.store.heartbeats

    def pass_time() -> None:
        rig.now_s += 1.5

    rig.store.while_copying = pass_time
    await rig.steps(1)
    assert rig.store.copies == 4
    assert rig.store.heartbeats == before + 4


async def test_a_new_life_ends_a_renewal() -> None:
    rig = _Rig()
    await rig.start(*range(1, 9_000))
    await rig.pass_until_due()
    fresh = PageFolder(IDENTITY, 1)
    rig.store.while_copying = lambda: rig.announcer.renew(RECORD, fresh)
    await rig.steps(1)
    assert (rig.store.copies, rig.store.swaps) == (1, 0)
    await rig.steps(1)
    assert (len(rig.store.generations), rig.store.held) == (2, set())
