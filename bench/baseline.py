"""Two proxies that decide nothing, as processes: our bare relay, and the usual aiohttp proxy.

    python bench/baseline.py relay|aiohttp PORT

``PORT`` is the replica's. The relay has the router's listener, body reading and allocator settings,
so that the router differs from it by its decisions alone. Says ``ready URL`` once it serves.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import uvloop
from aiohttp import web

from router.allocator import keep_large_blocks
from router.body import read_body
from router.config import LimitSettings
from router.relay import RelayRequest, relay
from router.server import Server
from router.upstream import Endpoint, UpstreamPool, UpstreamSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.client import Answer
    from router.request import Request

PATH = "/v1/chat/completions"
CONNECT_S = 10.0
"""A hundred streams that begin at once on a busy machine."""


def bare_relay(port: int) -> Server:
    """Return a server that relays with the router's relay."""
    pool = UpstreamPool(UpstreamSettings(connect_timeout_s=CONNECT_S))
    return relay_server(Endpoint("127.0.0.1", port), pool)


def relay_server(endpoint: Endpoint, pool: UpstreamPool) -> Server:
    """Return the same, with a pool of its own."""
    limits = LimitSettings()

    async def handle(request: Request) -> Answer:
        outbound = RelayRequest(
            method=request.method,
            target=request.target,
            headers=request.headers,
            body=await read_body(request, limits),
            request_id="bench",
        )
        return (await relay(request, outbound, endpoint, pool, (), lambda: None)).response

    return Server(lambda _: handle, limits)


def plain_aiohttp(port: int) -> web.Server:
    """Return the usual aiohttp proxy: client session in, stream response out."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        url = f"http://127.0.0.1:{port}{request.raw_path}"
        headers = {"Content-Type": "application/json"}
        async with session.post(url, data=body, headers=headers) as got:
            response = web.StreamResponse(status=got.status)
            response.content_type = got.content_type
            response.content_length = got.content_length
            await response.prepare(request)
            async for data in got.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    return web.Server(handle, handler_cancellation=True, access_log=None)


PROXIES: dict[str, Callable[[int], Callable[[], asyncio.Protocol]]] = {
    "relay": bare_relay,
    "aiohttp": plain_aiohttp,
}


async def serve(name: str, replica_port: int) -> None:
    """Serve until killed."""
    if name == "relay":
        keep_large_blocks()
    server = PROXIES[name](replica_port)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=1024)
    gc.collect()
    gc.freeze()
    print(f"ready http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
