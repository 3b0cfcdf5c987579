"""Pages on their way to and from disk: what is written once, what is lost, what is counted."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sidecar.clock import preset_cost
from sidecar.cost import MeasuredCosts
from sidecar.exchange import Exchange
from sidecar.mover import Mover
from sidecar.pagechange import PagesRemoved, PagesStored
from sidecar.pool import PageId
from sidecar.store import DiskStore, HostMemory, StoreError
from sidecar.tier import LowerTier
from sidecar.tiers import Tiers
from sidecar.tree import PageFacts
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    import pytest

PAGE_BYTES = 64
FACTS = PageFacts(parent=None, packed_tokens=b"", depth=0, tenant="", salt=None)


def key(number: int) -> BlockId:
    return BlockId(bytes([number]) * 16)


class Slowly:
    """A disk that writes when it is let, and fails for some keys."""

    def __init__(self, disk: DiskStore) -> None:
        self.written: list[BlockId] = []
        self.bad: set[BlockId] = set()
        self.began, self.may = threading.Event(), threading.Event()
        self.may.set()
        self._write = disk.write
        disk.write = self  # type: ignore[method-assign, assignment]

    def __call__(self, page_key: BlockId, content: memoryview | bytes) -> None:
        self.began.set()
        assert self.may.wait(10)
        if page_key in self.bad:
            message = "full"
            raise StoreError(message)
        self.written.append(page_key)
        self._write(page_key, content)


class Below:
    """Host and disk under a device that is not there: ``demote`` runs a step that saves pages."""

    def __init__(self, directory: Path, host: int, disk: int) -> None:
        self.store = DiskStore(directory, "test", PAGE_BYTES, 1 << 30)
        self.store.open()
        self.disk = Slowly(self.store)
        self.costs = MeasuredCosts(preset_cost("llama-8b-h100"), PAGE_BYTES)
        self.tiers = Tiers(
            self.costs, 4, host=LowerTier("host", host), disk=LowerTier("disk", disk)
        )
        self.exchange = Exchange(self.tiers)
        self.mover = Mover(self.exchange, self.costs, HostMemory(host, PAGE_BYTES), self.store)

    @property
    def counts(self) -> tuple[int, int]:
        """Pages that came to the disk, and that did not."""
        counts = self.mover.counts["disk"]
        return counts.moved_in_pages, counts.dropped

    def demote(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.exchange.let_go(PageId(0), key(number), FACTS, was_reused=False)
        moves = self.exchange.drain_moves()
        saves, _ = self.mover.batch(moves)
        for save, demotion in zip(saves, moves.demotions, strict=True):
            save.target[:] = demotion.key * 4
        self.exchange.finish(moves)
        self.mover.finish(moves, 0.0, 0.0)

    def on_disk(self, numbers: Iterable[int]) -> list[int]:
        assert self.tiers.disk is not None
        return [number for number in numbers if key(number) in self.tiers.disk]

    async def until(self, settled_pages: int) -> None:
        async with asyncio.timeout(20):
            while sum(self.counts) < settled_pages:  # noqa: ASYNC110 - counters tell nobody
                await asyncio.sleep(0.001)


@asynccontextmanager
async def below(directory: Path, host: int = 8, disk: int = 64) -> AsyncIterator[Below]:
    one = Below(directory / "pages", host, disk)
    writing = asyncio.create_task(one.mover.write_behind())
    try:
        yield one
    finally:
        one.disk.may.set()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        one.store.close()
    for tier in (one.tiers.host, one.tiers.disk):
        assert tier is not None
        tier.pool.audit()
        assert tier.pool.held_pages == 0


async def test_what_comes_to_the_host_goes_to_disk_with_its_content(tmp_path: Path) -> None:
    async with below(tmp_path) as one:
        told: list[int] = []
        one.mover.on_news = lambda: told.append(sum(one.counts))
        one.demote(range(5))
        await one.until(5)
        assert one.counts == (5, 0)
        assert told == [5]
        assert one.on_disk(range(6)) == [0, 1, 2, 3, 4]
        assert [one.store.read(key(number)) for number in range(5)] == [
            key(number) * 4 for number in range(5)
        ]
        stored = [each for each in one.exchange.drain_changes() if isinstance(each, PagesStored)]
        assert [each.tier for each in stored] == ["host"] * 5 + ["disk"] * 5


async def test_a_page_that_the_host_gave_up_before_it_was_written_is_counted(
    tmp_path: Path,
) -> None:
    async with below(tmp_path, host=4) as one:
        one.disk.may.clear()
        one.demote([0])
        assert await asyncio.to_thread(one.disk.began.wait, 10)
        one.demote([1, 2, 3])
        one.demote([4, 5])  # slot 0 is being read: 1 and 2 have to go
        one.disk.may.set()
        await one.until(6)
        assert one.counts == (4, 2)
        assert one.on_disk(range(6)) == [0, 3, 4, 5]
        assert one.store.read(key(4)) == key(4) * 4


async def test_a_page_that_comes_down_again_is_not_written_twice(tmp_path: Path) -> None:
    async with below(tmp_path, host=2) as one:
        one.demote([0, 1])
        await one.until(2)
        one.demote([2, 3])
        await one.until(4)
        one.demote([0, 1])
        one.demote([4])
        await one.until(5)
        assert sorted(one.disk.written) == [key(number) for number in range(5)]


async def test_a_page_that_waits_twice_is_written_once(tmp_path: Path) -> None:
    async with below(tmp_path, host=2) as one:
        one.disk.may.clear()
        one.demote([0])
        assert await asyncio.to_thread(one.disk.began.wait, 10)
        one.demote([1])
        assert one.tiers.host is not None
        one.tiers.host.drop([key(1)])
        one.demote([1])
        one.disk.may.set()
        await one.until(2)
        assert one.disk.written == [key(0), key(1)]


async def test_a_page_that_cannot_be_kept_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with below(tmp_path) as one:
        one.disk.bad.add(key(1))
        one.demote(range(3))
        await one.until(3)
        assert one.counts == (2, 1)
        assert one.on_disk(range(3)) == [0, 2]
        assert "not kept" in caplog.text


async def test_what_makes_room_is_removed_and_told(tmp_path: Path) -> None:
    async with below(tmp_path, disk=2) as one:
        one.demote([0, 1])
        await one.until(2)
        one.exchange.drain_changes()
        one.demote([2])
        await one.until(3)
        assert one.on_disk(range(3)) == [1, 2]
        assert one.store.read(key(0)) is None
        removed = [each for each in one.exchange.drain_changes() if isinstance(each, PagesRemoved)]
        assert [(each.keys, each.tier) for each in removed] == [((key(0),), "disk")]


async def test_a_reset_while_pages_are_written_leaves_none_of_them(tmp_path: Path) -> None:
    async with below(tmp_path) as one:
        one.disk.may.clear()
        one.demote(range(3))
        assert await asyncio.to_thread(one.disk.began.wait, 10)
        one.exchange.clear()
        one.mover.forget()
        one.disk.may.set()
        await one.until(3)
        assert one.on_disk(range(3)) == []
        async with asyncio.timeout(20):
            while one.store.held_bytes:  # noqa: ASYNC110 - a thread removes them
                await asyncio.sleep(0.001)


async def test_a_disk_that_fails_for_every_page_is_told_once_and_once_when_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with below(tmp_path, host=64) as one:
        one.disk.bad = {key(number) for number in range(40)}
        one.demote(range(20))
        await one.until(20)
        one.demote(range(20, 40))
        await one.until(40)
        assert one.counts == (0, 40)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        one.demote([40, 41])
        await one.until(42)
        assert one.on_disk(range(42)) == [40, 41]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
