"""Spans to an OTLP/HTTP receiver by OpenTelemetry's SDK (the extra ``otel``), in its own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.span import Span
    from router.tracing import TracingSettings

QUEUED_MOST: Final = 8_192
BATCH_MOST: Final = 512
DELAY_MS: Final = 1_000.0
TIMEOUT_S: Final = 5.0
_NS: Final = 1_000_000_000
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_KINDS: Final = {
    "server": SpanKind.SERVER,
    "internal": SpanKind.INTERNAL,
    "client": SpanKind.CLIENT,
}
_SCOPE: Final = InstrumentationScope("warmroute")


class _Counted(SpanExporter):  # type: ignore[misc] # the SDK need not be there to check types
    """The exporter, with counts of what it was given."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; called in the processor's thread only."""
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """End the connection, and retries that wait."""
        self._inner.shutdown()


class OtlpExport:
    """Queues spans for the SDK's thread, which drops the oldest where there are too many."""

    def __init__(self, settings: TracingSettings) -> None:
        self._resource = Resource({"service.name": settings.service})
        self._counted = _Counted(OTLPSpanExporter(endpoint=settings.otlp, timeout=TIMEOUT_S))
        self._processor = BatchSpanProcessor(
            self._counted,
            max_queue_size=QUEUED_MOST,
            schedule_delay_millis=DELAY_MS,
            max_export_batch_size=BATCH_MOST,
        )

    @property
    def exported(self) -> int:
        """Spans that the receiver took."""
        return self._counted.exported

    @property
    def failed(self) -> int:
        """Spans that it did not take."""
        return self._counted.failed

    def add(self, spans: Sequence[Span]) -> None:
        """Take the spans of one request."""
        for span in spans:
            self._processor.on_end(self._readable(span))

    def close(self) -> None:
        """Send the rest."""
        self._processor.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        parent = None
        if span.parent_id is not None:
            parent = _context(span.trace_id, span.parent_id, is_remote=span.kind == "server")
        attributes = dict(span.attributes)
        status = Status(StatusCode.UNSET)
        if span.error is not None:
            attributes["error.type"] = span.error
            status = Status(StatusCode.ERROR)
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id, is_remote=False),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=_KINDS[span.kind],
            status=status,
            start_time=int(span.start_unix_s * _NS),
            end_time=int(span.end_unix_s * _NS),
            instrumentation_scope=_SCOPE,
        )


def _context(trace_id: int, span_id: int, *, is_remote: bool) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=_SAMPLED)
