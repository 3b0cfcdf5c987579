"""An engine that serves adapters (LoRA) as vLLM does, before a bundled worker that knows none.

What an adapter computes is kept apart by a salt of the worker, made of its name and path: as vLLM
hashes both. The events are told on with the salt taken out and the adapter's name put in, on every
page, as vLLM does. An adapter that is asked for and not loaded is a 404, or is loaded on the way.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from support.fleet import MODEL
from support.kv_engine import KvEngine

if TYPE_CHECKING:
    from types import TracebackType

    from support.fleet import LocalFleet

PASSED: Final = ("/v1/chat/completions", "/v1/completions")
_MARK: Final = "adapter\n"


class AdapterEngine(KvEngine):
    """``adapters`` are names and paths; ``asked`` the models of requests."""

    def __init__(self, fleet: LocalFleet, adapters: dict[str, str]) -> None:
        super().__init__()
        self._fleet = fleet
        self._names: dict[int, str] = {}
        self.model = MODEL
        self.adapters = dict(adapters)
        self.loads_on_demand = False
        self.asked: list[str] = []

    async def __aenter__(self) -> Self:
        worker = await self._fleet.start_worker(f"worker-{self.http_port}").ready()
        self._worker_url, events = worker.words[0], worker.words[2]
        self._http = aiohttp.ClientSession()
        await super().__aenter__()
        self._heard = asyncio.Event()
        self._telling = asyncio.create_task(self._tell_on(events))
        while not self._heard.is_set():  # a subscription takes a moment
            body = {"model": MODEL, "prompt": list(range(32)), "max_tokens": 1}
            url = f"{self._worker_url}/v1/completions"
            async with self._http.post(url, json=body | {"cache_salt": "warm up"}) as answer:
                await answer.read()
            async with self._http.post(f"{self._worker_url}/reset_prefix_cache") as answer:
                await answer.read()
            await asyncio.sleep(0.02)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        await super().__aexit__(exc_type, exc, traceback)
        await self._http.close()

    def add_routes(self, app: web.Application) -> None:
        for path in PASSED:
            app.router.add_post(path, self._pass)

    async def _tell_on(self, endpoint: str) -> None:
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
            while True:
                _, _, payload = await socket.recv_multipart()
                _, events, _ = msgspec.msgpack.decode(payload)
                self._heard.set()
                await self.publish(*(self._translated(event) for event in events))
        finally:
            context.destroy(linger=0)

    def _translated(self, event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "BlockStored":
            return event
        salt = (event["extra_keys"][0] or [""])[0]
        name = self._names.get(event["parent_block_hash"], "")
        if salt.startswith(_MARK):
            name = json.loads(salt.removeprefix(_MARK))[0]
        if not name:
            return event
        self._names |= dict.fromkeys(event["block_hashes"], name)
        keys = [[name] for _ in event["block_hashes"]]
        return event | {"lora_id": 1, "lora_name": name, "extra_keys": keys}

    async def _models(self, request: web.Request) -> web.Response:
        del request
        cards = [{"id": MODEL, "parent": None, "root": MODEL, "owned_by": "vllm"}]
        cards += [
            {"id": name, "parent": MODEL, "root": path, "owned_by": "vllm"}
            for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        async with self._http.get(f"{self._worker_url}/metrics") as answer:
            return web.Response(text=await answer.text())

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["model"]
        self.asked.append(name)
        if name != MODEL:
            if self.loads_on_demand:
                self.adapters.setdefault(name, f"/adapters/{name}")
            if name not in self.adapters:
                error = {"message": "no such model", "type": "NotFoundError", "code": 404}
                return web.json_response({"error": error}, status=404)
            salt = _MARK + json.dumps([name, self.adapters[name]])
            body |= {"model": MODEL, "cache_salt": salt}
        async with self._http.post(self._worker_url + request.path, json=body) as answer:
            kept = {"Content-Type": answer.headers["Content-Type"]}
            reply = web.StreamResponse(status=answer.status, headers=kept)
            await reply.prepare(request)
            async for chunk in answer.content.iter_any():
                await reply.write(chunk)
        return reply
