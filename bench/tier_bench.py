"""Tiers below the pool, and pages from other workers: when they pay, and when they do not. One run.

    python bench/tier_bench.py [--quick] [--only offload,once,transfer,link] [--rounds N]

Workers are real processes with NumPy arithmetic on one thread each, asked over HTTP; the model is
the built-in one, 3 KiB of KV for a token. Configurations take turns in every round, the draws of a
round are the same for all of them; shown are medians over the rounds. How long computing and moving
a page take is this machine's: what carries over is their ratio, and who wins at a given one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figures, table, write_report
from meter import Noise
from tier_rig import (
    Heard,
    Rig,
    SlowLink,
    Worker,
    in_turn,
    mean_ms,
    quantile_ms,
    tier_rig,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

MIB: Final = 2**20
POOL_PAGES: Final = 128
TEXT_TOKENS: Final = 512
"""A conversation so far: 32 pages of 16 tokens."""
TURN_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 4
TEXTS_IN_POOL: Final = POOL_PAGES * 16 // TEXT_TOKENS
CLIENTS: Final = 2
HOST_MIB: Final = 24
"""Four pools."""
SMALL_HOST_MIB: Final = 6
"""One pool."""
DISK_MIB: Final = 56
"""Eight pools, with what file blocks round up."""
ONCE_HOST_MIB: Final = 10
HOT_TEXTS: Final = 6
ONCE_PER_HOT: Final = 2
PEER_PAGES: Final = 1400
LINK_BYTES_PER_S: Final = 1.5e6
LINK_TOKENS: Final = 512
LINK_REQUESTS: Final = 8
BUSY_TOKENS: Final = 2048
METRICS: Final = (
    "requests/s",
    "TTFT mean, ms",
    "TTFT p50, ms",
    "TTFT p90, ms",
    "tokens hit",
    "CPU per request, ms",
    "to host, MiB",
    "from host, MiB",
    "to disk, MiB",
    "from disk, MiB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is done."""

    rounds: int = 3
    requests: int = 40
    working_sets: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    lengths: tuple[int, ...] = (64, 256, 512, 1024, 2048, 4096, 8192)


QUICK: Final = Amounts(rounds=1, requests=8, working_sets=(0.5, 2.0), lengths=(256, 1024))


@dataclass(frozen=True, slots=True)
class Bench:
    """What a section measures with."""

    rig: Rig
    amounts: Amounts
    directory: Path


def turn_of(text: Sequence[int], number: int) -> list[int]:
    """Return a conversation with a new turn that nobody asked before."""
    return [*text, *tokens_of(1_000_000 + number, TURN_TOKENS)]


async def load(
    figures: Figures, row: str, worker: Worker, prompts: Sequence[Sequence[int]]
) -> list[Heard]:
    """Ask for ``prompts`` and note what it took and what was moved."""
    before, cpu_s, began_s = await worker.tiers(), worker.cpu_s(), time.perf_counter()
    heard = await in_turn(worker, prompts, CLIENTS, OUTPUT_TOKENS)
    took_s, cpu_s = time.perf_counter() - began_s, worker.cpu_s() - cpu_s
    after = await worker.tiers()
    hit_tokens = sum(each.cached_tokens for each in heard)
    values = {
        "requests/s": len(heard) / took_s,
        "TTFT mean, ms": mean_ms(heard),
        "TTFT p50, ms": quantile_ms(heard, 0.5),
        "TTFT p90, ms": quantile_ms(heard, 0.9),
        "tokens hit": hit_tokens / sum(each.prompt_tokens for each in heard),
        "CPU per request, ms": 1e3 * cpu_s / len(heard),
    }
    for tier in ("host", "disk"):
        if tier in after:
            for way, name in (("to", "moved_in_bytes"), ("from", "moved_out_bytes")):
                moved_bytes = after[tier][name] - before[tier][name]
                values[f"{way} {tier}, MiB"] = moved_bytes / MIB
    for name, value in values.items():
        figures.add(row, name, value)
    return heard


async def started(bench: Bench, plans: dict[str, tuple[str, ...]]) -> dict[str, Worker]:
    """Start a worker for each plan."""
    pool = ("--pages", str(POOL_PAGES))
    return {name: await bench.rig.start(*pool, *flags) for name, flags in plans.items()}


async def offload_section(bench: Bench) -> Figures:
    """Measure conversations in random order, with and without lower tiers, by their number."""
    disk = ("--disk-dir", str(bench.directory / "offload"), "--disk-mib", str(DISK_MIB))
    plans = {
        "off": (),
        "host": ("--host-mib", str(HOST_MIB)),
        "small host, disk": ("--host-mib", str(SMALL_HOST_MIB), *disk),
    }
    figures = Figures()
    workers = await started(bench, plans)
    for at in range(bench.amounts.rounds + 1):
        for share in bench.amounts.working_sets if at else (1.0,):
            texts = [
                tokens_of(1_000 * at + number, TEXT_TOKENS)
                for number in range(int(share * TEXTS_IN_POOL))
            ]
            rng = random.Random(at)  # noqa: S311 - test data
            prompts = [
                turn_of(rng.choice(texts), 100 * at + number)
                for number in range(bench.amounts.requests)
            ]
            for name, worker in workers.items():
                await worker.reset()
                await in_turn(worker, texts, 1, 1)
                kept = figures if at else Figures()
                await load(kept, f"{share:g} x pool, {name}", worker, prompts)
    return figures


async def once_section(bench: Bench) -> Figures:
    """Measure prompts that never come back: alone, and with a few conversations among them."""
    host, reused = ("--host-mib", str(ONCE_HOST_MIB)), ("--demote", "reused")
    disk = ("--disk-dir", str(bench.directory / "once"), "--disk-mib", str(DISK_MIB))
    other = ("--disk-dir", str(bench.directory / "reused"), "--disk-mib", str(DISK_MIB))
    mixes = {
        "some return": (HOT_TEXTS, {"off": (), "all": host, "reused": (*host, *reused)}),
        "none returns": (
            0,
            {"off": (), "all": (*host, *disk), "reused": (*host, *other, *reused)},
        ),
    }
    figures = Figures()
    for mix, (hot_texts, plans) in mixes.items():
        workers = await started(bench, plans)
        for at in range(bench.amounts.rounds + 1):
            texts, prompts = once_prompts(at, hot_texts, bench.amounts.requests if at else 6)
            for name, worker in workers.items():
                await worker.reset()
                for text in texts:
                    await in_turn(worker, (text, turn_of(text, at)), 1, 1)
                row = f"{mix}, {name}" if name == "off" else f"{mix}, --demote {name}"
                await load(figures if at else Figures(), row, worker, prompts)
    return figures


def once_prompts(
    round_number: int, hot_texts: int, count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the conversations of a round, and what is asked: their turns among other prompts."""
    first = 500_000 + 1_000 * round_number
    texts = [tokens_of(first + number, TEXT_TOKENS) for number in range(hot_texts)]
    rng = random.Random(round_number)  # noqa: S311 - test data
    prompts = []
    for number in range(count):
        seed = 600_000 + 1_000 * round_number + number
        is_hot = texts and number % (1 + ONCE_PER_HOT) == 0
        prompts.append(turn_of(rng.choice(texts) if is_hot else tokens_of(seed, TEXT_TOKENS), seed))
    return texts, prompts


async def transfer_section(bench: Bench) -> Figures:
    """Measure a prefix that another worker has: fetched, and computed."""
    figures, pages = Figures(), ("--pages", str(PEER_PAGES))
    warm = await bench.rig.start(*pages, "--transfer-port", "0")
    cold = await bench.rig.start(*pages, "--transfer-peers", warm.url, "--fetch", "always")
    texts = {tokens: tokens_of(700_000 + tokens, tokens + 1) for tokens in bench.amounts.lengths}
    for text in texts.values():
        await warm.ask(text)
    await cold.ask(texts[min(texts)], source=warm.url)
    for _ in range(bench.amounts.rounds):
        for tokens, text in texts.items():
            await both_ways(figures, f"{tokens:,} tokens", cold, warm, text)
    busy = min(BUSY_TOKENS, max(texts))
    for at in range(bench.amounts.rounds):
        burden = asyncio.create_task(keep_busy(warm, at))
        await both_ways(figures, f"{busy:,} tokens, peer busy", cold, warm, texts[busy])
        burden.cancel()
        await asyncio.gather(burden, return_exceptions=True)
    return figures


async def both_ways(
    figures: Figures, row: str, cold: Worker, warm: Worker, text: Sequence[int]
) -> None:
    """Note how long ``cold`` takes for a text that it does not have."""
    for column, source in (("by transfer, ms", warm.url), ("by prefill, ms", None)):
        await cold.reset()
        heard = await cold.ask(text, source=source)
        figures.add(row, column, 1e3 * heard.ttft_s)
        if (heard.cached_tokens > 0) != (source is not None):
            message = f"{row}, {column}: {heard.cached_tokens} tokens were there"
            raise RuntimeError(message)


async def keep_busy(worker: Worker, round_number: int) -> None:
    """Have ``worker`` compute prompts until cancelled."""
    for number in range(1_000_000):
        await worker.ask(tokens_of(800_000 + 10_000 * round_number + number, TEXT_TOKENS))


async def link_section(bench: Bench) -> Figures:
    """Measure a peer behind a link on which pages take longer than computing them."""
    figures, pages = Figures(), ("--pages", str(PEER_PAGES))
    warm = await bench.rig.start(*pages, "--transfer-port", "0")
    async with SlowLink(warm, LINK_BYTES_PER_S) as link:
        peer = ("--transfer-peers", link.url)
        for at in range(bench.amounts.rounds):
            texts = [
                tokens_of(900_000 + 100 * at + number, LINK_TOKENS + 1)
                for number in range(LINK_REQUESTS)
            ]
            for text in texts:
                await warm.ask(text)
            for fetch in ("never", "always", "cheaper"):
                cold = await bench.rig.start(*pages, *peer, "--fetch", fetch)
                heard = [await cold.ask(text, source=link.url) for text in texts]
                half = len(heard) // 2
                row = f"--fetch {fetch}"
                figures.add(row, "first half, ms", mean_ms(heard[:half]))
                figures.add(row, "second half, ms", mean_ms(heard[half:]))
                fetches = sum(each.cached_tokens > 0 for each in heard)
                figures.add(row, f"fetched, of {LINK_REQUESTS}", fetches)
    return figures


def metric_table(figures: Figures) -> str:
    """Return a row for each load and a column for each of ``METRICS``."""
    rows = []
    for row in figures.rows():
        cells = [row]
        for name in METRICS:
            value = figures.median(row, name)
            shown = "-" if value is None else f"{value:,.1f}"
            cells.append(f"{value:.0%}" if value is not None and name == "tokens hit" else shown)
        rows.append(cells)
    return table(["", *METRICS], rows)


def transfer_table(figures: Figures) -> str:
    """Return both ways side by side, and their ratio."""
    ways = ("by transfer, ms", "by prefill, ms")
    rows = []
    for row in figures.rows():
        transfer, prefill = (figures.median(row, way) or 0.0 for way in ways)
        rows.append([row, f"{transfer:,.0f}", f"{prefill:,.0f}", f"x{prefill / transfer:.1f}"])
    return table(["", *ways, "faster"], rows)


def link_table(figures: Figures) -> str:
    """Return one row for each rule."""
    names = ("first half, ms", "second half, ms", f"fetched, of {LINK_REQUESTS}")
    rows = [
        [row, *(f"{figures.median(row, name) or 0:,.0f}" for name in names)]
        for row in figures.rows()
    ]
    return table(["TTFT, mean of", *names], rows)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the bench: what measures it, and how its table is shown."""

    title: str
    measure: Callable[[Bench], Awaitable[Figures]]
    shown: Callable[[Figures], str]


SECTIONS: Final = {
    "offload": Section(
        "Conversations in random order, by how much of the pool they are",
        offload_section,
        metric_table,
    ),
    "once": Section(
        f"Prompts that never return, alone or {ONCE_PER_HOT} for each turn of {HOT_TEXTS} texts",
        once_section,
        metric_table,
    ),
    "transfer": Section(
        "A prefix that another worker has: time to the first token",
        transfer_section,
        transfer_table,
    ),
    "link": Section(
        f"The same over a link of {LINK_BYTES_PER_S / 1e6:g} MB/s, {LINK_TOKENS:,} tokens",
        link_section,
        link_table,
    ),
}


async def measured(section: Section, amounts: Amounts) -> tuple[Figures, str]:
    """Return all values of a section, and its table."""
    with tempfile.TemporaryDirectory() as name:
        async with tier_rig(Path(name)) as rig:
            figures = await section.measure(Bench(rig, amounts, Path(name)))
    noise = f"A cell's rounds differ by {figures.spread():.0%} of its median (median over cells)."
    return figures, f"### {section.title}\n\n{section.shown(figures)}\n\n{noise}"


def main() -> None:
    """Measure the wanted sections; print tables, write them and all values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    options = parser.parse_args()
    options.sections = options.only.split(",")
    if not set(options.sections) <= set(SECTIONS):
        parser.error(f"--only: expected some of {','.join(SECTIONS)}")
    amounts = QUICK if options.quick else Amounts()
    if options.rounds:
        amounts = replace(amounts, rounds=options.rounds)
    noise, began_s = Noise(), time.monotonic()
    for key in options.sections:
        figures, shown = asyncio.run(measured(SECTIONS[key], amounts))
        name = "tierspart" if options.quick else f"tiers{key}"
        told = {"rounds": amounts.rounds, key: figures.plain()}
        path = write_report(name, told, [shown])
        print(f"\n{shown}\n\nall values: {path}.json", flush=True)
    took_s = time.monotonic() - began_s
    print(f"\nCPython {sys.version.split()[0]}; took {took_s:.0f} s. {noise.told()}")


if __name__ == "__main__":
    main()
