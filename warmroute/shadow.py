"""``warmroute shadow``: what another policy would have chosen for the requests of a live router."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec

from policies.union import KINDS
from router.setting_admin import SETTINGS_PATH
from router.setting_view import SettingsView
from router.shadow_policy import SHADOW_PATH, ShadowReport
from warmroute.admin_client import ask
from warmroute.cli import UsageError
from warmroute.setting_client import (
    RefusedError,
    add_change_flags,
    author_of,
    change,
    print_change,
    print_json,
)
from warmroute.setting_client import add_flags as add_question_flags
from warmroute.weights import patch_of

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
  warmroute shadow start --policy least_loaded --reason "how often do they differ?"
  warmroute shadow start w_copy=0.8 --sample 0.2 --reason "fewer copies"
  warmroute shadow stop --reason "seen"

The router asks that policy about each request and does not follow it. `start` and `stop` change the
settings of all routers (warmroute weights history has them); a policy may also be in the file.
"""
NOTE: Final = (
    "Changes are the shadow's choice less the active one, predicted on the snapshots that the\n"
    "active policy led to. In brackets, from 320 decisions of a row on, are 95 % intervals. What\n"
    "other choices would have made of queues and caches is not in them: `warmroute record` and\n"
    "`warmroute replay` answer that."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and flags; without an action it shows the report."""
    parser.epilog = EXAMPLES
    add_question_flags(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    start = actions.add_parser("start", help="ask a policy", description="Ask a policy, too.")
    add_change_flags(start, is_inner=True)
    start.add_argument(
        "values", nargs="*", metavar="KEY=VALUE", help="weights that differ from those in force"
    )
    start.add_argument("--policy", choices=KINDS, help="its kind (default: the one in force)")
    start.add_argument("--sample", type=float, metavar="SHARE", help="of requests (default: 1)")
    start.add_argument("--dry-run", action="store_true", help="only show what would change")
    stop = actions.add_parser("stop", help="ask none", description="Ask no policy any more.")
    add_change_flags(stop, is_inner=True)


def run(options: argparse.Namespace) -> int:
    """Print the report, or change what is asked; returns the exit code."""
    if options.action is not None:
        return _change(options)
    report = ask(options.admin, SHADOW_PATH, ShadowReport)
    if options.json:
        print_json(report)
    else:
        print("\n".join(lines_of(report)))
    return 0


def _change(options: argparse.Namespace) -> int:
    view = ask(options.admin, SETTINGS_PATH, SettingsView)
    shadow: dict[str, Any] = {"enabled": False}
    if options.action == "start":
        shadow = {"enabled": None, "sample": options.sample, "policy": policy_of(options, view)}
    body = {
        "patch": {"shadow": shadow},
        "author": author_of(options),
        "reason": options.reason,
        "expected_version": view.stored_version,
        "dry_run": getattr(options, "dry_run", False),
    }
    try:
        told = change(options.admin, SETTINGS_PATH, body)
    except RefusedError as error:
        print(f"warmroute shadow: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json(told)
    else:
        print_change(told)
    return 0


def policy_of(options: argparse.Namespace, view: SettingsView) -> dict[str, Any]:
    """Return the policy to ask: the one in force but for some weights, or one of another kind."""
    told = patch_of(options.values)
    if options.policy is None and not told:
        message = "expected --policy or KEY=VALUE, such as w_copy=0.8: which policy to ask"
        raise UsageError(message)
    in_force: dict[str, Any] = msgspec.to_builtins(view.values.policy)
    if options.policy in {None, in_force["kind"]}:
        return in_force | told
    return {"kind": options.policy} | told


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
