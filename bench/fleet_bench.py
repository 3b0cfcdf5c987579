#!/usr/bin/env python3
"""What a router pays for a fleet of 1,000 replicas whatever they announce, beside smaller ones.

    .venv/bin/python bench/fleet_bench.py [replicas, 1,000 by default]

One read names the change stream of each replica; a round of the registry reads the record and load
of each that may have changed; a lookup walks bitmaps that are as wide as the fleet. CPU of this
process and of the server, medians.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from index_bench import ids, maker_of
from state.client import RedisSettings, command_client, run_command
from state.embedded import EmbeddedValkey
from state.mirror_sync import Follower
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaLoad, ReplicaRecord, Tier
from state.redis_writer import RedisWriter
from state.registry import Registry
from state.registry_reader import RegistryReader
from state.residency import Residency
from state.schema import REPLICA_INDEX, Entry, EntryKind, ReplicaKeys, encode_entry
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from state.client import Client

ROUNDS: Final = 15
CHAIN_BLOCKS: Final = 512
HOLDERS: Final = 4
_PATIENT_S: Final = 30.0
_LASTING_S: Final = 3_600.0


async def server_cpu_ms(client: Client) -> float:
    """Return the CPU that the server has used."""
    info = (await run_command(client, "INFO", "cpu")).decode()
    fields = dict(line.split(":") for line in info.splitlines() if ":" in line)
    return 1e3 * (float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"]))


async def per_round(
    client: Client,
    call: Callable[[], Awaitable[object]],
    before: Callable[[], Awaitable[object]] | None = None,
) -> tuple[float, float]:
    """Return ms of CPU of a call, here (median) and at the server (mean), ``before`` it apart."""
    used, served_ms = [], 0.0
    for _ in range(ROUNDS):
        if before is not None:
            await before()
        began_ms, began_ns = await server_cpu_ms(client), time.thread_time_ns()
        await call()
        used.append((time.thread_time_ns() - began_ns) / 1e6)
        served_ms += await server_cpu_ms(client) - began_ms
    return statistics.median(used), served_ms / ROUNDS


class Fleet:
    """Streams of replicas, and a follower of them that is up to date."""

    def __init__(self, client: Client, replicas: int) -> None:
        self.client = client
        self.names = [ReplicaId(f"replica-{number:04d}") for number in range(replicas)]
        self.follower = Follower(Residency(), lambda _: None, lambda *_: None)
        self.sequence = 0
        self.writer = RedisWriter(
            client,
            clock=time.monotonic,
            rng=random.Random(1),  # noqa: S311 - jitter
            timing=StoreTiming(record_ttl_s=_LASTING_S, load_ttl_s=_LASTING_S),
        )
        self.reader = RegistryReader(_LASTING_S)
        self.registry = Registry(grace_s=_LASTING_S, load_ttl_s=_LASTING_S)

    async def follow(self) -> None:
        """Begin the streams and take the snapshots."""
        await self.announce(len(self.names))
        self.follower.expect(dict.fromkeys(self.names, Generation("g")))
        for follow in self.follower.unsynced():
            await self.follower.snapshot(self.client, follow)

    async def announce(self, replicas: int) -> None:
        """Let so many replicas tell of eight blocks each."""
        self.sequence += 1
        stored = random.Random(self.sequence).randbytes(128)  # noqa: S311 - data
        entry = Entry(
            kind=EntryKind.CHANGED,
            generation=Generation("g"),
            sequence=self.sequence,
            stored=stored,
        )
        pipeline = self.client.pipeline(transaction=False)
        for name in self.names[:replicas]:
            pipeline.execute_command(
                "XADD", ReplicaKeys(name).changes, "*", "e", encode_entry(entry)
            )
        await pipeline.execute()

    async def read(self) -> None:
        """Read and apply what one replica told."""
        follows = self.follower.tailed()
        for follow, rows in await self.follower.next_entries(self.client, follows, 0.001):
            await self.follower.apply(follow, rows)

    async def register(self) -> None:
        """Register all replicas and send a heartbeat of each."""
        for name in self.names:
            await self.writer.register(self.record(name))
            await self.beat(name, 0)

    async def beat(self, name: ReplicaId, running: int) -> None:
        """Send a heartbeat."""
        await self.writer.heartbeat(self.record(name), ReplicaLoad(running=running))

    async def beat_all(self) -> None:
        """Count a heartbeat of each replica as of now: this host's clock is the server's."""
        now_ms = round(time.time() * 1000)
        counted = [part for name in self.names for part in (now_ms, name)]
        await run_command(self.client, "ZADD", REPLICA_INDEX, *counted)

    @staticmethod
    def record(name: ReplicaId) -> ReplicaRecord:
        """Return what the sidecar of a replica registers."""
        return ReplicaRecord(
            replica=name,
            endpoint="http://127.0.0.1:8000",
            generation=Generation("g"),
            identity=ModelIdentity(model="m"),
            page_tokens=16,
            sidecar="s",
        )

    async def poll(self) -> None:
        """Do one round of the registry."""
        self.registry.observe(await self.reader.read(self.client), time.monotonic())

    async def poll_all(self) -> None:
        """Do a round that reads every row, as the first one does."""
        self.reader.reset()
        await self.poll()

    async def rounds(self) -> list[tuple[str, str]]:
        """Return what rounds of the registry cost, by what they find."""
        await self.register()
        await self.poll()
        tenth = self.names[::10]
        ticks = iter(range(1, 10 * ROUNDS))

        async def change() -> None:
            running = next(ticks)
            for name in tenth:
                await self.beat(name, running)
            await self.beat_all()

        rows = []
        for what, before, call in (
            ("all rows, as at the start", None, self.poll_all),
            ("nothing changed", self.beat_all, self.poll),
            ("a tenth has another load", change, self.poll),
        ):
            used, served = await per_round(self.client, call, before)
            rows.append((f"round of the registry, {what}", f"{used:.2f} / {served:.2f} ms"))
        return rows


def lookup_us(form: str, replicas: int) -> float:
    """Return the median of an overlap that four of the fleet have a part in."""
    residency = Residency(make_table=maker_of(form))
    chain = ids(CHAIN_BLOCKS, 3)
    for number in range(replicas):
        residency.store(ReplicaId(f"r{number}"), Tier.GPU, ids(8, 10 + number))
    for number in range(HOLDERS):
        name = ReplicaId(f"r{replicas - 1 - number}")
        residency.store(name, Tier.GPU, chain[: (number + 1) * CHAIN_BLOCKS // HOLDERS])
    used = []
    for _ in range(10 * ROUNDS):
        began_ns = time.thread_time_ns()
        residency.overlap(chain)
        used.append((time.thread_time_ns() - began_ns) / 1e3)
    return statistics.median(used)


async def measured(replicas: int) -> list[tuple[str, str]]:
    """Return what a fleet of this size costs."""
    async with EmbeddedValkey(maxmemory_bytes=1 << 30) as embedded:
        client = command_client(RedisSettings(url=embedded.url, command_timeout_s=_PATIENT_S))
        try:
            fleet = Fleet(client, replicas)
            await fleet.follow()

            async def news() -> None:
                await fleet.announce(1)

            async def news_read() -> None:
                await fleet.announce(1)
                await fleet.read()

            told, told_server = await per_round(client, news)
            both, both_server = await per_round(client, news_read)
            rounds = await fleet.rounds()
        finally:
            await client.aclose()
    return [
        (
            "read that brings one entry",
            f"{both - told:.2f} / {max(0.0, both_server - told_server):.2f} ms",
        ),
        *rounds,
        *[
            (f"overlap, {CHAIN_BLOCKS} blocks, {HOLDERS} holders, {form}", f"{us:.0f} us")
            for form in ("dict", "compiled")
            for us in (lookup_us(form, replicas),)
        ],
    ]


def main() -> None:
    """Print fleets of three sizes side by side."""
    replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    sizes = (10, 100, replicas)
    columns = [asyncio.run(measured(size)) for size in sizes]
    table = Table("router / server CPU of", *(f"{size:,} replicas" for size in sizes))
    for rows in zip(*columns, strict=True):
        table.add_row(rows[0][0], *(value for _, value in rows))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
