"""Pages that leave the device for the host and the disk and come back, byte for byte.

Each token of the copying runner depends on all KV before it: an answer that is equal was computed
from pages that are equal.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sidecar.pagechange import PagesStored
from sidecar.table import Moves
from sidecar.tree import PageFacts
from state.model import BlockId
from state.prefix import pack_tokens
from support.engine_rig import EngineRig, greedy

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.tiers import Demotion

A, B = (BlockId(name * 16) for name in (b"a", b"b"))
FACTS = PageFacts(None, b"", 0)
LONG = list(range(100, 117))


def _chain(rig: EngineRig) -> list[BlockId]:
    return rig.cache.open_table(pack_tokens(LONG), rig.scopes.place(b"", None)).chain


async def _crowd(rig: EngineRig, prompts: int = 4) -> None:
    """Push everything older down, and give the writer the time that it needs."""
    for number in range(1, prompts + 1):
        await rig.answer(range(1000 * number, 1000 * number + 17))
        if rig.disk is not None:
            await rig.settled()


async def test_pages_go_down_to_disk_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=64)
    async with rig.running():
        first = await rig.answer(LONG)
        await _crowd(rig)
        assert rig.tier("host").leading(_chain(rig)) == 0
        assert rig.tier("disk").leading(_chain(rig)) == 4
        computed_tokens = rig.runner.computed_tokens
        again = await rig.answer(LONG)
        assert again.cached_tokens == 16
        assert rig.runner.computed_tokens == computed_tokens + 1 + 3
        assert again.tokens == first.tokens == greedy(LONG, 4)
    rig.proven()


async def test_pages_come_back_from_the_host_without_a_disk(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=5, host_slots=32)
    async with rig.running():
        first = await rig.answer(LONG)
        await _crowd(rig, 2)
        assert rig.cache.tree.match(_chain(rig), 1) == []
        again = await rig.answer(LONG)
        assert again.cached_tokens == 16
        assert again.tokens == first.tokens == greedy(LONG, 4)
    rig.proven()


async def test_a_file_with_a_flipped_bit_is_a_miss_and_the_tail_is_computed(
    tmp_path: Path,
) -> None:
    rig = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=64)
    async with rig.running():
        first = await rig.answer(LONG)
        await _crowd(rig)
        key = _chain(rig)[2]
        (file,) = (tmp_path / "pages").rglob(key.hex())
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
        again = await rig.answer(LONG)
        assert again.cached_tokens == 8
        assert again.tokens == first.tokens
        assert key not in rig.tier("disk")
    rig.proven()


async def test_after_a_restart_the_pages_of_the_directory_are_found(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=64)
    async with rig.running():
        first = await rig.answer(LONG)
        await _crowd(rig)
    rig.proven()
    restarted = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=64)
    async with restarted.running():
        again = await restarted.answer(LONG)
        assert again.cached_tokens == 16
        assert again.tokens == first.tokens
    restarted.proven()


async def test_pages_found_after_a_restart_are_announced_once_they_were_used(
    tmp_path: Path,
) -> None:
    first = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=64)
    async with first.running():
        await first.answer(LONG)
        await _crowd(first)
    first.proven()
    rig = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=64)
    async with rig.running():
        found = ((await rig.answer(LONG)).cached_tokens or 0) // 4
        assert found > 0
        keys = set(_chain(rig)[:found])
        assert not _told_on_disk(rig) & keys
        await _crowd(rig)
        assert _told_on_disk(rig) >= keys
    rig.proven()


def _told_on_disk(rig: EngineRig) -> set[BlockId]:
    return {
        key
        for change in rig.changes
        if isinstance(change, PagesStored) and change.tier == "disk"
        for key in change.keys
    }


async def test_after_a_reset_and_a_restart_nothing_old_is_found(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=16)
    async with rig.running():
        await rig.answer(LONG)
        await _crowd(rig)
        assert rig.disk is not None
        assert rig.disk.held_bytes == 16 * rig.disk.file_bytes
        rig.engine.reset_prefix_cache()
        while rig.disk.held_bytes:  # noqa: ASYNC110 - a thread removes them
            await asyncio.sleep(0.001)
        await rig.answer(LONG)
        await _crowd(rig, 3)
        assert rig.tier("disk").leading(_chain(rig)) == 4
        rig.engine.reset_prefix_cache()
        while rig.disk.held_bytes:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.001)
    rig.proven()
    restarted = EngineRig(tmp_path, pages=6, host_slots=6, disk_slots=16)
    async with restarted.running():
        assert (await restarted.answer(LONG)).cached_tokens == 0


def _demoted(rig: EngineRig, key: BlockId, content: int) -> Demotion:
    """Let ``key`` go to the host, as composing a step does; the slot's bytes are ``content``."""
    exchange = rig.cache.exchange
    assert exchange is not None
    (page,) = rig.cache.pool.take(1, holder="r").pages
    exchange.let_go(page, key, FACTS, was_reused=True)
    rig.cache.pool.release((page,), "r")
    (demotion,) = exchange.drain_moves().demotions
    rig.memory.slot(demotion.slot)[:] = bytes([content]) * rig.runner.content_bytes
    return demotion


def _ran(rig: EngineRig, demotion: Demotion) -> None:
    """Let the step of ``demotion`` have run."""
    assert rig.cache.exchange is not None
    assert rig.mover is not None
    moves = Moves(demotions=[demotion])
    rig.cache.exchange.finish(moves)
    rig.mover.finish(moves, 0.0, 0.0)


async def test_a_slot_that_a_step_still_fills_is_not_written_to_disk(tmp_path: Path) -> None:
    """The same key came back into the same slot: what is there now is half of something."""
    rig = EngineRig(tmp_path, host_slots=1, disk_slots=8)
    async with rig.running():
        for key, content in ((A, 1), (B, 2)):
            _ran(rig, _demoted(rig, key, content))
        torn = _demoted(rig, A, 9)  # composed, and under way
        await rig.settled()
        assert A not in rig.tier("disk")
        rig.memory.slot(torn.slot)[:] = b"\x01" * rig.runner.content_bytes
        _ran(rig, torn)
        await rig.settled()
        assert rig.disk is not None
        assert rig.disk.read(A) == b"\x01" * rig.runner.content_bytes


async def test_a_page_that_waits_twice_for_the_disk_gets_one_slot_there(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, host_slots=1, disk_slots=8)
    async with rig.running():
        for key, content in ((A, 1), (B, 2), (A, 1)):
            _ran(rig, _demoted(rig, key, content))
        await rig.settled()
        assert rig.tier("disk").pool.states()["evictable"] == 1
        rig.tier("disk").clear()
        assert len(rig.tier("disk")) == 0
