"""The engine while a request waits for pages from elsewhere."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from sidecar.pagechange import PagesStored
from support.engine_rig import EngineRig, greedy

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.table import BlockTable
    from state.model import BlockId

ONE = list(range(100, 113))


class BrokenFetchError(Exception):
    """What a fetch should never raise."""


class SlowFetch:
    """Stands where the mover's fetch is: waits, then brings nothing, all, or an error."""

    def __init__(self, rig: EngineRig, outcome: str) -> None:
        assert rig.mover is not None
        self.began, self.gate = asyncio.Event(), asyncio.Event()
        self._fetch, self._outcome = rig.mover.fetch, outcome
        rig.mover.fetch = self  # type: ignore[method-assign]

    async def __call__(self, table: BlockTable, source: str | None) -> list[bytes | None]:
        self.began.set()
        await self.gate.wait()
        if self._outcome == "raises":
            raise BrokenFetchError
        contents = await self._fetch(table, source)
        return contents if self._outcome == "all" else [None] * len(contents)


async def _on_disk(rig: EngineRig) -> None:
    """Answer ``ONE`` and push its pages through the host to the disk."""
    await rig.answer(ONE, 4)
    keys = rig.cache.open_table(
        b"".join(each.to_bytes(4, "little") for each in ONE), rig.scopes.place(b"", None)
    ).chain
    for number in range(1, 9):
        await rig.answer(range(1000 * number, 1000 * number + 13), 4)
        await rig.settled()
    assert rig.tier("host").leading(keys) == 0
    assert rig.tier("disk").leading(keys) == 3


@pytest.mark.parametrize("outcome", ["nothing", "all", "raises"])
async def test_a_fetch_that_brings_nothing_or_breaks_costs_only_the_time(
    tmp_path: Path, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = EngineRig(tmp_path, pages=5, host_slots=5, disk_slots=64)
    async with rig.running():
        await _on_disk(rig)
        fetch = SlowFetch(rig, outcome)
        asked = rig.ask(ONE, 4)
        await fetch.began.wait()
        assert rig.engine.scheduler.is_fetching
        fetch.gate.set()
        await asked.ended.wait()
        assert asked.tokens == greedy(ONE, 4)
        assert asked.cached_tokens == (12 if outcome == "all" else 0)
        assert ("a fetch failed" in caplog.text) == (outcome == "raises")
    rig.proven()


@pytest.mark.parametrize("end", ["client gone", "halted", "timed out"])
async def test_a_request_that_ends_during_its_fetch_leaves_nothing(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = EngineRig(tmp_path, pages=5, host_slots=5, disk_slots=64)
    async with rig.running():
        await _on_disk(rig)
        fetch = SlowFetch(rig, "all")
        asked = rig.ask(ONE, 4)
        assert asked.ticket is not None
        await fetch.began.wait()
        assert rig.tier("disk").pool.held_pages == 3
        if end == "client gone":
            rig.engine.abort(asked.ticket)
            rig.engine.abort(asked.ticket)
        elif end == "halted":
            rig.engine.halt()
        else:
            rig.engine._time_out(asked.ticket)
        assert all(pool.held_pages == 0 for pool in rig.pools)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not rig.engine._fetches
        if end != "halted":
            fetch.gate.set()
            assert (await rig.answer(ONE, 4)).tokens == greedy(ONE, 4)
    assert "a fetch failed" not in caplog.text
    rig.proven()


async def test_pages_demoted_while_only_a_fetch_is_under_way_are_saved_before_they_are_lost(
    tmp_path: Path,
) -> None:
    """The device is full: the pages of the fetch push others down, and no step runs meanwhile."""
    rig = EngineRig(tmp_path, pages=5, host_slots=5, disk_slots=64)
    async with rig.running():
        await _on_disk(rig)
        newest = list(range(8000, 8013))
        fetch = SlowFetch(rig, "all")
        asked = rig.ask(ONE, 4)
        await fetch.began.wait()
        fetch.gate.set()
        await asked.ended.wait()
        again = await rig.answer(newest, 4)
        assert again.cached_tokens == 12
        assert again.tokens == greedy(newest, 4)
    rig.proven()


async def test_what_the_disk_got_is_told_while_nobody_asks(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=5, host_slots=5, disk_slots=64)
    may_write = threading.Event()
    assert rig.disk is not None
    write = rig.disk.write

    def write_late(key: BlockId, content: memoryview | bytes) -> None:
        assert may_write.wait(10)
        write(key, content)

    rig.disk.write = write_late  # type: ignore[method-assign]
    async with rig.running():
        for number in range(3):
            await rig.answer(range(1000 * number, 1000 * number + 13), 4)
        may_write.set()
        await rig.settled()
        for _ in range(50):
            await asyncio.sleep(0)
        told = [
            each for each in rig.changes if isinstance(each, PagesStored) and each.tier == "disk"
        ]
        assert len(told) == len(rig.tier("disk")) > 0


class Listed:
    """Peers of which some may be asked."""

    def __init__(self, *sources: str) -> None:
        self._sources = sources

    def is_allowed(self, source: str) -> bool:
        return source in self._sources


@pytest.mark.parametrize("source", ["http://127.0.0.1:1", "http://127.0.0.1:2", None])
async def test_only_a_source_that_may_be_asked_is_waited_for(
    tmp_path: Path, source: str | None
) -> None:
    rig = EngineRig(tmp_path, host_slots=4)
    assert rig.mover is not None
    rig.mover._peers = Listed("http://127.0.0.1:1")  # type: ignore[assignment]
    fetch = SlowFetch(rig, "nothing")
    fetch.gate.set()
    async with rig.running():
        asked = await rig.answer(ONE, 4, kv_source=source)
        assert asked.tokens == greedy(ONE, 4)
    assert fetch.began.is_set() is (source == "http://127.0.0.1:1")
