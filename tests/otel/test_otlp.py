"""Traces of a real router at a real OTLP/HTTP receiver (make test-otel)."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any, Final

import pytest
from aiohttp import web

from support.fleet import FleetPlan, LocalFleet, until
from support.raw import RawClient
from support.stage import Actor, chat_body, post_to
from support.talking import fleet_is_up, talking_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.heavy

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"
WORDS: Final = "CANARY words that no trace may have"


class Receiver:
    """Takes traces as a collector does; ``status`` is what it answers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status = 200
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.bodies.append(body)
        return web.Response(status=self.status, content_type="application/x-protobuf")

    def spans(self) -> list[Any]:
        """Return the spans that came, decoded."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415 - of the extra
            ExportTraceServiceRequest,
        )

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                [service] = [a for a in resource.resource.attributes if a.key == "service.name"]
                assert service.value.string_value == "warmroute-test"
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.url = f"http://{host}:{port}/v1/traces"
    yield made
    await runner.cleanup()


def values(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def run(tmp_path: Path, receiver: Receiver, requests: list[dict[str, str]]) -> list[Any]:
    """Send requests with these headers through a traced router; return what its replica got."""
    actor = Actor("a")
    actor.url = f"http://{(await actor.replica.start()).authority}"
    config: dict[str, Any] = {
        "replicas": [{"url": actor.url, "name": "a"}],
        "attend_sidecars": False,
        "health": {"interval_s": 0.1},
        "tracing": {"otlp": receiver.url, "sample": 0, "service": "warmroute-test"},
    }
    async with LocalFleet(tmp_path, FleetPlan(replicas=0, routers=0)) as fleet:
        config["state"] = {"redis": fleet.state_url}
        async with talking_router(fleet, tmp_path, "router", **config) as router:
            await fleet_is_up(fleet, router)
            client = await RawClient.connect(router.port)
            for headers in requests:
                client.send(post_to(chat_body(WORDS), **headers))
                assert (await client.reply()).status == 200
            await client.close()

            async def is_told() -> bool:
                return bool(receiver.bodies)

            await until(is_told, "spans came", 20)
            counted = await fleet.gauges(router.admin_url)
            assert counted["warmroute_spans_made_total"] == 5
    await actor.replica.stop()
    return actor.posts()


async def test_a_trace_goes_through_the_router_and_shows_what_it_did(
    tmp_path: Path, receiver: Receiver
) -> None:
    """Its own span is the client's child, the replica's parent is the attempt."""
    parent = f"00-{TRACE}-{PARENT}-01"
    unsampled = f"00-{TRACE}-{PARENT}-00"
    sent = await run(
        tmp_path,
        receiver,
        [{"Traceparent": unsampled}, {}, {"Traceparent": parent, "Tracestate": "v=1"}],
    )
    assert not any(b"CANARY" in body for body in receiver.bodies)
    spans = {span.name: span for span in receiver.spans()}
    assert set(spans) == {
        "receive",
        "read",
        "decide",
        "attempt",
        next(n for n in spans if "chat" in n),
    }
    [root] = [span for name, span in spans.items() if name.startswith("chat ")]
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in spans.values() if span is not root} == {root.span_id}
    told = values(root)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"]
    assert told["http.response.status_code"] == 200
    assert values(spans["decide"])["warmroute.replica"] == "a"
    assert all(span.status.code == 0 for span in spans.values()), "nothing failed"
    assert "error.type" not in values(spans["attempt"])
    assert root.start_time_unix_nano <= spans["attempt"].start_time_unix_nano
    assert spans["attempt"].end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
    first, second, third = (one.all(b"traceparent") for one in sent)
    assert first == [unsampled.encode()], "a trace that is not sampled passes unchanged"
    assert second == []
    assert third == [f"00-{TRACE}-{spans['attempt'].span_id.hex()}-01".encode()]
    assert sent[2].all(b"tracestate") == [b"v=1"]


async def test_a_receiver_that_refuses_holds_up_no_request(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.status = 400
    await run(tmp_path, receiver, [{"Traceparent": f"00-{TRACE}-{PARENT}-01"}])
