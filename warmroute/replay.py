"""``warmroute replay``: a trace in virtual time or against a target; a log of decisions again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console

from replay.decision import replay_decisions
from replay.decision_report import decision_json, decision_text
from replay.journal import JournalError
from replay.report import report, report_json
from replay.report_page import page
from replay.report_text import print_report
from replay.score import Slo
from replay.sharing import Sharing
from replay.target import TargetError
from replay.trace import TraceError
from warmroute import replay_fleet, replay_live
from warmroute.cli import EXIT_INTERRUPTED, UsageError
from warmroute.progress import progress_on
from warmroute.replay_input import NAMES as INPUT_NAMES
from warmroute.replay_input import Feed, add_input_flags, policy_of, positive, read_feed, seed_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from replay.outcome import ReplayRun
    from warmroute.replay_live import Played

EXIT_FAILED: Final = 1
STDOUT: Final = "-"
FILE_COLUMNS: Final = 200
"""The width of a report that no terminal bounds."""
SLO: Final = Slo()
EXAMPLES: Final = """\
examples:
  # virtual time: no GPU, no engine; the router's own policies on a fleet of 8
  warmroute replay trace.jsonl --policy expected_ttft --policy round_robin --html report.html
  warmroute replay trace.jsonl --fleet fleet.yaml --policy '{kind: weighted, w_queue: 2}'

  # live: every request at its time, to a router or an engine on this machine
  warmroute replay trace.jsonl --target http://127.0.0.1:8080 --journal run.jsonl
  warmroute replay trace.jsonl --target http://127.0.0.1:8080 --journal run.jsonl --resume

  # what a router decided: again, or by another policy
  warmroute replay --decisions decisions.jsonl
  warmroute replay --decisions decisions.jsonl --policy least_loaded

Traces: Mooncake, warmroute's own recordings and decision logs, Azure, conversations, agent calls;
as they are or packed. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 on Ctrl-C.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="the trace's file")
    parser.add_argument(
        "--decisions", metavar="LOG", help="decide again what a router logged, and compare"
    )
    parser.add_argument(
        "--seed",
        type=seed_of,
        metavar="N",
        help="seed of all draws and of made-up prompts (default: 0)",
    )
    add_input_flags(parser)
    replay_fleet.add_fleet_flags(parser)
    replay_live.add_live_flags(parser)
    group = parser.add_argument_group("the report")
    group.add_argument("--json", metavar="FILE", help="write it as JSON; - for standard output")
    group.add_argument("--html", metavar="FILE", help="write it as a page")
    group.add_argument(
        "--slo-ttft",
        type=positive,
        dest="slo_ttft_s",
        metavar="S",
        help=f"time to first token of a good request (default: {SLO.ttft_s:g})",
    )
    group.add_argument(
        "--slo-tpot",
        type=positive,
        dest="slo_tpot_s",
        metavar="S",
        help=f"time per token after it (default: {SLO.tpot_s:g})",
    )


def run(options: argparse.Namespace) -> int:
    """Replay; returns the exit code."""
    try:
        if options.decisions is not None:
            return _run_decisions(options)
        if options.trace is None:
            message = "expected TRACE, or --decisions LOG"
            raise UsageError(message)
        return _run_fleet(options) if options.target is None else _run_live(options)
    except TraceError as error:
        raise UsageError(str(error)) from None
    except (TargetError, JournalError) as error:
        print(f"warmroute replay: {error}", file=sys.stderr)
        return EXIT_FAILED


def _refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise UsageError where one of the flags ``names`` was given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False and value != []:
            flag = name.removesuffix("_s").removesuffix("_ms").replace("_", "-")
            message = f"--{flag}: {why}"
            raise UsageError(message)


def _run_decisions(options: argparse.Namespace) -> int:
    names = (*INPUT_NAMES, *replay_fleet.NAMES, *replay_live.NAMES, "target")
    _refuse(options, (*names, "html", "slo_ttft_s", "slo_tpot_s", "seed"), "not with --decisions")
    if options.trace is not None:
        message = f"--decisions: there is a trace, too: {options.trace}"
        raise UsageError(message)
    if len(options.policy) > 1:
        message = "--policy: one at most with --decisions"
        raise UsageError(message)
    policy = policy_of(options.policy[0]) if options.policy else None
    comparison = replay_decisions(Path(options.decisions), policy)
    if options.json is not None:
        _write("--json", options.json, msgspec.json.format(decision_json(comparison)) + b"\n")
    if options.json != STDOUT:
        print(decision_text(comparison), end="")
    return 0 if policy is not None or comparison.is_exact else EXIT_FAILED


def _run_fleet(options: argparse.Namespace) -> int:
    _refuse(options, replay_live.NAMES, "only with --target")
    _check_outputs(options)
    with progress_on(_progress_console()) as progress:
        progress.begin("reading the trace")
        feed = read_feed(options, options.seed or 0)
        runs, bounds = replay_fleet.replay_fleet(feed, options, progress)
    _tell(feed, runs, bounds, options)
    return 0


def _run_live(options: argparse.Namespace) -> int:
    _refuse(options, (*replay_fleet.NAMES, "policy"), "not with --target")
    _check_outputs(options)
    plan = replay_live.plan_of(options, options.seed or 0)
    with progress_on(_progress_console()) as progress:
        progress.begin("reading the trace")
        feed = read_feed(options, options.seed or 0)
        played = replay_live.replay_live(feed, plan, progress)
    outcomes = played.run.outcomes
    if not played.is_whole:
        hint = "" if plan.journal is None else "; go on with --resume"
        print(
            f"warmroute replay: stopped after {len(outcomes):,} of {len(feed.requests):,} requests"
            f"{hint}",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    _tell(feed, {plan.label: played.run}, {}, options, played)
    if all(one.error is not None for one in outcomes):
        print(f"warmroute replay: no answer was whole: {outcomes[0].error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _progress_console() -> Console:
    """Return where progress is shown: nowhere, unless a person looks at it."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, quiet=True)


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise UsageError for a report that has no place, before there is one."""
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path in (None, STDOUT):
            continue
        directory = Path(path).parent
        if Path(path).is_dir() or not directory.is_dir():
            message = f"{flag}: {path}: expected a file in a directory that is there"
            raise UsageError(message)


def _tell(
    feed: Feed,
    runs: Mapping[str, ReplayRun],
    bounds: Mapping[str, ReplayRun],
    options: argparse.Namespace,
    played: Played | None = None,
) -> None:
    """Write and print the report."""
    slo = Slo(
        ttft_s=options.slo_ttft_s or SLO.ttft_s,
        tpot_s=options.slo_tpot_s or SLO.tpot_s,
    )
    possible = Sharing(feed.requests).possible_hit_ratio(feed.requests, feed.block_tokens)
    told = report(runs, slo=slo, bounds=bounds, possible_hit_ratio=possible)
    if options.html is not None:
        _write("--html", options.html, page(told).encode())
    if options.json is not None:
        fields: dict[str, Any] = msgspec.json.decode(report_json(told))
        if played is not None:
            fields["live"] = {
                **msgspec.to_builtins(played.lateness),
                "resumed_requests": played.resumed_requests,
            }
        _write("--json", options.json, msgspec.json.format(msgspec.json.encode(fields)) + b"\n")
    if options.json == STDOUT:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    print_report(console, told)
    if played is not None:
        console.print(replay_live.lateness_line(played.lateness), soft_wrap=True)
    if feed.skipped_lines:
        first = "; ".join(feed.first_skipped)
        console.print(f"{feed.skipped_lines:,} bad lines were passed over: {first}", markup=False)


def _write(flag: str, path: str, content: bytes) -> None:
    if path == STDOUT:
        sys.stdout.write(content.decode())
        return
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        message = f"{flag}: {path}: {error.strerror}"
        raise UsageError(message) from None
