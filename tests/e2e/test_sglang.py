"""SGLang behind the router: its own wire format and cache, predictions to the page."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support.attended import serve_addresses
from support.conversation import Answered, ask, sdk
from support.fleet import FleetPlan, LocalFleet, until
from support.sglang_engine import MODEL, SglangEngine
from support.stage import chat_body
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import openai

    from support.sglang_tree import Encoding

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPACITY_TOKENS = 640
"""Some four prompts."""
TEXT = "quick brown foxes jump over lazy dogs " * 12
SHARED_TOKENS = 16
"""More than all chats begin with."""
SETTLE_S = 0.12
"""Two rounds of the router's chores: until then what it sent itself counts, too."""


@dataclass(slots=True)
class Stand:
    """Two servers with sidecars behind a router whose blocks are their pages."""

    fleet: LocalFleet
    engines: dict[str, SglangEngine]
    client: openai.AsyncOpenAI
    page_tokens: int

    async def informed(self) -> None:
        """Wait until the router knows what each server holds."""

        async def is_so() -> bool:
            seen = await self.fleet.seen()
            return all(
                seen[name]["resident_blocks"] == engine.tree.held_tokens // self.page_tokens
                for name, engine in self.engines.items()
            )

        await until(is_so, "news of both servers")
        await asyncio.sleep(SETTLE_S)

    async def turn(self, turns: list[tuple[str, str]], **extra: Any) -> Answered:
        """Ask, and prove that the prediction was right."""
        told = await ask(self.client, MODEL, turns, **extra)
        assert told.predicted_tokens == told.cached_tokens
        record = await self.fleet.decision(told.request_id)
        assert record["is_exact"]
        assert record["prompt_tokens"] == record["reported_prompt_tokens"] == told.prompt_tokens
        await self.informed()
        return told


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[(1, "array"), (16, "map")], ids=["1", "16"]
)
async def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stand]:
    page_tokens: int
    encoding: Encoding
    page_tokens, encoding = request.param
    folder = tmp_path_factory.mktemp("sglang")
    tokenizer = write_tokenizer(folder / "tokenizer")
    plan = FleetPlan(
        replicas=0, model=MODEL, tokenizer=tokenizer, config={"receipts": True, "seed": 7}
    )
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(
                SglangEngine(
                    tokenizer,
                    page_tokens=page_tokens,
                    capacity_tokens=CAPACITY_TOKENS,
                    encoding=encoding,
                    has_descriptor=page_tokens == 1,
                )
            )
            for name in ("s0", "s1")
        }
        fleet = await stack.enter_async_context(LocalFleet(folder, plan))
        sidecars = [
            fleet.start_sidecar(name, engine.url, "--block-tokens", str(page_tokens))
            for name, engine in engines.items()
        ]
        for sidecar in sidecars:
            await sidecar.ready()
        await fleet.all_up(fleet.router, len(engines))
        client = await stack.enter_async_context(sdk(fleet.router.url))
        yield Stand(fleet, engines, client, page_tokens)


async def test_a_sidecar_configures_itself(stand: Stand) -> None:
    """A71: page and pool come from the server, so that nothing can be set wrong. C44."""

    async def are_told() -> bool:
        return all(one["facts"] and one["load"] for one in (await stand.fleet.seen()).values())

    await until(are_told, "facts and loads of both servers")
    for one in (await stand.fleet.seen()).values():
        assert one["has_events"]
        assert one["models"] == [MODEL]
        assert one["page_tokens"] == stand.page_tokens
        assert one["capacity_tokens"] == CAPACITY_TOKENS // stand.page_tokens * stand.page_tokens
        assert one["facts"]["engine"] == "sglang"
        assert one["load"]["running"] == one["load"]["queued"] == 0  # of /v1/loads: no metrics


async def test_predictions_are_right_to_the_page_while_the_cache_evicts(stand: Stand) -> None:
    """B55: pages of one token are as good as any."""
    talks = [[("user", f"{number} {TEXT}")] for number in range(8)]
    hits = 0
    for _ in range(3):
        for talk in talks:
            told = await stand.turn(talk)
            hits += told.cached_tokens > SHARED_TOKENS
            talk += [("assistant", told.text), ("user", "and then? " * 3)]
    assert hits
    assert all(engine.tree.evicted_pages for engine in stand.engines.values())


async def test_salts_keep_equal_prompts_apart(stand: Stand) -> None:
    """C46: the salt is in every store, and in no page's own name of the tree. B19."""
    turns = [("user", f"salted {TEXT}")]
    assert (await stand.turn(turns, cache_salt="a")).cached_tokens == 0
    assert (await stand.turn(turns, cache_salt="a")).cached_tokens > SHARED_TOKENS
    assert (await stand.turn(turns, cache_salt="b")).cached_tokens == 0


async def test_a_flush_is_known_at_once(stand: Stand) -> None:
    """B04: AllBlocksCleared of one server, idle, leaves the other alone. C32."""
    turns = [("user", f"flush {TEXT}")]
    first = await stand.turn(turns)
    warm = stand.engines[first.replica]
    other = next(engine for engine in stand.engines.values() if engine is not warm)
    held = other.tree.held_tokens
    async with stand.fleet.http.post(f"{warm.url}/flush_cache") as answer:
        assert answer.status == 200
    await stand.informed()
    assert (warm.tree.held_tokens, other.tree.held_tokens) == (0, held)
    assert (await stand.turn(turns)).cached_tokens < SHARED_TOKENS


async def test_a_restart_voids_what_was_known(stand: Stand) -> None:
    """A79: the sequence begins at 0 again. B03."""
    turns = [("user", f"restart {TEXT}")]
    first = await stand.turn(turns)
    before = (await stand.fleet.seen())[first.replica]["generation"]
    await stand.engines[first.replica].restart()

    async def is_new() -> bool:
        one = (await stand.fleet.seen())[first.replica]
        return bool(one["generation"] != before and not one["resident_blocks"])

    await until(is_new, "a new generation")
    await stand.informed()
    again = await stand.turn(turns)
    assert again.cached_tokens < SHARED_TOKENS
    assert (await stand.turn(turns)).cached_tokens > SHARED_TOKENS


async def test_a_gap_is_filled_by_the_replay(stand: Stand) -> None:
    """B06: nothing is given up for batches that the server still has. A78. B08: no topic frame."""
    turns = [("user", f"gap {TEXT}")]
    first = await stand.turn(turns)
    engine = stand.engines[first.replica]
    before = (await stand.fleet.seen())[first.replica]["generation"]
    for text, is_heard in (("unheard", False), ("heard", True)):
        engine.is_losing = not is_heard
        body = chat_body(f"{text} {TEXT}", model=MODEL, stream=False)
        async with stand.fleet.http.post(f"{engine.url}/v1/chat/completions", data=body) as answer:
            assert answer.status == 200
    await stand.informed()
    assert (await stand.turn([("user", f"unheard {TEXT}")])).cached_tokens > SHARED_TOKENS
    assert (await stand.fleet.seen())[first.replica]["generation"] == before


async def test_two_addresses_are_enough(tmp_path_factory: pytest.TempPathFactory) -> None:
    """B14: pages of one token in blocks of 64; the prediction is off by less than a block."""
    folder = tmp_path_factory.mktemp("addresses")
    tokenizer = write_tokenizer(folder / "tokenizer")
    async with (
        SglangEngine(tokenizer) as one,
        SglangEngine(tokenizer, has_replay=False) as other,
        LocalFleet(folder, FleetPlan(replicas=0, routers=0)) as fleet,
    ):
        urls = [one.url, other.url]
        served = await serve_addresses(fleet, "--receipts", urls=urls)
        await served.until_followed()
        first_line, second_line = served.decisions()
        assert f"sglang, model {MODEL}; pages of 1 tokens; cache of 100000 tokens" in first_line
        assert "start it with" not in first_line
        assert "a replay_endpoint in its --kv-events-config" in second_line
        async with sdk(served.router.url) as client:
            turns = [("user", f"addresses {TEXT}")]
            first = await ask(client, MODEL, turns)

            async def is_known() -> bool:
                seen = await fleet.seen(served.router)
                return any(engine["resident_blocks"] for engine in seen.values())

            await until(is_known, "what the engine holds")
            turns += [("assistant", first.text), ("user", "and then? ")]
            second = await ask(client, MODEL, turns)
        record = await fleet.decision(second.request_id, served.router)
        assert record["is_exact"]
        assert second.replica == first.replica
        assert 0 <= second.cached_tokens - second.predicted_tokens < 64
        assert second.predicted_tokens > 0
