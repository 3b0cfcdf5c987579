"""The hand-over of a client's connection: the one place that reaches below aiohttp's responses.

A relayed response is written straight to the client's transport from the replica's read callback.
aiohttp still parses requests, keeps their order and decides about keep-alive; when the handler
returns a ``HandedOver`` there is nothing left for it to send. Private attributes used here:
``BaseProtocol._drain_waiter`` (what ``resume_writing`` resolves). Each behaviour that this leans on
has a canary in ``tests/unit/test_wire_canary.py``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.abc import AbstractStreamWriter

    from router.header import Framing

_CHUNK = b"%x\r\n%b\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s


class HandedOver(web.StreamResponse):
    """A response whose bytes go to the client's transport directly.

    Once it exists its head is about to be written: from then on only an end or a broken connection
    is legal, never another response.
    """

    def __init__(
        self, request: web.BaseRequest, status: int, framing: Framing, *, keep_alive: bool
    ) -> None:
        super().__init__(status=status)
        self._protocol = request.protocol
        self._transport = request.transport
        self._framing = framing
        self._is_kept_alive = keep_alive
        self._will_abort = False
        self._sent_body_bytes = 0
        # aiohttp sends an error response of its own only while its writer has sent nothing.
        request.writer.output_size = 1

    # What aiohttp asks after the handler returned.

    @property
    def prepared(self) -> bool:
        """Always: the head was written."""
        return True

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._is_kept_alive

    @property
    def body_length(self) -> int:
        """Body bytes sent, without chunk framing."""
        return self._sent_body_bytes

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002
        """Do nothing: the head was written."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002
        """Do nothing, or cut a broken response off now that its handler is done."""
        if self._will_abort:
            self.abort()

    # What the relay does.

    @property
    def is_client_gone(self) -> bool:
        """Whether nothing that is written reaches the client any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def is_client_slow(self) -> bool:
        """Whether the client has not taken what was written, up to the high-water mark."""
        return self._protocol.writing_paused

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in the router for the client to read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, head: bytes, data: bytes) -> bool:
        """Write ``head`` (may be empty) and frame ``data`` (may be empty); False: nobody is there.

        A closed transport must not be written to: uvloop raises where asyncio warns.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if data:
            self._sent_body_bytes += len(data)
            if self._framing == "chunked":
                data = _CHUNK % (len(data), data)
        transport.write(head + data if head else data)
        return True

    def finish(self) -> None:
        """Write the end of the body, where its framing has one."""
        transport = self._transport
        if self._framing == "chunked" and transport is not None and not transport.is_closing():
            transport.write(_LAST_CHUNK)

    def break_off(self, last_words: bytes) -> None:
        """End an incomplete response so that the client can tell.

        ``last_words`` go out as a body chunk before the connection closes without an end of the
        body; without them the connection is cut as soon as the handler returned.
        """
        self._is_kept_alive = False
        if last_words and self._framing in {"chunked", "close"}:
            self.send(b"", last_words)
        else:
            self._will_abort = True

    def abort(self) -> None:
        """Cut the connection; where its end is the body's end, with a reset."""
        self._is_kept_alive = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._framing == "close":
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    def call_when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once when the client has read enough, or is gone."""
        protocol = self._protocol
        waiter = protocol._drain_waiter  # noqa: SLF001
        if waiter is None or waiter.done():
            waiter = asyncio.get_running_loop().create_future()
            protocol._drain_waiter = waiter  # noqa: SLF001

        def note(settled: asyncio.Future[None]) -> None:
            if not settled.cancelled():
                settled.exception()  # a lost connection is told here; it was seen elsewhere
            callback()

        waiter.add_done_callback(note)
