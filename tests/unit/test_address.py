"""URLs of state stores: what they may say, and what of them a client is built of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis, SSLConnection

from state.address import StoreKind, parse_address, redact
from state.client import RedisSettings, blocking_client, command_client
from state.sentinel import SentinelClient

if TYPE_CHECKING:
    from pathlib import Path

_SECRET = "hunter2"  # noqa: S105 - made up, to be looked for


def test_sentinels_are_named_with_the_service_behind_them() -> None:
    address = parse_address("redis+sentinel://u:p@s1:1,[::1]:2,s3/my-service?db=3")
    assert address.kind is StoreKind.SENTINEL
    assert address.nodes == ("s1:1", "::1:2", "s3:26379")
    assert address.service == "my-service"
    assert address.node_url("10.0.0.1:6379") == "redis://u:p@10.0.0.1:6379?db=3"
    assert address.sentinel_url("::1:2") == "redis://[::1]:2"


def test_sentinels_have_credentials_of_their_own() -> None:
    url = f"rediss+sentinel://u:p@s1/x?sentinel_username=a&sentinel_password={_SECRET}%40"
    address = parse_address(url)
    assert address.sentinel_url("s1:1") == f"rediss://a:{_SECRET}%40@s1:1"
    assert address.node_url("h:1") == "rediss://u:p@h:1"
    assert redact(url) == "rediss+sentinel://s1/x"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h:1",
        "redis+sentinel://h:1/",
        "redis+sentinel://h:1/a/b",
        "redis+sentinel:///a",
        "redis+sentinel://h:1,,k/a",
        "redis+sentinel://h:1/a?socket_timeout=9",
        "redis+sentinel://h:1/a#b",
        "redis://h?ca=/etc/hosts",
        "redis://h?db=1&db=2",
        "rediss://h?ssl_cert_reqs=none",
        "rediss://h?ca=/no/such/file",
        "redis+sentinel://h:1/a?sentinel_password=hunter2&x=1",
        "unix+sentinel:///s",
    ],
)
def test_other_forms_are_refused_without_what_is_secret_in_them(url: str) -> None:
    with pytest.raises(ValueError, match="redis url") as refused:
        parse_address(url)
    assert _SECRET not in str(refused.value)


def test_a_certificate_comes_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    file.touch()
    with pytest.raises(ValueError, match="cert and key"):
        parse_address(f"rediss://h?cert={file}")


def _limits(client: Redis) -> tuple[object, ...]:
    connection = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    return (
        connection.socket_timeout,
        connection.socket_connect_timeout,
        connection.retry._retries,
        connection.health_check_interval,
        client.connection_pool.max_connections,
    )


async def test_servers_behind_sentinels_have_the_limits_of_any_other() -> None:
    """F7: none of the library's own, neither for the sentinels nor for the primary."""
    settings = RedisSettings(url="redis+sentinel://u:p@s1:1,s2:2/x")
    for client, timeout_s, most in (
        (command_client(settings), 0.05, 8),
        (blocking_client(settings, block_s=2.0), 2.5, 1),
    ):
        assert isinstance(client, SentinelClient)
        assert _limits(client._connect("h:1")) == (timeout_s, 0.25, 0, 0, most)
        assert _limits(client._connect_sentinel("s1:1")) == (0.05, 0.25, 0, 0, 1)
        await client.aclose()


def test_what_a_tls_url_names_reaches_the_connection(tmp_path: Path) -> None:
    paths = {name: str(tmp_path / name) for name in ("ca", "cert", "key")}
    for path in paths.values():
        (tmp_path / path).touch()
    query = "&".join(f"{name}={path}" for name, path in paths.items())
    client = command_client(RedisSettings(url=f"rediss://h:1/2?{query}"))
    assert isinstance(client, Redis)
    made = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    assert isinstance(made, SSLConnection)
    assert (made.ca_certs, made.certfile, made.keyfile) == tuple(paths.values())
    assert made.ssl_context.cert_reqs.name == "CERT_REQUIRED"
    assert made.check_hostname
    assert made.db == 2
