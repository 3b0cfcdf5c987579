"""``warmroute explain``: one decision, or the last few, in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from router.config import DEFAULT_ADMIN
from router.explanation import headline as headline
from router.trace import Attempt, DecisionRecord
from warmroute.admin_client import ask
from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

MOST_RECORDS = 1000
FILE_COLUMNS: Final = 200
"""The width of what no terminal bounds."""
UNBOUND_COLUMNS: Final = 10_000
EXAMPLES = """\
examples:
  warmroute explain 3f9c0a52d1e84b76          # by x-warmroute-request-id or your own x-request-id
  warmroute explain --last 5
  warmroute explain --last 1 --json
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("request_id", nargs="?", help="the request to explain")
    parser.add_argument("--last", type=int, metavar="N", help="explain the last N decisions")
    parser.add_argument(
        "--admin",
        default=f"http://{DEFAULT_ADMIN}",
        metavar="URL",
        help=f"the router's admin address (default: http://{DEFAULT_ADMIN})",
    )
    parser.add_argument("--json", action="store_true", help="print the records as JSON")


def fetch_records(options: argparse.Namespace) -> list[DecisionRecord]:
    """Return the records that were asked for; raises UsageError when they cannot be had."""
    if (options.request_id is None) == (options.last is None):
        message = "expected either a request id or --last N"
        raise UsageError(message)
    if options.request_id is not None:
        path = f"/debug/decisions/{quote(options.request_id, safe='')}"
        return [ask(options.admin, path, DecisionRecord)]
    if not 1 <= options.last <= MOST_RECORDS:
        message = f"--last: expected 1 to {MOST_RECORDS}, got {options.last}"
        raise UsageError(message)
    return ask(options.admin, f"/debug/decisions?limit={options.last}", list[DecisionRecord])


def candidates_table(attempt: Attempt) -> Table:
    """Return every candidate of one attempt with its terms; the lowest score wins."""
    table = Table(title="candidates, lowest score wins", title_justify="left")
    candidates = attempt.decision.candidates
    names = sorted({name for candidate in candidates for name in candidate.terms})
    table.add_column("replica")
    has_lower = any(candidate.lower_tier_tokens for candidate in candidates)
    columns = ["score", *names, "cached tokens"]
    columns += ["in lower tiers"] * has_lower + ["credit"] * bool(attempt.credits)
    for column in columns:
        table.add_column(column, justify="right")
    for candidate in sorted(candidates, key=lambda c: c.score):
        is_chosen = candidate.replica == attempt.decision.replica
        cells = [f"{candidate.score:.4g}"]
        cells += [f"{candidate.terms.get(name, 0.0):.4g}" for name in names]
        cells.append(str(candidate.cached_tokens))
        if has_lower:
            cells.append(str(candidate.lower_tier_tokens))
        if attempt.credits:
            cells.append(f"{attempt.credits.get(candidate.replica, 1.0):.2f}")
        mark = "* " if is_chosen else "  "
        table.add_row(f"{mark}{candidate.replica}", *cells, style="bold" if is_chosen else None)
    return table


def run(options: argparse.Namespace) -> int:
    """Print the decisions that were asked for."""
    records = fetch_records(options)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(records)).decode())
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    for record in records:
        for line in headline(record):
            console.print(escape(line), soft_wrap=True)
        for attempt in record.attempts:
            print_candidates(console, attempt)
    return 0


def print_candidates(console: Console, attempt: Attempt) -> None:
    """Print an attempt's candidates, as a table where it fits; no name is cut in either form."""
    table = candidates_table(attempt)
    unbound = console.options.update(max_width=UNBOUND_COLUMNS)
    if console.measure(table, options=unbound).maximum <= console.width:
        console.print(table)
        return
    for line in _paragraphs(table):
        console.print(escape(line), soft_wrap=True)


def _paragraphs(table: Table) -> Iterator[str]:
    """Yield the title, then each replica with its figures on a line below."""
    yield str(table.title)
    names = [str(column.header) for column in table.columns[1:]]
    for replica, *cells in zip(*(column.cells for column in table.columns), strict=True):
        yield str(replica)
        yield "    " + ", ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True))
