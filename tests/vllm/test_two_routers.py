"""Two routers in front of the same engines know the same of what these hold."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import pytest_asyncio

from support.conversation import ask, sdk
from support.fleet import until
from support.vllm import MODEL, PAGE_TOKENS
from support.vllm_stand import MARKS, OUTPUT_TOKENS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.conversation import Answered
    from support.fleet import Router
    from support.vllm_stand import Stand

pytestmark = MARKS

TALKS: Final = 4
TURNS: Final = 6
REST_S: Final = 0.5
"""Between turns: a router hears late of another's lease, and of its end."""
DECISIONS: Final = 1_000
QUESTION: Final = "Why does the quick brown fox jump over the lazy dog, 🦙? " * 4


@dataclass(slots=True)
class Talk:
    """One conversation and how it was answered."""

    number: int
    messages: list[tuple[str, str]] = field(init=False)
    answers: list[Answered] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules = f"Talk {self.number} of two routers: answer in short sentences. " * 60
        self.messages = [("system", rules)]


@pytest_asyncio.fixture(loop_scope="session")
async def routers(stand: Stand) -> AsyncIterator[list[Router]]:
    other = await stand.fleet.start_router(seed=2)
    try:
        await stand.ready(other)
        yield [stand.fleet.router, other]
    finally:
        await asyncio.to_thread(stand.fleet.processes.stop, other.child)


async def has_rested(stand: Stand, routers: list[Router]) -> bool:
    """Return whether no router counts a request, its own or another's: the last turn is over."""
    seen = [one for router in routers for one in (await stand.fleet.seen(router)).values()]
    return not any(one["inflight"] or one["inflight_elsewhere"] for one in seen)


async def test_two_routers_serve_alternate_turns_from_the_same_warm_engine(
    stand: Stand, routers: list[Router]
) -> None:
    """Each conversation changes its router with every turn, and never its engine."""
    talks = [Talk(number) for number in range(TALKS)]
    async with sdk(routers[0].url) as first, sdk(routers[1].url) as second:
        for turn in range(TURNS):
            for talk in talks:
                talk.messages.append(("user", QUESTION))
                client = (first, second)[(talk.number + turn) % 2]
                await asyncio.sleep(REST_S)
                await until(lambda: has_rested(stand, routers), "no lease known anywhere")
                answered = await ask(client, MODEL, talk.messages, OUTPUT_TOKENS, temperature=0)
                talk.messages.append(("assistant", answered.text))
                talk.answers.append(answered)
    homes = [{answered.replica for answered in talk.answers} for talk in talks]
    assert [len(home) for home in homes] == [1] * TALKS, homes
    assert set().union(*homes) == {engine.name for engine in stand.engines.engines}
    for talk in talks:
        for last, answered in pairwise(talk.answers):
            assert answered.reason == "prefix"
            assert answered.cached_tokens >= last.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
            assert answered.predicted_tokens // PAGE_TOKENS == answered.cached_tokens // PAGE_TOKENS
    for index, router in enumerate(routers):
        decided = await stand.fleet.decisions(DECISIONS, router)
        known = {record["request_id"]: record for record in decided}
        for talk in talks:
            for answered in talk.answers[(talk.number + index) % 2 :: 2]:
                assert known[answered.request_id]["rung"] == "live"
