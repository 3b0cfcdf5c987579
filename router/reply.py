"""Answers that the router gives itself: errors, health, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from router.error import error_body, error_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.error import RouterError

REQUEST_ID_HEADER = "x-request-id"
SERVER = "warmroute"
"""Instead of the library's own, which tells versions."""


def own_response(
    body: bytes,
    content_type: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return an answer of the router itself."""
    return web.Response(
        body=body,
        status=status,
        headers={"Content-Type": content_type, "Server": SERVER, **(headers or {})},
    )


def json_response(value: object, *, status: int = 200) -> web.Response:
    """Return ``value`` as a JSON response."""
    return own_response(msgspec.json.encode(value), "application/json", status=status)


def error_response(error: RouterError, request_id: str | None = None) -> web.Response:
    """Return the response that tells a client of ``error``."""
    headers = error_headers(error)
    if request_id is not None:
        headers[REQUEST_ID_HEADER] = request_id
    return own_response(error_body(error), "application/json", status=error.status, headers=headers)
