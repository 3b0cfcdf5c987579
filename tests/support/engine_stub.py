"""An engine's ``/v1/responses`` and ``/v1/messages`` without a model, in the shapes of vLLM 0.32.

The text depends on the whole conversation, and messages that were asked before count as cached.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from support.engine_api import Json

WORD_BYTES: Final = 4
MESSAGE_TOKENS: Final = 8
"""What a message has besides its text, of which four characters are a token."""


class EngineStub:
    """One engine on a free port; ``asked`` counts its answers."""

    def __init__(self, name: str, model: str) -> None:
        self.name = name
        self.model = model
        self.url = ""
        self.asked = 0
        self._known: set[str] = set()

    async def __aenter__(self) -> Self:
        """Serve."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_post("/v1/messages", self._message)
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

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(
            request, body, body["input"], body["max_output_tokens"], (_response, _response_events)
        )

    async def _message(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        messages = [{"role": "system", "content": body["system"]}, *body["messages"]]
        return await self._answer(
            request, body, messages, body["max_tokens"], (_message, _message_events)
        )

    async def _answer(
        self,
        request: web.Request,
        body: Json,
        messages: Sequence[Json],
        output_tokens: int,
        shapes: tuple[Callable[..., Json], Callable[..., Iterator[Json]]],
    ) -> web.StreamResponse:
        """Answer as one object, or as its events."""
        self.asked += 1
        words = _words(messages, output_tokens)
        whole, events = shapes
        answer = whole(f"{self.name}-{self.asked}", body["model"], words, self._count(messages))
        if not body.get("stream"):
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        for event in events(answer, words):
            data = f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"
            await stream.write(data.encode())
        return stream

    def _count(self, messages: Sequence[Json]) -> tuple[int, int]:
        """Return the tokens of a conversation, and of those the ones that were asked before."""
        total = cached = 0
        for count, message in enumerate(messages, 1):
            total += len(message["content"]) // 4 + MESSAGE_TOKENS
            start = json.dumps(messages[:count])
            if start in self._known:
                cached = total
            self._known.add(start)
        return total, cached


def _words(messages: Sequence[Json], count: int) -> list[str]:
    """Return ``count`` words that any change of ``messages`` changes."""
    digest = hashlib.shake_128(json.dumps(messages).encode()).hexdigest(count * WORD_BYTES)
    return [
        f" 🦙{digest[at : at + 2 * WORD_BYTES]}"
        for at in range(0, 2 * WORD_BYTES * count, 2 * WORD_BYTES)
    ]


def _message(name: str, model: str, words: list[str], counts: tuple[int, int]) -> Json:
    total, cached = counts
    return {
        "id": f"chatcmpl-{name}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "".join(words)}],
        "model": model,
        "stop_reason": "max_tokens",
        "usage": {
            "input_tokens": total - cached,
            "output_tokens": len(words),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        },
    }


def _message_events(answer: Json, words: list[str]) -> Iterator[Json]:
    begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = answer["usage"]
    counted = {"input_tokens": usage["input_tokens"], "output_tokens": 0}
    yield {"type": "message_start", "message": answer | begun | {"usage": counted}}
    yield {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
    for word in words:
        delta = {"type": "text_delta", "text": word}
        yield {"type": "content_block_delta", "delta": delta, "index": 0}
    yield {"type": "content_block_stop", "index": 0}
    ending = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


def _response(name: str, model: str, words: list[str], counts: tuple[int, int]) -> Json:
    total, cached = counts
    part: Json = {
        "annotations": [],
        "text": "".join(words),
        "type": "output_text",
        "logprobs": None,
    }
    item: Json = {
        "id": f"msg_{name}",
        "content": [part],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    }
    return {
        "id": f"resp_{name}",
        "created_at": 1,
        "incomplete_details": {"reason": "max_output_tokens"},
        "model": model,
        "object": "response",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "status": "incomplete",
        "usage": {
            "input_tokens": total,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": len(words),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total + len(words),
        },
    }


def _response_events(answer: Json, words: list[str]) -> Iterator[Json]:
    begun: Json = {"incomplete_details": None, "output": [], "status": "in_progress", "usage": None}
    [item] = answer["output"]
    [part] = item["content"]
    empty = {"content": [], "status": "in_progress"}
    at: Json = {"content_index": 0, "item_id": item["id"], "output_index": 0}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": answer | begun}),
        ("in_progress", {"response": answer | begun}),
        ("output_item.added", {"item": item | empty, "output_index": 0}),
        ("content_part.added", at | {"part": part | {"text": "", "logprobs": []}}),
        *(("output_text.delta", at | {"delta": word, "logprobs": []}) for word in words),
        ("output_text.done", at | {"text": part["text"], "logprobs": []}),
        ("content_part.done", at | {"part": part}),
        ("output_item.done", {"item": item, "output_index": 0}),
        ("completed", {"response": answer}),
    ]
    for number, (kind, fields) in enumerate(steps):
        yield {**fields, "sequence_number": number, "type": f"response.{kind}"}
