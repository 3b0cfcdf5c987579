"""The worker's HTTP handlers: OpenAI calls on the engine, and vLLM's surface around them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web
from msgspec import structs

from prompt.model import BadPromptError, UnroutablePromptError
from prompt.request import decode_chat, decode_completion
from sidecar.admin import AdminHandlers
from sidecar.answer import ChatWriter, CompletionWriter, Layout, Logprobs
from sidecar.api import (
    ApiError,
    DetokenizeBody,
    TokenizeBody,
    decoded,
    error_body,
    is_kv_source,
)
from sidecar.delivery import FAILED, STOPPING, Delivery
from sidecar.gauge import render_kv, render_metrics
from sidecar.generation import EngineHaltedError, Generation
from sidecar.logprob import TokenSpeller, numbered
from sidecar.reading import PromptReader
from sidecar.sampling import decode_chat_sampling, decode_completion_sampling, refusal
from sidecar.scheduler import NeverFitsError
from state.prefix import unpack_tokens
from state.public import PUBLIC_PREFIX_HEADER, read_mark

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from prompt.codec import Codec
    from sidecar.delivery import Writer
    from sidecar.engine import Engine, Ticket
    from sidecar.generation import Delta, Halted
    from sidecar.sampling import Sampling
    from sidecar.setting import WorkerSettings

MAX_BODY_BYTES: Final = 64 * 2**20
MAX_ANSWERS: Final = 2048
KV_SOURCE_HEADER: Final = "X-Warmroute-Kv-Source"

_log = logging.getLogger(__name__)
_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeBody)


class WorkerHandlers:
    """Handlers over one engine and one codec.

    ``transfer_info`` is what other workers are told about how to fetch KV pages from this one.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        codec: Codec,
        event_sources: Mapping[str, Any],
        transfer_info: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._codec = codec
        self._event_sources = event_sources
        self._reader = PromptReader(codec)
        self._speller = TokenSpeller(codec)
        self._admin = AdminHandlers(settings, engine, self._reader, transfer_info)
        self._started_s = time.time()
        self._refused_kv_sources = 0

    def app(self) -> web.Application:
        """Return the application; run it with ``handler_cancellation``."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completion)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        app.router.add_get("/v1/models", self.models)
        for path in ("/health", "/ping"):
            app.router.add_get(path, self.health)
        app.router.add_post("/ping", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/kv_event_sources", self.kv_event_sources)
        self._admin.add_routes(app.router)
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        body = await request.read()
        call = decode_chat(body)
        self._check_model(call.model)
        sampling = decode_chat_sampling(body)
        prompts = [await self._reader.chat(call, len(body))]
        layout = self._layout(prompts, sampling)
        generations = self._generations(request, layout, prompts, sampling, call.salt)
        return await self._answer(request, generations, sampling, ChatWriter(layout))

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        body = await request.read()
        call = decode_completion(body)
        self._check_model(call.model)
        sampling = decode_completion_sampling(body)
        prompts = await self._reader.completion(call)
        layout = self._layout(prompts, sampling)
        generations = self._generations(request, layout, prompts, sampling, call.salt)
        return await self._answer(request, generations, sampling, CompletionWriter(layout))

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: the ids that a completion of the same text or messages has."""
        body = await request.read()
        call = decoded(_tokenize_decoder, body)
        if call.messages is not None:
            packed = await self._reader.chat(decode_chat(body), len(body))
        elif call.prompt is not None:
            packed = await self._reader.prompt(
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
        self._reader.check_vocabulary(token_ids, "tokens")
        return web.json_response({"prompt": self._codec.decode(token_ids)})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """``POST /reset_prefix_cache``: forget all cached content; requests go on."""
        self._engine.reset_prefix_cache()
        return web.json_response({"success": True})

    async def models(self, _: web.Request) -> web.Response:
        """``GET /v1/models``."""
        model = {
            "id": self._settings.served_name,
            "object": "model",
            "created": int(self._started_s),
            "owned_by": "warmroute",
            "root": self._settings.root,
            "parent": None,
            "max_model_len": self._settings.context_tokens,
            "salts_tails": True,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.Response:
        """``GET /health``, ``/ping`` by GET or POST: 200 while the engine takes requests."""
        return web.Response(status=503 if self._engine.is_halted else 200)

    async def version(self, _: web.Request) -> web.Response:
        """``GET /version``."""
        return web.json_response({"version": "warmroute"})

    async def metrics(self, _: web.Request) -> web.Response:
        """``GET /metrics``."""
        text = render_metrics(
            self._engine.scheduler, self._settings.served_name, self._started_s
        ) + render_kv(self._engine.kv_report(), self._refused_kv_sources)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """``GET /kv_event_sources``: where the cache events are published, by rank."""
        return web.json_response(self._event_sources)

    def _check_model(self, model: str) -> None:
        if model != self._settings.served_name:
            raise ApiError(404, f"The model {model!r} does not exist.", "model")

    @property
    def _is_synthetic(self) -> bool:
        return self._settings.compute == "synthetic"

    def _layout(self, prompts: Sequence[bytes], sampling: Sampling) -> Layout:
        shown = None
        if sampling.return_token_ids:
            shown = tuple(unpack_tokens(packed) for packed in prompts)
        logprobs = None
        if sampling.logprob_count is not None:
            if self._is_synthetic:
                name = "logprobs"
                raise refusal(name)
            spell = numbered if sampling.return_tokens_as_token_ids else self._speller.spelled
            logprobs = Logprobs(sampling.logprob_count, spell)
        return Layout(
            request_id=secrets.token_hex(16),
            model=self._settings.served_name,
            created_s=int(time.time()),
            shown_prompts=shown,
            logprobs=logprobs,
        )

    def _generations(
        self,
        request: web.Request,
        layout: Layout,
        prompts: Sequence[bytes],
        sampling: Sampling,
        salt: str,
    ) -> list[Generation]:
        """Return one generation for each choice: the samples of a prompt follow each other."""
        samples = sampling.samples
        if len(prompts) * samples > MAX_ANSWERS:
            message = f"n: expected at most {MAX_ANSWERS} answers for one request"
            raise ApiError(400, message, "n")
        base = Generation(
            packed_prompt=b"",
            max_output_tokens=sampling.output_limit,
            ignore_eos=bool(sampling.ignore_eos),
            stops=sampling.stops,
            stop_token_ids=tuple(sampling.stop_token_ids or ()),
            salt=salt or None,
            seed=(sampling.seed or 0) if self._is_synthetic else sampling.used_seed(),
            temperature=sampling.used_temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=sampling.used_top_k,
            top_logprobs=sampling.logprob_count,
            kv_source=self._kv_source(request),
            public=read_mark(request.headers.get(PUBLIC_PREFIX_HEADER)),
        )
        return [
            structs.replace(
                base,
                packed_prompt=packed,
                request_id=f"{layout.request_id}-{index * samples + sample}",
                choice=index * samples + sample,
                sample=sample,
            )
            for index, packed in enumerate(prompts)
            for sample in range(samples)
        ]

    def _kv_source(self, request: web.Request) -> str | None:
        """Return where the prefix may be fetched; advice that cannot be read is not followed."""
        source = request.headers.get(KV_SOURCE_HEADER)
        if source is None or is_kv_source(source):
            return source
        self._refused_kv_sources += 1
        return None

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
                parent = tickets[-generation.sample] if generation.sample else None
                tickets.append(self._engine.submit(generation, deltas.put_nowait, parent))
            delivery = Delivery(tickets, deltas, sampling, writer, self._speller.spelled)
            return await (delivery.stream(request) if sampling.is_stream else delivery.whole())
        finally:
            for ticket in tickets:
                self._engine.abort(ticket)


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
        message = f"{request.method} {request.path}: {error.reason}"
        status, param = error.status, None
    except ConnectionError:
        raise  # the client is gone: nobody reads an answer
    except Exception:  # noqa: BLE001 - the request boundary
        _log.exception("%s %s failed", request.method, request.path)
        status, message, param = 500, FAILED, None
    body = error_body(status, message, param)
    return web.Response(status=status, body=body, content_type="application/json")
