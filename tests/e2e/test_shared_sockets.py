"""Listening sockets that two processes' listeners hand to each other: nobody is refused or reset.

Both listeners are in the test's process; what they share is what processes inherit.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from router.config import ConfigError, LimitSettings
from router.listener import Listener, bind_inet
from router.reply import own_response
from router.supervisor.binding import Binding
from router.supervisor.listener import SharedListener
from router.tls import ListenerContext
from support import tls

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from router.client import Handler
    from router.reply import Response
    from router.request import Request

LIMITS = LimitSettings()
CLIENTS = 6
TURNS = 12
KINDS = ("inet", "ipv6", "unix", "tls")


class Pair:
    """Two listeners on the sockets of one binding."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        authority = tls.Authority(folder)
        settings = authority.listener(authority.issue("127.0.0.1")) if kind == "tls" else None
        self.context = None if settings is None else ListenerContext("listen_tls", settings)
        self.client_tls: ssl.SSLContext | None = tls.client(authority.ca) if settings else None
        address = {"ipv6": "[::1]:0", "unix": f"unix:{folder}/s"}.get(kind, "127.0.0.1:0")
        self.binding = Binding(address, 2, is_tls=settings is not None, mode=0o600)
        self.left = [0, 0]
        self.listeners = [self._listener(0), self._listener(1)]

    def _listener(self, number: int) -> SharedListener:
        inherited = [socket.socket(fileno=socket.dup(one.fileno())) for one in self.binding.sockets]

        def leaving() -> None:
            self.left[number] += 1

        return SharedListener(self.binding.url, inherited, self.context, leaving)

    async def start(self) -> None:
        for number, listener in enumerate(self.listeners):
            await listener.start({"/": {"GET": named(number)}}, LIMITS)

    async def ask(self) -> str:
        """Return the number of the listener that answers a new connection; raises OSError."""
        if self.kind == "unix":
            path = self.binding.url.removeprefix("unix:")
            reader, writer = await asyncio.open_unix_connection(path)
        else:
            host = "::1" if self.kind == "ipv6" else "127.0.0.1"
            port = int(self.binding.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(host, port, ssl=self.client_tls)
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            return answer[-1:].decode()
        finally:
            writer.close()
            await writer.wait_closed()

    async def close(self) -> None:
        for listener in self.listeners:
            await listener.close()
        self.binding.close()


def named(number: int) -> Handler:
    async def answer(_: Request) -> Response:
        return own_response(str(number).encode(), "text/plain")

    return answer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_storm_of_connections_meets_somebody_while_sockets_change_hands(
    tmp_path: Path, kind: str
) -> None:
    """C-20: inherited sockets stay open, so that what waits there is taken by whoever is next."""
    pair = Pair(tmp_path, kind)
    await pair.start()
    every = range(len(pair.binding.sockets))
    is_over, answers = asyncio.Event(), []

    async def storm() -> None:
        while not is_over.is_set():
            answers.append(await pair.ask())

    first, second = pair.listeners
    first.accept_from(every)
    clients = [asyncio.create_task(storm()) for _ in range(CLIENTS)]
    for turn in range(TURNS):
        reached = len(answers) + CLIENTS
        giver, taker = (first, second) if turn % 2 == 0 else (second, first)
        giver.accept_from(())  # nobody accepts for a moment
        await asyncio.sleep(0)
        taker.accept_from(every)
        while len(answers) < reached:
            await asyncio.sleep(0.001)
            for client in clients:
                if client.done():
                    client.result()
    is_over.set()
    await asyncio.gather(*clients)
    assert set(answers) == {"0", "1"}
    await pair.close()
    assert pair.left == [1, 1]


async def test_who_stopped_accepting_accepts_nothing_whatever_it_is_told(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "inet")
    await pair.start()
    first, second = pair.listeners
    every = range(len(pair.binding.sockets))
    first.accept_from(every)
    first.stop_accepting()
    first.accept_from(every)
    second.accept_from(every)
    assert {await pair.ask() for _ in range(8)} == {"1"}
    await pair.close()


async def test_once_all_stopped_nobody_waits_in_a_queue_that_no_one_takes_from(
    tmp_path: Path,
) -> None:
    """Also while one of them still has a request open, and with it all that it inherited."""
    pair = Pair(tmp_path, "inet")
    await pair.start()
    for listener in pair.listeners:
        listener.stop_accepting()
    while pair.left != [1, 1]:  # noqa: ASYNC110 - observes from outside
        await asyncio.sleep(0)
    pair.binding.close()
    with pytest.raises(ConnectionError):
        await pair.ask()
    await pair.close()


async def test_an_address_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    """Sockets that several may bind would else take half of another router's connections."""
    pair = Pair(tmp_path, "inet")
    address = pair.binding.url.removeprefix("http://")
    for attempt in (
        lambda: Binding(address, 2, is_tls=False, mode=0o600),
        lambda: Listener("listen", address),
    ):
        with pytest.raises(ConfigError, match=r"\Alisten: cannot .*in use; .* --listen\Z"):
            attempt()
    await pair.close()
    host, port = address.split(":")
    bind_inet(host, int(port)).close()  # it is free again
