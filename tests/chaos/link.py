"""A way to a server over TCP that can be slow, lossy, dead or cut, and otherwise tells the truth.

A server that refuses connections makes the link refuse them, too: whoever dials the link sees what
he would see of the server itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import Final, Self

HOST: Final = "127.0.0.1"
RESET: Final = struct.pack("ii", 1, 0)
LOOK_S: Final = 0.03
PIECE_BYTES: Final = 1 << 16


@dataclass(slots=True)
class Trouble:
    """What a link does to the bytes. Lost ones are gone; ``cut_after_bytes`` counts replies."""

    delay_s: float = 0.0
    loses_requests: bool = False
    loses_replies: bool = False
    slice_bytes: int | None = None
    cut_after_bytes: int | None = None
    bytes_per_s: float | None = None


class FaultLink:
    """``async with FaultLink(target_port) as link``; its own ``port`` stays the same."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._honest = asyncio.Event()
        self.trouble = Trouble()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._returning: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._returning is not None:
            self._returning.cancel()
        self._close()
        self.trouble = Trouble()
        await asyncio.sleep(LOOK_S)  # who was just accepted has a task by then
        self.reset_all()
        if self._tasks:  # each ends with its connections
            await asyncio.wait(self._tasks, timeout=5)
        await asyncio.sleep(LOOK_S)  # and an aborted socket is closed a moment later

    @property
    def trouble(self) -> Trouble:
        """What is done to the bytes."""
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: Trouble) -> None:
        self._trouble = trouble
        if trouble.loses_replies:
            self._honest.clear()
        else:
            self._honest.set()

    @property
    def url(self) -> str:
        """Where routers find it."""
        return f"http://{HOST}:{self.port}"

    def heal(self) -> None:
        """Be an honest link again. Connections that lost something end."""
        lost = self.trouble.loses_requests or self.trouble.loses_replies
        self.trouble = Trouble()
        if lost:
            self.reset_all()

    def reset_all(self) -> None:
        """Reset every open connection."""
        for writer in list(self._writers):
            _reset(writer)

    def notice_death(self) -> None:
        """Refuse connections until the server takes them again; reset what is open."""
        if self._server is None:
            return
        self._close()
        self.reset_all()
        self._returning = asyncio.create_task(self._return())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port, backlog=512)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _return(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.target_port)
                writer.close()
                await self._listen()
                return

    async def _refuses(self) -> bool:
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(HOST, self.target_port)
        except ConnectionRefusedError:
            return True
        except OSError:  # a full backlog, or late: not dead
            return False
        writer.close()
        return False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection(HOST, self.target_port)
            self._writers.add(far)
            there = asyncio.create_task(self._pass(reader, far, is_reply=False))
            back = asyncio.create_task(self._pass(far_reader, writer, is_reply=True))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
                if back.done() and await self._refuses():
                    self.notice_death()
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        except ConnectionRefusedError:
            _reset(writer)
            self.notice_death()
        except OSError:
            _reset(writer)
        finally:
            for one in (writer, far):
                if one is not None:
                    self._writers.discard(one)
                    one.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                trouble = self.trouble
                if trouble.delay_s:
                    await asyncio.sleep(trouble.delay_s)
                if trouble.loses_replies if is_reply else trouble.loses_requests:
                    continue
                limit = trouble.cut_after_bytes
                if is_reply and limit is not None and passed + len(data) > limit:
                    writer.write(data[: max(0, limit - passed)])
                    await writer.drain()
                    _reset(writer)
                    return
                passed += len(data)
                await self._write(writer, data, trouble)
        await self._honest.wait()  # nobody hears of an end either

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, trouble: Trouble) -> None:
        step = trouble.slice_bytes or len(data)
        for start in range(0, len(data), step):
            part = data[start : start + step]
            writer.write(part)
            await writer.drain()
            if trouble.bytes_per_s is not None:
                await asyncio.sleep(len(part) / trouble.bytes_per_s)
            elif trouble.slice_bytes is not None:
                await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
