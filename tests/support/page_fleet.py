"""Many engines in one process, and load on a router, for looking at the operators' page.

Each engine has an address of its own (127.0.0.N), so that a router takes it for a machine. It
remembers the prompts that it saw, reports what of them was cached, and takes a time that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from aiohttp import web

from state.client import RedisSettings, command_client
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaLoad, ReplicaRecord
from state.redis_writer import RedisWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

MODEL: Final = "fleet-model"
WORDS: Final = ("router", "sends", "request", "replica", "cache", "holds", "prefix", "prompt")
SYSTEM_WORDS: Final = 900
PREFILL_WORDS_PER_S: Final = 9_000.0
HEARTBEAT_S: Final = 0.5
BEATS_AT_ONCE: Final = 16
"""Fewer than the client has connections."""


def text_of(words: int, seed: object) -> str:
    """Return so many words, always the same for one seed."""
    rng = random.Random(repr(seed))
    return " ".join(rng.choice(WORDS) for _ in range(words))


@dataclass
class Engine:
    """One engine; ``models`` are what it says that it serves."""

    name: str
    address: str
    models: Sequence[str]
    tells_load: bool = True
    known: set[int] = field(default_factory=set)
    running: int = 0

    def cached_words(self, words: list[str]) -> int:
        """Return how many leading words were asked for before, in steps of 64; remember all."""
        cached = 0
        for end in range(64, len(words) + 1, 64):
            mark = hash(tuple(words[:end]))
            if mark in self.known:
                cached = end
            self.known.add(mark)
        return cached


class Engines:
    """``async with Engines(100) as engines``: listening, and registered where ``state_url`` is."""

    def __init__(
        self, count: int, state_url: str, models: Sequence[str] = (MODEL,), pace: float = 1.0
    ) -> None:
        self.engines = [
            Engine(f"gpu-{number:03}", f"127.0.0.{number + 1}", models, number % 9 != 4)
            for number in range(count)
        ]
        self._by_address = {one.address: one for one in self.engines}
        self._state_url = state_url
        self._pace = pace
        self.port = 0
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        for one in self.engines:
            listening = socket.create_server((one.address, self.port))
            self.port = listening.getsockname()[1]
            await web.SockSite(runner, listening).start()
        beating = asyncio.create_task(self._register())
        self._stack.push_async_callback(_ended, beating)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _register(self) -> None:
        """Play everybody's sidecar: register, then tell the load."""
        client = command_client(
            RedisSettings(url=self._state_url, command_timeout_s=10.0, connect_timeout_s=10.0)
        )
        writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1))
        try:
            for one in self.engines:
                await writer.register(self._record(one))
            while True:
                for first in range(0, len(self.engines), BEATS_AT_ONCE):
                    some = self.engines[first : first + BEATS_AT_ONCE]
                    await asyncio.gather(
                        *(writer.heartbeat(self._record(one), _load(one)) for one in some)
                    )
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            await client.aclose()

    def _record(self, one: Engine) -> ReplicaRecord:
        return ReplicaRecord(
            replica=ReplicaId(one.name),
            endpoint=f"http://{one.address}:{self.port}",
            generation=Generation(f"life-of-{one.name}"),
            identity=ModelIdentity(model=one.models[0]),
            page_tokens=16,
            sidecar=f"beside-{one.name}",
            capacity_pages=20_000,
            has_events=False,
            is_draining=one.name.endswith("7"),
        )

    def _engine(self, request: web.Request) -> Engine:
        assert request.transport is not None
        return self._by_address[request.transport.get_extra_info("sockname")[0]]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=500 if self._engine(request).name.endswith("13") else 200)

    async def _models(self, request: web.Request) -> web.Response:
        models = self._engine(request).models
        return web.json_response({"object": "list", "data": [{"id": name} for name in models]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        engine = self._engine(request)
        body = await request.json()
        words = " ".join(message["content"] for message in body["messages"]).split()
        cached = engine.cached_words(words)
        engine.running += 1
        try:
            await asyncio.sleep((len(words) - cached) / PREFILL_WORDS_PER_S * self._pace)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            usage = {
                "prompt_tokens": len(words),
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            choice = {"index": 0, "delta": {"content": "x"}}
            with contextlib.suppress(ConnectionResetError):  # the load ends when it likes
                await stream.prepare(request)
                for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
                    await stream.write(f"data: {json.dumps(event)}\n\n".encode())
                    await asyncio.sleep(0.05 * self._pace)
                await stream.write(b"data: [DONE]\n\n")
            return stream
        finally:
            engine.running -= 1


def _load(one: Engine) -> ReplicaLoad:
    if not one.tells_load:
        return ReplicaLoad()
    used = min(1.0, (one.running + len(one.known) / 400) / 24)
    return ReplicaLoad(running=one.running, queued=0, kv_used_fraction=used)


@contextlib.asynccontextmanager
async def load(
    url: str, users: int, keys: Sequence[str] = (), pause_s: float = 0.5, model: str = MODEL
) -> AsyncIterator[None]:
    """Let users ask while the block runs: half of them with one system prompt."""

    async def user(number: int, http: aiohttp.ClientSession) -> None:
        rng = random.Random(number)
        headers = {"Authorization": f"Bearer {keys[number % len(keys)]}"} if keys else {}
        turn = 0
        while True:
            turn += 1
            system = 0 if rng.random() < 0.5 else rng.randrange(1, 7)
            messages = [
                {"role": "system", "content": text_of(SYSTEM_WORDS, system)},
                {"role": "user", "content": text_of(60, (number, turn))},
            ]
            body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
            body |= {"max_tokens": 8, "stream_options": {"include_usage": True}}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.post(
                    f"{url}/v1/chat/completions", json=body, headers=headers
                ) as got:
                    await got.read()
            await asyncio.sleep(rng.random() * pause_s)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as http:
        tasks = [asyncio.create_task(user(number, http)) for number in range(users)]
        try:
            yield
        finally:
            await asyncio.gather(*map(_ended, tasks))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
