"""The one place where Redis clients are built, because the library's defaults wait far too long.

With them one command against a frozen server takes a minute: long timeouts, ten retries. Here every
limit is explicit: short timeouts, no retries (the callers know better when to try again), few
connections, no health checks of the library's own.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from state.cluster import ClusterClient
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})
_CLUSTER_SCHEMES: Final = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
"""Schemes of a cluster, and those under which its nodes are reached."""
_DEFAULT_PORT: Final = 6379
_PARAMETERS: Final = frozenset({"db"})
_QUOTED_BEFORE: Final = " of pipeline caused error: "
"""Before this the library quotes the failed command, raw block ids included."""
_MAX_SHOWN: Final = 200
_REFUSALS: Final = ("READONLY", "OOM", "MISCONF", "NOREPLICAS")
"""Error codes of a server that refuses writes; one that runs a script may wrap them."""
Argument = str | bytes | int | float
"""What a command may contain."""
STORE_ERRORS: Final = (RedisError, OSError)
"""What a failing server, connection or timeout raises."""


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
    with some of the nodes as ``host:port,host:port`` for a cluster. ``max_connections`` is per
    server or node.
    """

    url: str
    command_timeout_s: float = 0.05
    connect_timeout_s: float = 0.25
    max_connections: int = 8


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


def redact(url: str) -> str:
    """Return what of a URL may be logged: scheme, address and path, never credentials."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _CLUSTER_SCHEMES:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(unreadable URL)"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


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
    """Raise what Redis raises inside as StateError; ``action`` says what was attempted."""
    try:
        yield
    except STORE_ERRORS as error:
        message = f"{action}: {describe(error)}"
        raise StateError(message) from error


def check_url(url: str) -> None:
    """Raise ValueError for a URL that is not of this kind, or has parameters besides ``db``.

    The library would let parameters override the explicit limits.
    """
    parts = urlsplit(url)
    if parts.scheme in _CLUSTER_SCHEMES:
        cluster_nodes(url)
        return
    unknown = set(parse_qs(parts.query, keep_blank_values=True)) - _PARAMETERS
    if parts.scheme not in _SCHEMES or unknown:
        message = (
            f"redis url {redact(url)}: expected redis://, rediss:// or unix://, ?db= at most; "
            f"redis+cluster:// or rediss+cluster:// for a cluster"
        )
        raise ValueError(message)


def cluster_nodes(url: str) -> tuple[str, ...]:
    """Return the ``host:port`` of each node that a cluster's URL names; raises ValueError."""
    parts = urlsplit(url)
    named = parts.netloc.rpartition("@")[2].split(",")
    nodes = tuple(_node_address(name) for name in named)
    if None in nodes or parts.path.strip("/") or parts.query or parts.fragment:
        message = (
            f"redis url {redact(url)}: expected {parts.scheme}://host:port,host:port of some "
            "nodes; a cluster has no database number and no parameters"
        )
        raise ValueError(message)
    return tuple(node for node in nodes if node is not None)


def _node_address(named: str) -> str | None:
    """Return ``host:port`` of ``host``, ``host:port`` or ``[::1]:port``; None for anything else."""
    try:
        parts = urlsplit(f"//{named}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or port == 0 or parts.path or parts.query or parts.fragment:
        return None
    return f"{host}:{port or _DEFAULT_PORT}"


def _client(settings: RedisSettings, timeout_s: float, max_connections: int) -> Client:
    check_url(settings.url)
    parts = urlsplit(settings.url)
    scheme = _CLUSTER_SCHEMES.get(parts.scheme)
    if scheme is None:
        return _server_client(settings.url, settings, timeout_s, max_connections)
    credentials, at, _ = parts.netloc.rpartition("@")

    def connect(address: str) -> Redis:
        host, _, port = address.rpartition(":")
        host = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{credentials}{at}{host}:{port}"
        return _server_client(url, settings, timeout_s, max_connections)

    return ClusterClient(cluster_nodes(settings.url), connect)


def _server_client(
    url: str, settings: RedisSettings, timeout_s: float, max_connections: int
) -> Redis:
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
        driver_info=None,
    )
    client: Redis = Redis.from_pool(pool)
    client.response_callbacks.clear()  # replies stay as the server sent them, in any version
    return client
