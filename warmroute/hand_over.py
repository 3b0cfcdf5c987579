"""Follows a hand-over in a router, and tells how far it is, until it is over."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from msgspec import structs

from router.warm_job import JobEnd, JobKind, JobRow
from router.warm_up import WARM_UP_PATH, WarmUpView
from warmroute.admin_client import ask
from warmroute.cli import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

POLL_S: Final = 0.5
BEGINS_S: Final = 10.0
"""A router begins within its next look, where it begins at all."""
WHOLE: Final = frozenset({JobEnd.DONE.value, JobEnd.TOKENS.value})
"""Ends after which the replica may go: all is handed over, or as many tokens as were asked for."""
BEST_FIRST: Final = ("done", "tokens", "stopped", "obsolete", "time", "failed")
"""Ends; the last one counts of those of several processes."""
WHY: Final = {
    JobEnd.FAILED.value: "it was refused or failed, or no replica could take it",
    JobEnd.TIME.value: "its time was over (warm_up.seconds)",
    JobEnd.OBSOLETE.value: "it left or is no longer drained, or its cache began another life",
    JobEnd.STOPPED.value: "the router ended",
}


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
            row = whole(rows)
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


def whole(rows: Sequence[JobRow]) -> JobRow:
    """Return a hand-over of several processes as one: who goes on, or what all came to."""
    going = [row for row in rows if not row.end]
    if going:
        return max(going, key=lambda row: row.done)
    return structs.replace(
        max(rows, key=lambda row: BEST_FIRST.index(row.end)),
        planned=sum(row.planned for row in rows),
        done=sum(row.done for row in rows),
        failed=sum(row.failed for row in rows),
        spent_tokens=max(row.spent_tokens for row in rows),
        computed_tokens=sum(row.computed_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        gave_way=sum(row.gave_way for row in rows),
    )


def shortfall(row: JobRow) -> str:
    """Return what of a hand-over that has ended is missing; empty where the replica may go."""
    if row.end in WHOLE and not row.failed:
        return ""
    what = "not all" if row.done else "nothing"
    why = WHY.get(row.end) or f"{row.failed} prefixes could not be placed"
    return f"{what} was handed over: {why}; {row.done} of {row.planned} prefixes are placed"


def told(row: JobRow) -> str:
    """Return a hand-over in a line."""
    how = f"ended: {row.end}" if row.end else row.state
    return (
        f"hand-over of {row.replica}: {how}, {row.done} of {row.planned} prefixes,"
        f" {row.spent_tokens:,} of {row.budget_tokens:,} tokens"
    )
