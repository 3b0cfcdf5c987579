"""What one attempt says of its replica: it works, it is full, it fails, or nothing."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from router.error import (
    NoDescriptorError,
    ReplicaBusyError,
    ReplicaSilentError,
    RouterEndsError,
)
from router.exchange import BUSY_STATUSES

if TYPE_CHECKING:
    from collections.abc import Collection

    from router.error import ReplicaError
    from router.relay import Relayed

BAD_REQUEST: Final = 400
SERVER_ERROR: Final = 500
_NEUTRAL_ENDS: Final = frozenset({"error_event", ReplicaSilentError.code})
"""Engines report bad requests as an event, too; of silence the checks have told."""


class Verdict(enum.Enum):
    """The outcome of an attempt, for its replica."""

    SUCCESS = enum.auto()
    NEUTRAL = enum.auto()
    """The client's fault, or its wish: says nothing of the replica."""
    PRESSURE = enum.auto()
    """It has no room now."""
    FAILURE = enum.auto()


def of_error(error: ReplicaError) -> Verdict:
    """Return what an attempt says that ended before anything reached the client."""
    if isinstance(error, NoDescriptorError | RouterEndsError | ReplicaSilentError):
        return Verdict.NEUTRAL
    return Verdict.PRESSURE if isinstance(error, ReplicaBusyError) else Verdict.FAILURE


def of_relayed(relayed: Relayed, neutral_errors: Collection[str] = ()) -> Verdict:
    """Return what an answer says that was passed on, whole or in part."""
    if relayed.status in BUSY_STATUSES:
        return Verdict.PRESSURE
    if relayed.status >= SERVER_ERROR:
        text = relayed.error_body.decode("utf-8", "replace")
        is_neutral = any(each in text for each in neutral_errors)
        return Verdict.NEUTRAL if is_neutral else Verdict.FAILURE
    if relayed.outcome == "cancelled" or relayed.reason in _NEUTRAL_ENDS:
        return Verdict.NEUTRAL
    if relayed.outcome == "failed":
        return Verdict.FAILURE
    return Verdict.NEUTRAL if relayed.status >= BAD_REQUEST else Verdict.SUCCESS
