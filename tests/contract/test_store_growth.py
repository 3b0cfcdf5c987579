"""Large amounts: store and copy reach a plateau, and nothing is sent or read in one piece."""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from state.client import command_client, run_command
from state.mirror import Mirror
from state.model import BlockId, RouterId, Rung
from state.redis_writer import RedisWriter
from state.schema import MAX_CHUNK_BLOCKS, ReplicaKeys, decode_entry
from support.fleet_state import A, batch, block, blocks, record
from support.slow_link import SlowLink
from support.state_backend import FAST_ROUNDS, LASTING, RedisBackend
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

HELD_BLOCKS = 16_384
STEP_BLOCKS = 1_024
ENTRY_BYTES = 16 * MAX_CHUNK_BLOCKS + 1_024


async def _used_bytes(server: ValkeyProcess) -> int:
    info = (await server.command("INFO", "memory")).decode()
    line = next(line for line in info.splitlines() if line.startswith("used_memory:"))
    return int(line.partition(":")[2])


@pytest.mark.parametrize(
    "unique_blocks", [131_072, pytest.param(1_048_576, marks=pytest.mark.heavy)]
)
async def test_blocks_that_come_and_go_reach_a_plateau(
    own_server: ValkeyProcess, unique_blocks: int
) -> None:
    """R-21, I-8: an engine's pool is full all the time; restarts leave nothing behind."""
    client = command_client(own_server.settings)
    writer = RedisWriter(
        client, clock=time.monotonic, rng=Random(1), timing=LASTING, stream_cap_entries=16
    )
    mirror = Mirror(
        own_server.settings, RouterId("r"), clock=time.monotonic, rng=Random(2), timing=FAST_ROUNDS
    )
    steps = unique_blocks // STEP_BLOCKS
    full = HELD_BLOCKS // STEP_BLOCKS
    used_bytes, index_bytes = [], []
    async with mirror:
        for life in range(2):
            generation = f"g{life}"
            await writer.register(record(generation=generation))
            held: list[tuple[BlockId, ...]] = []
            for step in range(steps // 2):
                first = (life * steps + step) * STEP_BLOCKS
                fresh = tuple(map(block, range(first, first + STEP_BLOCKS)))
                gone = held.pop(0) if len(held) == full else ()
                held.append(fresh)
                changes = batch(step + 1, stored=fresh, removed=gone, generation=generation)
                await writer.apply([changes])
                if step >= full and step % full == 0:
                    assert await mirror.settle(30)
                    used_bytes.append(await _used_bytes(own_server))
                    index_bytes.append(mirror.figures().index_bytes)
                    assert mirror.holdings()[A].blocks == HELD_BLOCKS
        assert mirror.failures == 0
    assert len(await own_server.command("KEYS", "*")) < 12
    assert await own_server.keys_without_ttl() == []
    await client.aclose()
    assert len(used_bytes) >= 6
    assert max(used_bytes[1:]) < 1.15 * used_bytes[0]
    assert max(index_bytes[1:]) < 1.6 * index_bytes[0]  # a dict keeps room for its changes


async def test_a_prompt_of_a_hundred_thousand_blocks_goes_in_pieces(
    redis_backend: RedisBackend,
) -> None:
    """R-22: announced in portions of 64 KiB, found whole, and no turn of the loop is long."""
    chain: Sequence[BlockId] = tuple(map(block, range(100_000)))
    await redis_backend.writer.register(record())
    await redis_backend.writer.apply([batch(1, stored=tuple(chain))])
    entries = await run_command(redis_backend.client, "XRANGE", ReplicaKeys(A).changes, "-", "+")
    parts = [decode_entry(values) for _, values in entries]
    stored = [len(part.stored) for part in parts if part is not None and part.stored]
    assert max(stored) == 16 * MAX_CHUNK_BLOCKS
    assert sum(stored) == 16 * len(chain)
    assert max(len(values[1]) for _, values in entries) <= ENTRY_BYTES
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    began_s = time.thread_time()
    assert mirror.overlap(chain)[A].gpu_blocks == len(chain)
    assert time.thread_time() - began_s < 1.0
    reader = await redis_backend.direct("r2")
    assert await reader.settle(30)
    found = await redis_backend.overlap(reader, chain)
    assert found[A].gpu_blocks == 29_184  # so many are asked for at most


async def test_a_server_that_ends_connections_with_much_to_read_is_read_in_smaller_portions(
    own_server: ValkeyProcess,
) -> None:
    """R-23: of the reply to a tail only two portions fit into what a client may have waiting."""
    await own_server.command("CONFIG", "SET", "client-output-buffer-limit", "normal 150kb 0 0")
    client = command_client(own_server.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(1), timing=LASTING)
    await writer.register(record())
    await writer.apply([batch(1, stored=blocks(1))])
    async with (
        SlowLink(own_server.socket_path) as link,
        Mirror(
            link.settings(timeout_s=10.0),
            RouterId("r"),
            clock=time.monotonic,
            rng=Random(2),
            timing=FAST_ROUNDS,
        ) as mirror,
    ):
        assert await mirror.settle(30)
        snapshots = mirror.snapshots
        link.delay_s = lambda: 0.2  # meanwhile many entries come
        for number in range(2, 22):
            first = number * MAX_CHUNK_BLOCKS
            fresh = tuple(map(block, range(first, first + MAX_CHUNK_BLOCKS)))
            await writer.apply([batch(number, stored=fresh)])
        link.delay_s = float
        await eventually(lambda: mirror.holdings()[A].blocks == 20 * MAX_CHUNK_BLOCKS + 1)
        assert mirror.failures > 0  # the server did end connections
        assert mirror.snapshots == snapshots
    await client.aclose()


async def test_connections_that_the_server_kills_lose_no_change(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """R-14, R-23: CLIENT KILL of every client, again and again, while blocks come and go."""
    await redis_backend.writer.register(record())
    mirror = await redis_backend.mirror()
    assert await mirror.settle(30)
    snapshots = mirror.snapshots
    client = command_client(valkey.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(3), timing=LASTING)
    for number in range(1, 101):
        gone = blocks(number - 10) if number > 10 else ()
        await writer.apply([batch(number, stored=blocks(number), removed=gone)])
        if number % 10 == 0:
            await asyncio.sleep(0.02)
            killed = await valkey.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert killed > 0
    assert await mirror.settle(30)
    assert mirror.overlap(blocks(*range(91, 101)))[A].gpu_blocks == 10
    assert mirror.holdings()[A].blocks == 10
    assert mirror.snapshots == snapshots  # the stream goes on where it was
    await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
    await client.aclose()
