"""A small engine in a process of its own, that can be killed, stopped, and told to misbehave.

Run as a program it serves one port: chats after a delay, whole or as a stream. A body with POISON
in it ends the process at once, as a crash does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    import signal
    from types import TracebackType

POISON: Final = "POISON"
MODEL: Final = "fleet-model"
EVENT: Final = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
STARTS_S: Final = 90.0


class _Engine:
    """What the process serves. ``mode``: ok, 500, 503 or close."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode = "ok"
        self.health = 200
        self.asked = 0
        self.lag_s = 0.0
        """How much longer an answer takes here."""
        self.left = 0
        """Requests whose client went away."""
        self.open = 0
        self.most_open = 0

    async def set_mode(self, request: web.Request) -> web.Response:
        told = await request.json()
        self.mode = told.get("mode", self.mode)
        self.health = told.get("health", self.health)
        self.lag_s = told.get("lag_s", self.lag_s)
        return web.Response()

    async def count(self, _: web.Request) -> web.Response:
        counts = {"asked": self.asked, "most_open": self.most_open, "left": self.left}
        return web.json_response(counts)

    async def check(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.asked += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if POISON in text:
                os._exit(1)
            return await self._answer(request, json.loads(text))
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.mode == "close":
            transport = request.transport
            assert transport is not None
            transport.abort()
            return web.Response()
        if self.mode != "ok":
            headers = {"Retry-After": "1"} if self.mode == "503" else {}
            return web.json_response({"error": {}}, status=int(self.mode), headers=headers)
        if not body.get("stream"):
            await asyncio.sleep(body.get("delay_s", 0.0) + self.lag_s)
            return web.json_response({"served_by": self.name, "choices": []})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body.get("head_first"):  # as engines do
            await stream.prepare(request)
        await asyncio.sleep(body.get("delay_s", 0.0) + self.lag_s)
        if not body.get("head_first"):
            await stream.prepare(request)
        await stream.write(b'data: {"by":"%b"}\n\n' % self.name.encode())
        for _ in range(body.get("events", 2)):
            await stream.write(EVENT)
            await asyncio.sleep(body.get("pause_s", 0.0))
        await stream.write(b"data: [DONE]\n\n")
        return stream


def serve(port: int, name: str) -> None:
    """Serve until killed."""
    engine = _Engine(name)
    app = web.Application()
    app.router.add_get("/health", engine.check)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_post("/mode", engine.set_mode)
    app.router.add_get("/count", engine.count)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handler_cancellation=True)


@dataclass(slots=True)
class FrailEngine:
    """One such process, seen from a test."""

    name: str
    port: int
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__)), str(self.port), self.name
        )
        async with asyncio.timeout(STARTS_S), aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/health"):
                        return
                await asyncio.sleep(0.05)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


@dataclass(slots=True)
class FrailFleet:
    """Several of them."""

    engines: list[FrailEngine] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        """Start all."""
        await asyncio.gather(*(engine.start() for engine in self.engines))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill all."""
        await asyncio.gather(*(engine.kill() for engine in self.engines))

    @property
    def alive(self) -> int:
        """How many run."""
        return sum(engine.is_alive for engine in self.engines)

    async def tell(self, **mode: Any) -> None:
        """Tell all how to behave."""
        async with aiohttp.ClientSession() as http:
            for engine in self.engines:
                async with http.post(f"{engine.url}/mode", json=mode) as answer:
                    assert answer.status == 200

    async def counts(self, key: str) -> list[int]:
        """Return what each one counted."""
        counts = []
        async with aiohttp.ClientSession() as http:
            for engine in self.engines:
                async with http.get(f"{engine.url}/count") as answer:
                    counts.append((await answer.json())[key])
        return counts


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
