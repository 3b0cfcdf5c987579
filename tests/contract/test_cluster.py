"""A cluster of three real nodes: redirections, lost scripts, frozen nodes, slots that move.

What every backend promises is tested elsewhere, on this cluster too.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import MovedError, RedisError

from state.client import RedisSettings, blocking_client, command_client, run_command
from state.cluster import ClusterClient, ClusterError
from state.model import Fence, Overlap, ReplicaId, Rung
from state.redis_writer import RedisWriter
from state.schema import LEASES, REPLICA_INDEX, ReplicaKeys
from state.store import Question, StateError
from support.fleet_state import NAMESPACE, A, B, C, batch, block, blocks, record
from support.state_backend import PATIENT_LOOKUPS
from support.valkey import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.state_backend import RedisBackend
    from support.valkey import ValkeyProcess
    from support.valkey_cluster import ValkeyCluster

_NAMES = [ReplicaId(f"r{number}") for number in range(12)]


@pytest.fixture
async def client(valkey_cluster: ValkeyCluster) -> AsyncIterator[ClusterClient]:
    await valkey_cluster.flush()
    built = command_client(valkey_cluster.settings)
    assert isinstance(built, ClusterClient)
    yield built
    await built.aclose()


async def _announce(backend: RedisBackend, *names: ReplicaId) -> None:
    for name in names:
        await backend.writer.register(record(name))
        await backend.writer.apply([batch(1, stored=blocks(1, 2), replica=name)])


async def test_the_keys_of_a_fleet_are_spread_over_the_nodes_and_those_of_a_replica_are_not(
    cluster_backend: RedisBackend, valkey_cluster: ValkeyCluster
) -> None:
    await _announce(cluster_backend, *_NAMES)
    owners = {name: await valkey_cluster.owner(ReplicaKeys(name).record) for name in _NAMES}
    assert set(owners.values()) == set(valkey_cluster.addresses)
    for address in valkey_cluster.addresses:
        keys = await valkey_cluster.command_on(address, "KEYS", "wr:*")
        tags = {key.decode().partition("{")[2].partition("}")[0] for key in keys} - {"fleet"}
        assert tags == {name for name, owner in owners.items() if owner == address}
    assert await valkey_cluster.keys_without_ttl() == []


async def test_one_batch_reaches_all_nodes_and_answers_in_order(client: ClusterClient) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(60):
        pipeline.execute_command("SET", f"k{number}", number, "EX", 60)
        pipeline.execute_command("GET", f"k{number}")
    replies = await pipeline.execute()
    assert replies[1::2] == [str(number).encode() for number in range(60)]
    assert len(client.nodes()) == 3
    assert client.map_reads == 1


async def test_an_error_of_one_command_stands_in_its_place(client: ClusterClient) -> None:
    await run_command(client, "SET", "{a}text", "x", "EX", 60)
    for is_raised in (False, True):
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("SADD", "{a}text", "y")
        pipeline.execute_command("GET", "{a}text")
        pipeline.execute_command("GET", "{b}text")
        if is_raised:
            with pytest.raises(RedisError, match="WRONGTYPE"):
                await pipeline.execute()
        else:
            refused, *others = await pipeline.execute(raise_on_error=False)
            assert "WRONGTYPE" in str(refused)
            assert others == [b"x", None]


async def test_a_transaction_is_whole_or_nothing_and_of_one_slot(client: ClusterClient) -> None:
    pipeline = client.pipeline(transaction=True)
    pipeline.execute_command("SET", "{a}one", "1", "EX", 60)
    pipeline.execute_command("NO-SUCH-COMMAND", "{a}two")
    with pytest.raises(RedisError, match="unknown command"):
        await pipeline.execute()
    assert await run_command(client, "GET", "{a}one") is None
    pipeline = client.pipeline(transaction=True)
    pipeline.execute_command("SET", "{a}one", "1", "EX", 60)
    pipeline.execute_command("SET", "{b}one", "1", "EX", 60)
    with pytest.raises(ClusterError, match="one slot"):
        await pipeline.execute()
    pipeline = client.pipeline(transaction=True)
    pipeline.execute_command("SET", "{a}one", "1", "EX", 60)
    pipeline.execute_command("GET", "{a}one")
    assert await pipeline.execute() == [b"OK", b"1"]


async def test_a_command_without_a_key_has_no_node(client: ClusterClient) -> None:
    with pytest.raises(ClusterError, match="names no key"):
        await run_command(client, "PING")


async def test_streams_on_several_nodes_are_waited_for_together(
    client: ClusterClient, valkey_cluster: ValkeyCluster
) -> None:
    tailer = blocking_client(valkey_cluster.settings, block_s=2.0)
    names = [f"{{{name}}}s" for name in _NAMES]
    began_s = time.monotonic()
    options = ("XREAD", "COUNT", 5, "BLOCK", 120, "STREAMS")
    assert await run_command(tailer, *options, *names, *["0-0"] * 12) is None
    assert time.monotonic() - began_s >= 0.12
    waiting = asyncio.create_task(
        run_command(tailer, *options[:4], 2000, "STREAMS", *names, *["0-0"] * 12)
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    for name in (names[7], names[2]):
        await run_command(client, "XADD", name, "1-1", "e", "x")
        await run_command(client, "PEXPIRE", name, 60_000)
    news = await waiting
    assert {key.decode() for key, _ in news} <= {names[7], names[2]}
    assert news[0][1] == [[b"1-1", [b"e", b"x"]]]
    both = await run_command(tailer, *options, *names, *["0-0"] * 12)
    assert [key.decode() for key, _ in both] == [names[2], names[7]]
    await run_command(client, "SET", names[0], "no stream", "EX", 60)
    with pytest.raises(RedisError, match="WRONGTYPE"):
        await run_command(tailer, *options, *names, *["0-0"] * 12)
    await tailer.aclose()


async def test_scripts_that_nodes_lost_come_back_on_each_of_them(
    cluster_backend: RedisBackend, valkey_cluster: ValkeyCluster
) -> None:
    """R-07: NOSCRIPT is a node's own."""
    await _announce(cluster_backend, *_NAMES)
    direct, mirror = await cluster_backend.direct(), await cluster_backend.mirror("r2")
    for reader in (direct, mirror):
        assert await reader.settle(30)
    for address in valkey_cluster.addresses:
        await valkey_cluster.command_on(address, "SCRIPT", "FLUSH")
    assert len(await cluster_backend.overlap(direct, blocks(1, 2))) == 12
    assert direct.counts.failed == 0
    for name in _NAMES:
        assert await cluster_backend.writer.heartbeat(record(name), None) is Fence.HELD
    assert await mirror.settle(30)
    assert mirror.failures == 0


async def test_a_map_that_is_wrong_about_a_slot_costs_one_redirection(
    client: ClusterClient, valkey_cluster: ValkeyCluster
) -> None:
    """MOVED corrects the slot for commands, batches and transactions; the map is read once."""
    await run_command(client, "SET", "{a}k", "1", "EX", 60)
    owner = await valkey_cluster.owner("{a}k")
    other = next(address for address in valkey_cluster.addresses if address != owner)

    def mislead() -> None:
        client._owners = [other] * 16_384

    mislead()
    assert await run_command(client, "GET", "{a}k") == b"1"
    mislead()
    pipeline = client.pipeline(transaction=False)
    for name in ("a", "b", "c", "d"):
        pipeline.execute_command("GET", f"{{{name}}}k")
    assert await pipeline.execute() == [b"1", None, None, None]
    mislead()
    pipeline = client.pipeline(transaction=True)
    pipeline.execute_command("GET", "{a}k")
    assert await pipeline.execute() == [b"1"]
    assert await run_command(client, "GET", "{a}k") == b"1"
    assert client.map_reads == 1


async def test_a_circle_of_redirections_ends(client: ClusterClient) -> None:
    await run_command(client, "GET", "{a}k")
    sent = []

    async def circle(address: str, commands: list[tuple[object, ...]]) -> list[object]:
        sent.append(address)
        return [MovedError("15495 127.0.0.1:1") for _ in commands]

    client._send = circle  # type: ignore[assignment, method-assign]
    with pytest.raises(MovedError):
        await run_command(client, "GET", "{a}k")
    pipeline = client.pipeline(transaction=True)
    pipeline.execute_command("GET", "{a}k")
    with pytest.raises(MovedError):
        await pipeline.execute()
    assert len(sent) == 8


async def test_seeds_that_do_not_answer_are_passed_over(valkey_cluster: ValkeyCluster) -> None:
    url = f"redis+cluster://127.0.0.1:1,{valkey_cluster.addresses[1]}"
    for address in ("127.0.0.1:1", valkey_cluster.addresses[1]):
        client = command_client(
            RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0)
        )
        assert await run_command(client, "GET", "{a}k") is None, address
        await client.aclose()
    client = command_client(RedisSettings(url="redis+cluster://127.0.0.1:1"))
    with pytest.raises(RedisError):
        await run_command(client, "GET", "{a}k")
    await client.aclose()


async def test_a_server_that_is_no_cluster_says_so(own_server: ValkeyProcess) -> None:
    """The URL says cluster, the server knows of none: the error names it."""
    client = ClusterClient(["x:1"], lambda _: _single(own_server))
    with pytest.raises(RedisError, match="cluster support disabled"):
        await run_command(client, "GET", "k")
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
    with pytest.raises(StateError, match="cluster support disabled"):
        await writer.register(record())
    await client.aclose()


def _single(server: ValkeyProcess) -> Redis:
    client = command_client(server.settings)
    assert isinstance(client, Redis)
    return client


async def test_a_slot_that_moves_under_traffic_neither_fails_nor_delays_a_request(
    cluster_backend: RedisBackend, valkey_cluster: ValkeyCluster
) -> None:
    """R-13: key by key to another node, with a pause half way; then the index's own slot, too."""
    await _announce(cluster_backend, A, B, C)
    direct = await cluster_backend.direct(lookup_timing=PATIENT_LOOKUPS)
    mirror = await cluster_backend.mirror("r2")
    for reader in (direct, mirror):
        assert await reader.settle(30)
    chain = blocks(1, 2)
    two = Overlap(gpu_blocks=2, any_tier_blocks=2)
    question = Question(namespace=NAMESPACE, chain=chain, replicas=(A, B, C))
    answers: list[dict[ReplicaId, Overlap]] = []
    is_moving = True

    async def ask() -> None:
        while is_moving:
            await direct.prepare([question])
            answers.append(dict(direct.overlap(chain)))
            assert mirror.overlap(chain)[A] == two
            assert set(mirror.replicas()) == set(direct.replicas()) == {A, B, C}
            await asyncio.sleep(0.002)

    async def pause() -> None:
        enough = len(answers) + 20
        await eventually(lambda: traffic.done() or len(answers) >= enough)

    traffic = asyncio.create_task(ask())
    before = await valkey_cluster.owner(ReplicaKeys(A).record)
    after = await valkey_cluster.move_slot(ReplicaKeys(A).record, pause)
    assert after != before
    await pause()
    await valkey_cluster.move_slot(REPLICA_INDEX, pause)
    await pause()
    is_moving = False
    await traffic
    # While half of a replica's keys are at either node its sets may be at the other one: cold.
    assert all({B: two, C: two}.items() <= answer.items() for answer in answers)
    assert answers[-1] == {A: two, B: two, C: two}
    assert direct.counts.by_outcome() == {
        "answered": len(answers), "late": 0, "failed": 0, "refused": 0,
    }  # fmt: skip
    await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
    await cluster_backend.writer.apply([batch(2, stored=blocks(3), replica=A)])
    for reader in (direct, mirror):
        assert await reader.settle(30)
        found = await cluster_backend.overlap(reader, blocks(1, 2, 3))
        assert found[A].gpu_blocks == 3
    assert await valkey_cluster.owner(LEASES) == await valkey_cluster.owner(REPLICA_INDEX)


async def test_a_slot_that_is_not_handed_over_yet_is_asked_for_at_its_new_node(
    client: ClusterClient, valkey_cluster: ValkeyCluster
) -> None:
    """ASK: commands, batches and transactions go where the keys already are, and the map stays."""
    key = "{moving}one"
    await run_command(client, "SET", key, "1", "EX", 60)
    before = list(client._owners)
    pauses = 0

    async def use() -> None:
        nonlocal pauses
        pauses += 1
        value = str(pauses).encode()
        assert await run_command(client, "GET", key) == value
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("GET", key)
        pipeline.execute_command("GET", "{elsewhere}")
        assert await pipeline.execute() == [value, None]
        pipeline = client.pipeline(transaction=True)
        pipeline.execute_command("INCR", key)
        pipeline.execute_command("PEXPIRE", key, 60_000)
        assert await pipeline.execute() == [pauses + 1, 1]

    after = await valkey_cluster.move_slot(key, use)
    assert pauses == 2
    assert client._owners == before
    assert await run_command(client, "GET", key) == b"3"
    assert client._owners[key_slot(key.encode())] == after


async def test_a_writer_hears_of_a_slot_on_its_way_and_goes_on_afterwards(
    cluster_backend: RedisBackend, valkey_cluster: ValkeyCluster
) -> None:
    """R-13: keys of one transaction on two nodes are refused, whole; the sidecar writes again."""
    await _announce(cluster_backend, A)
    mirror = await cluster_backend.mirror("r2")
    refusals: list[str] = []

    async def write() -> None:
        try:
            await cluster_backend.writer.apply([batch(2, stored=blocks(3))])
        except StateError as error:
            refusals.append(str(error))

    await valkey_cluster.move_slot(ReplicaKeys(A).record, write)
    assert all("TryAgain" in refusal for refusal in refusals)
    await cluster_backend.writer.apply([batch(2, stored=blocks(3))])
    assert await cluster_backend.writer.heartbeat(record(A), None) is Fence.HELD
    assert await mirror.settle(30)
    assert mirror.overlap(blocks(1, 2, 3))[A].gpu_blocks == 3


async def test_a_node_that_freezes_delays_no_read_and_the_view_recovers(
    cluster_backend: RedisBackend, valkey_cluster: ValkeyCluster
) -> None:
    """R-03 on one node of three: no request waits; one reading of the map later all is well."""
    await _announce(cluster_backend, *_NAMES)
    mirror = await cluster_backend.mirror("r2")
    assert await mirror.settle(30)
    address = await valkey_cluster.owner(ReplicaKeys(_NAMES[0]).record)
    settings = RedisSettings(url=valkey_cluster.url, command_timeout_s=1.0, connect_timeout_s=1.0)
    client = command_client(settings)
    assert isinstance(client, ClusterClient)
    assert await run_command(client, "GET", ReplicaKeys(_NAMES[0]).load) is None
    valkey_cluster.freeze(address)
    try:
        with pytest.raises(RedisError):
            await run_command(client, "GET", ReplicaKeys(_NAMES[0]).load)
        other = next(name for name in _NAMES if _owner_of(client, name) != address)
        assert client.map_reads == 1
        assert await run_command(client, "GET", ReplicaKeys(other).load) is None
        assert client.map_reads == 2
        assert mirror.overlap(blocks(1, 2))[_NAMES[0]].gpu_blocks == 2
        assert set(mirror.replicas()) == set(_NAMES)
    finally:
        valkey_cluster.thaw(address)
    assert await run_command(client, "GET", ReplicaKeys(_NAMES[0]).load) is None
    await client.aclose()
    assert await mirror.settle(30)
    assert set(mirror.replicas()) == set(_NAMES)


def _owner_of(client: ClusterClient, name: ReplicaId) -> str:
    return client._owners[key_slot(ReplicaKeys(name).record.encode())]


async def test_a_batch_of_many_blocks_is_a_transaction_per_part(
    cluster_backend: RedisBackend,
) -> None:
    many = tuple(map(block, range(9_000)))
    await cluster_backend.writer.register(record())
    await cluster_backend.writer.apply([batch(1, stored=many)])
    await cluster_backend.writer.apply([batch(2, stored=blocks(9_001), is_clear=True)])
    mirror = await cluster_backend.mirror()
    assert await mirror.settle(30)
    assert mirror.overlap(blocks(9_001))[A].gpu_blocks == 1
    assert mirror.overlap(many) == {}
