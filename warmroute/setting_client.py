"""Reads and changes a router's settings over its operators' listener, for the commands."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import socket
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
import msgspec

from router.config import DEFAULT_ADMIN
from router.error import UnprovenError
from router.setting_view import SettingsChange
from state.model import UNIX_SCHEME
from warmroute.admin_client import MAX_BODY_BYTES, admin_url, read_bounded, session
from warmroute.cli import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S: Final = 10.0
UNSET: Final = "-"
_T = TypeVar("_T")


class RefusedError(Exception):
    """The router did not make a change; the text says why. The command was right."""


class _Said(msgspec.Struct):
    message: str
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Said


def action_adder(
    parser: argparse.ArgumentParser, examples: str
) -> Callable[[str, str, Callable[[argparse.ArgumentParser], None]], argparse.ArgumentParser]:
    """Return what adds an action to a command: by name, summary and what adds its flags."""
    parser.epilog = examples
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(
        name: str, summary: str, flags: Callable[[argparse.ArgumentParser], None]
    ) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        flags(added)
        return added

    return action


def add_change_flags(parser: argparse.ArgumentParser, *, is_inner: bool = False) -> None:
    """Add what every change has."""
    add_flags(parser, is_inner=is_inner)
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; kept in the history")
    parser.add_argument("--author", metavar="NAME", help="who (default: user@host)")


def add_flags(parser: argparse.ArgumentParser, *, is_inner: bool = False) -> None:
    """Add what every question has.

    ``is_inner``: the parser around it has it, too, and what was told there stays.
    """
    parser.add_argument(
        "--admin",
        metavar="URL",
        default=argparse.SUPPRESS if is_inner else f"http://{DEFAULT_ADMIN}",
        help=f"admin address of any router of the fleet (default: http://{DEFAULT_ADMIN})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS if is_inner else False,
        help="print the router's answer as JSON",
    )


def author_of(options: argparse.Namespace) -> str:
    """Return who changes something."""
    if options.author is not None:
        return str(options.author)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def change(admin: str, path: str, body: dict[str, Any]) -> SettingsChange:
    """Make a change; raises RefusedError, and UsageError for what is wrong with the command."""
    try:
        base = admin_url(admin)
    except ValueError as error:
        message = f"--admin: {error}"
        raise UsageError(message) from None
    try:
        status, answer = asyncio.run(_post(base, path, msgspec.json.encode(body)))
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        message = f"no router answers at {base} ({error or type(error).__name__})"
        raise UsageError(message) from None
    if status == HTTPStatus.OK:
        return _decoded(answer, SettingsChange, base + path)
    said = _decoded(answer, _Refusal, base + path).error
    is_wrong = status in {HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND}
    if is_wrong or said.code == UnprovenError.code:
        raise UsageError(said.message)
    raise RefusedError(said.message)


def _decoded(answer: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"{where}: not a router's answer"
        raise UsageError(message) from None


async def _post(base: str, path: str, body: bytes) -> tuple[int, bytes]:
    root = "http://localhost" if base.startswith(UNIX_SCHEME) else base
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    async with (
        session(headers, at=base) as http,
        http.post(root + path, data=body, allow_redirects=False, timeout=timeout) as answer,
    ):
        return answer.status, await read_bounded(answer, MAX_BODY_BYTES)


def shown(value: object, key: str = "") -> str:
    """Return a value as it is written in a change; one that is not there as a dash.

    That of a ``key`` which is a time, as ``canary.started_unix_s``, is told as one.
    """
    if key.endswith("_unix_s") and isinstance(value, int | float):
        return when(value)
    return UNSET if value is None else msgspec.json.encode(value).decode()


def when(unix_s: float) -> str:
    """Return a time for people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def print_json(value: object) -> None:
    """Print what a router answered."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def print_change(told: SettingsChange) -> None:
    """Print what a change did, or would do."""
    for row in told.changes:
        print(f"{row.key}: {shown(row.before, row.key)} -> {shown(row.after, row.key)}")
    if told.dry_run:
        print(f"nothing was changed: version {told.version} stays in force")
    elif told.version == told.previous:
        print(f"nothing to change: version {told.version} is in force")
    else:
        print(f"version {told.version} is in force, after {told.previous}")
