"""Redis clients are built in one place, with explicit limits."""

from __future__ import annotations

import ast
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from router.state_reader import enter_reader
from state.address import redact
from state.client import (
    RedisSettings,
    blocking_client,
    command_client,
    describe,
    refuses_writes,
)
from state.cluster import ClusterClient
from state.direct import LOOKUP_CONNECTIONS, DirectReader

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("state", "policies", "prompt", "router", "sidecar", "warmroute")
_NAMES = {"Redis", "StrictRedis", "RedisCluster", "Sentinel", "from_url", "from_pool"}


def _built_clients(source: str) -> list[str]:
    """Return the names of the client constructors that ``source`` calls."""
    called = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            called.append(function.id if isinstance(function, ast.Name) else name or "")
    return [name for name in called if name in _NAMES or name.endswith("ConnectionPool")]


def test_no_other_module_builds_a_client() -> None:
    """F7: a client with the library's defaults waits a minute for a frozen server."""
    builders = {
        str(path.relative_to(_ROOT))
        for package in _PACKAGES
        for path in (_ROOT / package).rglob("*.py")
        if _built_clients(path.read_text())
    }
    assert builders == {"state/client.py"}


def _limits(client: object) -> dict[str, object]:
    """Return what a built client of one server will wait for, read from the client itself."""
    assert isinstance(client, Redis)
    pool = client.connection_pool
    assert isinstance(pool, BlockingConnectionPool)
    assert {"retry", "retry_on_error", "health_check_interval"} <= set(pool.connection_kwargs)
    connection = pool.make_connection()  # type: ignore[no-untyped-call]
    assert connection.retry._backoff.compute(1) == 0
    return {
        "timeout_s": connection.socket_timeout,
        "connect_s": connection.socket_connect_timeout,
        "retries": connection.retry._retries,
        "retried_errors": connection.retry_on_error,
        "health_check_s": connection.health_check_interval,
        "connections": pool.max_connections,
        "pool_wait_s": pool.timeout,
    }


def _expected(timeout_s: float, connect_s: float, connections: int) -> dict[str, object]:
    return {
        "timeout_s": timeout_s,
        "connect_s": connect_s,
        "retries": 0,
        "retried_errors": [],
        "health_check_s": 0,
        "connections": connections,
        "pool_wait_s": timeout_s,
    }


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://h", "unix:///run/s?db=3"])
async def test_every_limit_is_explicit(url: str) -> None:
    client = command_client(RedisSettings(url=url))
    tailer = blocking_client(RedisSettings(url=url), block_s=2.0)
    assert _limits(client) == _expected(0.05, 0.25, 8)
    assert _limits(tailer) == _expected(2.5, 0.25, 1)
    await client.aclose()
    await tailer.aclose()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_every_node_of_a_cluster_has_the_same_limits(scheme: str) -> None:
    settings = RedisSettings(url=f"{scheme}+cluster://user:secret@h1:1,[::1]:2,h3")
    for built, expected in (
        (command_client(settings), _expected(0.05, 0.25, 8)),
        (blocking_client(settings, block_s=2.0), _expected(2.5, 0.25, 1)),
    ):
        assert isinstance(built, ClusterClient)
        for address in ("h1:1", "::1:2", "h3:6379"):
            node = built._node(address)
            assert _limits(node) == expected
            made = node.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            assert isinstance(made, SSLConnection) is (scheme == "rediss")
            assert f"{made.host}:{made.port}" == address
            assert (made.username, made.password) == ("user", "secret")
        assert set(built.nodes()) == {"h1:1", "::1:2", "h3:6379"}
        await built.aclose()


def _clients_of(part: object) -> list[object]:
    return [value for name, value in vars(part).items() if name.endswith("_client")]


async def test_what_a_router_builds_waits_no_longer_than_it_says() -> None:
    """F7: lookups, for which requests wait, have the short limits; nothing has the library's."""
    url = "unix:///nowhere/s"
    async with AsyncExitStack() as stack:
        reader = await enter_reader(stack, url, "direct")
        assert isinstance(reader, DirectReader)
        [lookups] = _clients_of(reader)
        assert _limits(lookups) == _expected(0.05, 0.25, LOOKUP_CONNECTIONS)
        mirror = await enter_reader(stack, url, "mirror")
        for background in (mirror, reader._mirror):
            built = sorted((_limits(each) for each in _clients_of(background)), key=str)
            patient, blocking = _expected(1.0, 1.0, 8), _expected(1.25, 1.0, 1)
            assert built == sorted([patient, blocking], key=str)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h?socket_timeout=99",
        "unix:///s?max_connections=500",
        "http://h",
        "h:6379",
        "redis+cluster://",
        "redis+cluster://h/1",
        "redis+cluster://h?db=1",
        "redis+cluster://h:port",
        "redis+cluster://h:1,,k:2",
        "redis+cluster://h:0",
        "redis+cluster://h:70000",
        "unix+cluster:///s",
    ],
)
def test_a_url_can_not_override_the_limits(url: str) -> None:
    with pytest.raises(ValueError, match="redis url"):
        command_client(RedisSettings(url=url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hunter2@host:6380/1", "redis://host:6380/1"),
        ("rediss://:hunter2@host", "rediss://host"),
        ("unix://:hunter2@/run/s?password=hunter2", "unix:///run/s"),
        ("redis://h:notaport", "(unreadable URL)"),
        ("redis+cluster://user:hunter2@h1:1,h2:2/0", "redis+cluster://h1:1,h2:2"),
    ],
)
def test_a_url_is_logged_without_credentials(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_an_error_is_shown_in_one_printable_line_without_what_was_sent() -> None:
    quoted = (
        "Command # 1 (SADD wr:1:{a}:blocks \x1b\x00\n\x9f) of pipeline caused error: ('OOM: full',)"
    )
    assert describe(ResponseError(quoted)) == "ResponseError: OOM: full"
    assert describe(OSError("a\nb\x1bc" + "d" * 1_000)) == "OSError: a b c" + "d" * 195


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (ReadOnlyError("You can't write against a read only replica."), True),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (ResponseError("MISCONF Errors writing to the RDB file"), True),
        (ResponseError("ERR Error running script: -READONLY You can't write"), True),
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind"), False),
        (RedisConnectionError("READONLY"), False),
        (TimeoutError("OOM"), False),
    ],
)
def test_a_refused_write_is_told_from_other_errors(error: Exception, is_refusal: bool) -> None:  # noqa: FBT001
    assert refuses_writes(error) is is_refusal
