"""A small front around the relay, with a scripted replica behind it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.body import read_body
from router.config import LimitSettings
from router.error import RouterError
from router.relay import Relayed, RelayRequest, relay
from router.reply import error_response
from router.server import Server
from router.upstream import Endpoint, UpstreamPool, UpstreamSettings
from support.raw import FakeReplica, RawClient, Reply, Talk

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    from router.client import Answer, ClientConnection, Handler
    from router.request import Request

LIMITS = LimitSettings(body_bytes=64 * 1024 * 1024)


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
    connections: list[ClientConnection] = field(default_factory=list)
    clients: list[RawClient] = field(default_factory=list)
    handler: Callable[[Request], Awaitable[Any]] | None = None
    limits: LimitSettings = LIMITS
    server: Server = field(init=False)
    port: int = 0

    def find(self, _: Request) -> Handler:
        """Return ``handler`` where a test set one."""
        return self.handler or self.handle

    async def handle(self, request: Request) -> Answer:
        """Relay one request."""
        body = await read_body(request, self.limits)
        self.connections.append(request.connection)
        lease = object()
        self.in_flight.add(lease)
        try:
            done = await relay(
                request,
                RelayRequest(
                    method=request.method,
                    target=request.target,
                    headers=request.headers,
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
            return error_response(error)
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

    async def disconnected(self, within_s: float = 20.0) -> None:
        """Wait until no connection to the replica is left."""
        async with asyncio.timeout(within_s):
            while self.pool.open_connections:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.002)

    async def begun(self, within_s: float = 20.0) -> None:
        """Wait until a request is in flight, or was."""
        async with asyncio.timeout(within_s):
            while not self.in_flight and not self.relayed:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.002)

    async def settled(self, within_s: float = 20.0) -> None:
        """Wait until nothing is in flight."""
        async with asyncio.timeout(within_s):
            while self.in_flight:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def staged(
    script: Callable[[Talk], Awaitable[None]],
    settings: UpstreamSettings | None = None,
    *,
    replica_tls: ssl.SSLContext | None = None,
    replica_path: str | None = None,
    **template: object,
) -> AsyncIterator[Front]:
    """Start a replica that follows ``script`` and a front that relays to it."""
    replica = FakeReplica(script, replica_tls, replica_path)
    pool = UpstreamPool(settings or UpstreamSettings(connect_timeout_s=10.0))
    front = Front(await replica.start(), pool, replica, template)
    loop = asyncio.get_running_loop()
    server = front.server = Server(front.find, front.limits)
    listener = await loop.create_server(server, "127.0.0.1", 0, backlog=2048)
    front.port = listener.sockets[0].getsockname()[1]
    try:
        yield front
    finally:
        for client in front.clients:
            client.abort()
        listener.close()
        await server.close(0.1)
        await pool.close()
        await replica.stop()
