"""A client's connection on real sockets: requests, answers, endings."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from router.body import read_body
from router.config import LimitSettings
from router.reply import own_response
from support.corpus.head_row import ROWS
from support.corpus.row import BODY_LIMIT_BYTES, HOST, NEXT, POST, TE, Row
from support.listening import Listening, listening
from support.raw import get, post, with_both_loops

if TYPE_CHECKING:
    from router.client import Answer
    from router.request import Request

SMALL = LimitSettings(body_bytes=BODY_LIMIT_BYTES, head_deadline_s=0.15, body_deadline_s=0.15)


async def statuses(running: Listening, data: bytes, expected: list[Any]) -> list[Any]:
    """Send bytes and return what came back, as the rows tell it; the connection's state last."""
    client = await running.client()
    client.send(data)
    found: list[Any] = []
    for _ in expected:
        reply = await client.reply()
        if reply.status == 200:
            method, target, body = reply.body.split(b" ", 2)
            found.append((method.decode(), target.decode(), body))
        else:
            found.append(reply.status)
            assert reply.all(b"connection") == [b"close"]
            assert msgspec.json.decode(reply.body)["error"]["message"]
    return found


@with_both_loops
async def test_every_row_has_its_outcome_on_a_socket() -> None:
    """Sections 2.1 and 2.2; the connection is over after a refusal, and after no other row."""
    async with listening(LimitSettings(body_bytes=BODY_LIMIT_BYTES)) as running:

        async def check(row: Row) -> None:
            if not row.outcomes:
                return
            found = await statuses(running, row.data, row.outcomes)
            assert found == row.outcomes, row.name

        for row in ROWS:
            await check(row)
        for client in running.clients:
            client.abort()
        await running.until_connections(0)


@with_both_loops
async def test_a_refusal_reaches_a_client_that_goes_on_sending() -> None:
    """L-05: bytes that nobody reads would make the close a reset that destroys the answer."""
    async with listening(LimitSettings(body_bytes=1000)) as running:
        for head in (POST + b"Content-Length: 50000000\r\n\r\n", POST + TE + b"\r\nnonsense\r\n"):
            client = await running.client()
            client.send(head)
            await asyncio.sleep(0.01)
            for _ in range(40):
                client.send(bytes(65536))
                await asyncio.sleep(0.001)
            reply = await client.reply()
            assert (reply.status, reply.is_complete) in {(413, True), (400, True)}
            assert await client.is_closed()
            client.abort()
        await running.until_connections(0)


@with_both_loops
async def test_continue_is_sent_to_those_that_wait_for_it_only() -> None:
    """F3, H-48: not when the body is there, not to HTTP/1.0, not before a refusal."""
    async with listening(LimitSettings(body_bytes=1000)) as running:
        expect = b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        client = await running.client()
        client.send(POST + expect)
        assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"abc")
        assert (await client.reply()).body == b"POST /x abc"
        client.send(POST + expect + b"abc")
        assert (await client.reply()).body == b"POST /x abc"
        for data, status in (
            (POST + b"Expect: 100-continue\r\nContent-Length: 2000\r\n\r\n", 413),
            (POST + b"Expect: 200-ok\r\nContent-Length: 3\r\n\r\n", 417),
        ):
            client = await running.client()
            client.send(data)
            assert (await client.reply()).status == status
        client = await running.client()
        client.send(b"POST /x HTTP/1.0\r\n" + expect)
        await asyncio.sleep(0.02)
        client.send(b"abc")
        assert (await client.reply()).line == b"HTTP/1.0 200 OK"


@with_both_loops
async def test_http10_is_answered_in_its_own_terms() -> None:
    async with listening() as running:
        client = await running.client()
        kept = b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        client.send(kept * 2 + b"GET /x HTTP/1.0\r\n\r\n")
        replies = [await client.reply() for _ in range(3)]
        assert {reply.line for reply in replies} == {b"HTTP/1.0 200 OK"}
        connections = [reply.all(b"connection") for reply in replies]
        assert connections == [[b"keep-alive"], [b"keep-alive"], [b"close"]]
        assert await client.is_closed()


@with_both_loops
async def test_head_has_the_length_of_what_it_does_not_send() -> None:
    async with listening() as running:
        client = await running.client()
        client.send(b"HEAD /x HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT)
        reply = await client.reply(bodiless=True)
        assert reply.all(b"content-length") == [b"8"]
        assert (await client.reply()).body == b"GET /x "


@with_both_loops
async def test_pipelined_answers_keep_their_order_whoever_is_ready_first() -> None:
    """H-19: one at a time, each begun when the one before it is answered."""
    delays_s = {"/1": 0.05, "/2": 0.0, "/3": 0.02}
    at_once = 0

    async def handle(request: Request) -> Answer:
        nonlocal at_once
        at_once += 1
        assert at_once == 1
        await asyncio.sleep(delays_s[request.target])
        at_once -= 1
        return own_response(request.target.encode(), "text/plain")

    async with listening(handle=handle) as running:
        client = await running.client()
        client.send(get("/1") + get("/2") + get("/3"))
        assert [(await client.reply()).body for _ in range(3)] == [b"/1", b"/2", b"/3"]


@pytest.mark.parametrize("count", [1, 3])
@with_both_loops
async def test_a_half_closed_client_gets_what_needs_no_waiting(count: int) -> None:
    """F19: `nc -N` and the like; also when the end comes with the requests."""
    async with listening() as running:
        client = await running.client()
        client.send(post(b"abc") * count)
        client.writer.write_eof()
        for _ in range(count):
            assert (await client.reply()).body == b"POST /v1/chat/completions abc"
        assert await client.is_closed()
        await running.until_connections(0)
        assert running.cancelled == 0


@with_both_loops
async def test_a_half_closed_client_that_would_have_to_wait_is_taken_for_one_that_left() -> None:
    """F5: the same bytes come from a client that closed."""

    async def handle(_: Request) -> Answer:
        await asyncio.sleep(30)
        raise AssertionError

    async with listening(handle=handle) as running:
        client = await running.client()
        client.send(NEXT)
        await running.until_handled(1)
        client.writer.write_eof()
        assert await client.is_closed()
        await running.until_connections(0)
        assert running.cancelled == 1


@with_both_loops
async def test_a_client_that_leaves_amid_its_body_cancels_the_handler() -> None:
    async with listening() as running:
        for number, leave in enumerate(("reset", "close"), 1):
            client = await running.client()
            client.send(POST + b"Content-Length: 10\r\n\r\nabc")
            await running.until_handled(number)
            if leave == "reset":
                sock = client.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.abort()
            await running.until_connections(0)
        assert running.cancelled == 2


@with_both_loops
async def test_a_stopping_server_says_close_and_ends_idle_connections_when_it_closes() -> None:
    """C-20: open requests go on until the deadline, then they are cancelled."""
    gate = asyncio.Event()

    async def handle(request: Request) -> Answer:
        if request.target == "/wait":
            await gate.wait()
        if request.target == "/hang":
            await asyncio.sleep(60)
        return own_response(b"ok", "text/plain")

    async with listening(handle=handle) as running:
        idle, waiting, asking, hanging = [await running.client() for _ in range(4)]
        for client in (idle, asking):
            client.send(NEXT)
            assert (await client.reply()).all(b"connection") == []
        waiting.send(get("/wait"))
        hanging.send(get("/hang"))
        async with asyncio.timeout(20):
            while len(running.handled) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        running.server.stop()
        asking.send(NEXT)
        assert (await asking.reply()).all(b"connection") == [b"close"]
        assert await asking.is_closed()
        gate.set()
        reply = await waiting.reply()
        assert (reply.body, reply.all(b"connection")) == (b"ok", [b"close"])
        closing = asyncio.ensure_future(running.server.close(0.3))
        assert await idle.is_closed()
        await closing
        assert await hanging.is_closed()
        assert (running.cancelled, running.server.open_connections) == (1, 0)


@with_both_loops
async def test_a_handler_that_fails_is_told_to_the_client_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(request: Request) -> Answer:
        await read_body(request, SMALL)
        message = "inner detail"
        raise ZeroDivisionError(message)

    async with listening(handle=handle) as running:
        client = await running.client()
        client.send(post(b"abc"))
        reply = await client.reply()
        assert (reply.status, reply.all(b"connection")) == (500, [b"close"])
        assert b"inner" not in reply.body
        assert "ZeroDivisionError" in caplog.text
        assert await client.is_closed()


@with_both_loops
async def test_many_aborts_leave_nothing_open() -> None:
    async with listening() as running:
        for at in range(200):
            client = await running.client()
            client.send((post(b"abc") * 3)[: at * 2])
            if at % 3 == 0:
                await asyncio.sleep(0.001)
            client.abort()
        await running.until_connections(0)


@with_both_loops
async def test_a_refusal_to_a_client_that_closed_is_no_error() -> None:
    """Its socket answers with a reset, before the router's side of the connection is ended."""
    async with listening() as running:
        for data in (b"nonsense\r\n\r\n", POST + b"Content-Length: 99999999\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", running.port)) as sock:
                sock.sendall(data)
            await asyncio.sleep(0.05)
        await running.until_connections(0)
