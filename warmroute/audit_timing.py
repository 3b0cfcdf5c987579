"""``warmroute audit``: can one tenant see by the clock what another one sent? From outside."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from warmroute.admin_client import admin_url, session
from warmroute.audit_judge import SIGNIFICANCE, Report, Samples, Verdict, compared, judge
from warmroute.audit_probe import AuditError, Caller, Plan, collect
from warmroute.cli import UsageError
from warmroute.engine_look import is_loopback
from warmroute.flag import add_setting_flags, settings_of
from warmroute.process import run_loop

if TYPE_CHECKING:
    import argparse

    from warmroute.audit_judge import Comparison

TENANTS: Final = 2
COLUMNS: Final = ("other's", "fresh", "n", "KS p")
FLAGS: Final = {
    "target": "router to audit, http://host:port",
    "model": "model to ask",
    "samples": "prompts of each kind in one repeat",
    "repeats": "how often the two samples are drawn and compared",
    "words": "words of a prompt, some 4 tokens each: a cached one has to be clearly faster",
    "warm_up": "rounds before the first that counts",
    "pause_ms": "pause between two requests, in ms",
    "significance": "p-value up to which two samples count as different",
}
EXAMPLES: Final = """\
examples:
  VICTIM=sk-... ATTACKER=sk-... warmroute audit --target http://127.0.0.1:8080 \\
      --key-env VICTIM --key-env ATTACKER --model my-model
  ... --samples 50 --repeats 5 --words 2000 --json

The victim sends a prompt, then the attacker the same one and a fresh one, in random order. Their
times to first token are compared by the test of Kolmogorov and Smirnov. Within one tenant the same
must show the cache, else the audit is void. There should be no other traffic. It sends some
3.4 x samples x repeats prompts, which the engines compute and cache.
Exit codes: 0 passed, 1 leak, 2 wrong usage or no answer, 3 void.
"""
MEANING: Final = {
    Verdict.PASSED: "what another tenant sent is as slow as what nobody sent",
    Verdict.LEAK: "what another tenant sent is told from what nobody sent",
    Verdict.VOID: (
        "the cache was not seen within one tenant either: is it on, are prompts long enough "
        "(--words), is there other traffic?"
    ),
}


class AuditSettings(Struct, frozen=True, kw_only=True):
    """What the flags say."""

    target: str
    model: str
    samples: Annotated[int, Meta(ge=10, le=10_000)] = 250
    repeats: Annotated[int, Meta(ge=1, le=1_000)] = 20
    words: Annotated[int, Meta(ge=16, le=100_000)] = 500
    warm_up: Annotated[int, Meta(ge=0, le=1_000)] = 10
    pause_ms: Annotated[float, Meta(ge=0, le=10_000)] = 5.0
    significance: Annotated[float, Meta(gt=0, lt=0.5)] = SIGNIFICANCE


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    add_setting_flags(parser, AuditSettings, FLAGS)
    parser.add_argument(
        "--key-env",
        action="append",
        required=True,
        metavar="VARIABLE",
        help="environment variable with a tenant's API key; twice: the victim's, the attacker's",
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="audit a router on another machine, too"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as JSON, the table to stderr"
    )


def run(options: argparse.Namespace) -> int:
    """Audit one router; returns the verdict as the exit code."""
    settings = settings_of(options, AuditSettings, FLAGS)
    try:
        target = admin_url(settings.target)
    except ValueError as error:
        message = f"--target: {error}"
        raise UsageError(message) from None
    if not is_loopback(target) and not options.allow_remote:
        message = (
            f"--target: {target} is not on this machine; --allow-remote audits it, and sends it "
            "thousands of prompts"
        )
        raise UsageError(message)
    keys = [(name, _key(name)) for name in options.key_env]
    if len(keys) != TENANTS:
        message = f"--key-env: expected {TENANTS} of them, got {len(keys)}"
        raise UsageError(message)
    try:
        samples = run_loop(_collect(settings, target, keys), "uvloop")
    except AuditError as error:
        raise UsageError(str(error)) from None
    report = judge(samples, settings.significance)
    verdict = Verdict[report.verdict.upper()]
    console = Console(highlight=False, stderr=options.json, soft_wrap=True)
    show(console, report)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return verdict.value


def _key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable():
        message = f"--key-env: expected an API key in the environment variable {variable!r}"
        raise UsageError(message)
    return key


async def _collect(
    settings: AuditSettings, target: str, keys: list[tuple[str, str]]
) -> list[Samples]:
    """Return the samples of all repeats, telling each one on stderr; raises AuditError."""
    plan = Plan(
        samples=settings.samples,
        repeats=settings.repeats,
        warm_up=settings.warm_up,
        words=settings.words,
        pause_s=settings.pause_ms / 1e3,
    )

    def told(number: int, samples: Samples) -> None:
        across = compared(samples.probes, samples.fresh)
        print(f"{number + 1} of {plan.repeats}: p = {across.p_value:.3g}", file=sys.stderr)

    async with session() as http:
        victim, attacker = (Caller(http, target, settings.model, key, name) for name, key in keys)
        return await collect(victim, attacker, plan, told)


def show(console: Console, report: Report) -> None:
    """Print the table and the verdict."""
    title = "median time to first token, ms: another tenant's prompts and fresh ones; own ones"
    table = Table(title=title, title_justify="left")
    for column in ("repeat", *COLUMNS, "own", *COLUMNS[1:]):
        table.add_column(column, justify="right")
    for number, repeat in enumerate(report.repeats):
        table.add_row(str(number + 1), *_cells(repeat.across), *_cells(repeat.control))
    if len(report.repeats) > 1:
        pooled = report.pooled
        table.add_row("all", *_cells(pooled.across), *_cells(pooled.control))
    console.print(table)
    console.print(
        f"across tenants {report.rejections} of {len(report.repeats)} repeats differ at "
        f"p <= {report.significance:g} (at most {report.rejections_allowed} by accident); "
        f"within one tenant {len(report.repeats) - report.controls_missed} show the cache"
    )
    verdict = Verdict[report.verdict.upper()]
    console.print(f"{report.verdict}: {MEANING[verdict]}")


def _cells(one: Comparison) -> tuple[str, str, str, str]:
    return (
        f"{one.known_median_ms:.2f}",
        f"{one.fresh_median_ms:.2f}",
        f"{one.known_count}+{one.fresh_count}",
        f"{one.p_value:.2g}",
    )
