#!/usr/bin/env python3
"""What the shared state costs: memory per million blocks, snapshots, the tail, and lookups.

    .venv/bin/python bench/state_bench.py [millions of blocks, 1 by default]

Server and router figures are of separate processes. Memory of the router is the growth of its
resident set; memory of the server its data set. Times are medians, of CPU where no server is asked.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from state.block_table import DictTable
from state.client import RedisSettings, command_client, run_command
from state.embedded import EmbeddedValkey
from state.mirror import Mirror
from state.mirror_sync import Follower
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
from state.residency import HOLDER_BYTES, Residency
from state.schema import STREAM_CAP_ENTRIES, ReplicaKeys
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from state.client import Client

MILLION = 1_000_000
NAMESPACE = NamespaceId("00112233445566ff")
CHUNK_BLOCKS = 4000
FLUSH_BLOCKS = 64
STEP_BLOCKS = 2048
PATIENT_S = 60.0
ROUNDS = 200

Row = tuple[str, str, str]


def fresh_blocks(count: int, seed: int) -> Iterator[list[BlockId]]:
    """Yield ``count`` random ids in lists of a mirror's step."""
    rng = random.Random(seed)  # noqa: S311 - test data
    for start in range(0, count, STEP_BLOCKS):
        packed = rng.randbytes(16 * min(STEP_BLOCKS, count - start))
        yield [BlockId(packed[at : at + 16]) for at in range(0, len(packed), 16)]


def resident_bytes() -> int:
    """Return this process's resident set."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def in_process_of_its_own(what: str, *arguments: object) -> str:
    """Run one part of this file afresh, so that no memory of another part is counted."""
    command = [sys.executable, __file__, what, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def index_memory(kind: str, blocks: int) -> None:
    """Print bytes per block, and per further holder, of an index of one kind."""
    gc.collect()
    before = resident_bytes()
    residency = Residency()
    replica = ReplicaId("a")
    slowest_s = 0.0
    for step in fresh_blocks(blocks, 1):
        began_s = time.thread_time()
        residency.store(replica, Tier.GPU, step)
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    if kind == "holders":
        before = resident_bytes()
        for number in range(1, 8):
            for step in fresh_blocks(blocks, 1):
                residency.store(ReplicaId(f"r{number}"), Tier.GPU, step)
        print((resident_bytes() - before) / (7 * blocks))
        return
    if kind == "churned":
        old = fresh_blocks(blocks, 1)
        for number in range(2, 5):
            for step in fresh_blocks(blocks, number):
                residency.remove(replica, Tier.GPU, next(old))
                residency.store(replica, Tier.GPU, step)
            old = fresh_blocks(blocks, number)
    gc.collect()
    print((resident_bytes() - before) / blocks, slowest_s)


def bounded(blocks: int) -> None:
    """Print CPU per stored block of an index at its bound, and of one without."""
    bound = blocks // 4 * (DictTable.entry_bytes + HOLDER_BYTES)
    for max_bytes in (None, bound):
        residency = Residency(max_bytes)
        stored = fresh_blocks(blocks, 1)
        for step in islice(stored, blocks // STEP_BLOCKS // 2):
            residency.store(ReplicaId("a"), Tier.GPU, step)
        times_s, chain = [], tuple(next(fresh_blocks(512, 1))[:512])
        for step in stored:
            residency.overlap(chain)
            began_s = time.thread_time()
            residency.store(ReplicaId("a"), Tier.GPU, step)
            times_s.append((time.thread_time() - began_s) / len(step))
        print(statistics.median(times_s) * 1e9)


def overlap_us(chain_blocks: int, replicas: int) -> tuple[float, float]:
    """Return the median of ``overlap`` over one chain, and over many cold ones of an index."""
    residency = Residency()
    held = [block for step in fresh_blocks(400_000, 3) for block in step]
    for number in range(replicas):
        residency.store(ReplicaId(f"r{number}"), Tier.GPU, held)
    chains = [
        tuple(BlockId(bytes(bytearray(block))) for block in held[at : at + chain_blocks])
        for at in range(0, len(held) - chain_blocks, chain_blocks)
    ]
    hot = [timed(lambda: residency.overlap(chains[0])) for _ in range(ROUNDS)]
    cold = [timed(lambda: residency.overlap(chain)) for chain in chains]  # noqa: B023 - at once
    return statistics.median(hot) * 1e6, statistics.median(cold) * 1e6


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that ``call`` takes."""
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


class Server:
    """A private Valkey with one replica's residency."""

    def __init__(self, url: str, client: Client) -> None:
        self.url = url
        self.client = client
        self.writer = RedisWriter(
            client,
            clock=time.monotonic,
            rng=random.Random(1),  # noqa: S311 - jitter
            timing=StoreTiming(record_ttl_s=3600),  # nobody sends heartbeats here
        )
        self.sequence = 0

    async def memory_bytes(self) -> int:
        """Return what the server uses now, without its clients' buffers."""
        text = (await run_command(self.client, "INFO", "memory")).decode()
        values = dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)
        return int(values["used_memory_dataset"])

    async def register(self, replica: str) -> None:
        """Register a replica of this name."""
        record = ReplicaRecord(
            replica=ReplicaId(replica),
            endpoint="http://127.0.0.1:1",
            generation=Generation("g"),
            identity=ModelIdentity(model="m"),
            page_tokens=16,
            sidecar="s",
        )
        await self.writer.register(record)
        self.sequence = 0

    async def store(self, replica: str, blocks: list[BlockId]) -> None:
        """Store blocks as one batch."""
        self.sequence += 1
        batch = ChangeBatch(
            replica=ReplicaId(replica),
            generation=Generation("g"),
            namespace=NAMESPACE,
            sequence=self.sequence,
            stored=tuple(blocks),
        )
        await self.writer.apply([batch])

    async def mirrored_s(self, blocks: int) -> float:
        """Return how long a new mirror takes to hold that many blocks."""
        settings = RedisSettings(url=self.url, command_timeout_s=PATIENT_S)
        began_s = time.perf_counter()
        rng = random.Random(2)  # noqa: S311 - jitter
        async with Mirror(settings, RouterId("r"), clock=time.monotonic, rng=rng) as mirror:
            async with asyncio.timeout(10 * PATIENT_S):
                while not await mirror.settle(PATIENT_S):
                    pass
            if mirror.holdings()[ReplicaId("a")].blocks != blocks:
                message = "the mirror does not hold what was stored"
                raise SystemExit(message)
            return time.perf_counter() - began_s


async def server_rows(blocks: int) -> list[Row]:
    """Measure the server's memory and what a mirror takes to read it."""
    rows: list[Row] = []
    async with EmbeddedValkey(maxmemory_bytes=4 << 30) as embedded:
        client = command_client(RedisSettings(url=embedded.url, command_timeout_s=PATIENT_S))
        try:
            server = Server(embedded.url, client)
            empty = await server.memory_bytes()
            await server.register("a")
            held = [block for step in fresh_blocks(blocks, 1) for block in step]
            began_s = time.perf_counter()
            for start in range(0, blocks, CHUNK_BLOCKS):
                await server.store("a", held[start : start + CHUNK_BLOCKS])
            stored_s = time.perf_counter() - began_s
            full = await server.memory_bytes()
            stream = await run_command(
                client, "MEMORY", "USAGE", ReplicaKeys(ReplicaId("a")).changes, "SAMPLES", 0
            )
            rows += [
                ("server, per (block, replica)", f"{(full - empty) / blocks:.0f} B", "all keys"),
                ("  of it the change stream", f"{stream / blocks:.0f} B", "batches of 4,000"),
                ("announcing", f"{blocks / stored_s / 1e6:.2f} M blocks/s", "one sidecar"),
            ]
            snapshot_s = await server.mirrored_s(blocks)
            rows.append(("snapshot", f"{snapshot_s:.2f} s", f"{blocks / 1e6:g} M blocks"))
            rows += await tail_rows(server)
        finally:
            await client.aclose()
    return rows


async def tail_rows(server: Server) -> list[Row]:
    """Measure what reading and applying change streams costs a router, small and large batches."""
    rows: list[Row] = []
    for name, size in (("b", FLUSH_BLOCKS), ("c", CHUNK_BLOCKS)):
        replica, batches = ReplicaId(name), STREAM_CAP_ENTRIES // 2
        await server.register(name)
        follower = Follower(Residency(), on_registered, on_deregistered)
        follower.expect({replica: Generation("g")})
        [follow] = follower.unsynced()
        await follower.snapshot(server.client, follow)
        for step in fresh_blocks(STEP_BLOCKS * batches * size // STEP_BLOCKS, size):
            for start in range(0, len(step), size):
                await server.store(name, step[start : start + size])
        began_s, applied = time.process_time(), 0
        while news := await follower.next_entries(server.client, follower.tailed(), 0.001):
            for one, entries in news:
                applied += len(entries)
                await follower.apply(one, entries)
        spent_s = time.process_time() - began_s
        blocks = applied * min(size, STEP_BLOCKS)
        key = ReplicaKeys(replica).changes
        stream = await run_command(server.client, "MEMORY", "USAGE", key, "SAMPLES", 0)
        note = f"{applied:,} batches of {min(size, STEP_BLOCKS):,}, stream {stream / 1e6:.1f} MB"
        rows.append(("tail, CPU", f"{spent_s / blocks * 1e6:.2f} us per block", note))
    return rows


def on_registered(replica: ReplicaId) -> None:
    """Ignore it."""
    del replica


def on_deregistered(replica: ReplicaId, generation: Generation) -> None:
    """Ignore it."""
    del replica, generation


def router_rows(blocks: int) -> list[Row]:
    """Measure the index in processes of their own."""
    grown, slowest_s = map(float, in_process_of_its_own("index", "grown", blocks).split())
    churned, _ = map(float, in_process_of_its_own("index", "churned", blocks).split())
    holders = float(in_process_of_its_own("index", "holders", blocks // 4))
    free_ns, bounded_ns = map(float, in_process_of_its_own("bounded", blocks).split())
    return [
        ("router, per block, grown", f"{grown:.0f} B", "one holder, never removed"),
        ("router, per block, churned", f"{churned:.0f} B", "each replaced three times"),
        ("router, per further holder", f"{holders:.0f} B", ""),
        (
            "  as estimated",
            f"{DictTable.entry_bytes} + {HOLDER_BYTES} B",
            "what state.mirror_bytes counts",
        ),
        ("longest store of 2,048", f"{slowest_s * 1e3:.0f} ms", "the table grows"),
        ("store", f"{free_ns:.0f} ns per block", "no bound"),
        ("store and evict", f"{bounded_ns:.0f} ns per block", "at the bound, one chain asked"),
    ]


def overlap_rows() -> list[Row]:
    """Measure lookups: of the same chain, and of another one each time."""
    rows = []
    for chain_blocks in (512, 2000):
        for replicas in (16, 64):
            hot_us, cold_us = overlap_us(chain_blocks, replicas)
            name = f"overlap, {chain_blocks} blocks x {replicas}"
            rows.append((name, f"{hot_us:.0f} / {cold_us:.0f} us", "hot / cold caches"))
    return rows


def main() -> None:
    """Run everything and print one table."""
    blocks = int(float(sys.argv[1]) * MILLION) if len(sys.argv) > 1 else MILLION
    rows = [*asyncio.run(server_rows(blocks)), *router_rows(blocks), *overlap_rows()]
    table = Table("what", "measured", "note", title=f"{blocks / 1e6:g} million blocks")
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["index"]:
        index_memory(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["bounded"]:
        bounded(int(sys.argv[2]))
    else:
        main()
