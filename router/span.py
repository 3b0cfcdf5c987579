"""The spans of one request: plain values, made only where it is traced. No prompt text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.chooser import Choice
    from router.trace import DecisionRecord

Attribute = str | int | float | bool
Kind = Literal["server", "internal", "client"]

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""What OpenTelemetry's conventions for generative AI call these paths."""
_CLIENT_ERROR: Final = 400
_DONE: Final = "done"


class Span(Struct, frozen=True):
    """One finished span; times are Unix seconds, ``error`` its ``error.type``."""

    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_id: int | None
    start_unix_s: float
    end_unix_s: float
    attributes: dict[str, Attribute]
    error: str | None = None


class RequestSpans:
    """The spans of a request that is traced, one step after the other.

    ``offset_s`` makes Unix time of the clock's; ``draw_id`` gives ids of 64 bits, never 0.
    """

    __slots__ = (
        "_began_s",
        "_draw_id",
        "_mark_s",
        "_offset_s",
        "_parent_id",
        "root_id",
        "spans",
        "trace_id",
    )

    def __init__(
        self,
        trace_id: int,
        parent_id: int | None,
        started_s: float,
        offset_s: float,
        draw_id: Callable[[], int],
    ) -> None:
        self.trace_id = trace_id
        self.root_id = draw_id()
        self.spans: list[Span] = []
        self._began_s: dict[int, float] = {}
        """Attempts that run: two may at a time."""
        self._parent_id = parent_id
        self._mark_s = started_s
        self._offset_s = offset_s
        self._draw_id = draw_id

    def step(self, name: str, now_s: float, attributes: dict[str, Attribute] | None = None) -> None:
        """Note what took the time since the step before."""
        self._add(name, "internal", self._draw_id(), self._mark_s, now_s, attributes or {})
        self._mark_s = now_s

    def decided(self, choice: Choice, held_s: float, policy: str, rung: str, now_s: float) -> None:
        """Note a decision, and what the request waited in the router before it."""
        if held_s:
            self.step("hold", min(self._mark_s + held_s, now_s))
        decision = choice.decision
        attributes: dict[str, Attribute] = {
            "warmroute.policy": policy,
            "warmroute.reason": decision.reason.value,
            "warmroute.replica": decision.replica,
            "warmroute.candidates": len(decision.candidates),
            "warmroute.predicted_cached_tokens": decision.predicted_cached_tokens,
            "warmroute.state_rung": rung,
        }
        self.step("decide", now_s, attributes)

    def begin_attempt(self, now_s: float) -> tuple[int, bytes]:
        """Return the id of an attempt's span, and the header line that makes it the parent."""
        span_id = self._draw_id()
        self._began_s[span_id] = now_s
        return span_id, b"traceparent: 00-%032x-%016x-01\r\n" % (self.trace_id, span_id)

    def attempted(
        self,
        span_id: int,
        now_s: float,
        attributes: dict[str, Attribute],
        error: str | None,
    ) -> None:
        """Note an attempt that has ended."""
        began_s = self._began_s.pop(span_id)
        self._add("attempt", "client", span_id, began_s, now_s, attributes, error)
        self._mark_s = now_s

    def finished(self, method: str, record: DecisionRecord) -> list[Span]:
        """Return all spans of the request, which has ended so; the request's own is the last."""
        operation = OPERATIONS.get(record.path)
        name = f"{operation} {record.model}" if operation and record.model else operation or method
        error = None
        if record.status >= _CLIENT_ERROR or record.outcome != _DONE:
            error = str(record.status)
        start_unix_s = record.started_unix_s
        self.spans.append(
            Span(
                name,
                "server",
                self.trace_id,
                self.root_id,
                self._parent_id,
                start_unix_s,
                start_unix_s + record.duration_s,
                _told(method, operation, record),
                error,
            )
        )
        return self.spans

    def _add(
        self,
        name: str,
        kind: Kind,
        span_id: int,
        start_s: float,
        end_s: float,
        attributes: dict[str, Attribute],
        error: str | None = None,
    ) -> None:
        offset_s = self._offset_s
        self.spans.append(
            Span(
                name,
                kind,
                self.trace_id,
                span_id,
                self.root_id,
                start_s + offset_s,
                end_s + offset_s,
                attributes,
                error,
            )
        )


def attempt_attributes(choice: Choice, outcome: str, ttft_s: float | None) -> dict[str, Attribute]:
    """Return what is told of an attempt that has ended."""
    told: dict[str, Attribute] = {
        "warmroute.replica": choice.member.replica,
        "server.address": choice.member.endpoint.authority,
        "warmroute.outcome": outcome,
    }
    if ttft_s is not None:
        told["warmroute.ttft_s"] = ttft_s
    return told


def _told(method: str, operation: str | None, record: DecisionRecord) -> dict[str, Attribute]:
    """Return the attributes of a request that are known."""
    told: dict[str, Attribute | None] = {
        "http.request.method": method,
        "url.path": record.path if operation else None,
        "http.response.status_code": record.status,
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.reported_prompt_tokens,
        "gen_ai.usage.output_tokens": record.reported_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.reported_cached_tokens,
        "warmroute.request_id": record.request_id,
        "warmroute.outcome": record.outcome,
        "warmroute.tenant": record.tenant,
        "warmroute.side": record.side,
        "warmroute.prompt_tokens": record.prompt_tokens or None,
        "warmroute.attempts": len(record.attempts),
        "warmroute.ttft_s": record.ttft_s,
    }
    return {name: value for name, value in told.items() if value is not None}
