#!/usr/bin/env python3
"""What a router pays for a fleet of 1,000 replicas whatever they announce, beside one of 16.

    .venv/bin/python bench/fleet_bench.py [replicas, 1,000 by default]

One read names the change stream of each replica; one round of the registry asks for the record and
the load of each; a lookup walks bitmaps that are as wide as the fleet. CPU of this process and of
the server, medians.
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
from state.model import Generation, ReplicaId, Tier
from state.residency import Residency
from state.schema import Entry, EntryKind, ReplicaKeys, encode_entry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from state.client import Client

ROUNDS: Final = 15
CHAIN_BLOCKS: Final = 512
HOLDERS: Final = 4
_PATIENT_S: Final = 30.0


async def server_cpu_ms(client: Client) -> float:
    """Return the CPU that the server has used."""
    info = (await run_command(client, "INFO", "cpu")).decode()
    fields = dict(line.split(":") for line in info.splitlines() if ":" in line)
    return 1e3 * (float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"]))


async def per_round(client: Client, call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return ms of CPU of a call, here (median) and at the server (mean)."""
    used = []
    before_ms = await server_cpu_ms(client)
    for _ in range(ROUNDS):
        began_ns = time.thread_time_ns()
        await call()
        used.append((time.thread_time_ns() - began_ns) / 1e6)
    return statistics.median(used), (await server_cpu_ms(client) - before_ms) / ROUNDS


class Fleet:
    """Streams of replicas, and a follower of them that is up to date."""

    def __init__(self, client: Client, replicas: int) -> None:
        self.client = client
        self.names = [ReplicaId(f"replica-{number:04d}") for number in range(replicas)]
        self.follower = Follower(Residency(), lambda: None, lambda *_: None)
        self.sequence = 0

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

    async def poll(self) -> None:
        """Ask for all records and loads, as the registry does."""
        for start in range(0, len(self.names), 64):
            pipeline = self.client.pipeline(transaction=False)
            for name in self.names[start : start + 64]:
                keys = ReplicaKeys(name)
                pipeline.execute_command("HGET", keys.record, "value")
                pipeline.execute_command("GET", keys.load)
            await pipeline.execute(raise_on_error=False)


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
            poll, poll_server = await per_round(client, fleet.poll)
        finally:
            await client.aclose()
    return [
        (
            "read that brings one entry",
            f"{both - told:.2f} / {max(0.0, both_server - told_server):.2f} ms",
        ),
        ("round of the registry", f"{poll:.2f} / {poll_server:.2f} ms"),
        *[
            (f"overlap, {CHAIN_BLOCKS} blocks, {HOLDERS} holders, {form}", f"{us:.0f} us")
            for form in ("dict", "compiled")
            for us in (lookup_us(form, replicas),)
        ],
    ]


def main() -> None:
    """Print both fleets side by side."""
    replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    small, large = asyncio.run(measured(16)), asyncio.run(measured(replicas))
    table = Table("router / server CPU of", "16 replicas", f"{replicas:,} replicas")
    for (name, few), (_, many) in zip(small, large, strict=True):
        table.add_row(name, few, many)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
