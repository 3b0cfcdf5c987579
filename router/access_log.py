"""The access log: one JSON line for each inference request that ended. No prompt text, no keys.

A request is logged when it is drawn, when it did not end well and when it was slow. Nothing waits
for the file: what it does not take in time is dropped and counted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.line_log import LineLog
from router.log_file import LogFile

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

    from router.account import Call
    from router.trace import DecisionRecord

STDERR: Final = "stderr"
_DONE: Final = "done"
_CLIENT_ERROR: Final = 400
_NO_HEADER: Final = b""


class AccessLogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where requests are logged: a file, ``stderr``, or nowhere without ``path``.

    ``sample`` is the share of good requests that is logged; all that did not end well are, and with
    ``slow_ms`` those that took at least so long. Files rotate as those of decisions do.
    """

    path: str | None = None
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    slow_ms: Annotated[float, Meta(gt=0)] | None = None
    max_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    keep_files: Annotated[int, Meta(ge=1, le=1_000)] = 4


class AccessLine(Struct, frozen=True):
    """One request. Unknown is null. Made by place; ``unix_s`` is when it arrived.

    ``status`` 499: the client left first. Tokens are what the engine counted, ``prompt_tokens``
    what the router did where the engine told nothing. ``error`` is why the last attempt did not end
    well. Bytes are those of bodies. ``side`` is that of a canary, where there is one.
    """

    unix_s: float
    request_id: str
    client_request_id: str | None
    trace_id: str | None
    method: str
    path: str
    model: str | None
    tenant: str | None
    replica: str | None
    reason: str | None
    status: int
    outcome: str
    error: str | None
    ttft_s: float | None
    held_s: float
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    predicted_cached_tokens: int | None
    output_tokens: int | None
    attempts: int
    request_bytes: int | None
    response_bytes: int | None
    side: str | None = None


class StandardError:
    """The process's standard error, as a place for lines."""

    def write(self, lines: bytes) -> None:
        """Write all of ``lines``, however long the reader takes; raises OSError."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(sys.stderr.fileno(), rest) :]

    def close(self) -> None:
        """Leave it open: it is not ours."""


class AccessLog(Collector):
    """Takes ended requests on the event loop; ``lines`` writes them, until it is closed."""

    def __init__(
        self, settings: AccessLogSettings, lines: LineLog, draw: Callable[[], float]
    ) -> None:
        self.lines = lines
        self._sample = settings.sample
        self._slow_s = None if settings.slow_ms is None else settings.slow_ms / 1000.0
        self._draw = draw

    def collect(self) -> Iterable[Metric]:
        """Yield what was written and what was lost."""
        for name, text, count in (
            ("written", "Requests written to the access log.", self.lines.written),
            ("dropped", "Requests that the access log could not take.", self.lines.dropped),
        ):
            yield CounterMetricFamily(f"warmroute_access_log_{name}", text, value=float(count))

    def note(self, call: Call, record: DecisionRecord) -> None:
        """Log one request that ended, where it is to be."""
        if self._is_wanted(record) and self.lines.has_room():
            self.lines.append(line_of(call, record))

    def _is_wanted(self, record: DecisionRecord) -> bool:
        if record.outcome != _DONE or record.status >= _CLIENT_ERROR:
            return True
        if self._slow_s is not None and record.duration_s >= self._slow_s:
            return True
        return self._sample >= 1.0 or self._draw() < self._sample


def line_of(call: Call, record: DecisionRecord) -> AccessLine:
    """Return what is logged of a request."""
    last = record.attempts[-1] if record.attempts else None
    decision = last.decision if last is not None else None
    prompt_tokens = record.reported_prompt_tokens
    if prompt_tokens is None and record.prompt_tokens:
        prompt_tokens = record.prompt_tokens
    return AccessLine(
        record.started_unix_s,
        record.request_id,
        record.client_request_id,
        record.trace_id,
        call.method,
        record.path,
        record.model,
        record.tenant,
        decision.replica if decision is not None else None,
        decision.reason.value if decision is not None else None,
        record.status,
        record.outcome,
        last.error if last is not None and last.outcome != _DONE else None,
        record.ttft_s,
        record.held_s,
        record.duration_s,
        prompt_tokens,
        record.reported_cached_tokens,
        decision.predicted_cached_tokens if decision is not None else None,
        record.reported_output_tokens,
        len(record.attempts),
        call.body_bytes,
        call.relayed.body_bytes if call.relayed is not None else None,
        record.side,
    )


def open_access_log(
    settings: AccessLogSettings, *, clock: Callable[[], float], rng: random.Random
) -> AccessLog | None:
    """Return the log that the settings ask for; None without a path."""
    if settings.path is None:
        return None
    name = "access log"
    if settings.path == STDERR:
        lines = LineLog(name, STDERR, StandardError(), clock)
    else:
        path = Path(settings.path)
        file = LogFile(path, _NO_HEADER, settings.max_bytes, settings.keep_files)
        lines = LineLog(name, str(path), file, clock)
    return AccessLog(settings, lines, rng.random)
