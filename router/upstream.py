"""The connections to replicas: the pool, and small GETs."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING

from msgspec import Struct

from router.connection import StaleConnectionError, UpstreamConnection
from router.date import HttpDate
from router.endpoint import Endpoint as Endpoint  # noqa: TC001 - whoever has a pool needs it
from router.error import (
    NoDescriptorError,
    ReplicaConnectTimeoutError,
    ReplicaError,
    ReplicaProtocolError,
    ReplicaTimeoutError,
    ReplicaTlsError,
    ReplicaUnreachableError,
)
from router.header import key_line, request_head
from router.names import Names
from router.patience import Patience
from router.reply_head import read_headers
from router.watch import Watch
from state.tls import SHUTDOWN_S, ClientContext, ClientTls, TlsFileError, said

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.header import RawHeaders
    from router.reply_head import ReplyHead, ReplyHeaders

FETCH_LIMIT_BYTES = 4 * 1024 * 1024
"""The largest body that ``fetch`` takes."""
_JSON_LINES = b"Content-Type: application/json\r\n"
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
REPLY_HEADERS_MOST = 64
"""So many are kept for all connections; replicas have one for streams and one for other answers."""
WATCHES_PER_LIMIT = 16
"""A limit may be overrun by this part of the shortest one."""


class UpstreamSettings(Struct, frozen=True, kw_only=True):
    """Deadlines and bounds towards replicas, the key that these want to see, and their TLS.

    ``pool_idle_s`` must stay below the replicas' own keep-alive timeout (uvicorn: 5 s).
    """

    connect_timeout_s: float = 1.0
    first_byte_timeout_s: float = 300.0
    chunk_idle_timeout_s: float = 120.0
    write_stall_timeout_s: float = 60.0
    pool_idle_s: float = 3.0
    head_limit_bytes: int = 16 * 1024
    api_key: str | None = None
    tls: ClientTls = ClientTls()


class UpstreamPool:
    """Idle connections per endpoint, newest first; any number may be open."""

    def __init__(
        self,
        settings: UpstreamSettings,
        wall_clock_s: Callable[[], float] = time.time,
        names: Names | None = None,
    ) -> None:
        self.settings = settings
        self._names = names or Names()
        self.key_line = key_line(settings.api_key)
        self.tls = ClientContext(settings.tls)
        self.date = HttpDate(wall_clock_s)
        shortest_s = min(
            settings.first_byte_timeout_s,
            settings.chunk_idle_timeout_s,
            settings.write_stall_timeout_s,
        )
        self.watch = Watch(shortest_s / WATCHES_PER_LIMIT)
        self._idle: dict[Endpoint, dict[UpstreamConnection, float]] = {}
        self._reply_headers: dict[RawHeaders, ReplyHeaders] = {}
        self._open: set[UpstreamConnection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._emptied = asyncio.Event()

    @property
    def open_connections(self) -> int:
        """Connections that exist, idle or in use."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return sum(map(len, self._idle.values()))

    def take(self, endpoint: Endpoint) -> UpstreamConnection | None:
        """Return the idle connection that was used last, or None."""
        idle = self._idle.get(endpoint)
        if not idle:
            return None
        connection, since_s = idle.popitem()
        if asyncio.get_running_loop().time() - since_s < self.settings.pool_idle_s:
            return connection
        connection.discard()  # the others are older still; the sweeper finds them
        return None

    async def connect(self, endpoint: Endpoint) -> UpstreamConnection:
        """Return a fresh connection, with TLS where the replica has it.

        Raises ReplicaUnreachableError: ReplicaTlsError where the replica is not who it should be.
        NoDescriptorError where this process can have no connection more.
        """
        try:
            return await self._connected(endpoint)
        except NoDescriptorError:
            if not self._drop_idle():
                raise
        await asyncio.sleep(0)  # the loop closes them
        return await self._connected(endpoint)

    def _drop_idle(self) -> int:
        """Close every idle connection; return how many."""
        idle = [connection for kept in self._idle.values() for connection in kept]
        for connection in idle:
            connection.discard()
        return len(idle)

    async def _connected(self, endpoint: Endpoint) -> UpstreamConnection:
        connection = UpstreamConnection(self, endpoint)
        try:
            async with Patience(self.settings.connect_timeout_s):
                await self._connect(connection, endpoint)
        except (OSError, UnicodeError, TlsFileError) as error:
            self._give_up(connection)
            if isinstance(error, TimeoutError):
                message = "the connection to the replica timed out"
                raise ReplicaConnectTimeoutError(message) from error
            if isinstance(error, ssl.SSLError | TlsFileError):
                raise ReplicaTlsError(said(error)) from error
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
                message = "the router has no open file left for a connection to the replica"
                raise NoDescriptorError(message) from error
            message = "the connection to the replica failed"
            raise ReplicaUnreachableError(message) from error
        except asyncio.CancelledError:
            self._give_up(connection)
            raise
        if self._is_closed:
            connection.discard()
            message = "the router is stopping"
            raise ReplicaUnreachableError(message)
        return connection

    async def _connect(self, connection: UpstreamConnection, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        if endpoint.path is not None:
            await loop.create_unix_connection(lambda: connection, endpoint.path)
            return
        *others, last = await self._addresses(endpoint)
        for address in others:
            try:
                await self._dial(connection, endpoint, address)
            except ssl.SSLError:
                raise
            except OSError:  # another one may answer
                continue
            return
        await self._dial(connection, endpoint, last)

    async def _addresses(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Return where to dial, the best first."""
        address = endpoint.address or endpoint.host
        try:
            ip_address(address)
        except ValueError:
            return await self._names.addresses(address)
        return (address,)

    async def _dial(self, connection: UpstreamConnection, endpoint: Endpoint, address: str) -> None:
        loop = asyncio.get_running_loop()
        if endpoint.is_tls:
            await loop.create_connection(
                lambda: connection,
                address,
                endpoint.port,
                ssl=self.tls.current(),
                server_hostname=endpoint.host,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        else:
            await loop.create_connection(lambda: connection, address, endpoint.port)

    def _give_up(self, connection: UpstreamConnection) -> None:
        """Forget a connection that was being made: uvloop may tell it of no loss after a cancel."""
        connection.discard()
        self.closed(connection)

    def put(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose response is complete for the next request."""
        if self._is_closed:
            connection.discard()
            return
        loop = asyncio.get_running_loop()
        self._idle.setdefault(connection.endpoint, {})[connection] = loop.time()
        if self._sweeper is None:
            self._sweeper = loop.call_later(self.settings.pool_idle_s, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        limit_s = loop.time() - self.settings.pool_idle_s
        oldest_s: float | None = None
        for endpoint, idle in list(self._idle.items()):
            for connection in [c for c, since_s in idle.items() if since_s <= limit_s]:
                connection.discard()
            if not idle:
                self._idle.pop(endpoint, None)
                continue
            first_s = next(iter(idle.values()))
            oldest_s = first_s if oldest_s is None else min(oldest_s, first_s)
        self._sweeper = None
        if oldest_s is not None:
            self._sweeper = loop.call_at(oldest_s + self.settings.pool_idle_s, self._sweep)

    def reply_headers(self, received: RawHeaders) -> ReplyHeaders:
        """Return what the headers of a response say: once for all connections that bring the same.

        Raises ReplicaProtocolError.
        """
        known = self._reply_headers.get(received)
        if known is None:
            if len(self._reply_headers) >= REPLY_HEADERS_MOST:
                self._reply_headers.clear()
            known = self._reply_headers[received] = read_headers(received)
        return known

    def opened(self, connection: UpstreamConnection) -> None:
        """Count a connection that was made."""
        self._open.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        """Forget a connection that is gone."""
        self._open.discard(connection)
        self.withdraw(connection)
        if self._is_closed and not self._open:
            self._emptied.set()

    def withdraw(self, connection: UpstreamConnection) -> None:
        """Offer the connection to nobody any more."""
        idle = self._idle.get(connection.endpoint)
        if idle is not None:
            idle.pop(connection, None)

    async def close(self) -> None:
        """Close every connection, also those in use."""
        self._is_closed = True
        self.watch.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.discard()
        if self._open:
            await self._emptied.wait()


class _Fetch:
    """The sink of a small answer."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.head: ReplyHead | None = None
        self.body = bytearray()
        self.error: ReplicaError | None = None

    def on_reply(self, head: ReplyHead, data: bytes) -> None:
        self.head = head
        self.on_body(data)

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > FETCH_LIMIT_BYTES:
            self.on_failure(ReplicaProtocolError("the replica sent too large a body"))

    def on_chunk(self, chunk: bytes, content: bytes) -> None:  # noqa: ARG002
        self.on_body(content)

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_failure(self, error: ReplicaError) -> None:
        self.error = self.error or error
        self.on_end()


async def fetch(
    endpoint: Endpoint,
    target: str,
    pool: UpstreamPool,
    timeout_s: float,
    body: bytes | None = None,
    lines: bytes = b"",
) -> tuple[int, RawHeaders, bytes]:
    """GET a small resource of a replica, or POST a JSON ``body``: status, headers, body.

    ``lines`` are header lines besides. Whoever cancels it ends the connection, and the replica's
    work with it. Raises ReplicaError.
    """
    try:
        async with asyncio.timeout(timeout_s):
            try:
                return await _fetch_on(pool.take(endpoint), endpoint, target, pool, body, lines)
            except StaleConnectionError:
                return await _fetch_on(None, endpoint, target, pool, body, lines)
    except TimeoutError:
        message = f"the replica did not answer in {timeout_s:g} s"
        raise ReplicaTimeoutError(message) from None


async def _fetch_on(
    pooled: UpstreamConnection | None,
    endpoint: Endpoint,
    target: str,
    pool: UpstreamPool,
    body: bytes | None,
    lines: bytes,
) -> tuple[int, RawHeaders, bytes]:
    connection = pooled or await pool.connect(endpoint)
    sink = _Fetch()
    method = "GET" if body is None else "POST"
    head = request_head(
        method,
        target,
        lines + (pool.key_line if body is None else _JSON_LINES + pool.key_line),
        host=endpoint.authority,
        body_bytes=len(body or b""),
        request_id=None,
        peer=None,
    )
    try:
        connection.send(sink, method, head, body or b"")
        await sink.done
    finally:
        connection.abandon(sink)
    if sink.error is not None or sink.head is None:
        raise sink.error or ReplicaProtocolError("the replica sent no head")
    return sink.head.status, sink.head.headers.received, bytes(sink.body)
