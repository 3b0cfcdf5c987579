"""Unix sockets: listeners with a mode, files of killed routers, replicas; nobody has an address."""

from __future__ import annotations

import asyncio
import socket
import stat
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

from router.config import ConfigError, LimitSettings
from router.listener import Listener
from router.reply import json_response
from support.front import staged
from support.placed_engine import MODEL, TEXT, PlacedEngine
from support.placed_router import curl, placed, ran
from support.raw import RawClient, answering, get, post, sized, with_both_loops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.client import Answer
    from router.request import Request


@pytest.fixture(name="folder")
def short_folder() -> Iterator[Path]:
    """Make a folder with a short name: a socket's path has at most 104 bytes on macOS."""
    with TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def mode_of(path: Path) -> int:
    found = path.stat()
    assert stat.S_ISSOCK(found.st_mode)
    return stat.S_IMODE(found.st_mode)


def is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


async def tell_peer(request: Request) -> Answer:
    return json_response(request.peer)


@with_both_loops
async def test_a_listener_is_a_file_with_its_mode_as_long_as_it_listens(folder: Path) -> None:
    path = folder / "router.sock"
    listener = Listener("listen", f"unix:{path}", mode=0o620)
    await listener.start({"/": {"GET": tell_peer}})
    assert mode_of(path) == 0o620
    assert listener.url == f"unix:{path}"
    connected = await RawClient.connect_unix(str(path))
    for _ in range(2):
        connected.send(get("/"))
        assert (await connected.reply()).body == b"null"
    await connected.close()
    await listener.close()
    assert not is_there(path)


def test_a_socket_that_nobody_listens_on_is_replaced(folder: Path) -> None:
    path = folder / "router.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    listener = Listener("listen", f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.connect(str(path))
    listener.stop_accepting()
    assert not path.exists()


def test_a_socket_in_use_and_any_other_file_are_left_alone(folder: Path) -> None:
    path = folder / "router.sock"
    first = Listener("listen", f"unix:{path}")
    with pytest.raises(ConfigError, match=r"admin: cannot .*another process listens"):
        Listener("admin", f"unix:{path}")
    assert path.is_socket()
    first.stop_accepting()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="there is a file that is no socket"):
        Listener("listen", f"unix:{path}")
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="listen: cannot listen on"):
        Listener("listen", f"unix:{folder}/nowhere/router.sock")
    with pytest.raises(ConfigError, match="too long"):
        Listener("listen", f"unix:/{'x' * 200}")


def test_a_listener_leaves_the_socket_of_the_one_that_came_after_it(folder: Path) -> None:
    path = folder / "router.sock"
    first = Listener("listen", f"unix:{path}")
    path.unlink()
    second = Listener("listen", f"unix:{path}")
    first.stop_accepting()
    assert path.is_socket()
    second.stop_accepting()


@with_both_loops
async def test_a_client_of_a_unix_socket_that_leaves_cancels_its_request(folder: Path) -> None:
    """F5, A29: also where so much waits behind the request that nothing is read."""
    cancelled = asyncio.Event()

    async def wait(_: Request) -> Answer:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError

    path = folder / "router.sock"
    listener = Listener("listen", f"unix:{path}")
    limits = LimitSettings(head_deadline_s=0.2)
    await listener.start({"/v1/chat/completions": {"POST": wait}}, limits)
    for waiting_bytes in (0, 2**20):
        cancelled.clear()
        connected = await RawClient.connect_unix(str(path))
        connected.send(post())
        connected.send(get() * (waiting_bytes // len(get())))
        await asyncio.sleep(0.05)
        connected.abort()
        async with asyncio.timeout(20):
            await cancelled.wait()
    await listener.close()


@with_both_loops
async def test_a_replica_at_a_unix_socket_is_relayed_to(folder: Path) -> None:
    path = str(folder / "engine.sock")
    async with staged(answering(sized(b"ok")), replica_path=path) as front:
        for _ in range(3):
            assert (await front.ask(post())).body == b"ok"
        assert front.replica.accepted == 1
        assert front.replica.requests[0].all(b"host") == [b"localhost"]
        assert front.replica.requests[0].all(b"x-forwarded-for") == [b"127.0.0.1"]


async def test_a_router_between_unix_sockets_serves_curl_and_the_sdk(
    folder: Path, tmp_path: Path
) -> None:
    """A client of a unix socket has no address, so that none is forwarded."""
    clients, operators = folder / "router.sock", folder / "admin.sock"
    async with (
        PlacedEngine(path=str(folder / "engine.sock")) as engine,
        placed(
            tmp_path,
            listen=f"unix:{clients}",
            admin=f"unix:{operators}",
            socket_mode="0660",
            replicas=[{"url": engine.url}],
            attend_sidecars=True,
        ) as router,
    ):
        assert router.url == f"unix:{clients}"
        assert mode_of(clients) == 0o660
        [view] = await router.all_up("--unix-socket", str(operators))
        assert view["endpoint"] == engine.url
        assert view["replica"] == str(folder / "engine.sock").strip("/").replace("/", ".")
        words = ("--unix-socket", str(clients))
        assert f'"{MODEL}"' in await curl(*words, "http://router/v1/models")
        transport = httpx2.AsyncHTTPTransport(uds=str(clients))
        async with httpx2.AsyncClient(transport=transport) as http:
            asking = openai.AsyncOpenAI(
                base_url="http://router/v1", api_key="none", max_retries=0, http_client=http
            )
            chat = await asking.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert "".join([e.choices[0].delta.content or "" async for e in chat]) == TEXT
        assert engine.forwarded == [None]
        assert engine.hosts == ["localhost"]
        metrics = await curl("--unix-socket", str(operators), "http://router/metrics")
        assert f'warmroute_replica_up{{replica="{view["replica"]}"}} 1.0' in metrics
        at = f"unix:{operators}"
        status, out, _ = await ran(sys.executable, "-m", "warmroute", "replicas", "--admin", at)
        assert status == 0
        assert view["replica"] in out
        status, out, _ = await ran(sys.executable, "-m", "warmroute", "doctor", "--admin", at)
        assert (status, out) == (0, "1 replica examined: nothing wrong was found\n")
    assert not is_there(clients)
    assert not is_there(operators)
