"""Long histories: CPU of a turn against the length before it, and how long the loop is held.

    python bench/history_bench.py [--quick] [--only slope,hold]

Slope: known conversations with one new turn of 500 tokens, 2,000 to 128,000 tokens long, through
the router and through its bare relay; the difference is what deciding costs. Hold: the longest
time for which a cold prompt of 128,000 tokens holds the router's event loop, seen from inside
(``held.py``), beside what it is without a prompt: the machine's own noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contender import EXACT, HELD, RELAY, ROUGH
from conversation import long_message
from figures import REPORT_HELP, Figures, slope_of, table, write_report
from native import run_load
from rig import Rig, rig

if TYPE_CHECKING:
    from contender import Contender

LENGTHS = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
LONGEST = LENGTHS[-1]
SESSIONS = 4
CONNECTIONS = 2
ROUTERS = (EXACT, ROUGH)
IDLE_S = 0.5
AFTER_S = 0.05
FORMS = ("one message", "messages of 250 tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is done."""

    rounds: int = 5
    requests: int = 100
    prompts: int = 5


QUICK = Amounts(rounds=1, requests=20, prompts=2)


def measure_slope(on: Rig, amounts: Amounts) -> Figures:
    """Return the CPU of a turn in microseconds, by tokens of the conversation and by proxy."""
    figures = Figures()
    with on.field.running((RELAY, *ROUTERS)) as field:
        for tokens in LENGTHS:
            size = int(tokens * on.chars_per_token)
            known = on.conversations(size, SESSIONS, growth=1.0)
            on.introduce(known, field)
            bodies, requests = iter(known), amounts.requests
            for at in range(amounts.rounds + 1):
                path = on.write(bodies, requests)
                for one in field:
                    _, used_us = on.load(one, path, CONNECTIONS, requests)
                    if at:
                        figures.add(str(tokens), one.name, used_us / requests)
    return figures


def above_relay(figures: Figures, router: str) -> list[tuple[float, float]]:
    """Return the points (tokens, CPU above the relay's in microseconds) of a router."""
    points = []
    for row in figures.rows():
        whole, relayed = figures.median(row, router), figures.median(row, RELAY)
        if whole is not None and relayed is not None:
            points.append((float(row), whole - relayed))
    return points


def slopes_of(figures: Figures) -> dict[str, float | None]:
    """Return each router's log-log slope above the relay; None where it is not above it."""
    slopes = {}
    for router in ROUTERS:
        points = above_relay(figures, router)
        is_sound = len(points) > 1 and all(used_us > 0 for _, used_us in points)
        slopes[router] = slope_of(points) if is_sound else None
    return slopes


def shown_slope(figures: Figures) -> str:
    """Return both curves, what is above the relay, and the slopes."""
    above = {router: above_relay(figures, router) for router in ROUTERS}
    head = ["tokens", RELAY, *ROUTERS, *(f"{router}, above the relay" for router in ROUTERS)]
    rows = []
    for at, row in enumerate(figures.rows()):
        whole = [figures.median(row, name) or 0.0 for name in (RELAY, *ROUTERS)]
        cells = [*whole, *(above[router][at][1] for router in ROUTERS)]
        rows.append([f"{int(row):,}", *(f"{cell:,.0f}" for cell in cells)])
    lines = ["### CPU of a turn of 500 tokens against the length of its conversation, us", ""]
    lines += [table(head, rows), ""]
    for router, slope in slopes_of(figures).items():
        told = "none, it is not above the relay everywhere" if slope is None else f"{slope:.2f}"
        lines.append(f"{router}: log-log slope above the relay {told}.")
    noise = f"A cell's rounds differ by {figures.spread():.0%} of its median (median over cells)."
    return "\n".join([*lines, noise])


def cold_body(on: Rig, form: str, seed: int) -> bytes:
    """Return a body of ``LONGEST`` tokens that nobody saw before."""
    size = int(LONGEST * on.chars_per_token)
    if form == FORMS[0]:
        return long_message(size, seed)
    return on.conversations(size, 1, growth=1.0).openers()[0]


def measure_hold(on: Rig, amounts: Amounts) -> Figures:
    """Return the longest holds in milliseconds: without a prompt, with cold ones."""
    figures = Figures()
    with on.field.running(HELD, core=None) as field:
        for one in field:
            for at in range(amounts.prompts):
                one.longest_hold_us()
                time.sleep(IDLE_S)
                note_hold(figures, "no prompt", one)
                for form in FORMS:
                    path = on.write([cold_body(on, form, at)], 1)
                    one.longest_hold_us()
                    run_load(one.port, path, 1, 1)
                    time.sleep(AFTER_S)
                    note_hold(figures, form, one)
    return figures


def note_hold(figures: Figures, row: str, one: Contender) -> None:
    """Note a router's longest hold and the most CPU that its loop used in one."""
    wall_us, loop_us = one.longest_hold_us()
    figures.add(row, one.name, wall_us / 1e3)
    figures.add(f"{row}, CPU of the loop's thread", one.name, loop_us / 1e3)


def shown_hold(figures: Figures) -> str:
    """Return the median and the worst of the holds."""
    values = figures.plain()
    rows = [
        [row, *(f"{statistics.median(held):.1f} / {max(held):.1f}" for held in by_name.values())]
        for row, by_name in values.items()
    ]
    title = f"### Event loop held by a cold prompt of {LONGEST:,} tokens, ms, median / worst"
    return f"{title}\n\n{table(['', *HELD], rows)}"


def main() -> None:
    """Measure both; print tables and write all values beside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--only", default="slope,hold", choices=("slope", "hold", "slope,hold"))
    parser.add_argument("--tokenizer", type=Path, help="a directory with tokenizer and template")
    parser.add_argument("--report", help=REPORT_HELP)
    options = parser.parse_args()
    amounts = QUICK if options.quick else Amounts()
    told: dict[str, object] = {}
    tables = []
    if "slope" in options.only:
        with rig(options.tokenizer) as on:
            figures = measure_slope(on, amounts)
        tables.append(shown_slope(figures))
        told |= {"slope": figures.plain(), "slopes": slopes_of(figures)}
    if "hold" in options.only:
        with rig(options.tokenizer, shares_cores=True) as on:
            figures = measure_hold(on, amounts)
        tables.append(shown_hold(figures))
        told["hold"] = figures.plain()
    print("\n" + "\n\n".join(tables))
    is_whole = len(tables) > 1 and not options.quick
    name = options.report or ("history" if is_whole else "history-part")
    print(f"\nall values and tables: {write_report(name, told, tables)}.json, .md")


if __name__ == "__main__":
    main()
