"""``warmroute replicas``: every replica as a router knows it, with what its sidecar detected."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from router.config import DEFAULT_ADMIN
from router.replica_view import ReplicaView, RouterView
from state.model import EngineKind, Rung
from warmroute.admin_client import AdminClient, AdminError, admin_url, session
from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse

    from router.trust import TrustRow
    from state.model import ReplicaFacts

WIDE_COLUMNS: Final = 130
"""From here on a table has room for everything; below, each replica is a paragraph."""
EXAMPLES = f"""\
examples:
  warmroute replicas
  warmroute replicas --admin http://10.0.0.2:8081
  warmroute replicas --json

It asks the router's operators' listener (`admin:`, by default {DEFAULT_ADMIN}). A replica without a
sidecar has nothing detected. `warmroute doctor` says what is wrong with one, and what to do.
"""
UNKNOWN: Final = "-"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--admin",
        default=f"http://{DEFAULT_ADMIN}",
        metavar="URL",
        help=f"the router's admin address (default: http://{DEFAULT_ADMIN})",
    )
    parser.add_argument("--json", action="store_true", help="print what the router answers as JSON")


async def fetch(base: str) -> tuple[RouterView, list[ReplicaView]]:
    """Return the router's views; raises AdminError."""
    async with session(at=base) as http:
        client = AdminClient(http, base)
        router = await client.get("/admin/router", RouterView)
        return router, await client.get("/admin/replicas", list[ReplicaView])


def run(options: argparse.Namespace) -> int:
    """Print what the router knows."""
    try:
        router, replicas = asyncio.run(fetch(admin_url(options.admin)))
    except ValueError as error:
        message = f"--admin: {error}"
        raise UsageError(message) from None
    except AdminError as error:
        raise UsageError(str(error)) from None
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(replicas)).decode())
        return 0
    show(Console(highlight=False), router, replicas)
    return 0


def show(console: Console, router: RouterView, replicas: list[ReplicaView]) -> None:
    """Print the views, as a table where it fits."""
    age = "" if router.rung is Rung.LIVE else f", {router.state_age_s:.1f} s old"
    where = router.state or "a private server"
    console.print(escape(f"state {router.rung.value}{age} ({where}), policy {router.policy}"))
    if not replicas:
        console.print("no replica is known: start a sidecar, or name engines with --replica")
        return
    if console.width >= WIDE_COLUMNS:
        console.print(_table(replicas))
        for view in replicas:
            if view.fault is not None:
                console.print(escape(f"{view.replica}: {view.fault}"))
    else:
        for view in replicas:
            console.print()
            for line in paragraph(view):
                console.print(escape(line), soft_wrap=False)


def _table(replicas: list[ReplicaView]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    columns = ("replica", "told by", "is", "engine", "events", "pages", "held / capacity")
    for name in (*columns, "seq", "gaps", "generation", "blocks", "in flight", "queued", "trust"):
        is_number = name in {"seq", "gaps", "blocks", "in flight", "queued"}
        table.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=name == "replica",
        )
    for view in replicas:
        cells = [view.replica, view.source or UNKNOWN, health(view), engine(view), shape(view)]
        cells += [pages(view), held(view)]
        counts = view.facts.counts if view.facts is not None else None
        cells += [
            _number(counts.last_sequence if counts is not None else None),
            _number(counts.gaps if counts is not None else None),
            _generation(view),
            _number(view.resident_blocks),
            str(view.inflight + view.inflight_elsewhere),
            _number(view.load.queued if view.load is not None else None),
            trust(view),
        ]
        table.add_row(*map(escape, cells))
    return table


def paragraph(view: ReplicaView) -> list[str]:
    """Return one replica in lines for a narrow terminal."""
    queued = _number(view.load.queued if view.load is not None else None)
    facts = view.facts
    fault = "" if view.fault is None else f": {view.fault}"
    lines = [
        f"{view.replica}  {health(view)}  {view.endpoint}{fault}",
        f"  told by     {view.source or UNKNOWN}",
        f"  engine      {engine(view)}, models {', '.join(view.models) or UNKNOWN}",
        f"  events      {events(view)}",
        f"  pages       {pages(view)}; held / capacity {held(view)}",
        f"  index       {_number(view.resident_blocks)} blocks, generation {_generation(view)}",
        f"  requests    {view.inflight + view.inflight_elsewhere} in flight, {queued} queued",
        f"  trust       {trust(view)}",
    ]
    if facts is not None:
        counts = facts.counts
        lines.insert(
            4,
            f"  sequence    {_number(counts.last_sequence)}, {counts.gaps} gaps, "
            f"{counts.missed_batches} missed, {counts.malformed_events} malformed",
        )
        lines += [f"  ! {each}" for each in warnings(view, facts)]
    return lines


def health(view: ReplicaView) -> str:
    """Return whether requests go there, and what holds them off."""
    if view.draining:
        return "draining"
    now = view.standing
    if now is None:
        return "up" if view.up else "down"
    name = now.standing.value.replace("_", " ")
    left = "" if now.left_s is None else f" for {math.ceil(now.left_s)} s"
    why = f" ({now.reason})" if now.reason else ""
    return f"{name}{left}{why}"


def engine(view: ReplicaView) -> str:
    """Return which program it is."""
    facts = view.facts
    if facts is None:
        return "unknown" if view.registered else "no sidecar"
    name = "warmroute worker" if facts.engine is EngineKind.WORKER else facts.engine.value
    rank = "" if view.rank is None else f" rank {view.rank}"
    return f"{name} {facts.engine_version or ''}".rstrip() + rank


def events(view: ReplicaView) -> str:
    """Return where its events come from, and what they look like."""
    facts = view.facts
    if facts is None or facts.events is None:
        return shape(view)
    return f"{facts.events} ({shape(view)})"


def shape(view: ReplicaView) -> str:
    """Return what its events look like."""
    facts = view.facts
    if facts is None:
        return "yes" if view.has_events else "none"
    if facts.events is None:
        return "none"
    if facts.is_silent:
        return "silent"
    parts = (
        "+".join(facts.encodings),
        "+".join(facts.hash_kinds),
        "+".join(_medium(name, facts) for name in facts.media),
        f"groups {_listed(facts.groups)}" if facts.groups else "",
        f"ranks {_listed(facts.ranks)}" if len(facts.ranks) > 1 else "",
        "" if facts.has_replay else "no replay",
    )
    return ", ".join(filter(None, parts)) or "none yet"


def _medium(name: str, facts: ReplicaFacts) -> str:
    return f"{name}?" if name in facts.unknown_media else name


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def pages(view: ReplicaView) -> str:
    """Return page and block size in tokens."""
    if view.page_tokens is None:
        return UNKNOWN
    return f"{view.page_tokens} tokens, blocks of {view.block_tokens}"


def held(view: ReplicaView) -> str:
    """Return how much of the pool holds what is known."""
    facts = view.facts
    if facts is None:
        return UNKNOWN
    return f"{facts.counts.held_pages:,} / {_number(facts.capacity_pages)}"


def trust(view: ReplicaView) -> str:
    """Return how far predictions come true."""
    return "; ".join(map(_trust_row, view.trust)) or UNKNOWN


def _trust_row(row: TrustRow) -> str:
    if row.precision is None:
        return f"{row.ground.value}: nothing reported"
    recall = "" if row.recall is None else f", recall {row.recall:.2f}"
    credit = "" if row.credit >= 1.0 else f", credit {row.credit:.2f}"
    return f"{row.ground.value}: precision {row.precision:.2f}{recall}{credit}"


def warnings(view: ReplicaView, facts: ReplicaFacts) -> list[str]:
    """Return what is plainly wrong, as ``warmroute doctor`` calls it."""
    found = []
    if facts.is_silent:
        found.append("events_silent: it works and was never heard")
    if facts.has_unfit_pages:
        found.append("page_mismatch: its pages do not fit the blocks")
    if facts.unknown_media:
        found.append(f"unknown_medium: {', '.join(facts.unknown_media)}")
    if view.same_keys is False:
        found.append("keys_differ: its sidecar derives other block ids")
    return found


def _generation(view: ReplicaView) -> str:
    reason = view.facts.reason if view.facts is not None else ""
    return f"{view.generation or UNKNOWN}" + (f" ({reason})" if reason else "")


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"
