"""An engine that only tells tokens: ``/tokenize``, ``/render`` and what may be wrong with them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from types import TracebackType


class TokenEngine:
    """Its ids are the UTF-8 bytes of what it is asked, plus ``first_id``.

    ``statuses`` are answered instead, by path, and ``answers`` are sent as they are. While ``gate``
    is clear, questions wait.
    """

    def __init__(self) -> None:
        self.url = ""
        self.first_id = 1000
        self.statuses: dict[str, int] = {"/v1/chat/completions/render": 403}
        self.answers: dict[str, bytes] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Condition()

    async def __aenter__(self) -> Self:
        """Serve on a free port."""
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{path:.*}", self._tell)
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
        self.gate.set()
        await self._server.close()

    def paths(self) -> list[str]:
        """Return the paths that were asked, in order."""
        return [path for path, _ in self.asked]

    async def has_been_asked(self, times: int) -> None:
        """Wait for so many questions."""
        async with asyncio.timeout(20):
            async with self._news:
                await self._news.wait_for(lambda: len(self.asked) >= times)

    def ids_of(self, body: dict[str, Any]) -> list[int]:
        """Return the ids of what ``body`` asks for."""
        asked = body.get("prompt") or json.dumps(body["messages"])
        return [self.first_id + byte for byte in asked.encode()]

    async def _tell(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self._news:
            self.asked.append((request.path, body))
            self._news.notify_all()
        await self.gate.wait()
        status = self.statuses.get(request.path, 200)
        if request.path in self.answers or status != 200:
            return web.Response(status=status, body=self.answers.get(request.path, b"{}"))
        ids = self.ids_of(body)
        if request.path == "/tokenize":
            return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 1})
        told: Any = {"token_ids": ids, "sampling_params": {}}
        return web.json_response([told] if "prompt" in body else told)
