"""The one place where Redis clients are built, because the library's defaults wait far too long.

With them one command against a frozen server takes a minute: long timeouts, ten retries. Here every
limit is explicit: short timeouts, no retries (the callers know better when to try again), few
connections, no health checks of the library's own.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    InvalidResponse,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from state.address import StoreKind, parse_address
from state.cluster import ClusterClient
from state.seal_guard import SealGuard
from state.sentinel import SentinelClient
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from state.address import StoreAddress

_DEAD_PEER_MS: Final = 5_000
_KEEPALIVE: Final = {
    option: value
    for option, value in (
        (getattr(socket, "TCP_KEEPIDLE", None), 5),
        (getattr(socket, "TCP_KEEPINTVL", None), 2),
        (getattr(socket, "TCP_KEEPCNT", None), 3),
        (getattr(socket, "TCP_USER_TIMEOUT", None), _DEAD_PEER_MS),
    )
    if option is not None
}
"""Where the system has them: a peer that is gone without a word ends a connection in seconds.

Without the last one the kernel sends again for a quarter of an hour what nobody acknowledges.
"""
_QUOTED_BEFORE: Final = " of pipeline caused error: "
"""Before this the library quotes the failed command, raw block ids included."""
_MAX_SHOWN: Final = 200
_REFUSALS: Final = ("READONLY", "OOM", "MISCONF", "NOREPLICAS")
"""Error codes of a server that refuses writes; one that runs a script may wrap them."""
Argument = str | bytes | int | float
"""What a command may contain."""
_WRONG_SHAPE: Final = (AttributeError, IndexError, KeyError, TypeError, ValueError)
STORE_ERRORS: Final = (RedisError, OSError)
"""What a failing server, connection or timeout raises."""


class _Parser(_AsyncRESP2Parser):
    """The library's parser of Python, for which bytes that are no reply are one kind of error.

    Another one that happens to be installed takes no part.
    """

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: FBT001, FBT002 - the library's signature
        """Return the next reply."""
        try:
            return await super().read_response(disable_decoding=disable_decoding)
        except (ValueError, IndexError, OverflowError, RecursionError) as error:
            message = f"no reply of a Redis server: {type(error).__name__}"
            raise InvalidResponse(message) from error

    async def _read(self, length: int) -> Any:
        if length < 0:
            message = "no reply of a Redis server: a length below zero"
            raise InvalidResponse(message)
        return await super()._read(length)


class Batch(Protocol):
    """Commands that are sent together."""

    def execute_command(self, *arguments: Any) -> Any:
        """Add one command."""
        ...

    async def execute(self, *, raise_on_error: bool = True) -> list[Any]:
        """Send everything; errors are in the list unless the first is to be raised."""
        ...


class Client(Protocol):
    """A connection pool to one server, or to the nodes of a cluster."""

    async def execute_command(self, *arguments: Any) -> Any:
        """Return the reply to one command."""
        ...

    def pipeline(self, *, transaction: bool) -> Batch:
        """Return an empty batch."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class RedisSettings(Struct, frozen=True, kw_only=True):
    """Where the server is and how long to wait for it.

    ``url`` is redis://, rediss:// or unix:// for one server; redis+cluster:// or rediss+cluster://
    with some of the nodes as ``host:port,host:port`` for a cluster; redis+sentinel:// or
    rediss+sentinel:// with the sentinels and ``/service``. ``max_connections`` is per server or
    node. ``guard`` is what opens sealed values; None takes all as they are.
    """

    url: str
    command_timeout_s: float = 0.05
    connect_timeout_s: float = 0.25
    max_connections: int = 8
    guard: SealGuard | None = None


def command_client(settings: RedisSettings) -> Client:
    """Return a client for commands that answer at once. Raises ValueError for a wrong URL."""
    return _client(settings, settings.command_timeout_s, settings.max_connections)


def blocking_client(settings: RedisSettings, block_s: float) -> Client:
    """Return a client of one connection (per node), for commands that block up to ``block_s``."""
    return _client(settings, block_s + max(0.5, settings.command_timeout_s), 1)


async def run_command(client: Client, *arguments: Argument) -> Any:
    """Return the server's reply to one command, as it was sent."""
    return await client.execute_command(*arguments)


def is_wrong_type(reply: object) -> bool:
    """Return whether ``reply`` is the error about a key of another type: a malformed value."""
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def read_value(reply: Any) -> Any:
    """Return one reply of a pipeline; b"", which nothing decodes, for a key of another type."""
    if is_wrong_type(reply):
        return b""
    if isinstance(reply, Exception):
        raise reply
    return reply


def describe(error: Exception) -> str:
    """Return one printable line about ``error``, without the command that the library quotes."""
    _, quoted, rest = str(error).rpartition(_QUOTED_BEFORE)
    text = rest.strip("(),'\"") if quoted else str(error)
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return f"{type(error).__name__}: {shown[:_MAX_SHOWN]}"


def refuses_writes(error: Exception) -> bool:
    """Return whether the server answered that it takes no writes now; it may still be read."""
    return isinstance(error, ReadOnlyError | OutOfMemoryError) or (
        isinstance(error, ResponseError) and any(code in str(error) for code in _REFUSALS)
    )


@contextmanager
def state_errors(action: str) -> Iterator[None]:
    """Raise what Redis raises inside as StateError; ``action`` says what was attempted.

    So does a reply of a shape that no store sends: what answers is something else.
    """
    try:
        yield
    except STORE_ERRORS as error:
        message = f"{action}: {describe(error)}"
        raise StateError(message) from error
    except _WRONG_SHAPE as error:
        message = f"{action}: unexpected reply: {type(error).__name__}"
        raise StateError(message) from error


def check_url(url: str) -> None:
    """Raise ValueError, without credentials, for a URL that is not of a known kind."""
    parse_address(url)


def _client(settings: RedisSettings, timeout_s: float, max_connections: int) -> Client:
    address = parse_address(settings.url)

    def connect(node: str) -> Redis:
        return _server_client(address.node_url(node), address, settings, timeout_s, max_connections)

    def connect_sentinel(node: str) -> Redis:
        url = address.sentinel_url(node)
        return _server_client(url, address, settings, settings.command_timeout_s, 1)

    if address.kind is StoreKind.CLUSTER:
        return ClusterClient(address.nodes, connect)
    if address.kind is StoreKind.SENTINEL:
        return SentinelClient(address.service, address.nodes, connect_sentinel, connect)
    return _server_client(address.server_url(), address, settings, timeout_s, max_connections)


def _server_client(
    url: str,
    address: StoreAddress,
    settings: RedisSettings,
    timeout_s: float,
    max_connections: int,
) -> Redis:
    options: dict[str, Any] = dict(address.tls)
    if address.scheme != "unix":
        options |= {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=settings.connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        health_check_interval=0,
        protocol=2,
        parser_class=_Parser,
        driver_info=None,
        **options,
    )
    client: Redis = Redis.from_pool(pool)
    client.response_callbacks.clear()  # replies stay as the server sent them, in any version
    return client
