#!/usr/bin/env python3
"""What one lookup of a prompt's overlap costs: in the mirror, directly, and block by block.

    .venv/bin/python bench/lookup_bench.py

Every replica holds the whole chain, which is the most work. CPU is that of the thread that asks
and of the server; the wait is what a request sees. Medians over rounds in which the ways alternate.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from state.client import Client, RedisSettings, command_client, run_command
from state.direct import LOOKUP_CONNECTIONS, DirectReader
from state.embedded import EmbeddedValkey
from state.mirror import Mirror
from state.model import (
    BlockId,
    ChangeBatch,
    Generation,
    ModelIdentity,
    NamespaceId,
    ReplicaId,
    ReplicaRecord,
    RouterId,
    Tier,
)
from state.redis_writer import RedisWriter
from state.schema import ReplicaKeys, residency_suffix
from state.store import Question
from state.timing import LookupTiming, StoreTiming

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from state.model import Overlap

NAMESPACE: Final = NamespaceId("00112233445566ff")
GENERATION: Final = Generation("g")
BLOCKS: Final = (32, 512)
REPLICAS: Final = (2, 16)
ROUNDS: Final = 15
LOOKUPS: Final = 20
PATIENT_S: Final = 10.0
COMMANDS_PER_S: Final = 1e6

LASTING: Final = StoreTiming(record_ttl_s=600.0)

Way = tuple[str, "Callable[[tuple[BlockId, ...]], Awaitable[None]]"]


def chain_of(blocks: int) -> tuple[BlockId, ...]:
    """Return a chain of random ids, the same for the same length."""
    rng = random.Random(blocks)  # noqa: S311 - data
    return tuple(BlockId(rng.randbytes(16)) for _ in range(blocks))


async def announce(client: Client, names: list[ReplicaId]) -> None:
    """Let every replica hold every chain."""
    writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1), timing=LASTING)  # noqa: S311 - jitter
    for name in names:
        record = ReplicaRecord(
            replica=name,
            endpoint="http://127.0.0.1:1",
            generation=GENERATION,
            identity=ModelIdentity(model="m"),
            page_tokens=16,
            sidecar="s",
        )
        await writer.register(record)
        batches = [
            ChangeBatch(
                replica=name,
                generation=GENERATION,
                namespace=NAMESPACE,
                sequence=number,
                stored=chain_of(blocks),
            )
            for number, blocks in enumerate(BLOCKS, 1)
        ]
        await writer.apply(batches)


def check(runs: Iterable[int], blocks: int) -> None:
    """Raise unless every run is the whole chain."""
    if any(run != blocks for run in runs):
        message = "a lookup answered wrongly"
        raise RuntimeError(message)


def gpu_runs(found: Mapping[ReplicaId, Overlap], names: list[ReplicaId]) -> list[int]:
    """Return the runs on ``names``."""
    return [found[name].gpu_blocks for name in names]


def ways_of(
    mirror: Mirror, direct: DirectReader, client: Client, names: list[ReplicaId]
) -> list[Way]:
    """Return the ways to look up, by name."""
    suffix = residency_suffix(GENERATION, NAMESPACE, Tier.GPU)
    sets = [ReplicaKeys(name).residency(suffix) for name in names]

    async def in_mirror(chain: tuple[BlockId, ...]) -> None:
        check(gpu_runs(mirror.overlap(chain), names), len(chain))

    async def asked(chain: tuple[BlockId, ...]) -> None:
        question = Question(namespace=NAMESPACE, chain=chain, replicas=tuple(names))
        await direct.prepare([question])
        check(gpu_runs(direct.overlap(chain), names), len(chain))

    async def by_block(chain: tuple[BlockId, ...]) -> None:
        pipeline = client.pipeline(transaction=False)
        for key in sets:
            pipeline.execute_command("SMISMEMBER", key, *chain)
        check(map(sum, await pipeline.execute()), len(chain))

    return [("mirror", in_mirror), ("direct", asked), ("SMISMEMBER", by_block)]


async def server_cpu_s(client: Client) -> float:
    """Return the CPU that the server has used."""
    info = (await run_command(client, "INFO", "cpu")).decode()
    fields = dict(line.split(":") for line in info.splitlines() if ":" in line)
    return float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"])


async def measured(client: Client, way: Way, chain: tuple[BlockId, ...]) -> tuple[float, ...]:
    """Return thread CPU, wait and server CPU of one lookup, in us."""
    waits = []
    served_s, used_s = await server_cpu_s(client), time.thread_time()
    for _ in range(LOOKUPS):
        began_s = time.perf_counter()
        await way[1](chain)
        waits.append(time.perf_counter() - began_s)
    used_s = time.thread_time() - used_s
    served_s = await server_cpu_s(client) - served_s
    per_lookup = (used_s / LOOKUPS, statistics.median(waits), served_s / LOOKUPS)
    return tuple(seconds * COMMANDS_PER_S for seconds in per_lookup)


async def main() -> None:
    """Print the table."""
    table = Table("blocks", "replicas", "way", "router CPU, us", "wait, us", "server CPU, us")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedValkey())
        patient = RedisSettings(url=server.url, command_timeout_s=PATIENT_S)
        client = command_client(patient)
        stack.push_async_callback(client.aclose)
        names = [ReplicaId(f"r{number}") for number in range(max(REPLICAS))]
        await announce(client, names)
        clock, rng = time.monotonic, random.Random(2)  # noqa: S311 - jitter
        mirror = await stack.enter_async_context(
            Mirror(patient, RouterId("a"), clock=clock, rng=rng)
        )
        bare = Mirror(patient, RouterId("b"), clock=clock, rng=rng, has_index=False)
        lookups = RedisSettings(
            url=server.url, command_timeout_s=PATIENT_S, max_connections=LOOKUP_CONNECTIONS
        )
        direct = await stack.enter_async_context(
            DirectReader(bare, lookups, clock=clock, rng=rng, timing=LookupTiming(wait_s=PATIENT_S))
        )
        for reader in (mirror, direct):
            await reader.settle(PATIENT_S)
        for replicas in REPLICAS:
            ways = ways_of(mirror, direct, client, names[:replicas])
            for blocks in BLOCKS:
                chain = chain_of(blocks)
                rounds = [
                    [await measured(client, way, chain) for way in ways] for _ in range(ROUNDS)
                ]
                for number, (name, _) in enumerate(ways):
                    medians = [
                        statistics.median(one[number][figure] for one in rounds)
                        for figure in range(3)
                    ]
                    table.add_row(
                        str(blocks), str(replicas), name, *(f"{us:.0f}" for us in medians)
                    )
    Console().print(table)


if __name__ == "__main__":
    asyncio.run(main())
