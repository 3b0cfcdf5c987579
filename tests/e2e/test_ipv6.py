"""IPv6: listeners, replicas, names, what is forwarded. Needs ``::1``, and says so without it."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from router.address import peer_address
from router.listener import Listener
from router.reply import json_response
from support.placed_engine import MODEL, PlacedEngine
from support.placed_router import curl, placed, ran
from support.raw import RawClient, with_both_loops

if TYPE_CHECKING:
    from pathlib import Path

    from router.client import Answer
    from router.request import Request


def has_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_loopback(), reason="this machine has no ::1")
needs_both = pytest.mark.skipif(
    not (has_loopback() and socket.has_dualstack_ipv6()), reason="no socket takes IPv4 and IPv6"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (("127.0.0.1", 1), "127.0.0.1"),
        (("::1", 1, 0, 0), "::1"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::1"),
        (("::ffff:10.1.2.3", 1, 0, 0), "10.1.2.3"),
        ("", None),
        (b"", None),
        (None, None),
        (("::1\r\nX-Evil: 1", 1), None),
    ],
)
def test_a_peer_is_told_as_a_plain_address_or_not_at_all(name: object, expected: object) -> None:
    assert peer_address(name) == expected


async def tell(request: Request) -> Answer:
    return json_response(request.peer)


@needs_both
@with_both_loops
async def test_the_wildcard_of_ipv6_takes_ipv4_too() -> None:
    listener = Listener("listen", "[::]:0")
    await listener.start({"/": {"GET": tell}})
    port = int(listener.url.removeprefix("http://[::]:"))
    for host in ("::1", "127.0.0.1"):
        connected = RawClient(*await asyncio.open_connection(host, port))
        shown = f"[{host}]" if ":" in host else host
        connected.send(f"GET / HTTP/1.1\r\nHost: {shown}:{port}\r\n\r\n".encode())
        assert (await connected.reply()).body == f'"{host}"'.encode()
        await connected.close()
    await listener.close()


@needs_ipv6
@pytest.mark.parametrize("host", ["[::1", "[::1]x", "[zz::1]", "::1", "[::1]:a", "[]"])
@with_both_loops
async def test_a_host_that_is_no_literal_is_refused(host: str) -> None:
    listener = Listener("listen", "[::1]:0")
    await listener.start({"/": {"GET": tell}})
    port = int(listener.url.removeprefix("http://[::1]:"))
    connected = RawClient(*await asyncio.open_connection("::1", port))
    connected.send(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert b" 400 " in (await connected.reply()).line
    await connected.close()
    await listener.close()


@needs_ipv6
async def test_a_fleet_on_ipv6_has_names_labels_and_forwarded_addresses(tmp_path: Path) -> None:
    async with (
        PlacedEngine("::1") as engine,
        placed(
            tmp_path, listen="[::1]:0", admin="[::1]:0", replicas=[{"url": engine.url}]
        ) as router,
    ):
        assert router.url.startswith("http://[::1]:")
        [view] = await router.all_up()
        port = engine.url.rpartition(":")[2]
        assert (view["endpoint"], view["replica"]) == (engine.url, f"0::1:{port}")
        body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hi"}}]}}'
        words = ("--header", "Content-Type: application/json", "--data", body)
        assert "one two three" in await curl(*words, f"{router.url}/v1/chat/completions")
        assert engine.forwarded == ["::1"]
        assert engine.hosts == [f"[::1]:{port}"]
        metrics = await curl(f"{router.admin_url}/metrics")
        assert f'warmroute_replica_up{{replica="0::1:{port}"}} 1.0' in metrics
        command = (sys.executable, "-m", "warmroute", "explain", "--admin", router.admin_url)
        status, out, _ = await ran(*command, "--last", "1")
        assert status == 0
        assert f"0::1:{port}" in out
