"""Events that never come, come too fast, or mean nothing: what a sidecar makes of them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

import sidecar.subscriber
from sidecar.agent import SidecarAgent
from sidecar.profile import SettingsError, SidecarSettings
from sidecar.rank import run_agent
from state.client import command_client, run_command
from state.model import ReplicaId
from state.prefix import chain_of, chain_root, pack_tokens
from state.redis_writer import RedisWriter
from state.schema import ReplicaKeys
from support.dials import Dials
from support.fleet import until
from support.kv_engine import KvEngine, removed, stored
from support.port import free_port
from support.sidecar import IDENTITY, Fleet, eventually, page, pages, settings_for
from support.sidecar import sidecar as running_sidecar
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.sequence import Batch

SILENCE_S = 0.3


def measured(engine: KvEngine, **changes: Any) -> tuple[SidecarSettings, Dials]:
    """Return settings with metrics on a known port, and what reads them."""
    port = free_port()
    settings = settings_for(engine, metrics=f"127.0.0.1:{port}", **changes)
    return settings, Dials(port)


async def test_an_engine_that_works_and_is_never_heard_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B50: one loud line that names the replica and the address, and a gauge; both end."""
    caplog.set_level(logging.INFO, logger="warmroute.sidecar")
    fleet = Fleet()
    async with KvEngine() as engine:
        settings, dials = measured(engine, event_silence_s=SILENCE_S)
        async with running_sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            await asyncio.sleep(2 * SILENCE_S)
            await dials.show(events_missing=0, follows_events=1, event_batches_total=0)
            engine.prompt_tokens = 100
            await dials.show(events_missing=1)
            await asyncio.sleep(SILENCE_S)
            errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert len(errors) == 1
            assert "replica=r1" in errors[0]
            assert str(engine.events_port) in errors[0]
            await engine.publish(stored([1], page(1)))
            await dials.show(events_missing=0, event_batches_total=1)
            await eventually(lambda: "KV events arrive" in caplog.text)
            engine.prompt_tokens = 200
            await asyncio.sleep(2 * SILENCE_S)
            await dials.show(events_missing=0)


async def test_a_running_request_is_work_too_but_an_engine_without_events_is_not_silent() -> None:
    """B50: engines that count no prompt tokens, and engines known by load only."""
    async with KvEngine() as engine:
        engine.running = 1
        wrong_port = f"tcp://127.0.0.1:{free_port()}"
        settings, dials = measured(engine, event_silence_s=SILENCE_S, events=wrong_port)
        async with running_sidecar(settings, Fleet()):
            await dials.show(events_missing=1)
    async with KvEngine() as engine:
        engine.running = 1
        engine.has_sources = False
        settings, dials = measured(engine, event_silence_s=SILENCE_S)
        fleet = Fleet()
        async with running_sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            await asyncio.sleep(2 * SILENCE_S)
            await dials.show(events_missing=0, follows_events=0, engine_up=1)


async def test_metrics_are_on_loopback_and_nothing_else_is_served() -> None:
    """B50: what an operator scrapes; other paths and methods are refused."""
    assert SidecarSettings(engine="http://127.0.0.1:1").metrics.startswith("127.0.0.1:")
    async with KvEngine() as engine:
        settings, dials = measured(engine)
        fleet = Fleet()
        async with running_sidecar(settings, fleet), aiohttp.ClientSession() as http:
            await eventually(fleet.is_registered)
            await dials.show(engine_up=1)
            async with http.post(dials.url) as answer:
                assert answer.status == 405
            async with http.get(dials.url.removesuffix("/metrics") + "/") as answer:
                assert answer.status == 404
            with pytest.raises(SettingsError, match="metrics: cannot listen"):
                await run_agent(settings, Fleet(), stop=asyncio.Event())
        for wrong in ("nowhere", "127.0.0.1:", ":1", "127.0.0.1:65536", "127.0.0.1:-1"):
            settings, _ = measured(engine)
            with pytest.raises(SettingsError, match="metrics"):
                await run_agent(settings_for(engine, metrics=wrong), Fleet(), stop=asyncio.Event())


async def test_what_a_gap_missed_is_counted_and_what_was_lost_begins_a_generation() -> None:
    """B06: sequence 0, 1, 5 is a gap of 3; with a replay nothing else happens."""
    for has_replay, generations in ((True, 1), (False, 2)):
        fleet = Fleet()
        async with KvEngine(has_replay=has_replay) as engine:
            settings, dials = measured(engine)
            async with running_sidecar(settings, fleet):
                await eventually(fleet.is_registered)
                await engine.publish(stored([0], page(0)))
                await engine.publish(stored([1], page(1)))
                await eventually(fleet.holds(page(1), 1))
                for number in (2, 3, 4):
                    engine.lose(stored([number], page(number)))
                await engine.publish(stored([5], page(5)))
                await eventually(fleet.holds(page(5), 1))
                assert fleet.blocks(page(3)) == has_replay
                assert len(fleet.generations) == generations
                await dials.show(
                    event_gaps_total=1,
                    missed_event_batches_total=3,
                    **{"generations_total:lost": generations - 1, "generations_total:start": 1},
                )


@pytest.mark.parametrize("is_told", [True, False], ids=["told by metrics", "told by events"])
async def test_pages_that_fit_no_block_are_shown_until_the_engine_is_another(
    *, is_told: bool
) -> None:
    """B14: an explicit error for whoever watches, not a silent zero."""
    fleet = Fleet()
    async with KvEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            await engine.publish(stored([1, 2], list(range(6))))
            await dials.show(pages_unfit=1)
            assert fleet.blocks(list(range(6))) == 0
            await engine.restart(is_told=is_told)
            await engine.publish(stored([3], page(3)))
            await eventually(fleet.holds(page(3), 1))
            await dials.show(pages_unfit=0)


async def test_what_is_not_understood_is_counted_and_costs_nothing_else() -> None:
    """B10, B11, B22: unknown fields, kinds, media and malformed events beside good ones."""
    fleet = Fleet()
    async with KvEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            await engine.publish(
                stored([1], page(1), foo={"bar": 1}),
                {"type": "BlockTransferred", "block_hashes": [1]},
                {"type": "BlockStored", "block_hashes": "x"},
                stored([2], page(2), medium="WARP"),
                stored([3], page(3), medium="FS"),
                stored([4], page(4)),
            )
            await eventually(fleet.holds(page(4), 1))
            assert [fleet.blocks(page(n)) for n in range(1, 5)] == [1, 0, 0, 1]
            await dials.show(
                unknown_events_total=1,
                malformed_events_total=1,
                unknown_tier_events_total=1,
                event_batches_total=1,
                held_pages=2,
            )


async def test_children_without_parents_wait_and_flood_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B30: counted while they wait, one chain once the parent is there, and no line per event."""
    caplog.set_level(logging.DEBUG, logger="warmroute.sidecar")
    fleet = Fleet()
    async with KvEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            lines = len(caplog.records)
            for number in range(2, 302):
                await engine.publish(stored([number], page(number), parent=number - 1))
            await dials.show(waiting_pages=300, event_batches_total=300)
            assert fleet.blocks(pages(*range(2, 302))) == 0
            await engine.publish(stored([1], page(1)))
            await eventually(fleet.holds(pages(*range(1, 302)), 301))
            await dials.show(waiting_pages=0, dropped_orphans_total=0)
            assert len(caplog.records) - lines < 5


async def test_a_block_is_not_known_under_another_beginning() -> None:
    """B27, A61: X then Y stored; Y then Z holds nothing. A B and C D stored: A D is one block."""
    fleet = Fleet()
    async with KvEngine() as engine, running_sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1, 2], pages(1, 2)), stored([3], page(3), parent=1))
        await eventually(fleet.holds(pages(1, 3), 2))
        assert fleet.blocks(pages(1, 2)) == 2
        for unstored in (pages(2, 9), page(2), pages(2, 3), pages(3, 1), pages(9, 2)):
            assert fleet.blocks(unstored) == 0
        assert fleet.blocks(pages(1, 9)) == 1
        assert fleet.blocks(pages(1, 2, 3)) == 2
        await engine.publish(stored([5, 6], pages(5, 6)))
        await eventually(fleet.holds(pages(5, 6), 2))
        assert [fleet.blocks(pages(1, 6)), fleet.blocks(pages(5, 2))] == [1, 1]


async def test_adapters_and_salts_that_come_and_go_leave_nothing() -> None:
    """B51, B52, A93: a thousand names come and go; no series, block or task stays."""
    fleet = Fleet()
    async with KvEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            before, tasks = await dials.series(), len(asyncio.all_tasks())
            for number in range(0, 1_000, 10):
                await engine.publish(
                    *(
                        stored([n], page(n), lora_name=f"adapter-{n}", extra_keys=[[f"salt-{n}"]])
                        for n in range(number, number + 10)
                    )
                )
            await dials.show(event_batches_total=100, held_pages=1_000)
            assert await dials.series() == before
            text = await dials.text()
            assert "adapter-" not in text
            assert "salt-" not in text
            assert fleet.state._residency.indexed_blocks == 1_000
            for number in range(0, 1_000, 50):
                await engine.publish(removed(*range(number, number + 50)))
            await dials.show(held_pages=0)
            await eventually(lambda: not fleet.state._residency.indexed_blocks)
            await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_a_publisher_that_is_faster_than_folding_is_caught_up_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B54: what overflowed is seen as a gap and learned again; nothing that went is claimed."""
    monkeypatch.setattr(sidecar.subscriber, "QUEUED_BATCHES", 20)
    fold = SidecarAgent._fold

    def fold_slowly(agent: SidecarAgent, batch: Batch) -> None:
        time.sleep(0.001)
        fold(agent, batch)

    monkeypatch.setattr(SidecarAgent, "_fold", fold_slowly)
    fleet = Fleet()
    kept, batches = 8, 1_000
    async with KvEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await eventually(lambda: (state := fleet.replica()) is not None and bool(state.load))
            for number in range(batches):
                gone = [removed(number - kept)] if number >= kept else []
                await engine.publish(stored([number], page(number)), *gone)
                if number % 10 == 0:
                    await asyncio.sleep(0)
                    state = fleet.replica()
                    assert state is not None  # heartbeats are not held up
                    assert state.load is not None
            last = batches
            while not fleet.blocks(page(last)):
                await engine.publish(stored([last], page(last)), removed(last - kept))
                await asyncio.sleep(0.1)
            assert (await dials.read())["missed_event_batches_total"] > 0
            assert [n for n in range(last - kept + 1) if fleet.blocks(page(n))] == []


@pytest.fixture(name="valkey")
def running_valkey() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as server:
        yield server


async def test_an_engine_that_never_says_what_it_evicts_fills_nothing(
    valkey: ValkeyProcess,
) -> None:
    """A90: more unique pages than it can hold; server and sidecar keep to the engine's size."""
    capacity_pages, rounds = 300, 4
    client = command_client(valkey.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1), stream_cap_entries=16)
    entries, counts = [], []
    async with KvEngine(has_replay=False) as engine:
        settings = settings_for(engine, capacity_pages=capacity_pages, replica="full")
        async with running_sidecar(settings, writer):
            keys = ReplicaKeys(ReplicaId("full"))

            async def held() -> int:
                suffixes = await run_command(client, "SMEMBERS", keys.sets)
                names = [keys.residency(suffix.decode()) for suffix in suffixes]
                return sum([await run_command(client, "SCARD", name) for name in names])

            async def is_filled() -> bool:
                await engine.publish(stored([0], page(0)))
                return await held() > 0

            await until(is_filled, "the first block")
            for round_number in range(rounds):
                first = 1 + round_number * 2_000
                for number in range(first, first + 2_000, 20):
                    run = range(number, number + 20)
                    await engine.publish(*(stored([n], page(n)) for n in run))
                    if number % 200 == 1:
                        await asyncio.sleep(0.02)
                last = first + 1_999

                async def is_last_held(number: int = last) -> bool:
                    [name] = [
                        keys.residency(suffix.decode())
                        for suffix in await run_command(client, "SMEMBERS", keys.sets)
                    ]
                    root = chain_root(IDENTITY, 0)
                    [block] = chain_of(root, pack_tokens(page(number)), 4, 0)
                    return bool(await run_command(client, "SISMEMBER", name, block))

                await until(is_last_held, f"page {last}")
                counts.append(await held())
                entries.append(await run_command(client, "XLEN", keys.changes))
    await client.aclose()
    assert all(0 < count <= capacity_pages for count in counts)
    assert all(0 < count <= 16 + 8 for count in entries)  # trimmed by whole nodes of 4
