"""What a client cannot make the router hold: time, connections, memory; on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from router import client as client_module
from router import server as server_module
from router.client import ClientConnection
from router.config import LimitSettings
from router.connection import UpstreamConnection
from router.intake import Intake
from router.reply import own_response
from support.corpus.row import BODY_LIMIT_BYTES, GET, NEXT, POST, TE
from support.front import staged
from support.listening import listening
from support.raw import Talk, get, post, sized, with_both_loops
from support.running_clock import RunningClock

if TYPE_CHECKING:
    from router.client import Answer
    from router.request import Request

SMALL = LimitSettings(body_bytes=BODY_LIMIT_BYTES, head_deadline_s=0.15, body_deadline_s=0.15)


class RawClientSmall:
    """A client whose socket takes little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> RawClientSmall:
        """Connect."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.setblocking(False)  # noqa: FBT003 - the socket API
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=4096))

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    def abort(self) -> None:
        """Leave at once."""
        self.writer.transport.abort()


@with_both_loops
async def test_a_client_that_never_stops_sending_is_left_after_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "LINGER_S", 0.1)
    async with listening(LimitSettings(body_bytes=1000)) as running:
        client = await running.client()
        client.send(POST + b"Content-Length: 50000000\r\n\r\n")
        assert (await client.reply()).status == 413

        async def send_for_ever() -> None:
            while True:
                client.send(bytes(1024))
                await client.writer.drain()
                await asyncio.sleep(0.005)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_for_ever(), 20)
        await running.until_connections(0)


@pytest.mark.parametrize("data", [NEXT[:20], GET, b"\r\n", b"POST", POST + b"X: y\r\n"])
@with_both_loops
async def test_a_head_that_does_not_end_in_time_is_answered_408(data: bytes) -> None:
    """L-01: absolute, however the bytes drip."""
    async with listening(SMALL) as running:
        for earlier in (b"", NEXT):
            client = await running.client()
            client.send(earlier)
            if earlier:
                assert (await client.reply()).status == 200
            began_s = time.monotonic()

            async def drip(to: Any = client) -> None:
                for at in range(len(data)):
                    to.send(data[at : at + 1])
                    await asyncio.sleep(0.12 / len(data))

            async with RunningClock() as clock:
                began_running_s = clock()
                dripping = asyncio.ensure_future(drip())
                reply = await client.reply()
                assert reply.status == 408
                assert time.monotonic() - began_s > 0.1
                assert clock() - began_running_s < 1.0
            assert await client.is_closed()
            await dripping
            client.abort()
        await running.until_connections(0)


@with_both_loops
async def test_a_silent_connection_is_closed_without_an_answer() -> None:
    """L-01: nothing was asked."""
    async with listening(SMALL) as running:
        client = await running.client()
        async with asyncio.timeout(20):
            assert await client.reader.read() == b""


@with_both_loops
async def test_an_idle_connection_is_kept_longer_than_a_head_may_take_and_then_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "KEEP_ALIVE_S", 2.0)
    async with listening(SMALL) as running:
        client = await running.client()
        for _ in range(2):
            client.send(NEXT)
            assert (await client.reply()).status == 200
            await asyncio.sleep(0.3)
        async with asyncio.timeout(20):
            assert await client.reader.read() == b""


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 10\r\n\r\nabc",
        POST + TE + b"\r\n3\r\nabc\r\n",
        POST + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n",
    ],
    ids=["sized", "chunked", "expected"],
)
@with_both_loops
async def test_a_body_that_does_not_end_in_time_is_answered_408(data: bytes) -> None:
    """L-02."""
    async with listening(SMALL) as running:
        client = await running.client()
        client.send(data)
        if b"Expect" in data:
            assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        reply = await client.reply()
        assert (reply.status, reply.all(b"connection")) == (408, [b"close"])
        assert await client.is_closed()


@with_both_loops
async def test_what_a_client_pipelines_beyond_a_bound_waits_in_its_own_socket() -> None:
    gate = asyncio.Event()

    async def handle(request: Request) -> Answer:
        await gate.wait()
        return own_response(request.target.encode(), "text/plain")

    async with listening(handle=handle) as running:
        client = await running.client()
        count = 40_000
        client.send(get("/1") * count)
        async with asyncio.timeout(20):
            while not running.handled:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        connection = running.handled[0].connection
        reads = 2  # the one that brings the request, and the one behind it: 256 KiB at most each
        assert connection._intake.waiting_bytes <= reads * 256 * 1024
        assert len(running.handled) == 1
        gate.set()
        for _ in range(1000):
            assert (await client.reply()).body == b"/1"
        client.abort()
        await running.until_connections(0)


@with_both_loops
async def test_a_client_that_reads_no_answers_gets_no_more_of_them_prepared() -> None:
    """L-04: one answer beyond the high-water mark waits, and the next request with it."""
    body = bytes(256 * 1024)

    async def handle(_: Request) -> Answer:
        return own_response(body, "text/plain")

    async with listening(handle=handle) as running:
        client = await RawClientSmall.connect(running.port)
        client.send(NEXT * 150)
        async with asyncio.timeout(20):
            while not running.handled:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert len(running.handled) < 75
        connection = running.handled[0].connection
        assert connection.transport.get_write_buffer_size() < 2 * len(body)
        got_bytes = 0
        async with asyncio.timeout(20):
            while got_bytes < 150 * len(body):
                got_bytes += len(await client.reader.read(2**20))
        client.abort()


@with_both_loops
async def test_connections_beyond_the_limit_are_told_so() -> None:
    """L-03: with a way to come back; those that are open go on."""
    async with listening(LimitSettings(connections=3)) as running:
        kept = [await running.client() for _ in range(3)]
        await running.until_connections(3)
        late = await running.client()
        late.send(NEXT)
        reply = await late.reply()
        assert (reply.status, reply.all(b"retry-after")) == (503, [b"1"])
        assert await late.is_closed()
        late.abort()
        await running.until_connections(3)
        for client in kept:
            client.send(NEXT)
            assert (await client.reply()).status == 200
        kept[0].abort()
        await running.until_connections(2)
        again = await running.client()
        again.send(NEXT)
        assert (await again.reply()).status == 200


@with_both_loops
async def test_connections_far_beyond_the_limit_are_closed_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L-03: telling them costs memory, too."""
    monkeypatch.setattr(server_module, "SHED_MOST", 1)
    async with listening(LimitSettings(connections=1)) as running:
        kept = await running.client()
        await running.until_connections(1)
        told = await running.client()
        assert (await told.reply()).status == 503
        dropped = await running.client()
        with contextlib.suppress(ConnectionError):
            assert await dropped.reader.read() == b""
        kept.send(NEXT)
        assert (await kept.reply()).status == 200


@with_both_loops
async def test_a_client_that_does_not_read_a_last_relayed_answer_delays_no_end() -> None:
    """What it has not taken when the server has waited enough is dropped."""

    async def script(talk: Talk) -> None:
        await talk.request()
        sock = front.connections[0].transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await talk.say(sized(bytes(40_000)))
        await talk.until_gone()

    async with staged(script) as front:
        client = await RawClientSmall.connect(front.port)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(get(extra=b"Connection: close\r\n"))
        async with asyncio.timeout(20):
            while not front.relayed:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        transport = front.connections[0].transport
        assert transport.is_closing()
        assert transport.get_write_buffer_size() > 0
        try:
            async with asyncio.timeout(20):
                await front.server.close(0.05)
        finally:
            client.abort()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux")
@pytest.mark.parametrize("is_reset", [True, False])
@with_both_loops
async def test_a_client_that_leaves_while_its_socket_is_not_read_is_noticed(
    *, is_reset: bool
) -> None:
    """Bytes behind its request must not keep a replica at work for nobody."""

    async def hang(_: Request) -> Answer:
        await asyncio.sleep(60)
        raise AssertionError

    async with listening(SMALL, hang) as running:
        client = await running.client()
        client.send(NEXT + bytes(300_000))
        await asyncio.wait_for(client.writer.drain(), 20)
        async with asyncio.timeout(20):
            while not running.handled:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert running.cancelled == 0
        if is_reset:
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.abort()
        await running.until_connections(0)
        assert running.cancelled == 1


def kept(kind: type) -> int:
    """Return how many objects of a kind there are, waiting for the collector or not."""
    return sum(type(one) is kind for one in gc.get_objects())


@with_both_loops
async def test_connections_that_ended_wait_for_no_collector() -> None:
    """What only a full collection frees adds up between two of them."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(sized(b"{}") if len(talk.replica.requests) % 2 else b"HTTP/1.1 200 OK\r\n")
        talk.reset()

    async with staged(script) as front:
        gc.collect()
        gc.disable()
        try:
            for number in range(40):
                client = await front.client()
                client.send((post(), get(), b"GET / HTTP", b"\x16\x03")[number % 4])
                if number % 4 < 2:
                    with contextlib.suppress(EOFError, ConnectionError):
                        await client.reader.read(65536)
                client.abort()
            front.clients.clear()
            await front.settled()
            for held in (front.connections, front.relayed, front.errors):
                held.clear()
            await asyncio.sleep(0.05)
            left = [kept(kind) for kind in (ClientConnection, Intake, UpstreamConnection)]
        finally:
            gc.enable()
    assert max(left) < 8
