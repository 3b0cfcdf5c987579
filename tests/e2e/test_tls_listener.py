"""Listeners with TLS: who gets in, what a handshake may cost, and other certificates under way."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import os
import socket
import ssl
from dataclasses import dataclass
from shutil import copy
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.config import LimitSettings
from router.listener import Listener
from router.reply import own_response
from router.server import RouteTable, Server
from router.tls import HandshakeLog, ListenerContext, TlsWatch
from router.tls_accept import TlsAcceptor
from router.wire import ClientStream
from state.tls import ClientContext
from support.raw import RawClient, get, post, with_both_loops
from support.tls import Authority, client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from router.client import Answer
    from router.request import Request

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(name="authority")
def own_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@dataclass(slots=True)
class Door:
    """A listener with TLS, and what its handler saw."""

    listener: Listener
    context: ListenerContext
    authority: Authority
    port: int
    cancelled: int = 0

    async def client(self, tls: ssl.SSLContext | None = None) -> RawClient:
        return await RawClient.connect(self.port, tls=tls or client(self.authority.ca))

    async def ask(self, data: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        connected = await self.client(tls)
        connected.send(data)
        try:
            return (await connected.reply()).body
        finally:
            await connected.close()

    async def is_let_in(self, tls: ssl.SSLContext | None = None) -> bool:
        try:
            return await self.ask(get("/"), tls) == b"hello"
        except (OSError, EOFError):
            return False

    async def failures(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.context.failed_handshakes != count:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.005)


async def hello(_: Request) -> Answer:
    return own_response(b"hello", "text/plain; charset=utf-8")


@contextlib.asynccontextmanager
async def door(
    authority: Authority,
    handle: Callable[[Request], Awaitable[Answer]] = hello,
    limits: LimitSettings | None = None,
    **fields: object,
) -> AsyncIterator[Door]:
    context = ListenerContext("listen_tls", authority.listener(authority.issue(), **fields))
    listener = Listener("listen", "127.0.0.1:0", context)
    opened = Door(listener, context, authority, int(listener.url.rpartition(":")[2]))

    async def counted(request: Request) -> Answer:
        try:
            return await handle(request)
        except asyncio.CancelledError:
            opened.cancelled += 1
            raise

    table = {"/": {"GET": counted}, "/v1/chat/completions": {"POST": counted}}
    await listener.start(table, limits or LimitSettings())
    try:
        yield opened
    finally:
        await listener.close()
        await asyncio.sleep(0.01)


@with_both_loops
async def test_a_listener_with_tls_speaks_http_1_1_and_no_other(authority: Authority) -> None:
    async with door(authority) as opened:
        assert opened.listener.url.startswith("https://127.0.0.1:")
        offering = client(authority.ca)
        offering.set_alpn_protocols(["h2", "http/1.1"])
        connected = await opened.client(offering)
        session = connected.writer.get_extra_info("ssl_object")
        assert session.selected_alpn_protocol() == "http/1.1"
        for _ in range(2):
            connected.send(get("/"))
            assert (await connected.reply()).body == b"hello"
        await connected.close()


@with_both_loops
async def test_older_versions_of_tls_are_turned_away(authority: Authority) -> None:
    async with door(authority, min_version="1.3") as opened:
        old = client(authority.ca)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert not await opened.is_let_in(old)
        assert await opened.is_let_in()
        await opened.failures(1)
    async with door(authority) as opened:
        assert await opened.is_let_in(old)
        assert opened.context.current.minimum_version is ssl.TLSVersion.TLSv1_2
        assert opened.context.current.options & ssl.OP_NO_RENEGOTIATION


@pytest.mark.parametrize("asking", ["off", "optional", "required"])
@with_both_loops
async def test_clients_are_asked_for_certificates_as_configured(
    authority: Authority, tmp_path: Path, asking: str
) -> None:
    foreign = Authority(tmp_path / "foreign")
    known = client(authority.ca, authority.issue("client"))
    unknown = client(authority.ca, foreign.issue("client"))
    async with door(authority, client_certificates=asking, client_ca=authority.ca) as opened:
        assert await opened.is_let_in(known)
        assert await opened.is_let_in() is (asking != "required")
        assert await opened.is_let_in(unknown) is (asking == "off")
        await opened.failures({"off": 0, "optional": 1, "required": 2}[asking])


@with_both_loops
async def test_who_never_shakes_hands_is_closed_in_time_and_told_of_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A silent connection, plain HTTP, noise: the log has one line in a while, the count all."""
    caplog.set_level(logging.WARNING)
    limits = LimitSettings(head_deadline_s=0.2)
    async with door(authority, limits=limits) as opened:
        silent = await RawClient.connect(opened.port)
        for noise in (get("/"), bytes(100), b"\x16\x03\x01\x00\x05hello" * 50):
            loud = await RawClient.connect(opened.port)
            loud.send(noise)
            await loud.reader.read()
            loud.abort()
        async with asyncio.timeout(20):
            assert await silent.is_closed()
        silent.abort()
        await opened.failures(4)
        assert await opened.is_let_in()
    told = [each for each in caplog.records if "handshake" in each.getMessage()]
    assert len(told) == 1


def test_failed_handshakes_are_told_of_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = HandshakeLog("listen_tls", lambda: now_s, pause_s=60.0)
    for now_s in (0.0, 1.0, 59.0, 61.0):  # noqa: B007 - read by the clock
        log.note(ConnectionResetError())
    counts = [each.getMessage().split()[1] for each in caplog.records]
    assert counts == ["1", "3"]


@with_both_loops
async def test_connections_beyond_the_limit_are_shed_with_tls_too(authority: Authority) -> None:
    async with door(authority, limits=LimitSettings(connections=2)) as opened:
        held = [await opened.client() for _ in range(2)]
        connected = await opened.client()
        assert b" 503 " in (await connected.reply()).line
        for each in (*held, connected):
            await each.close()


@with_both_loops
async def test_one_address_has_no_more_than_its_share_of_handshakes(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that never shakes hands would take the places of all."""
    monkeypatch.setattr("router.tls_accept.peer_address", lambda _: "10.0.0.1")
    limits = LimitSettings(connections_per_address=2, head_deadline_s=60.0)
    async with door(authority, limits=limits) as opened:
        silent = [await RawClient.connect(opened.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        beyond = await RawClient.connect(opened.port)
        async with asyncio.timeout(20):
            assert await beyond.is_closed()
        beyond.abort()
        for each in silent:
            each.abort()
        await opened.failures(2)
        assert await opened.is_let_in()


@pytest.mark.parametrize("how", ["reset", "close", "end-of-tcp"])
@with_both_loops
async def test_a_client_that_leaves_cancels_its_request(authority: Authority, how: str) -> None:
    """F5, A29: also one that ends TCP below TLS."""

    async def wait(_: Request) -> Answer:
        await asyncio.sleep(60)
        raise AssertionError

    async with door(authority, wait) as opened:
        connected = await opened.client()
        connected.send(post())
        await asyncio.sleep(0.05)
        if how == "reset":
            connected.abort()
        elif how == "close":
            connected.writer.close()
        else:
            with socket.socket(
                fileno=os.dup(connected.writer.get_extra_info("socket").fileno())
            ) as own:
                own.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(20):
            while not opened.cancelled:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)
        connected.abort()


@with_both_loops
async def test_the_last_answer_is_not_lost_to_a_client_that_goes_on_sending(
    authority: Authority,
) -> None:
    """Bytes that nobody reads would make a reset of the close, which overtakes the answer."""
    async with door(authority) as opened:
        connected = await opened.client()
        connected.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 9000000\r\n\r\n"
        )
        for _ in range(30):  # longer than a close that does not wait for the client takes
            connected.send(bytes(20_000))
            await connected.writer.drain()
            await asyncio.sleep(0.01)
        reply = await connected.reply()
        assert b" 200 " in reply.line
        assert reply.is_complete
        connected.abort()


@with_both_loops
async def test_a_client_that_does_not_read_is_noticed(authority: Authority) -> None:
    """L-04: so much is held for it, and no more."""
    unsent: list[int] = []

    async def flood(request: Request) -> Answer:
        stream = ClientStream(request, 200, "chunked", keep_alive=True)
        stream.send(CHUNKED, b"")
        for _ in range(4096):
            if stream.is_client_slow:
                break
            stream.send(b"", bytes(16_384))
            await asyncio.sleep(0)
        unsent.append(stream.unsent_bytes)
        ready = asyncio.Event()
        stream.call_when_writable(ready.set)
        await ready.wait()
        stream.finish()
        return stream

    async with door(authority, flood) as opened:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", opened.port, ssl=client(authority.ca), limit=4096
        )
        connected = RawClient(reader, writer)
        connected.send(post())
        async with asyncio.timeout(20):
            while not unsent:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.01)
        assert 0 < unsent[0] < 512 * 1024
        assert (await connected.reply()).is_complete
        await connected.close()


@with_both_loops
async def test_another_certificate_counts_from_the_next_connection_on(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that began with the one before goes on; a pair that does not fit changes nothing."""
    caplog.set_level(logging.INFO)
    gate = asyncio.Event()

    async def stream(request: Request) -> Answer:
        answer = ClientStream(request, 200, "chunked", keep_alive=True)
        answer.send(CHUNKED, b"before ")
        await gate.wait()
        answer.send(b"", b"after")
        answer.finish()
        return answer

    async with door(authority, stream) as opened:
        settings = opened.context.paths
        watch = TlsWatch([opened.context], ClientContext())
        in_use = opened.context.expiry_unix_s
        streaming = await opened.client()
        streaming.send(get("/"))
        await streaming.reader.readuntil(b"before ")
        first = streaming.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]

        await watch.look()
        assert not caplog.records
        copy(authority.issue().key, settings[1])  # another's key
        await watch.look()
        await watch.look()
        refused = [each.getMessage() for each in caplog.records]
        assert len(refused) == 1
        assert refused[0].startswith("listen_tls.certificate: ")
        assert "stays in use" in refused[0]
        assert opened.context.expiry_unix_s == in_use
        connected = await opened.client()
        again = connected.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        assert again == first
        await connected.close()

        fresh = authority.issue("127.0.0.1", ends_in=dt.timedelta(days=3))
        copy(fresh.certificate, settings[0])
        copy(fresh.key, settings[1])
        watch.reload()
        await watch.look()
        connected = await opened.client()
        renewed = connected.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        assert renewed != first
        await connected.close()
        gate.set()
        assert await streaming.reader.readuntil(b"0\r\n\r\n") == b"\r\n5\r\nafter\r\n0\r\n\r\n"
        await streaming.close()
        registry = CollectorRegistry()
        registry.register(watch)
        text = generate_latest(registry).decode()
        [told] = [line for line in text.splitlines() if 'expiry_seconds{listener="listen"}' in line]
        assert float(told.split()[1]) == opened.context.expiry_unix_s != in_use
        assert 'warmroute_tls_loads_total{of="listen_tls",outcome="failed"} 1.0' in text
        assert 'warmroute_tls_loads_total{of="listen_tls",outcome="done"} 1.0' in text


@with_both_loops
async def test_what_keeps_connections_from_being_accepted_is_told_to_the_loop(
    authority: Authority,
) -> None:
    """As without TLS, where the loop accepts: whoever listens to it tells of a shortage once."""
    told: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.put_nowait(context))
    context = ListenerContext("listen_tls", authority.listener(authority.issue()))
    with socket.socket() as deaf:  # it does not listen
        acceptor = TlsAcceptor(deaf, Server(RouteTable({}), LimitSettings()), context)
        async with asyncio.timeout(20):
            seen = await told.get()
        await acceptor.close()
    assert seen["message"] == "listen_tls: cannot accept"
    assert isinstance(seen["exception"], OSError)


@with_both_loops
async def test_handshakes_count_as_connections(authority: Authority) -> None:
    """Silent ones cannot pile up beyond the limit: the next one is closed without a word."""
    async with door(authority, limits=LimitSettings(connections=2)) as opened:
        silent = [await RawClient.connect(opened.port) for _ in range(6)]
        async with asyncio.timeout(20):
            ended = [asyncio.create_task(each.is_closed()) for each in silent]
            while sum(task.done() for task in ended) < 3:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert sum(task.done() for task in ended) == 3  # two, and one that would be told
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for each in silent:
            each.abort()
        await opened.failures(3)
        assert await opened.is_let_in()
