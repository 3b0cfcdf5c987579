"""What all clients of a listener have together, or one address has; on real sockets."""

from __future__ import annotations

import asyncio
import errno
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from router import body as body_module
from router import server as server_module
from router.address import network_of
from router.config import LimitSettings
from router.error import NoDescriptorError
from router.peer import Peers
from router.reply import own_response
from router.upstream import UpstreamPool
from router.verdict import Verdict, of_error
from support.corpus.row import NEXT, POST, TE
from support.front import staged
from support.listening import Listening, listening
from support.raw import RawClient, answering, post, sized, with_both_loops
from support.valkey import eventually

if TYPE_CHECKING:
    from router.client import Answer
    from router.connection import UpstreamConnection
    from router.endpoint import Endpoint
    from router.request import Request

SIZED = POST + b"Content-Length: %d\r\n\r\n"


OTHERS = ["127.0.0.2"] if sys.platform == "linux" else []
"""Elsewhere the loopback interface has one address."""


class Counted(Peers):
    """Counts the loopback addresses that tests come from."""

    def _counted(self, peer: str | None) -> str | None:
        return network_of(peer)


async def client_of(running: Listening, address: str) -> RawClient:
    """Return a client that comes from ``address``."""
    client = await RawClient.connect(running.port, address=address)
    running.clients.append(client)
    return client


@with_both_loops
async def test_an_address_cannot_have_every_connection(caplog: pytest.LogCaptureFixture) -> None:
    """L-03: told so, with a way to come back; other addresses, and those that are open, go on."""
    async with listening(LimitSettings(connections_per_address=2)) as running:
        running.server.peers = Counted(2, ())
        kept = [await client_of(running, "127.0.0.1") for _ in range(2)]
        await running.until_connections(2)
        for _ in range(3):
            late = await client_of(running, "127.0.0.1")
            reply = await late.reply()
            assert (reply.status, reply.all(b"retry-after")) == (503, [b"1"])
            assert b"from one address" in reply.body
            assert await late.is_closed()
            late.abort()
        assert caplog.text.count("limits.trusted_proxies") == 1
        others = [await client_of(running, address) for address in OTHERS]
        for client in (*kept, *others):
            client.send(NEXT)
            assert (await client.reply()).status == 200
        kept[0].abort()
        await running.until_connections(1 + len(others))
        again = await client_of(running, "127.0.0.1")
        again.send(NEXT)
        assert (await again.reply()).status == 200
        for client in running.clients:
            client.abort()
        await running.until_connections(0)
        assert len(running.server.peers) == 0


@with_both_loops
async def test_an_address_far_beyond_its_share_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L-03: telling costs memory, too."""
    monkeypatch.setattr(server_module, "SHED_MOST", 1)
    async with listening() as running:
        running.server.peers = Counted(1, ())
        await client_of(running, "127.0.0.1")
        await running.until_connections(1)
        told = await client_of(running, "127.0.0.1")
        assert (await told.reply()).status == 503
        assert await (await client_of(running, "127.0.0.1")).is_closed()


@with_both_loops
async def test_many_connections_of_this_host_are_welcome() -> None:
    """L-03: load tests, sidecars and proxies on the same host."""
    async with listening(LimitSettings(connections_per_address=2)) as running:
        for _ in range(5):
            client = await running.client()
            client.send(NEXT)
            assert (await client.reply()).status == 200
        await running.until_connections(5)


@with_both_loops
async def test_a_body_that_drips_is_given_up_and_one_that_only_pauses_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L-02: the least rate counts over spans, not between two packets."""
    monkeypatch.setattr(body_module, "RATE_WINDOW_S", 0.3)
    async with listening(LimitSettings(body_bytes_per_s=1_000)) as running:
        slow = await running.client()
        slow.send(SIZED % 5_000)

        async def drip() -> None:
            while True:
                slow.send(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.ensure_future(drip())
        reply = await slow.reply()
        dripping.cancel()
        assert reply.status == 408
        assert b"at least 1000 bytes a second" in reply.body
        assert await slow.is_closed()
        monkeypatch.setattr(body_module, "RATE_WINDOW_S", 5.0)
        steady = await running.client()
        steady.send(SIZED % 5_000)
        for _ in range(5):
            await asyncio.sleep(0.15)
            steady.send(bytes(1_000))
        assert (await steady.reply()).status == 200


def holding(gate: asyncio.Event) -> Listening:
    """Return a server whose answers wait for ``gate`` once the body is there."""
    limits = LimitSettings(body_bytes=1_000, buffered_bytes=2_500)

    async def handle(request: Request) -> Answer:
        data = await body_module.read_body(request, limits)
        await gate.wait()
        return own_response(b"%d" % len(data), "text/plain")

    return Listening(limits, handle)


@with_both_loops
async def test_the_bodies_of_all_requests_have_a_bound_together() -> None:
    """L-05: 503 with Retry-After beyond; what was given back can be had again."""
    gate = asyncio.Event()
    plan = holding(gate)
    async with listening(plan.limits, plan.handle) as running:
        bodies = running.server.bodies
        held = []
        for head in (SIZED % 1_000, POST + TE + b"\r\n3e8\r\n"):
            client = await running.client()
            client.send(head + bytes(1_000) + (b"\r\n0\r\n\r\n" if b"3e8" in head else b""))
            held.append(client)
        await eventually(lambda: bodies.held_bytes == 2_000)
        late = await running.client()
        late.send(SIZED % 1_000 + bytes(1_000) + NEXT)
        reply = await late.reply()
        assert (reply.status, reply.all(b"retry-after")) == (503, [b"1"])
        assert msgspec.json.decode(reply.body)["error"]["type"] == "overloaded_error"
        assert await late.is_closed()
        small = await running.client()
        small.send(SIZED % 400 + bytes(400))
        gate.set()
        for client, size in ((held[0], b"1000"), (held[1], b"1000"), (small, b"400")):
            assert (await client.reply()).body == size
        await eventually(lambda: bodies.held_bytes == 0)
        held[0].send((SIZED % 1_000 + bytes(1_000)) * 4)
        assert [(await held[0].reply()).status for _ in range(4)] == [200] * 4
        await eventually(lambda: bodies.held_bytes == 0)


@with_both_loops
async def test_whatever_becomes_of_a_request_its_bytes_are_given_back() -> None:
    """L-05: left amid the body, too large, malformed, with a failing handler."""
    gate = asyncio.Event()
    plan = holding(gate)
    async with listening(plan.limits, plan.handle) as running:
        for data in (
            SIZED % 900 + bytes(500),
            SIZED % 900 + bytes(900),
            SIZED % 5_000 + bytes(5_000),
            POST + TE + b"\r\n1f4\r\n" + bytes(500) + b"\r\nzz\r\n",
            POST + TE + b"\r\n3e9\r\n" + bytes(1_001),
            (POST + TE + b"\r\n1\r\na\r\n0\r\n\r\n") * 3,
        ):
            client = await running.client()
            client.send(data)
            await asyncio.sleep(0.02)
            client.abort()
            await running.until_connections(0)
            assert running.server.bodies.held_bytes == 0, data[:60]


FORWARDED = (
    b"X-Forwarded-For: 203.0.113.7, 10.0.0.9\r\nX-Real-IP: 6.6.6.6\r\nX-Forwarded-For: 10.0.0.8\r\n"
    b"Forwarded: for=6.6.6.6\r\nX-Forwarded-Proto: gopher\r\n"
)


@pytest.mark.parametrize(
    ("trusted", "sent", "told"),
    [
        (("127.0.0.0/8",), FORWARDED, b"203.0.113.7, 10.0.0.9, 10.0.0.8, 127.0.0.1"),
        (
            ("127.0.0.0/8",),
            b"X-Forwarded-For: [2001:db8::1]:80\r\n",
            b"[2001:db8::1]:80, 127.0.0.1",
        ),
        (("127.0.0.0/8",), b'X-Forwarded-For: "a"; b=c\r\n', b"127.0.0.1"),
        (("127.0.0.0/8",), b"", b"127.0.0.1"),
        (("10.0.0.0/8", "::/0"), FORWARDED, b"127.0.0.1"),
        ((), FORWARDED, b"127.0.0.1"),
    ],
)
@with_both_loops
async def test_a_trusted_proxy_tells_who_the_client_is(
    trusted: tuple[str, ...], sent: bytes, told: bytes
) -> None:
    """H-42: appended to what it says; whoever is not trusted says nothing."""
    async with staged(answering(sized(b"ok"))) as front:
        front.server.peers = Peers(1, trusted)
        assert (await front.ask(post(extra=sent))).status == 200
        received = front.replica.requests[0]
        assert received.all(b"x-forwarded-for") == [told]
        for name in (b"x-real-ip", b"forwarded", b"x-forwarded-proto"):
            assert not received.all(name)


@with_both_loops
async def test_a_router_without_open_files_blames_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C-16: what lies idle is closed for it; else the client is told to come again."""
    left = 1

    async def connect(
        self: UpstreamPool, connection: UpstreamConnection, endpoint: Endpoint
    ) -> None:
        nonlocal left
        if left <= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        left -= 1
        await original(self, connection, endpoint)

    original = UpstreamPool._connect
    monkeypatch.setattr(UpstreamPool, "_connect", connect)
    async with staged(answering(sized(b"ok"))) as front:
        assert (await front.ask(post())).status == 200
        assert front.pool.idle_connections == 1
        first = front.endpoint
        front.endpoint = type(first)("127.0.0.2", first.port)
        reply = await front.ask(post())
        assert (reply.status, reply.all(b"retry-after")) == (503, [b"1"])
        assert (front.pool.idle_connections, front.pool.open_connections) == (0, 0)
        error = front.errors[0]
        assert isinstance(error, NoDescriptorError)
        assert of_error(error) is Verdict.NEUTRAL
        assert not error.can_retry
        left, front.endpoint = 1, first
        assert (await front.ask(post())).status == 200
