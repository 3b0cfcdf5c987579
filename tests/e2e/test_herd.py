"""A burst through several routers at once: none knows what the others are sending right now."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from support.fleet import until
from support.stage import ANSWER, Actor, allow_sockets, chat_body, staged_router
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from support.raw import Received, Talk

PROMPTS = 200
REPLICAS = 4
MOST_TO_MEAN = 1.3
WAIT_S = 240.0
"""Eight routers on a machine that is busy with others."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count",
    [2, pytest.param(4, marks=pytest.mark.heavy), pytest.param(8, marks=pytest.mark.heavy)],
)
async def test_a_burst_through_several_routers_is_spread_evenly(tmp_path: Path, count: int) -> None:
    """C-24: 200 distinct prompts of one length, all in flight at once on four replicas."""
    allow_sockets()
    may_end = asyncio.Event()

    async def wait_and_answer(talk: Talk, _: Received) -> None:
        await may_end.wait()
        await talk.say(ANSWER)

    actors = [Actor(name, answer=wait_and_answer) for name in "abcd"[:REPLICAS]]
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    async with staged_router(tmp_path, actors, tokenizer, hold={"enabled": False}) as stage:
        others = [await stage.fleet.start_router() for _ in range(count - 1)]
        routers = [stage.fleet.router, *others]
        for router in routers:
            await stage.fleet.all_up(router, REPLICAS)
        urls = [router.url for router in routers]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def ask(number: int) -> int:
                body = chat_body(f"{number:03d} word " * 100, stream=False, max_tokens=1)
                url = f"{urls[number % count]}/v1/chat/completions"
                async with http.post(url, data=body) as answer:
                    await answer.read()
                    return answer.status

            asked = [asyncio.create_task(ask(number)) for number in range(PROMPTS)]

            async def are_there() -> bool:
                return len(stage.posts()) == PROMPTS

            try:
                await until(are_there, "all requests", WAIT_S)
                got = [len(actor.posts()) for actor in actors]
            finally:
                may_end.set()
                statuses = await asyncio.gather(*asked)
        assert set(statuses) == {200}
        assert max(got) * REPLICAS / PROMPTS <= MOST_TO_MEAN, got
