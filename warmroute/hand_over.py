"""Follows a hand-over in a router, and tells how far it is, until it is over."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from router.warm_job import JobEnd, JobKind, JobRow
from router.warm_up import WARM_UP_PATH, WarmUpView
from warmroute.admin_client import ask
from warmroute.cli import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

POLL_S: Final = 0.5
BEGINS_S: Final = 10.0
"""A router begins within its next look, where it begins at all."""
GOOD: Final = frozenset({JobEnd.DONE.value, JobEnd.TOKENS.value, JobEnd.TIME.value})
"""Ends after which the replica may go: all is handed over, or all that the budget allows."""


def known_jobs(admin: str) -> set[float]:
    """Return when the hand-overs began that a router knows of; raises UsageError."""
    return {row.began_unix_s for row in ask(admin, WARM_UP_PATH, WarmUpView).jobs}


def follow(admin: str, replica: str, before: Collection[float]) -> JobRow | None:
    """Return the hand-over of ``replica`` once it is over; None where none begins.

    ``before`` are those that were there. Tells of it on stderr meanwhile. Raises UsageError where
    no router answers.
    """
    began_s, shown, ended = time.monotonic(), "", 0
    while True:
        rows = _found(ask(admin, WARM_UP_PATH, WarmUpView), replica, before)
        if rows:
            row = max(rows, key=_progress)
            line = told(row)
            if line != shown:
                print(line, file=sys.stderr)
                shown = line
            if row.end and ended == len(rows):  # seen twice: no process begins any more
                return row
            ended = len(rows) if row.end else 0
        elif time.monotonic() - began_s > BEGINS_S:
            return None
        time.sleep(POLL_S)


def _found(view: WarmUpView, replica: str, before: Collection[float]) -> list[JobRow]:
    """Return the hand-over, of each process of the router."""
    if not view.enabled:
        message = "--hand-over: expected warm_up.enabled in the router's configuration file"
        raise UsageError(message)
    return [
        row
        for row in view.jobs
        if row.kind == JobKind.HAND_OVER.value
        and row.replica == replica
        and row.began_unix_s not in before
    ]


def _progress(row: JobRow) -> tuple[bool, int]:
    """Return what tells the row to show: one that goes on, and the one that did most."""
    return (not row.end, row.done)


def told(row: JobRow) -> str:
    """Return a hand-over in a line."""
    how = f"ended: {row.end}" if row.end else row.state
    return (
        f"hand-over of {row.replica}: {how}, {row.done} of {row.planned} prefixes,"
        f" {row.spent_tokens:,} of {row.budget_tokens:,} tokens"
    )
