"""A client's request body: bounded in bytes and time, ``Expect`` answered by us."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.error import (
    ExpectationFailedError,
    RequestTimeoutError,
    UnsupportedEncodingError,
)
from router.request import too_large

if TYPE_CHECKING:
    from router.config import LimitSettings
    from router.request import Request


RATE_WINDOW_S = 5.0
"""A body has its least rate over each span of so long: shorter pauses are the network's."""


def check_framing(request: Request, limits: LimitSettings) -> None:
    """Refuse what must not reach a replica before its body is read; raises ClientError."""
    headers = request.headers
    if headers.content_coding not in {"", "identity"}:
        message = "Content-Encoding: expected identity"
        raise UnsupportedEncodingError(message)
    if headers.expectation not in {"", "100-continue"}:
        message = "Expect: expected 100-continue"
        raise ExpectationFailedError(message)
    if (request.declared_bytes or 0) > limits.body_bytes:
        raise too_large(limits)


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """Return the whole body.

    Raises ClientError when it is malformed, too large or too slow, OverloadedError when the bodies
    of all requests are too large.
    """
    if not (request.is_complete and request.headers.is_plain):
        check_framing(request, limits)
    if not request.is_settled:  # else it came with the head: nothing to wait for
        if request.headers.expectation and not request.is_http10:
            request.connection.ask_for_body(request)
        await _until_settled(request, limits)
    return request.body()


async def _until_settled(request: Request, limits: LimitSettings) -> None:
    """Wait for the body, as long as it may take and as fast as it has to come."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    due_s = now_s + limits.body_deadline_s
    while not request.is_settled:
        look_s, before_bytes = min(due_s, now_s + RATE_WINDOW_S), request.received_bytes
        try:
            async with asyncio.timeout_at(look_s):
                await request.settled()
        except TimeoutError:
            took_s, now_s = look_s - now_s, look_s
            if now_s >= due_s:
                message = f"body: expected within {limits.body_deadline_s:g} s"
                raise RequestTimeoutError(message) from None
            if request.received_bytes - before_bytes < took_s * limits.body_bytes_per_s:
                message = f"body: expected at least {limits.body_bytes_per_s} bytes a second"
                raise RequestTimeoutError(message) from None
