"""The summary as one HTML page: a table and charts, nothing fetched, no scripts."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from budget import CPU_BUDGETS, LATENCY_LOADS, OTHERS, PACED, ROUTERS
from contender import RELAY
from history_bench import LENGTHS
from plan import Mode
from replay.chart import Bar, Caption, Line, bar_chart, line_chart, linear_axis, log_axis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from judgement import Row
    from report import Report

ROOM: Final = 120
"""Pixels of a bar whose figure is at three times its budget; longer ones are cut."""
MOST_SHARE: Final = 3.0
PROXIES: Final = {**ROUTERS, **OTHERS}
THOUSAND: Final = 1_000
HEAD: Final = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>warmroute: figures and budgets</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --card: #fff; --ink: #16181d; --soft: #575c66; --rule: #dcdcd6;
  --s0: #1f66c9; --s1: #c7442a; --met: #0d8264; }
@media (prefers-color-scheme: dark) { :root { --card: #1d2025; --ink: #eceef1; --soft: #a7adb8;
  --rule: #353a43; --s0: #6aa9ff; --s1: #ff8a6b; --met: #3fc79d; } }
body { margin: 24px auto; max-width: 1180px; padding: 0 16px; background: var(--card);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-top: 1px solid var(--rule); }
th:first-child, td:first-child, td.told { text-align: left; }
td:nth-child(-n+4) { white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { font-weight: 600; } .unit { color: var(--soft); }
figure > svg { width: 100%; height: auto; }
.legend { list-style: none; display: flex; gap: 16px; margin: 4px 0; padding: 0; }
svg text { fill: var(--soft); font-size: 12.5px; } svg text.x { text-anchor: middle; }
svg text.y, svg text.end, svg text.last { text-anchor: end; } svg text.end { fill: var(--ink); }
.grid { stroke: var(--rule); } .base, .tick { stroke: var(--soft); }
.mark { stroke: var(--ink); stroke-dasharray: 4 3; fill: none; } .bar { fill: var(--s0); }
.met { fill: var(--met); } .missed { fill: var(--s1); } .part { fill: var(--soft); }
.line { fill: none; stroke-width: 2; } .s0 { stroke: var(--s0); }
.s1 { stroke: var(--s1); stroke-dasharray: 7 4; }
.spot { stroke: none; fill: transparent; pointer-events: all; }
</style></head><body><h1>warmroute: figures and budgets</h1>
"""


def page(rows: Sequence[Row], reports: Mapping[str, Report], mode: Mode) -> str:
    """Return the whole page."""
    figures = "\n".join(charts(reports)) or "<p>No bench was run that has a chart.</p>"
    body = f'<div>{figure_table(rows)}</div>\n<div class="charts">{figures}</div>'
    note = "<p>A quick run: shows that the benches work, no more.</p>" if mode is Mode.QUICK else ""
    return f"{HEAD}{note}{body}</body></html>\n"


def figure_table(rows: Sequence[Row]) -> str:
    """Return all figures as a table; a bar says how much of the budget is taken."""
    names = ("figure", "router", "measured", "budget", "part of the budget", "", "beside")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_line, rows))}</tbody></table>"
    )


def _line(row: Row) -> str:
    others = ", ".join(f"{name} {row.other(name)}" for name in row.beside)
    cells = [row.figure, row.subject, row.shown(), row.budget.told()]
    plain = "".join(f"<td>{escape(text)}</td>" for text in cells)
    return (
        f'<tr>{plain}<td>{_share(row)}</td><td class="told">{escape(row.told())}</td>'
        f'<td class="told">{escape(others)}</td></tr>'
    )


def _share(row: Row) -> str:
    """Return the bar of a figure, with a mark at its whole budget."""
    if row.measured is None or row.measured <= 0:
        return ""
    share = row.budget.share(row.measured)
    width, whole = min(share, MOST_SHARE) / MOST_SHARE * ROOM, ROOM / MOST_SHARE
    kind = row.verdict.split()[0].replace("not", "part")
    return (
        f'<svg width="{ROOM}" height="14" role="img"><title>{share:.0%} of the budget</title>'
        f'<rect class="{kind}" y="2" width="{width:.1f}" height="10"/>'
        f'<path class="mark" d="M{whole:.1f} 0V14"/></svg>'
    )


def charts(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield the charts that the reports have values for."""
    router = reports["router"]
    for size, limit in CPU_BUDGETS.items():
        title = f"CPU per request, {size}, us"
        yield from bars(router, title, ("cpu", size), limit)
    yield from bars(router, "CPU per chunk, 100 paced streams, us", ("chunk", PACED))
    for size, load in LATENCY_LOADS.items():
        title = f"Added latency p50, {size} at 200/s, us"
        yield from bars(router, title, ("latency", f"p50, {load}"), 500)
    yield from history_chart(reports["history"])


def bars(
    report: Report, title: str, path: tuple[str, ...], limit: float | None = None
) -> Iterator[str]:
    """Yield a chart of one row of a report by proxy, with the budget as a mark."""
    found = {name: report.median(*path, column) for column, name in PROXIES.items()}
    known = [
        Bar(name=name, amount=value, text=f"{value:,.0f}")
        for name, value in found.items()
        if value is not None
    ]
    if known:
        told = "; ".join(f"{bar.name} {bar.text}" for bar in known)
        told += "" if limit is None else f"; the mark is the budget of {limit:g}"
        yield bar_chart(Caption(key=_key(title), title=title, description=told), known, limit)


def history_chart(report: Report) -> Iterator[str]:
    """Yield the CPU above the relay against the length of the history."""
    lines = []
    for router, subject in ROUTERS.items():
        points: list[tuple[float, float | None]] = []
        for tokens in LENGTHS:
            whole, relayed = (report.median("slope", str(tokens), one) for one in (router, RELAY))
            if whole is not None and relayed is not None:
                points.append((tokens, whole - relayed))
        if points:
            lines.append(Line(name=subject, points=tuple(points)))
    if lines:
        title = "CPU above the relay, us, by tokens of history"
        tops = [y or 0.0 for line in lines for _, y in line.points]
        caption = Caption(key="history", title=title, description=title, x_label="tokens")
        yield line_chart(
            caption,
            lines,
            log_axis(LENGTHS, lambda x: f"{x / THOUSAND:g}k"),
            linear_axis(tops, "{:,.0f}".format),
        )


def _key(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
