"""The sidecar against an engine's real sockets: what routers see of its replica."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from msgspec import structs

from sidecar.announce import FencedError
from sidecar.profile import SettingsError
from sidecar.rank import run_agent
from state.memory import MemoryState
from state.model import ModelIdentity, RouterId
from support.kv_engine import KvEngine, removed, stored
from support.sidecar import (
    IDENTITY,
    TIMEOUT_S,
    BrokenFleet,
    Fleet,
    eventually,
    page,
    pages,
    settings_for,
    sidecar,
)


async def test_the_replica_is_registered_as_the_engine_describes_itself() -> None:
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.running = 3
        async with sidecar(settings_for(engine), fleet):
            await eventually(lambda: (state := fleet.replica()) is not None and bool(state.load))
            state = fleet.replica()
            assert state is not None
            assert state.record.endpoint == engine.url
            assert state.record.identity == IDENTITY
            assert (state.record.page_tokens, state.record.capacity_pages) == (4, 1000)
            assert state.load is not None
            assert (state.load.running, state.load.queued) == (3, 0)
            assert state.load.kv_used_fraction == 0.25
        assert not fleet.is_registered()
        assert len(fleet.generations) == 1


async def test_stores_removes_and_clears_reach_the_routers() -> None:
    """C32."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1, 2], pages(1, 2)))
        await eventually(fleet.holds(pages(1, 2), 2))
        await engine.publish(removed(2))
        await eventually(fleet.holds(pages(1, 2), 1))
        await engine.publish({"type": "AllBlocksCleared"}, stored([3], page(3)))
        await eventually(fleet.holds(page(3), 1))
        assert fleet.blocks(pages(1, 2)) == 0
        assert len(fleet.generations) == 1


async def test_a_salt_is_a_namespace_of_its_own() -> None:
    """B19."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1, 2], pages(1, 2), extra_keys=[["t1"], None]))
        await eventually(fleet.holds(pages(1, 2), 2, salt="t1"))
        assert fleet.blocks(pages(1, 2), salt="t2") == 0
        assert fleet.blocks(pages(1, 2)) == 0


async def test_a_late_sidecar_learns_what_the_engine_holds() -> None:
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.lose(stored([1, 2], pages(1, 2)))
        engine.lose(removed(2))
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.holds(pages(1, 2), 1))
            assert engine.replay_starts[0] == 0


@pytest.mark.parametrize("has_topic", [True, False])
async def test_a_gap_is_replayed_in_order(*, has_topic: bool) -> None:
    """A78, B06, B08: what was replayed never follows what came after it."""
    fleet = Fleet()
    async with (
        KvEngine(has_topic_in_replay=has_topic) as engine,
        sidecar(settings_for(engine), fleet),
    ):
        await eventually(fleet.is_registered)
        for number in range(6):
            await engine.publish(stored([number], page(number)))
        await eventually(fleet.holds(page(5), 1))
        engine.replay_starts.clear()
        engine.lose(stored([6], page(6)))
        engine.lose(stored([7], page(7)))
        engine.lose(stored([8], page(8)))
        await engine.publish(removed(7), stored([9], page(9)))
        await engine.publish(stored([10], page(10)))
        await eventually(fleet.holds(page(10), 1))
        assert engine.replay_starts == [6]
        assert [fleet.blocks(page(n)) for n in range(11)] == [1] * 7 + [0] + [1] * 3
        assert len(fleet.generations) == 1


async def test_a_truncated_replay_begins_a_new_generation() -> None:
    """B07: asked from 2, got 4."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([0], page(0)))
        await engine.publish(stored([1], page(1)))
        await eventually(fleet.holds(page(1), 1))
        for number in range(2, 6):
            engine.lose(stored([number], page(number)))
        del engine.log[:4]
        await engine.publish(stored([6], page(6)))
        await eventually(fleet.holds(page(6), 1))
        assert [fleet.blocks(page(n)) for n in range(7)] == [0, 0, 0, 0, 1, 1, 1]
        assert len(fleet.generations) == 2


async def test_a_gap_without_a_replay_is_not_silently_trusted() -> None:
    """B06."""
    fleet = Fleet()
    async with KvEngine(has_replay=False) as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([0], page(0)))
        await eventually(fleet.holds(page(0), 1))
        engine.lose(removed(0))
        await engine.publish(stored([2], page(2)))
        await eventually(fleet.holds(page(2), 1))
        assert fleet.blocks(page(0)) == 0
        assert len(fleet.generations) == 2


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("batches_before", [1, 3])
async def test_a_restarted_engine_voids_all_that_was_known(
    batches_before: int, *, is_told: bool
) -> None:
    """A79, B02, B03: also when the new life has counted past the old one unseen."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        for number in range(batches_before):
            await engine.publish(stored([number], page(number)))
        await eventually(fleet.holds(page(batches_before - 1), 1))
        before = fleet.generations[-1]
        await engine.restart(is_told=is_told)
        for number in range(20, 24):
            engine.lose(stored([number], page(number)))
        await eventually(fleet.holds(page(23), 1))
        assert fleet.generations[-1] != before
        assert all(fleet.blocks(page(n)) == 0 for n in range(batches_before))
        assert all(fleet.blocks(page(n)) == 1 for n in range(20, 24))


async def test_a_start_time_that_changed_is_another_life_of_an_engine_without_events() -> None:
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.has_sources = False
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.is_registered)
            engine.started_at_s += 100
            await eventually(lambda: len(fleet.generations) == 2)


async def test_a_connection_that_broke_without_a_restart_costs_nothing() -> None:
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([0], page(0)))
        await eventually(fleet.holds(page(0), 1))
        await engine.close_sockets()
        engine.lose(stored([1], page(1)))
        engine.open_sockets()
        await eventually(fleet.holds(page(1), 1))
        assert fleet.blocks(page(0)) == 1
        assert len(fleet.generations) == 1


async def test_a_new_page_size_begins_a_new_generation() -> None:
    """B14, C44: the record and the chains follow the events."""
    fleet = Fleet()
    async with KvEngine() as engine:
        settings = settings_for(engine, block_tokens=None)
        async with sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            tokens = list(range(192))
            await engine.publish(stored([1, 2], tokens))
            identity = ModelIdentity(model="tiny", block_tokens=96)
            await eventually(fleet.holds(tokens, 2, identity=identity))
            state = fleet.replica()
            assert state is not None
            assert (state.record.page_tokens, state.record.identity.block_tokens) == (96, 96)


async def test_pages_that_fit_no_block_leave_the_replica_known_by_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B14: an error that is told, and no credit."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        with caplog.at_level(logging.ERROR):
            await engine.publish(stored([1, 2], list(range(6))))
            await eventually(lambda: "do not fit" in caplog.text)
        await eventually(fleet.is_registered)
        assert fleet.blocks(list(range(6))) == 0


async def test_blocks_that_do_not_fit_the_engine_are_refused_at_the_start() -> None:
    """A71, B14."""
    async with KvEngine() as engine:
        settings = settings_for(engine, block_tokens=6)
        with pytest.raises(SettingsError, match="block_tokens"):
            await run_agent(settings, Fleet(), stop=asyncio.Event())


async def test_an_engine_at_a_unix_socket_is_refused_as_routers_would_not_find_it() -> None:
    async with KvEngine() as engine:
        settings = structs.replace(settings_for(engine), engine="unix:/run/engine.sock")
        with pytest.raises(SettingsError, match=r"engine: expected http://host:port"):
            async with asyncio.timeout(20):
                await run_agent(settings, Fleet(), stop=asyncio.Event())


async def test_an_engine_is_registered_once_it_knows_its_model() -> None:
    """A59."""
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.model = "unknown"
        async with sidecar(settings_for(engine), fleet):
            await asyncio.sleep(0.4)
            assert not fleet.is_registered()
            engine.model = "tiny"
            await eventually(fleet.is_registered)


async def test_an_engine_that_fails_its_checks_is_off_until_it_is_back() -> None:
    """A57: one failed check changes nothing; C22."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1], page(1)))
        await eventually(fleet.holds(page(1), 1))
        engine.is_healthy = False
        await eventually(lambda: not fleet.is_registered())
        await engine.publish(stored([2], page(2)))
        engine.is_healthy = True
        await eventually(fleet.holds(page(2), 1))
        assert fleet.blocks(page(1)) == 1
        assert len(set(fleet.generations)) == 2


async def test_load_that_cannot_be_read_is_unknown() -> None:
    """B35."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(lambda: (state := fleet.replica()) is not None and bool(state.load))
        engine.has_metrics = False
        await eventually(lambda: (state := fleet.replica()) is not None and state.load is None)
        assert fleet.is_registered()


@pytest.mark.parametrize("does_store_anyway", [True, False])
async def test_after_a_state_failure_everything_is_announced_again(
    *, does_store_anyway: bool
) -> None:
    fleet = BrokenFleet()
    fleet.does_store_anyway = does_store_anyway
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet) as running:
        await eventually(fleet.is_registered)
        await engine.publish(stored([1], page(1)))
        await eventually(fleet.holds(page(1), 1))
        fleet.is_broken = True
        await engine.publish(stored([2], page(2)))
        await engine.publish(removed(1))
        await eventually(lambda: fleet.failures > 2)
        fleet.is_broken = False
        await eventually(fleet.holds(page(2), 1))
        assert fleet.blocks(page(1)) == 0
        assert len(set(fleet.generations)) >= 2
        assert not running.done()


async def test_a_registration_that_was_stored_unconfirmed_is_not_a_foreign_one() -> None:
    fleet = BrokenFleet()
    fleet.is_broken = fleet.does_store_anyway = True
    async with KvEngine() as engine:
        engine.lose(stored([1], page(1)))
        async with sidecar(settings_for(engine), fleet) as running:
            await eventually(lambda: fleet.failures > 2)
            fleet.is_broken = False
            await eventually(fleet.holds(page(1), 1))
            assert not running.done()
            assert len(set(fleet.generations)) == 1


async def test_an_unconfirmed_new_generation_is_not_a_foreign_one() -> None:
    fleet = BrokenFleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet) as running:
        await eventually(fleet.is_registered)
        fleet.is_register_broken = True
        await engine.restart()
        engine.lose(stored([1], page(1)))
        await eventually(lambda: fleet.failures > 2)
        fleet.is_register_broken = False
        await eventually(fleet.holds(page(1), 1))
        assert not running.done()


async def test_a_flushed_state_store_gets_everything_again() -> None:
    """A85."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1], page(1)))
        await eventually(fleet.holds(page(1), 1))
        fleet.state = MemoryState(time.monotonic)
        fleet.reader = fleet.state.reader(RouterId("router"))
        await eventually(fleet.holds(page(1), 1))


async def test_a_second_sidecar_takes_over_and_the_first_one_stops() -> None:
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet) as first:
        await eventually(fleet.is_registered)
        async with sidecar(settings_for(engine), fleet) as second:
            with pytest.raises(FencedError):
                async with asyncio.timeout(TIMEOUT_S):
                    await first
            await engine.publish(stored([1], page(1)))
            await eventually(fleet.holds(page(1), 1))
            assert not second.done()
            assert len(fleet.generations) == 2


async def test_a_stop_drains_before_it_deregisters() -> None:
    fleet = Fleet()
    async with KvEngine() as engine:
        engine.running = 1
        stop = asyncio.Event()
        settings = settings_for(engine, drain_grace_s=30.0)
        running = asyncio.create_task(run_agent(settings, fleet, stop=stop))
        await eventually(fleet.is_registered)
        stop.set()
        await eventually(
            lambda: (state := fleet.replica()) is not None and state.record.is_draining
        )
        await asyncio.sleep(0.5)
        assert fleet.is_registered()
        engine.running = 0
        async with asyncio.timeout(TIMEOUT_S):
            await running
        assert not fleet.is_registered()


async def test_bad_events_cost_nothing_but_themselves() -> None:
    """B10, B11."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        bad = {"type": "BlockStored", "block_hashes": "x"}
        await engine.publish(stored([1], page(1)), bad, {"type": "New"}, stored([2], page(2)))
        await eventually(fleet.holds(page(2), 1))
        assert fleet.blocks(page(1)) == 1


async def test_no_salt_and_no_token_is_in_any_log_line(caplog: pytest.LogCaptureFixture) -> None:
    fleet = BrokenFleet()
    with caplog.at_level(logging.DEBUG):
        async with (
            KvEngine() as engine,
            sidecar(settings_for(engine, api_key="key-canary"), fleet),
        ):
            await eventually(fleet.is_registered)
            await engine.publish(stored([1], page(77123), extra_keys=[["salt-canary"]]))
            await eventually(fleet.holds(page(77123), 1, salt="salt-canary"))
            fleet.is_broken = True
            await eventually(lambda: fleet.failures > 0)
            fleet.is_broken = False
            await eventually(fleet.holds(page(77123), 1, salt="salt-canary"))
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("warmroute")]
    assert ours
    assert not [line for line in ours if "canary" in line or "77123" in line]
