"""The listeners: a fixed table of exact paths, and nothing that is not in it.

Client paths and operator paths are two tables on two listeners: what the operator may see (other
tenants' decisions among it) is not served to clients.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from router.error import (
    ClientError,
    MethodNotAllowedError,
    NotFoundError,
    RouterError,
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
HEAD_BYTES: Final = 8190
BAD_REQUEST: Final = 400
SETTINGS: Final[dict[str, Any]] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75.0,
    "lingering_time": 2.0,
    "max_line_size": HEAD_BYTES,
    "max_field_size": HEAD_BYTES,
}
"""Each against a default that bites: bodies are forwarded as they came, access logs are ours."""

_log = logging.getLogger(__name__)


class RouteTable:
    """Exact path -> method -> handler; answers everything else itself."""

    def __init__(self, routes: Mapping[str, Mapping[str, Handler]]) -> None:
        self._routes = routes

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Dispatch one request by its raw path; never by a normalised one.

        An answer before the whole body came ends the connection: whether the rest still comes, or
        the next request does, could not be told apart.
        """
        try:
            response = await self._handler(request)(request)
        except ClientError as error:
            response = error_response(error)
        if not request.content.is_eof():
            response.force_close()
        return response

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


class Protocol(web.RequestHandler):
    """A client's connection: aiohttp's, with our answers where it cannot parse or a handler fails.

    Its own quote what the client sent, in the answer and in the log, and name its version.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - quotes the client
    ) -> web.StreamResponse:
        """Return the answer to a malformed request or to a fault of ours; the connection ends."""
        error: RouterError
        if status == BAD_REQUEST:
            _log.debug("malformed request from %s: %s", request.remote, type(exc).__name__)
            error = ClientError("expected a well-formed HTTP/1.1 request")
        else:
            _log.error("a request failed", exc_info=exc)
            error = RouterError("the router failed on this request")
        if request.writer.output_size > 0:
            broken = "a response was begun already"
            raise ConnectionError(broken)
        response = error_response(error)
        response.force_close()
        return response


class Server(web.Server):
    """The protocol factory of one listener."""

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return Protocol(self, loop=asyncio.get_running_loop(), **SETTINGS)


def build_server(table: RouteTable) -> web.Server:
    """Return the protocol factory that serves ``table``.

    ``handler_cancellation``: a client that leaves is noticed at once.
    """
    return Server(table, handler_cancellation=True)
