"""A server of the router's own kind with a handler of the test's, and raw clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.body import read_body
from router.config import LimitSettings
from router.reply import own_response
from router.server import Server
from support.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from router.client import Answer, Handler
    from router.request import Request


@dataclass(slots=True)
class Listening:
    """``handle`` answers everything; by default with method, target and body."""

    limits: LimitSettings
    handle: Handler
    server: Server = field(init=False)
    port: int = 0
    handled: list[Request] = field(default_factory=list)
    cancelled: int = 0
    clients: list[RawClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = Server(lambda _: self.serve, self.limits)

    async def serve(self, request: Request) -> Answer:
        """Count, and answer."""
        self.handled.append(request)
        try:
            return await self.handle(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def client(self) -> RawClient:
        """Return a new client."""
        client = await RawClient.connect(self.port)
        self.clients.append(client)
        return client

    async def until_handled(self, count: int, within_s: float = 20.0) -> None:
        """Wait until so many requests came."""
        async with asyncio.timeout(within_s):
            while len(self.handled) < count:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.002)

    async def until_connections(self, count: int, within_s: float = 20.0) -> None:
        """Wait until so many are open."""
        async with asyncio.timeout(within_s):
            while self.server.open_connections != count:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def listening(
    limits: LimitSettings | None = None, handle: Handler | None = None
) -> AsyncIterator[Listening]:
    """Run a server on a free port."""
    limits = limits or LimitSettings()

    async def echo(request: Request) -> Answer:
        body = await read_body(request, limits)
        text = f"{request.method} {request.target} ".encode()
        return own_response(text + body, "application/octet-stream")

    running = Listening(limits, handle or echo)
    loop = asyncio.get_running_loop()
    accepting = await loop.create_server(running.server, "127.0.0.1", 0, backlog=2048)
    running.port = accepting.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        for client in running.clients:
            client.abort()
        accepting.close()
        await running.server.close(0.1)
