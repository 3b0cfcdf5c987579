"""Which requests are traced, and where their spans go. Off, it is one comparison a request."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from msgspec import Meta, Struct
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.span import RequestSpans

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric

    from router.account import Call
    from router.span import Span
    from router.trace import DecisionRecord
    from router.trace_context import TraceParent

CLOSE_S: Final = 5.0
"""How long the end of the process may wait for the receiver."""
_PARENT_LINE: Final = re.compile(rb"^traceparent:[^\r\n]*\r\n", re.IGNORECASE | re.MULTILINE)
_log = logging.getLogger(__name__)


class TracingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where spans go: the URL of an OTLP/HTTP receiver's traces; nowhere without ``otlp``.

    ``sample`` is the share that is traced of requests that come without a trace. One whose trace is
    sampled is traced where one of ``limits.trusted_proxies`` sends it; those of other clients, who
    may sample as they like, up to ``parents_per_s``. ``service`` is the name of the router there.
    """

    otlp: Annotated[str, Meta(pattern=r"\Ahttps?://[^\s]+\Z", description="an http URL")] | None = (
        None
    )
    sample: Annotated[float, Meta(ge=0, le=1)] = 0.1
    parents_per_s: Annotated[float, Meta(ge=0)] = 10.0
    service: Annotated[str, Meta(min_length=1, max_length=128)] = "warmroute"


class Export(Protocol):
    """Takes finished spans without a wait; counts what became of them."""

    exported: int
    failed: int

    def add(self, spans: Sequence[Span]) -> None:
        """Take the spans of one request; what there is no room for is dropped."""
        ...

    def close(self) -> None:
        """Send the rest; may block."""
        ...


class Tracing(Collector):
    """Begins and ends the spans of requests that are traced."""

    def __init__(self, settings: TracingSettings, export: Export, rng: random.Random) -> None:
        self._sample = settings.sample
        self._per_s = settings.parents_per_s
        self._allowance = self._most = max(1.0, self._per_s) if self._per_s else 0.0
        self._allowance_s: float | None = None
        self._passed_over = 0
        self._export = export
        self._rng = rng
        self._made = 0

    def begin(self, call: Call, parent: TraceParent | None, *, is_trusted: bool) -> None:
        """Let ``call`` be traced, if it is to be; ``is_trusted``: its sender may ask for it."""
        if parent is None:
            if self._rng.random() >= self._sample:
                return
            trace_id = self._rng.getrandbits(128) | 1
            call.trace_id = f"{trace_id:032x}"
            parent_id = None
        elif parent.is_sampled and (is_trusted or self._may_ask(call.started_s)):
            trace_id, parent_id = int(parent.trace_id, 16), int(parent.span_id, 16)
        else:
            return
        call.spans = RequestSpans(
            trace_id, parent_id, call.started_s, call.started_unix_s - call.started_s, self._draw_id
        )

    def _may_ask(self, now_s: float) -> bool:
        """Return whether another client's wish to be traced is granted."""
        before_s = now_s if self._allowance_s is None else self._allowance_s
        elapsed_s = max(0.0, now_s - before_s)
        self._allowance_s = max(before_s, now_s)
        self._allowance = min(self._most, self._allowance + elapsed_s * self._per_s)
        if self._allowance < 1.0:
            self._passed_over += 1
            return False
        self._allowance -= 1.0
        return True

    def end(self, call: Call, record: DecisionRecord) -> None:
        """Hand over the spans of a request that has ended."""
        if call.spans is not None:
            spans = call.spans.finished(call.method, record)
            self._made += len(spans)
            self._export.add(spans)

    def collect(self) -> Iterable[Metric]:
        """Yield how many spans were made, and how many of them the receiver took or refused."""
        export = self._export
        for name, text, count in (
            ("made", "Spans of requests that were traced.", self._made),
            ("exported", "Spans that the receiver took.", export.exported),
            ("failed", "Spans that it did not take.", export.failed),
        ):
            yield CounterMetricFamily(f"warmroute_spans_{name}", text, value=float(count))
        text = "Requests whose sampled traceparent was over tracing.parents_per_s."
        yield CounterMetricFamily(
            "warmroute_untraced_parents", text, value=float(self._passed_over)
        )

    async def close(self) -> None:
        """Send the rest, for at most ``CLOSE_S``."""
        thread = threading.Thread(target=self._export.close, name="tracing", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)
        if thread.is_alive():
            _log.warning("tracing: the receiver did not take the rest in time")

    def _draw_id(self) -> int:
        return self._rng.getrandbits(64) | 1


def with_parent(lines: bytes, parent_line: bytes) -> bytes:
    """Return header lines with ``parent_line`` in place of the client's own ``traceparent``."""
    return _PARENT_LINE.sub(b"", lines) + parent_line


def open_tracing(settings: TracingSettings, rng: random.Random) -> Tracing | None:
    """Return what the settings ask for, None without a receiver; ImportError without the extra."""
    if settings.otlp is None:
        return None
    export: Export = import_module("router.otlp").OtlpExport(settings)
    return Tracing(settings, export, rng)
