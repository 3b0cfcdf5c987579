"""The listeners: a fixed table of exact paths, and nothing that is not in it.

Client paths and operator paths are two tables on two listeners: what the operator may see (other
tenants' decisions among it) is not served to clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from router.error import (
    ClientError,
    MethodNotAllowedError,
    NotFoundError,
    UnsupportedVersionError,
)
from router.reply import error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

PREFIX_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
"""Where a prompt's prefix decides."""
DONE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Whose streams end with a line that says so."""
LOAD_PATHS = frozenset(
    {
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
    }
)
"""Passed through to the least loaded replica: a prefix is not looked at."""
VERSIONS = frozenset({(1, 0), (1, 1)})
KEEP_ALIVE_S = 75.0
HEAD_BYTES = 8190


class RouteTable:
    """Exact path -> method -> handler; answers everything else itself."""

    def __init__(self, routes: Mapping[str, Mapping[str, Handler]]) -> None:
        self._routes = routes

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Dispatch one request by its raw path; never by a normalised one."""
        try:
            return await self._handler(request)(request)
        except ClientError as error:
            return error_response(error)

    def _handler(self, request: web.BaseRequest) -> Handler:
        if tuple(request.version) not in VERSIONS:
            message = "expected HTTP/1.0 or HTTP/1.1"
            raise UnsupportedVersionError(message)
        path = request.raw_path.partition("?")[0]
        methods = self._routes.get(path)
        if methods is None and path.startswith("/debug/decisions/"):
            methods = self._routes.get("/debug/decisions/{id}")
        if methods is None:
            message = "no such path"
            raise NotFoundError(message)
        handler = methods.get(request.method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            message = f"method: expected {allowed}"
            raise MethodNotAllowedError(message, allow=allowed)
        return handler


def build_server(table: RouteTable) -> web.Server:
    """Return an aiohttp protocol factory with our settings, each against a default that bites.

    ``handler_cancellation``: a client that leaves is noticed at once. ``auto_decompress`` off:
    bodies are forwarded as they came. Access logs are ours.
    """
    return web.Server(
        table,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEP_ALIVE_S,
        lingering_time=2.0,
        max_line_size=HEAD_BYTES,
        max_field_size=HEAD_BYTES,
    )
