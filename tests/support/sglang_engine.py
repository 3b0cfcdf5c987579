"""An SGLang server's outside for tests: its HTTP paths, its KV events and their replay.

What it caches follows SGLang's rules (``support.sglang_tree``), what it publishes has its form: a
topic-less PUB socket, replies of the replay socket without a topic frame, one batch per step. It
generates no text worth reading, but counts as an engine does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from prompt.codec import load_codec
from prompt.reader import PromptReader
from state.prefix import unpack_tokens
from support.port import free_port
from support.sglang_tree import Encoding, SglangTree

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from prompt.codec import Codec

END: Final = (2**64 - 1).to_bytes(8, "big")
KEPT_BATCHES: Final = 10_000
MODEL: Final = "sglang-model"
HEALTH_S: Final = 1.0
"""A check computes a token, and looks whether it came after so long, as SGLang does."""
WORDS: Final = "lazy dogs jump over quick brown foxes " * 4


class SglangEngine:
    """One server on ports that it keeps over restarts.

    ``has_descriptor``: the newer ``/server_info`` with a block of its own for KV events.
    ``is_losing``: published batches reach no subscriber, only the replay.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        page_tokens: int = 1,
        capacity_tokens: int = 100_000,
        encoding: Encoding = "array",
        has_descriptor: bool = True,
        has_events: bool = True,
        has_replay: bool = True,
    ) -> None:
        self.model = MODEL
        self.page_tokens = page_tokens
        self.capacity_tokens = capacity_tokens
        self.encoding: Encoding = encoding
        self.has_descriptor = has_descriptor
        self.has_events = has_events
        self.has_replay = has_replay
        self.has_metrics = False
        self.is_healthy = True
        self.is_losing = False
        self.is_telling_tokens = True
        self.http_port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self._tokenizer = tokenizer
        self._codec: Codec = load_codec(tokenizer)
        self._reader = PromptReader({MODEL: self._codec}, self._codec)
        self._running = 0
        self._runner: web.AppRunner | None = None
        self._context: zmq.asyncio.Context | None = None
        self._begin()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.http_port}"

    def _begin(self) -> None:
        """Begin a life: nothing cached, batches counted from 0."""
        self.tree = SglangTree(self.page_tokens, self.capacity_tokens, self.encoding)
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)

    async def __aenter__(self) -> Self:
        """Serve."""
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.http_port).start()
        self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop serving."""
        await self._close()
        self._reader.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(f"tcp://*:{self.events_port}")
        self._replayer = self._context.socket(zmq.ROUTER)
        self._replayer.bind(f"tcp://*:{self.replay_port}")
        self._answering = asyncio.create_task(self._answer_replays())

    async def _close(self) -> None:
        if self._context is None:
            return
        self._answering.cancel()
        with suppress(asyncio.CancelledError):
            await self._answering
        self._context.destroy(linger=0)
        self._context = None

    async def restart(self) -> None:
        """Come back as another process: an empty cache, the same addresses."""
        await self._close()
        self._begin()
        self._open()

    async def _publish(self) -> None:
        """Send what the cache has to tell as one batch, as after each step of the scheduler."""
        events = self.tree.take()
        if not events:
            return
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((sequence, payload))
        if not self.is_losing:
            await self._publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

    async def _answer_replays(self) -> None:
        while True:
            frames = await self._replayer.recv_multipart()
            if len(frames) != 3 or not self.has_replay:
                continue
            client, _, start = frames
            for sequence, payload in list(self._kept):
                if sequence >= int.from_bytes(start, "big"):
                    number = sequence.to_bytes(8, "big")
                    await self._replayer.send_multipart([client, b"", number, payload])
            await self._replayer.send_multipart([client, b"", END, b""])

    async def _health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(HEALTH_S)
        return web.Response(status=200 if self.is_healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "root": str(self._tokenizer),
            "parent": None,
            "max_model_len": 32_768,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.has_metrics:
            return web.Response(status=404)
        text = f'sglang:num_running_reqs{{model_name="m"}} {float(self._running)}\n'
        return web.Response(text=f'{text}sglang:num_queue_reqs{{model_name="m"}} 0.0\n')

    async def _info(self, _: web.Request) -> web.Response:
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{self.events_port}", "topic": ""}
        if self.has_replay:
            config["replay_endpoint"] = f"tcp://*:{self.replay_port}"
        info: dict[str, Any] = {
            "model_path": str(self._tokenizer),
            "page_size": self.page_tokens,
            "dp_size": 1,
            "disable_radix_cache": False,
            "enable_cache_report": True,
            "kv_events_config": json.dumps(config) if self.has_events else None,
            "max_total_num_tokens": self.capacity_tokens,
            "internal_states": [{}],
            "version": "0.5.12",
        }
        if self.has_descriptor:
            block = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": self.events_port,
                "topic": "",
                "block_size": self.page_tokens,
                "dp_size": 1,
            }
            info["kv_events"] = block if self.has_events else None
        return web.json_response(info)

    async def _loads(self, _: web.Request) -> web.Response:
        used = self.tree.held_tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": self._running,
            "num_waiting_reqs": 0,
            "num_used_tokens": used,
            "max_total_num_tokens": self.capacity_tokens,
            "token_usage": round(used / self.capacity_tokens, 4),
        }
        return web.json_response({"version": "0.5.12", "loads": [load]})

    async def _flush(self, _: web.Request) -> web.Response:
        """Empty the cache; refused while requests run."""
        if self._running:
            return web.Response(status=400, text="there are running requests")
        self.tree.clear()
        await self._publish()
        return web.Response(text="Cache flushed.")

    async def _ids(self, request: web.Request) -> tuple[dict[str, Any], list[int]]:
        raw = await request.read()
        body = json.loads(raw)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        read = await self._reader.read(path, raw)
        prompt = read.prompts[0]
        return body, unpack_tokens(prompt.packed)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.is_telling_tokens:
            return web.Response(status=503)
        _, ids = await self._ids(request)
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 32_768})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Compute a prompt and its answer: its pages are told after the prefill, and at the end."""
        body, ids = await self._ids(request)
        salt = body.get("cache_salt") or ""
        self._running += 1
        cached = self.tree.match(ids, salt)
        self.tree.insert(ids, salt)
        await self._publish()
        words = unpack_tokens(self._codec.text_tokens(WORDS, add_special_tokens=False))
        output = words[: body.get("max_tokens") or 4]
        self.tree.insert([*ids, *output[:-1]], salt)
        self._running -= 1
        await self._publish()
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "total_tokens": len(ids) + len(output),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        text = self._codec.decode(output)
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "text": text, "finish_reason": "length"}
            return web.json_response({"id": "1", "choices": [choice], "usage": usage})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        delta = {"role": "assistant", "content": text}
        choice = {"index": 0, "delta": delta, "finish_reason": "length"}
        for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
            await stream.write(f"data: {json.dumps(head | event)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream
