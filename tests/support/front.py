"""A small front around the relay, with a scripted replica behind it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from router.error import RouterError, error_body, error_headers
from router.relay import Relayed, RelayRequest, relay
from router.upstream import Endpoint, UpstreamPool, UpstreamSettings
from support.raw import FakeReplica, RawClient, Reply, Talk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

BODY_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Front:
    """A minimal front: reads the body, relays, turns errors into responses, counts."""

    endpoint: Endpoint
    pool: UpstreamPool
    replica: FakeReplica
    template: dict[str, Any] = field(default_factory=dict)
    extra_headers: tuple[tuple[str, str], ...] = ()
    relayed: list[Relayed] = field(default_factory=list)
    errors: list[RouterError] = field(default_factory=list)
    first_bytes: int = 0
    cancelled: int = 0
    in_flight: set[object] = field(default_factory=set)
    protocols: list[Any] = field(default_factory=list)
    clients: list[RawClient] = field(default_factory=list)
    handler: Callable[[web.BaseRequest], Awaitable[Any]] | None = None
    port: int = 0

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request with ``handler`` where a test set one."""
        response: web.StreamResponse = await (self.handler or self.handle)(request)
        return response

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Relay one request."""
        body = await request.read()
        self.protocols.append(request.protocol)
        lease = object()
        self.in_flight.add(lease)
        try:
            done = await relay(
                request,
                RelayRequest(
                    method=request.method,
                    target=request.raw_path,
                    headers=request.raw_headers,
                    body=body,
                    **{"request_id": "req-1", **self.template},
                ),
                self.endpoint,
                self.pool,
                self.extra_headers,
                self._note_first_byte,
            )
        except RouterError as error:
            self.errors.append(error)
            return web.Response(
                status=error.status, body=error_body(error), headers=error_headers(error)
            )
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight.remove(lease)
        self.relayed.append(done)
        return done.response

    def _note_first_byte(self) -> None:
        self.first_bytes += 1

    async def client(self) -> RawClient:
        """Return a new client of this front."""
        client = await RawClient.connect(self.port)
        self.clients.append(client)
        return client

    async def ask(self, data: bytes, *, bodiless: bool = False) -> Reply:
        """Send one request on a connection of its own and return the response."""
        client = await self.client()
        client.send(data)
        reply = await client.reply(bodiless=bodiless)
        await client.close()
        return reply

    async def disconnected(self, within_s: float = 1.0) -> None:
        """Wait until no connection to the replica is left."""
        async with asyncio.timeout(within_s):
            while self.pool.open_connections:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.002)

    async def settled(self, within_s: float = 2.0) -> None:
        """Wait until nothing is in flight."""
        async with asyncio.timeout(within_s):
            while self.in_flight:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def staged(
    script: Callable[[Talk], Awaitable[None]],
    settings: UpstreamSettings | None = None,
    **template: object,
) -> AsyncIterator[Front]:
    """Start a replica that follows ``script`` and a front that relays to it."""
    replica = FakeReplica(script)
    pool = UpstreamPool(settings or UpstreamSettings())
    front = Front(await replica.start(), pool, replica, template)
    loop = asyncio.get_running_loop()

    def make_request(  # what the server calls for each request
        message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=BODY_LIMIT_BYTES
        )

    server = web.Server(
        front.serve,
        request_factory=make_request,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
    )
    listener = await loop.create_server(server, "127.0.0.1", 0, backlog=2048)
    front.port = listener.sockets[0].getsockname()[1]
    try:
        yield front
    finally:
        for client in front.clients:
            client.abort()
        listener.close()
        await server.shutdown(0.1)
        await pool.close()
        await replica.stop()
