"""``warmroute drain`` and ``undrain``: whether a replica gets new requests, in all routers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from router.setting_admin import REPLICA_PATH
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
  warmroute drain w0 --reason "new driver"
  warmroute undrain w0 --reason "done"

A drained replica ends what it has and gets nothing new, also after it was restarted, until it is
undrained. Exit codes: 0 done, 1 refused, 2 no such replica, or no router.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("replica", metavar="REPLICA", help="its name, see warmroute replicas")
    add_change_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Drain or undrain one replica; returns the exit code."""
    path = f"{REPLICA_PATH}{quote(options.replica, safe='')}/{options.command}"
    body = {"author": author_of(options), "reason": options.reason}
    try:
        told = change(options.admin, path, body)
    except RefusedError as error:
        print(f"warmroute {options.command}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json(told)
    else:
        print_change(told)
    return 0
