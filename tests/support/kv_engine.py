"""An engine's outside, as a sidecar sees it: HTTP endpoints, a KV event publisher, its replay."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from state.prefix import pack_tokens
from support.port import free_port

if TYPE_CHECKING:
    from types import TracebackType

END = (2**64 - 1).to_bytes(8, "big")


def stored(
    handles: list[int], tokens: list[int], parent: int | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": handles,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(pack_tokens(tokens)) // 4 // len(handles),
        "medium": "GPU",
        **fields,
    }


def removed(*handles: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(handles), "medium": "GPU"}


class KvEngine:
    """Every answer can be changed while it runs; ``restart`` begins another life."""

    def __init__(self, *, has_replay: bool = True, has_topic_in_replay: bool = True) -> None:
        self.has_replay = has_replay
        self.has_topic_in_replay = has_topic_in_replay
        self.model = "tiny"
        self.page_tokens = 4
        self.capacity_pages = 1000
        self.running = 0
        self.prompt_tokens = 0
        self.is_healthy = True
        self.has_metrics = True
        self.has_sources = True
        self.can_transfer = False
        self.more_metrics = ""
        self.started_at_s = 1000.0
        self.log: list[tuple[int, bytes]] = []
        self.next_sequence = 0
        self.replay_starts: list[int] = []
        self.http_port = free_port()
        self.events_port = free_port()
        self.replay_port = free_port()
        self._runner: web.AppRunner | None = None
        self._context: zmq.asyncio.Context | None = None
        self._answering: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_get("/kv_transfer", self._transfer)
        self.add_routes(app)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.http_port).start()
        self.open_sockets()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close_sockets()
        if self._runner is not None:
            await self._runner.cleanup()

    def add_routes(self, app: web.Application) -> None:
        """Add what an engine answers besides; nothing here."""

    def open_sockets(self) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(f"tcp://127.0.0.1:{self.events_port}")
        if self.has_replay:
            router = self._context.socket(zmq.ROUTER)
            router.bind(f"tcp://127.0.0.1:{self.replay_port}")
            self._answering = asyncio.create_task(self._answer_replays(router))

    async def close_sockets(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            with suppress(asyncio.CancelledError):
                await self._answering
            self._answering = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def restart(self, *, is_told: bool = True) -> None:
        """Come back with an empty cache, counting from 0; ``is_told``: the metrics show it."""
        await self.close_sockets()
        self.log = []
        self.next_sequence = 0
        self.started_at_s += 100 if is_told else 0
        self.open_sockets()

    async def publish(self, *events: Any) -> None:
        sequence, payload = self._append(events)
        await self._publisher.send_multipart([b"topic", sequence.to_bytes(8, "big"), payload])

    def lose(self, *events: Any) -> None:
        """Publish what no subscriber gets."""
        self._append(events)

    def _append(self, events: tuple[Any, ...]) -> tuple[int, bytes]:
        batch = (self.next_sequence, msgspec.msgpack.encode([time.time(), list(events), 0]))
        self.log.append(batch)
        self.next_sequence += 1
        return batch

    async def _answer_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, delimiter, start = await router.recv_multipart()
            assert delimiter == b""
            first = int.from_bytes(start, "big")
            self.replay_starts.append(first)
            topic = [b"topic"] if self.has_topic_in_replay else []
            for sequence, payload in self.log:
                if sequence >= first:
                    frames = [client, b"", *topic, sequence.to_bytes(8, "big"), payload]
                    await router.send_multipart(frames)
            no_topic = [b""] if self.has_topic_in_replay else []
            await router.send_multipart([client, b"", *no_topic, END, b""])

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=200 if self.is_healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        if not self.has_metrics:
            return web.Response(status=404)
        return web.Response(
            text=f"""# HELP vllm:num_requests_running Running.
process_start_time_seconds {self.started_at_s}
vllm:num_requests_running{{engine="0"}} {float(self.running)}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:prompt_tokens_total{{engine="0"}} {float(self.prompt_tokens)}
vllm:cache_config_info{{block_size="{self.page_tokens}",num_gpu_blocks="{self.capacity_pages}"}} 1.0
{self.more_metrics}"""
        )

    async def _models(self, request: web.Request) -> web.Response:
        del request
        cards = [{"id": self.model, "parent": None}, {"id": "adapter", "parent": self.model}]
        return web.json_response({"object": "list", "data": cards})

    async def _sources(self, request: web.Request) -> web.Response:
        del request
        if not self.has_sources:
            return web.Response(status=404)
        replay = f"tcp://*:{self.replay_port}" if self.has_replay else None
        source = {"endpoint": f"tcp://*:{self.events_port}", "replay_endpoint": replay}
        return web.json_response({"0": source})

    async def _transfer(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({}, status=200 if self.can_transfer else 404)
