"""Answers that the router gives itself: errors, health, JSON."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from router.error import error_body, error_headers
from router.header import header_lines, response_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.error import RouterError

REQUEST_ID_HEADER = "x-request-id"
SERVER = b"warmroute"
"""Names no version."""


class Response(Struct, frozen=True, kw_only=True):
    """A whole answer; ``lines`` are its header lines besides framing, Date and Connection."""

    status: int
    lines: bytes
    body: bytes

    def encode(self, method: str, date: bytes, *, is_http10: bool, keep_alive: bool) -> bytes:
        """Return its bytes, without the body where the request was HEAD."""
        head = response_head(
            self.status,
            b"%bDate: %b\r\n" % (self.lines, date),
            framing="length",
            length=None if self.status == HTTPStatus.NOT_MODIFIED else len(self.body),
            is_http10=is_http10,
            keep_alive=keep_alive,
        )
        return head if method == "HEAD" else head + self.body


def own_response(
    body: bytes,
    content_type: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an answer of the router itself."""
    flat = [b"Content-Type", content_type.encode("ascii"), b"Server", SERVER]
    for name, value in (headers or {}).items():
        flat += (name.encode("ascii"), value.encode("ascii"))
    return Response(status=status, lines=header_lines(flat), body=body)


def json_response(value: object, *, status: int = 200) -> Response:
    """Return ``value`` as a JSON response."""
    return own_response(msgspec.json.encode(value), "application/json", status=status)


def error_response(error: RouterError, request_id: str | None = None) -> Response:
    """Return the response that tells a client of ``error``."""
    headers = error_headers(error)
    if request_id is not None:
        headers[REQUEST_ID_HEADER] = request_id
    return own_response(error_body(error), "application/json", status=error.status, headers=headers)
