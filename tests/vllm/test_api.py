"""The four APIs of real engines through the router: their answers, and predictions to the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.engine_api import APIS, Asker
from support.vllm import MODEL, PAGE_TOKENS
from support.vllm_stand import MARKS, OUTPUT_TOKENS

if TYPE_CHECKING:
    from support.engine_api import Api, Talk
    from support.vllm_stand import Stand

pytestmark = MARKS


@pytest.mark.parametrize("manner", ["whole", "streamed"])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
async def test_an_api_answers_as_the_engine_does_and_its_second_turn_is_warm(
    stand: Stand, api: Api, manner: str
) -> None:
    router = stand.fleet.router
    asker = Asker(
        http=stand.fleet.http,
        api=api,
        model=MODEL,
        output_tokens=OUTPUT_TOKENS,
        is_streamed=manner == "streamed",
    )
    name = f"{api.name} {manner}"
    talk: Talk = [
        ("system", f"{name}: You are a helpful assistant. " * 10),
        ("user", "Why does the quick brown fox jump over the lazy dog, 🦙? " * 60),
    ]  # worth more than an even share of the requests, which is some 800 tokens
    first = await asker.ask(router.url, talk)
    assert first.text
    longer = [*talk, ("assistant", first.text), ("user", "And naïve llamas? " * 10)]
    second = await asker.ask(router.url, longer)
    assert (second.replica, second.reason) == (first.replica, "prefix")
    assert second.cached_tokens >= first.prompt_tokens - 2 * PAGE_TOKENS
    for told in (first, second):
        assert told.predicted_tokens // PAGE_TOKENS == told.cached_tokens // PAGE_TOKENS
        record = await stand.fleet.decision(told.request_id)
        assert record["is_exact"]
        assert record["prompt_tokens"] == told.prompt_tokens
        assert record["reported_prompt_tokens"] == told.prompt_tokens
        assert record["reported_cached_tokens"] == told.cached_tokens
    for engine in stand.engines.engines:
        for asked, told in ((talk, first), (longer, second)):
            direct = await asker.ask(engine.url, asked)
            assert (direct.text, direct.prompt_tokens) == (told.text, told.prompt_tokens)
