"""Chats through the openai SDK, and what a perfect cache would make of their prompts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

import openai
from msgspec import Struct

from state.model import BlockId, ModelIdentity
from state.prefix import TOKEN_BYTES, cacheable_tokens, chain_of, chain_root

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")

_ROOT: Final = chain_root(ModelIdentity(model="any"), 0)


class Answered(Struct, frozen=True, kw_only=True):
    """One answer: its receipt, its usage, its text."""

    request_id: str
    replica: str
    reason: str
    predicted_tokens: int
    prompt_tokens: int
    cached_tokens: int
    text: str

    @property
    def error_tokens(self) -> int:
        """How far the prediction was off: more than was there is positive."""
        return self.predicted_tokens - self.cached_tokens


def sdk(url: str, **options: Any) -> openai.AsyncOpenAI:
    """Return a client of the router at ``url`` that never retries."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


async def ask(
    client: openai.AsyncOpenAI,
    model: str,
    messages: Sequence[tuple[str, str]],
    output_tokens: int = 4,
    **extra: Any,
) -> Answered:
    """Stream one chat of (role, content) messages; the router must give receipts."""
    chat: Any = [{"role": role, "content": content} for role, content in messages]
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=chat,
        max_tokens=output_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    texts = []
    usage = None
    async for chunk in raw.parse():
        texts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert usage is not None, "no usage in the stream"
    assert usage.prompt_tokens_details is not None
    return Answered(
        request_id=raw.headers["x-warmroute-request-id"],
        replica=raw.headers["x-warmroute-replica"],
        reason=raw.headers["x-warmroute-reason"],
        predicted_tokens=int(raw.headers["x-warmroute-predicted-cached-tokens"]),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        text="".join(texts),
    )


async def at_once(
    items: Iterable[Item], limit: int, work: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Do ``work`` on every item, ``limit`` at a time, begun in order; results in order."""
    waiting = iter(enumerate(items))
    results: dict[int, Result] = {}

    async def worker() -> None:
        for index, item in waiting:
            results[index] = await work(item)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(limit):
            tasks.create_task(worker())
    return [results[index] for index in sorted(results)]


class PerfectCache:
    """A cache without end over pages of ``page_tokens``; prompts are looked up, then kept."""

    def __init__(self, page_tokens: int = 16) -> None:
        self.page_tokens = page_tokens
        self.pages: set[BlockId] = set()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def add(self, packed: bytes) -> None:
        """Look ``packed`` up and keep it."""
        tokens = len(packed) // TOKEN_BYTES
        chain = chain_of(_ROOT, packed, self.page_tokens, 0)
        run = 0
        for page in chain:
            if page not in self.pages:
                break
            run += 1
        self.prompt_tokens += tokens
        self.cached_tokens += min(run * self.page_tokens, cacheable_tokens(tokens))
        self.pages.update(chain)
