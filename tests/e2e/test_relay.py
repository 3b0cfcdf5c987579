from __future__ import annotations

import asyncio

import msgspec
import pytest

from router.observer import Usage
from router.upstream import UpstreamSettings, fetch
from support.front import staged
from support.raw import (
    DONE,
    LAST,
    SSE,
    SSE_CLOSE,
    Talk,
    answering,
    answering_and_closing,
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
async def test_a_sized_response_passes_byte_for_byte_with_its_length() -> None:
    """H-46."""
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":2}}'
    async with staged(answering(sized(body))) as front:
        reply = await front.ask(post(b'{"a":1}'))
        assert (reply.line, reply.body) == (b"HTTP/1.1 200 OK", body)
        assert reply.all(b"content-length") == [b"%d" % len(body)]
        assert not reply.all(b"transfer-encoding")
        assert front.replica.requests[0].body == b'{"a":1}'
        assert front.relayed[0].usage == Usage(5, 2, None)
        assert front.relayed[0].outcome == "done"
        assert front.relayed[0].body_bytes == len(body)
        assert front.first_bytes == 1


@pytest.mark.parametrize("step_bytes", [1, 2, 3, 7, 64, 100_000])
@with_both_loops
async def test_a_stream_is_the_same_however_it_is_cut(step_bytes: int) -> None:
    """A33: characters, events and chunk frames split at any byte."""
    stream = b"".join(chunk(part) for part in (TEXT, USAGE, DONE)) + LAST

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say_slowly(SSE + stream, step_bytes)
        await talk.until_gone()

    async with staged(script) as front:
        reply = await front.ask(post())
        assert reply.body == TEXT + USAGE + DONE
        assert reply.is_complete
        assert reply.all(b"content-type") == [b"text/event-stream"]
        done = front.relayed[0]
        assert (done.outcome, done.is_done_seen) == ("done", True)
        assert done.usage == Usage(7, 3, 4)


@pytest.mark.parametrize("chunk_bytes", [1, 5, 4096, 65536])
@with_both_loops
async def test_large_bodies_in_chunks_of_any_size_pass_unchanged(chunk_bytes: int) -> None:
    body = BINARY[: 3000 if chunk_bytes < 10 else None]
    parts = (body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with staged(answering(head + b"".join(map(chunk, parts)) + LAST)) as front:
        reply = await front.ask(post())
        assert reply.body == body
        assert reply.is_complete


@with_both_loops
async def test_a_large_request_reaches_the_replica_whole() -> None:
    body = BINARY * 10
    async with staged(answering(sized(b"ok"))) as front:
        assert (await front.ask(post(body))).body == b"ok"
        assert front.replica.requests[0].body == body


@with_both_loops
async def test_one_event_is_not_held_back_for_the_next() -> None:
    """U-11: a ping reaches the client while the replica says nothing more."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE + chunk(b": ping\n\n"))
        await talk.until_gone()

    async with staged(script) as front:
        client = await front.client()
        client.send(post())
        async with asyncio.timeout(20):
            await client.reader.readuntil(b": ping\n\n\r\n")
        await client.close()
        await front.settled()


@with_both_loops
async def test_both_sides_keep_their_connections() -> None:
    async with staged(answering(sized(b"1"), sized(b"2"), sized(b"3"))) as front:
        client = await front.client()
        for expected in (b"1", b"2", b"3"):
            client.send(post())
            assert (await client.reply()).body == expected
        assert front.replica.accepted == 1
        assert (front.pool.open_connections, front.pool.idle_connections) == (1, 1)
        await client.close()


@with_both_loops
async def test_streams_keep_their_connections_too() -> None:
    async with staged(answering(SSE + chunk(DONE) + LAST)) as front:
        client = await front.client()
        for _ in range(3):
            client.send(post())
            assert (await client.reply()).body == DONE
        assert front.replica.accepted == 1
        await client.close()


@with_both_loops
async def test_pipelined_requests_are_answered_in_their_order() -> None:
    """H-19."""

    async def script(talk: Talk) -> None:
        while True:
            received = await talk.request()
            await asyncio.sleep(0.03 if received.body == b"1" else 0)
            await talk.say(sized(received.body * 2))

    async with staged(script) as front:
        client = await front.client()
        client.send(post(b"1") + post(b"2") + post(b"3"))
        assert [(await client.reply()).body for _ in range(3)] == [b"11", b"22", b"33"]
        await client.close()


@with_both_loops
async def test_head_gets_the_length_and_no_body() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"
    async with staged(answering(head)) as front:
        client = await front.client()
        for _ in range(2):
            client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
            reply = await client.reply(bodiless=True)
            assert reply.all(b"content-length") == [b"1234"]
        await client.close()


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@with_both_loops
async def test_responses_without_a_body_have_no_framing(status: bytes) -> None:
    """H-49."""
    async with staged(answering(b"HTTP/1.1 %b\r\nETag: x\r\n\r\n" % status)) as front:
        client = await front.client()
        for _ in range(2):
            client.send(get())
            reply = await client.reply(bodiless=True)
            assert reply.line == b"HTTP/1.1 " + status
            assert not reply.all(b"transfer-encoding")
            assert not reply.all(b"content-length")
        await client.close()


@with_both_loops
async def test_an_old_client_gets_no_chunks() -> None:
    async with staged(answering(SSE + chunk(TEXT) + chunk(DONE) + LAST)) as front:
        reply = await front.ask(b"GET /v1/x HTTP/1.0\r\nHost: r\r\n\r\n")
        assert reply.line == b"HTTP/1.0 200 OK"
        assert reply.body == TEXT + DONE
        assert not reply.all(b"transfer-encoding")
        assert reply.all(b"connection") == [b"close"]


@with_both_loops
async def test_an_old_client_may_keep_its_connection_when_the_length_is_known() -> None:
    async with staged(answering(sized(b"abc"))) as front:
        client = await front.client()
        for _ in range(2):
            client.send(b"GET /v1/x HTTP/1.0\r\nHost: r\r\nConnection: keep-alive\r\n\r\n")
            reply = await client.reply()
            assert (reply.body, reply.all(b"connection")) == (b"abc", [b"keep-alive"])
        await client.close()


@with_both_loops
async def test_a_client_that_asks_for_close_gets_it() -> None:
    async with staged(answering(sized(b"abc"))) as front:
        client = await front.client()
        client.send(post(extra=b"Connection: close\r\n"))
        reply = await client.reply()
        assert (reply.body, reply.all(b"connection")) == (b"abc", [b"close"])
        assert await client.is_closed()
        await client.close()


@with_both_loops
async def test_a_draining_router_ends_the_connection_after_the_response() -> None:
    async with staged(answering(sized(b"abc")), allows_keep_alive=False) as front:
        client = await front.client()
        client.send(post())
        assert (await client.reply()).all(b"connection") == [b"close"]
        assert await client.is_closed()
        await client.close()


@with_both_loops
async def test_a_stream_that_ends_with_its_connection_is_whole_when_it_said_done() -> None:
    async with staged(answering_and_closing(SSE_CLOSE + TEXT + DONE)) as front:
        client = await front.client()
        for _ in range(2):
            client.send(post())
            reply = await client.reply()
            assert (reply.body, reply.is_complete) == (TEXT + DONE, True)
        await client.close()


@with_both_loops
async def test_a_done_marker_inside_content_is_not_the_end() -> None:
    """A34."""
    content = b'data: {"content":"data: [DONE]"}\r\n\r\n: ping\r\n\r\ndata:[DONE]\r\n\r\n'

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say_slowly(SSE + chunk(content) + LAST, 5)
        await talk.until_gone()

    async with staged(script) as front:
        reply = await front.ask(post())
        assert (reply.body, reply.is_complete) == (content, True)
        assert front.relayed[0].is_done_seen


@with_both_loops
async def test_an_api_without_a_done_marker_is_not_held_to_one() -> None:
    stream = SSE + chunk(b"event: response.completed\ndata: {}\n\n") + LAST
    async with staged(answering(stream), done_marker=None) as front:
        assert (await front.ask(post())).is_complete
        assert front.relayed[0].outcome == "done"


@pytest.mark.parametrize("body", [b"{}", b"", b"[]", b'{"usage":"x"}', b'{"usage":{"prompt_tok'])
@with_both_loops
async def test_unexpected_bodies_pass_and_tell_no_usage(body: bytes) -> None:
    """C61."""
    async with staged(answering(sized(body))) as front:
        assert (await front.ask(post())).body == body
        assert front.relayed[0].usage is None


@with_both_loops
async def test_many_streams_to_one_replica_run_at_once() -> None:
    """A46: no ceiling of 100 connections."""
    count = 1000
    gate = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE + chunk(b"data: 1\n\n"))
        if talk.replica.accepted == count:
            gate.set()
        await gate.wait()
        await talk.say(chunk(DONE) + LAST)
        await talk.until_gone()

    async with staged(script, UpstreamSettings(connect_timeout_s=10)) as front:
        async with asyncio.timeout(100):
            replies = await asyncio.gather(*(front.ask(post()) for _ in range(count)))
        assert {reply.body for reply in replies} == {b"data: 1\n\n" + DONE}
        assert front.replica.accepted == count
        await front.settled()


@with_both_loops
async def test_fetch_gets_small_resources_on_the_same_pool() -> None:
    async with staged(answering(sized(b'{"data":[]}'))) as front:
        for _ in range(2):
            status, _, body = await fetch(front.endpoint, "/v1/models", front.pool, 1)
            assert (status, msgspec.json.decode(body)) == (200, {"data": []})
        assert front.replica.accepted == 1


@with_both_loops
async def test_idle_connections_are_closed_before_the_engine_does() -> None:
    """F6."""
    async with staged(answering(sized(b"ok")), UpstreamSettings(pool_idle_s=0.05)) as front:
        await front.ask(post())
        assert front.pool.idle_connections == 1
        async with asyncio.timeout(20):
            while front.pool.open_connections or front.replica.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await front.ask(post())).body == b"ok"
