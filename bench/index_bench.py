#!/usr/bin/env python3
"""The index of a router: memory per block, CPU per event and per lookup, by the form of its table.

    .venv/bin/python bench/index_bench.py [millions of blocks, 1 by default]

Each memory figure is the growth of the resident set of a process of its own. Times are CPU of the
thread, medians of rounds in which the forms take turns. ``dict`` is what an index is without the
compiled helper, and what the ratios are against; forms that were not taken are measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from index_forms import ArrayTable, BucketTable, IntTable
from state.block_table import DictTable
from state.client import RedisSettings, command_client, run_command
from state.compiled import build, library_path
from state.embedded import EmbeddedValkey
from state.mirror_sync import Follower
from state.model import BlockId, Generation, ReplicaId, Tier
from state.native import SOURCE, load, table_maker
from state.residency import Residency
from state.schema import Entry, EntryKind, encode_entry, unpack_blocks
from state_bench import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from state.block_table import BlockTable
    from state.model import Overlap

MILLION: Final = 1_000_000
BATCH_BLOCKS: Final = 64
REPLICAS: Final = 16
PROMPT_BLOCKS: Final = 2_000
HOLDERS: Final = 64
COLD_CHAINS: Final = 8
BUDGET_MB: Final = 90
BUDGET_SERVER_MB: Final = 120
LOOKUP_BUDGET: Final = "150 us"
BUDGET_EVENT_RATIO: Final = 1.2
HELPERS: Final = Path("build/bench")
OTHERS: Final[dict[str, Callable[[], BlockTable]]] = {
    "ints": IntTable,
    "array": ArrayTable,
    "buckets": BucketTable,
}
Row = tuple[str, ...]

NOTES: Final = {
    "dict": "ids and ints",
    "compiled": "open addressing in C",
    "ints": "dict of 60-bit ints",
    "array": "open addressing in Python",
    "buckets": "packed ids, bytes.find",
}
_PATIENT_S: Final = 60.0


def maker_of(form: str) -> Callable[[], BlockTable]:
    """Return what makes tables of one form."""
    if form == "compiled":
        HELPERS.mkdir(parents=True, exist_ok=True)
        path = library_path(SOURCE, HELPERS)
        return table_maker(load(path) or load(build(SOURCE, HELPERS)))
    return OTHERS.get(form, DictTable)


def ids(count: int, seed: int) -> list[BlockId]:
    """Return random ids."""
    return unpack_blocks(random.Random(seed).randbytes(16 * count))  # noqa: S311 - data


def batches(blocks: int, seed: int) -> Iterator[list[BlockId]]:
    """Yield random ids in batches."""
    for number in range(blocks // BATCH_BLOCKS):
        yield ids(BATCH_BLOCKS, seed << 32 | number)


def agents(blocks: int) -> Iterator[tuple[int, list[BlockId]]]:
    """Yield ``(agent, new blocks)``: turns of 13 blocks behind one of eight shared prefixes."""
    rng = random.Random(7)  # noqa: S311 - data
    prefixes = [ids(40, 900 + number) for number in range(8)]
    made = agent = 0
    while made < blocks:
        if agent < len(prefixes):
            yield agent, prefixes[agent]
            made += len(prefixes[agent])
        for turn in range(rng.randrange(4, 40)):
            yield agent, ids(13, agent << 8 | turn)
            made += 13
        agent += 1


def resident_bytes() -> int:
    """Return this process's resident set."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def fill(residency: Residency, case: str, blocks: int) -> None:
    """Store what a case of ``grown`` names."""
    names = [ReplicaId(f"r{number}") for number in range(REPLICAS)]
    if case in {"random", "churned"}:
        rounds = 1 if case == "random" else 4
        for seed in range(rounds):
            old = batches(blocks, seed - 1)
            for number, batch in enumerate(batches(blocks, seed)):
                name = names[number % REPLICAS]
                if seed:
                    residency.remove(name, Tier.GPU, next(old))
                residency.store(name, Tier.GPU, batch)
        return
    for agent, batch in agents(blocks):
        holders = {"agents 1": 1, "agents 1.5": 1 + agent % 2, "agents 3": 3}[case]
        for holder in range(holders):
            residency.store(names[(agent + holder) % REPLICAS], Tier.GPU, batch)


def grown(form: str, case: str, blocks: int) -> float:
    """Return the bytes of resident memory per distinct block, of an index of one form."""
    make_table = maker_of(form)
    gc.collect()
    before = resident_bytes()
    residency = Residency(make_table=make_table)
    fill(residency, case, blocks)
    gc.collect()
    return (resident_bytes() - before) / residency.indexed_blocks


def in_own_process(form: str, case: str, blocks: int) -> float:
    """Return what ``grown`` returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(grown, (form, case, blocks))


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds of CPU that ``call`` takes."""
    began_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began_ns) / 1e3


def in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each call, in us; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: statistics.median(each) for name, each in times.items()}


class Events:
    """Change entries of one replica, applied as a mirror applies them: each replaces the oldest."""

    def __init__(self, form: str, held_blocks: int, batch_blocks: int) -> None:
        self._residency = Residency(make_table=maker_of(form))
        self._follower = Follower(self._residency, lambda _: None, lambda *_: None)
        self._name, self._generation = ReplicaId("a"), Generation("g")
        self._follower.expect({self._name: self._generation})
        [self._follow] = self._follower.unsynced()
        self._follow.place = (0, 0, 1)
        self._residency.store(self._name, Tier.GPU, ids(held_blocks, 1))
        self._rows = self._entries(batch_blocks)

    def _entries(self, batch_blocks: int) -> Iterator[Sequence[object]]:
        old = random.Random(1)  # noqa: S311 - the ids that are held
        new = random.Random(2)  # noqa: S311 - data
        sequence = 0
        while True:
            sequence += 1
            entry = Entry(
                kind=EntryKind.CHANGED,
                generation=self._generation,
                sequence=sequence,
                removed=old.randbytes(16 * batch_blocks),
                stored=new.randbytes(16 * batch_blocks),
            )
            yield b"%d-0" % sequence, [b"e", encode_entry(entry)]

    def portion(self, entries: int) -> Callable[[], None]:
        """Return what applies the next entries."""
        rows = list(islice(self._rows, entries))
        applying = self._follower.apply(self._follow, rows)

        def run() -> None:
            try:
                while True:
                    applying.send(None)
            except StopIteration:
                return

        return run


def event_rows(rounds: int, forms: Sequence[str]) -> list[Row]:
    """Measure one applied block, removals counted as well as what is stored."""
    rows: list[Row] = []
    for batch_blocks in (1, 8, 64, 1024):
        events = {form: Events(form, 100_000, batch_blocks) for form in forms}
        times: dict[str, list[float]] = {form: [] for form in forms}
        entries = max(1, 256 // batch_blocks)
        for _ in range(rounds):
            for form, source in events.items():
                run = source.portion(entries)
                times[form].append(timed(run) / (2 * batch_blocks * entries))
        medians = {form: statistics.median(each) for form, each in times.items()}
        for form in forms:
            ratio = medians[form] / medians["dict"]
            budget = "" if form == "dict" else f"ratio <= {BUDGET_EVENT_RATIO}"
            what = f"event, per block of {batch_blocks}"
            rows.append((what, form, f"{medians[form]:.2f} us", f"{ratio:.2f}", budget))
    return rows


def lookup_index(form: str, chains: Sequence[Sequence[BlockId]], case: str) -> Residency:
    """Return an index in which 64 replicas hold the chains as ``case`` says."""
    residency = Residency(make_table=maker_of(form))
    for number in range(HOLDERS):
        name = ReplicaId(f"r{number}")
        for chain in chains:
            if case == "other depths":
                chain_held = chain[: (number + 1) * len(chain) // HOLDERS]
            elif case == "holes":
                gap = (number + 1) * len(chain) // HOLDERS - 1
                chain_held = [*chain[:gap], *chain[gap + 1 :]]
            else:
                chain_held = chain
            residency.store(name, Tier.GPU, chain_held)
    return residency


def lookup_rows(rounds: int, forms: Sequence[str]) -> list[Row]:
    """Measure the overlap of one chain of 2,000 blocks with 64 replicas."""
    rows: list[Row] = []
    chains = [ids(PROMPT_BLOCKS, 50 + number) for number in range(COLD_CHAINS)]
    absent = ids(PROMPT_BLOCKS, 49)
    for case in ("all", "other depths", "holes", "nobody"):
        indexes = {form: lookup_index(form, chains, case) for form in forms}
        asked = [[BlockId(bytes(bytearray(one))) for one in chain] for chain in chains]
        found = [index.overlap(asked[0]) for index in indexes.values()]
        check(found, case)
        hot_calls = overlaps(indexes, absent if case == "nobody" else asked[0])
        hot = in_turns(hot_calls, 5 * rounds)
        cold: dict[str, float] = {}
        for form, index in indexes.items():
            each = [timed(lambda: index.overlap(chain)) for chain in asked]  # noqa: B023 - at once
            cold[form] = statistics.median(each)
        for form in forms:
            told = f"{hot[form]:.0f}"
            if case != "nobody":
                told += f" / {cold[form]:.0f}"
            ratio = f"{hot[form] / hot['dict']:.2f}"
            rows.append((f"2,000 x 64: {case}", form, f"{told} us", ratio, LOOKUP_BUDGET))
    return rows


def overlaps(
    indexes: dict[str, Residency], chain: Sequence[BlockId]
) -> dict[str, Callable[[], object]]:
    """Return one lookup per form; its ids are new objects each time, as those of a request."""

    def call(index: Residency) -> Callable[[], object]:
        return lambda: index.overlap(chain)

    return {form: call(index) for form, index in indexes.items()}


def check(found: Sequence[dict[ReplicaId, Overlap]], case: str) -> None:
    """Raise unless all forms answered alike, and as the case says."""
    if any(one != found[0] for one in found):
        message = f"the forms answer differently: {case}"
        raise SystemExit(message)


def memory_rows(blocks: int, forms: Sequence[str]) -> list[Row]:
    """Measure each case in each form."""
    rows: list[Row] = []
    for case in ("random", "churned", "agents 1", "agents 1.5", "agents 3"):
        base = in_own_process("dict", case, blocks)
        for form in forms:
            took = base if form == "dict" else in_own_process(form, case, blocks)
            budget = f"{BUDGET_MB} MB" if form == "compiled" and "1.5" not in case else ""
            rows.append(
                (
                    f"memory per million, {case}",
                    form,
                    f"{took:.0f} MB",
                    f"{took / base:.2f}",
                    budget,
                )
            )
    return rows


def other_rows(blocks: int) -> list[Row]:
    """Measure the forms that were not taken, on fewer blocks."""
    rows: list[Row] = []
    batch_ids = list(batches(blocks, 5))
    chain = [block for batch in batch_ids for block in batch][:PROMPT_BLOCKS]
    for form in ("dict", "compiled", *OTHERS):
        table = maker_of(form)()
        stored = statistics.median(timed(lambda: table.add(batch, 2)) for batch in batch_ids)  # noqa: B023 - at once
        walked = statistics.median(
            timed(lambda: list(table.walk(chain, until_unknown=True)))  # noqa: B023 - at once
            for _ in range(20)
        )
        took = in_own_process(form, "random", blocks)
        name = f"{form}: {NOTES[form]}"
        told = f"{took:.0f} MB, {stored / BATCH_BLOCKS:.2f} us, {walked:.0f} us"
        rows.append(("memory / stored block / walk of 2,000", name, told, "", ""))
    return rows


async def server_rows(blocks: int) -> list[Row]:
    """Measure what a server holds per (block, replica), of four replicas with the same blocks."""
    async with EmbeddedValkey(maxmemory_bytes=4 << 30) as embedded:
        client = command_client(RedisSettings(url=embedded.url, command_timeout_s=_PATIENT_S))
        try:
            server = Server(embedded.url, client)
            empty = await server.memory_bytes()
            for number in range(4):
                await server.register(f"r{number}")
                for at in range(0, blocks // 4, 4_000):
                    await server.store(f"r{number}", ids(min(4_000, blocks // 4 - at), at))
            took = (await server.memory_bytes() - empty) / blocks
            version = (await run_command(client, "INFO", "server")).decode()
            name = next(line for line in version.splitlines() if line.startswith("valkey_version"))
            budget = f"{BUDGET_SERVER_MB} MB"
            return [("server per million pairs", name, f"{took:.0f} MB", "", budget)]
        finally:
            await client.aclose()


def main() -> None:
    """Measure everything and print one table; write it as JSON, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("millions", type=float, nargs="?", default=1.0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--parts", default="memory,events,lookups,server,others")
    parser.add_argument("--json", type=Path, default=Path("bench/results/index.json"))
    options = parser.parse_args()
    forms = ("dict", "compiled")
    blocks = int(options.millions * MILLION)
    parts: dict[str, Callable[[], list[Row]]] = {
        "memory": lambda: memory_rows(blocks, forms),
        "events": lambda: event_rows(options.rounds, forms),
        "lookups": lambda: lookup_rows(options.rounds, forms),
        "server": lambda: asyncio.run(server_rows(blocks // 4)),
        "others": lambda: other_rows(blocks // 5),
    }
    rows: list[Row] = []
    for name in options.parts.split(","):
        found = parts[name]()
        for row in found:
            print(" | ".join(row), file=sys.stderr, flush=True)
        rows += found
    table = Table("what", "form", "measured", "against dict", "budget", title=f"{blocks:,} blocks")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
