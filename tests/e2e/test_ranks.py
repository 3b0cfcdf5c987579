"""An engine with data-parallel ranks behind one address: each rank is a replica of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from support.conversation import Answered, ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.ranked_engine import RANK_HEADER, RankedEngine, settled_blocks
from support.stage import allow_sockets
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import openai

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE_TOKENS: Final = 16
BLOCK_TOKENS: Final = 64
TALKS: Final = 8
RANKS: Final = ("gpu@dp0", "gpu@dp1")
QUICK: Final = ("--scrape-interval-s", "0.2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    allow_sockets()
    folder = tmp_path_factory.mktemp("ranks")
    plan = FleetPlan(
        replicas=0, tokenizer=write_tokenizer(folder / "tokenizer"), config={"receipts": True}
    )
    async with LocalFleet(folder, plan) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(fleet: LocalFleet) -> AsyncIterator[RankedEngine]:
    async with RankedEngine(fleet, len(RANKS)) as running:
        sidecar = await fleet.start_sidecar("gpu", running.url, *QUICK).ready()
        await fleet.all_up(fleet.router, len(RANKS))
        yield running
        assert await asyncio.to_thread(fleet.processes.stop, sidecar) == 0


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: LocalFleet, engine: RankedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    engine.asked.clear()
    async with sdk(fleet.router.url) as one:
        yield one


def opening(name: str) -> list[tuple[str, str]]:
    return [("system", f"{name}: You are a helpful assistant. " * 20), ("user", "Why? " * 40)]


def longer(talk: list[tuple[str, str]], first: Answered) -> list[tuple[str, str]]:
    return [*talk, ("assistant", first.text), ("user", "And the lazy dogs? " * 10)]


async def first_turns(
    fleet: LocalFleet, client: openai.AsyncOpenAI, kind: str
) -> list[tuple[list[tuple[str, str]], Answered]]:
    """Open talks until both ranks hold one, and wait until their events told."""
    asked: list[tuple[list[tuple[str, str]], Answered]] = []
    while len(asked) < TALKS or {answered.replica for _, answered in asked} != set(RANKS):
        assert len(asked) < 8 * TALKS, "all on one rank"
        talk = opening(f"{kind} {len(asked)}")
        asked.append((talk, await ask(client, MODEL, talk)))
    await settled_blocks(fleet, dict.fromkeys(RANKS, True))
    return asked


def is_right(answered: Answered) -> bool:
    return answered.predicted_tokens // BLOCK_TOKENS == answered.cached_tokens // BLOCK_TOKENS


async def test_second_turns_go_to_the_warm_rank_and_find_what_was_predicted(
    fleet: LocalFleet, engine: RankedEngine, client: openai.AsyncOpenAI
) -> None:
    talks = await first_turns(fleet, client, "warm")
    for talk, first in talks:
        second = await ask(client, MODEL, longer(talk, first))
        assert (second.replica, second.reason) == (first.replica, "prefix")
        assert second.cached_tokens >= first.prompt_tokens - 2 * BLOCK_TOKENS > 0
        assert is_right(first)
        assert is_right(second)
    assert len(engine.asked) == 2 * len(talks)
    assert {pin for pin, _ in engine.asked} == {"0", "1"}


async def test_what_is_one_ranks_is_not_the_others(fleet: LocalFleet, engine: RankedEngine) -> None:
    """Capacity, load and blocks are those of one rank, health is that of the engine."""
    seen = await fleet.seen()
    assert set(seen) == set(RANKS)
    assert {one["endpoint"] for one in seen.values()} == {engine.url}
    assert {one["capacity_tokens"] for one in seen.values()} == {8192 * PAGE_TOKENS}
    assert all(one["has_events"] for one in seen.values())

    async def is_idle() -> bool:
        loads = [one["load"] for one in (await fleet.seen()).values()]
        return all(load is not None and load["running"] == 0 for load in loads)

    await until(is_idle, "loads of both ranks")


async def test_a_client_cannot_choose_the_rank(
    fleet: LocalFleet, engine: RankedEngine, client: openai.AsyncOpenAI
) -> None:
    [(talk, first), *_] = await first_turns(fleet, client, "chosen")
    engine.asked.clear()
    for wish in ("0", "1", "7"):
        url = f"{fleet.router.url}/v1/chat/completions"
        chat = {
            "model": MODEL,
            "max_tokens": 1,
            "messages": [{"role": role, "content": text} for role, text in talk],
        }
        async with fleet.http.post(url, json=chat, headers={RANK_HEADER: wish}) as answer:
            assert answer.status == 200
            assert answer.headers["x-warmroute-replica"] == first.replica
    warm = RANKS.index(first.replica)
    assert engine.asked == [(str(warm), warm)] * 3


async def test_prompts_and_answers_of_one_request_stay_together(
    fleet: LocalFleet, engine: RankedEngine, client: openai.AsyncOpenAI
) -> None:
    """A45, A66: texts, ids, two answers to each: one request to one rank, all as predicted."""
    prompts: list[list[object]] = [
        [f"{kind}: the quick brown fox " * 60 for kind in ("one", "two", "three")],
        [list(range(10, 250)), list(range(250, 10, -1))],
    ]
    for prompt in prompts:
        engine.asked.clear()
        told = []
        for _ in range(2):
            raw = await client.completions.with_raw_response.create(
                model=MODEL,
                prompt=prompt,  # type: ignore[arg-type]  # either form of several prompts
                n=2,
                max_tokens=2,
            )
            answer = raw.parse()
            assert len(answer.choices) == 2 * len(prompt)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            predicted = int(raw.headers["x-warmroute-predicted-cached-tokens"])
            told.append((raw.headers["x-warmroute-replica"], predicted, cached))
            await settled_blocks(fleet, {raw.headers["x-warmroute-replica"]: True})
            await asyncio.sleep(0.1)
        first, second = told
        assert first[1:] == (0, 0)
        assert second[0] == first[0]
        assert len(engine.asked) == 2
        assert 0 <= second[2] - second[1] < len(prompt) * BLOCK_TOKENS
        assert second[1] >= len(prompt) * BLOCK_TOKENS


async def test_the_restart_of_one_rank_is_one_replicas_matter(
    fleet: LocalFleet, engine: RankedEngine, client: openai.AsyncOpenAI
) -> None:
    """The other rank's blocks stay, and stay true."""
    talks = await first_turns(fleet, client, "one")
    await engine.restart(1, is_told=False)
    await settled_blocks(fleet, {RANKS[0]: True, RANKS[1]: False})
    for talk, first in talks:
        second = await ask(client, MODEL, longer(talk, first))
        assert is_right(second)
        if first.replica == RANKS[0]:
            assert second.replica == RANKS[0]
            assert second.cached_tokens >= first.prompt_tokens - 2 * BLOCK_TOKENS
        elif second.replica == RANKS[1]:
            assert second.predicted_tokens < BLOCK_TOKENS


async def test_the_restart_of_the_engine_voids_all_ranks(
    fleet: LocalFleet, engine: RankedEngine, client: openai.AsyncOpenAI
) -> None:
    talks = await first_turns(fleet, client, "all")
    await engine.restart(0, 1, is_told=True)
    await settled_blocks(fleet, dict.fromkeys(RANKS, False))

    async def is_up() -> bool:
        return all(one["up"] for one in (await fleet.seen()).values())

    await until(is_up, "both ranks up")
    for talk, first in talks:
        again = await ask(client, MODEL, longer(talk, first))
        assert is_right(again)
