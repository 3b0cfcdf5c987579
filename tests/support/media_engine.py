"""An engine that sees images as vLLM does, before a bundled worker that takes texts only.

An image becomes many placeholder tokens, more or fewer by its size, and is kept apart from others
by its digest. Pages that hold placeholders name it in the events, so that nobody indexes them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

from support.adapter_engine import AdapterEngine
from support.tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from support.fleet import LocalFleet

PLACEHOLDER: Final = SPECIAL_TOKENS[3]
PLACEHOLDER_ID: Final = 3
LEAST_TOKENS: Final = 200


class MediaEngine(AdapterEngine):
    """``opaque_pages`` counts those that an image is in."""

    def __init__(self, fleet: LocalFleet) -> None:
        super().__init__(fleet, {})
        self.opaque_pages = 0

    def _translated(self, event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "BlockStored":
            return event
        size = event["block_size"]
        keys: list[Any] = []
        for at in range(len(event["block_hashes"])):
            has_image = PLACEHOLDER_ID in event["token_ids"][at * size : (at + 1) * size]
            self.opaque_pages += has_image
            keys.append([["digest", at]] if has_image else None)
        return event | {"extra_keys": keys}

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        for message in body["messages"]:
            if isinstance(message["content"], list):
                message["content"] = [_seen(part) for part in message["content"]]
        self.asked.append(body["model"])
        async with self._http.post(self._worker_url + request.path, json=body) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, content_type="application/json"
            )


def _seen(part: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine computes in the place of an image."""
    if part["type"] != "image_url":
        return part
    digest = hashlib.sha256(part["image_url"]["url"].encode()).hexdigest()
    count = LEAST_TOKENS + int(digest[:2], 16)
    return {"type": "text", "text": PLACEHOLDER + digest + PLACEHOLDER * count}


async def ask_engine(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """Return the answer of an engine or router, its headers in lower case among it."""
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        told = await answer.json()
        return told | {name.lower(): value for name, value in answer.headers.items()}
