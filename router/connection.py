"""One connection to a replica: writes a request once, pushes what it reads of the response.

Head, body bytes and end go to a ``ReplySink`` from within the event loop's read callback, so a
streamed chunk costs no task switch. A connection is used again only when the response ended where
its framing said, with nothing after it; in every other case it is thrown away.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from router.address import said_farewell, send_at_once
from router.chunk import UNKNOWN, content_of, first_chunk, next_chunk
from router.error import (
    ReplicaClosedError,
    ReplicaError,
    ReplicaProtocolError,
    ReplicaTlsError,
)
from router.header import Framing, body_framing
from router.reply_head import ReplyHead, ReplyHeaders
from router.reply_parser import NO_PARSER, parser_of_chunks
from state.tls import said

if TYPE_CHECKING:
    from router.endpoint import Endpoint
    from router.upstream import UpstreamPool

VERSIONS = frozenset({"1.0", "1.1"})
INTERIM_STATUSES = frozenset(range(100, 200)) - {101}
"""Those that are swallowed: a switch of protocols is none of them."""
FINAL_STATUSES = frozenset(range(200, 600))
_LENGTH_BYTES = len(b"content-length")
_DATE_BYTES = len(b"date")
WRITE_WHOLE_BYTES = 64 * 1024
"""Up to here head and body are joined for one write; above, the copy costs more than it saves."""


class ReplySink(Protocol):
    """Who receives a response. One of ``on_end`` and ``on_failure`` comes last."""

    def on_reply(self, head: ReplyHead, data: bytes) -> None:
        """Take the head and the body bytes that came with it."""
        ...

    def on_body(self, data: bytes) -> None:
        """Take more body bytes; never empty."""
        ...

    def on_chunk(self, chunk: bytes, content: bytes) -> None:
        """Take the body bytes ``content``, which came as one ``chunk``: with its framing."""
        ...

    def on_end(self) -> None:
        """Note that the response is complete."""
        ...

    def on_failure(self, error: ReplicaError) -> None:
        """Note that nothing more will come; the connection is gone."""
        ...


class StaleConnectionError(ReplicaClosedError):
    """A pooled connection turned out dead before any response byte: replay on a fresh one.

    ``was_sent``: it may have taken the request.
    """

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica, at most one request at a time."""

    __slots__ = (
        "_dates",
        "_framing",
        "_fresh_head",
        "_has_answered",
        "_has_extra",
        "_has_farewell",
        "_has_head",
        "_headers",
        "_is_complete",
        "_is_discarded",
        "_is_interim",
        "_is_paused",
        "_known",
        "_lengths",
        "_method",
        "_parser",
        "_parts",
        "_pool",
        "_refusal",
        "_requests_sent",
        "_silent_bytes",
        "_sink",
        "_to_chunk",
        "_will_keep_alive",
        "endpoint",
        "transport",
    )

    def __init__(self, pool: UpstreamPool, endpoint: Endpoint) -> None:
        self._pool = pool
        self.endpoint = endpoint
        self.transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._sink: ReplySink | None = None
        self._parts: list[bytes] = []
        self._known: ReplyHeaders | None = None
        self._requests_sent = 0
        self._is_paused = False
        self._is_discarded = False
        self._has_farewell = False
        self._begin("GET")

    def _begin(self, method: str) -> None:
        self._method = method
        self._begin_head()
        self._framing: Framing = "none"
        self._fresh_head: ReplyHead | None = None
        self._refusal: ReplicaProtocolError | None = None
        self._has_answered = False
        self._has_head = False
        self._has_extra = False
        self._is_interim = False
        self._is_complete = False
        self._will_keep_alive = False
        self._silent_bytes = 0
        self._to_chunk = UNKNOWN
        """How many bytes further on the next chunk begins."""

    def _begin_head(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._lengths: list[bytes] = []
        self._dates: list[bytes] = []

    # What its user calls.

    def send(self, sink: ReplySink, method: str, head: bytes, body: bytes) -> None:
        """Write a whole request; its response goes to ``sink``."""
        transport = self.transport
        if transport is None or transport.is_closing():
            self.discard()
            message = "the connection was closed before its use"
            sink.on_failure(StaleConnectionError(message, was_sent=False))
            return
        self._begin(method)
        self._sink = sink
        self._requests_sent += 1
        if len(body) <= WRITE_WHOLE_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def abandon(self, sink: ReplySink) -> None:
        """Close at once if ``sink`` still waits here; a connection that moved on is left alone."""
        if self._sink is sink:
            self.discard()

    def discard(self) -> None:
        """Close at once; the sink hears nothing more."""
        self._sink = None
        self._is_discarded = True
        self._pool.withdraw(self)
        if self.transport is not None:
            self.transport.abort()

    def pause_reading(self) -> None:
        """Stop reading: the replica is held back by TCP."""
        transport = self.transport
        if transport is not None and not self._is_paused and not transport.is_closing():
            self._is_paused = True
            transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading after ``pause_reading``."""
        if self._is_paused:
            self._is_paused = False
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def lighten(self) -> None:
        """Let go of the parser, where what comes begins a chunk: it is made again when needed."""
        if self._sink is not None and self._to_chunk == 0 and self._parser is not NO_PARSER:
            self._will_keep_alive = self._parser.should_keep_alive()
            self._parser = NO_PARSER

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; small writes must not wait for acknowledgements."""
        if self._is_discarded:  # nobody waits for the connection any more
            cast(asyncio.Transport, transport).abort()
            return
        self.transport = cast(asyncio.Transport, transport)
        send_at_once(self.transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        """Hand over what the bytes held: a chunk that came alone as it is, else what is parsed."""
        sink = self._sink
        if sink is None:  # nobody asked for anything
            self.discard()
            return
        content = content_of(data) if self._to_chunk == 0 else None
        if content is not None:
            self._silent_bytes = 0
            sink.on_chunk(data, content)
            return
        has_news = self._hand_over(sink, data)
        if self._sink is not sink:
            return
        if self._is_complete:
            self._finish(sink)
        elif self._refusal is not None:
            self._fail(self._refusal)
        elif has_news:
            self._silent_bytes = 0
        else:
            self._count_silent(len(data))

    def _hand_over(self, sink: ReplySink, data: bytes) -> bool:
        """Parse, and hand over what there is of a head and a body; return whether there is any."""
        is_first, self._has_answered = not self._has_answered, True
        if self._to_chunk >= 0:
            self._to_chunk = next_chunk(data, self._to_chunk)
        if self._parser is NO_PARSER:
            self._parser = parser_of_chunks(self, keeps_alive=self._will_keep_alive)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._note(error)
        parts, body = self._parts, b""
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
        head = self._fresh_head
        if head is not None:
            self._fresh_head = None
            if is_first and head.framing == "chunked" and not self._is_complete:
                self._to_chunk = first_chunk(data)
            sink.on_reply(head, body)
        elif body:
            sink.on_body(body)
        return head is not None or bool(body)

    def _note(self, error: HttpParserError | HttpParserUpgrade) -> None:
        """Refuse what cannot be parsed; first comes what could."""
        if isinstance(error, HttpParserUpgrade):
            self._refusal = ReplicaProtocolError("the replica switched protocols")
            return
        self._has_extra = True
        if self._refusal is None:
            self._refusal = ReplicaProtocolError("the replica sent a malformed response")

    def _count_silent(self, count_bytes: int) -> None:
        """Bound what is neither body nor a complete head: heads, chunk extensions, trailers."""
        self._silent_bytes += count_bytes
        if self._silent_bytes > self._pool.settings.head_limit_bytes:
            self._fail(ReplicaProtocolError("the replica sent too large a head"))

    def eof_received(self) -> None:
        """Let the transport close; ``connection_lost`` judges what is missing."""
        if self.endpoint.is_tls and self.transport is not None:
            self._has_farewell = said_farewell(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Settle the response: its end, when the end of the connection was its framing."""
        self.transport = None
        del self._parser  # it refers back here
        self._pool.closed(self)
        sink, self._sink = self._sink, None
        if sink is None:
            return
        is_whole = exc is None and (self._has_farewell or not self.endpoint.is_tls)
        if is_whole and self._has_head and self._framing == "close":
            sink.on_end()
        else:
            sink.on_failure(self._closed_error(exc))

    def _closed_error(self, exc: Exception | None) -> ReplicaError:
        if isinstance(exc, ssl.SSLError) and not self._has_answered and self._requests_sent == 1:
            return ReplicaTlsError(said(exc))  # TLS 1.3 tells so late that it takes no certificate
        if self._requests_sent > 1 and not self._has_answered:
            return StaleConnectionError("a pooled connection was closed by the replica")
        how = "reset" if exc is not None else "closed"
        return ReplicaClosedError(f"the replica {how} the connection before the response ended")

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Notice bytes after the end of the response."""
        if self._is_complete:
            self._has_extra = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect the head's headers; trailers are dropped."""
        if self._has_head:
            return
        name_bytes = len(name)
        if name_bytes == _LENGTH_BYTES and name.lower() == b"content-length":
            self._lengths.append(value)
        elif name_bytes == _DATE_BYTES and name.lower() == b"date":
            self._dates.append(value)
        else:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head; whatever is wrong with it is reported after parsing."""
        if self._has_head:
            return
        status = self._parser.get_status_code()
        if status in INTERIM_STATUSES:
            self._is_interim = True
            return
        self._has_head = True
        try:
            self._fresh_head = self._checked_head(status)
        except ReplicaProtocolError as error:
            self._refusal = error
            return
        if self._framing == "none":  # the parser does not know about HEAD and 304
            self._is_complete = True

    def _checked_head(self, status: int) -> ReplyHead:
        if status not in FINAL_STATUSES:
            message = f"the replica answered with status {status}"
            raise ReplicaProtocolError(message)
        received = tuple(self._headers)
        self._headers.clear()
        headers = self._known
        if headers is None or headers.received != received:
            head_bytes = sum(len(name) + len(value) for name, value in received)
            if head_bytes > self._pool.settings.head_limit_bytes:
                message = "the replica sent too large a head"
                raise ReplicaProtocolError(message)
            headers = self._known = self._pool.reply_headers(received)
        version = self._parser.get_http_version()
        if version not in VERSIONS:
            message = f"the replica answered with HTTP/{version}"
            raise ReplicaProtocolError(message)
        self._framing, length = body_framing(
            self._method, status, version, self._lengths, headers.transfer_codings
        )
        return ReplyHead(status, headers, self._dates, self._framing, length)

    def on_body(self, data: bytes) -> None:
        """Collect body bytes until the read callback hands them over together."""
        if self._refusal is None and not self._is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Mark the end of the response, or of an interim one that is swallowed."""
        if self._is_interim:
            self._is_interim = False
            self._begin_head()
        elif not self._is_complete and self._refusal is None:
            self._is_complete = True
            self._will_keep_alive = self._parser.should_keep_alive()

    # Endings.

    def _finish(self, sink: ReplySink) -> None:
        self._sink = None
        transport = self.transport
        if (
            self._will_keep_alive
            and not self._has_extra
            and self._refusal is None
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        ):
            self.resume_reading()
            self._pool.put(self)
        else:
            self.discard()
        sink.on_end()

    def _fail(self, error: ReplicaError) -> None:
        sink = self._sink
        self.discard()
        if sink is not None:
            sink.on_failure(error)
