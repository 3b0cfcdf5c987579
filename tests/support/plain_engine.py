"""An OpenAI server that tells nothing of what it holds: health, one model, completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from types import TracebackType

MODEL: Final = "plain-model"


class PlainEngine:
    """One server on a free port. ``metrics`` is what ``/metrics`` answers, None: 404.

    Whoever does not show the ``key`` gets 401. ``asked`` are the paths of all requests, in order.
    """

    def __init__(self, *, metrics: str | None = None, key: str | None = None) -> None:
        self.url = ""
        self.metrics = metrics
        self.key = key
        self.asked: list[str] = []

    async def __aenter__(self) -> Self:
        """Serve."""
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._answer)
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

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        match request.path:
            case "/health":
                return web.Response()
            case "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": MODEL}]})
            case "/metrics" if self.metrics is not None:
                return web.Response(text=self.metrics)
            case "/v1/completions":
                usage = {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
                choice = {"index": 0, "text": "x", "finish_reason": "length"}
                return web.json_response({"choices": [choice], "usage": usage})
        return web.Response(status=404)
