"""A router before two workers that compute a real model: what ``tests/vllm`` asks, without vLLM.

Their caches overflow, one is reset and one is killed on the way; predictions stay right.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from prompt.codec import load_codec
from state.placement import NEWS_S
from support.conversation import sdk
from support.engine_api import APIS, Asker
from support.engine_load import Players, in_turns, make_talks
from support.misprediction import Examiner
from support.sdk_api import Clients
from support.vllm import MODEL, PAGE_TOKENS
from support.vllm_stand import OUTPUT_TOKENS, open_stand
from support.worker_engine import is_served, worker_command, write_numpy_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.engine_api import Api
    from support.engine_api import Talk as Messages
    from support.engine_load import Talk, Turn
    from support.vllm_stand import Stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES: Final = 112
TALKS: Final = 14
TURNS: Final = 8
"""All together they come to more than both caches hold."""
QUESTION_WORDS: Final = (40, 90)
INFORMED: Final = ("full caches", "after a reset", "both again")
"""The phases in which a turn waits for the news of the last one."""
SERVED: Final = [api for api in APIS if is_served(api.path)]
MANNERS: Final = ["whole", "streamed"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("stand")
    model = write_numpy_model(folder / "model")
    async with open_stand(folder, worker_command(model, PAGES), model) as stand:
        yield stand


def talk_of(name: str) -> Messages:
    return [
        ("system", f"{name}: You are a helpful assistant. " * 10),
        ("user", "Why does the quick brown fox jump over the lazy dog, 🦙? " * 30),
    ]


async def play(stand: Stand) -> list[Turn]:
    """Ask all turns, one after the other: a quarter each, between them a reset and a death.

    A turn waits until the router knows what the last one changed: news that are under way are no
    matter of this test. Nor are prompts that a router counts on for ``NEWS_S`` without any.
    """
    struck, emptied = stand.engines.engines
    order = in_turns(make_talks(TALKS, TURNS, QUESTION_WORDS, seed=1), active=TALKS, seed=2)
    quarter = len(order) // 4
    full, reset, dead, both = (order[at * quarter : (at + 1) * quarter] for at in range(4))
    async with sdk(stand.fleet.router.url) as client:
        players = Players(client, MODEL, at_once=1, output_tokens=OUTPUT_TOKENS)

        async def play_informed(phase: str, talks: list[Talk]) -> None:
            for talk in talks:
                await stand.informed()
                await players.play(phase, [talk])

        await play_informed(INFORMED[0], full)
        await stand.engines.reset(emptied)
        await asyncio.sleep(NEWS_S)
        await play_informed(INFORMED[1], reset)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(players.play("death", dead))
            await stand.strike(struck)
        stand.engines.start(struck)
        await stand.engines.ready(struck)
        await stand.ready()
        await play_informed(INFORMED[2], both)
    return players.turns


async def test_predictions_are_right_to_the_page_over_evictions_a_reset_and_a_death(
    stand: Stand,
) -> None:
    struck, emptied = stand.engines.engines
    clears = len(stand.logs[emptied.name].clears)
    turns = await play(stand)
    records = {
        turn.answered.request_id: await stand.fleet.decision(turn.answered.request_id)
        for turn in turns
    }
    examiner = Examiner(turns, load_codec(stand.model), records, stand.logs)
    misses = list(map(str, examiner.misses()))
    assert len(turns) == TALKS * TURNS
    assert len(misses) <= 0.01 * len(turns), "\n".join(misses)
    assert all(record["is_exact"] for record in records.values())
    assert [len(log.evictions) > PAGES for log in stand.logs.values()] == [True, True]
    assert len(stand.logs[emptied.name].clears) == clears + 1
    assert stand.logs[struck.name].lives == 2
    used = {(turn.phase, turn.answered.replica) for turn in turns if turn.phase in INFORMED}
    assert len(used) == 2 * len(INFORMED), used
    later = [turn for turn in turns if turn.known_tokens]
    assert sum(turn.is_cut(PAGE_TOKENS) for turn in later) > 0.05 * len(later)
    assert sum(not turn.is_cut(PAGE_TOKENS) for turn in later) > 0.2 * len(later)
    warm = [(turn, examiner.warm(turn)) for turn in later if turn.phase in INFORMED]
    is_there = [turn.answered.replica == name for turn, name in warm if name is not None]
    assert len(is_there) > 0.2 * len(later)
    assert sum(is_there) >= 0.85 * len(is_there)
    # Who leaves a warm worker that it knew of and could have, does so on purpose.
    for turn, name in warm:
        if name not in {None, turn.answered.replica} and examiner.could_choose(turn, name):
            assert turn.answered.reason == "spill", examiner.told(turn)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("api", SERVED, ids=lambda api: api.name)
async def test_a_second_turn_goes_to_the_warm_worker_and_finds_what_was_predicted(
    stand: Stand, api: Api, manner: str
) -> None:
    asker = Asker(
        http=stand.fleet.http,
        api=api,
        model=MODEL,
        output_tokens=OUTPUT_TOKENS,
        is_streamed=manner == "streamed",
    )
    router = stand.fleet.router.url
    talk = talk_of(f"raw {api.name} {manner}")
    first = await asker.ask(router, talk)
    assert first.text
    longer = [*talk, ("assistant", first.text), ("user", "And naïve llamas? " * 10)]
    second = await asker.ask(router, longer)
    assert (second.replica, second.reason) == (first.replica, "prefix")
    assert second.cached_tokens >= first.prompt_tokens - 2 * PAGE_TOKENS
    for told in (first, second):
        assert told.predicted_tokens // PAGE_TOKENS == told.cached_tokens // PAGE_TOKENS
        record = await stand.fleet.decision(told.request_id)
        assert record["is_exact"]
        assert record["prompt_tokens"] == told.prompt_tokens
        assert record["reported_cached_tokens"] == told.cached_tokens
    for engine in stand.engines.engines:
        for asked, told in ((talk, first), (longer, second)):
            direct = await asker.ask(engine.url, asked)
            assert (direct.text, direct.prompt_tokens) == (told.text, told.prompt_tokens)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("api", SERVED, ids=lambda api: api.name)
async def test_the_sdk_gets_from_the_router_what_it_gets_from_a_worker(
    stand: Stand, api: Api, manner: str
) -> None:
    talk = talk_of(f"SDK {api.name} {manner}")
    router, *engines = stand.fleet.router.url, *(each.url for each in stand.engines.engines)
    heard = []
    for url in (router, *engines) * 2:
        async with Clients(url) as clients:
            answer = await clients.ask(
                api,
                talk,
                model=MODEL,
                output_tokens=OUTPUT_TOKENS,
                is_streamed=manner == "streamed",
            )
        heard.append(answer.answer)
    through_router, *direct = heard[len(engines) + 1 :]
    assert direct == [through_router] * len(engines)
    assert through_router[0]
    assert heard[0][0] == through_router[0]
