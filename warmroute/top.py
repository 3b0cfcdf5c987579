"""``warmroute top``: the fleet and the last minute at a glance, drawn anew in the terminal."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Final

import msgspec
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from replay import label
from router.config import DEFAULT_ADMIN
from router.snapshot import ReplicaRow, Snapshot
from router.sums import Minute
from state.model import Rung
from warmroute.admin_client import ask
from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection

    from rich.console import RenderableType

    from router.canary_row import CanaryRow

PATH: Final = "/admin/snapshot"
SHORTEST_S: Final = 0.2
LONGEST_S: Final = 3_600.0
SLOW_LOOP_S: Final = 0.25
HEAD_LINES: Final = 7
HEAD_TEXT: Final = 5
"""Of these; the others are empty, or names of columns."""
WIDE: Final = 200
COLUMNS: Final = (
    "replica", "state", "in flight", "queued", "kv", "blocks", "req/min", "predicted", "hits",
    "ttft p50", "p95", "trust", "cache", "notes",
)  # fmt: skip
LEAST_TELLING: Final = (
    "blocks", "cache", "predicted", "trust", "notes", "ttft p50", "queued", "req/min", "kv", "p95",
    "hits", "in flight",
)  # fmt: skip
"""The order in which columns go where the terminal is narrow."""
NOTES_LEAST: Final = 12
BARS: Final = "▁▂▃▄▅▆▇█"
SHAPES: Final = {
    "down": "✕",
    "ejected": "⊘",
    "probation": "◔",
    "draining": "◐",
    "back_pressure": "◑",
    "slow_start": "◕",
    "up": "●",
}
"""States of replicas, the worst first."""
ORDER: Final = {state: place for place, state in enumerate(SHAPES)}
OUT: Final = ("down", "ejected")
OTHER: Final = "○"
NO_REPLICA: Final = "no replica is known: name engines with --replica, or run a sidecar beside each"
EXAMPLES = f"""\
examples:
  warmroute top
  warmroute top --sort ttft --interval 2
  warmroute top --once
  warmroute top --json | jq .last

It asks the router's operators' listener (`admin:`, by default {DEFAULT_ADMIN}); what the figures
mean is in docs/dashboard.md. Into a file or a pipe it prints one frame. Ctrl-C ends it.
"""
SORTS: Final[dict[str, Callable[[ReplicaRow], tuple[float | str, ...]]]] = {
    "name": lambda row: (row.replica,),
    "state": lambda row: (ORDER.get(row.state, 0), row.replica),
    "load": lambda row: (-(row.inflight + row.inflight_elsewhere), row.replica),
    "kv": lambda row: (-(row.kv_used_fraction or 0.0), row.replica),
    "hits": lambda row: (-((row.last and row.last.measured_share) or 0.0), row.replica),
    "ttft": lambda row: (-((row.last and row.last.ttft_p95_s) or 0.0), row.replica),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--admin",
        default=f"http://{DEFAULT_ADMIN}",
        metavar="URL",
        help=f"the router's admin address (default: http://{DEFAULT_ADMIN})",
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="pause of seconds (default: 1)"
    )
    parser.add_argument("--sort", choices=tuple(SORTS), default="state", help="(default: state)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON and end")


def run(options: argparse.Namespace) -> int:
    """Show the router until it is told to stop."""
    if not SHORTEST_S <= options.interval <= LONGEST_S:
        message = f"--interval: expected {SHORTEST_S} to {LONGEST_S:.0f}, got {options.interval:g}"
        raise UsageError(message)
    snapshot = ask(options.admin, PATH, Snapshot)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(snapshot)).decode())
        return 0
    console = Console(highlight=False)
    if options.once or not console.is_terminal:
        # A file or a pipe has no width of its own.
        width = shutil.get_terminal_size((WIDE, 0)).columns
        console = Console(highlight=False, width=width)
        console.print(frame(snapshot, options.sort, width=width))
        return 0
    try:
        _redraw(console, options, snapshot)
    except KeyboardInterrupt:
        return 0
    return 0


def _redraw(console: Console, options: argparse.Namespace, snapshot: Snapshot) -> None:
    """Draw until interrupted; a router that does not answer is said so, and asked again."""
    shown = frame(snapshot, options.sort, console.height, console.width)
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            time.sleep(options.interval)
            try:
                snapshot = ask(options.admin, PATH, Snapshot)
                shown = frame(snapshot, options.sort, console.height, console.width)
            except UsageError as error:
                age = label.seconds(max(0.0, time.time() - snapshot.unix_s))
                trouble = Text(f"{age} old: {error}", style="bold red")
                shown = Group(
                    trouble, frame(snapshot, options.sort, console.height - 1, console.width)
                )
            live.update(shown, refresh=True)


def frame(
    snapshot: Snapshot, sort: str, height: int | None = None, width: int | None = None
) -> RenderableType:
    """Return one picture; ``height`` is in lines, ``width`` in columns, None for all there is."""
    warnings = [Text(f"! {text}", style="yellow") for text in warnings_of(snapshot)]
    rows = sorted(snapshot.replicas, key=SORTS[sort])
    lines = [*headline(snapshot), *canary_line(snapshot.canary)]
    head = HEAD_LINES - HEAD_TEXT + len(lines) + len(warnings)
    room = len(rows) if height is None else max(1, height - head)
    if len(rows) > room:
        room -= 1  # for the line that says so
    parts: list[RenderableType] = [*map(Text, lines), *warnings, Text("")]
    names = _fitting(rows[:room], width)
    parts.append(_table(rows[:room], names) if rows else Text(NO_REPLICA))
    left_out = [name for name in COLUMNS if name not in names]
    if rows and left_out:
        parts.append(Text(f"too narrow for: {', '.join(left_out)}", style="dim"))
    if len(rows) > room:
        parts.append(Text(f"and {len(rows) - room} more, see --sort and a taller terminal"))
    return Group(*parts)


def headline(snapshot: Snapshot) -> list[str]:
    """Return the router and its last minute in a few lines."""
    router, last = snapshot.router, snapshot.last
    up = sum(row.state not in {*OUT, "draining"} for row in snapshot.replicas)
    age = "" if router.rung is Rung.LIVE else f" ({label.seconds(router.state_age_s)} old)"
    state = f"state {router.rung.value}{age}"
    up_s = snapshot.unix_s - snapshot.started_unix_s
    rate = label.rate(last.requests / last.span_s if last.span_s >= 1.0 else None)
    shares = " · ".join(
        f"{name} {_part(part, last.requests)}"
        for name, part in (("failed", last.failed), ("shed", last.shed), ("spills", last.spills))
    )
    router_line = f"warmroute {snapshot.version} · {router.policy} · {state}"
    fleet_line = f"{up} of {len(snapshot.replicas)} replicas up · runs for {duration(up_s)}"
    waiting = f"open {snapshot.open_requests}, held {snapshot.held_requests}"
    p50, p95, p99 = map(label.seconds, (last.ttft_p50_s, last.ttft_p95_s, last.ttft_p99_s))
    predicted = label.share(last.predicted_share)
    hits = f"tokens {label.share(last.measured_share)} (predicted {predicted})"
    return [
        f"{router_line} · {fleet_line}",
        f"requests  {rate:>8}  {sparks(snapshot.rates)}  {waiting}",
        f"ttft      p50 {p50} · p95 {p95} · p99 {p99}",
        f"hits      {hits} · requests {label.share(last.hit_share)}",
        f"of these  {shares} · loop lag {label.seconds(snapshot.loop_lag_s)}",
    ]


def canary_line(row: CanaryRow | None) -> list[str]:
    """Return a canary in a line; none where there is none."""
    if row is None:
        return []
    what = "tenants" if row.split == "tenant" else "conversations"
    who = f"{row.percent:g} % of {what}" if row.percent is not None else ", ".join(row.tenants)
    counted = f"requests {row.candidate_requests:,} against {row.control_requests:,}"
    alone = " (of one process alone)" if row.is_alone else ""
    parts = (f"{row.id} {row.state}", row.candidate, who, counted + alone, row.word or "no verdict")
    return [f"canary    {label.foreign(' · '.join(parts), longest=300)}"]


def warnings_of(snapshot: Snapshot) -> list[str]:
    """Return what needs attention."""
    found = []
    for state in OUT:
        names = [row.replica for row in snapshot.replicas if row.state == state]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""  # noqa: PLR2004 - shown
        if names:
            found.append(f"{state}: {', '.join(names[:4])}{more}")
    if snapshot.is_draining:
        found.append("the router drains")
    if snapshot.router.rung is not Rung.LIVE:
        age = label.seconds(snapshot.router.state_age_s)
        found.append(f"the shared state is away, what is known is {age} old")
    if snapshot.loop_lag_s > SLOW_LOOP_S:
        found.append(f"the event loop is held for {label.seconds(snapshot.loop_lag_s)}")
    found += [f"{one.replica}: {one.kind}. {one.finding}" for one in snapshot.diagnoses[:3]]
    return [label.foreign(text, longest=200) for text in found]


def sparks(rates: tuple[int, ...]) -> str:
    """Return a small picture of numbers, the newest last."""
    most = max(rates, default=0)
    if most == 0:
        return "·" * len(rates)
    return "".join(BARS[min(len(BARS) - 1, value * len(BARS) // (most + 1))] for value in rates)


def duration(seconds: float) -> str:
    """Return how long something lasts, in its two largest units."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    hours, days = minutes // 60, minutes // 1_440
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"


def _fitting(rows: list[ReplicaRow], width: int | None) -> tuple[str, ...]:
    """Return the columns that there is room for: the least telling ones go first, never halves."""
    if width is None:
        return COLUMNS
    drawn = [dict(zip(COLUMNS, cells(row), strict=True)) for row in rows]
    widths = {
        name: max([cell_len(name), *(cell_len(each[name]) for each in drawn)]) for name in COLUMNS
    }
    widths["notes"] = min(widths["notes"], NOTES_LEAST)
    left = list(COLUMNS)
    for name in LEAST_TELLING:
        if sum(widths[each] for each in left) + len(left) - 1 <= width:
            break
        left.remove(name)
    return tuple(left)


def _table(rows: list[ReplicaRow], names: Collection[str]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in names:
        if name == "notes":
            table.add_column(name, overflow="ellipsis", no_wrap=True)
        else:
            words = name in {"replica", "state"}
            table.add_column(name, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        drawn = dict(zip(COLUMNS, cells(row), strict=True))
        table.add_row(*(_shown(drawn[name]) for name in names))
    return table


def _shown(cell: str) -> Text:
    """Return a cell; a state has its colour besides its word."""
    if cell[:1] not in {*SHAPES.values(), OTHER}:
        return Text(cell)
    state = cell[2:].partition(" ")[0]
    return Text(cell, "green" if state == "up" else "bold red" if state in OUT else "yellow")


def cells(row: ReplicaRow) -> list[str]:
    """Return one replica's cells."""
    last = row.last or _IDLE
    least = "≥ " if row.is_age_least else ""
    left = "" if row.left_s is None else f" {duration(row.left_s)}"
    limit = "" if row.limit is None else f"/{row.limit}"
    age = label.UNKNOWN if row.generation_age_s is None else least + duration(row.generation_age_s)
    return [
        label.foreign(row.replica),
        f"{SHAPES.get(row.state, OTHER)} {row.state}{left}",
        str(row.inflight + row.inflight_elsewhere) + limit,
        label.UNKNOWN if row.queued is None else str(row.queued),
        "unknown" if row.kv_used_fraction is None else label.share(row.kv_used_fraction),
        label.count(row.resident_blocks),
        label.count(round(last.requests * 60.0 / max(1.0, last.span_s))),
        label.share(last.predicted_share),
        label.share(last.measured_share),
        label.seconds(last.ttft_p50_s),
        label.seconds(last.ttft_p95_s),
        label.share(row.credit),
        age,
        label.foreign(" ".join(row.notes)),
    ]


def _part(part: int, whole: int) -> str:
    return label.share(part / whole if whole else None)


_IDLE: Final = Minute(
    span_s=60.0,
    requests=0,
    failed=0,
    shed=0,
    spills=0,
    retries=0,
    predicted_share=None,
    measured_share=None,
    hit_share=None,
    ttft_p50_s=None,
    ttft_p95_s=None,
    ttft_p99_s=None,
)
