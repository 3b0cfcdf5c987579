"""How many connections fit into the open files that a process may have."""

from __future__ import annotations

import asyncio
import errno

import pytest

from router.capacity import OPERATORS_LEAST, RESERVED, ShortageLog, capacity_of
from router.config import ConfigError, LimitSettings, decode_config
from router.server import RouteTable, Server


@pytest.mark.parametrize("open_files", [200, 256, 1_024, 4_096, 20_000, 65_536, 1 << 20])
async def test_clients_operators_and_the_rest_fit_into_the_open_files(open_files: int) -> None:
    """L-03, C-16: two for each client's connection, at most half of the files for clients."""
    limits = LimitSettings()
    capacity = capacity_of(limits, open_files)
    clients, operators = capacity.clients.connections, capacity.operators.connections
    server = Server(RouteTable({}), capacity.clients)
    assert 2 * clients + server.shed_most + operators + RESERVED <= open_files
    assert 0 < clients <= min(limits.connections, open_files // 2)
    assert operators >= OPERATORS_LEAST
    assert clients > open_files // 4 or clients == limits.connections
    if open_files >= 20_000:  # what operators and the rest need does not grow for ever
        assert clients > 0.97 * open_files / 2 or clients == limits.connections


def test_what_is_configured_stays_where_it_fits() -> None:
    limits = LimitSettings(connections=100, body_bytes=77)
    capacity = capacity_of(limits, 20_000)
    assert capacity.clients == limits
    assert capacity_of(limits, 100).clients.connections == 19
    assert capacity_of(limits, 10).clients.connections == 1


def test_a_shortage_is_told_once_and_anything_else_as_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C-16: asyncio reports every client that it could not accept, with a stack trace."""
    loop = asyncio.new_event_loop()
    try:
        loop.set_exception_handler(ShortageLog())
        for _ in range(1_000):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "accept", "exception": error})
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        loop.call_exception_handler({"message": "a fault", "exception": OSError(errno.EPERM, "")})
        loop.call_exception_handler({"message": "another"})
        assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"trusted_proxies": ["10.0.0.0/8", "10.0.0.1/8"]}, "limits.trusted_proxies[1]"),
        ({"trusted_proxies": ["proxy.example"]}, "limits.trusted_proxies[0]"),
        ({"buffered_bytes": 1_000}, "limits.buffered_bytes"),
        ({"connections_per_address": 0}, "limits.connections_per_address"),
        ({"body_bytes_per_s": 0}, "limits.body_bytes_per_s"),
    ],
)
def test_a_wrong_limit_is_named(limits: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config({"limits": limits})
    assert key in str(caught.value)
