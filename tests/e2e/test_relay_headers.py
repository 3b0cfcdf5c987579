from __future__ import annotations

import gzip

import pytest

from router.upstream import Endpoint, UpstreamPool, UpstreamSettings
from support.front import staged
from support.raw import (
    DONE,
    answering,
    chunk,
    get,
    post,
    sized,
    with_both_loops,
)

TEXT = "data: {'é': '漢字 🙂'}\n\n".encode() * 3
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
BINARY = bytes(range(256)) * 300


@with_both_loops
async def test_a_compressed_response_passes_as_it_is() -> None:
    """C62, C52: no decoding on the way."""
    packed = gzip.compress(b'{"usage":{"prompt_tokens":1}}')
    response = sized(packed).replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
    async with staged(answering(response)) as front:
        reply = await front.ask(post())
        assert reply.body == packed
        assert reply.all(b"content-encoding") == [b"gzip"]
        assert front.relayed[0].usage is None


@pytest.mark.parametrize(
    "kind", [b"application/json; charset=utf-8", b"text/event-stream; charset=utf-8", b"audio/wav"]
)
@with_both_loops
async def test_the_content_type_passes_as_it_is(kind: bytes) -> None:
    """A38, C53."""
    async with staged(answering(sized(DONE, kind))) as front:
        assert (await front.ask(post())).all(b"content-type") == [kind]


@with_both_loops
async def test_a_multipart_upload_passes_with_its_authorization() -> None:
    """C56, A38."""
    body = b"--b\r\nContent-Disposition: form-data; name=f\r\n\r\n\x00\xff\r\n--b--\r\n"
    extra = b"Authorization: Bearer k\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    async with staged(answering(sized(b"{}"))) as front:
        await front.ask(post(body, extra))
        received = front.replica.requests[0]
        assert received.body == body
        assert received.all(b"authorization") == [b"Bearer k"]
        assert received.all(b"content-type") == [b"multipart/form-data; boundary=b"]


@with_both_loops
async def test_hop_by_hop_headers_end_here_in_both_directions() -> None:
    """A37, H-40, H-45."""
    response = (
        b"HTTP/1.1 200 OK\r\nConnection: X-Secret, keep-alive\r\nX-Secret: 1\r\nServer: a\r\n"
        b"Server: b\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\nDate: x\r\nKeep-Alive: timeout=5\r\n"
        b"Set-Cookie: a=b\r\nTrailer: T\r\nX-Kept: yes\r\nContent-Length: 2\r\n\r\nok"
    )
    extra = b"Connection: x-foo, upgrade\r\nX-Foo: 1\r\nTE: trailers\r\nX-Kept: a\r\nx-kept: b\r\n"
    async with staged(answering(response)) as front:
        reply = await front.ask(post(extra=extra))
        gone = (b"x-secret", b"server", b"keep-alive", b"set-cookie", b"trailer", b"connection")
        assert [name for name in gone if reply.all(name)] == []
        assert reply.all(b"date") == [b"Mon, 01 Jan 2024 00:00:00 GMT"]
        assert reply.all(b"x-kept") == [b"yes"]
        received = front.replica.requests[0]
        assert [name for name in (b"x-foo", b"te", b"connection") if received.all(name)] == []
        assert received.all(b"x-kept") == [b"a", b"b"]


@with_both_loops
async def test_an_offer_of_another_protocol_goes_no_further_and_the_body_does() -> None:
    """H-47: Java's client offers HTTP/2 with its first request, body and all."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
    async with staged(answering(sized(b"ok"))) as front:
        reply = await front.ask(post(b'{"a":1}', offer))
        assert (reply.status, reply.body) == (200, b"ok")
        received = front.replica.requests[0]
        assert received.body == b'{"a":1}'
        gone = (b"connection", b"upgrade", b"http2-settings")
        assert [name for name in gone if received.all(name)] == []


@with_both_loops
async def test_the_replica_sees_the_raw_path_and_its_own_host() -> None:
    """C58, F16: nothing is normalised."""
    async with staged(answering(sized(b"ok"))) as front:
        await front.ask(get("/v1/../x/%2e%2e/y?q=%20a&q=b"))
        received = front.replica.requests[0]
        assert received.line == b"GET /v1/../x/%2e%2e/y?q=%20a&q=b HTTP/1.1"
        assert received.all(b"host") == [front.endpoint.authority.encode()]


@with_both_loops
async def test_a_request_without_extras_gains_only_what_the_router_stands_for() -> None:
    """H-44: no invented User-Agent, Accept or Content-Type."""
    async with staged(answering(sized(b"ok"))) as front:
        await front.ask(get())
        names = [name for name, _ in front.replica.requests[0].headers]
        assert names == [b"Host", b"X-Request-Id", b"X-Forwarded-For"]


@pytest.mark.parametrize("source", [None, Endpoint("10.0.0.9", 8000)])
@with_both_loops
async def test_only_the_router_names_a_source_of_kv_pages(source: Endpoint | None) -> None:
    """C76."""
    extra = (
        b"X-Warmroute-Kv-Source: http://10.6.6.6:1\r\nx-warmroute-kv-source: http://10.6.6.6:2\r\n"
        b"X-Warmroute-Kv-Other: 1\r\nConnection: X-Warmroute-Kv-Source\r\n"
    )
    async with staged(answering(sized(b"ok")), kv_source=source) as front:
        await front.ask(post(extra=extra))
        received = front.replica.requests[0]
        wanted = [] if source is None else [b"http://10.0.0.9:8000"]
        assert received.all(b"x-warmroute-kv-source") == wanted
        names = [name.lower() for name, _ in received.headers]
        assert sum(name.startswith(b"x-warmroute") for name in names) == len(wanted)


@with_both_loops
async def test_the_response_names_the_request_and_carries_the_routers_headers() -> None:
    response = sized(b"ok").replace(b"\r\n", b"\r\nX-Request-Id: theirs\r\nX-Warmroute-A: 0\r\n", 1)
    async with staged(answering(response)) as front:
        front.extra_headers = (("X-Warmroute-Replica", "r1"),)
        reply = await front.ask(post())
        assert reply.all(b"x-request-id") == [b"req-1"]
        assert reply.all(b"x-warmroute-replica") == [b"r1"]
        assert not reply.all(b"x-warmroute-a")
        assert len(reply.all(b"date")) == 1


@with_both_loops
async def test_interim_responses_are_swallowed() -> None:
    """H-50."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with staged(answering(interim + sized(b"ok"))) as front:
        client = await front.client()
        for _ in range(2):
            client.send(post())
            reply = await client.reply()
            assert (reply.status, reply.body, reply.all(b"link")) == (200, b"ok", [])
        assert front.replica.accepted == 1
        await client.close()


@with_both_loops
async def test_trailers_are_dropped() -> None:
    """H-17."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    response = head + chunk(b"abc") + b"0\r\nAuthorization: x\r\n\r\n"
    async with staged(answering(response)) as front:
        client = await front.client()
        for _ in range(2):
            client.send(post())
            reply = await client.reply()
            assert (reply.body, reply.is_complete) == (b"abc", True)
        assert front.replica.accepted == 1
        await client.close()


@with_both_loops
async def test_a_response_without_a_date_gets_the_time_of_now() -> None:
    async with staged(answering(sized(b"ok"))) as front:
        front.pool = UpstreamPool(UpstreamSettings(), wall_clock_s=lambda: 784111777.9)
        reply = await front.ask(post())
        assert reply.all(b"date") == [b"Sun, 06 Nov 1994 08:49:37 GMT"]
        await front.pool.close()
