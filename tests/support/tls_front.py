"""TLS in front of a server on a Unix socket: a bundled server may be built without it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

_CHUNK_BYTES = 1 << 16
_HOST = "127.0.0.1"


class TlsFront:
    """``async with TlsFront(server.socket_path, context) as front``, on a port of its own."""

    def __init__(self, target: Path, context: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, _HOST, 0, ssl=self._context)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far_reader, far_writer = await asyncio.open_unix_connection(str(self._target))
        self._writers |= {writer, far_writer}
        await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))
        self._writers -= {writer, far_writer}


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
