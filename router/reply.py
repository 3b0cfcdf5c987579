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


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return ``value`` as a JSON response."""
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def error_response(error: RouterError, request_id: str | None = None) -> web.Response:
    """Return the response that tells a client of ``error``."""
    headers = error_headers(error)
    if request_id is not None:
        headers[REQUEST_ID_HEADER] = request_id
    return web.Response(
        body=error_body(error),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )
