"""``warmroute doctor``: finds why there are no hits."""

from __future__ import annotations

import asyncio
import os
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from router.config import DEFAULT_ADMIN
from warmroute.admin_client import admin_url
from warmroute.cli import UsageError
from warmroute.doctor_fleet import judge
from warmroute.doctor_gather import ROUTER_KEY_VARIABLE, DoctorSettings, gather
from warmroute.environment import ENGINE_KEY_VARIABLE, REDIS_VARIABLE

if TYPE_CHECKING:
    import argparse

    from warmroute.doctor_case import Finding, Report

LEAST_WIDTH = 40
MOST_WIDTH = 100
TOKENIZER_FILE = "tokenizer.json"
EXAMPLES = f"""\
examples:
  warmroute doctor                                    # the router on this host, and its replicas
  warmroute doctor --admin http://10.0.0.2:8081 --redis redis://10.0.0.5:6379
  warmroute doctor --replica http://10.0.0.7:8000 --model my-model=/models/my-model
  warmroute doctor --probe                            # also sends real prompts, which cost compute

It works without a router (name --replica) and without access to the engines, and says what could
not be checked. {ENGINE_KEY_VARIABLE} holds the engines' key, {ROUTER_KEY_VARIABLE} a client's
key of the router (for --probe), {REDIS_VARIABLE} a Redis URL with a password.
Exit codes: 0 nothing wrong, 1 something is, 2 wrong usage. docs/doctor.md explains each finding.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, http://host:port; repeatable (default: those that the router knows)",
    )
    parser.add_argument(
        "--admin",
        metavar="URL",
        help=f"the router's admin address (default: http://{DEFAULT_ADMIN}, if one answers)",
    )
    parser.add_argument("--redis", metavar="URL", help="the shared state, read as well")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="compare these files' tokens with the engines'; repeatable (default: the router's)",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="send a long prompt twice to each replica, and compare what was found of it",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def settings_of(options: argparse.Namespace) -> DoctorSettings:
    """Return what the flags say; raises UsageError naming the wrong one."""
    replicas = tuple(_address("--replica", text) for text in options.replica)
    models: dict[str, str] = {}
    for pair in options.model:
        name, equals, directory = pair.partition("=")
        if not (name and equals and directory):
            message = f"--model: expected NAME=DIR, got {pair!r}"
            raise UsageError(message)
        if not (Path(directory) / TOKENIZER_FILE).is_file():
            message = f"--model: expected a directory with {TOKENIZER_FILE}, got {directory!r}"
            raise UsageError(message)
        models[name] = directory
    return DoctorSettings(
        replicas=replicas,
        admin=_address("--admin", options.admin or DEFAULT_ADMIN),
        is_admin_given=options.admin is not None,
        redis=os.environ.get(REDIS_VARIABLE) or options.redis,
        models=models,
        does_probe=options.probe,
        engine_key=os.environ.get(ENGINE_KEY_VARIABLE),
        router_key=os.environ.get(ROUTER_KEY_VARIABLE),
    )


def _address(flag: str, text: str) -> str:
    try:
        return admin_url(text)
    except ValueError as error:
        message = f"{flag}: {error}"
        raise UsageError(message) from None


def run(options: argparse.Namespace) -> int:
    """Examine, print, and return 1 when something is wrong."""
    report = judge(asyncio.run(gather(settings_of(options))))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        columns = shutil.get_terminal_size().columns
        print("\n".join(report_lines(report, max(LEAST_WIDTH, min(columns, MOST_WIDTH)))))
    return 1 if report.findings else 0


def report_lines(report: Report, width: int) -> list[str]:
    """Return the report as lines of at most ``width`` characters, where words allow it."""
    lines: list[str] = []
    for finding in report.findings:
        lines += _finding_lines(finding, width)
    for each in report.unchecked:
        lines += _wrapped("not checked: ", f"{each.what}: {each.why}", width)
    if report.unchecked:
        lines.append("")
    count = len(report.findings)
    asked = len(report.replicas)
    what = "nothing wrong was found" if not count else f"{count} finding{'s'[: count != 1]}"
    return [*lines, f"{asked} replica{'s'[: asked != 1]} examined: {what}"]


def _finding_lines(finding: Finding, width: int) -> list[str]:
    title = f"{finding.code.value}: {finding.replica or 'the router'}"
    return [
        title,
        *_wrapped("  seen:    ", finding.seen, width),
        *_wrapped("  meaning: ", finding.meaning, width),
        *_wrapped("  fix:     ", finding.fix, width),
        "",
    ]


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
