"""Ten thousand open streams in one router: memory of each, delay and CPU of a chunk, loop lag.

    python bench/streams_bench.py [--quick] [--streams 10000] [--body-kib 1]

Each stream brings two chunks a second; the stub stamps every chunk when it sends it, and the load
generator says how long it took from there. ``direct`` is the way without a proxy: stub and load
generator alone. A proxy is started anew for each measurement, has answered some requests before
its memory is read, and is alone on its core; proxies that this machine has not are left out. Loop
lag is read from the router's own ``/metrics``, every 0.1 s.

A proxy needs two open files for a stream: where ``ulimit -n`` does not allow them, as many streams
as it does are measured, and said.
"""

from __future__ import annotations

import argparse
import http.client
import resource
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contender import AIOHTTP, EXACT, NGINX, RELAY, ROUGH
from figures import REPORT_HELP, Figures, table, write_report
from meter import cpu_s, rss_kib
from native import HeldStreams
from rig import Rig, rig
from router.capacity import capacity_of
from router.config import LimitSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contender import Contender

KIB = 1024
GAP_US = 500_000
REPLICAS = 4
"""A router admits some 4,000 requests for each."""
DIRECT = "direct"
PROXIES = (NGINX, RELAY, AIOHTTP, ROUGH, EXACT)
ROUTERS = (ROUGH, EXACT)
BASIC_FILES = 64
"""Open files of a proxy besides its streams'."""
OTHERS = 8
"""Clients besides the streams: who reads the metrics is one."""
LAG_PAUSE_S = 0.1
SETTLE_S = 2.0
MEMORY, SHARE = "KiB per open stream", "CPU per chunk, us"
DELAYS = ("p50", "p99", "p99.9", "most")
LAGS = ("loop lag, p99, ms", "loop lag, most, ms")
BUDGETS = {MEMORY: "20", "chunk delay, p99, ms": "10", LAGS[0]: "20"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is done."""

    streams: int = 10_000
    body_kib: int = 1
    rounds: int = 3
    measured_s: float = 10.0
    requests: int = 1_000


QUICK = Amounts(streams=200, rounds=1, measured_s=1.0, requests=50)


def files_for(streams: int) -> int:
    """Return how many open files a router needs for so many streams."""
    clients = streams + OTHERS
    files = 2 * clients + BASIC_FILES
    while capacity_of(LimitSettings(connections=clients), files).clients.connections < clients:
        files += 64
    return files


def streams_possible(wanted: int) -> int:
    """Return how many streams this process may ask for; says what to do where it is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_for(wanted)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    streams = capacity_of(LimitSettings(connections=wanted), hard).clients.connections - OTHERS
    print(
        f"{wanted} streams need {needed} open files in the router, and this shell allows {hard}: "
        f"{streams} are measured. As root: `ulimit -Hn {needed}` (or nofile in limits.conf, "
        f"LimitNOFILE= of a service, --ulimit nofile={needed} of a container), then again."
    )
    return streams


class LagWatch:
    """Reads the loop lag of a router's metrics until closed; a context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lags_s: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.lags_s.sort()

    def _run(self) -> None:
        while not self._ended.wait(LAG_PAUSE_S):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
            line = next(one for one in text.splitlines() if one.startswith("warmroute_loop_lag_s"))
            self.lags_s.append(float(line.split()[1]))


def measure(on: Rig, amounts: Amounts, name: str, figures: Figures) -> None:
    """Hold streams through one proxy, or none, and note what they cost."""
    if name == DIRECT:
        path = _bodies(on, amounts)
        with HeldStreams(on.stub.ports[0], path, amounts.streams) as held:
            _note_delays(held, amounts, name, figures)
        return
    with on.field.running([name]) as field:
        for one in field:
            _through(on, amounts, one, figures)


def _bodies(on: Rig, amounts: Amounts) -> Path:
    stamp = f"pace-1000000-{GAP_US}"
    known = on.conversations(amounts.body_kib * KIB, 8, stamp)
    return on.write(known, amounts.streams)


def _through(on: Rig, amounts: Amounts, one: Contender, figures: Figures) -> None:
    path = on.write(on.conversations(amounts.body_kib * KIB, 8), amounts.requests)
    on.load(one, path, 4, amounts.requests)
    path = _bodies(on, amounts)
    before_kib = rss_kib(one.pid)
    with HeldStreams(one.port, path, amounts.streams) as held:
        time.sleep(SETTLE_S)
        figures.add(MEMORY, one.name, (rss_kib(one.pid) - before_kib) / amounts.streams)
        events, before_s = on.stub.served()[1], cpu_s(one.pid)
        _note_delays(held, amounts, one.name, figures)
        used_us = (cpu_s(one.pid) - before_s) * 1e6
        figures.add(SHARE, one.name, used_us / (on.stub.served()[1] - events))
        if one.name not in ROUTERS:
            return
        with LagWatch(one.port) as watch:
            time.sleep(amounts.measured_s)
        lags_s = watch.lags_s
        figures.add(LAGS[0], one.name, lags_s[int(len(lags_s) * 0.99)] * 1e3)
        figures.add(LAGS[1], one.name, lags_s[-1] * 1e3)


def _note_delays(held: HeldStreams, amounts: Amounts, name: str, figures: Figures) -> None:
    held.delays()
    time.sleep(amounts.measured_s)
    seen = held.delays()
    figures.add("chunks per second", name, seen.events / amounts.measured_s)
    values = (seen.p50_us, seen.p99_us, seen.p999_us, seen.most_us)
    for kind, value in zip(DELAYS, values, strict=True):
        figures.add(f"chunk delay, {kind}, ms", name, value / 1e3)


def shown(figures: Figures, names: Sequence[str], streams: int) -> str:
    """Return the table, budgets beside."""
    rows = []
    for row in figures.rows():
        cells = [row, BUDGETS.get(row, "")]
        for name in names:
            value = figures.median(row, name)
            form = "{:,.0f}" if row == "chunks per second" else "{:,.2f}"
            cells.append("-" if value is None else form.format(value))
        rows.append(cells)
    head = f"### {streams:,} open streams, {1e6 / GAP_US:.0f} chunks a second each"
    noise = f"A cell's rounds differ by {figures.spread():.0%} of its median (median over cells)."
    return f"{head}\n\n{table(['', 'budget', *names], rows)}\n\n{noise}"


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--streams", type=int, help="streams that are held open")
    parser.add_argument("--body-kib", type=int, help="of each request")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--seconds", type=float, help="of each measurement")
    parser.add_argument("--only", default="", help="parts of proxies' names, with commas")
    parser.add_argument("--report", help=REPORT_HELP)
    return parser.parse_args(words)


def amounts_of(options: argparse.Namespace) -> Amounts:
    """Return how much is to be done."""
    amounts = QUICK if options.quick else Amounts()
    given = {
        "streams": options.streams,
        "body_kib": options.body_kib,
        "rounds": options.rounds,
        "measured_s": options.seconds,
    }
    amounts = replace(amounts, **{name: value for name, value in given.items() if value})
    return replace(amounts, streams=streams_possible(amounts.streams))


def main() -> None:
    """Measure; print the table and write all values beside."""
    options = options_of(sys.argv[1:])
    amounts = amounts_of(options)
    parts = [part for part in options.only.split(",") if part]
    names = [name for name in PROXIES if not parts or any(part in name for part in parts)]
    figures = Figures()
    with rig(None, replicas=REPLICAS) as on:
        for _ in range(amounts.rounds):
            for name in (DIRECT, *names):
                measure(on, amounts, name, figures)
    text = shown(figures, (DIRECT, *names), amounts.streams)
    print(f"\n{text}")
    name = options.report or ("streams-part" if options.quick or parts else "streams")
    told = {"streams": amounts.streams, "cells": figures.plain()}
    print(f"all values and tables: {write_report(name, told, [text])}.json, .md")


if __name__ == "__main__":
    main()
