"""``warmroute shadow``: what another policy would have chosen for the requests of a live router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from router.config import DEFAULT_ADMIN
from router.shadow_policy import SHADOW_PATH, ShadowReport
from warmroute.admin_client import ask

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from policies.contrast import Weighed
    from policies.model import Candidate
    from router.running_mean import Mean
    from router.shadow_policy import ShadowSide

EXAMPLES: Final = """\
examples:
  warmroute shadow
  warmroute shadow --admin http://10.0.0.5:8081 --json

The router asks the policy of `shadow.policy` about each request and does not follow it.
"""
NOTE: Final = (
    "Changes are the shadow's choice less the active one, predicted on the snapshots that the\n"
    "active policy led to, with 95 % intervals. What other choices would have made of queues and\n"
    "caches is not in them: `warmroute record` and `warmroute replay` answer that."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--admin",
        default=f"http://{DEFAULT_ADMIN}",
        metavar="URL",
        help=f"the router's admin address (default: http://{DEFAULT_ADMIN})",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code."""
    report = ask(options.admin, SHADOW_PATH, ShadowReport)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(lines_of(report)))
    return 0


def lines_of(report: ShadowReport) -> Iterator[str]:
    """Yield the report in words."""
    yield (
        f"{report.policy} beside {report.active} (settings {report.settings_version}):"
        f" {report.overall.decisions} decisions, {report.unanswered} unanswered,"
        f" {report.skipped} skipped for want of time"
    )
    yield ""
    yield f"{'reason':<10} {'decisions':>9} {'same':>7}  {'TTFT change, ms':<30} hit change, points"
    for name, side in (("all", report.overall), *report.reasons.items()):
        yield _row(name, side)
    if report.worst:
        yield ""
        yield "Slowed most:"
    for one in report.worst:
        yield (
            f"  {one.request_id}  {one.prompt_tokens} tokens"
            f"  {one.ttft_change_ms:+.1f} ms  {one.hit_change_tokens:+d} cached tokens"
        )
        yield from _choice("active", one.active)
        yield from _choice("shadow", one.shadow)
    yield ""
    yield NOTE


def _row(name: str, side: ShadowSide) -> str:
    share = f"{side.same_replica / side.decisions:.1%}" if side.decisions else "-"
    ttft, hit = _told(side.ttft_change_ms, 1.0), _told(side.hit_change_ratio, 100.0)
    return f"{name:<10} {side.decisions:>9} {share:>7}  {ttft:<30} {hit}"


def _told(mean: Mean, factor: float) -> str:
    if mean.mean is None:
        return "-"
    text = f"{mean.mean * factor:+.2f}"
    if mean.low is None or mean.high is None:
        return text
    return f"{text} ({mean.low * factor:+.2f} to {mean.high * factor:+.2f})"


def _choice(whose: str, choice: Weighed) -> Iterator[str]:
    yield f"    {whose}: {choice.replica} ({choice.reason})"
    for candidate in (choice.own, choice.other):
        if candidate is not None:
            yield f"      {_scored(candidate)}"


def _scored(candidate: Candidate) -> str:
    terms = "  ".join(f"{name} {value:.1f}" for name, value in candidate.terms.items())
    return f"{candidate.replica}: {candidate.score:.1f} = {terms}"
