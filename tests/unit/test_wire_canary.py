"""What router/wire.py leans on in aiohttp: an upgrade that breaks a fact fails its canary."""

from __future__ import annotations

import asyncio
import inspect

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from aiohttp.web_protocol import RequestHandler

from router.wire import HandedOver


async def test_resume_writing_resolves_the_drain_waiter() -> None:
    protocol = BaseProtocol(asyncio.get_running_loop())
    waiter = asyncio.get_running_loop().create_future()
    protocol.pause_writing()
    assert protocol.writing_paused
    protocol._drain_waiter = waiter
    protocol.resume_writing()
    assert waiter.done()
    assert protocol._drain_waiter is None
    assert not protocol.writing_paused


async def test_a_lost_connection_resolves_the_drain_waiter() -> None:
    for error in (None, ConnectionResetError()):
        protocol = BaseProtocol(asyncio.get_running_loop())
        waiter = asyncio.get_running_loop().create_future()
        protocol.pause_writing()
        protocol._drain_waiter = waiter
        protocol.connection_lost(error)
        assert waiter.done()
        assert (waiter.exception() is None) == (error is None)


async def test_aiohttps_own_drain_shares_the_waiter() -> None:
    protocol = BaseProtocol(asyncio.get_running_loop())
    protocol.transport = asyncio.Transport()
    protocol.pause_writing()
    ours = protocol._drain_waiter = asyncio.get_running_loop().create_future()
    theirs = asyncio.ensure_future(protocol._drain_helper())
    await asyncio.sleep(0)
    assert protocol._drain_waiter is ours
    protocol.resume_writing()
    await theirs


async def test_the_writer_counts_what_it_sent_in_output_size() -> None:
    """A handler that fails after the hand-over must not get aiohttp's error page sent."""
    protocol = BaseProtocol(asyncio.get_running_loop())
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    assert writer.output_size == 0
    assert "request.writer.output_size > 0" in inspect.getsource(RequestHandler.handle_error)


def test_the_server_asks_a_response_for_no_more_than_the_hand_over_answers() -> None:
    source = inspect.getsource(RequestHandler.finish_response)
    assert "resp.prepare" in source
    assert "await resp.write_eof()" in source
    assert "resp.keep_alive" in inspect.getsource(RequestHandler.start)


def test_the_hand_over_overrides_what_exists() -> None:
    for name in ("prepare", "write_eof", "keep_alive", "body_length", "prepared"):
        assert hasattr(web.StreamResponse, name)
        assert name in vars(HandedOver)
