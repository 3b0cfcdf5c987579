"""``warmroute kv audit``: replays transitions of the worker's pages and says what they prove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sidecar.audit import AuditFault, AuditReplay
from sidecar.audit_file import AuditReadError, replay_files
from sidecar.audit_page import STATES
from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from sidecar.audit import AuditSummary

SHOWN_REQUESTS = 5


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the action's flags."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="audit files")
    parser.add_argument(
        "--final",
        action="store_true",
        help="the engine was stopped cleanly: a page still held, or a request that has not ended, "
        "is a fault (a log that the engine closed itself says so)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Replay the files and print what was found; raises UsageError when one cannot be read."""
    replay = AuditReplay()
    try:
        torn_files = replay_files(replay, options.files)
        if options.final:
            replay.check_stopped()
    except AuditReadError as error:
        raise UsageError(str(error)) from None
    except AuditFault as fault:
        print(_fault_json(fault) if options.json else "\n".join(_fault_lines(fault)))
        return 1
    summary = replay.summary()
    if options.json:
        found = {"is_conserved": True, "torn_files": [str(path) for path in torn_files]}
        print(_json({**found, **msgspec.to_builtins(summary)}))
    else:
        print("\n".join(_summary_lines(summary, torn_files)))
    return 0


def _summary_lines(summary: AuditSummary, torn_files: list[Path]) -> list[str]:
    ended = [f"{count} {why}" for why, count in summary.ended_requests.items()]
    shown = ", ".join(summary.open_requests[:SHOWN_REQUESTS])
    more = len(summary.open_requests) - SHOWN_REQUESTS
    shown += f" and {more} more" if more > 0 else ""
    lines = [
        f"conservation holds over {summary.transitions} transitions",
        f"requests ended: {', '.join(ended) or 'none'}",
        f"requests open: {len(summary.open_requests)}{f' ({shown})' if shown else ''}",
        f"pages evicted: {_listed(summary.evicted_pages)}",
    ]
    if summary.runs > 1:
        lines.append(f"runs: {summary.runs}; open when one broke off: {summary.cut_requests}")
    if summary.lost_transitions:
        lines.append(
            f"not covered: {summary.lost_transitions} transitions while the log was suspended"
        )
    lines += [f"{path}: the last line is torn, its process died" for path in torn_files]
    lines += ["", f"{'pages':8}{'':>6}{'total':>11}" + "".join(f"{state:>11}" for state in STATES)]
    for tier, total_pages in summary.total_pages.items():
        for name, pages in (("now", summary.final_pages), ("peak", summary.peak_pages)):
            counts = "".join(f"{pages[tier][state]:>11}" for state in STATES)
            lines.append(f"{tier:8}{name:>6}{total_pages:>11}{counts}")
    return lines


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} by {why}" for why, count in counts.items()) or "none"


def _fault_lines(fault: AuditFault) -> list[str]:
    place = "" if fault.file is None else f"{fault.file}:{fault.line}: "
    found = [("page", fault.page), ("tier", fault.tier), ("request", fault.request)]
    words = [f"{name} {value}" for name, value in found if value is not None]
    lines = ["conservation is broken", f"{place}{fault.message}"]
    return [*lines, f"at fault: {', '.join(words)}"] if words else lines


def _fault_json(fault: AuditFault) -> str:
    found = {
        "message": fault.message,
        "file": None if fault.file is None else str(fault.file),
        "line": fault.line,
        "page": fault.page,
        "tier": fault.tier,
        "request": fault.request,
    }
    return _json({"is_conserved": False, "fault": found})


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
