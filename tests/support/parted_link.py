"""A link to a server that can lose what goes one way or both, as a network in two parts does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CHUNK_BYTES = 1 << 16
_HOST = "127.0.0.1"


class PartedLink:
    """``async with PartedLink(server.socket_path) as link``, on a TCP port of its own.

    Parted, nobody hears anything: no reply, no reset, no end of a connection. What was lost is not
    sent again; ``heal`` ends the connections of that time.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._loses_requests = False
        self._loses_replies = False
        self.delay_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._cut()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.port}"

    def part(self, *, replies_only: bool = False) -> None:
        """Lose everything from now on, or all that comes back."""
        self._loses_requests, self._loses_replies = not replies_only, True

    def heal(self) -> None:
        """Let everything through again."""
        self._loses_requests = self._loses_replies = False
        self._cut()

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(str(self._target))
            self._writers.add(far_writer)
            writers.append(far_writer)
            await asyncio.gather(
                self._pass(reader, far_writer, lambda: self._loses_requests),
                self._pass(far_reader, writer, lambda: self._loses_replies),
            )
        except OSError:
            pass
        finally:
            for one in writers:
                self._writers.discard(one)
                one.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loses: Callable[[], bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not loses():
                    writer.write(data)
                    await writer.drain()
        if not loses():
            writer.close()
