"""Which failed attempts may be followed by another one: the decision table, pure.

Nothing that reached a client is ever tried again. What may have been begun by a replica is tried
again once at most; a connection that was never made costs nothing and does not count.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from prompt.lane import LARGE_BODY_BYTES
from prompt.reader import RESPONSE_PATH
from router.error import (
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaDiedError,
    ReplicaError,
    ReplicaSilentError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from router.server import LOAD_PATHS, PREFIX_PATHS

if TYPE_CHECKING:
    from router.retry_setting import AfterSend

MAX_ATTEMPTS: Final = 3
"""Of one request, connections that were never made included."""
BUSY_WAIT_S: Final = 1
"""A busy replica that asks for more patience than this is believed: its answer is passed on."""


class RetryReason(enum.StrEnum):
    """Why a request was tried again; a label of the metric."""

    UNREACHABLE = "unreachable"
    DIED = "died"
    CLOSED = "closed"
    BUSY = "busy"
    SILENT = "silent"
    TIMEOUT = "first_byte_timeout"


class Denial(enum.StrEnum):
    """Why one that might have been was not; a label of the metric."""

    BUDGET = "budget"
    DEADLINE = "deadline"
    ATTEMPTS = "attempts"
    UNREPEATABLE = "unrepeatable"
    NO_REPLICA = "no_replica"


_AFTER_SEND: Final = (
    (ReplicaDiedError, RetryReason.DIED, ("dead", "always")),
    (ReplicaSilentError, RetryReason.SILENT, ("dead", "always")),
    (ReplicaTimeoutError, RetryReason.TIMEOUT, ("dead", "always")),
    (ReplicaClosedError, RetryReason.CLOSED, ("always",)),
)
"""The first one that fits counts."""
LOST: Final = frozenset({RetryReason.UNREACHABLE, RetryReason.DIED, RetryReason.SILENT})


def reason_of(error: ReplicaError, after_send: AfterSend) -> RetryReason | None:
    """Return why the error allows another try; None where it does not."""
    if isinstance(error, ReplicaUnreachableError):
        return RetryReason.UNREACHABLE
    if isinstance(error, ReplicaBusyError):
        return RetryReason.BUSY
    for kind, reason, settings in _AFTER_SEND:
        if isinstance(error, kind):
            return reason if after_send in settings else None
    return None


def denial_of(
    reason: RetryReason, attempts: int, *, was_sent: bool, is_repeatable: bool
) -> Denial | None:
    """Return why another try is out of the question whatever the budget; None where it is not.

    ``was_sent``: an earlier attempt had reached a replica, too.
    """
    if reason is not RetryReason.UNREACHABLE:
        if not is_repeatable:
            return Denial.UNREPEATABLE
        if was_sent:
            return Denial.ATTEMPTS
    return Denial.ATTEMPTS if attempts >= MAX_ATTEMPTS else None


class _Tool(Struct, frozen=True):
    type: str = ""


class _Effects(Struct, frozen=True):
    """What makes a Responses call more than a computation."""

    store: bool | None = None
    background: bool | None = None
    tools: list[_Tool] | None = None


_KNOWN_PATHS: Final = PREFIX_PATHS | LOAD_PATHS
_decoder = msgspec.json.Decoder(_Effects)


def is_repeatable(path: str, body: bytes, choices: int) -> bool:
    """Return whether a second run of the request does no more than cost compute once more.

    Several choices cost several times as much. What a path that is only passed through does is not
    known. In the Responses API an engine may keep the answer, or call tools itself; in the others
    tools are declarations, and the client calls them.
    """
    if choices > 1 or path not in _KNOWN_PATHS:
        return False
    if path != RESPONSE_PATH:
        return True
    if len(body) > LARGE_BODY_BYTES:  # reading it takes too long to ask this only
        return False
    try:
        effects = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    calls_tools = any(tool.type != "function" for tool in effects.tools or ())
    return not (effects.store or effects.background or calls_tools)
