"""Redis clients are built in one place, with explicit limits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from state.client import RedisSettings, blocking_client, command_client, redact

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


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://h", "unix:///run/s?db=3"])
async def test_every_limit_is_explicit(url: str) -> None:
    client = command_client(RedisSettings(url=url))
    tailer = blocking_client(RedisSettings(url=url), block_s=2.0)
    for each, timeout_s, connections in ((client, 0.05, 8), (tailer, 2.5, 1)):
        pool = each.connection_pool
        options = pool.connection_kwargs
        assert options["socket_timeout"] == timeout_s
        assert options["socket_connect_timeout"] == 0.25
        assert options["retry"]._retries == 0
        assert options["health_check_interval"] == 0
        assert pool.max_connections == connections
        await each.aclose()


@pytest.mark.parametrize(
    "url", ["redis://h?socket_timeout=99", "unix:///s?max_connections=500", "http://h", "h:6379"]
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
    ],
)
def test_a_url_is_logged_without_credentials(url: str, shown: str) -> None:
    assert redact(url) == shown
