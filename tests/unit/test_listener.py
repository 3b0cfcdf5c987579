"""The listeners: bound at once, with the socket options that streams need."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from router.config import ConfigError
from router.listener import Listener
from router.reply import json_response
from support.raw import with_both_loops

if TYPE_CHECKING:
    from router.reply import Response
    from router.request import Request


async def no_delay(request: Request) -> Response:
    """Answer whether the accepted socket sends small writes at once."""
    accepted = request.connection.transport.get_extra_info("socket")
    return json_response(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))


@with_both_loops
async def test_accepted_sockets_send_small_writes_at_once() -> None:
    """Without it a stream's first token waits for the acknowledgement of its head."""
    listener = Listener("listen", "127.0.0.1:0")
    await listener.start({"/no-delay": {"GET": no_delay}})
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{listener.url}/no-delay") as answer:
                assert await answer.json() is True
            async with session.get(f"{listener.url}/other") as answer:
                assert answer.status == 404
                assert answer.headers["Server"] == "warmroute"
    finally:
        await listener.close()


def test_a_taken_address_is_named_before_anything_starts() -> None:
    listener = Listener("listen", "127.0.0.1:0")
    taken = listener.url.removeprefix("http://")
    with pytest.raises(ConfigError) as caught:
        Listener("admin", taken)
    told = f"admin: cannot listen on {taken}: {os.strerror(errno.EADDRINUSE)}"
    assert str(caught.value) == f"{told}; choose another one with --admin"
    listener.stop_accepting()


@with_both_loops
async def test_a_closed_listener_refuses_and_frees_its_address() -> None:
    listener = Listener("listen", "127.0.0.1:0")
    await listener.start({})
    await listener.close()
    host, _, port = listener.url.removeprefix("http://").rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
