"""``warmroute drain`` and ``undrain``: whether a replica gets new requests, in all routers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from router.setting_admin import REPLICA_PATH
from warmroute.hand_over import follow, known_jobs, shortfall
from warmroute.setting_client import (
    RefusedError,
    add_change_flags,
    author_of,
    change,
    print_change,
    print_json,
)

if TYPE_CHECKING:
    import argparse

EXAMPLES: Final = """\
examples:
  warmroute drain 127.0.0.1:8000 --reason "new driver"
  warmroute undrain 127.0.0.1:8000 --reason "done"
  warmroute drain 127.0.0.1:8000 --hand-over --reason "scale down"

REPLICA is a name as `warmroute replicas` has it; one that was given none has host:port.

A drained replica ends what it has and gets nothing new, also after it was restarted, until it is
undrained. With --hand-over the command goes on until what the replica alone holds is placed
elsewhere, or the budget of that (warm_up in the configuration) is spent; interrupt it to wait no
longer.

Exit codes: 0 done, of a hand-over also where its tokens or prefixes are spent; 1 refused, or not
all was handed over: its time was over, or a prefix failed; 2 no such replica, or no router.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("replica", metavar="REPLICA", help="its name, see warmroute replicas")
    add_change_flags(parser)
    if parser.prog.endswith(" drain"):
        parser.add_argument(
            "--hand-over",
            action="store_true",
            help="place what it alone holds elsewhere first, and wait for that",
        )


def run(options: argparse.Namespace) -> int:
    """Drain or undrain one replica; returns the exit code."""
    path = f"{REPLICA_PATH}{quote(options.replica, safe='')}/{options.command}"
    body: dict[str, object] = {"author": author_of(options), "reason": options.reason}
    is_handing = getattr(options, "hand_over", False)
    before = known_jobs(options.admin) if is_handing else set()
    if is_handing:
        body["hand_over"] = True
    try:
        told = change(options.admin, path, body)
    except RefusedError as error:
        print(f"warmroute {options.command}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json(told)
    else:
        print_change(told)
    return _handed_over(options, before) if is_handing else 0


def _handed_over(options: argparse.Namespace, before: set[float]) -> int:
    row = follow(options.admin, options.replica, before)
    if row is None:
        text = "no hand-over began: it did before, or the replica tells of no KV events"
        print(f"warmroute drain: {options.replica}: {text}", file=sys.stderr)
        return 1
    if options.json:
        print_json(row)
    missing = shortfall(row)
    if missing:
        print(f"warmroute drain: {options.replica}: {missing}", file=sys.stderr)
    return 1 if missing else 0
