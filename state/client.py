"""The one place where Redis clients are built, because the library's defaults wait far too long.

With them one command against a frozen server takes a minute: long timeouts, ten retries. Here every
limit is explicit: short timeouts, no retries (the callers know better when to try again), few
connections, no health checks of the library's own.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})
_PARAMETERS: Final = frozenset({"db"})
Argument = str | bytes | int | float
"""What a command may contain."""
STORE_ERRORS: Final = (RedisError, OSError)
"""What a failing server, connection or timeout raises."""


class RedisSettings(Struct, frozen=True, kw_only=True):
    """Where the server is (redis://, rediss:// or unix://) and how long to wait for it."""

    url: str
    command_timeout_s: float = 0.05
    connect_timeout_s: float = 0.25
    max_connections: int = 8


def command_client(settings: RedisSettings) -> Redis:
    """Return a client for commands that answer at once. Raises ValueError for a wrong URL."""
    return _client(settings, settings.command_timeout_s, settings.max_connections)


def blocking_client(settings: RedisSettings, block_s: float) -> Redis:
    """Return a client of one connection, for commands that block up to ``block_s``."""
    return _client(settings, block_s + max(0.5, settings.command_timeout_s), 1)


async def run_command(client: Redis, *arguments: Argument) -> Any:
    """Return the server's reply to one command, as it was sent."""
    return await client.execute_command(*arguments)  # type: ignore[no-untyped-call]


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
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(unreadable URL)"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


@contextmanager
def state_errors(action: str) -> Iterator[None]:
    """Raise what Redis raises inside as StateError; ``action`` says what was attempted."""
    try:
        yield
    except STORE_ERRORS as error:
        message = f"{action}: {type(error).__name__}: {error}"
        raise StateError(message) from error


def _client(settings: RedisSettings, timeout_s: float, max_connections: int) -> Redis:
    check_url(settings.url)
    pool = BlockingConnectionPool.from_url(
        settings.url,
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


def check_url(url: str) -> None:
    """Raise ValueError for a URL that is not of this kind, or has parameters besides ``db``.

    The library would let parameters override the explicit limits.
    """
    parts = urlsplit(url)
    unknown = set(parse_qs(parts.query, keep_blank_values=True)) - _PARAMETERS
    if parts.scheme not in _SCHEMES or unknown:
        message = f"redis url {redact(url)}: expected redis://, rediss:// or unix://, ?db= at most"
        raise ValueError(message)
