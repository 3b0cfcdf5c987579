"""The sidecar of an engine with data-parallel ranks, against real sockets of every rank."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from sidecar.announce import FencedError
from sidecar.profile import SettingsError
from sidecar.rank import run_agent
from state.memory import MemoryState
from state.model import ReplicaId, RouterId
from state.prefix import chain_of, chain_root, pack_tokens
from state.timing import StoreTiming
from support.kv_engine import KvEngine, stored
from support.port import free_port
from support.sidecar import (
    IDENTITY,
    TIMEOUT_S,
    Fleet,
    eventually,
    page,
    pages,
    settings_for,
    sidecar,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ZERO, ONE = ReplicaId("r1@dp0"), ReplicaId("r1@dp1")


class Front(KvEngine):
    """Rank 0, which also answers for ``others``; ``scrapes`` counts looks at the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[KvEngine] = []
        self.scrapes = 0

    async def _sources(self, request: web.Request) -> web.Response:
        del request
        ranks = (self, *self.others)
        sources = {
            str(number): {
                "endpoint": f"tcp://*:{rank.events_port}",
                "replay_endpoint": f"tcp://*:{rank.replay_port}",
            }
            for number, rank in enumerate(ranks)
        }
        return web.json_response(sources)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        lines = [f"process_start_time_seconds {self.started_at_s}"]
        pages = sum(rank.capacity_pages for rank in (self, *self.others))  # as vLLM tells it
        for number, rank in enumerate((self, *self.others)):
            shape = f'block_size="4",engine="{number}",num_gpu_blocks="{pages}"'
            lines += [
                f'vllm:num_requests_running{{engine="{number}"}} {rank.running}',
                f'vllm:num_requests_waiting{{engine="{number}"}} 0.0',
                f"vllm:cache_config_info{{{shape}}} 1.0",
            ]
        del request
        return web.Response(text="\n".join(lines) + "\n")


@asynccontextmanager
async def two_ranks() -> AsyncIterator[tuple[Front, KvEngine]]:
    async with KvEngine() as other, Front() as front:
        front.others.append(other)
        other.capacity_pages = 500
        yield front, other


def has(fleet: Fleet, *names: str) -> bool:
    return set(fleet.reader.replicas()) == set(names)


def held(fleet: Fleet, tokens: list[int]) -> dict[str, int]:
    chain = chain_of(chain_root(IDENTITY, 0), pack_tokens(tokens), 4, 0)
    return {name: each.gpu_blocks for name, each in fleet.reader.overlap(chain).items()}


def generation(fleet: Fleet, name: ReplicaId) -> str:
    return fleet.reader.replicas()[name].record.generation


async def test_each_rank_is_a_replica_with_its_own_blocks_load_and_capacity() -> None:
    fleet = Fleet()
    async with two_ranks() as (front, other):
        front.running, other.running = 2, 7
        async with sidecar(settings_for(front), fleet):
            await eventually(lambda: has(fleet, ZERO, ONE))
            await front.publish(stored([1, 2], pages(1, 2)))
            await other.publish(stored([1], pages(1)))
            await eventually(lambda: held(fleet, pages(1, 2)) == {ZERO: 2, ONE: 1})
            await eventually(lambda: all(each.load for each in fleet.reader.replicas().values()))
            seen = fleet.reader.replicas()
            assert {name: each.record.rank for name, each in seen.items()} == {ZERO: 0, ONE: 1}
            assert {each.record.endpoint for each in seen.values()} == {front.url}
            assert [seen[name].record.capacity_pages for name in (ZERO, ONE)] == [750, 750]
            loads = [seen[name].load for name in (ZERO, ONE)]
            assert [load.running if load else None for load in loads] == [2, 7]
        assert has(fleet)


async def test_a_rank_that_loses_its_events_is_one_replicas_matter() -> None:
    fleet = Fleet()
    async with two_ranks() as (front, other), sidecar(settings_for(front), fleet):
        await eventually(lambda: has(fleet, ZERO, ONE))
        await front.publish(stored([1], page(1)))
        await other.publish(stored([1], page(1)))
        await eventually(lambda: held(fleet, page(1)) == {ZERO: 1, ONE: 1})
        before = generation(fleet, ZERO), generation(fleet, ONE)
        await other.restart(is_told=False)
        await eventually(lambda: held(fleet, page(1)) == {ZERO: 1})
        assert generation(fleet, ZERO) == before[0]
        assert generation(fleet, ONE) != before[1]


async def test_a_reset_of_one_rank_is_that_of_no_other() -> None:
    """B04: all of the rank's pages are gone at once, in the same generation."""
    fleet = Fleet()
    async with two_ranks() as (front, other), sidecar(settings_for(front), fleet):
        await eventually(lambda: has(fleet, ZERO, ONE))
        for rank in (front, other):
            await rank.publish(stored([1, 2], pages(1, 2)))
        await eventually(lambda: held(fleet, pages(1, 2)) == {ZERO: 2, ONE: 2})
        before = generation(fleet, ONE)
        await other.publish({"type": "AllBlocksCleared"})
        await eventually(lambda: held(fleet, pages(1, 2)) == {ZERO: 2})
        assert generation(fleet, ONE) == before


async def test_a_restart_of_the_process_voids_every_rank() -> None:
    fleet = Fleet()
    async with two_ranks() as (front, other), sidecar(settings_for(front), fleet):
        await eventually(lambda: has(fleet, ZERO, ONE))
        await front.publish(stored([1], page(1)))
        await other.publish(stored([1], page(1)))
        await eventually(lambda: held(fleet, page(1)) == {ZERO: 1, ONE: 1})
        front.log, other.log = [], []
        front.started_at_s += 100
        await eventually(lambda: held(fleet, page(1)) == {})
        assert has(fleet, ZERO, ONE)


async def test_an_engine_that_comes_back_with_other_ranks_is_other_replicas() -> None:
    """From one to two, to three, and to one again; what is gone is taken off at once."""
    fleet = Fleet()
    fleet.state = MemoryState(time.monotonic, StoreTiming(record_ttl_s=60.0))
    fleet.reader = fleet.state.reader(RouterId("router"))
    async with KvEngine() as other, KvEngine() as third, Front() as front:
        async with sidecar(settings_for(front), fleet):
            await eventually(lambda: has(fleet, "r1"))
            assert fleet.reader.replicas()[ReplicaId("r1")].record.rank is None
            front.others.append(other)
            await front.restart()
            await eventually(lambda: has(fleet, ZERO, ONE))
            front.others.append(third)
            await front.restart()
            await eventually(lambda: has(fleet, ZERO, ONE, "r1@dp2"))
            await third.publish(stored([1], page(1)))
            await eventually(lambda: held(fleet, page(1)) == {"r1@dp2": 1})
            front.others.clear()
            await front.restart()
            await eventually(lambda: has(fleet, "r1"))
            await front.publish(stored([2], page(2)))
            await eventually(lambda: held(fleet, page(2)) == {"r1": 1})
        assert has(fleet)


async def test_a_dead_engine_takes_all_its_ranks_off_and_brings_them_back() -> None:
    fleet = Fleet()
    async with two_ranks() as (front, _), sidecar(settings_for(front), fleet):
        await eventually(lambda: has(fleet, ZERO, ONE))
        front.is_healthy = False
        await eventually(lambda: has(fleet))
        front.is_healthy = True
        await eventually(lambda: has(fleet, ZERO, ONE))


async def test_the_engine_is_asked_once_for_all_its_ranks() -> None:
    """Eight ranks cost it no more than one."""
    fleet = Fleet()
    async with Front() as front:
        front.others += [front] * 7
        settings = settings_for(front, scrape_interval_s=0.2)
        async with sidecar(settings, fleet):
            await eventually(lambda: len(fleet.reader.replicas()) == 8)
            await asyncio.sleep(0.2)
            before = front.scrapes
            await asyncio.sleep(1.0)
            assert 3 <= front.scrapes - before <= 9


async def test_events_that_were_given_are_those_of_rank_0() -> None:
    """SGLang, whose ranks publish on the ports that follow."""
    fleet = Fleet()
    async with KvEngine() as first, KvEngine() as second:
        first.has_sources = False
        for rank in (first, second):
            await rank.close_sockets()
        base = free_port()
        for number, rank in enumerate((first, second)):
            rank.events_port, rank.replay_port = base + number, base + 2 + number
            rank.open_sockets()
        told = {
            "events": f"tcp://127.0.0.1:{base}",
            "replay": f"tcp://127.0.0.1:{base + 2}",
            "ranks": 2,
        }
        async with sidecar(settings_for(first, **told), fleet):
            await eventually(lambda: has(fleet, ZERO, ONE))
            await second.publish(stored([1], page(1)))
            await eventually(lambda: held(fleet, page(1)) == {ONE: 1})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": 2}, "ranks: expected events too"),
        ({"ranks": 2, "events": "ipc:///tmp/x"}, "expected tcp://host:port"),
        ({"ranks": 2, "events": "tcp://h:1", "replica": "r" * 126}, "replica: "),
    ],
)
async def test_ranks_that_cannot_be_found_are_refused(changes: dict[str, Any], text: str) -> None:
    async with KvEngine() as engine:
        with pytest.raises(SettingsError, match=text):
            await run_agent(settings_for(engine, **changes), Fleet(), stop=asyncio.Event())


async def test_a_second_sidecar_takes_over_all_ranks() -> None:
    fleet = Fleet()
    async with two_ranks() as (front, other), sidecar(settings_for(front), fleet) as first:
        await eventually(lambda: has(fleet, ZERO, ONE))
        async with sidecar(settings_for(front), fleet) as second:
            with pytest.raises(FencedError):
                async with asyncio.timeout(TIMEOUT_S):
                    await first
            await other.publish(stored([1], page(1)))
            await eventually(lambda: held(fleet, page(1)) == {ONE: 1})
            assert not second.done()


async def test_metrics_tell_of_each_rank_and_silence_is_that_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B50: one rank's publisher is on another port; only that replica is reported."""
    port = free_port()
    fleet = Fleet()
    async with two_ranks() as (front, other):
        front.running = other.running = 1
        other.events_port = other.replay_port = free_port()
        front.lose(stored([1], page(1)))
        settings = settings_for(front, event_silence_s=0.3, metrics=f"127.0.0.1:{port}")
        with caplog.at_level(logging.ERROR):
            async with sidecar(settings, fleet), aiohttp.ClientSession() as http:
                await eventually(lambda: "no KV events: replica=r1@dp1" in caplog.text)
                async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    lines = (await answer.text()).splitlines()
    name = "warmroute_sidecar_events_missing"
    assert [line for line in lines if line.startswith(name)] == [
        f'{name}{{replica="r1@dp0"}} 0.0',
        f'{name}{{replica="r1@dp1"}} 1.0',
    ]
    assert lines.count(f"# TYPE {name} gauge") == 1
    assert "r1@dp0 works" not in caplog.text
