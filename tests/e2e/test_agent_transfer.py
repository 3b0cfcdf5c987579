"""What a sidecar tells of an engine's transfers of KV pages."""

from __future__ import annotations

import pytest

from support.kv_engine import KvEngine, stored
from support.sidecar import Fleet, eventually, pages, settings_for, sidecar


@pytest.mark.parametrize("can_transfer", [False, True])
async def test_an_engine_that_answers_for_transfers_is_announced_as_one_that_can(
    *, can_transfer: bool
) -> None:
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.can_transfer = can_transfer
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.is_registered)
            state = fleet.replica()
            assert state is not None
            assert state.record.can_fetch is can_transfer


async def test_an_engine_that_comes_back_without_transfers_loses_no_block() -> None:
    """Its cache is the same: what it holds is announced again, under the record that is true."""
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.can_transfer = True
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.is_registered)
            await engine.publish(stored([1, 2], pages(1, 2)))
            await eventually(fleet.holds(pages(1, 2), 2))
            replays = len(engine.replay_starts)
            engine.is_healthy = False
            await eventually(lambda: not fleet.is_registered())
            engine.can_transfer = False
            engine.is_healthy = True
            await eventually(fleet.is_registered)
            await eventually(fleet.holds(pages(1, 2), 2))
            state = fleet.replica()
            assert state is not None
            assert not state.record.can_fetch
            assert len(engine.replay_starts) == replays


async def test_transfers_that_begin_later_are_announced_without_a_new_life() -> None:
    """Noticed when the sidecar looks again at what the engine is, as after a lost connection."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1, 2], pages(1, 2)))
        await eventually(fleet.holds(pages(1, 2), 2))
        replays = len(engine.replay_starts)
        engine.can_transfer = True
        await engine.close_sockets()
        await eventually(lambda: (state := fleet.replica()) is not None and state.record.can_fetch)
        await eventually(fleet.holds(pages(1, 2), 2))
        assert len(engine.replay_starts) == replays
