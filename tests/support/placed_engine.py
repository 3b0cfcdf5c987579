"""A small OpenAI server at an address of any kind: TLS, a unix socket, IPv6."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Self

from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

MODEL: Final = "placed-model"
WORDS: Final = ("one ", "two ", "three")
TEXT: Final = "".join(WORDS)


class PlacedEngine:
    """Serves at ``host`` and a free port, with ``tls`` if given, or at the unix socket ``path``.

    ``forwarded`` are the X-Forwarded-For of chats, ``hosts`` their Host headers.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        tls: ssl.SSLContext | None = None,
        path: str | None = None,
    ) -> None:
        self._host = host
        self._tls = tls
        self._path = path
        self.url = ""
        self.forwarded: list[str | None] = []
        self.hosts: list[str] = []

    async def __aenter__(self) -> Self:
        """Serve."""
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        if self._path is not None:
            await web.UnixSite(self._runner, self._path).start()
            self.url = f"unix:{self._path}"
            return self
        await web.TCPSite(self._runner, self._host, 0, ssl_context=self._tls).start()
        port = self._runner.addresses[0][1]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._tls else 'http'}://{shown}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.forwarded.append(request.headers.get("X-Forwarded-For"))
        self.hosts.append(request.headers["Host"])
        head = {"id": "chat-1", "created": 1, "model": MODEL}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        if not asked.get("stream"):
            message = {"role": "assistant", "content": TEXT}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(head | whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in WORDS:
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = head | {"object": "chat.completion.chunk", "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
