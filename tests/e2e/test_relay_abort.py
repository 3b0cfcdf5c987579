from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from router.reply import own_response
from router.upstream import UpstreamSettings
from support.front import staged
from support.raw import (
    DONE,
    LAST,
    SSE,
    RawClient,
    Talk,
    answering,
    chunk,
    post,
    sized,
    with_both_loops,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from router.client import Answer
    from router.request import Request
    from support.front import Front

EVENT = b'data: {"choices":[]}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"


def saying_then_waiting(first: bytes) -> Callable[[Talk], Awaitable[None]]:
    """Return a script that begins an answer and then computes for ever."""

    async def script(talk: Talk) -> None:
        await talk.request()
        if first:
            await talk.say(first)
        await talk.until_gone()

    return script


async def until_abort_arrives(front: Front) -> int:
    """Return how many looks, a millisecond apart, found the replica's connection open."""
    looks = 0
    async with asyncio.timeout(20):
        while front.replica.open:
            looks += 1
            await asyncio.sleep(0.001)
    return looks


@pytest.mark.parametrize(
    "first",
    [b"", SSE + chunk(EVENT), b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf"],
    ids=["before-the-head", "between-tokens", "in-a-plain-body"],
)
@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
@with_both_loops
async def test_a_replica_sees_at_once_that_the_client_left(first: bytes, how: str) -> None:
    """F5, F19, A29, A30, A31, C10: within 100 ms, wherever the response is."""
    async with staged(saying_then_waiting(first)) as front:
        client = await front.client()
        client.send(post())
        if first:
            await client.reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(20):
            while not front.replica.requests:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.001)
        assert (front.replica.open, len(front.in_flight)) == (1, 1)
        if how == "half-close":
            client.writer.write_eof()
        elif how == "close":
            client.writer.close()
        else:
            client.abort()
        assert await until_abort_arrives(front) < 100
        await front.settled()
        await front.disconnected()
        assert front.cancelled == 1
        assert front.errors == []


@with_both_loops
async def test_a_client_that_leaves_during_the_connect_leaves_nothing_behind() -> None:
    async with staged(saying_then_waiting(b"")) as front:
        for _ in range(50):
            client = await front.client()
            client.send(post())
            await asyncio.sleep(0)
            client.abort()
        await front.settled()
        await front.disconnected()
        async with asyncio.timeout(20):
            while front.replica.open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@with_both_loops
async def test_four_hundred_aborts_leave_no_connection_lease_or_task() -> None:
    """A18, A27, C01: at every point of a stream, and everything is counted back once."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE)
        for _ in range(20):
            await talk.say(chunk(EVENT))
            await asyncio.sleep(0.001)
        await talk.say(chunk(DONE) + LAST)
        await talk.until_gone()

    async def leave(client: RawClient, after_s: float) -> None:
        client.send(post())
        await asyncio.sleep(after_s)
        client.abort()

    async with staged(script, UpstreamSettings(connect_timeout_s=60, pool_idle_s=0.01)) as front:
        tasks = len(asyncio.all_tasks())
        for _ in range(4):
            clients = [await front.client() for _ in range(100)]
            leaving = (leave(client, at * 0.0005) for at, client in enumerate(clients))
            await asyncio.gather(*leaving)
        await front.settled()
        await front.disconnected()
        await until_abort_arrives(front)
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert front.errors == []
        assert front.cancelled + len(front.relayed) <= 400
        assert front.first_bytes <= front.cancelled + len(front.relayed)


@with_both_loops
async def test_both_sides_ending_at_once_settle_once() -> None:
    """C04: the replica's error, its end and the client's leaving come together."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE + chunk(EVENT))
        await asyncio.sleep(0.01)
        talk.reset()

    async with staged(script) as front:
        for at in range(60):
            client = await front.client()
            client.send(post())
            await client.reader.readuntil(EVENT)
            await asyncio.sleep(0.009 + at * 0.00005)
            client.abort()
        await front.settled()
        await front.disconnected()
        assert front.cancelled + len(front.relayed) == 60


@with_both_loops
async def test_a_cancelled_handler_cuts_the_client_off_when_the_response_had_begun() -> None:
    """A caller's own deadline must not be followed by a second response."""
    async with staged(saying_then_waiting(SSE + chunk(EVENT))) as front:
        inner = front.handle

        async def impatient(request: object) -> object:
            try:
                async with asyncio.timeout(0.05):
                    return await inner(request)  # type: ignore[arg-type]
            except TimeoutError:
                return own_response(b"", "text/plain", status=504)

        front.handler = impatient
        client = await front.client()
        client.send(post())
        reply = await client.reply()
        assert (reply.body, reply.is_complete) == (EVENT, False)
        assert await client.is_closed()
        assert await until_abort_arrives(front) < 100


@with_both_loops
async def test_a_handler_that_fails_after_the_relay_sends_no_second_response() -> None:
    """F2: an error page never lands in a response that was written."""
    async with staged(answering(sized(b"ok"))) as front:
        inner = front.handle

        async def broken(request: object) -> object:
            await inner(request)  # type: ignore[arg-type]
            message = "a fault of ours"
            raise RuntimeError(message)

        front.handler = broken
        client = await front.client()
        client.send(post())
        assert (await client.reply()).body == b"ok"
        assert await client.is_closed()


@with_both_loops
async def test_a_slow_reader_holds_the_replica_back_and_costs_no_memory() -> None:
    """A42: what waits in the router stays below the high-water mark and one read."""
    total_bytes = 24 * 1024 * 1024
    block = bytes(64 * 1024)
    sent_bytes = 0

    async def script(talk: Talk) -> None:
        nonlocal sent_bytes
        await talk.request()
        await talk.say(CHUNKED)
        for _ in range(total_bytes // len(block)):
            await talk.say(chunk(block))
            sent_bytes += len(block)
        await talk.say(LAST)
        await talk.until_gone()

    async with staged(script) as front:
        client = await RawClient.connect(front.port, limit_bytes=4096)
        client.send(post())
        await client.reader.readexactly(100)
        gc.collect()
        tracemalloc.start()
        held_bytes, peak_unsent_bytes = -1, 0
        while held_bytes != sent_bytes or not peak_unsent_bytes:  # until the replica is held back
            held_bytes = sent_bytes
            await asyncio.sleep(0.1)
            transport = front.connections[0].transport
            peak_unsent_bytes = max(peak_unsent_bytes, transport.get_write_buffer_size())
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held_bytes < total_bytes
        assert 0 < peak_unsent_bytes < 600 * 1024
        assert peak_bytes < 2 * 1024 * 1024
        async with asyncio.timeout(20):
            got_bytes = 0
            while got_bytes < total_bytes:
                got_bytes += len(await client.reader.read(2**20))
        await front.settled()
        assert front.relayed[0].body_bytes == total_bytes
        assert front.relayed[0].outcome == "done"
        client.abort()


@with_both_loops
async def test_a_client_that_reads_nothing_is_given_up() -> None:
    """L-04: both connections go, the lease comes back."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(CHUNKED)
        while True:
            await talk.say(chunk(bytes(65536)))

    async with staged(script, UpstreamSettings(write_stall_timeout_s=0.2)) as front:
        client = await RawClient.connect(front.port, limit_bytes=4096)
        client.send(post())
        await front.begun()
        await front.settled()
        await front.disconnected()
        assert [(done.outcome, done.reason) for done in front.relayed] == [
            ("cancelled", "write_stall")
        ]
        client.abort()


@with_both_loops
async def test_a_stalled_client_is_given_up_also_when_the_replica_is_done() -> None:
    async with staged(
        answering(sized(bytes(16 * 1024 * 1024))), UpstreamSettings(write_stall_timeout_s=0.2)
    ) as front:
        client = await RawClient.connect(front.port, limit_bytes=4096)
        client.send(post())
        await front.begun()
        await front.settled()
        assert front.relayed[0].reason == "write_stall"
        client.abort()


@with_both_loops
async def test_a_client_that_reads_slowly_is_not_taken_for_one_that_reads_nothing() -> None:
    """A42: one pause lasts longer than the stall limit, and bytes move in it."""
    total_bytes = 600 * 1024
    settings = UpstreamSettings(write_stall_timeout_s=1.2)
    async with staged(answering(sized(bytes(total_bytes))), settings) as front:
        inner = front.handle

        async def with_small_buffer(request: Request) -> Answer:
            sock = request.connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            return await inner(request)

        front.handler = with_small_buffer
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.setblocking(False)  # noqa: FBT003 - the socket API
            await loop.sock_connect(sock, ("127.0.0.1", front.port))
            await loop.sock_sendall(sock, post())
            got_bytes = 0
            while got_bytes < total_bytes:
                data = await loop.sock_recv(sock, 4096)
                assert data
                got_bytes += len(data)
                await asyncio.sleep(0.015)
        await front.settled()
        assert front.relayed[0].outcome == "done"
