"""What a round of the registry reads: what may have changed, nothing else, and none of it late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from state.mirror_sync import Follower
from state.model import Fence, Generation, ReplicaId, ReplicaLoad
from state.registry_reader import RegistryReader
from state.schema import (
    REPLICA_INDEX,
    REPLICA_NEWS,
    ReplicaKeys,
    decode_load,
    decode_record,
    encode_load,
    encode_record,
)
from state.script import run_scripts
from state.timing import StoreTiming
from support.fleet_state import A, B, record
from support.state_backend import FAST_ROUNDS
from support.valkey import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from state.client import Client
    from state.mirror_sync import Follow
    from state.redis_writer import RedisWriter
    from support.state_backend import RedisBackend
    from support.valkey import ValkeyProcess

_BUSY = ReplicaLoad(running=1)
_SHORT = StoreTiming(record_ttl_s=0.9, load_ttl_s=0.6)


@pytest.fixture
def _lasting_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine stands still, no heartbeat is old."""
    monkeypatch.setattr("state.registry_reader.RECENT_S", 3600.0)


class Rounds:
    """A reader of the registry, round by round."""

    def __init__(self, client: Client, shortest_ttl_s: float = 3600.0) -> None:
        self.client = client
        self.reader = RegistryReader(shortest_ttl_s)

    async def rows_read(self) -> int:
        """Do one round; return how many rows it read."""
        before = self.reader.rows_read
        self.rows = await self.reader.read(self.client)
        return self.reader.rows_read - before

    def is_draining(self, replica: ReplicaId) -> bool:
        value = self.rows[replica][0]
        told = decode_record(value, replica) if value is not None else None
        assert told is not None
        return told.is_draining

    def load(self, replica: ReplicaId) -> ReplicaLoad | None:
        value = self.rows[replica][1]
        return None if value is None else decode_load(value)


async def _two(backend: RedisBackend, timing: StoreTiming | None = None) -> RedisWriter:
    """Register A and B, each with a heartbeat."""
    writer = backend.open_writer(timing=timing) if timing else backend.open_writer()
    for replica in (A, B):
        await writer.register(record(replica))
        assert await writer.heartbeat(record(replica), _BUSY) is Fence.HELD
    return writer


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_heartbeats_without_a_change_cost_no_row(redis_backend: RedisBackend) -> None:
    writer, rounds = await _two(redis_backend), Rounds(redis_backend.client)
    assert await rounds.rows_read() == 2
    for _ in range(3):
        for replica in (A, B):
            await writer.heartbeat(record(replica), _BUSY)
        assert await rounds.rows_read() == 0
    assert set(rounds.rows) == {A, B}


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_a_change_is_in_the_next_round_and_costs_its_row(redis_backend: RedisBackend) -> None:
    """A record, a load, a generation, a replica that is new, one that deregisters."""
    writer, rounds = await _two(redis_backend), Rounds(redis_backend.client)
    await rounds.rows_read()
    await writer.heartbeat(record(B, is_draining=True), _BUSY)
    assert await rounds.rows_read() == 1
    assert (rounds.is_draining(A), rounds.is_draining(B)) == (False, True)
    await writer.heartbeat(record(A), ReplicaLoad(running=7))
    assert await rounds.rows_read() == 1
    assert (rounds.load(A), rounds.load(B)) == (ReplicaLoad(running=7), _BUSY)
    await writer.register(record(A, "g2"))
    await writer.heartbeat(record(A, "g2"), _BUSY)
    assert await rounds.rows_read() == 1
    assert rounds.rows[A][0] == encode_record(record(A, "g2"))
    new = ReplicaId("new")
    await writer.register(record(new))
    await writer.heartbeat(record(new), _BUSY)
    assert await rounds.rows_read() == 1
    assert rounds.load(new) == _BUSY
    await writer.deregister(B, Generation("g1"))
    await rounds.rows_read()
    assert rounds.rows[B] == (None, None)


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_one_name_for_another_is_seen_though_the_index_has_as_many(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    writer, rounds = await _two(redis_backend), Rounds(redis_backend.client)
    await rounds.rows_read()
    await valkey.command("ZREM", REPLICA_INDEX, A)
    new = ReplicaId("new")
    await writer.register(record(new))
    await writer.heartbeat(record(new), _BUSY)
    await rounds.rows_read()
    assert set(rounds.rows) == {B, new}
    await valkey.command("ZADD", REPLICA_INDEX, "XX", 5, B)  # it goes when the next one comes
    await rounds.rows_read()
    await _as_before(redis_backend, A)  # and that one tells no news
    await rounds.rows_read()
    assert set(rounds.rows) == {A, new}


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_a_replica_that_does_not_change_is_told_of_again(
    redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that missed news has read the row again by then."""
    monkeypatch.setattr("state.news.TELL_AGAIN_S", 0.0)
    writer, rounds = await _two(redis_backend), Rounds(redis_backend.client)
    await rounds.rows_read()
    await writer.heartbeat(record(A), _BUSY)
    assert await rounds.rows_read() == 1


async def test_a_replica_without_heartbeats_lapses_though_nobody_tells(
    redis_backend: RedisBackend,
) -> None:
    """First the load, then the record; the one whose heartbeats go on keeps both."""
    writer = await _two(redis_backend, _SHORT)
    rounds = Rounds(redis_backend.client, _SHORT.load_ttl_s)
    loads = []

    async def beat() -> None:
        while True:
            await writer.heartbeat(record(A), _BUSY)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beat())
    try:
        await rounds.rows_read()
        async with asyncio.timeout(60):
            while rounds.rows[B][0] is not None:
                loads.append(rounds.load(B))
                await rounds.rows_read()
    finally:
        task.cancel()
    assert loads[0] == _BUSY
    assert loads[-1] is None
    assert rounds.rows[B] == (None, None)


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_a_load_lapses_while_heartbeats_go_on_without_one(
    redis_backend: RedisBackend,
) -> None:
    writer, rounds = await _two(redis_backend, _SHORT), Rounds(redis_backend.client)
    await writer.heartbeat(record(A), _BUSY)
    await rounds.rows_read()
    await writer.heartbeat(record(A), None)

    async with asyncio.timeout(60):
        while rounds.load(A) is not None:
            await rounds.rows_read()


async def _as_before(backend: RedisBackend, replica: ReplicaId) -> None:
    """Store what a sidecar of an earlier version does of a replica."""
    client, key, writer = backend.client, ReplicaKeys(replica).record, backend.open_writer()
    value = encode_record(record(replica))
    await client.execute_command("HSET", key, "generation", "g1", "sidecar", "s1", "value", value)
    await client.execute_command("PEXPIRE", key, 600_000)
    await run_scripts(client, [writer._touch_call(replica)])


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_the_rows_of_a_sidecar_of_an_earlier_version_are_read_each_round(
    redis_backend: RedisBackend,
) -> None:
    """It writes records without a word about loads, and tells no news."""
    client, keys = redis_backend.client, ReplicaKeys(A)
    await _as_before(redis_backend, A)
    rounds = Rounds(client)
    for _ in range(3):
        assert await rounds.rows_read() == 1
    value = encode_record(record(is_draining=True))
    await client.execute_command("HSET", keys.record, "value", value)
    await rounds.rows_read()
    assert rounds.is_draining(A)


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_a_server_that_lost_the_news_or_everything_is_read_whole(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    writer, rounds = await _two(redis_backend), Rounds(redis_backend.client)
    await rounds.rows_read()
    await valkey.command("DEL", REPLICA_NEWS)
    assert await rounds.rows_read() == 2
    await writer.heartbeat(record(A, is_draining=True), _BUSY)
    assert await rounds.rows_read() == 1
    assert rounds.is_draining(A)
    await valkey.flush()
    await rounds.rows_read()
    assert dict(rounds.rows) == {}
    assert await writer.heartbeat(record(A), _BUSY) is Fence.UNKNOWN
    await rounds.rows_read()
    assert dict(rounds.rows) == {}
    await writer.register(record(A))
    await rounds.rows_read()
    assert set(rounds.rows) == {A}


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_where_the_questions_are_refused_everything_is_read(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """As with rules of access that do not have a command of theirs."""
    await _two(redis_backend)
    rounds = Rounds(redis_backend.client)
    await rounds.rows_read()
    await valkey.command("SET", REPLICA_NEWS, "spoiled", "EX", 600)
    for _ in range(2):
        assert await rounds.rows_read() == 2
    assert set(rounds.rows) == {A, B}


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_heartbeats_from_the_future_are_none(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """R-19: a failover to a server whose clock is behind must not keep a dead replica."""
    await _two(redis_backend)
    rounds = Rounds(redis_backend.client)
    await rounds.rows_read()
    assert await valkey.command("ZADD", REPLICA_INDEX, "XX", "CH", 9e12, A) == 1
    for _ in range(2):
        assert await rounds.rows_read() == 1


async def test_a_heartbeat_that_was_not_stored_does_not_count(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    writer = await _two(redis_backend)
    await valkey.command("ZADD", REPLICA_INDEX, "XX", 5, A)
    other = redis_backend.open_writer()
    assert await other.heartbeat(record(A, sidecar="s2"), _BUSY) is Fence.FENCED
    assert float(await valkey.command("ZSCORE", REPLICA_INDEX, A)) == 5
    assert await writer.heartbeat(record(A), _BUSY) is Fence.HELD
    assert float(await valkey.command("ZSCORE", REPLICA_INDEX, A)) > 5


async def test_an_index_that_was_lost_alone_is_made_again_by_heartbeats(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    writer = await _two(redis_backend)
    await valkey.command("DEL", REPLICA_INDEX)
    assert await writer.heartbeat(record(A), _BUSY) is Fence.HELD
    assert await valkey.command("ZRANGE", REPLICA_INDEX, 0, -1) == [b"a"]


async def test_a_server_emptied_within_a_heartbeat_has_no_name_without_a_record(
    redis_backend: RedisBackend, valkey: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a name would mean that the replica is gone."""
    writer = await _two(redis_backend)
    show = writer._show

    async def emptied_before(*arguments: object) -> bool:
        await valkey.flush()
        return await show(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_show", emptied_before)
    assert await writer.heartbeat(record(A), _BUSY) is Fence.UNKNOWN
    assert await valkey.command("ZRANGE", REPLICA_INDEX, 0, -1) == []


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_what_a_change_stream_tells_first_is_not_undone_by_a_row_read_before(
    redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is told in the step that writes, the news a moment later, or never."""
    writer = await _two(redis_backend)
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    monkeypatch.setattr(writer._news, "call", writer._touch_call)
    await writer.register(record(A, "g2"))
    await eventually(lambda: mirror.replicas()[A].record.generation == "g2")
    await writer.deregister(B, Generation("g1"))
    await eventually(lambda: B not in mirror.replicas())
    for _ in range(3):
        await mirror._registry_beat.full_round()
        assert set(mirror.replicas()) == {A}


async def _fleet(backend: RedisBackend, names: list[ReplicaId]) -> None:
    """Store what sidecars of these replicas do that have sent heartbeats."""
    client, writer = backend.client, backend.open_writer()
    for start in range(0, len(names), 100):
        chunk, pipeline = names[start : start + 100], client.pipeline(transaction=False)
        for name in chunk:
            keys, value = ReplicaKeys(name), encode_record(record(name))
            told = ("generation", "g1", "sidecar", "s1", "value", value, "load", "1")
            pipeline.execute_command("HSET", keys.record, *told)
            pipeline.execute_command("SET", keys.generation, "g1", "EX", 600)
            pipeline.execute_command("SET", keys.load, encode_load(_BUSY), "EX", 600)
            pipeline.execute_command("PEXPIRE", keys.record, 600_000)
        await pipeline.execute()
        await run_scripts(client, [writer._touch_call(name) for name in chunk])


@pytest.mark.usefixtures("_lasting_heartbeats")
async def test_more_than_a_thousand_replicas_are_seen_and_rest_costs_no_row(
    redis_backend: RedisBackend,
) -> None:
    names = [ReplicaId(f"r{number:04d}") for number in range(1_100)]
    await _fleet(redis_backend, names)
    mirror = await redis_backend.mirror()
    await eventually(lambda: len(mirror.replicas()) == len(names))
    view, read = mirror.replicas(), mirror._reader.rows_read
    assert all(state.load == _BUSY for state in view.values())
    for _ in range(3):
        await mirror._registry_beat.full_round()
    assert mirror.replicas() is view
    assert mirror._reader.rows_read == read
    writer, first, last = redis_backend.open_writer(), names[0], names[-1]
    await writer.heartbeat(record(last, is_draining=True), _BUSY)
    await eventually(lambda: mirror.replicas()[last].record.is_draining)
    await writer.deregister(first, Generation("g1"))
    await eventually(lambda: first not in mirror.replicas())
    assert len(mirror.replicas()) == len(names) - 1


@pytest.mark.parametrize(("spoilt", "block_s"), [(False, 0.05), (True, 0.02)])
async def test_a_read_of_streams_is_long_where_no_stream_is_about_to_be_added(
    redis_backend: RedisBackend,
    monkeypatch: pytest.MonkeyPatch,
    spoilt: bool,  # noqa: FBT001 - a parameter of the test
    block_s: float,
) -> None:
    """Silent streams are named as seldom as the registry is read; who is new waits less."""
    await _two(redis_backend)
    if spoilt:  # there is no snapshot of A
        await redis_backend.client.execute_command("SET", ReplicaKeys(A).sets, "x", "EX", 600)
    waits: list[tuple[int, float]] = []
    next_entries = Follower.next_entries

    async def noted(
        self: Follower, client: Client, follows: Mapping[bytes, Follow], wait_s: float
    ) -> object:
        waits.append((len(follows), wait_s))
        return await next_entries(self, client, follows, wait_s)

    monkeypatch.setattr(Follower, "next_entries", noted)
    timing = structs.replace(FAST_ROUNDS, registry_interval_s=0.05, block_s=0.02)
    await redis_backend.mirror(timing=timing)
    await eventually(lambda: (1 if spoilt else 2, block_s) in waits)
    assert waits[-1][1] == block_s
