"""A link to a server on a Unix socket that can be delayed, cut or pointed at another server."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from state.client import RedisSettings

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK_BYTES = 1 << 16


class SlowLink:
    """``async with SlowLink(path) as link``: each direction takes ``delay_s()`` seconds.

    ``connects_s`` are the loop's times at which somebody connected.
    """

    def __init__(self, target: Path, delay_s: Callable[[], float] = float) -> None:
        self.target = target
        self.delay_s = delay_s
        self.connects_s: list[float] = []
        self._directory = Path(tempfile.mkdtemp(prefix="wrl-"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._directory / "s")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        if self._tasks:  # each ends with its connection
            await asyncio.wait(self._tasks, timeout=5)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"unix://{self._directory / 's'}"

    def settings(self, timeout_s: float = 0.05, max_connections: int = 8) -> RedisSettings:
        return RedisSettings(
            url=self.url,
            command_timeout_s=timeout_s,
            connect_timeout_s=10.0,
            max_connections=max_connections,
        )

    @property
    def open_connections(self) -> int:
        return len(self._writers) // 2

    def cut(self) -> None:
        """Close every connection; new ones may be made."""
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        self.connects_s.append(loop.time())
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(str(self.target))
        except OSError:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            for one in (writer, far_writer):
                self._writers.discard(one)
                one.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Deliver in order, each piece after the delay that holds when it arrives."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_s, data = await pieces.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            while True:
                data = await reader.read(_CHUNK_BYTES)
                pieces.put_nowait((loop.time() + self.delay_s(), data))
                if not data:
                    break
            await delivering
        except OSError:
            pass
        finally:
            delivering.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivering
            writer.close()  # also after a reset, of which the other side would never hear
