"""A router without a tokenizer, in front of engines that have one and tell what they hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.conversation import ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet
from support.news import News
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "quick brown foxes jump over lazy dogs " * 60
PATIENT = {"patience_s": 30.0, "patience_cap_s": 30.0}
BLOCK_TOKENS = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    tokenizer = write_tokenizer(folder / "tokenizer")
    plan = FleetPlan(
        worker_flags=("--tokenizer", str(tokenizer)),
        config={"receipts": True, "tokens": PATIENT},
    )
    async with LocalFleet(folder, plan) as running:
        yield running


async def test_second_turns_are_predicted_exactly(fleet: LocalFleet) -> None:
    news = News(fleet, fleet.router, BLOCK_TOKENS)
    await news.begin()
    async with sdk(fleet.router.url) as client:
        for number in range(6):
            turns = [("user", f"{number} {TEXT}")]
            first = await ask(client, MODEL, turns)
            await news.of(first)
            turns += [("assistant", first.text), ("user", "and then? " * 20)]
            second = await ask(client, MODEL, turns)
            await news.of(second, first)
            assert second.replica == first.replica
            assert second.predicted_tokens > 400
            assert 0 <= second.cached_tokens - second.predicted_tokens < BLOCK_TOKENS
            for told in (first, second):
                record = await fleet.decision(told.request_id)
                assert record["is_exact"]
                assert record["prompt_tokens"] == record["reported_prompt_tokens"]


async def test_a_conversation_stays_where_it_is_while_engines_tell_no_tokens(
    fleet: LocalFleet,
) -> None:
    """Bytes that were placed beside tokens find the replica when there are no tokens."""
    hasty = await fleet.start_router(tokens={"patience_s": 0.0001, "patience_cap_s": 0.0001})
    await fleet.all_up(hasty)
    stays = 0
    async with sdk(hasty.url) as client:
        for number in range(6):
            turns = [("user", f"hasty {number} {TEXT}")]
            first = await ask(client, MODEL, turns)
            turns += [("assistant", first.text), ("user", "and then? " * 20)]
            second = await ask(client, MODEL, turns)
            stays += second.replica == first.replica
            record = await fleet.decision(second.request_id, hasty)
            assert not record["is_exact"]
            assert record["unroutable"] is None
    assert stays == 6
    assert await asyncio.to_thread(fleet.processes.stop, hasty.child) == 0


async def test_without_a_source_of_tokens_requests_go_by_load(fleet: LocalFleet) -> None:
    router = await fleet.start_router(models=[{"name": MODEL, "tokens": "off"}])
    await fleet.all_up(router)
    async with sdk(router.url) as client:
        told = await ask(client, MODEL, [("user", TEXT)])
    record = await fleet.decision(told.request_id, router)
    assert (record["unroutable"], record["prompt_tokens"]) == ("no tokenizer", 0)
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0
