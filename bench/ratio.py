"""The ratios of a run that carry over to other machines, one value per round.

Each sets the router beside something that was measured in the same round: its bare relay, one
process, another form of the index. Bytes are no times and stand for themselves. A slope is told as
the growth that it means from 2,000 to 128,000 tokens.
"""

from __future__ import annotations

import statistics
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import count_bench
import request_bench
from budget import (
    BACK_TO_BACK,
    BUDGETED_MEMORY,
    CPU_BUDGETS,
    IN_USE,
    MILLION,
    PACED,
    ROUTERS,
)
from contender import AIOHTTP, RELAY
from figures import slope_of
from history_bench import LENGTHS
from prompt_bench import ALONE, KNOWN, LONG_NEW, SPEEDS, TIMES
from regression import COUNTED, Ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from report import Report

HELD: Final = "KiB per open stream"
ABSENT: Final = "dict"


def ratios_of(reports: Mapping[str, Report]) -> dict[str, Ratio]:
    """Return every ratio that the reports have, by name."""
    found = [
        *relay_ratios(reports["router"]),
        *own_code_ratios(reports["request"], reports["chunk"]),
        *count_ratios(reports["counts"]),
        *history_ratios(reports["history"]),
        *index_ratios(reports["index"]),
        *prompt_ratios(reports["prompt"]),
    ]
    found.append(("CPU per request, 2 processes / 1", reports["processes"].rounds("ratios")))
    return {
        name: Ratio.of(values) for name, values in found if values and statistics.median(values) > 0
    }


def relay_ratios(report: Report) -> Iterator[tuple[str, list[float]]]:
    """Yield the router's CPU and memory in those of its bare relay, and the relay's in aiohttp's.

    What the relay itself comes to cost is in both, so that only the latter tells of it.
    """
    cells = {f"CPU per request, {size}": ("cpu", size) for size in CPU_BUDGETS}
    cells |= {f"CPU per chunk, {kind}": ("chunk", kind) for kind in (BACK_TO_BACK, PACED)}
    cells |= {HELD: ("memory", HELD)}
    for (name, path), (router, subject) in product(cells.items(), ROUTERS.items()):
        yield f"{name}, {subject} / relay", report.ratios((*path, router), (*path, RELAY))
    for name, path in cells.items():
        yield f"{name}, relay / aiohttp", report.ratios((*path, RELAY), (*path, AIOHTTP))


def own_code_ratios(request: Report, chunk: Report) -> Iterator[tuple[str, list[float]]]:
    """Yield the same without sockets: the router's own code in one process with its relay."""
    relay, *routers = request_bench.KINDS
    for size, router in product(CPU_BUDGETS, routers):
        values = request.ratios((size, router), (size, relay))
        yield f"own code per request, {size}, {router} / relay", values
    for router in routers:
        values = chunk.ratios(("a chunk", router), ("a chunk", relay))
        yield f"own code per chunk, {router} / relay", values


def count_ratios(report: Report) -> Iterator[tuple[str, list[float]]]:
    """Yield the instructions of a request and a chunk in those of the relay."""
    relay, *routers = request_bench.KINDS
    for row, router in product(count_bench.CELLS, routers):
        name = f"{COUNTED} per request, {row}" if row != "a chunk" else f"{COUNTED} per chunk"
        yield f"{name}, {router} / relay", report.ratios((row, router), (row, relay))


def history_ratios(report: Report) -> Iterator[tuple[str, list[float]]]:
    """Yield how the cost above the relay grows from the shortest history to the longest."""
    span = LENGTHS[-1] / LENGTHS[0]
    for router, subject in ROUTERS.items():
        values = [span**slope for slope in round_slopes(report, router)]
        yield f"cost above the relay, 128k / 2k tokens, {subject}", values


def round_slopes(report: Report, router: str) -> list[float]:
    """Return the log-log slope of every round that is above its relay everywhere."""
    above: list[list[float]] = []
    for tokens in map(str, LENGTHS):
        whole, relayed = (report.rounds("slope", tokens, one) for one in (router, RELAY))
        above.append([value - base for value, base in zip(whole, relayed, strict=False)])
    rounds = zip(*above, strict=False)
    lengths = [float(tokens) for tokens in LENGTHS]
    return [
        slope_of(list(zip(lengths, values, strict=True)))
        for values in rounds
        if min(values, default=0) > 0
    ]


def index_ratios(report: Report) -> Iterator[tuple[str, list[float]]]:
    """Yield the bytes of a block, and look-ups against a dict."""
    for case in BUDGETED_MEMORY:
        yield f"index, bytes per block, {case}", report.rounds(f"{MILLION}{case}", IN_USE)
    for case in ("all", "other depths"):
        row = f"2,000 x 64: {case}"
        yield f"look-up, {case}, compiled / dict", report.ratios((row, IN_USE), (row, ABSENT))
    for values in (report.plain("server per million pairs") or {}).values():
        yield "Redis, bytes per pair", values


def prompt_ratios(report: Report) -> Iterator[tuple[str, list[float]]]:
    """Yield the time of a new token, and of a known segment, in those of ``tokenizers``."""
    yield "time of a new token / tokenizers", report.ratios((SPEEDS, ALONE), (SPEEDS, LONG_NEW))
    alone, known = report.median(SPEEDS, ALONE), report.median(TIMES, KNOWN)
    if alone and known:
        yield "time of a known segment x speed of tokenizers", [known * alone]
