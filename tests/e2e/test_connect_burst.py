"""Thousands of clients at once, and a router that is busy: each connection is made and counts."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from router.listener import Listener
from router.reply import own_response
from router.upstream import UpstreamSettings
from support.front import staged
from support.raw import answering, get, sized, with_both_loops
from support.stage import allow_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.client import Answer
    from router.request import Request

WANTED = 3_000
SYSTEM_MOST = Path("/proc/sys/net/core/somaxconn")
ANSWER = b"here"


def clients_most() -> int:
    """Return how many may wait at one socket, as far as the system goes."""
    bound = int(SYSTEM_MOST.read_text()) if SYSTEM_MOST.exists() else 128
    return min(WANTED, bound)


@pytest.fixture(name="folder")
def short_folder() -> Iterator[Path]:
    """Make a folder with a short name: a socket's path has at most 104 bytes on macOS."""
    with TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


async def answer(_: Request) -> Answer:
    return own_response(ANSWER, "text/plain")


def begin(url: str) -> socket.socket:
    """Return a client that has begun to connect; raises OSError where it is turned away."""
    path = url.removeprefix("unix:")
    is_unix = path != url
    client = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    client.settimeout(0)
    try:
        client.connect(path if is_unix else ("127.0.0.1", int(url.rpartition(":")[2])))
    except BlockingIOError:
        if is_unix:  # there is no place to wait in
            client.close()
            raise
    return client


def connected(clients: list[socket.socket]) -> int:
    """Return how many clients have their connection, nobody having accepted it yet."""
    poll = select.poll()
    for client in clients:
        poll.register(client, select.POLLOUT)
    return sum(events == select.POLLOUT for _, events in poll.poll(0))


async def said_to(client: socket.socket) -> bytes:
    """Ask, and return the end of the answer."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, get("/"))
    said = b""
    while not said.endswith(ANSWER):
        more = await loop.sock_recv(client, 4_096)
        assert more, said
        said += more
    return said[-len(ANSWER) :]


@pytest.mark.parametrize("is_unix", [False, True])
@with_both_loops
async def test_none_is_reset_or_turned_away(
    is_unix: bool,  # noqa: FBT001 - drawn
    folder: Path,
) -> None:
    allow_sockets()
    listener = Listener("listen", f"unix:{folder}/router.sock" if is_unix else "127.0.0.1:0")
    await listener.start({"/": {"GET": answer}})
    clients: list[socket.socket] = []
    try:
        # The loop accepts nobody meanwhile.
        clients.extend(begin(listener.url) for _ in range(clients_most()))
        assert connected(clients) == len(clients)
        answers = await asyncio.gather(*map(said_to, clients))
        assert answers == [ANSWER] * len(clients)
    finally:
        for client in clients:
            client.close()
        await listener.close()


@with_both_loops
async def test_a_connection_to_a_replica_counts_although_the_loop_was_late_to_see_it() -> None:
    """Timers come before what sockets have: it was there long before its deadline was looked at."""
    timeout_s = 0.05
    async with staged(
        answering(sized(b"{}")), UpstreamSettings(connect_timeout_s=timeout_s)
    ) as front:
        dials = [asyncio.create_task(front.pool.connect(front.endpoint)) for _ in range(50)]
        await asyncio.sleep(0)
        time.sleep(4 * timeout_s)  # noqa: ASYNC251 - what holds the loop
        connections = await asyncio.gather(*dials)
        assert front.pool.open_connections == len(connections)
        for connection in connections:
            connection.discard()
