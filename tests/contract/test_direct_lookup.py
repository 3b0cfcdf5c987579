"""Direct lookup: exact where evictions left holes, bounded in all it does, and never in the way."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

from msgspec import structs

from state import direct
from state.client import RedisSettings, run_command
from state.direct import FIRST_BLOCKS, LOOKUP_CONNECTIONS, MAX_BLOCKS, MAX_ROUNDS, NEXT_BLOCKS
from state.memory import MemoryState
from state.model import Overlap, ReplicaId, RouterId, Rung, Tier
from state.schema import ReplicaKeys
from state.script import try_scripts
from state.store import Question
from state.timing import LookupTiming
from support.fleet_state import NAMESPACE, A, B, batch, block, blocks, record
from support.slow_link import SlowLink
from support.state_backend import LASTING, RedisBackend
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from state.client import Client
    from state.direct import DirectReader
    from state.model import BlockId
    from state.script import ScriptCall
    from state.store import FleetReader
    from support.state_backend import StateServer

_HASTY = LookupTiming(wait_s=0.05, backoff_base_s=0.02, backoff_cap_s=0.1)


def _question(chain: Sequence[BlockId], *replicas: ReplicaId) -> Question:
    return Question(namespace=NAMESPACE, chain=tuple(chain), replicas=replicas)


def _short(server: StateServer) -> RedisSettings:
    """Return the limits that a router has."""
    return RedisSettings(url=server.url, max_connections=LOOKUP_CONNECTIONS)


async def _stored(
    backend: RedisBackend, held: Mapping[tuple[ReplicaId, Tier], Sequence[BlockId]]
) -> FleetReader:
    """Store ``held`` on the server and in memory; return a reader of the memory."""
    memory = MemoryState(time.monotonic, LASTING)
    for writer in (backend.writer, memory):
        for replica in dict.fromkeys(replica for replica, _ in held):
            await writer.register(record(replica))
        for number, ((replica, tier), stored) in enumerate(held.items(), 1):
            await writer.apply([batch(number, stored=tuple(stored), replica=replica, tier=tier)])
    return memory.reader(RouterId("reference"))


async def test_runs_are_exact_for_any_holes_tiers_and_lengths(
    state_server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portions are made small, so that holes lie before, on and behind their borders."""
    monkeypatch.setattr(direct, "FIRST_BLOCKS", 20)
    monkeypatch.setattr(direct, "NEXT_BLOCKS", 90)
    rng = Random(11)
    chain = tuple(map(block, range(400)))
    await state_server.flush()
    async with AsyncExitStack() as stack:
        backend = RedisBackend(state_server, stack)
        names = [ReplicaId(f"r{number}") for number in range(24)]
        held = {}
        for number, name in enumerate(names):
            for tier in (Tier.GPU, Tier.HOST)[: 1 + number % 2]:
                holes = {rng.choice([rng.randrange(400), 15, 16, 19, 20, 79, 110, 399, 400])}
                holes |= {rng.randrange(400) for _ in range(rng.choice([0, 0, 3]))}
                held[name, tier] = [b for index, b in enumerate(chain) if index not in holes]
        reference = await _stored(backend, held)
        reader = await backend.direct()
        assert await reader.settle(30)
        for length in (1, 16, 19, 20, 21, 110, 111, 399, 400):
            asked = chain[:length]
            expected = reference.overlap(asked)
            assert await backend.overlap(reader, asked) == expected
            assert expected
        assert await backend.overlap(reader, chain[200:]) == reference.overlap(chain[200:])


async def test_only_what_was_asked_for_is_answered(redis_backend: RedisBackend) -> None:
    await _stored(redis_backend, {(A, Tier.GPU): blocks(1, 2), (B, Tier.GPU): blocks(1)})
    reader = await redis_backend.direct()
    assert await reader.settle(30)
    assert reader.overlap(blocks(1, 2)) == {}
    one = Overlap(gpu_blocks=1, any_tier_blocks=1)
    assert await reader.prepare([_question(blocks(1, 2), B), _question(blocks(1), A)])
    assert reader.overlap(blocks(1, 2)) == {B: one}
    assert reader.overlap(blocks(1)) == {A: one}
    assert await reader.prepare([_question(blocks(1), A, ReplicaId("unknown"))])
    assert reader.overlap(blocks(1, 2)) == {}
    assert reader.overlap(blocks(1)) == {A: one}
    assert await reader.prepare([_question((), A)])
    assert reader.overlap(blocks(1)) == {}
    assert reader.counts.by_outcome() == {"answered": 2, "late": 0, "failed": 0, "refused": 0}


async def test_a_chain_of_a_hundred_thousand_blocks_is_bounded(
    redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-22: rounds, what is sent, and what comes back, whatever the prompt."""
    many = tuple(map(block, range(100_000)))
    await _stored(redis_backend, {(A, Tier.GPU): many[: MAX_BLOCKS + 10], (B, Tier.GPU): many[:5]})
    reader = await redis_backend.direct()
    assert await reader.settle(30)
    rounds: list[tuple[list[int], list[object]]] = []

    async def recorded(client: Client, calls: Sequence[ScriptCall]) -> list[object]:
        replies = await try_scripts(client, calls)
        rounds.append(([len(call.by_digest[-2]) for call in calls], replies))  # type: ignore[arg-type]
        return replies

    monkeypatch.setattr(direct, "try_scripts", recorded)
    assert await reader.prepare([_question(many, A, B)])
    assert reader.overlap(many) == {
        A: Overlap(gpu_blocks=MAX_BLOCKS, any_tier_blocks=MAX_BLOCKS),
        B: Overlap(gpu_blocks=5, any_tier_blocks=5),
    }
    assert [sent for sent, _ in rounds] == [[16 * FIRST_BLOCKS] * 2] + [[16 * NEXT_BLOCKS]] * 7
    assert MAX_ROUNDS == 8
    assert [replies for _, replies in rounds] == [[[512, 512], [5, 5]]] + [[[4096, 4096]]] * 7


async def test_scripts_that_the_server_lost_come_back_within_the_lookup(
    redis_backend: RedisBackend,
) -> None:
    """R-07."""
    await _stored(redis_backend, {(A, Tier.GPU): blocks(1), (B, Tier.GPU): blocks(1)})
    reader = await redis_backend.direct()
    assert await reader.settle(30)
    for _ in range(2):
        await run_command(redis_backend.client, "SCRIPT", "FLUSH")
        assert await reader.prepare([_question(blocks(1), A, B)])
        assert set(reader.overlap(blocks(1))) == {A, B}
    assert reader.counts.failed == 0


async def test_a_key_of_another_type_blinds_the_lookup_for_its_replica_only(
    redis_backend: RedisBackend,
) -> None:
    """S-14."""
    await _stored(redis_backend, {(A, Tier.GPU): blocks(1), (B, Tier.GPU): blocks(1)})
    reader = await redis_backend.direct()
    assert await reader.settle(30)
    key = ReplicaKeys(A).residency(f"g1:{NAMESPACE}:gpu")
    await run_command(redis_backend.client, "SET", key, "spoiled", "EX", 60)
    assert await reader.prepare([_question(blocks(1), A, B)])
    assert set(reader.overlap(blocks(1))) == {B}
    assert reader.left_out == 1


async def _live(
    stack: AsyncExitStack, server: ValkeyProcess, settings: RedisSettings
) -> tuple[RedisBackend, DirectReader]:
    """Return a backend and a reader that has looked up once, with these limits."""
    backend = RedisBackend(server, stack)
    await _stored(backend, {(A, Tier.GPU): blocks(1)})
    reader = await backend.direct(lookup_timing=_HASTY, settings=settings)
    assert await reader.settle(30)
    await eventually(lambda: A in reader.replicas())
    assert await reader.prepare([_question(blocks(1), A)])
    return backend, reader


async def test_a_frozen_server_costs_a_few_short_waits_and_then_nothing(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """F7, R-03: no request waits for longer than it would, and soon none waits at all."""
    caplog.set_level(logging.INFO, logger="state.direct")
    async with AsyncExitStack() as stack:
        backend, _ = await _live(stack, own_server, _short(own_server))
        timing = structs.replace(_HASTY, wait_s=0.005, backoff_base_s=30.0, backoff_cap_s=30.0)
        frozen = await backend.direct("r2", lookup_timing=timing, settings=_short(own_server))
        assert await frozen.settle(30)
        asked = [_question(blocks(1), A)]
        await frozen.prepare(asked)  # connects
        loop = asyncio.get_running_loop()
        own_server.freeze()
        try:
            waits_s = []
            for _ in range(300):
                began_s = loop.time()
                assert not await frozen.prepare(asked)
                waits_s.append(loop.time() - began_s)
                assert frozen.overlap(blocks(1)) == {}
                await asyncio.sleep(0.002)
            counts = frozen.counts
            # Each of the 4 connections fails after 50 ms; the breaker opens with the third.
            assert counts.late + counts.failed <= 40
            assert counts.refused >= 250
            assert sorted(waits_s)[200] < timing.wait_s
            assert len(frozen._running) <= 4
            rung, age_s = frozen.freshness()
            assert rung in {Rung.LOCAL, Rung.STALE}
            assert age_s >= 0
        finally:
            own_server.thaw()
        await eventually(lambda: not frozen._running)
    lines = [r.message for r in caplog.records if r.name == "state.direct"]
    assert len(lines) == 1
    assert "rest" in lines[0]


async def test_lookups_go_on_once_a_server_answers_again(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """R-02: killed and restarted; one line when lookups rest, one when they go on."""
    caplog.set_level(logging.INFO, logger="state.direct")
    async with AsyncExitStack() as stack:
        backend, reader = await _live(stack, own_server, _short(own_server))
        asked = [_question(blocks(1), A)]
        own_server.kill()
        for _ in range(3):
            assert not await reader.prepare(asked)
        assert reader.freshness()[0] is not Rung.LIVE
        assert reader.counts.failed == 3
        own_server.start()
        await eventually(lambda: reader._mirror.freshness()[0] is Rung.LIVE)
        await backend.writer.register(record())
        await backend.writer.apply([batch(1, stored=blocks(1))])
        deadline_s = time.monotonic() + 60
        while not await reader.prepare(asked):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        assert reader.overlap(blocks(1))[A].gpu_blocks == 1
        assert reader.freshness()[0] is Rung.LIVE
    lines = [r.message for r in caplog.records if r.name == "state.direct"]
    assert [("rest" in line, "go on" in line) for line in lines] == [(True, False), (False, True)]


async def test_a_slow_server_is_left_alone_and_no_connection_is_lost(
    own_server: ValkeyProcess,
) -> None:
    """R-04, R-15, F8: 30 ms late, 200 impatient requests, some cancelled; the same connections."""
    delay_s = 0.0
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(SlowLink(own_server.socket_path, lambda: delay_s))
        settings = link.settings(timeout_s=10.0, max_connections=4)
        _, reader = await _live(stack, own_server, settings)
        reader._timing = structs.replace(_HASTY, wait_s=0.005)
        delay_s = 0.015
        asked = [_question(blocks(1), A)]
        for burst in range(20):
            requests = [asyncio.create_task(reader.prepare(asked)) for _ in range(10)]
            await asyncio.sleep(0.003)
            for request in requests[: burst % 3]:
                request.cancel()
            outcomes = await asyncio.gather(*requests, return_exceptions=True)
            assert not any(outcome is True for outcome in outcomes)
            await asyncio.sleep(0.06)
        assert reader.freshness()[0] is Rung.LOCAL
        assert reader.counts.refused > 0
        assert reader.counts.failed == 0
        assert len(link.connects_s) <= 4
        delay_s = 0.0
        reader._timing = _HASTY
        deadline_s = time.monotonic() + 60
        while not await reader.prepare(asked):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        assert len(link.connects_s) <= 4


async def test_cancelled_requests_never_get_each_others_answers(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """R-15: a storm of lookups of which every third is cancelled midway."""
    names = [ReplicaId(f"r{number}") for number in range(8)]
    chain = tuple(map(block, range(64)))
    held = {(name, Tier.GPU): chain[: 8 * number + 1] for number, name in enumerate(names)}
    await _stored(redis_backend, held)
    reader = await redis_backend.direct(
        settings=structs.replace(valkey.settings, max_connections=4)
    )
    assert await reader.settle(30)
    wrong = []

    async def request(number: int) -> None:
        asked = chain[: 1 + number % 64]
        name = names[number % 8]
        assert await reader.prepare([_question(asked, name)])
        run = min(len(asked), 8 * (number % 8) + 1)
        if reader.overlap(asked) != {name: Overlap(gpu_blocks=run, any_tier_blocks=run)}:
            wrong.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(600)]
    rng = Random(3)
    for task in rng.sample(tasks, 200):
        await asyncio.sleep(0)
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [o for o in outcomes if isinstance(o, Exception)]
    assert wrong == []
    await eventually(lambda: not reader._running)
    assert reader._slots._value == 4
