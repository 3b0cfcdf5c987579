"""A relayed response on its way to the client, written from the replica's read callback."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from router.client import ClientConnection
    from router.header import Framing
    from router.request import Request

_CHUNK = b"%x\r\n%b\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s


class ClientStream:
    """A response whose bytes go to the client's transport as they come.

    Once it exists its head is about to be written: from then on only an end or a broken connection
    is legal, never another response. ``keep_alive``: the connection may carry another request.
    """

    __slots__ = (
        "_connection",
        "_framing",
        "_is_cut",
        "_transport",
        "body_bytes",
        "keep_alive",
        "status",
    )

    def __init__(
        self, request: Request, status: int, framing: Framing, *, keep_alive: bool
    ) -> None:
        self.status = status
        self.keep_alive = keep_alive
        self.body_bytes = 0
        """Body bytes sent, without chunk framing."""
        self._connection: ClientConnection = request.connection
        self._transport: asyncio.Transport = request.connection.transport
        self._framing = framing
        self._is_cut = False
        request.stream = self

    # What the connection calls.

    def close(self) -> None:
        """Cut a broken response off, now that its handler is done."""
        if self._is_cut:
            self.abort()

    # What the relay calls.

    @property
    def is_client_gone(self) -> bool:
        """Whether nothing that is written reaches the client any more."""
        return self._transport.is_closing()

    @property
    def is_client_slow(self) -> bool:
        """Whether the client has not taken what was written, up to the high-water mark."""
        return self._connection.is_writing_paused

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in the router for the client to read."""
        return self._transport.get_write_buffer_size()

    def send(self, head: bytes, data: bytes) -> bool:
        """Write ``head`` (may be empty) and frame ``data`` (may be empty); False: nobody is there.

        A closed transport must not be written to: uvloop raises where asyncio warns.
        """
        transport = self._transport
        if transport.is_closing():
            return False
        if data:
            self.body_bytes += len(data)
            if self._framing == "chunked":
                data = _CHUNK % (len(data), data)
        transport.write(head + data if head else data)
        return True

    def send_chunk(self, chunk: bytes, content: bytes) -> bool:
        """Write ``content``, which came as ``chunk``; False: nobody is there."""
        transport = self._transport
        if transport.is_closing():
            return False
        self.body_bytes += len(content)
        transport.write(chunk if self._framing == "chunked" else content)
        return True

    def finish(self) -> None:
        """Write the end of the body, where its framing has one."""
        if self._framing == "chunked" and not self._transport.is_closing():
            self._transport.write(_LAST_CHUNK)

    def break_off(self, last_words: bytes) -> None:
        """End an incomplete response so that the client can tell.

        ``last_words`` go out as a body chunk before the connection closes without an end of the
        body; without them the connection is cut as soon as the handler returned.
        """
        self.keep_alive = False
        if last_words and self._framing in {"chunked", "close"}:
            self.send(b"", last_words)
        else:
            self._is_cut = True

    def abort(self) -> None:
        """Cut the connection; where its end is the body's end, with a reset."""
        self.keep_alive = False
        transport = self._transport
        if transport.is_closing():
            return
        if self._framing == "close":
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    def call_when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once when the client has read enough; not when it left."""
        self._connection.on_writable = callback
