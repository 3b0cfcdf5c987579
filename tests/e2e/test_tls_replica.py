"""Replicas behind TLS: known before anything is sent, and relayed as those without."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from typing import TYPE_CHECKING

import pytest

from router.endpoint import Endpoint
from router.error import ReplicaTlsError
from router.upstream import UpstreamPool, UpstreamSettings, fetch
from state.tls import ClientTls
from support.front import staged
from support.raw import (
    DONE,
    LAST,
    SSE,
    SSE_CLOSE,
    RawClient,
    Talk,
    answering,
    answering_and_closing,
    chunk,
    get,
    post,
    sized,
    with_both_loops,
)
from support.tls import Authority, server

if TYPE_CHECKING:
    from pathlib import Path

STREAM = SSE + chunk(b'data: {"choices":[]}\n\n') + chunk(DONE) + LAST


@pytest.fixture(scope="module", name="authority")
def own_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def believing(authority: Authority, **fields: object) -> UpstreamSettings:
    tls = ClientTls(ca=authority.ca, **fields)  # type: ignore[arg-type]
    return UpstreamSettings(connect_timeout_s=10, tls=tls)


@with_both_loops
async def test_requests_share_a_connection_with_tls_as_without(authority: Authority) -> None:
    replica_tls = server(authority.issue())
    async with staged(answering(STREAM), believing(authority), replica_tls=replica_tls) as front:
        for _ in range(3):
            reply = await front.ask(post())
            assert reply.is_complete
            assert reply.body.endswith(DONE)
        assert (front.replica.accepted, front.pool.idle_connections) == (1, 1)
        assert front.replica.requests[0].all(b"host") == [front.endpoint.authority.encode()]


@with_both_loops
async def test_a_large_request_and_a_large_answer_pass_through_tls(authority: Authority) -> None:
    body = bytes(range(256)) * 16_384
    settings, replica_tls = believing(authority), server(authority.issue())
    async with staged(answering(sized(body)), settings, replica_tls=replica_tls) as front:
        assert (await front.ask(post(body))).body == body
        assert front.replica.requests[0].body == body


@with_both_loops
async def test_a_connection_that_the_replica_closed_is_replaced(authority: Authority) -> None:
    """F6: the stale one fails before a byte came, and the request goes on a fresh one."""
    script = answering_and_closing(sized(b"ok"))
    settings, replica_tls = believing(authority), server(authority.issue())
    async with staged(script, settings, replica_tls=replica_tls) as front:
        for _ in range(5):
            assert (await front.ask(post())).body == b"ok"
        assert front.errors == []


@with_both_loops
async def test_idle_tls_connections_are_closed_before_the_engine_does(authority: Authority) -> None:
    """F6."""
    settings = UpstreamSettings(
        connect_timeout_s=10, pool_idle_s=0.05, tls=ClientTls(ca=authority.ca)
    )
    replica_tls = server(authority.issue())
    async with staged(answering(sized(b"ok")), settings, replica_tls=replica_tls) as front:
        await front.ask(post())
        async with asyncio.timeout(20):
            while front.pool.open_connections or front.replica.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_busy", [False, True], ids=["between-tokens", "downloading"])
@with_both_loops
async def test_an_aborted_stream_stops_the_replica_at_once(
    authority: Authority,
    is_busy: bool,  # noqa: FBT001 - of the table above
) -> None:
    """F5, F19, C10: a polite close of TLS would go on reading what the replica sends."""
    sent_bytes = 0

    async def script(talk: Talk) -> None:
        nonlocal sent_bytes
        await talk.request()
        await talk.say(SSE)
        while is_busy:
            await talk.say(chunk(bytes(16_384)))
            sent_bytes += 16_384
            await asyncio.sleep(0)
        await talk.until_gone()

    settings, replica_tls = believing(authority), server(authority.issue())
    async with staged(script, settings, replica_tls=replica_tls) as front:
        client = await front.client()
        client.send(post())
        await client.reader.readuntil(b"\r\n\r\n")
        client.abort()
        at_abort_bytes = sent_bytes
        async with asyncio.timeout(20):
            while front.replica.open:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.001)
        await front.settled()
        await front.disconnected()
        assert front.cancelled + len(front.relayed) == 1
        assert sent_bytes - at_abort_bytes < 32 * 2**20


@with_both_loops
async def test_a_replica_that_never_reads_is_stopped_too(authority: Authority) -> None:
    """C10: it sees no farewell of TLS, only that its writes fail, and must not be waited for."""
    replica_tls = server(authority.issue())
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def write_for_ever() -> None:
            accepted, _ = listening.accept()
            with accepted, replica_tls.wrap_socket(accepted, server_side=True) as stream:
                stream.recv(65_536)
                stream.sendall(SSE)
                with contextlib.suppress(OSError):
                    while True:
                        stream.sendall(chunk(bytes(1024)))
                        time.sleep(0.005)

        async with staged(answering(b""), believing(authority)) as front:
            front.endpoint = Endpoint("127.0.0.1", listening.getsockname()[1], is_tls=True)
            writing = asyncio.create_task(asyncio.to_thread(write_for_ever))
            client = await front.client()
            client.send(post())
            await client.reader.readuntil(chunk(bytes(1024)))
            client.abort()
            async with asyncio.timeout(20):
                await writing


@with_both_loops
async def test_a_client_that_does_not_read_holds_a_tls_replica_back(authority: Authority) -> None:
    """L-04, A42: what is read ahead is bounded, and nothing of it is lost."""
    total_bytes, sent_bytes = 64 * 2**20, 0

    async def script(talk: Talk) -> None:
        nonlocal sent_bytes
        await talk.request()
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total_bytes)
        for _ in range(total_bytes // 65_536):
            await talk.say(bytes(65_536))
            sent_bytes += 65_536
        await talk.until_gone()

    settings, replica_tls = believing(authority), server(authority.issue())
    async with staged(script, settings, replica_tls=replica_tls) as front:
        client = await RawClient.connect(front.port, limit_bytes=4096)
        front.clients.append(client)
        client.send(post())
        held_bytes = -1
        while held_bytes != sent_bytes or not sent_bytes:
            held_bytes = sent_bytes
            await asyncio.sleep(0.2)
        assert held_bytes < total_bytes
        got_bytes = 0
        async with asyncio.timeout(60):
            while got_bytes < total_bytes:
                got_bytes += len(await client.reader.read(2**20))
        assert [done.outcome for done in front.relayed] == ["done"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("foreign", "certificate verify failed: unable to get local issuer certificate"),
        ("other-host", "certificate verify failed: IP address mismatch"),
        ("plain", "TLS failed: wrong version number"),
    ],
)
@with_both_loops
async def test_a_replica_that_is_not_who_it_should_be_is_sent_nothing(
    authority: Authority, tmp_path: Path, case: str, reason: str
) -> None:
    """The reason is the operator's; a client is told the code."""
    foreign = Authority(tmp_path / "foreign")
    pair = {"foreign": foreign.issue(), "other-host": authority.issue("10.9.8.7")}.get(case)
    replica_tls = server(pair) if pair is not None else None

    async def script(talk: Talk) -> None:
        if pair is None:  # what is no HTTP is told so without TLS
            await talk.say(sized(b"what?", status=b"400 Bad Request"))
        await talk.request()

    async with staged(script, believing(authority), replica_tls=replica_tls) as front:
        front.endpoint = Endpoint(front.endpoint.host, front.endpoint.port, is_tls=True)
        reply = await front.ask(post())
        assert b" 502 " in reply.line
        assert b'"replica_tls_failed"' in reply.body
        assert b"verify" not in reply.body
        error = front.errors[0]
        assert isinstance(error, ReplicaTlsError)
        assert error.can_retry
        assert error.reason.startswith(reason)
        assert front.replica.requests == []
        await front.disconnected()


@with_both_loops
async def test_a_name_of_its_own_and_insecure_are_what_they_say(authority: Authority) -> None:
    replica_tls = server(authority.issue("vllm.internal"))
    named = believing(authority, server_name="vllm.internal")
    for settings in (named, UpstreamSettings(tls=ClientTls(insecure=True), connect_timeout_s=10)):
        async with staged(answering(sized(b"ok")), settings, replica_tls=replica_tls) as front:
            assert (await front.ask(post())).body == b"ok"
            offered = front.pool.tls.current()
            assert (offered.verify_mode is ssl.CERT_NONE) is (settings is not named)


@with_both_loops
async def test_a_replica_may_ask_for_the_routers_certificate(authority: Authority) -> None:
    replica_tls, own = server(authority.issue(), authority.ca), authority.issue("router")
    settings = believing(authority, certificate=own.certificate, key=own.key)
    async with staged(answering(sized(b"ok")), settings, replica_tls=replica_tls) as front:
        assert (await front.ask(post())).body == b"ok"


@with_both_loops
async def test_a_replica_that_gets_no_certificate_may_say_so_after_the_handshake(
    authority: Authority,
) -> None:
    """TLS 1.3: for the router the handshake is over before the replica looks at its part."""
    replica_tls = server(authority.issue(), authority.ca)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            accepted, _ = listening.accept()
            with accepted.dup() as lingering:  # unread bytes at a close would reset it
                with accepted, contextlib.suppress(ssl.SSLError, ConnectionError):
                    replica_tls.wrap_socket(accepted, server_side=True)
                lingering.shutdown(socket.SHUT_WR)
                while lingering.recv(65_536):
                    pass

        refusing = asyncio.create_task(asyncio.to_thread(refuse))
        pool = UpstreamPool(believing(authority))
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1], is_tls=True)
        with pytest.raises(ReplicaTlsError) as caught:
            await fetch(endpoint, "/health", pool, 10)
        assert "certificate required" in caught.value.reason
        await refusing
        await pool.close()


@with_both_loops
async def test_a_body_that_ends_with_the_connection_needs_the_farewell_of_tls(
    authority: Authority,
) -> None:
    """Anybody on the way can end TCP; only the replica can end TLS."""
    is_cut = False

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE_CLOSE + b'data: {"choices":[]}\n\n' + DONE)
        await asyncio.sleep(0.05)
        if is_cut:
            talk.writer.transport.abort()

    settings, replica_tls = believing(authority), server(authority.issue())
    for is_cut in (False, True):
        async with staged(script, settings, replica_tls=replica_tls, done_marker=None) as front:
            reply = await front.ask(post())
            assert reply.is_complete is not is_cut, reply
            assert [done.outcome for done in front.relayed] == ["failed" if is_cut else "done"]


@with_both_loops
async def test_a_replica_that_never_shakes_hands_is_given_up_in_time(authority: Authority) -> None:
    async with staged(answering(b""), believing(authority)) as front:

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        silent = await asyncio.start_server(hold, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        front.endpoint = Endpoint("127.0.0.1", port, is_tls=True)
        front.pool.settings = UpstreamSettings(connect_timeout_s=0.1, tls=front.pool.settings.tls)
        reply = await front.ask(get())
        assert b'"replica_connect_timeout"' in reply.body
        await front.disconnected()
        silent.close()
        await asyncio.sleep(0.05)
