"""What kind of fault an error of the state store is, how often each came, and the alert line."""

from __future__ import annotations

import enum
import ssl
from typing import TYPE_CHECKING, Final

from redis.exceptions import AskError as Redirection
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ExecAbortError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    ResponseError,
    TryAgainError,
)

from state.address import redact
from state.client import STORE_ERRORS, describe, refuses_writes

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator


class Fault(enum.StrEnum):
    """Who ends it."""

    RETRYABLE = "retryable"
    """Time: the server is away, slow, loading, failing over, out of connections."""
    REFUSED = "refused"
    """It is read and takes no writes: full, read-only, without replicas."""
    CONFIG = "config"
    """An operator: it is no such server, or not set up for this."""
    SECURITY = "security"
    """An operator: credentials, rights, certificates."""


_SECURITY: Final = (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    ssl.SSLCertVerificationError,
)
_RETRYABLE: Final = (
    BusyLoadingError,
    ClusterDownError,  # MASTERDOWN is one
    ExecAbortError,
    NoScriptError,
    Redirection,
    TryAgainError,
)
_LASTING: Final = frozenset({Fault.CONFIG, Fault.SECURITY})
_RETRYABLE_CODES: Final = ("BUSY", "UNBLOCKED", "UNKILLABLE")


def classify(error: BaseException) -> Fault:
    """Return the kind of ``error``, by the first of its causes that has one of its own."""
    kinds = (_kind(one) for one in _causes(error))
    unknown = Fault.RETRYABLE if isinstance(error, STORE_ERRORS) else Fault.CONFIG
    return next((kind for kind in kinds if kind is not None), unknown)


def _kind(error: BaseException) -> Fault | None:
    if isinstance(error, _SECURITY):
        return Fault.SECURITY
    if isinstance(error, ssl.SSLError):  # the server may want to see a certificate of ours
        return Fault.SECURITY if "CERTIFICATE" in str(error.reason) else Fault.CONFIG
    if isinstance(error, Exception) and refuses_writes(error):
        return Fault.REFUSED
    if isinstance(error, _RETRYABLE):
        return Fault.RETRYABLE
    if isinstance(error, ResponseError):
        is_busy = str(error).startswith(_RETRYABLE_CODES)
        return Fault.RETRYABLE if is_busy else Fault.CONFIG
    return Fault.CONFIG if isinstance(error, InvalidResponse) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and what it was raised from; the library wraps what a connect raises."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


class FaultBook:
    """Counts faults, and says once per outage and kind what no time ends."""

    __slots__ = ("_log", "_told", "_url", "counts")

    def __init__(self, url: str, log: logging.Logger) -> None:
        self._url = url
        self._log = log
        self._told: set[Fault] = set()
        self.counts: dict[Fault, int] = dict.fromkeys(Fault, 0)

    def note(self, error: Exception) -> None:
        """Count ``error``, and tell an operator what only he can end."""
        fault = classify(error)
        self.counts[fault] += 1
        if fault in _LASTING and fault not in self._told:
            self._told.add(fault)
            where, text = redact(self._url), describe(error)
            self._log.error("state at %s needs an operator (%s): %s", where, fault, text)

    def forget(self) -> None:
        """Tell the next fault again: the store serves."""
        self._told.clear()
