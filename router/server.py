"""The listeners: a fixed table of exact paths, and nothing that is not in it.

Client paths and operator paths are two tables on two listeners: what the operator may see (other
tenants' decisions among it) is not served to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING

from router.client import ClientConnection
from router.date import HttpDate
from router.error import MethodNotAllowedError, NotFoundError
from router.intake import BodyBudget
from router.peer import Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.client import Handler
    from router.config import LimitSettings
    from router.request import Request

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
FORM_PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Of those: whose bodies are forms."""
JSON_PATHS = PREFIX_PATHS | (LOAD_PATHS - FORM_PATHS)
"""Whose bodies are JSON objects."""
_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
"""What no reader takes for another path: no escapes, no segments that begin with a dot."""
SHED_MOST = 256
"""So many connections beyond the limit are told so at once; more are closed without a word."""
WARN_EVERY_S = 60.0

_log = logging.getLogger(__name__)


class RouteTable:
    """Exact path -> method -> handler; then paths that end with ``/*``, for plain paths below."""

    def __init__(self, routes: Mapping[str, Mapping[str, Handler]]) -> None:
        self._routes = {path: found for path, found in routes.items() if path[-2:] != "/*"}
        self._below = {path[:-1]: found for path, found in routes.items() if path[-2:] == "/*"}

    def __call__(self, request: Request) -> Handler:
        """Return the handler of a request by its raw path, never by a normalised one.

        Raises ClientError where there is none.
        """
        path = request.path
        methods = self._routes.get(path)
        if methods is None and path.startswith("/debug/decisions/"):
            methods = self._routes.get("/debug/decisions/{id}")
        if methods is None and path.startswith("/admin/scopes/"):
            is_rotation = path.endswith("/rotate")
            methods = self._routes.get(f"/admin/scopes/{{name}}{'/rotate' if is_rotation else ''}")
        if methods is None and path.startswith("/admin/settings/"):
            methods = self._routes.get("/admin/settings/{version}")
        if methods is None and path.startswith("/admin/replicas/"):
            methods = self._routes.get(f"/admin/replicas/{{id}}/{path.rpartition('/')[2]}")
        if methods is None and self._below and _PLAIN_PATH.fullmatch(path):
            fitting = [below for below in self._below if path.startswith(below)]
            methods = self._below[max(fitting, key=len)] if fitting else None
        if methods is None:
            message = "no such path"
            raise NotFoundError(message)
        handler = methods.get(request.method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            message = f"method: expected {allowed}"
            raise MethodNotAllowedError(message, allow=allowed)
        return handler


class Server:
    """The protocol factory of one listener, and its open connections."""

    def __init__(self, find: Callable[[Request], Handler], limits: LimitSettings) -> None:
        self.find = find
        self.limits = limits
        self.date = HttpDate()
        self.peers = Peers(limits.connections_per_address, limits.trusted_proxies)
        self.bodies = BodyBudget(limits.buffered_bytes)
        self._open: set[ClientConnection] = set()
        self._emptied = asyncio.Event()
        self._warn_at_s = 0.0
        self.is_stopping = False
        """Each connection ends with the answer that it is about to give."""

    def __call__(self) -> ClientConnection:
        """Return the protocol of a new connection."""
        return ClientConnection(self)

    @property
    def shed_most(self) -> int:
        """How many connections beyond the limit are told so; each takes a file until it left."""
        return min(SHED_MOST, max(1, self.limits.connections // 8))

    @property
    def open_connections(self) -> int:
        """Connections that exist, idle or not."""
        return len(self._open)

    def opened(self, connection: ClientConnection) -> None:
        """Count a new connection; tell it to leave where there are too many."""
        self._open.add(connection)
        beyond = len(self._open) - self.limits.connections
        beyond_share = self.peers.enter(connection.peer)
        if max(beyond, beyond_share) > self.shed_most:
            connection.abort()
        elif beyond > 0:
            connection.shed("too many connections")
        elif beyond_share > 0:
            self._warn_of_share()
            connection.shed("too many connections from one address")

    def _warn_of_share(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._warn_at_s:
            self._warn_at_s = now_s + WARN_EVERY_S
            _log.warning(
                "limits.connections_per_address: an address has more than %d; a proxy's belongs"
                " into limits.trusted_proxies",
                self.limits.connections_per_address,
            )

    def closed(self, connection: ClientConnection) -> None:
        """Forget a connection that is gone."""
        self._open.discard(connection)
        self.peers.leave(connection.peer)
        if not self._open:
            self._emptied.set()

    def stop(self) -> None:
        """Let each connection end after the next answer."""
        self.is_stopping = True
        for connection in self._open:
            connection.stop()

    async def close(self, grace_s: float) -> None:
        """End every connection: idle ones at once, those with a request after ``grace_s``."""
        self.stop()
        for connection in list(self._open):
            connection.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._until_empty()
        for connection in list(self._open):
            connection.abort()
        await self._until_empty()

    async def _until_empty(self) -> None:
        while self._open:
            self._emptied.clear()
            await self._emptied.wait()
