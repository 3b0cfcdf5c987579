"""The load of the warm-up's benchmark goes on when a worker dies."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from warm_bench import Traffic

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-warmroute-replica: w0\r\n\r\n"
CHUNK = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)])
async def test_a_request_that_a_dying_worker_takes_along_is_none_and_ends_no_load(
    sent: bytes,
) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, aiohttp.ClientSession() as http:
        fleet: Any = SimpleNamespace(router=SimpleNamespace(url=url), http=http)
        traffic = Traffic(fleet, 1.0, 8, random.Random(1))
        await traffic.ask([1, 2, 3])
    assert traffic.served == []
