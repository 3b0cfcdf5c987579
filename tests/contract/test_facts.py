"""Facts go through every backend, live as long as told, and no record depends on them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from state import facts as facts_module
from state.client import run_command
from state.facts import encode_facts
from state.model import EventCounts, Fence, ReplicaFacts, ReplicaId
from state.schema import ReplicaKeys
from support.fleet_state import A, B, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.state_backend import Backend, RedisBackend

FACTS = ReplicaFacts(events="tcp://h:1", page_tokens=16, counts=EventCounts(batches=3))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "READ_INTERVAL_S", 0.02)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - facts are read in the background
            await asyncio.sleep(0.01)


async def test_facts_are_seen_until_the_replica_goes_or_begins_anew(backend: Backend) -> None:
    reader = await backend.reader("r1")
    await backend.writer.register(record(A))
    await backend.writer.register(record(B))
    for replica in (A, B):
        assert await backend.writer.heartbeat(record(replica), None, FACTS) is Fence.HELD
    await until(lambda: backend.facts(reader) == {A: FACTS, B: FACTS})
    assert reader.replicas()[A].record == record(A)
    await backend.writer.heartbeat(record(A), None)
    assert await reader.settle(30)
    assert backend.facts(reader) == {A: FACTS, B: FACTS}
    await backend.writer.register(record(A, "g2"))
    await backend.writer.deregister(B, record(B).generation)
    await until(lambda: backend.facts(reader) == {})


async def test_a_fenced_sidecar_tells_no_facts(backend: Backend) -> None:
    reader = await backend.reader("r1")
    await backend.writer.register(record(A, "g2"))
    assert await backend.writer.heartbeat(record(A, "g1"), None, FACTS) is Fence.FENCED
    assert await backend.writer.heartbeat(record(B), None, FACTS) is Fence.UNKNOWN
    await asyncio.sleep(0.1)
    assert backend.facts(reader) == {}


async def test_malformed_facts_are_left_out_and_counted_once(redis_backend: RedisBackend) -> None:
    """S-14: the replica itself is as good as before."""
    mirror = await redis_backend.mirror()
    for replica in (A, B):
        await redis_backend.writer.register(record(replica))
        await redis_backend.writer.heartbeat(record(replica), None, FACTS)
    await until(lambda: mirror.facts() == {A: FACTS, B: FACTS})
    wrong = encode_facts(FACTS).replace(b"tcp://h:1", b"tcp:\\u001b[2J")
    await run_command(redis_backend.client, "SET", ReplicaKeys(A).facts, wrong)
    await until(lambda: mirror.facts() == {B: FACTS})
    await asyncio.sleep(0.2)
    assert mirror.malformed_values == 1
    await run_command(redis_backend.client, "DEL", ReplicaKeys(A).facts)
    await run_command(redis_backend.client, "LPUSH", ReplicaKeys(A).facts, "x")
    await until(lambda: mirror.malformed_values == 2)
    assert set(mirror.replicas()) == {A, B}
    assert mirror.facts() == {B: FACTS}


async def test_a_large_fleet_is_read_in_portions_and_what_was_read_stays(
    redis_backend: RedisBackend,
) -> None:
    """A round costs the same however many replicas there are; those that left are forgotten."""
    names = [ReplicaId(f"r{number:03d}") for number in range(2 * facts_module.ROUND_REPLICAS + 5)]
    value = encode_facts(FACTS)
    for name in names:
        await run_command(redis_backend.client, "SET", ReplicaKeys(name).facts, value, "EX", 60)
    board, seen = facts_module.FactsBoard(), []
    for _ in range(3):
        await board.read(redis_backend.client, names)
        seen.append(len(board()))
    assert seen == [64, 128, 133]
    await run_command(redis_backend.client, "DEL", ReplicaKeys(names[0]).facts)
    await board.read(redis_backend.client, names)
    assert set(board()) == set(names[1:])
    await board.read(redis_backend.client, names[:2])
    assert set(board()) == {names[1]}
