"""The openai and anthropic SDKs get from the router what they get from an engine."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
import pytest_asyncio
from msgspec import Struct

from support.conversation import sdk
from support.engine_api import APIS
from support.engine_stub import EngineStub
from support.fleet import MODEL, FleetPlan, LocalFleet
from support.sdk_api import Clients, anthropic_sdk
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.engine_api import Api, Talk
    from support.sdk_api import Heard

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUTPUT_TOKENS = 12
STUBBED = [api for api in APIS if api.name in {"response", "message"}]


class Stage(Struct, frozen=True):
    fleet: LocalFleet
    engines: list[EngineStub]
    clients: dict[str, Clients]

    async def ask(self, url: str, api: Api, talk: Talk, manner: str) -> Heard:
        return await self.clients[url].ask(
            api,
            talk,
            model=MODEL,
            output_tokens=OUTPUT_TOKENS,
            is_streamed=manner == "streamed",
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("fleet")
    async with EngineStub("e0", MODEL) as first, EngineStub("e1", MODEL) as second:
        engines = [first, second]
        replicas = [{"url": engine.url, "name": engine.name} for engine in engines]
        config = {"replicas": replicas, "receipts": True}
        tokenizer = write_tokenizer(folder / "tokenizer")
        plan = FleetPlan(replicas=0, tokenizer=tokenizer, config=config)
        async with LocalFleet(folder, plan) as fleet, AsyncExitStack() as stack:
            urls = [fleet.router.url, *(engine.url for engine in engines)]
            clients = {url: await stack.enter_async_context(Clients(url)) for url in urls}
            yield Stage(fleet, engines, clients)


def talk_of(name: str) -> Talk:
    return [
        ("system", f"{name}: You are a helpful assistant. " * 10),
        ("user", "Why does the quick brown fox jump over the lazy dog, 🦙? " * 60),
    ]


def counted(api: Api, heard: Heard) -> tuple[int, int] | None:
    """Return the prompt tokens and the cached ones among them."""
    return api.usage_of({"usage": heard.usage})


@pytest.mark.parametrize("manner", ["whole", "streamed"])
@pytest.mark.parametrize("api", STUBBED, ids=lambda api: api.name)
async def test_an_sdk_gets_the_engine_s_answer_and_its_second_turn_goes_to_the_same_engine(
    stage: Stage, api: Api, manner: str
) -> None:
    talk = talk_of(f"{api.name} {manner}")
    router = stage.fleet.router.url
    first = await stage.ask(router, api, talk, manner)
    longer = [*talk, ("assistant", first.text), ("user", "And naïve llamas? " * 10)]
    second = await stage.ask(router, api, longer, manner)
    replica = first.headers["x-warmroute-replica"]
    assert second.headers["x-warmroute-replica"] == replica
    assert second.headers["x-warmroute-reason"] == "prefix"
    for heard in (first, second):
        record = await stage.fleet.decision(heard.headers["x-warmroute-request-id"])
        reported = (record["reported_prompt_tokens"], record["reported_cached_tokens"])
        assert reported == counted(api, heard)
    engine = next(engine for engine in stage.engines if engine.name == replica)
    again = await stage.ask(router, api, longer, manner)
    direct = await stage.ask(engine.url, api, longer, manner)
    assert again.answer == direct.answer
    assert second.text == direct.text != first.text
    assert second.endings == direct.endings


@pytest.mark.parametrize("api", STUBBED, ids=lambda api: api.name)
async def test_whole_and_streamed_answers_are_one_text_with_one_usage(
    stage: Stage, api: Api
) -> None:
    talk = talk_of(f"{api.name} both")
    router = stage.fleet.router.url
    await stage.ask(router, api, talk, "whole")
    whole = await stage.ask(router, api, talk, "whole")
    streamed = await stage.ask(router, api, talk, "streamed")
    assert (whole.text, counted(api, whole)) == (streamed.text, counted(api, streamed))
    assert whole.endings[-1] == streamed.endings[-1]


async def test_the_streams_of_both_sdks_end_with_the_whole_answer(stage: Stage) -> None:
    """The helpers that collect a stream see each event that they wait for."""
    talk = talk_of("helpers")
    chat: Any = [{"role": role, "content": text} for role, text in talk]
    url = stage.fleet.router.url
    async with (
        sdk(url) as client,
        client.responses.stream(
            model=MODEL, input=chat, max_output_tokens=OUTPUT_TOKENS
        ) as responses,
    ):
        pieces = [
            event.delta async for event in responses if event.type == "response.output_text.delta"
        ]
        response = await responses.get_final_response()
    assert len(pieces) == OUTPUT_TOKENS
    assert response.output_text == "".join(pieces)
    async with (
        anthropic_sdk(url) as claude,
        claude.messages.stream(
            model=MODEL, system=talk[0][1], messages=chat[1:], max_tokens=OUTPUT_TOKENS
        ) as messages,
    ):
        texts = [text async for text in messages.text_stream]
        message = await messages.get_final_message()
    assert len(texts) == OUTPUT_TOKENS
    assert [block.text for block in message.content if block.type == "text"] == ["".join(texts)]
    assert message.usage.output_tokens == OUTPUT_TOKENS
    assert message.stop_reason == "max_tokens"


async def test_the_sdks_raise_their_own_errors_for_the_router_s(stage: Stage) -> None:
    url = stage.fleet.router.url
    asked = [engine.asked for engine in stage.engines]
    async with sdk(url) as client:
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model="no-model", input="hello")
    assert refused.value.code == "model_not_found"
    hello: Any = [{"role": "user", "content": "hello"}]
    async with anthropic_sdk(url) as claude:
        with pytest.raises(anthropic.NotFoundError):
            await claude.messages.create(model="no-model", messages=hello, max_tokens=1)
    assert [engine.asked for engine in stage.engines] == asked
