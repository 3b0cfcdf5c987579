from __future__ import annotations

import asyncio

import msgspec
import pytest

from router.upstream import UpstreamSettings
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
    post,
    with_both_loops,
)

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (SSE, chunk(EVENT)),
        (SSE, chunk(EVENT) + b"ff\r\ndata: {"),
        (SSE, chunk(EVENT) + LAST),
        (SSE, chunk(EVENT) + b"zz\r\n"),
        (SSE_CLOSE, EVENT),
        (SSE_CLOSE, EVENT + b"data: {"),
    ],
    ids=["no-end", "short-chunk", "no-done", "bad-chunk", "closed", "closed-in-event"],
)
@with_both_loops
async def test_a_stream_cut_short_says_so_and_never_looks_complete(
    head: bytes, body: bytes
) -> None:
    """F2, U-02, U-03: an error event, no last chunk, the connection closed."""
    async with staged(answering_and_closing(head + body)) as front:
        client = await front.client()
        client.send(post())
        reply = await client.reply()
        assert reply.status == 200
        assert not reply.is_complete
        assert reply.body.startswith(EVENT)
        *_, last, empty = reply.body.split(b"\n\n")
        assert empty == b""
        told = msgspec.json.decode(last.removeprefix(b"data: "))
        assert told["error"]["code"] == "replica_closed"
        assert reply.body.count(b'"error"') == 1
        assert await client.is_closed()
        assert (front.relayed[0].outcome, front.relayed[0].reason) == ("failed", "truncated")
        await front.disconnected()
        await client.close()


@with_both_loops
async def test_a_reset_in_a_stream_is_told_like_any_cut() -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE + chunk(EVENT))
        await asyncio.sleep(0.02)
        talk.reset()

    async with staged(script) as front:
        reply = await front.ask(post())
        assert b'"replica_closed"' in reply.body
        assert not reply.is_complete


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        CHUNKED + chunk(b"short"),
        CHUNKED + b"ff\r\nshort",
        CHUNKED + chunk(b"short") + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\n" + EVENT,
    ],
)
@with_both_loops
async def test_a_body_cut_short_breaks_the_connection(response: bytes) -> None:
    """F2, U-02: no second response, no clean end."""
    async with staged(answering_and_closing(response)) as front:
        client = await front.client()
        client.send(post() + post())
        reply = await client.reply()
        assert not reply.is_complete
        assert b"HTTP/1.1" not in reply.body
        assert await client.is_closed()
        await front.settled()
        assert [done.reason for done in front.relayed] == ["truncated"]
        await client.close()


@with_both_loops
async def test_an_old_client_sees_a_reset_where_the_end_is_the_only_framing() -> None:
    async with staged(answering_and_closing(CHUNKED + chunk(b"short"))) as front:
        reply = await front.ask(b"GET / HTTP/1.0\r\nHost: r\r\n\r\n")
        assert not reply.is_complete


@with_both_loops
async def test_an_engine_that_reports_its_own_death_counts_as_failed() -> None:
    """An engine core that dies sends an error object and then the usual end under a 200."""
    stream = b'data: {"error":{"message":"EngineCore died"}}\n\n' + DONE
    async with staged(answering(SSE + chunk(stream) + LAST)) as front:
        reply = await front.ask(post())
        assert (reply.body, reply.is_complete) == (stream, True)
        assert (front.relayed[0].outcome, front.relayed[0].reason) == ("failed", "error_event")


@pytest.mark.parametrize(("sent", "reason"), [(EVENT, "chunk_idle"), (b"", "first_byte_timeout")])
@with_both_loops
async def test_a_stream_that_falls_silent_is_ended(sent: bytes, reason: str) -> None:
    """U-09; a head without a body does not start the shorter limit between chunks."""
    settings = UpstreamSettings(
        first_byte_timeout_s=10.0 if sent else 1.0, chunk_idle_timeout_s=0.1
    )

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE + (chunk(sent) if sent else b""))
        await talk.until_gone()

    async with staged(script, settings) as front:
        began_s = asyncio.get_running_loop().time()
        reply = await front.ask(post())
        took_s = asyncio.get_running_loop().time() - began_s
        assert b'"replica_closed"' in reply.body
        assert not reply.is_complete
        assert front.relayed[0].reason == reason
        assert took_s > (0.09 if sent else 0.99)


@with_both_loops
async def test_a_ping_keeps_a_stream_alive() -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE)
        for _ in range(8):
            await talk.say(chunk(b": ping\n\n"))
            await asyncio.sleep(0.15)
        await talk.say(chunk(DONE) + LAST)

    async with staged(script, UpstreamSettings(chunk_idle_timeout_s=1.0)) as front:
        assert (await front.ask(post())).is_complete
