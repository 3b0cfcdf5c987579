"""Chats about images: where second turns go, and what is predicted of the text before an image."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.media_engine import LEAST_TOKENS, MediaEngine, ask_engine
from support.stage import allow_sockets
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS: Final = 64
Talk = list[dict[str, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    allow_sockets()
    folder = tmp_path_factory.mktemp("media")
    plan = FleetPlan(
        replicas=0, tokenizer=write_tokenizer(folder / "tokenizer"), config={"receipts": True}
    )
    async with LocalFleet(folder, plan) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(fleet: LocalFleet) -> AsyncIterator[dict[str, MediaEngine]]:
    async with AsyncExitStack() as stack:
        running = {name: await stack.enter_async_context(MediaEngine(fleet)) for name in ("a", "b")}
        sidecars = [
            await fleet.start_sidecar(name, engine.url, "--scrape-interval-s", "0.2").ready()
            for name, engine in running.items()
        ]
        await fleet.all_up(fleet.router, len(running))
        yield running
        for sidecar in sidecars:
            assert await asyncio.to_thread(fleet.processes.stop, sidecar) == 0


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}" + "A" * 90}}


def talk_about(kind: str, picture: str) -> Talk:
    asked = [{"type": "text", "text": "What is on it? " * 10}, image(picture)]
    return [
        {"role": "system", "content": f"{kind}: You are a helpful assistant. " * 20},
        {"role": "user", "content": asked},
    ]


async def ask(fleet: LocalFleet, talk: Talk, url: str | None = None) -> dict[str, Any]:
    body = {"model": MODEL, "messages": talk, "max_tokens": 4}
    told: dict[str, Any] = await ask_engine(fleet.http, url or fleet.router.url, body)
    usage = told["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return told | {"cached": cached, "text": told["choices"][0]["message"]["content"]}


def predicted(told: dict[str, Any]) -> int:
    return int(told["x-warmroute-predicted-cached-tokens"])


def longer(talk: Talk, told: dict[str, Any]) -> Talk:
    more = "And the lazy dogs? " * 10
    return [
        *talk,
        {"role": "assistant", "content": told["text"]},
        {"role": "user", "content": more},
    ]


async def test_the_second_turn_about_an_image_finds_its_replica(
    fleet: LocalFleet, engines: dict[str, MediaEngine]
) -> None:
    """A70: each of six images; none of their pages is indexed, and nothing is called exact."""
    talks = [talk_about("turns", f"picture{number}") for number in range(6)]
    firsts = [await ask(fleet, talk) for talk in talks]
    assert len({told["x-warmroute-replica"] for told in firsts}) > 1
    for talk, first in zip(talks, firsts, strict=True):
        second = await ask(fleet, longer(talk, first))
        assert second["x-warmroute-replica"] == first["x-warmroute-replica"]
        assert second["cached"] > first["usage"]["prompt_tokens"] - BLOCK_TOKENS
        record = await fleet.decision(second["x-warmroute-request-id"])
        assert not record["is_exact"]
        assert record["unroutable"] is None
    assert sum(engine.opaque_pages for engine in engines.values()) > 6 * LEAST_TOKENS // 16


async def test_the_text_before_an_image_is_known_wherever_it_was_computed(
    fleet: LocalFleet, engines: dict[str, MediaEngine]
) -> None:
    """By events: no request with this text went through the router. No image is predicted."""
    talk = talk_about("head", "first")
    before = (await fleet.seen())["b"]["resident_blocks"]
    told = await ask(fleet, talk, engines["b"].url)

    async def is_told() -> bool:
        return bool((await fleet.seen())["b"]["resident_blocks"] > before)

    await until(is_told, "news of the text")
    head_tokens = told["usage"]["prompt_tokens"] - LEAST_TOKENS
    other = await ask(fleet, talk_about("head", "second"))
    assert other["x-warmroute-replica"] == "b"
    assert other["x-warmroute-reason"] == "prefix"
    assert 2 * BLOCK_TOKENS <= predicted(other) <= other["cached"] <= head_tokens
    assert predicted(other) % BLOCK_TOKENS == 0
