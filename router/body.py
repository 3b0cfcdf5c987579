"""A client's request body: bounded in bytes and time, ``Expect`` answered by us."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.error import (
    ExpectationFailedError,
    RequestTimeoutError,
    UnsupportedEncodingError,
)
from router.intake import too_large

if TYPE_CHECKING:
    from router.config import LimitSettings
    from router.request import Request


def check_framing(request: Request, limits: LimitSettings) -> None:
    """Refuse what must not reach a replica before its body is read; raises ClientError."""
    headers = request.headers
    if headers.content_coding not in {"", "identity"}:
        message = f"Content-Encoding: expected identity, got {headers.content_coding[:32]!r}"
        raise UnsupportedEncodingError(message)
    if headers.expectation not in {"", "100-continue"}:
        message = "Expect: expected 100-continue"
        raise ExpectationFailedError(message)
    if (request.declared_bytes or 0) > limits.body_bytes:
        raise too_large(limits)


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """Return the whole body; raises ClientError when it is malformed, too large or too slow."""
    if not (request.is_complete and request.headers.is_plain):
        check_framing(request, limits)
    if not request.is_settled:  # else it came with the head: nothing to wait for
        if request.headers.expectation and not request.is_http10:
            request.connection.ask_for_body(request)
        try:
            async with asyncio.timeout(limits.body_deadline_s):
                await request.settled()
        except TimeoutError:
            message = f"body: expected within {limits.body_deadline_s:g} s"
            raise RequestTimeoutError(message) from None
    return request.body()
