"""Takes pages from another worker. Whatever the peer does, what was taken is right and in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from sidecar.transfer import (
    ANSWER_BYTES,
    FRAME_BYTES,
    NAMESPACE_BYTES,
    End,
    FrameError,
    PeerClosedError,
    Status,
    decode_answer,
    decode_frame,
    encode_hello,
    fill,
    page_checksum,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from state.model import BlockId

Why = Literal[
    "all",  # every key came
    "missing",  # the peer does not hold the next key
    "busy",  # the peer serves enough others
    "wrong_namespace",  # the peer's pages mean something else
    "bad_request",  # the peer does not understand us
    "limit",  # enough fetches are under way here
    "unreachable",  # no connection in time
    "stalled",  # a page, or the whole, took too long
    "closed",  # the peer went away
    "corrupt",  # a page's checksum is wrong
    "malformed",  # the peer does not speak the protocol
]

_REFUSED: dict[Status, Why] = {
    Status.BUSY: "busy",
    Status.WRONG_NAMESPACE: "wrong_namespace",
    Status.BAD_REQUEST: "bad_request",
}


class Fetched(Struct, frozen=True):
    """How a fetch ended: the leading ``pages`` were taken, ``seconds`` after it began."""

    pages: int
    content_bytes: int
    seconds: float
    why: Why


class TransferClient:
    """Fetches pages of one namespace (32 bytes), each of ``page_bytes``.

    At most ``max_streams`` fetches are under way; a further one ends at once. ``connect_s`` is for
    resolving and connecting, ``page_s`` for each page, ``fetch_s`` for everything.
    """

    def __init__(
        self,
        namespace: bytes,
        page_bytes: int,
        *,
        max_streams: int = 4,
        connect_s: float = 1.0,
        page_s: float = 2.0,
        fetch_s: float = 30.0,
    ) -> None:
        if len(namespace) != NAMESPACE_BYTES or page_bytes < 0 or max_streams < 1:
            message = (
                f"namespace must have {NAMESPACE_BYTES} bytes, page_bytes be 0 or more and "
                f"max_streams 1 or more, got {len(namespace)}, {page_bytes} and {max_streams}"
            )
            raise ValueError(message)
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._max_streams = max_streams
        self._connect_s, self._page_s, self._fetch_s = connect_s, page_s, fetch_s
        self._streams = 0

    @property
    def streams(self) -> int:
        """How many fetches are under way."""
        return self._streams

    async def fetch(
        self, host: str, port: int, keys: Sequence[BlockId], take: Callable[[int, bytes], None]
    ) -> Fetched:
        """Call ``take(index, content)`` for the leading pages that the peer has, in order.

        Never raises for what the peer does. When cancelled, the stream is closed at once.
        ``take`` must not raise. ValueError: not 1 to 65,536 keys of 16 bytes.
        """
        hello = encode_hello(self._namespace, keys)
        progress = _Progress(keys, take, time.perf_counter())
        if self._streams >= self._max_streams:
            return progress.ended("limit", self._page_bytes)
        self._streams += 1
        try:
            why = await self._why_ended(host, port, hello, progress)
        finally:
            self._streams -= 1
        return progress.ended(why, self._page_bytes)

    async def _why_ended(self, host: str, port: int, hello: bytes, progress: _Progress) -> Why:
        try:
            async with asyncio.timeout(self._connect_s):
                stream = await _connected(host, port)
        except (OSError, UnicodeError):  # a TimeoutError is an OSError
            return "unreachable"
        with stream:
            try:
                async with asyncio.timeout(self._fetch_s):
                    return await self._converse(stream, hello, progress)
            except TimeoutError:
                return "stalled"
            except (OSError, PeerClosedError):
                return "closed"
            except FrameError:
                return "malformed"

    async def _converse(self, stream: socket.socket, hello: bytes, progress: _Progress) -> Why:
        loop = asyncio.get_running_loop()
        head = bytearray(ANSWER_BYTES)
        async with asyncio.timeout(self._page_s):
            with contextlib.suppress(ConnectionError):  # it may have answered before it closed
                await loop.sock_sendall(stream, hello)
            await fill(loop, stream, head)
        status = decode_answer(head)
        if status is not Status.OK:
            return _REFUSED[status]
        return await self._take_pages(stream, progress)

    async def _take_pages(self, stream: socket.socket, progress: _Progress) -> Why:
        loop = asyncio.get_running_loop()
        head, content = bytearray(FRAME_BYTES), bytearray(self._page_bytes)
        while True:
            async with asyncio.timeout(self._page_s):
                await fill(loop, stream, head)
                frame = decode_frame(head, self._page_bytes)
                if isinstance(frame, End):
                    return progress.reason(frame)
                progress.expect_page()
                await fill(loop, stream, content)
            if not progress.took(content, frame.checksum):
                return "corrupt"


class _Progress:
    """The pages of one fetch so far."""

    def __init__(
        self, keys: Sequence[BlockId], take: Callable[[int, bytes], None], started_s: float
    ) -> None:
        self._keys = keys
        self._take = take
        self._started_s = started_s
        self._pages = 0

    def expect_page(self) -> None:
        if self._pages == len(self._keys):
            message = f"a page after all {self._pages} that were asked for"
            raise FrameError(message)

    def took(self, content: bytearray, checksum: bytes) -> bool:
        """Hand the next page on and return True; False where it is not the page of its key."""
        if page_checksum(self._keys[self._pages], content) != checksum:
            return False
        self._take(self._pages, bytes(content))
        self._pages += 1
        return True

    def reason(self, end: End) -> Why:
        """Return the peer's reason. FrameError: it says all and sent less, or the reverse."""
        if (end is End.ALL) != (self._pages == len(self._keys)):
            message = f"end {end.name} after {self._pages} of {len(self._keys)} pages"
            raise FrameError(message)
        return "all" if end is End.ALL else "missing"

    def ended(self, why: Why, page_bytes: int) -> Fetched:
        seconds = time.perf_counter() - self._started_s
        return Fetched(self._pages, self._pages * page_bytes, seconds, why)


async def _connected(host: str, port: int) -> socket.socket:
    """Return a connected stream. OSError: no address of ``host`` answers."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(0)
            await loop.sock_connect(stream, address)
        except OSError as error:
            stream.close()
            failure = error
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise failure
