"""Reading a client's request body: bounded in bytes and time, ``Expect`` answered by us."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.error import (
    BodyTooLargeError,
    ExpectationFailedError,
    RequestTimeoutError,
    UnsupportedEncodingError,
    UnsupportedFramingError,
)

if TYPE_CHECKING:
    from aiohttp import web

    from router.config import LimitSettings

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HTTP_11 = (1, 1)


def check_framing(request: web.BaseRequest, limits: LimitSettings) -> None:
    """Refuse what must not reach a replica before its body is read; raises ClientError."""
    coding = _whole(request, "Content-Encoding", "identity")
    if coding != "identity":
        message = f"Content-Encoding: expected identity, got {coding[:32]!r}"
        raise UnsupportedEncodingError(message)
    transfer = _whole(request, "Transfer-Encoding", "chunked")
    if transfer != "chunked":
        message = "Transfer-Encoding: expected chunked"
        raise UnsupportedFramingError(message)
    expect = _whole(request, "Expect", "100-continue")
    if expect != "100-continue":
        message = "Expect: expected 100-continue"
        raise ExpectationFailedError(message)
    length = request.content_length
    if length is not None and length > limits.body_bytes:
        raise too_large(limits)


def _whole(request: web.BaseRequest, name: str, default: str) -> str:
    """Return the value of a header, of all lines of that name."""
    lines = request.headers.getall(name, (default,))
    return ",".join(lines).strip().lower()


def too_large(limits: LimitSettings) -> BodyTooLargeError:
    """Return the error for a body beyond the limit."""
    return BodyTooLargeError(f"body: expected at most {limits.body_bytes} bytes")


async def read_body(request: web.BaseRequest, limits: LimitSettings) -> bytes:
    """Return the whole body; raises ClientError when it is too large or too slow."""
    check_framing(request, limits)
    if "Expect" in request.headers and request.version >= HTTP_11 and request.transport:
        request.transport.write(CONTINUE)
    if request.content.is_eof():  # it came whole with the head: nothing to wait for
        body = request.content.read_nowait()
        if len(body) > limits.body_bytes:
            raise too_large(limits)
        return body
    parts: list[bytes] = []
    received_bytes = 0
    try:
        async with asyncio.timeout(limits.body_deadline_s):
            while part := await request.content.readany():
                parts.append(part)
                received_bytes += len(part)
                if received_bytes > limits.body_bytes:
                    raise too_large(limits)
    except TimeoutError:
        message = f"body: expected within {limits.body_deadline_s:g} s"
        raise RequestTimeoutError(message) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)
