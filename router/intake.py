"""From a client's bytes to its requests, without I/O.

llhttp parses, strictly; what it lets pass and RFC 9112 or a replica might read differently is
refused here and in ``router/request.py``. Bytes are handed to it in pieces that end where a head or
a sized body ends, so that a request which waits for the answer to an earlier one is still bytes.
However the bytes are cut on the way, the requests are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from router.error import (
    ClientError,
    HeadTooLargeError,
    OverloadedError,
    RouterError,
)
from router.repeat import RepeatedHead
from router.request import (
    LINE_BYTES,
    Request,
    RequestHead,
    body_length,
    read_head,
    target_too_long,
    too_large,
)

if TYPE_CHECKING:
    from router.config import LimitSettings

HEAD_BYTES = 16 * 1024
"""The largest head: request line and headers; what came in a piece of a chunked body is free."""
FRAMING_BYTES = 8 * 1024
"""So much of a chunked body may be chunk heads, extensions and trailers; more where content is."""
PIECE_BYTES = 4 * 1024
"""Chunked bodies are parsed in pieces of this size: what is not content is counted after each."""
_HEAD_END = b"\r\n\r\n"
_SPLIT_BYTES = len(_HEAD_END) - 1
_CHUNKED = b"Transfer-Encoding: chunked"
_LENGTH_NAME = b"content-length"
_LENGTH_NAME_BYTES = len(_LENGTH_NAME)
_TOO_LARGE = f"expected a head of at most {HEAD_BYTES} bytes"
_NO_PARSER = HttpRequestParser(object())
_MALFORMED = "expected a well-formed HTTP/1.1 request"


class BodyBudget:
    """The bytes of bodies that one listener's open requests have, of at most ``most_bytes``."""

    __slots__ = ("held_bytes", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0


class Intake:
    """One connection's incoming bytes.

    ``request`` is the one to be answered, from the end of its head on, until ``release``. After
    ``is_ended`` no bytes are taken as a request any more.
    """

    __slots__ = (
        "_bodies",
        "_framing_bytes",
        "_head_bytes",
        "_headers",
        "_incoming",
        "_is_unparsed",
        "_known",
        "_known_key",
        "_last_head",
        "_lengths",
        "_limits",
        "_parser",
        "_queue",
        "_repeated",
        "_rest",
        "_tail",
        "_target",
        "is_ended",
        "request",
    )

    def __init__(self, limits: LimitSettings, bodies: BodyBudget | None = None) -> None:
        self._limits = limits
        self._bodies = bodies or BodyBudget(limits.buffered_bytes)
        self._parser = HttpRequestParser(self)
        self._rest = bytearray()
        self._known_key: tuple[bytes, bytes, str, tuple[tuple[bytes, bytes], ...]] | None = None
        self._known: RequestHead | None = None
        self._incoming: Request | None = None
        self._queue: list[Request] = []  # of few; a deque takes ten times as much
        self._framing_bytes = 0
        self._last_head: RequestHead | None = None
        self._repeated: RepeatedHead | None = None
        self._is_unparsed = False
        """What comes is the sized body of a repeated head: the parser sees neither of them."""
        self.request: Request | None = None
        self.is_ended = False
        self._begin()

    def _begin(self) -> None:
        self._head_bytes = 0
        self._tail = b""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._lengths: list[bytes] = []

    # What the connection calls.

    @property
    def waiting_bytes(self) -> int:
        """Bytes that came and are not looked at before the request is released."""
        return len(self._rest)

    @property
    def is_amid_head(self) -> bool:
        """Whether a head has begun and not ended."""
        return self._incoming is None and self._head_bytes > 0

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        if self._rest:
            self._rest += data
        else:
            self._parse(data)

    def release(self) -> None:
        """Let go of a request that was answered and turn to the next one."""
        if self.request is not None:
            self._bodies.held_bytes -= self.request.received_bytes
        request = self.request = self._queue.pop(0) if self._queue else None
        if self._rest and (request is None or not request.is_complete):
            data = bytes(self._rest)
            self._rest.clear()
            self._parse(data)

    def lighten(self) -> None:
        """Forget head and body of the request at hand, and the parser until something comes."""
        request = self.request
        if request is not None and request.is_complete:
            self._bodies.held_bytes -= request.let_body_go()
            self._known = self._known_key = self._last_head = self._repeated = None
            if self._incoming is None and not self._head_bytes:
                self._parser = _NO_PARSER

    def end(self) -> None:
        """Take no further request, and forget what came of one."""
        self.is_ended = True
        self._rest.clear()

    def let_go(self) -> None:
        """Forget the parser, which refers back here, and what came; nothing may be fed any more."""
        self.end()
        open_requests = (self.request, *self._queue)
        self._bodies.held_bytes -= sum(r.received_bytes for r in open_requests if r is not None)
        self.request = self._incoming = None
        self._queue.clear()
        del self._parser

    # Parsing.

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of a request: in pieces that end with its head and its body."""
        at, total = 0, len(data)
        while at < total:
            request = self.request
            if self.is_ended or (request is not None and request.is_complete):
                break
            incoming = self._incoming
            if incoming is not None and self._is_unparsed:
                at = self._take_body(incoming, data, at)
            elif incoming is not None:
                at = self._parse_body(incoming, data, at)
            elif self._head_bytes or not self._has_begun_again(data, at):
                at = self._parse_head(data, at)
            else:
                at = data.find(_HEAD_END, at) + len(_HEAD_END)
        if at < total and not self.is_ended:
            self._rest += memoryview(data)[at:]

    def _parse_head(self, data: bytes, at: int) -> int:
        most = at + HEAD_BYTES + 1 - self._head_bytes  # what follows is not looked at
        end = min(self._head_end(data, at), most)
        is_whole = not self._head_bytes
        self._head_bytes += end - at
        self._parse_piece(data[at:end])
        if is_whole:
            self._note_head(data[at:end])
        return end

    def _parse_body(self, incoming: Request, data: bytes, at: int) -> int:
        total, declared = len(data), incoming.declared_bytes
        if declared is None:
            end = min(total, at + PIECE_BYTES - self._framing_bytes % PIECE_BYTES)
            self._framing_bytes += end - at
        else:
            end = min(total, at + declared - incoming.received_bytes)
        if end - at <= PIECE_BYTES:
            self._parse_piece(data[at:end])
        else:
            self._parse_piece(memoryview(data)[at:end])
        if declared is None:
            if incoming is self._incoming:
                if self._framing_bytes % PIECE_BYTES == 0:  # at the same places, however it is cut
                    self._check_framing(incoming)
            elif self.is_amid_head:  # the piece had the beginning of another head
                self._tail = data[max(at, end - _SPLIT_BYTES) : end]
        return end

    def _note_head(self, received: bytes) -> None:
        """Keep a head that was parsed whole and came for the second time."""
        request, known = self._incoming, self._known
        if request is None or known is None or not request.declared_bytes:
            return
        if self._last_head is known and self._repeated is None:
            self._repeated = RepeatedHead.of(received, known, request.declared_bytes)
        self._last_head = known

    def _has_begun_again(self, data: bytes, at: int) -> bool:
        """Begin a request whose head is the last one again; False for another head."""
        repeated = self._repeated
        if repeated is None:
            return False
        end = data.find(_HEAD_END, at, at + HEAD_BYTES)
        length = repeated.match(data, at, end + len(_HEAD_END)) if end >= 0 else 0
        if not length:
            return False
        self._is_unparsed = True
        self._accept(Request(repeated.head, length))
        return True

    def _take_body(self, incoming: Request, data: bytes, at: int) -> int:
        """Take what belongs to an unparsed body; return where it ends."""
        end = min(len(data), at + (incoming.declared_bytes or 0) - incoming.received_bytes)
        try:
            self.on_body(data[at:end])
        except RouterError as error:
            self._refuse(error)
        else:
            if incoming.received_bytes == incoming.declared_bytes:
                self._is_unparsed = False
                self._complete(incoming)
        return end

    def _head_end(self, data: bytes, at: int) -> int:
        tail = self._tail
        if tail:  # the end may lie across two reads
            found = (tail + data[at : at + _SPLIT_BYTES]).find(_HEAD_END)
            if found >= 0:
                self._tail = b""
                return at + found + len(_HEAD_END) - len(tail)
        found = data.find(_HEAD_END, at)
        if found >= 0:
            return found + len(_HEAD_END)
        self._tail = (tail + data[max(at, len(data) - _SPLIT_BYTES) :])[-_SPLIT_BYTES:]
        return len(data)

    def _parse_piece(self, piece: bytes | memoryview) -> None:
        if self._parser is _NO_PARSER:
            self._parser = HttpRequestParser(self)
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, RouterError) else ClientError(_MALFORMED))
        else:
            if self._head_bytes > HEAD_BYTES:
                self._refuse(self._head_too_large())

    def _head_too_large(self) -> ClientError:
        """Return the error for a head beyond the limit: its target may be the reason."""
        is_target = len(self._target) > LINE_BYTES
        return target_too_long() if is_target else HeadTooLargeError(_TOO_LARGE)

    def _ignore_upgrade(self, rest: bytes | memoryview) -> None:
        """Let the body be read by a parser that was not asked to switch protocols.

        The other one ends with the head. Some clients offer HTTP/2 with every first request.
        ``rest``: what follows the head in a piece that began with the end of a chunked body.
        """
        request = self._incoming
        if request is not None:
            length = request.declared_bytes
            framing = _CHUNKED if length is None else b"Content-Length: %d" % length
            self._parser = HttpRequestParser(self)
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
            if rest:
                self._parse_piece(rest)

    def _check_framing(self, incoming: Request) -> None:
        content_bytes = incoming.received_bytes
        if self._framing_bytes - content_bytes > FRAMING_BYTES + content_bytes:
            self._refuse(ClientError("the body has more framing than content"))

    def _refuse(self, error: RouterError) -> None:
        """Make the error the answer to what was being received, in its turn."""
        incoming, self._incoming = self._incoming, None
        self.end()
        if incoming is not None:
            self._bodies.held_bytes -= incoming.received_bytes
            incoming.fail(error)
        else:
            self._queue.append(Request.refused(error))
            if self.request is None:
                self.request = self._queue.pop(0)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Note a head that begins amid a piece, behind the end of a chunked body."""
        if self._incoming is None and not self._head_bytes:
            self._head_bytes = 1

    def on_url(self, data: bytes) -> None:
        """Collect the request's target."""
        if self._incoming is None:
            self._target += data

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect the head's headers; trailers are dropped."""
        if self._incoming is not None:
            return
        if len(name) == _LENGTH_NAME_BYTES and name.lower() == _LENGTH_NAME:
            self._lengths.append(value)
        else:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Make a request of the head; raises ClientError out of the parser."""
        if self._incoming is not None:
            return
        parser = self._parser
        if self._head_bytes > HEAD_BYTES:
            raise self._head_too_large()
        key = (
            parser.get_method(),
            self._target,
            parser.get_http_version(),
            tuple(self._headers),
        )
        head = self._known
        if head is None or key != self._known_key:  # clients repeat theirs
            method, target, version, received = key
            keep_alive = parser.should_keep_alive() and not parser.should_upgrade()
            head = read_head(
                method.decode("ascii"),
                target.decode("latin-1"),
                version,
                received,
                keep_alive=keep_alive,
            )
            self._known, self._known_key = head, key
            self._repeated = None
        self._accept(Request(head, body_length(head, self._lengths)))

    def _accept(self, request: Request) -> None:
        self._begin()
        self._framing_bytes = 0
        self._incoming = request
        if self.request is None:
            self.request = request
        else:
            self._queue.append(request)

    def on_body(self, data: bytes) -> None:
        """Collect the body; raises RouterError out of the parser where there is too much."""
        request = self._incoming
        if request is None:
            return
        bodies = self._bodies
        bodies.held_bytes += len(data)
        if not request.take(data, self._limits.body_bytes):
            raise too_large(self._limits)
        if bodies.held_bytes > bodies.most_bytes:
            message = "the bodies of all open requests are too large together"
            raise OverloadedError(message)

    def on_message_complete(self) -> None:
        """Hand the request's body over."""
        request = self._incoming
        if request is not None and request.declared_bytes != 0 and self._parser.should_upgrade():
            return  # the body was skipped
        self._incoming = None
        if request is not None:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        self._incoming = None
        request.complete()
        if not request.keep_alive:
            self.end()
