"""Connections from a listening socket that several processes, or several lives of one, may share.

A connection that was taken from the queue is never lost: whoever is cancelled while it waits has
taken none. One is taken at a time, so that a process that is busy leaves the others their part.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import socket

    from router.server import Server

ACCEPT_PAUSE_S: Final = 0.5
"""How long nothing is accepted after the system refused to, for want of descriptors mostly."""


async def accepted_from(listening: socket.socket) -> tuple[socket.socket, Any]:
    """Return the next connection and its peer's address; raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        is_readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(listening.fileno(), _wake, is_readable)
        try:
            await is_readable
        finally:
            loop.remove_reader(listening.fileno())
        with suppress(BlockingIOError, InterruptedError):  # somebody else was faster
            return listening.accept()


def _wake(is_readable: asyncio.Future[None]) -> None:
    if not is_readable.done():
        is_readable.set_result(None)


class PlainAcceptor:
    """Takes connections without TLS from a socket that stays its owner's, until it is stopped."""

    def __init__(self, sock: socket.socket, server: Server) -> None:
        sock.settimeout(0)
        self._socket = sock
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._begun: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._run(), name="accept")

    def stop(self) -> None:
        """Accept no more."""
        self._accepting.cancel()

    async def stopped(self) -> None:
        """Wait until nothing looks at the socket any more, after ``stop``."""
        await asyncio.gather(self._accepting, return_exceptions=True)

    async def close(self) -> None:
        """Wait until what was accepted is the server's."""
        self.stop()
        await asyncio.gather(self._accepting, *self._begun, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                accepted, _ = await accepted_from(self._socket)
            except ConnectionError:  # it left before it was accepted
                continue
            except OSError as error:
                message = "cannot accept"
                self._loop.call_exception_handler({"message": message, "exception": error})
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = self._loop.create_task(self._begin(accepted), name="begin")
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)

    async def _begin(self, accepted: socket.socket) -> None:
        accepted.settimeout(0)
        try:
            await self._loop.connect_accepted_socket(self._server, accepted)
        except OSError:  # it is gone
            accepted.close()
