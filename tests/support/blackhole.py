"""A port on which connections are neither made nor refused, until it becomes a way to a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class Blackhole:
    """``async with Blackhole() as hole``: its accept queue is full, so a connect only hangs."""

    def __init__(self) -> None:
        self._listener = self._listen(backlog=0)
        self.port = int(self._listener.getsockname()[1])
        self._fillers: list[socket.socket] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The hole as a Redis URL."""
        return f"redis://127.0.0.1:{self.port}"

    @staticmethod
    def _listen(backlog: int, port: int = 0) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(backlog)
        listener.settimeout(0)
        return listener

    async def __aenter__(self) -> Self:
        while not await self.is_hanging():
            assert len(self._fillers) < 64, "the accept queue does not fill"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for filler in self._fillers:
            filler.close()
        self._listener.close()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def is_hanging(self) -> bool:
        """Return whether a connect is neither made nor refused within a moment."""
        probe = socket.socket()
        probe.settimeout(0)
        self._fillers.append(probe)
        try:
            async with asyncio.timeout(0.2):
                await asyncio.get_running_loop().sock_connect(probe, ("127.0.0.1", self.port))
        except TimeoutError:
            return True
        return False

    async def heal(self, target: Path) -> None:
        """From now on, be a way to the Unix socket ``target``."""
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()
        self._listener.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            far_reader, far_writer = await asyncio.open_unix_connection(str(target))
            await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))

        listener = self._listen(128, self.port)
        self._server = await asyncio.start_server(serve, sock=listener)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
