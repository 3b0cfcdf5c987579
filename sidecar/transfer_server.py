"""Gives pages to other workers: bounded streams, and no peer can make it wait or keep for long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Protocol

from sidecar.transfer import (
    HELLO_BYTES,
    KEY_BYTES,
    NAMESPACE_BYTES,
    End,
    FrameError,
    PeerClosedError,
    Status,
    decode_hello,
    decode_keys,
    encode_answer,
    encode_end,
    encode_page_head,
    fill,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from state.model import BlockId

ACCEPT_PAUSE_S: Final = 0.2
WAITING_STREAMS: Final = 64
"""Connections that may be saying hello while all streams are taken."""
BACKLOG: Final = 128

_log = logging.getLogger(__name__)


class PageSource(Protocol):
    """Where pages come from."""

    def pages(self, keys: Sequence[BlockId]) -> AsyncGenerator[bytes, None]:
        """Yield the content of the leading ``keys`` that are held, in order.

        A page is pinned while it is read. The generator is closed when the peer is done with it or
        gone, at any of its yields or awaits; it holds nothing after that. OSError: the stream ends.
        """


class TransferServer:
    """Serves ``source`` to peers of the same ``namespace`` (32 bytes).

    ``max_streams`` serve at a time; a further request is told busy. A request has ``hello_s`` to
    arrive, each page ``stall_s`` to be taken by the peer, and all of a stream ``stream_s``.
    """

    def __init__(
        self,
        source: PageSource,
        namespace: bytes,
        *,
        max_streams: int = 4,
        hello_s: float = 1.0,
        stall_s: float = 5.0,
        stream_s: float = 60.0,
    ) -> None:
        if len(namespace) != NAMESPACE_BYTES or max_streams < 1:
            message = (
                f"namespace must have {NAMESPACE_BYTES} bytes and max_streams be 1 or more, "
                f"got {len(namespace)} and {max_streams}"
            )
            raise ValueError(message)
        self.served_pages = 0
        self.served_bytes = 0
        self.endings: Counter[str] = Counter()
        """Streams by how they ended: all, missing, busy, wrong_namespace, bad_request, stalled,
        closed."""
        self._source = source
        self._namespace = namespace
        self._max_streams = max_streams
        self._hello_s, self._stall_s, self._stream_s = hello_s, stall_s, stream_s
        self._streams = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def streams(self) -> int:
        """How many requests are being served."""
        return self._streams

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen and return the address; port 0 takes a free one. OSError: it cannot be had."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        self._listener = socket.create_server(address, family=family, backlog=BACKLOG)
        self._listener.settimeout(0)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        bound = self._listener.getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        """Stop listening, cut all streams and wait until their pages are let go. Idempotent."""
        tasks = {task for task in (self._accepting, *self._serving) if task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._accepting = self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stream, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the peer is gone already
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._serving) >= self._max_streams + WAITING_STREAMS:
                self._turn_away(stream)
                continue
            task = asyncio.create_task(self._serve(stream))
            self._serving.add(task)
            task.add_done_callback(self._ended)

    def _turn_away(self, stream: socket.socket) -> None:
        self.endings["busy"] += 1
        with stream, contextlib.suppress(OSError):
            stream.settimeout(0)
            stream.send(encode_answer(Status.BUSY))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a transfer failed", exc_info=task.exception())

    async def _serve(self, stream: socket.socket) -> None:
        with stream:
            stream.settimeout(0)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.timeout(self._stream_s):
                    ending = await self._converse(stream)
            except TimeoutError:
                ending = "stalled"
            except (OSError, PeerClosedError):
                ending = "closed"
            self.endings[ending] += 1

    async def _converse(self, stream: socket.socket) -> str:
        async with asyncio.timeout(self._hello_s):
            status, keys = await self._request(stream)
        if status is Status.OK and self._streams >= self._max_streams:
            status = Status.BUSY
        if status is not Status.OK:
            await self._send(stream, encode_answer(status))
            return status.name.lower()
        self._streams += 1
        try:
            await self._send(stream, encode_answer(status))
            reason = await self._send_pages(stream, keys)
            await self._send(stream, encode_end(reason))
        finally:
            self._streams -= 1
        return reason.name.lower()

    async def _request(self, stream: socket.socket) -> tuple[Status, list[BlockId]]:
        loop = asyncio.get_running_loop()
        head = bytearray(HELLO_BYTES)
        await fill(loop, stream, head)
        try:
            hello = decode_hello(head)
        except FrameError:
            return Status.BAD_REQUEST, []
        packed = bytearray(hello.keys * KEY_BYTES)
        await fill(loop, stream, packed)
        if hello.namespace != self._namespace:
            return Status.WRONG_NAMESPACE, []
        return Status.OK, decode_keys(packed)

    async def _send_pages(self, stream: socket.socket, keys: list[BlockId]) -> End:
        sent_pages = 0
        async with aclosing(self._source.pages(keys)) as contents:
            async for content in contents:
                await self._send(stream, encode_page_head(keys[sent_pages], content), content)
                sent_pages += 1
                self.served_pages += 1
                self.served_bytes += len(content)
                if sent_pages == len(keys):
                    break
        return End.ALL if sent_pages == len(keys) else End.MISSING

    async def _send(self, stream: socket.socket, *parts: bytes) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._stall_s):
            for part in parts:
                await loop.sock_sendall(stream, part)
