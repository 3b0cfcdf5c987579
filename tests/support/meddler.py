"""Stands between a real engine and whoever asks it, and changes what passes: one fault each.

Everything that no fault is about goes through as it is, so that sidecar, router and doctor see a
real engine that is set up wrongly.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from types import TracebackType


class Meddler:
    """One address in front of ``engine``; the faults may be changed while it runs.

    ``sources`` takes the place of what ``/kv_event_sources`` answers. ``is_caching`` is what the
    metrics say of it. ``hides_hits``: usage has no cached tokens; ``hits`` are reported instead.
    ``drops_salt``: no request has a cache salt.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.url = ""
        self.sources: dict[str, Any] | None = None
        self.is_caching = True
        self.hides_hits = False
        self.hits: int | None = None
        self.drops_salt = False

    async def __aenter__(self) -> Self:
        """Serve on a free port."""
        self._http = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = f"http://{self._server.host}:{self._server.port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop serving."""
        await self._server.close()
        await self._http.close()

    async def _pass(self, request: web.Request) -> web.Response:
        if request.path == "/kv_event_sources" and self.sources is not None:
            return web.json_response(self.sources)
        body = await request.read()
        if body and self.drops_salt:
            asked = json.loads(body)
            asked.pop("cache_salt", None)
            body = json.dumps(asked).encode()
        async with self._http.request(
            request.method,
            self._engine + request.path_qs,
            data=body or None,
            headers={"Content-Type": request.content_type},
        ) as answer:
            told = self._changed(request.path, await answer.read())
            return web.Response(status=answer.status, body=told, content_type=answer.content_type)

    def _changed(self, path: str, body: bytes) -> bytes:
        if path == "/metrics" and not self.is_caching:
            return body.replace(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
        if path.endswith("/completions"):
            if self.hides_hits:
                return re.sub(rb',\s*"prompt_tokens_details":\s*\{[^}]*\}', b"", body)
            if self.hits is not None:
                told = b'"cached_tokens": %d' % self.hits
                return re.sub(rb'"cached_tokens":\s*\d+', told, body)
        return body
