"""The router beside its peers: CPU per request and per streamed chunk, latency, memory. One run.

    python bench/router_bench.py [--quick] [--only cpu,chunk,latency,memory]

Every proxy is a process of its own in front of the same two stub replicas, on one core; stub and
load generator are compiled and have the other. All on 127.0.0.1. A request is a known conversation
with one new turn, no body twice (``conversation.py``). Rounds are interleaved, the first one warms
up, shown are medians. The ratios carry over to other machines, the microseconds do not.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contender import AIOHTTP, NAMES, label, missing
from figures import REPORT_HELP, Figures, ratio_table, write_report
from meter import cpu_s, rss_kib
from native import HeldStreams, NativeError, run_load
from rig import Rig, rig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from contender import Contender

SIZES_KIB = (1, 32, 256)
SESSIONS = 8
CONNECTIONS = 4
DIRECT = "direct"
MERGED, BEFORE = "back to back: events per read", "MiB before"
AT_REST = "CPU at rest, ms per s"
KIB = 1024
PACE_US = 20_000
SETTLE_S = 0.2
HELD_STAMP = "pace-2-3600000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is done."""

    rounds: int = 3
    requests: int = 1_000
    large_requests: int = 300
    streams: int = 8
    chunks: int = 4_000
    paced_streams: int = 100
    paced_s: float = 1.0
    open_s: float = 2.5
    rate: int = 200
    large_rate: int = 100
    held_streams: int = 500
    rest_s: float = 2.0


QUICK = Amounts(
    rounds=1,
    requests=100,
    large_requests=40,
    chunks=500,
    paced_s=0.3,
    open_s=0.5,
    held_streams=100,
    rest_s=0.5,
)
LARGE_KIB = 256


@dataclass(frozen=True, slots=True)
class Bench:
    """What a section measures with."""

    rig: Rig
    names: Sequence[str]
    amounts: Amounts

    def requests(self, size_kib: int) -> int:
        """Return the requests of one round."""
        many = size_kib < LARGE_KIB
        return self.amounts.requests if many else self.amounts.large_requests


def cpu_section(bench: Bench) -> Figures:
    """Measure the CPU of a request, in microseconds."""
    figures, on = Figures(), bench.rig
    with on.field.running(bench.names) as field:
        for size_kib in SIZES_KIB:
            known = on.conversations(size_kib * KIB, SESSIONS)
            on.introduce(known, field)
            bodies, requests = iter(known), bench.requests(size_kib)
            for at in range(bench.amounts.rounds + 1):
                path = on.write(bodies, requests)
                for one in field:
                    _, used_us = on.load(one, path, CONNECTIONS, requests)
                    if at:
                        figures.add(f"{size_kib} KiB", one.name, used_us / requests)
    return figures


def chunk_section(bench: Bench) -> Figures:
    """Measure the CPU of a streamed chunk, in microseconds; streams of 1 KiB chats."""
    figures, on, amounts = Figures(), bench.rig, bench.amounts
    with on.field.running(bench.names) as field:
        for at in range(amounts.rounds + 1):
            streams, chunks = amounts.streams, amounts.chunks
            path = on.write(on.conversations(KIB, SESSIONS, f"pace-{chunks}-0"), streams)
            for one in field:
                load, used_us = on.load(one, path, streams, streams)
                if load.events != streams * (chunks + 1):  # the last one says [DONE]
                    message = f"{one.name}: {load.events} events of {streams} x {chunks + 1}"
                    raise NativeError(message)
                if at:
                    figures.add("back to back", one.name, used_us / (streams * chunks))
                    merged = load.events / load.event_reads
                    figures.add(MERGED, one.name, merged)
            stamp = f"pace-1000000-{PACE_US}"
            path = on.write(on.conversations(KIB, SESSIONS, stamp), amounts.paced_streams)
            for one in field:
                used_us = paced_chunk_us(bench, one, path)
                if at:
                    row = f"{amounts.paced_streams} streams x {PACE_US / 1000:.0f} ms"
                    figures.add(row, one.name, used_us)
    return figures


def paced_chunk_us(bench: Bench, one: Contender, path: Path) -> float:
    """Return the CPU of a chunk while streams run, without that of their requests."""
    stub = bench.rig.stub
    with HeldStreams(one.port, path, bench.amounts.paced_streams):
        time.sleep(SETTLE_S)
        events, before_s = stub.served()[1], cpu_s(one.pid)
        time.sleep(bench.amounts.paced_s)
        return (cpu_s(one.pid) - before_s) * 1e6 / (stub.served()[1] - events)


def latency_section(bench: Bench) -> Figures:
    """Measure what a proxy adds to the latency of an open loop, in microseconds."""
    figures, on, amounts = Figures(), bench.rig, bench.amounts
    with on.field.running(bench.names) as field:
        for size_kib in SIZES_KIB:
            rate = amounts.rate if size_kib < LARGE_KIB else amounts.large_rate
            requests = int(rate * amounts.open_s)
            known = on.conversations(size_kib * KIB, SESSIONS)
            on.introduce(known, field)
            bodies = iter(known)
            for at in range(amounts.rounds + 1):
                count = requests if at else max(CONNECTIONS, requests // 5)
                path = on.write(bodies, count)
                words = (CONNECTIONS, count, rate, at + 1)
                direct = run_load(on.stub.ports[0], path, *words)
                seen = {one.name: on.load(one, path, *words)[0] for one in field}
                if not at:
                    continue
                for kind in ("p50", "p99"):
                    row, key = f"{kind}, {size_kib} KiB at {rate}/s", f"{kind}_us"
                    figures.add(row, DIRECT, getattr(direct, key))
                    for name, load in seen.items():
                        figures.add(row, name, getattr(load, key) - getattr(direct, key))
    return figures


def memory_section(bench: Bench) -> Figures:
    """Measure CPU at rest, the memory of a process, and that of an open stream that waits.

    In every round the proxies are new.
    """
    figures, on, amounts = Figures(), bench.rig, bench.amounts
    for _ in range(amounts.rounds):
        with on.field.running(bench.names) as field:
            time.sleep(SETTLE_S)
            before_s, began_s = {one.name: cpu_s(one.pid) for one in field}, time.monotonic()
            time.sleep(amounts.rest_s)
            for one in field:
                used_ms = (cpu_s(one.pid) - before_s[one.name]) * 1e3
                figures.add(AT_REST, one.name, used_ms / (time.monotonic() - began_s))
            path = on.write(on.conversations(KIB, SESSIONS), amounts.requests)
            for one in field:
                on.load(one, path, CONNECTIONS, amounts.requests)
            path = on.write(on.conversations(KIB, SESSIONS, HELD_STAMP), amounts.held_streams)
            for one in field:
                before_kib = rss_kib(one.pid)
                with HeldStreams(one.port, path, amounts.held_streams):
                    grown_kib = rss_kib(one.pid) - before_kib
                figures.add("KiB per open stream", one.name, grown_kib / amounts.held_streams)
                figures.add(BEFORE, one.name, before_kib / KIB)
    return figures


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the bench: what measures it, and how its table is shown."""

    title: str
    measure: Callable[[Bench], Figures]
    digits: int = 0


SECTIONS = {
    "memory": Section("At rest: KiB of memory per open stream, and the process", memory_section, 1),
    "cpu": Section("CPU per request, us, by size of its body", cpu_section),
    "chunk": Section("CPU per streamed chunk, us", chunk_section, 1),
    "latency": Section("Added latency, us (direct: the latency itself)", latency_section),
}


def shown(key: str, figures: Figures, names: Sequence[str]) -> str:
    """Return a section's table."""
    section = SECTIONS[key]
    columns = {name: label(name) for name in names if missing(name) is None}
    if key == "latency":
        columns = {DIRECT: DIRECT, **columns}
    form = f"{{:,.{section.digits}f}}".format
    cells = ratio_table(figures, columns, AIOHTTP, form, absolute=(DIRECT, MERGED, BEFORE, AT_REST))
    noise = f"A cell's rounds differ by {figures.spread():.0%} of its median (median over cells)."
    return f"### {section.title}\n\n{cells}\n\n{noise}"


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas")
    parser.add_argument("--without", default="", help="proxies to leave out, with commas")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--tokenizer", type=Path, help="a directory with tokenizer and template")
    parser.add_argument("--report", help=REPORT_HELP)
    options = parser.parse_args(words)
    options.sections = options.only.split(",")
    if not set(options.sections) <= set(SECTIONS):
        parser.error(f"--only: expected some of {','.join(SECTIONS)}")
    return options


def main() -> None:
    """Measure the wanted sections; print tables and write all values beside."""
    options = options_of(sys.argv[1:])
    amounts = QUICK if options.quick else Amounts()
    if options.rounds:
        amounts = replace(amounts, rounds=options.rounds)
    left_out = options.without.split(",")
    names = [name for name in NAMES if not any(part and part in name for part in left_out)]
    for absent in filter(missing, names):
        print(f"{absent}: {missing(absent)}")
    is_whole = not options.quick and set(options.sections) == set(SECTIONS)
    name = options.report or ("router" if is_whole else "router-part")
    told: dict[str, object] = {"rounds": amounts.rounds}
    tables: list[str] = []
    with rig(options.tokenizer) as on:
        bench = Bench(on, names, amounts)
        for key in options.sections:
            figures = SECTIONS[key].measure(bench)
            tables.append(shown(key, figures, names))
            print(f"\n{tables[-1]}", flush=True)
            told[key] = figures.plain()
    print(f"all values and tables: {write_report(name, told, tables)}.json, .md")


if __name__ == "__main__":
    main()
