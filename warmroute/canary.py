"""``warmroute canary``: let a candidate policy decide for a part of the requests, and judge it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec

from policies.union import KINDS
from router.canary_admin import CANARY_PATH, PROMOTE_PATH, STOP_PATH, CanaryView
from router.canary_verdict import CanaryVerdict
from router.canary_words import verdict_lines
from router.settings import leaves
from warmroute.admin_client import ask
from warmroute.cli import UsageError
from warmroute.setting_client import (
    RefusedError,
    action_adder,
    add_change_flags,
    author_of,
    change,
    print_change,
    print_json,
    when,
)
from warmroute.setting_client import add_flags as add_question_flags
from warmroute.weights import patch_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from router.canary_admin import ProcessCanary
    from router.canary_setting import CanarySettings

EXAMPLES: Final = """\
examples:
  warmroute canary start w_copy=0.8 --percent 10 --reason "fewer copies"
  warmroute canary start --policy weighted w_queue=2 --percent 25 --duration 3600 --reason "try it"
  warmroute canary start w_copy=0.8 --tenant acme --tenant blue --reason "two tenants first"
  warmroute canary start w_copy=0.8 --percent 20 --guardrail ttft_mean.limit=1.2 \\
    --guardrail imbalance.enabled=false --at-end promote --reason "fewer copies"
  warmroute canary status
  warmroute canary promote --reason "8 % faster"
  warmroute canary stop --reason "not now"

Exit codes: 0 done, 1 refused (one is there already, no state store), 2 a wrong key or value, no
canary to promote or stop, a verdict that does not carry a promotion, or no router.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and their flags."""
    action = action_adder(parser, EXAMPLES)
    start = action("start", "give a part of the requests to a candidate", add_change_flags)
    start.add_argument(
        "values", nargs="*", metavar="KEY=VALUE", help="weights that differ from those in force"
    )
    start.add_argument("--policy", choices=KINDS, help="its kind (default: the one in force)")
    start.add_argument(
        "--percent",
        type=float,
        metavar="P",
        help="of conversations, or tenants (default: 10, at most 50)",
    )
    start.add_argument(
        "--split",
        choices=("hash", "tenant"),
        help="by a hash of the conversation (default), or of the tenant",
    )
    start.add_argument(
        "--tenant", action="append", metavar="NAME", help="these tenants, in the place of --percent"
    )
    start.add_argument("--seed", type=int, metavar="N", help="of the hash (default: drawn)")
    start.add_argument(
        "--duration", type=float, metavar="SECONDS", help="when it ends (default: 3600)"
    )
    start.add_argument("--max-requests", type=int, metavar="N", help="or after so many, both sides")
    start.add_argument(
        "--guardrail",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="such as ttft_mean.limit=1.2, errors.min_requests=500, imbalance.enabled=false",
    )
    start.add_argument(
        "--at-end",
        choices=("wait", "promote"),
        help="wait to be promoted or stopped (default), or be promoted within all guardrails",
    )
    start.add_argument("--dry-run", action="store_true", help="only show what would change")
    action("status", "show how it stands, or how the last one ended", add_question_flags)
    promote = action("promote", "put the candidate in force for all requests", add_change_flags)
    promote.add_argument(
        "--force",
        action="store_true",
        help="also while the verdict is 'worse' or 'too little to tell'",
    )
    action("stop", "give all requests to the policy in force again", add_change_flags)


def run(options: argparse.Namespace) -> int:
    """Run one action; returns the exit code."""
    try:
        if options.action == "status":
            return _status(options)
        if options.action == "start":
            return _told(options, CANARY_PATH, start_body(options))
        body = {"author": author_of(options), "reason": options.reason}
        if options.action == "stop":
            return _told(options, STOP_PATH, body)
        return _told(options, PROMOTE_PATH, body | ({"force": True} if options.force else {}))
    except RefusedError as error:
        print(f"warmroute canary: {error}", file=sys.stderr)
        return 1


def start_body(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is asked of the router; raises UsageError."""
    policy = patch_of(options.values)
    if options.policy is not None:
        policy = {"kind": options.policy} | policy
    if not policy:
        message = "expected --policy or KEY=VALUE, such as w_copy=0.8: what the candidate is"
        raise UsageError(message)
    split = options.split or ("tenant" if options.tenant else "hash")
    percent = options.percent
    if percent is None and not options.tenant:
        percent = 10.0
    told = {
        "policy": policy,
        "split": split,
        "percent": percent,
        "tenants": options.tenant,
        "seed": options.seed,
        "duration_s": options.duration,
        "max_requests": options.max_requests,
        "guardrails": patch_of(options.guardrail) or None,
        "at_end": options.at_end,
        "author": author_of(options),
        "reason": options.reason,
        "dry_run": options.dry_run,
    }
    return {key: value for key, value in told.items() if value is not None}


def _told(options: argparse.Namespace, path: str, body: dict[str, Any]) -> int:
    told = change(options.admin, path, body)
    if options.json:
        print_json(told)
        return 0
    if options.action == "promote" and told.verdict is not msgspec.UNSET:
        print("\n".join(verdict_lines(msgspec.convert(told.verdict, CanaryVerdict))))
    print_change(told)
    return 0


def _status(options: argparse.Namespace) -> int:
    view = ask(options.admin, CANARY_PATH, CanaryView)
    if options.json:
        print_json(view)
    else:
        print("\n".join(lines_of(view)))
    return 0


def process_words(one: ProcessCanary) -> str:
    """Return how a canary stands in one process, and what that one counted itself."""
    if one.own is None:
        return f"{one.state}, by version {one.settings_version}"
    alone = f"; cut off: {one.fault}" if one.fault else ""
    counted = f"{one.own.candidate} of the candidate, {one.own.control} of the control"
    return f"{one.state}, {counted}{alone}"


def share_words(settings: CanarySettings) -> str:
    """Return who gets the candidate."""
    if settings.tenants:
        return f"tenants {', '.join(settings.tenants)}"
    what = "tenants" if settings.split == "tenant" else "conversations"
    return f"{settings.percent or 0:g} % of {what}"


def routers_words(lives: int) -> str:
    """Return of how many routers figures are; one that was started anew counted anew."""
    if lives == 1:
        return "of one router"
    return f"of {lives} routers; one that was started again counts as another"


def lines_of(view: CanaryView) -> Iterator[str]:
    """Yield how a canary stands, in words."""
    settings, last = view.settings, view.last
    if settings is None:
        yield "no canary"
    else:
        left = "" if view.left_s is None else f", {view.left_s:.0f} s left"
        share = share_words(settings)
        yield f"canary {settings.id}: {view.state}, {share}{left}; at its end: {settings.at_end}"
        policy = dict(leaves(msgspec.to_builtins(settings.policy)))
        yield "candidate: " + " ".join(f"{key}={value}" for key, value in policy.items())
        if view.state in {"running", "ending"}:
            yield f"figures {routers_words(view.counted_by)}"
        if view.fault:
            who = "one process" if view.processes else "this router"
            yield f"figures of {who} alone: {view.fault}"
        for one in view.processes:
            yield f"process {one.process}: {process_words(one)}"
        if view.note:
            yield view.note
        if view.verdict is not None:
            yield from verdict_lines(view.verdict)
    if last is not None and view.state != "waiting":
        at = when(last.unix_s)
        yield f"the last one, version {last.version}, {at}, {last.author}: {last.reason}"
        if last.verdict is not None and settings is None:
            yield from verdict_lines(last.verdict)
    elif last is not None:
        yield f"{last.author}: {last.reason}"
