"""Every figure that has a budget, as the last run of its bench has it.

Figures are read from what the benches wrote; nothing is measured here. What is asked of several
routers (exact tokens, byte blocks) has a row for each.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contender import AIOHTTP, EXACT, HELD, NGINX, RELAY, ROUGH, SGLANG, VLLM
from history_bench import FORMS
from judgement import Bound, Budget, Row, Verdict, verdict_of
from prompt_bench import KNOWN, LONG_NEW, SPEEDS, TIMES
from streams_bench import LAGS, MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from report import Report

ROUTERS: Final = {ROUGH: "byte blocks", EXACT: "exact"}
PEERS: Final = (SGLANG, VLLM)
OTHERS: Final = {SGLANG: SGLANG, VLLM: VLLM, RELAY: "bare relay", AIOHTTP: "aiohttp", NGINX: NGINX}
"""What is shown beside, in the order of the columns, and its name there."""
CPU_BUDGETS: Final = {"1 KiB": 90, "32 KiB": 120, "256 KiB": 300}
LATENCY_BUDGETS: Final = {"p50": 500, "p99": 3_000}
LATENCY_LOADS: Final = {"1 KiB": "1 KiB at 200/s", "32 KiB": "32 KiB at 200/s"}
PEER_CELLS: Final = {
    "CPU per request, 32 KiB": ("cpu", "32 KiB"),
    "CPU per request, 256 KiB": ("cpu", "256 KiB"),
    "added latency p50, 32 KiB": ("latency", "p50, 32 KiB at 200/s"),
    "added latency p99, 32 KiB": ("latency", "p99, 32 KiB at 200/s"),
    "added latency p50, 256 KiB": ("latency", "p50, 256 KiB at 100/s"),
    "added latency p99, 256 KiB": ("latency", "p99, 256 KiB at 100/s"),
}
MILLION: Final = "memory per million, "
STREAMS: Final = 10_000
BACK_TO_BACK, PACED = "back to back", "100 streams x 20 ms"
P99: Final = "chunk delay, p99, ms"
BUDGETED_MEMORY: Final = ("random", "churned", "agents 1", "agents 3")
LOOKUPS: Final = ("all", "other depths", "holes", "nobody")
IN_USE: Final = "compiled"
"""The form that a router's index has where there is a compiler."""

TWICE = Budget(limit=2, bound=Bound.AT_LEAST, form="{:.2f}")
TENTH = Budget(limit=1.1, form="{:.2f}")


def row(
    figure: str,
    budget: Budget,
    measured: float | None,
    why: str = "",
    *,
    subject: str = "",
    note: str = "",
    beside: Mapping[str, float] | None = None,
) -> Row:
    """Return a judged figure."""
    verdict, reason = verdict_of(budget, measured, why)
    return Row(
        figure=figure,
        budget=budget,
        measured=measured,
        verdict=verdict,
        why=reason,
        note=note,
        subject=subject,
        beside=dict(beside or {}),
    )


def rows_of(reports: Mapping[str, Report]) -> list[Row]:
    """Return all figures in the order in which they are shown."""
    return [
        *cpu_rows(reports["router"]),
        *chunk_rows(reports["router"]),
        *latency_rows(reports["router"]),
        *peer_rows(reports["router"]),
        *history_rows(reports["history"]),
        *stream_rows(reports["streams"]),
        *process_rows(reports["processes"]),
        *index_rows(reports["index"]),
        *prompt_rows(reports["prompt"]),
    ]


def beside(report: Report, *path: str) -> dict[str, float]:
    """Return what the others have in the same run, those that were measured."""
    found = {name: report.median(*path, column) for column, name in OTHERS.items()}
    return {name: value for name, value in found.items() if value is not None}


def cpu_rows(report: Report) -> Iterator[Row]:
    """Yield the CPU of a request by size of its body."""
    for size, limit in CPU_BUDGETS.items():
        for router, subject in ROUTERS.items():
            yield row(
                f"CPU per request, {size}, us",
                Budget(limit=limit),
                report.median("cpu", size, router),
                report.why,
                subject=subject,
                beside=beside(report, "cpu", size),
            )


def chunk_rows(report: Report) -> Iterator[Row]:
    """Yield the CPU of a chunk: back to back, and paced against the bare relay's."""
    for router, subject in ROUTERS.items():
        yield row(
            "CPU per chunk, back to back, us",
            Budget(limit=3, form="{:.1f}"),
            report.median("chunk", BACK_TO_BACK, router),
            report.why,
            subject=subject,
            beside=beside(report, "chunk", BACK_TO_BACK),
        )
    for router, subject in ROUTERS.items():
        ratios = report.ratios(("chunk", PACED, router), ("chunk", PACED, RELAY))
        yield row(
            "CPU per chunk, paced, against the bare relay",
            TENTH,
            statistics.median(ratios) if ratios else None,
            report.why,
            subject=subject,
        )


def latency_rows(report: Report) -> Iterator[Row]:
    """Yield what is added to the latency at 200 requests a second."""
    for size, load in LATENCY_LOADS.items():
        for kind, limit in LATENCY_BUDGETS.items():
            for router, subject in ROUTERS.items():
                path = ("latency", f"{kind}, {load}")
                yield row(
                    f"added latency {kind}, {size} at 200/s, us",
                    Budget(limit=limit),
                    report.median(*path, router),
                    report.why,
                    subject=subject,
                    beside=beside(report, *path),
                )


def peer_rows(report: Report) -> Iterator[Row]:
    """Yield how many times the router's cost the cheaper one of the peers has."""
    absent = [peer for peer in PEERS if report.median("cpu", "32 KiB", peer) is None]
    why = report.why or ", ".join(f"no {peer}" for peer in absent)
    for figure, path in PEER_CELLS.items():
        for router, subject in ROUTERS.items():
            times: dict[str, float] = {}
            for peer in PEERS:
                ratios = report.ratios((*path, peer), (*path, router))
                if ratios:
                    times[peer] = statistics.median(ratios)
            yield row(
                f"peers' {figure}, in times the router's",
                TWICE,
                min(times.values(), default=None),
                why,
                subject=subject,
                beside=times,
            )


def history_rows(report: Report) -> Iterator[Row]:
    """Yield the slope of the cost above the relay, and how long a cold prompt holds the loop."""
    for router, subject in ROUTERS.items():
        slope = report.median("slopes", router)
        yield row(
            "slope of the cost above the relay, 2k to 128k tokens",
            Budget(limit=0.1, form="{:.2f}"),
            slope,
            report.why or ("" if slope is not None else "not above the relay everywhere"),
            subject=subject,
        )
    for watched, subject in zip(reversed(HELD), ROUTERS.values(), strict=True):
        held = [value for form in FORMS for value in report.rounds("hold", form, watched)]
        idle = max(report.rounds("hold", "no prompt", watched), default=None)
        yield row(
            "loop held by a cold prompt of 128k tokens, worst, ms",
            Budget(limit=10, form="{:.1f}"),
            max(held, default=None),
            report.why,
            subject=subject,
            note="" if idle is None else f"without a prompt {idle:.1f}",
        )


def stream_rows(report: Report) -> Iterator[Row]:
    """Yield memory and delay with 10,000 open streams; fewer of them are judged by no budget."""
    streams = report.median("streams")
    why = report.why
    if streams is not None and streams < STREAMS:
        why = f"{streams:,.0f} streams, no more (ulimit -n, or a short run)"
    figures = {
        "KiB per open stream, 10,000 streams": (MEMORY, Budget(limit=20, form="{:.1f}")),
        "chunk delay p99, 10,000 streams, ms": (P99, Budget(limit=10, form="{:.1f}")),
        "loop lag p99, 10,000 streams, ms": (LAGS[0], Budget(limit=20, form="{:.1f}")),
    }
    for figure, (key, budget) in figures.items():
        for router, subject in ROUTERS.items():
            judged = row(
                figure,
                budget,
                report.median("cells", key, router),
                why,
                subject=subject,
                beside=beside(report, "cells", key),
            )
            yield replace(judged, verdict=Verdict.NOT_MEASURED) if why else judged


def process_rows(report: Report) -> Iterator[Row]:
    """Yield what a second process costs, and the time of a start."""
    for way, key in (("kept", "ratios"), ("mixed", "mixed")):
        figure = f"CPU per request, 2 processes against 1, connections {way}"
        yield row(figure, TENTH, report.median(key), report.why)
    figure = "start of `warmroute serve` to ready, s"
    yield row(figure, Budget(limit=1, form="{:.2f}"), report.median("start_s"), report.why)


def index_rows(report: Report) -> Iterator[Row]:
    """Yield memory and look-ups of the index, the worst case of each."""
    worst = _worst(report, [f"{MILLION}{case}" for case in BUDGETED_MEMORY])
    figure = "index, MB per million resident blocks, worst case"
    yield row(figure, Budget(limit=90), worst, report.why)
    servers = report.plain("server per million pairs") or {}
    pairs = max((value for values in servers.values() for value in values), default=None)
    yield row("Redis, MB per million pairs", Budget(limit=120), pairs, report.why)
    worst = _worst(report, [f"2,000 x 64: {case}" for case in LOOKUPS])
    figure = "overlap of 2,000 blocks x 64 replicas, worst case, us"
    yield row(figure, Budget(limit=150), worst, report.why)


def _worst(report: Report, rows: list[str]) -> float | None:
    """Return the largest value of the form in use, None unless every row has one."""
    values = [report.median(one, IN_USE) for one in rows]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def prompt_rows(report: Report) -> Iterator[Row]:
    """Yield how fast new text becomes tokens, and what known text takes."""
    floor = Budget(limit=4, bound=Bound.AT_LEAST, form="{:.1f}")
    speed = report.median(SPEEDS, LONG_NEW)
    yield row("tokenizer, M tokens/s a core, a long new prompt", floor, speed, report.why)
    known = report.median(TIMES, KNOWN)
    figure = "segment cache hit, us"
    yield row(figure, Budget(limit=2, form="{:.2f}"), known, report.why)
