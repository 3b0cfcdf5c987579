"""``warmroute tenants``: what tenants used of the caches, and whether the audit log is whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from router.audit_log import AuditError, verify
from router.billing import BILLING_PATH, BillingReport, ScopeHeld, TenantUse
from router.config import DEFAULT_ADMIN
from warmroute.admin_client import ask
from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

UNKNOWN: Final = "-"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HOUR_S: Final = 3600.0
_MIB: Final = float(1 << 20)
EXAMPLES = """\
examples:
  warmroute tenants report
  warmroute tenants report --admin http://10.0.0.1:8081 --admin http://10.0.0.2:8081
  warmroute tenants verify audit.jsonl
  warmroute tenants verify audit.jsonl --head 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd...
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and their flags."""
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "tell what each tenant got of the caches, and what its scope holds there"
    report = actions.add_parser("report", help=summary, description=f"{summary.capitalize()}.")
    report.add_argument(
        "--admin",
        action="append",
        metavar="URL",
        help=f"a router's admin address; repeatable, requests add up (default: http://{DEFAULT_ADMIN})",
    )
    report.add_argument("--json", action="store_true", help="print the report as JSON")
    summary = "check the chain of an audit log"
    checked = actions.add_parser(
        "verify",
        help=summary,
        description=f"{summary.capitalize()}.",
        epilog="Exit codes: 0 whole, 1 each fault is named, 2 unreadable. Keep the head that it "
        "prints elsewhere: only against that can lines be missed at the end.",
    )
    checked.add_argument("file", metavar="FILE", type=Path, help="audit_log of one router")
    checked.add_argument(
        "--head", metavar="DIGEST", help="SHA-256 of a line that has to be there, kept elsewhere"
    )


def run(options: argparse.Namespace) -> int:
    """Run one action; returns the exit code."""
    return _verify(options) if options.action == "verify" else _report(options)


def _verify(options: argparse.Namespace) -> int:
    if options.head is not None and not _DIGEST.fullmatch(options.head):
        message = f"--head: expected 64 hex digits in lower case, got {options.head[:80]!r}"
        raise UsageError(message)
    try:
        verdict = verify(options.file, options.head)
    except AuditError as error:
        raise UsageError(str(error)) from None
    for fault in verdict.faults:
        print(fault)
    state = "broken" if verdict.faults else "whole"
    print(f"{state}: {verdict.records} records, head {verdict.head}")
    return 1 if verdict.faults else 0


def fetch_report(admin: str) -> BillingReport:
    """Return what one router counted; raises UsageError when it cannot be had."""
    return ask(
        admin,
        BILLING_PATH,
        BillingReport,
        "expected the admin address (`admin:`) of a router with tenants",
    )


def merged(reports: Sequence[BillingReport]) -> BillingReport:
    """Return one report of several routers: requests add up, what is held is told once.

    Of what is held the router that counted longest is believed.
    """
    tenants: dict[str, TenantUse] = {}
    for use in (use for report in reports for use in report.tenants):
        known = tenants.setdefault(use.tenant, TenantUse(tenant=use.tenant, scope=use.scope))
        for field in ("requests", "hits", "unreported", "prompt_tokens", "saved_tokens"):
            setattr(known, field, getattr(known, field) + getattr(use, field))
    oldest = min(reports, key=lambda one: (one.held_age_s is None, one.since_unix_s))
    return msgspec.structs.replace(oldest, tenants=list(tenants.values()))


def _report(options: argparse.Namespace) -> int:
    admins = options.admin or [f"http://{DEFAULT_ADMIN}"]
    report = merged([fetch_report(admin) for admin in admins])
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0
    console = Console(highlight=False)
    console.print(_tenant_table(report.tenants))
    console.print(_scope_table(report.scopes))
    if report.held_age_s is None:
        console.print("what scopes hold was not counted yet")
    return 0


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def _tenant_table(tenants: Sequence[TenantUse]) -> Table:
    table = _table("requests since the routers began")
    for column in ("tenant", "scope"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("requests", "hits", "prompt tokens", "saved tokens", "saved"):
        table.add_column(column, justify="right")
    for use in tenants:
        share = f"{use.saved_tokens / use.prompt_tokens:.1%}" if use.prompt_tokens else UNKNOWN
        is_told = use.requests > use.unreported
        cells = (
            f"{use.requests:,}",
            f"{use.hits:,}" if is_told else UNKNOWN,
            f"{use.prompt_tokens:,}",
            f"{use.saved_tokens:,}" if is_told else UNKNOWN,
            share if is_told else UNKNOWN,
        )
        table.add_row(escape(use.tenant), escape(use.scope), *cells)
    return table


def _scope_table(scopes: Sequence[ScopeHeld]) -> Table:
    table = _table("held in the caches of the fleet")
    table.add_column("scope", no_wrap=True, overflow="fold")
    for column in ("tokens", "token hours", "MiB", "MiB hours"):
        table.add_column(column, justify="right")
    for held in scopes:
        size, size_s = held.held_bytes, held.held_byte_seconds
        cells = (
            f"{held.held_tokens:,}",
            f"{held.held_token_seconds / _HOUR_S:,.1f}",
            UNKNOWN if size is None else f"{size / _MIB:,.1f}",
            UNKNOWN if size_s is None else f"{size_s / _MIB / _HOUR_S:,.1f}",
        )
        table.add_row(escape(held.scope), *cells)
    return table
