"""A state server that answers every command with the same bytes, until it becomes a real one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 1 << 16


class FakeStore:
    """``async with FakeStore(server.socket_path, reply) as fake``, on a port of its own.

    ``closes``: a connection ends with its first answer. ``greets``: AUTH alone is answered well.
    ``reply`` None: the server at the socket answers.
    """

    def __init__(
        self, target: Path, reply: bytes | None, *, closes: bool = False, greets: bool = False
    ) -> None:
        self._target = target
        self.reply = reply
        self.closes = closes
        self._greets = greets
        self.commands: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        if self._tasks:  # each ends with its connection
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        back: asyncio.Task[None] | None = None
        try:
            while raw := await self._command(reader):
                if b"AUTH" in raw[:20] and (self._greets or self.reply is None):
                    writer.write(b"+OK\r\n")
                elif self.reply is not None:
                    writer.write(self.reply)
                    if self.closes:
                        break
                else:
                    if far is None:
                        near, far = await asyncio.open_unix_connection(str(self._target))
                        back = asyncio.create_task(self._pass(near, writer))
                    far.write(raw)
        except OSError:
            pass
        finally:
            if back is not None:
                back.cancel()
            self._writers.discard(writer)
            for one in (far, writer):
                if one is not None:
                    one.close()

    async def _command(self, reader: asyncio.StreamReader) -> bytes:
        """Return the bytes of one command; none when the connection ends."""
        try:
            raw = await reader.readuntil(b"\r\n")
            for _ in range(int(raw[1:])):
                head = await reader.readuntil(b"\r\n")
                raw += head + await reader.readexactly(int(head[1:]) + 2)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        self.commands.append(raw)
        return raw

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
