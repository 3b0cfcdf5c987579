"""Accepts connections that begin with TLS: one task for each handshake, bounded in time and number.

Each handshake takes the context as it is then, so that another certificate counts from the next
connection on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from router.accept import ACCEPT_PAUSE_S, accepted_from
from router.address import peer_address
from router.peer import Peers
from router.tls import HandshakeLog
from state.tls import SHUTDOWN_S

if TYPE_CHECKING:
    import socket

    from router.server import Server
    from router.tls import ListenerContext

SETTLE_TURNS: Final = 4
"""A handshake that is done counts twice until its task has ended, some turns of the loop later."""


class TlsAcceptor:
    """Takes connections from a listening socket, which stays its owner's, until it is closed."""

    def __init__(self, sock: socket.socket, server: Server, context: ListenerContext) -> None:
        sock.settimeout(0)
        self._socket = sock
        self._server = server
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._failures = HandshakeLog(context.name, self._loop.time)
        self._handshakes: set[asyncio.Task[None]] = set()
        limits = server.limits
        self._peers = Peers(limits.connections_per_address, limits.trusted_proxies)
        """Of those that are no TLS yet: the server counts the others."""
        self._accepting = self._loop.create_task(self._run(), name=f"accept {context.name}")

    def stop(self) -> None:
        """Accept no more; handshakes that began go on."""
        self._accepting.cancel()

    async def stopped(self) -> None:
        """Wait until nothing looks at the socket any more, after ``stop``."""
        await asyncio.gather(self._accepting, return_exceptions=True)

    async def close(self) -> None:
        """End what is not done."""
        tasks = (self._accepting, *self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                accepted, name = await accepted_from(self._socket)
            except ConnectionError:  # it left before it was accepted
                continue
            except OSError as error:
                message = f"{self._context.name}: cannot accept"
                self._loop.call_exception_handler({"message": message, "exception": error})
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            peer = peer_address(name)
            if self._peers.enter(peer) > 0 or await self._is_full():
                self._peers.leave(peer)
                accepted.close()
                continue
            task = self._loop.create_task(self._begin(accepted), name="TLS handshake")
            self._handshakes.add(task)
            task.add_done_callback(partial(self._ended, peer))

    def _ended(self, peer: str | None, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._peers.leave(peer)

    async def _is_full(self) -> bool:
        """Return whether nobody more can even be told that there are too many."""
        most = self._server.limits.connections + self._server.shed_most
        for _ in range(SETTLE_TURNS):
            if len(self._handshakes) + self._server.open_connections < most:
                return False
            await asyncio.sleep(0)
        return True

    async def _begin(self, accepted: socket.socket) -> None:
        accepted.settimeout(0)
        try:
            await self._loop.connect_accepted_socket(
                self._server,
                accepted,
                ssl=self._context.current,
                ssl_handshake_timeout=self._server.limits.head_deadline_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # an SSLError is one, and so is a handshake that took too long
            self._context.failed_handshakes += 1
            self._failures.note(error)
            with suppress(OSError):
                accepted.close()
