"""The worker's administration: its load and settings, its KV pages, prefixes that shall stay.

These paths are on the listener of the API, which is loopback unless it is told otherwise; they have
no protection of their own. ``POST /kv/pin`` takes the ``prompt`` of a completion or the
``messages`` of a chat, with all else that decides their tokens (``tools``, ``cache_salt``, ...);
``ttl_s`` is how long the pages are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta, Raw, Struct, structs

from prompt.request import decode_chat, decode_completion
from sidecar.api import ApiError, decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.engine import Engine
    from sidecar.reading import PromptReader
    from sidecar.setting import WorkerSettings

MAX_PIN_S: Final = 3600.0


class PinBody(Struct, frozen=True):
    """What of ``POST /kv/pin`` is not the prompt."""

    ttl_s: Annotated[float, Meta(gt=0, le=MAX_PIN_S)]


_pin_decoder: Final = msgspec.json.Decoder(PinBody)
_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_encode: Final = msgspec.json.encode


class AdminHandlers:
    """Handlers over one engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        reader: PromptReader,
        transfer_info: Mapping[str, Any] | None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._reader = reader
        self._transfer_info = transfer_info

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""
        router.add_get("/load", self.load)
        router.add_get("/is_sleeping", self.is_sleeping)
        router.add_get("/server_info", self.server_info)
        router.add_get("/debug/kv", self.debug_kv)
        router.add_get("/kv_transfer", self.kv_transfer)
        router.add_post("/kv/pin", self.pin)
        router.add_post("/kv/unpin", self.unpin)

    async def load(self, _: web.Request) -> web.Response:
        """``GET /load``: the sequences that run or wait; one request may have several."""
        scheduler = self._engine.scheduler
        sequences = scheduler.running_sequences + scheduler.waiting_sequences
        return _json({"server_load": sequences})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        """``GET /is_sleeping``: never, because this engine cannot be sent to sleep."""
        return _json({"is_sleeping": False})

    async def server_info(self, _: web.Request) -> web.Response:
        """``GET /server_info``: the settings, with the sizes that were chosen for the model."""
        settings = self._settings
        told = structs.replace(settings, max_model_len=settings.context_tokens)
        return _json({"worker_settings": told})

    async def debug_kv(self, _: web.Request) -> web.Response:
        """``GET /debug/kv``: every tier's pages by state and tenant (see ``KvReport``)."""
        return _json(self._engine.kv_report())

    async def kv_transfer(self, _: web.Request) -> web.Response:
        """``GET /kv_transfer``: how to fetch pages from this worker."""
        if self._transfer_info is None:
            raise ApiError(404, "This worker gives no KV pages to others.")
        return _json(self._transfer_info)

    async def pin(self, request: web.Request) -> web.Response:
        """``POST /kv/pin``: keep the cached pages of a prefix for ``ttl_s``."""
        body = await request.read()
        ttl_s = decoded(_pin_decoder, body).ttl_s
        prompts, salt = await self._prompts(body)
        return self._counted(sum(self._engine.pin(packed, salt, ttl_s) for packed in prompts))

    async def unpin(self, request: web.Request) -> web.Response:
        """``POST /kv/unpin``: leave the pages of a prefix to eviction again."""
        prompts, salt = await self._prompts(await request.read())
        return self._counted(sum(self._engine.unpin(packed, salt) for packed in prompts))

    async def _prompts(self, body: bytes) -> tuple[list[bytes], str | None]:
        """Return the packed prompts of a body, and its salt; its model is the served one."""
        fields = decoded(_fields_decoder, body)
        fields["model"] = Raw(_encode(self._settings.served_name))
        body = _encode(fields)
        if "messages" in fields:
            chat = decode_chat(body)
            return [await self._reader.chat(chat, len(body))], chat.salt or None
        if "prompt" in fields:
            completion = decode_completion(body)
            return await self._reader.completion(completion), completion.salt or None
        raise ApiError(400, "prompt: expected a prompt or messages", "prompt")

    def _counted(self, pages: int) -> web.Response:
        return _json({"pages": pages, "tokens": pages * self._settings.page_tokens})


def _json(value: object) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
