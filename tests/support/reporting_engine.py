"""An engine that caches, reports and tells truly, until a test breaks one of these on purpose."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from aiohttp import web

from state.prefix import pack_tokens
from support.kv_engine import KvEngine, stored

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_TOKENS = 16
BLOCK_TOKENS = 64


class ReportingEngine(KvEngine):
    """Serves ``/v1/completions`` of token ids from a cache of pages.

    ``is_heard``: its events reach somebody. ``template``: tokens
    that it puts before every prompt. ``counted`` makes what it reports of its cached tokens.
    ``told_blocks``: of ``BLOCK_TOKENS``, of which its events told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.page_tokens = PAGE_TOKENS
        self.capacity_pages = 40_000
        self.is_heard = True
        self.template: list[int] = []
        self.counted: Callable[[int], int | None] = lambda cached_tokens: cached_tokens
        self.asked = 0
        self.told_blocks = 0
        self.has_told_all = True
        self._held: dict[int, None] = {}

    def add_routes(self, app: web.Application) -> None:
        """Add the one path for requests."""
        app.router.add_post("/v1/completions", self._complete)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += 1
        tokens = [*self.template, *body["prompt"]]
        self.prompt_tokens += len(tokens)
        cached = await self._run(tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": len(tokens),
            "completion_tokens": 1,
            "total_tokens": len(tokens) + 1,
        }
        told = self.counted(cached)
        if told is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": told}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return web.json_response({"object": "text_completion", "choices": [choice], "usage": usage})

    async def _run(self, tokens: list[int]) -> int:
        """Compute a prompt; return how much of it was there."""
        ends = range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS)
        handles = [_handle(tokens[:end]) for end in ends]
        fresh = [at for at, handle in enumerate(handles) if handle not in self._held]
        known = fresh[0] if fresh else len(handles)
        if fresh:
            self._held.update(dict.fromkeys(handles[known:]))
            self.has_told_all &= self.is_heard
            if self.is_heard:
                self.told_blocks += sum(ends[at] % BLOCK_TOKENS == 0 for at in fresh)
                start = known * PAGE_TOKENS
                parent = handles[known - 1] if known else None
                part = tokens[start : len(handles) * PAGE_TOKENS]
                await self.publish(stored(handles[known:], part, parent))
        most = (len(tokens) - 1) // PAGE_TOKENS
        return min(known, most) * PAGE_TOKENS


def _handle(tokens: list[int]) -> int:
    digest = hashlib.blake2b(pack_tokens(tokens), digest_size=8).digest()
    return int.from_bytes(digest, "big")
