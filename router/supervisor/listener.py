"""The clients' listener of one process of several: it accepts from the sockets it is told to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.accept import PlainAcceptor
from router.listener import CLOSE_S
from router.server import RouteTable, Server
from router.tls_accept import TlsAcceptor

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Mapping, Sequence

    from router.client import Handler
    from router.config import LimitSettings
    from router.tls import ListenerContext


class SharedListener:
    """A ``Listener`` on inherited sockets; ``leaving`` is called when it accepts no more."""

    def __init__(
        self,
        url: str,
        sockets: Sequence[socket.socket],
        tls: ListenerContext | None,
        leaving: Callable[[], None],
    ) -> None:
        self.url = url
        self._sockets = sockets
        self._tls = tls
        self._leaving = leaving
        self._server: Server | None = None
        self._wanted: frozenset[int] = frozenset()
        self._accepting: dict[int, PlainAcceptor | TlsAcceptor] = {}
        self._stopped: list[PlainAcceptor | TlsAcceptor] = []
        self._is_closed = False
        self._letting_go: asyncio.Future[None] | None = None

    async def start(
        self, routes: Mapping[str, Mapping[str, Handler]], limits: LimitSettings
    ) -> None:
        """Serve ``routes`` to whoever connects to the sockets that it is told to accept from."""
        self._server = Server(RouteTable(routes), limits)
        self.accept_from(self._wanted)

    def accept_from(self, places: Collection[int]) -> None:
        """Accept from the sockets at these places, and from no other."""
        self._wanted = frozenset(places)
        if self._server is None or self._is_closed:
            return
        for place in self._accepting.keys() - self._wanted:
            acceptor = self._accepting.pop(place)
            acceptor.stop()
            self._stopped.append(acceptor)
        for place in sorted(self._wanted - self._accepting.keys()):
            taken = self._sockets[place]
            self._accepting[place] = (
                PlainAcceptor(taken, self._server)
                if self._tls is None
                else TlsAcceptor(taken, self._server, self._tls)
            )

    def say_goodbye(self) -> None:
        """Let every connection, also those still to come, end with its next answer."""
        if self._server is not None:
            self._server.stop()

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on, each to its next answer."""
        if not self._is_closed:
            self.accept_from(())
            self._is_closed = True
            self._letting_go = asyncio.ensure_future(self._let_go())
        self.say_goodbye()

    async def _let_go(self) -> None:
        """Close the sockets: while any process has one open, somebody may wait there."""
        for acceptor in self._stopped:
            await acceptor.stopped()
        for each in self._sockets:
            each.close()
        self._leaving()

    async def close(self) -> None:
        """End every connection; requests that still run are cancelled after a moment."""
        self.stop_accepting()
        if self._letting_go is not None:
            await self._letting_go
        stopped, self._stopped = self._stopped, []
        for acceptor in stopped:
            await acceptor.close()
        if self._server is not None:
            await self._server.close(CLOSE_S)
            self._server = None
