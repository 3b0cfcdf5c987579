"""``warmroute weights``: what a fleet's routers go by, and how to change it while they run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec

from router.setting_admin import HISTORY_PATH, ROLLBACK_PATH, SETTINGS_PATH
from router.setting_view import HistoryRow, SettingsView, VersionView
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
    shown,
    when,
)
from warmroute.setting_client import (
    add_flags as add_question_flags,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

EXAMPLES: Final = """\
examples:
  warmroute weights get
  warmroute weights get policy hold.release_ms
  warmroute weights set policy.w_copy=0.8 hold.enabled=true --reason "long queues" --dry-run
  warmroute weights set policy.w_copy=null --reason "back to the file"
  warmroute weights history
  warmroute weights diff 3 5
  warmroute weights rollback 3 --reason "worse hit rate"

Exit codes: 0 done, 1 refused (somebody else was first, no state store), 2 a wrong key or value, or
no router.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and their flags."""
    action = action_adder(parser, EXAMPLES)
    get = action("get", "show what is in force, and where it comes from", add_question_flags)
    get.add_argument("keys", nargs="*", metavar="KEY", help="only these, and what is below them")
    change_keys = action("set", "change some keys in all routers", add_change_flags)
    change_keys.add_argument(
        "values", nargs="+", metavar="KEY=VALUE", help="null gives a key back to the file"
    )
    change_keys.add_argument("--dry-run", action="store_true", help="only show what would change")
    change_keys.add_argument(
        "--expected-version", type=int, metavar="N", help="fail unless this version is in force"
    )
    history = action("history", "show the last changes, newest first", add_question_flags)
    history.add_argument("--limit", type=int, default=20, metavar="N", help="(default: 20)")
    back = action("rollback", "put an earlier version in force again", add_change_flags)
    back.add_argument("version", type=int, metavar="VERSION", help="0: the file alone")
    back.add_argument("--dry-run", action="store_true", help="only show what would change")
    diff = action("diff", "compare the documents of two versions", add_question_flags)
    diff.add_argument("before", type=int, nargs="?", default=0, metavar="FROM", help="(default: 0)")
    diff.add_argument("after", type=int, nargs="?", metavar="TO", help="(default: in force)")


def run(options: argparse.Namespace) -> int:
    """Run one action; returns the exit code."""
    actions = {
        "get": _get,
        "set": _set,
        "history": _history,
        "rollback": _rollback,
        "diff": _diff,
    }
    try:
        return actions[options.action](options)
    except RefusedError as error:
        print(f"warmroute weights: {error}", file=sys.stderr)
        return 1


def _view(options: argparse.Namespace) -> SettingsView:
    return ask(options.admin, SETTINGS_PATH, SettingsView)


def _get(options: argparse.Namespace) -> int:
    view = _view(options)
    if options.json:
        print_json(view)
        return 0
    values = dict(leaves(msgspec.to_builtins(view.values)))
    keys = options.keys or list(values)
    picked = [key for key in values if any(key == one or key.startswith(f"{one}.") for one in keys)]
    for one in options.keys:
        if not any(key == one or key.startswith(f"{one}.") for key in values):
            message = f"{one}: expected a key that is in force, such as policy or hold.release_ms"
            raise UsageError(message)
    print(_headline(view))
    for key in picked:
        print(f"{key} = {shown(values[key])}  ({view.sources.get(key, 'file')})")
    if view.fault:
        print(f"refused: {view.fault}")
    return 0


def _headline(view: SettingsView) -> str:
    if view.author is None:
        return "version 0: the configuration file alone"
    return f"version {view.version}, {_when(view.unix_s)}, by {view.author}: {view.reason}"


def _set(options: argparse.Namespace) -> int:
    patch = patch_of(options.values)
    version = options.expected_version
    body = {
        "patch": patch,
        "author": author_of(options),
        "reason": options.reason,
        "expected_version": _view(options).stored_version if version is None else version,
        "dry_run": options.dry_run,
    }
    return _told(options, SETTINGS_PATH, body)


def _rollback(options: argparse.Namespace) -> int:
    body = {
        "version": options.version,
        "author": author_of(options),
        "reason": options.reason,
        "dry_run": options.dry_run,
    }
    return _told(options, ROLLBACK_PATH, body)


def _told(options: argparse.Namespace, path: str, body: dict[str, Any]) -> int:
    told = change(options.admin, path, body)
    if options.json:
        print_json(told)
    else:
        print_change(told)
    return 0


def _history(options: argparse.Namespace) -> int:
    rows = ask(options.admin, HISTORY_PATH, list[HistoryRow])[: max(0, options.limit)]
    if options.json:
        print_json(rows)
        return 0
    for row in rows:
        print(f"{row.version}  {_when(row.unix_s)}  {row.author}: {row.reason}")
        for one in row.changes or ():
            print(f"    {one.key}: {shown(one.before, one.key)} -> {shown(one.after, one.key)}")
        if row.changes is None:
            print(f"    what it changed is not known: version {row.previous} is not kept")
    if not rows:
        print("nothing was changed yet")
    return 0


def _diff(options: argparse.Namespace) -> int:
    before = _document(options, options.before)
    after = _view(options).document if options.after is None else _document(options, options.after)
    was, now = dict(leaves(before)), dict(leaves(after))
    keys = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    if options.json:
        print_json([{"key": key, "before": was.get(key), "after": now.get(key)} for key in keys])
        return 0
    for key in keys:
        print(f"{key}: {shown(was.get(key), key)} -> {shown(now.get(key), key)}")
    if not keys:
        print("no difference")
    return 0


def _document(options: argparse.Namespace, version: int) -> dict[str, Any]:
    if not version:
        return {}
    return ask(options.admin, f"{SETTINGS_PATH}/{version}", VersionView).document


def patch_of(words: Iterable[str]) -> dict[str, Any]:
    """Return the merge patch that ``key.path=value`` words are; raises UsageError."""
    patch: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        *path, last = key.split(".")
        if not equals or not all((*path, last)):
            message = f"expected KEY=VALUE, such as policy.w_copy=0.8, got {word[:80]!r}"
            raise UsageError(message)
        inner = patch
        for part in path:
            below = inner.setdefault(part, {})
            if not isinstance(below, dict):
                message = f"{key}: a part of it has a value of its own already"
                raise UsageError(message)
            inner = below
        if last in inner:
            message = f"{key}: occurs twice"
            raise UsageError(message)
        inner[last] = _value(key, text)
    return patch


def _value(key: str, text: str) -> Any:
    """Return JSON as what it is, and anything else as text, unless a number was meant."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        float(text)
    except ValueError:
        return text
    message = f"{key}: expected a finite number in JSON's form, such as 0.8, got {text[:80]!r}"
    raise UsageError(message)


def _when(unix_s: float | None) -> str:
    return "-" if unix_s is None else when(unix_s)
