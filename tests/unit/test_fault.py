"""What kind of fault an error is, also where the library wrapped it."""

from __future__ import annotations

import logging
import ssl

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from state.fault import Fault, FaultBook, classify


def _tls(reason: str) -> Exception:
    """Return what the library makes of a failed handshake."""
    inner = ssl.SSLError(1, "[SSL] failed")
    inner.reason = reason
    outer = RedisConnectionError("Error 1 connecting")
    outer.__context__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RedisConnectionError("Connection closed by server."), Fault.RETRYABLE),
        (RedisTimeoutError("Timeout reading"), Fault.RETRYABLE),
        (OSError("unreachable"), Fault.RETRYABLE),
        (BusyLoadingError("loading"), Fault.RETRYABLE),
        (MasterDownError("down"), Fault.RETRYABLE),
        (TryAgainError("rehashing"), Fault.RETRYABLE),
        (ResponseError("BUSY running a script"), Fault.RETRYABLE),
        (ResponseError("UNBLOCKED force unblock, instance state changed"), Fault.RETRYABLE),
        (OutOfMemoryError("full"), Fault.REFUSED),
        (ReadOnlyError("replica"), Fault.REFUSED),
        (ResponseError("NOREPLICAS Not enough good replicas"), Fault.REFUSED),
        (ResponseError("unknown command"), Fault.CONFIG),
        (InvalidResponse("Protocol Error"), Fault.CONFIG),
        (TypeError("of a reply that has another shape"), Fault.CONFIG),
        (_tls("WRONG_VERSION_NUMBER"), Fault.CONFIG),
        (_tls("TLSV13_ALERT_CERTIFICATE_REQUIRED"), Fault.SECURITY),
        (AuthenticationError("Authentication required."), Fault.SECURITY),
        (NoPermissionError("no permissions"), Fault.SECURITY),
    ],
)
def test_an_error_has_one_kind(error: Exception, fault: Fault) -> None:
    """R-14."""
    assert classify(error) is fault


def test_what_only_an_operator_ends_is_told_once_until_the_store_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R-14, R-09: one line, without credentials; what time ends has the line of its rung."""
    book = FaultBook("redis://user:hunter2@h:1/0", logging.getLogger("x"))
    for _ in range(5):
        book.note(AuthenticationError("wrong"))
        book.note(RedisTimeoutError("late"))
        book.note(OutOfMemoryError("full"))
    assert [line.levelname for line in caplog.records] == ["ERROR"]
    assert book.counts == {
        Fault.SECURITY: 5,
        Fault.RETRYABLE: 5,
        Fault.REFUSED: 5,
        Fault.CONFIG: 0,
    }
    book.forget()
    book.note(AuthenticationError("wrong"))
    assert len(caplog.records) == 2
    assert "hunter2" not in caplog.text
    assert "redis://h:1/0" in caplog.text
