from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from router.error import (
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaProtocolError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from router.upstream import Endpoint, UpstreamSettings, fetch
from support.front import staged
from support.port import free_port
from support.raw import (
    Talk,
    answering,
    answering_and_closing,
    get,
    post,
    sized,
    with_both_loops,
)

if TYPE_CHECKING:
    from router.connection import UpstreamConnection

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"


@with_both_loops
async def test_a_refused_connection_may_be_tried_elsewhere() -> None:
    async with staged(answering(sized(b"ok"))) as front:
        front.endpoint = Endpoint("127.0.0.1", free_port())
        reply = await front.ask(post())
        assert reply.status == 502
        assert msgspec.json.decode(reply.body)["error"]["code"] == "replica_unreachable"
        assert isinstance(front.errors[0], ReplicaUnreachableError)
        assert front.errors[0].can_retry
        await front.disconnected()


@with_both_loops
async def test_a_connection_that_is_never_made_ends_in_time() -> None:
    """A listener with a full backlog leaves the connect hanging."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)  # noqa: FBT003 - the socket API
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        async with staged(answering(b""), UpstreamSettings(connect_timeout_s=0.1)) as front:
            front.endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
            assert (await front.ask(post())).status == 502
            assert isinstance(front.errors[0], ReplicaUnreachableError)
        for filler in fillers:
            filler.close()


@with_both_loops
async def test_a_dead_pooled_connection_is_replayed_once() -> None:
    """F6: the server closes after each response without saying so."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(sized(b"ok"))
        await talk.reader.readexactly(1)  # the next request arrives: die without an answer
        talk.reset()

    async with staged(script) as front:
        for _ in range(4):
            assert (await front.ask(post())).body == b"ok"
        assert front.errors == []
        assert front.replica.accepted == 4


@with_both_loops
async def test_a_replay_that_dies_too_is_not_replayed_again() -> None:
    """A query of death reaches a replica at most twice."""

    async def script(talk: Talk) -> None:
        received = await talk.request()
        if received.body == b"kill":
            return
        await talk.say(sized(b"ok"))
        await talk.request()

    async with staged(script) as front:
        await front.ask(post())
        assert (await front.ask(post(b"kill"))).status == 502
        assert [r.body for r in front.replica.requests] == [b"{}", b"kill", b"kill"]


@with_both_loops
async def test_a_replay_that_is_not_granted_ends_as_the_first_attempt_did() -> None:
    """C-26: a replica that takes each request and closes gets none of them twice."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(sized(b"ok"))
        await talk.request()
        talk.reset()

    asked: list[int] = []

    def may_replay() -> bool:
        asked.append(len(asked))
        return False

    async with staged(script, may_replay=may_replay) as front:
        assert (await front.ask(post())).body == b"ok"
        assert asked == []
        assert (await front.ask(post(b"again"))).status == 502
        assert asked == [0]
        assert isinstance(front.errors[0], ReplicaClosedError)
        assert [r.body for r in front.replica.requests] == [b"{}", b"again"]
        await front.disconnected()


@pytest.mark.parametrize("how", ["close", "reset"])
@with_both_loops
async def test_a_fresh_connection_that_dies_unanswered_is_an_error(how: str) -> None:
    """U-06: the request may be what killed the replica."""

    async def script(talk: Talk) -> None:
        await talk.request()
        if how == "reset":
            talk.reset()

    async with staged(script) as front:
        assert (await front.ask(post())).status == 502
        assert type(front.errors[0]) is ReplicaClosedError
        assert not front.errors[0].can_retry
        assert len(front.replica.requests) == 1


@pytest.mark.parametrize(
    "response",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 700 High\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nabc",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x01b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 4000,
    ],
)
@with_both_loops
async def test_a_response_that_cannot_be_passed_on_is_a_502(response: bytes) -> None:
    """U-01, U-04, U-05, H-47, H-49, H-50."""
    async with staged(answering(response)) as front:
        client = await front.client()
        for _ in range(2):
            client.send(post())
            assert (await client.reply()).status == 502
        assert {type(error) for error in front.errors} == {ReplicaProtocolError}
        await front.disconnected()
        await client.close()


@pytest.mark.parametrize("extra", [EVIL, b"EVIL", b"\r\n\r\nEVIL" + EVIL])
@pytest.mark.parametrize("pause_s", [0, 0.02])
@with_both_loops
async def test_bytes_after_a_response_never_reach_another_request(
    extra: bytes, pause_s: float
) -> None:
    """C77, U-07."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.request()
            if pause_s:
                await talk.say(sized(b"good"))
                await asyncio.sleep(pause_s)
                await talk.say(extra)
            else:
                await talk.say(sized(b"good") + extra)

    async with staged(script) as front:
        client = await front.client()
        for _ in range(4):
            client.send(post())
            assert (await client.reply()).body == b"good"
            await asyncio.sleep(pause_s * 2)
        assert front.replica.accepted == 4
        await client.close()


@with_both_loops
async def test_a_body_on_a_response_to_head_never_reaches_another_request() -> None:
    async with staged(answering(EVIL, sized(b"good"))) as front:
        client = await front.client()
        client.send(b"HEAD / HTTP/1.1\r\nHost: r\r\n\r\n")
        await client.reply(bodiless=True)
        client.send(post())
        assert (await client.reply()).body == b"EVIL"  # a fresh connection, a fresh script
        assert front.replica.accepted == 2
        await client.close()


@with_both_loops
async def test_an_early_response_is_passed_on_while_the_request_still_goes_out() -> None:
    """U-08."""

    async def script(talk: Talk) -> None:
        await talk.reader.readuntil(b"\r\n\r\n")
        await talk.say(sized(b"too large", status=b"413 Payload Too Large"))
        await asyncio.sleep(0.05)

    async with staged(script) as front:
        reply = await front.ask(post(b"x" * 16_000_000))
        assert (reply.status, reply.body) == (413, b"too large")
        assert front.pool.idle_connections == 0


@with_both_loops
async def test_a_status_the_caller_wants_raised_is_not_passed_on() -> None:
    """C65: another replica may be asked before anything reached the client."""
    busy = sized(b"{}", status=b"503 Service Unavailable")
    busy = busy.replace(b"\r\n", b"\r\nRetry-After: 7\r\n", 1)
    async with staged(answering(busy), raised_statuses=frozenset({429, 503})) as front:
        reply = await front.ask(post())
        assert (reply.status, reply.all(b"retry-after")) == (503, [b"7"])
        error = front.errors[0]
        assert isinstance(error, ReplicaBusyError)
        assert (error.replica_status, error.retry_after_s, error.can_retry) == (503, 7, True)
    async with staged(answering(busy)) as front:
        assert (await front.ask(post())).body == b"{}"


@with_both_loops
async def test_a_silent_replica_is_a_504() -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.until_gone()

    async with staged(script, UpstreamSettings(first_byte_timeout_s=0.1)) as front:
        reply = await front.ask(post())
        assert reply.status == 504
        assert isinstance(front.errors[0], ReplicaTimeoutError)
        await front.disconnected()


@with_both_loops
async def test_headers_of_the_replica_cannot_split_the_response() -> None:
    """Line breaks in headers are refused by the parser or by the writer, never written."""
    for value in (b"a\r\n\r\nHTTP/1.1 200 OK", b"a\n\nevil", b"a\r\r\nevil: 1"):
        response = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + value + b"\r\n\r\n"
        async with staged(answering(response)) as front:
            reply = await front.ask(post())
            assert b"evil" not in reply.body + b"".join(name for name, _ in reply.headers)
            assert not with_line_breaks(reply.headers)


def with_line_breaks(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return header values that hold a line break."""
    return [value for _, value in headers if b"\n" in value or b"\r" in value]


@with_both_loops
async def test_a_header_of_the_router_cannot_split_the_response_either() -> None:
    async with staged(answering(sized(b"ok"))) as front:
        front.extra_headers = (("X-Warmroute-A", "a\r\nEvil: 1"),)
        assert (await front.ask(get())).status == 502


@with_both_loops
async def test_fetch_reports_every_fault_as_a_replica_error() -> None:
    async def silent(talk: Talk) -> None:
        await talk.request()
        await talk.until_gone()

    async with staged(silent) as front:
        with pytest.raises(ReplicaTimeoutError):
            await fetch(front.endpoint, "/health", front.pool, 0.05)
        with pytest.raises(ReplicaUnreachableError):
            await fetch(Endpoint("127.0.0.1", free_port()), "/health", front.pool, 1)
        await front.disconnected()
    async with staged(answering_and_closing(b"")) as front:
        with pytest.raises(ReplicaClosedError):
            await fetch(front.endpoint, "/health", front.pool, 1)
    big = b"x" * (5 * 1024 * 1024)
    async with staged(answering(sized(big))) as front:
        with pytest.raises(ReplicaProtocolError):
            await fetch(front.endpoint, "/v1/models", front.pool, 1)


@with_both_loops
async def test_a_pooled_connection_that_is_closing_is_replaced() -> None:
    """The loop closes the transport at the end of file and tells of the loss a turn later."""
    async with staged(answering(sized(b"ok"))) as front:
        assert (await front.ask(get())).status == 200
        async with asyncio.timeout(20):
            while not front.pool.idle_connections:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.001)
        take = front.pool.take

        def take_closing(endpoint: Endpoint) -> UpstreamConnection | None:
            connection = take(endpoint)
            if connection is not None and connection.transport is not None:
                connection.transport.close()
            return connection

        front.pool.take = take_closing  # type: ignore[method-assign]
        assert (await front.ask(get())).status == 200
        assert front.replica.accepted == 2
