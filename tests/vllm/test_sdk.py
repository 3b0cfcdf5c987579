"""The openai and anthropic SDKs get through the router what an engine gives them directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.conversation import sdk
from support.engine_api import APIS
from support.sdk_api import Clients
from support.vllm import MODEL
from support.vllm_stand import MARKS, OUTPUT_TOKENS

if TYPE_CHECKING:
    from support.engine_api import Api, Talk
    from support.sdk_api import Heard
    from support.vllm_stand import Stand

pytestmark = MARKS


async def ask(url: str, api: Api, talk: Talk, manner: str) -> Heard:
    async with Clients(url) as clients:
        return await clients.ask(
            api,
            talk,
            model=MODEL,
            output_tokens=OUTPUT_TOKENS,
            is_streamed=manner == "streamed",
        )


@pytest.mark.parametrize("manner", ["whole", "streamed"])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
async def test_an_sdk_gets_from_the_router_what_it_gets_from_an_engine(
    stand: Stand, api: Api, manner: str
) -> None:
    """Text, ending, and every count: cached tokens too, once both engines know the prompt."""
    talk: Talk = [
        ("system", f"SDK, {api.name}, {manner}: You are a helpful assistant. " * 10),
        ("user", "Why does the quick brown fox jump over the lazy dog, 🦙? " * 30),
    ]
    router = stand.fleet.router.url
    first = await ask(router, api, talk, manner)
    longer = [*talk, ("assistant", first.text), ("user", "And naïve llamas? " * 10)]
    for turn in (talk, longer):
        for engine in stand.engines.engines:
            await ask(engine.url, api, turn, manner)
        through_router = await ask(router, api, turn, manner)
        assert through_router.text
        for engine in stand.engines.engines:
            direct = await ask(engine.url, api, turn, manner)
            assert direct.answer == through_router.answer
    assert first.text == (await ask(router, api, talk, manner)).text


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
async def test_whole_and_streamed_answers_are_one_text_with_one_usage(
    stand: Stand, api: Api
) -> None:
    talk: Talk = [
        ("system", f"{api.name}, both: You are a helpful assistant. " * 10),
        ("user", "Name the quick brown fox. " * 20),
    ]
    router = stand.fleet.router.url
    await ask(router, api, talk, "whole")
    whole = await ask(router, api, talk, "whole")
    streamed = await ask(router, api, talk, "streamed")
    assert (whole.text, whole.endings[-1]) == (streamed.text, streamed.endings[-1])
    assert api.usage_of({"usage": whole.usage}) == api.usage_of({"usage": streamed.usage})


async def seeded_answers(url: str) -> list[Any]:
    """Return the models, and what a seed draws, without ids and times."""
    chat: Any = [{"role": "user", "content": "Name the quick brown fox. " * 20}]
    limited: Any = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 1, "seed": 7}
    async with sdk(url) as client:
        models = [model.id for model in (await client.models.list()).data]
        whole = await client.chat.completions.create(messages=chat, **limited)
        text = await client.completions.create(prompt="The lazy dog " * 20, **limited)
    return [
        models,
        [choice.model_dump() for choice in whole.choices],
        [choice.model_dump() for choice in text.choices],
    ]


async def test_a_seed_draws_the_same_through_the_router(stand: Stand) -> None:
    through_router = await seeded_answers(stand.fleet.router.url)
    assert through_router[0] == [MODEL]
    assert through_router[1][0]["message"]["content"]
    for engine in stand.engines.engines:
        assert await seeded_answers(engine.url) == through_router
