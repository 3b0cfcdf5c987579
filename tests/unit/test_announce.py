from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from sidecar.announce import CHUNK_BLOCKS, Announcer, FencedError
from sidecar.event import ClearedPages, RemovedPages, StoredPages
from sidecar.fold import PageFolder
from state.model import (
    BlockId,
    ChangeBatch,
    Fence,
    Generation,
    ModelIdentity,
    NamespaceId,
    ReplicaFacts,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    Tier,
)
from state.prefix import pack_tokens
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

IDENTITY = ModelIdentity(model="m", block_tokens=1)
RECORD = ReplicaRecord(
    replica=ReplicaId("r1"),
    endpoint="http://gpu-7:8000",
    generation=Generation(""),
    identity=IDENTITY,
    page_tokens=1,
    sidecar="s1",
)


class RecordingWriter:
    """Keeps what it is told; fails the next ``failures`` writes of residency."""

    def __init__(self) -> None:
        self.records: list[ReplicaRecord] = []
        self.loads: list[ReplicaLoad | None] = []
        self.writes: list[list[ChangeBatch]] = []
        self.withdrawn: list[Generation] = []
        self.copies: list[list[ChangeBatch]] = []
        self.swaps: list[dict[tuple[NamespaceId, Tier], int]] = []
        self.fence = Fence.HELD
        self.failures = 0
        self.lost_registrations = 0

    async def register(self, record: ReplicaRecord) -> None:
        if self.lost_registrations:
            self.lost_registrations -= 1
            message = "lost on purpose"
            raise StateError(message)
        self.records.append(record)

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        del record, facts
        self.loads.append(load)
        return self.fence

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        if self.failures:
            self.failures -= 1
            message = "failed on purpose"
            raise StateError(message)
        self.writes.append(list(changes))

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        del replica
        self.withdrawn.append(generation)

    async def copy(self, changes: Sequence[ChangeBatch]) -> None:
        self.copies.append(list(changes))

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        del replica, generation
        self.swaps.append(dict(copied_blocks))
        return True

    def batches(self) -> list[ChangeBatch]:
        return [batch for write in self.writes for batch in write]

    def held(self) -> set[BlockId]:
        blocks: set[BlockId] = set()
        for batch in self.batches():
            if batch.generation != self.records[-1].generation:
                continue
            blocks = set() if batch.is_clear else blocks
            blocks = (blocks - set(batch.removed)) | set(batch.stored)
        return blocks


def announcer(writer: RecordingWriter) -> Announcer:
    return Announcer(
        writer,
        clock=asyncio.get_running_loop().time,
        rng=random.Random(1),
        flush_interval_s=0.001,
    )


async def while_running(subject: Announcer, is_so: Callable[[], bool]) -> None:
    running = asyncio.create_task(subject.run())
    try:
        async with asyncio.timeout(20):
            while not is_so() and not running.done():  # noqa: ASYNC110 - any state may be awaited
                await asyncio.sleep(0)
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def stored(first: int, count: int) -> StoredPages:
    return StoredPages(
        handles=tuple(range(first, first + count)),
        parent=None,
        packed_tokens=pack_tokens(range(first, first + count)),
        page_tokens=1,
    )


def all_blocks(folder: PageFolder) -> set[BlockId]:
    return {block for blocks in folder.resident().values() for block in blocks}


def assert_well_formed(writer: RecordingWriter) -> None:
    for write in writer.writes:
        assert sum(len(batch.stored) + len(batch.removed) for batch in write) <= CHUNK_BLOCKS
    by_generation = itertools.groupby(writer.batches(), key=lambda batch: batch.generation)
    for _, batches in by_generation:
        numbers = [batch.sequence for batch in batches]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_large_cache_is_announced_in_bounded_writes() -> None:
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    folder.apply([stored(0, 3 * CHUNK_BLOCKS + 5)])
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    await while_running(subject, lambda: len(writer.held()) == 3 * CHUNK_BLOCKS + 5)
    assert writer.held() == all_blocks(folder)
    assert len(writer.writes) == 4
    assert_well_formed(writer)


async def test_changes_between_writes_are_written_as_their_net_effect() -> None:
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    await while_running(subject, lambda: bool(writer.loads))
    known = stored(30, 1)
    subject.add(folder.apply([known]))
    await while_running(subject, lambda: bool(writer.writes))
    writer.writes.clear()
    for events in (
        [RemovedPages(handles=(30,))],
        [known],
        [stored(0, 3)],
        [RemovedPages(handles=(2,))],
        [stored(10, 1)],
        [RemovedPages(handles=(10,))],
    ):
        subject.add(folder.apply(events))
    await while_running(subject, lambda: bool(writer.writes))
    (batch,) = writer.batches()
    assert len(all_blocks(folder)) == 3
    assert len(batch.stored) == 2
    assert set(batch.stored) < all_blocks(folder)
    assert batch.removed == ()


async def test_a_clear_is_written_before_what_was_stored_after_it() -> None:
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    await while_running(subject, lambda: bool(writer.loads))
    subject.add(folder.apply([stored(0, 3)]))
    subject.add(folder.apply([ClearedPages(), stored(20, 2)]))
    await while_running(subject, lambda: bool(writer.writes))
    clear, change = writer.batches()
    assert clear.is_clear
    assert (clear.stored, clear.removed) == ((), ())
    assert set(change.stored) == all_blocks(folder)
    assert_well_formed(writer)


async def test_a_failed_write_is_made_good_under_a_new_generation() -> None:
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    await while_running(subject, lambda: bool(writer.loads))
    writer.failures = 2
    subject.add(folder.apply([stored(0, 3)]))
    await while_running(subject, lambda: len(writer.held()) == 3)
    assert writer.held() == all_blocks(folder)
    assert len({record.generation for record in writer.records}) == 3
    assert_well_formed(writer)
    [life] = {record.cache_life for record in writer.records}
    subject.renew(RECORD, PageFolder(IDENTITY, 1))
    await while_running(subject, lambda: writer.records[-1].cache_life != life)


async def test_a_foreign_registration_ends_the_announcer() -> None:
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    writer.fence = Fence.FENCED
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    with pytest.raises(FencedError, match="r1"):
        await while_running(subject, lambda: False)


async def test_a_dead_predecessors_record_does_not_end_an_announcer_that_never_registered() -> None:
    """R-18: a sidecar was killed, and the first registration of the next one is lost."""
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    writer.fence, writer.lost_registrations = Fence.FENCED, 1
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    with pytest.raises(FencedError):  # by the first heartbeat: the fake's fence never changes
        await while_running(subject, lambda: False)
    assert len(writer.records) == 1


async def test_nothing_is_written_after_a_withdrawal_until_the_next_renewal() -> None:
    writer, folder = RecordingWriter(), PageFolder(IDENTITY, 1)
    subject = announcer(writer)
    subject.renew(RECORD, folder)
    await while_running(subject, lambda: bool(writer.loads))
    subject.withdraw()
    subject.add(folder.apply([stored(0, 3)]))
    await while_running(subject, lambda: bool(writer.withdrawn))
    assert writer.withdrawn == [writer.records[0].generation]
    assert not writer.writes
    subject.renew(RECORD, folder)
    await while_running(subject, lambda: bool(writer.writes))
    assert writer.held() == all_blocks(folder)
    assert writer.records[0].generation != writer.records[1].generation


async def test_a_cancellation_that_the_store_swallowed_still_ends_the_announcer() -> None:
    """``asyncio.wait_for`` of CPython 3.11 swallows one when what it waits for ends with it."""

    class Swallowing(RecordingWriter):
        async def heartbeat(
            self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
        ) -> Fence:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            return await super().heartbeat(record, load, facts)

    writer = Swallowing()
    subject = announcer(writer)
    subject.renew(RECORD, PageFolder(IDENTITY, 1))
    running = asyncio.create_task(subject.run())
    while not writer.records:  # noqa: ASYNC110 - the writer sets no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert running.cancelled()
