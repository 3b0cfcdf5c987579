"""Requests that are not admitted: why, as one closed set of labels, and what the client is told.

A shed request has cost a head, at most its body and its tokens, and never a replica's time.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

from router.error import OverloadedError
from router.metrics import Counts
from router.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.admission_setting import Priority


class Shed(enum.StrEnum):
    """Why a request was shed; the same label goes to the error's code, metric, log and trace."""

    QUEUE_FULL = "queue_full"
    """As many wait as may."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It waited as long as it may."""
    INFLIGHT_CAP = "inflight_cap"
    """As many are in flight as may, and nobody waits here."""
    OVERLOAD = "overload"
    """The router process itself is short of memory or time."""
    DRAINING = "draining"
    """The router ends, and nobody will serve what is open here."""
    RATE_REQUESTS = "rate_requests"
    RATE_TOKENS = "rate_tokens"


class ShedError(OverloadedError):
    """A request that is not admitted now."""

    reason: ClassVar[Shed]

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers or {}


class QueueFullError(ShedError):
    """As many requests wait as may."""

    reason = Shed.QUEUE_FULL
    code = Shed.QUEUE_FULL.value


class QueueTimeoutError(ShedError):
    """No place became free in time."""

    reason = Shed.QUEUE_TIMEOUT
    code = Shed.QUEUE_TIMEOUT.value


class InflightCapError(ShedError):
    """All places are taken, and requests do not wait for one."""

    reason = Shed.INFLIGHT_CAP
    code = Shed.INFLIGHT_CAP.value


class RouterOverloadError(ShedError):
    """The router itself is overloaded: this would be refused whoever sent it."""

    reason = Shed.OVERLOAD
    code = Shed.OVERLOAD.value


class LowPriorityShedError(RouterOverloadError):
    """The router is overloaded, and requests of low priority go first."""

    status = 429


class DrainingError(ShedError):
    """The router ends: another one will take the request."""

    reason = Shed.DRAINING
    code = Shed.DRAINING.value


class RequestRateError(ShedError):
    """The tenant asks more often than it may."""

    reason = Shed.RATE_REQUESTS
    status = 429
    type = "rate_limit_exceeded"
    code = "rate_limit_exceeded"


class TokenRateError(RequestRateError):
    """The tenant had more tokens than it may."""

    reason = Shed.RATE_TOKENS


class Sheds:
    """Counts what is shed, by why and by priority."""

    def __init__(self) -> None:
        self._sheds = Tally(
            "warmroute_sheds", "Requests that were not admitted.", ["reason", "priority"]
        )
        self.counts = Counts(self._sheds)

    def note(self, error: ShedError, priority: Priority) -> None:
        """Count a request that was refused with ``error``."""
        self._sheds.add(1, (error.reason.value, priority.value))
