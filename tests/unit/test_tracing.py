"""Which requests are traced, the spans that are made of one, and the parent that goes on."""

from __future__ import annotations

import random
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from router.account import Call
from router.config import ConfigError, decode_config
from router.process import _enter_tracing
from router.span import RequestSpans
from router.trace_context import TraceParent
from router.tracing import Tracing, TracingSettings, open_tracing, with_parent
from support.logged import Logging, record_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.span import Span

TRACE, PARENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Kept:
    """Keeps spans; nothing is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.exported = 0
        self.failed = 0
        self.is_closed = False

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        self.is_closed = True


def call() -> Call:
    return Call("r1", None, "/v1/chat/completions", 10.0, 1_010.0)


def tracing(sample: float = 1.0) -> tuple[Tracing, Kept]:
    kept = Kept()
    return Tracing(TracingSettings(sample=sample), kept, random.Random(3)), kept


@pytest.mark.parametrize(("is_sampled", "sample"), [(True, 0.0), (False, 1.0)])
def test_a_request_that_has_a_trace_is_traced_as_that_says(
    is_sampled: bool,  # noqa: FBT001 - a parameter
    sample: float,
) -> None:
    made, _ = tracing(sample)
    one = call()
    one.trace_id = TRACE
    made.begin(one, TraceParent(TRACE, PARENT_SPAN, is_sampled), is_trusted=False)
    assert (one.spans is not None) is is_sampled
    assert one.trace_id == TRACE


def granted(made: Tracing, now_s: float, count: int, *, is_trusted: bool = False) -> int:
    """Return how many of ``count`` sampled requests at one moment are traced."""
    calls = [Call("r1", None, "/v1/chat/completions", now_s, 1_000.0) for _ in range(count)]
    for one in calls:
        made.begin(one, TraceParent(TRACE, PARENT_SPAN, is_sampled=True), is_trusted=is_trusted)
    return sum(one.spans is not None for one in calls)


def test_clients_have_so_many_of_their_requests_traced_in_a_second_and_proxies_all() -> None:
    """Whoever marks each request as sampled would have each cost a trace."""
    made = Tracing(TracingSettings(parents_per_s=5.0), Kept(), random.Random(3))
    assert granted(made, 10.0, 100) == 5
    assert granted(made, 10.0, 100, is_trusted=True) == 100
    assert granted(made, 9.0, 100) == 0
    assert granted(made, 10.5, 100) == 2
    assert granted(made, 1_000.0, 100) == 5
    (passed_over,) = [each for each in made.collect() if each.name == "warmroute_untraced_parents"]
    assert passed_over.samples[0].value == 95 + 100 + 98 + 95


@pytest.mark.parametrize(("per_s", "first"), [(0.0, 0), (0.5, 1)])
def test_none_or_one_in_a_while_can_be_all_that_clients_get(per_s: float, first: int) -> None:
    made = Tracing(TracingSettings(parents_per_s=per_s), Kept(), random.Random(3))
    assert granted(made, 10.0, 10) == first
    assert granted(made, 11.0, 10) == 0
    assert granted(made, 12.0, 10) == first


def test_of_requests_without_a_trace_a_share_begins_one() -> None:
    made, _ = tracing(0.25)
    calls = [call() for _ in range(1_000)]
    for one in calls:
        made.begin(one, None, is_trusted=True)
    traced = [one for one in calls if one.spans is not None]
    assert 180 < len(traced) < 320
    assert len({one.trace_id for one in traced}) == len(traced)
    assert all(one.trace_id is not None and len(one.trace_id) == 32 for one in traced)
    assert all(one.trace_id is None for one in calls if one.spans is None)


@pytest.mark.parametrize("side", ["control", "candidate", None])
def test_the_side_of_a_canary_is_an_attribute_of_the_requests_span(side: str | None) -> None:
    made, kept = tracing()
    one = call()
    made.begin(one, TraceParent(TRACE, PARENT_SPAN, is_sampled=True), is_trusted=True)
    made.end(one, structs.replace(record_of(*Logging().decide(range(100))), side=side))
    assert kept.spans[-1].attributes.get("warmroute.side") == side


def test_the_spans_of_a_request_follow_each_other_below_its_own() -> None:
    made, kept = tracing()
    one = call()
    made.begin(one, TraceParent(TRACE, PARENT_SPAN, is_sampled=True), is_trusted=False)
    spans = one.spans
    assert spans is not None
    [choice], routed = Logging().decide(range(100))
    spans.step("receive", 10.1)
    spans.step("read", 10.2)
    spans.decided(choice, 0.5, "Weighted", "live", 10.8)
    attempt_id, line = spans.begin_attempt(10.9)
    spans.attempted(attempt_id, 11.5, {"warmroute.replica": "a"}, "replica_died")
    record = structs.replace(
        record_of([choice], routed), path="/v1/chat/completions", started_unix_s=1_010.0,
        duration_s=2.0, reported_prompt_tokens=100, reported_cached_tokens=64,
        reported_output_tokens=7,
    )  # fmt: skip
    made.end(one, record)
    times = [
        (span.name, round(span.start_unix_s, 6), round(span.end_unix_s, 6)) for span in kept.spans
    ]
    assert times == [
        ("receive", 1_010.0, 1_010.1),
        ("read", 1_010.1, 1_010.2),
        ("hold", 1_010.2, 1_010.7),
        ("decide", 1_010.7, 1_010.8),
        ("attempt", 1_010.9, 1_011.5),
        ("chat m", 1_010.0, 1_012.0),
    ]
    *inner, root = kept.spans
    assert {span.parent_id for span in inner} == {root.span_id}
    assert root.parent_id == int(PARENT_SPAN, 16)
    assert {span.trace_id for span in kept.spans} == {int(TRACE, 16)}
    assert len({span.span_id for span in kept.spans}) == 6
    assert line == f"traceparent: 00-{TRACE}-{attempt_id:016x}-01\r\n".encode()
    assert inner[-1].error == "replica_died"
    told = root.attributes
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", "m")
    assert told["gen_ai.usage.input_tokens"] == 100
    assert told["gen_ai.usage.output_tokens"] == 7
    assert told["gen_ai.usage.cache_read.input_tokens"] == 64
    assert inner[3].attributes["warmroute.policy"] == "Weighted"
    assert inner[3].attributes["warmroute.reason"] == choice.decision.reason.value
    registry = CollectorRegistry()
    registry.register(made)
    assert registry.get_sample_value("warmroute_spans_made_total") == 6


def test_a_path_that_a_client_made_up_names_no_span() -> None:
    spans = RequestSpans(1, None, 0.0, 0.0, lambda: 5)
    choices, routed = Logging().decide(range(100))
    record = structs.replace(record_of(choices, routed), path="/v1/made-up", status=404)
    [root] = spans.finished("POST", record)
    assert root.name == "POST"
    assert root.error == "404"
    assert "url.path" not in root.attributes


def test_the_clients_own_parent_gives_way_and_nothing_else_does() -> None:
    lines = b"A: b\r\nTraceParent: 00-x\r\nX-Traceparent: keep\r\ntracestate: keep=1\r\n"
    assert with_parent(lines, b"traceparent: new\r\n") == (
        b"A: b\r\nX-Traceparent: keep\r\ntracestate: keep=1\r\ntraceparent: new\r\n"
    )


async def test_the_end_sends_what_is_left() -> None:
    made, kept = tracing()
    await made.close()
    assert kept.is_closed


async def test_without_the_extra_the_key_is_named_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "router.otlp", None)
    config = decode_config({"tracing": {"otlp": "http://127.0.0.1:4318/v1/traces"}})
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"tracing\.otlp: .*warmroute\[otel\]"):
            _enter_tracing(stack, config)


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://x:4317", "http://", "http://a b"])
def test_a_receiver_is_an_http_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.otlp"):
        decode_config({"tracing": {"otlp": url}})


def test_without_a_receiver_nothing_is_traced() -> None:
    assert open_tracing(TracingSettings(), random.Random(1)) is None
