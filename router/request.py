"""A client's request as a handler gets it, and what its headers say.

A request exists from the end of its head on; its body may still be arriving.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from msgspec import Struct

from router.admission_setting import Priority
from router.error import (
    BodyTooLargeError,
    ClientError,
    HeadTooLargeError,
    MethodNotAllowedError,
    NotFoundError,
    TargetTooLongError,
    UnsupportedFramingError,
    UnsupportedVersionError,
)
from router.header import (
    NAMES_CLIENT,
    RawHeaders,
    accepted_request_id,
    content_length,
    forwarded_chain,
    presented_key,
    request_lines,
)
from router.trace_context import TRACE_PARENT, TraceParent, parent_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.client import ClientConnection
    from router.config import LimitSettings
    from router.error import RouterError
    from router.wire import ClientStream

LINE_BYTES = 8190
"""The longest request target and the longest header, name and value."""
HEADERS_MOST = 100
UNDERSCORED = frozenset({b"content_length", b"transfer_encoding"})
"""What a replica behind a CGI-like gateway may take for framing."""
ALLOWED_ANYWHERE = "GET, HEAD, POST"
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{0,5})?")
_BODILESS = frozenset({"GET", "HEAD"})
"""A body that means nothing is one that the next reader may not see as one."""
_TARGETLESS = frozenset({"CONNECT", "TRACE"})
_WATCHED = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"expect",
        b"host",
        TRACE_PARENT,
        b"transfer-encoding",
        b"x-api-key",
        b"x-forwarded-for",
        b"x-request-id",
        b"x-warmroute-priority",
    }
)
_NONE: tuple[bytes, ...] = ()
_PRIORITIES = {priority.value: priority for priority in Priority}


class ClientHeaders(Struct, frozen=True, kw_only=True):
    """What the headers of a request say, Content-Length apart: a client repeats the others.

    ``lines`` are what goes on to a replica, ``nameless_lines`` the same without what may say who
    the client is. ``api_key`` is the one key that it shows. ``content_coding``, ``transfer_coding``
    and ``expectation`` are in lower case, of all lines of that name, empty where there is none.
    ``is_plain``: there is neither an expectation nor a content coding.
    """

    received: RawHeaders
    lines: bytes
    nameless_lines: bytes
    hosts: int
    content_coding: str
    transfer_coding: str
    expectation: str
    is_plain: bool
    request_id: str | None
    api_key: bytes | None
    forwarded_for: str = ""
    """The addresses before it, by its own words."""
    priority: Priority | None = None
    """What it asks for, where that is one of the names."""
    trace_parent: TraceParent | None = None


def read_headers(received: RawHeaders) -> ClientHeaders:
    """Return what the headers say; raises ClientError for what no client of ours sends."""
    if len(received) > HEADERS_MOST:
        message = f"expected at most {HEADERS_MOST} headers"
        raise HeadTooLargeError(message)
    headers = []
    is_named = False
    watched: dict[bytes, list[bytes]] = {}
    for name, padded in received:
        if len(name) + len(padded) > LINE_BYTES:
            message = f"expected headers of at most {LINE_BYTES} bytes"
            raise HeadTooLargeError(message)
        lower, value = name.lower(), padded.strip(b" \t")
        if lower in UNDERSCORED:
            message = "a header looks like framing and is not"
            raise ClientError(message)
        if lower in _WATCHED:
            watched.setdefault(lower, []).append(value)
        if lower in NAMES_CLIENT:
            is_named = True
        headers.append((name, value))
    hosts = watched.get(b"host", ())
    if not all(_HOST.fullmatch(host) for host in hosts):
        message = "Host: expected a name or an address, and a port"
        raise ClientError(message)

    def joined(name: bytes) -> str:
        return b",".join(watched.get(name, _NONE)).strip().lower().decode("latin-1")

    lines = request_lines(headers)
    return ClientHeaders(
        received=received,
        lines=lines,
        nameless_lines=request_lines(headers, NAMES_CLIENT) if is_named else lines,
        hosts=len(hosts),
        content_coding=joined(b"content-encoding"),
        transfer_coding=joined(b"transfer-encoding"),
        expectation=joined(b"expect"),
        is_plain=b"expect" not in watched and b"content-encoding" not in watched,
        request_id=accepted_request_id(watched.get(b"x-request-id", _NONE)),
        api_key=presented_key(
            watched.get(b"authorization", _NONE), watched.get(b"x-api-key", _NONE)
        ),
        forwarded_for=forwarded_chain(watched.get(b"x-forwarded-for", _NONE)),
        priority=_PRIORITIES.get(joined(b"x-warmroute-priority")),
        trace_parent=parent_of(watched.get(TRACE_PARENT, _NONE)),
    )


def read_head(
    method: str, target: str, version: str, received: RawHeaders, *, keep_alive: bool
) -> RequestHead:
    """Return the head; raises ClientError for what means another protocol or another role."""
    if version not in {"1.0", "1.1"}:
        message = "expected HTTP/1.0 or HTTP/1.1"
        raise UnsupportedVersionError(message)
    if method in _TARGETLESS or target == "*":
        message = f"method: expected {ALLOWED_ANYWHERE}"
        raise MethodNotAllowedError(message, allow=ALLOWED_ANYWHERE)
    if len(target) > LINE_BYTES:
        raise target_too_long()
    if "#" in target:
        message = "no such path"
        raise NotFoundError(message)
    if not target.startswith("/"):
        message = "expected a path"
        raise ClientError(message)
    headers = read_headers(received)
    if headers.hosts != 1 and (headers.hosts or version == "1.1"):
        message = "Host: expected exactly one"
        raise ClientError(message)
    if headers.transfer_coding and (headers.transfer_coding != "chunked" or version == "1.0"):
        message = "Transfer-Encoding: expected chunked, from HTTP/1.1 on"
        raise UnsupportedFramingError(message)
    return RequestHead(
        method=method,
        target=target,
        path=target.partition("?")[0],
        headers=headers,
        is_http10=version == "1.0",
        keep_alive=keep_alive,
    )


def target_too_long() -> TargetTooLongError:
    """Return the error for a target beyond the limit."""
    return TargetTooLongError(f"expected a path of at most {LINE_BYTES} bytes")


def body_length(head: RequestHead, lengths: Sequence[bytes]) -> int | None:
    """Return how many body bytes follow, None where chunks tell; raises ClientError."""
    is_coded = bool(head.headers.transfer_coding)
    length = None if is_coded and not lengths else 0
    if lengths:
        length = content_length(lengths)
        if length is None or is_coded:
            message = "Content-Length: expected one number, and no Transfer-Encoding"
            raise ClientError(message)
    if length != 0 and head.method in _BODILESS:
        message = f"{head.method}: expected no body"
        raise ClientError(message)
    return length


def too_large(limits: LimitSettings) -> BodyTooLargeError:
    """Return the error for a body beyond the limit."""
    return BodyTooLargeError(f"body: expected at most {limits.body_bytes} bytes")


class RequestHead(Struct, frozen=True, kw_only=True):
    """A head without the length of the body; ``path`` is the target without its query."""

    method: str
    target: str
    path: str
    headers: ClientHeaders
    is_http10: bool
    keep_alive: bool


class Request:
    """One request; whoever reads its bytes fills in the body.

    ``declared_bytes`` is the length of the body, None for a chunked one. ``refusal`` is the answer
    to what is no request. ``stream`` is the response once one was begun.
    """

    connection: ClientConnection
    refusal: RouterError | None = None
    stream: ClientStream | None = None
    is_complete = False
    received_bytes = 0
    _fault: RouterError | None = None
    _waiter: asyncio.Future[None] | None = None

    def __init__(self, head: RequestHead, declared_bytes: int | None) -> None:
        self.method = head.method
        self.target = head.target
        self.path = head.path
        self.headers = head.headers
        self.is_http10 = head.is_http10
        self.keep_alive = head.keep_alive
        self.declared_bytes = declared_bytes
        self._parts: list[bytes] = []
        if declared_bytes is None:  # an object for each small chunk would take many times more
            self._chunks = bytearray()

    @classmethod
    def refused(cls, error: RouterError) -> Request:
        """Return what stands for bytes that are no request."""
        request = cls(_NO_HEAD, 0)
        request.refusal = error
        return request

    # What the reader calls.

    def take(self, data: bytes, limit_bytes: int) -> bool:
        """Keep body bytes; False where there are more of them than ``limit_bytes``."""
        self.received_bytes += len(data)
        if self.received_bytes > limit_bytes:
            return False
        if self.declared_bytes is None:
            self._chunks += data
        else:
            self._parts.append(data)
        return True

    def complete(self) -> None:
        """Note that the body came to its end."""
        self.is_complete = True
        if self._waiter is not None:
            self._wake()

    def fail(self, fault: RouterError) -> None:
        """Note that the body is not one, or too large: nothing more of it comes."""
        self._fault = fault
        self.let_body_go()
        self.keep_alive = False
        self._wake()

    def let_body_go(self) -> int:
        """Forget the body, which was taken; return how many bytes that were."""
        let_go_bytes, self.received_bytes = self.received_bytes, 0
        self._parts.clear()
        if self.declared_bytes is None:
            self._chunks.clear()
        return let_go_bytes

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What a handler calls.

    @property
    def is_settled(self) -> bool:
        """Whether nothing more comes of the body: it is whole, or will never be."""
        return self.is_complete or self._fault is not None

    async def settled(self) -> None:
        """Wait until ``is_settled``."""
        if not self.is_settled:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def body(self) -> bytes:
        """Return the whole body of a settled request; raises RouterError."""
        if self._fault is not None:
            raise self._fault
        if self.declared_bytes is None:
            return bytes(self._chunks)
        parts = self._parts
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)

    @property
    def peer(self) -> str | None:
        """The client's address."""
        return self.connection.peer

    @property
    def forwarded_for(self) -> str | None:
        """What a replica is told of the client's address, behind what trusted proxies tell."""
        peer, before = self.connection.peer, self.headers.forwarded_for
        if before and peer is not None and self.connection.is_trusted:
            return f"{before}, {peer}"
        return peer


NO_HEADERS = read_headers(())
_NO_HEAD = RequestHead(
    method="GET",
    target="",
    path="",
    headers=NO_HEADERS,
    is_http10=False,
    keep_alive=False,
)
