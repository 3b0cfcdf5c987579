"""A listening address: bound before anything else starts, so that a taken one ends the start."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from router.config import ConfigError, LimitSettings, split_address
from router.server import RouteTable, Server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.client import Handler

BACKLOG = 1024
CLOSE_S = 0.5


class Listener:
    """One bound socket; ``key`` names it in errors. Raises ConfigError where it cannot be bound."""

    def __init__(self, key: str, address: str) -> None:
        host, port = split_address(key, address)
        is_ipv6 = ":" in host
        try:
            self._socket = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                backlog=BACKLOG,
            )
        except OSError as error:
            message = f"{key}: cannot listen on {address}: {error.strerror or error}"
            raise ConfigError(message) from None
        bound_port = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if is_ipv6 else host}:{bound_port}"
        self._server: Server | None = None
        self._accepting: asyncio.Server | None = None

    async def start(
        self,
        routes: Mapping[str, Mapping[str, Handler]],
        limits: LimitSettings = LimitSettings(),  # noqa: B008 - frozen
    ) -> None:
        """Serve ``routes`` to whoever connects."""
        self._server = Server(RouteTable(routes), limits)
        loop = asyncio.get_running_loop()
        self._accepting = await loop.create_server(self._server, sock=self._socket, backlog=BACKLOG)

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on, each to its next answer."""
        if self._accepting is not None:
            self._accepting.close()
        self._socket.close()
        if self._server is not None:
            self._server.stop()

    async def close(self) -> None:
        """End every connection; requests that still run are cancelled after a moment."""
        self.stop_accepting()
        if self._server is not None:
            await self._server.close(CLOSE_S)
            self._server = None
