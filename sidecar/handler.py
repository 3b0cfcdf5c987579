"""The worker's HTTP handlers: OpenAI calls on the engine, and vLLM's surface around them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from prompt.model import BadPromptError, UnroutablePromptError
from prompt.request import decode_chat, decode_completion
from sidecar.api import (
    DONE,
    Answer,
    ApiError,
    ChatWriter,
    CompletionWriter,
    DetokenizeBody,
    Layout,
    TokenizeBody,
    Usage,
    decode_sampling,
    decoded,
    error_body,
    error_event,
)
from sidecar.cache import unpack_tokens
from sidecar.engine import Delta, EngineHaltedError, Generation, Halted
from sidecar.gauge import render_metrics
from sidecar.scheduler import NeverFitsError
from state.prefix import TOKEN_BYTES, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from prompt.codec import Codec
    from prompt.request import ChatCall
    from sidecar.api import Sampling
    from sidecar.engine import Engine, Ticket
    from sidecar.setting import WorkerSettings

MAX_BODY_BYTES: Final = 64 * 2**20
MAX_ANSWERS: Final = 2048
LONG_TEXT_BYTES: Final = 64 * 2**10
"""Bodies beyond this are tokenized in a thread, off the event loop."""
STOPPING: Final = "The engine is shutting down."

_log = logging.getLogger(__name__)
_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeBody)

Writer = ChatWriter | CompletionWriter


class WorkerHandlers:
    """Handlers over one engine and one codec."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        codec: Codec,
        event_sources: Mapping[str, Any],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._codec = codec
        self._event_sources = event_sources
        self._started_s = time.time()

    def app(self) -> web.Application:
        """Return the application; run it with ``handler_cancellation``."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completion)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/kv_event_sources", self.kv_event_sources)
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        body = await request.read()
        call = decode_chat(body)
        self._check_model(call.model)
        sampling = decode_sampling(body)
        prompt = await self._chat_tokens(call, len(body))
        layout = self._layout([prompt], sampling)
        limit = sampling.max_completion_tokens or sampling.max_tokens
        generations = self._generations([prompt], sampling, call.salt, limit)
        return await self._answer(request, generations, sampling, ChatWriter(layout))

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        body = await request.read()
        call = decode_completion(body)
        self._check_model(call.model)
        sampling = decode_sampling(body)
        if call.unroutable is not None:
            raise ApiError(400, f"This prompt cannot be read here: {call.unroutable}.", "prompt")
        prompts = [
            await self._prompt_tokens(prompt, add_special_tokens=call.add_special_tokens)
            for prompt in call.prompts
        ]
        layout = self._layout(prompts, sampling)
        generations = self._generations(prompts, sampling, call.salt, sampling.max_tokens)
        return await self._answer(request, generations, sampling, CompletionWriter(layout))

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: the ids that a completion of the same text or messages has."""
        body = await request.read()
        call = decoded(_tokenize_decoder, body)
        if call.messages is not None:
            packed = await self._chat_tokens(decode_chat(body), len(body))
        elif call.prompt is not None:
            packed = await self._prompt_tokens(
                call.prompt, add_special_tokens=call.add_special_tokens
            )
        else:
            raise ApiError(400, "prompt or messages is required", "prompt")
        token_ids = unpack_tokens(packed)
        return web.json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._settings.context_tokens,
                "tokens": token_ids,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """``POST /detokenize``."""
        token_ids = decoded(_detokenize_decoder, await request.read()).tokens
        self._check_vocabulary(token_ids, "tokens")
        return web.json_response({"prompt": self._codec.decode(token_ids)})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """``POST /reset_prefix_cache``: forget all cached content; requests go on."""
        self._engine.reset_prefix_cache()
        return web.json_response({"success": True})

    async def models(self, _: web.Request) -> web.Response:
        """``GET /v1/models``."""
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": int(self._started_s),
            "owned_by": "warmroute",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._settings.context_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.Response:
        """``GET /health``: 200 while the engine takes requests."""
        return web.Response(status=503 if self._engine.is_halted else 200)

    async def version(self, _: web.Request) -> web.Response:
        """``GET /version``."""
        return web.json_response({"version": "warmroute"})

    async def metrics(self, _: web.Request) -> web.Response:
        """``GET /metrics``."""
        text = render_metrics(self._engine.scheduler, self._settings.model, self._started_s)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """``GET /kv_event_sources``: where the cache events are published, by rank."""
        return web.json_response(self._event_sources)

    def _check_model(self, model: str) -> None:
        if model != self._settings.model:
            raise ApiError(404, f"The model {model!r} does not exist.", "model")

    def _check_vocabulary(self, token_ids: Sequence[int], field: str) -> None:
        if token_ids and max(token_ids) >= self._codec.vocabulary_size:
            message = f"{field}: token id {max(token_ids)} is out of vocabulary"
            raise ApiError(400, message, field)

    async def _chat_tokens(self, call: ChatCall, body_bytes: int) -> bytes:
        if call.unroutable is not None:
            message = f"These messages cannot be read here: {call.unroutable}."
            raise ApiError(400, message, "messages")

        def encode() -> bytes:
            return self._codec.chat_tokens(call.messages, call.tools, options=call.options)

        return encode() if body_bytes <= LONG_TEXT_BYTES else await asyncio.to_thread(encode)

    async def _prompt_tokens(self, prompt: str | list[int], *, add_special_tokens: bool) -> bytes:
        if not isinstance(prompt, str):
            self._check_vocabulary(prompt, "prompt")
            return pack_tokens(prompt)

        def encode() -> bytes:
            return self._codec.text_tokens(prompt, add_special_tokens=add_special_tokens)

        packed = encode() if len(prompt) <= LONG_TEXT_BYTES else await asyncio.to_thread(encode)
        if not packed:
            raise ApiError(400, "prompt: it has no tokens", "prompt")
        return packed

    def _layout(self, prompts: Sequence[bytes], sampling: Sampling) -> Layout:
        shown = None
        if sampling.return_token_ids:
            shown = tuple(unpack_tokens(packed) for packed in prompts)
        return Layout(secrets.token_hex(16), self._settings.model, int(time.time()), shown)

    def _generations(
        self,
        prompts: Sequence[bytes],
        sampling: Sampling,
        salt: str,
        max_output_tokens: int | None,
    ) -> list[Generation]:
        samples = sampling.n or 1
        if len(prompts) * samples > MAX_ANSWERS:
            message = f"at most {MAX_ANSWERS} answers for one request"
            raise ApiError(400, message, "n")
        return [
            Generation(
                packed_prompt=packed,
                max_output_tokens=max_output_tokens,
                ignore_eos=bool(sampling.ignore_eos),
                stops=sampling.stops,
                salt=salt or None,
                seed=sampling.seed or 0,
                choice=index * samples + sample,
                sample=sample,
            )
            for index, packed in enumerate(prompts)
            for sample in range(samples)
        ]

    async def _answer(
        self,
        request: web.Request,
        generations: Sequence[Generation],
        sampling: Sampling,
        writer: Writer,
    ) -> web.StreamResponse:
        """Run ``generations``; whatever ends this call, none of them outlives it."""
        deltas: asyncio.Queue[Delta | Halted] = asyncio.Queue()
        tickets: list[Ticket] = []
        try:
            for generation in generations:
                tickets.append(self._engine.submit(generation, deltas.put_nowait))  # noqa: PERF401 - all that were submitted must be aborted
            if sampling.is_stream:
                return await _stream(request, tickets, deltas, sampling, writer)
            answers = await _gather(len(tickets), deltas)
        finally:
            for ticket in tickets:
                self._engine.abort(ticket)
        body = writer.whole(answers, _usage(tickets))
        return web.Response(body=body, content_type="application/json")


async def _gather(choices: int, deltas: asyncio.Queue[Delta | Halted]) -> list[Answer]:
    texts: list[list[str]] = [[] for _ in range(choices)]
    token_ids: list[list[int]] = [[] for _ in range(choices)]
    answers: dict[int, Answer] = {}
    while len(answers) < choices:
        delta = await deltas.get()
        if isinstance(delta, Halted):
            raise ApiError(503, STOPPING)
        choice = delta.choice
        texts[choice].append(delta.text)
        token_ids[choice] += delta.token_ids
        if delta.finish is not None:
            text = "".join(texts[choice])
            answers[choice] = Answer(text, token_ids[choice], delta.finish, delta.stopped_by)
    return [answers[choice] for choice in range(choices)]


async def _stream(
    request: web.Request,
    tickets: Sequence[Ticket],
    deltas: asyncio.Queue[Delta | Halted],
    sampling: Sampling,
    writer: Writer,
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    open_choices = len(tickets)
    try:
        await response.prepare(request)
        pending = [writer.opening(open_choices)]
        while open_choices:
            delta = await deltas.get()
            if isinstance(delta, Halted):
                await response.write(error_event(503, STOPPING))
                return response
            if delta.text or delta.finish is not None or sampling.return_token_ids:
                pending.append(writer.delta(delta))
            open_choices -= delta.finish is not None
            if deltas.empty() and open_choices and pending:
                await response.write(b"".join(pending))
                pending = []
        if sampling.wants_usage:
            pending.append(writer.usage(_usage(tickets)))
        pending.append(DONE)
        await response.write(b"".join(pending))
        await response.write_eof()
    except ConnectionError:
        _log.debug("the client left in the middle of a stream")
    return response


def _usage(tickets: Sequence[Ticket]) -> Usage:
    """Add up what the answers took; a prompt with several answers counts once."""
    prompts = [ticket for ticket in tickets if ticket.generation.sample == 0]
    return Usage(
        prompt_tokens=sum(len(each.generation.packed_prompt) for each in prompts) // TOKEN_BYTES,
        completion_tokens=sum(ticket.sequence.output_tokens for ticket in tickets),
        cached_tokens=sum(ticket.sequence.cached_tokens or 0 for ticket in prompts),
    )


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn every error into an OpenAI error object; the request boundary."""
    try:
        return await handler(request)
    except ApiError as error:
        status, message, param = error.status, error.message, error.param
    except BadPromptError as error:
        status, message, param = 400, str(error), error.field
    except NeverFitsError as error:
        status, message, param = 400, str(error), None
    except UnroutablePromptError as error:
        param = "messages" if request.path.endswith("/chat/completions") else "prompt"
        status, message = 400, str(error)
    except EngineHaltedError:
        status, message, param = 503, STOPPING, None
    except web.HTTPException as error:
        status, message, param = (
            error.status,
            f"{request.method} {request.path}: {error.reason}",
            None,
        )
    except ConnectionError:
        raise  # the client is gone: nobody reads an answer
    except Exception:  # noqa: BLE001 - the request boundary
        _log.exception("%s %s failed", request.method, request.path)
        status, message, param = 500, "The engine failed on this request.", None
    body = error_body(status, message, param)
    return web.Response(status=status, body=body, content_type="application/json")
