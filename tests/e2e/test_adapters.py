"""Adapters by name: where they are loaded, what is known of their pages, what a reload voids."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio

from state.placement import NEWS_S
from support.adapter_engine import AdapterEngine
from support.conversation import Answered, ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.stage import allow_sockets
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS: Final = 64
QUICK: Final = ("--scrape-interval-s", "0.1")
SQL, LAW = "sql", "law"

Talk = list[tuple[str, str]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    allow_sockets()
    folder = tmp_path_factory.mktemp("adapters")
    plan = FleetPlan(
        replicas=0,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={"receipts": True, "adapters": [{"name": "lazy-*", "base": MODEL}]},
    )
    async with LocalFleet(folder, plan) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(fleet: LocalFleet) -> AsyncIterator[dict[str, AdapterEngine]]:
    async with AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(AdapterEngine(fleet, adapters))
            for name, adapters in {
                "a": {SQL: "/w/sql"},
                "b": {SQL: "/w/sql", LAW: "/w/law"},
            }.items()
        }
        sidecars = [
            await fleet.start_sidecar(name, engine.url, *QUICK).ready()
            for name, engine in running.items()
        ]
        await fleet.all_up(fleet.router, len(running))
        yield running
        for sidecar in sidecars:
            assert await asyncio.to_thread(fleet.processes.stop, sidecar) == 0


@pytest_asyncio.fixture(loop_scope="module")
async def client(
    fleet: LocalFleet, engines: dict[str, AdapterEngine]
) -> AsyncIterator[openai.AsyncOpenAI]:
    for engine in engines.values():
        engine.asked.clear()
    async with sdk(fleet.router.url) as one:
        yield one


def opening(name: str) -> Talk:
    return [("system", f"{name}: You are a helpful assistant. " * 20), ("user", "Why? " * 40)]


def longer(talk: Talk, first: Answered) -> Talk:
    return [*talk, ("assistant", first.text), ("user", "And the lazy dogs? " * 10)]


async def blocks(fleet: LocalFleet) -> int:
    return sum(one["resident_blocks"] for one in (await fleet.seen()).values())


async def told(
    fleet: LocalFleet, client: openai.AsyncOpenAI, model: str, talk: Talk, **extra: Any
) -> Answered:
    """Ask, and wait until the events of the answer reached the router."""
    before = await blocks(fleet)
    answered = await ask(client, model, talk, **extra)
    if answered.cached_tokens + BLOCK_TOKENS <= answered.prompt_tokens:

        async def is_so() -> bool:
            return await blocks(fleet) > before

        await until(is_so, "news of the prompt")
    return answered


def is_right(answered: Answered) -> bool:
    return answered.predicted_tokens // BLOCK_TOKENS == answered.cached_tokens // BLOCK_TOKENS


async def models_of(fleet: LocalFleet) -> set[str]:
    return {card["id"] for card in (await fleet.get(f"{fleet.router.url}/v1/models"))["data"]}


async def lists(fleet: LocalFleet, name: str, wanted: set[str]) -> None:
    async def is_so() -> bool:
        return set((await fleet.seen())[name]["models"]) == wanted

    await until(is_so, f"{name} has {wanted}")


async def test_the_same_text_is_another_prefix_under_each_adapter(
    fleet: LocalFleet, client: openai.AsyncOpenAI
) -> None:
    """A69, B16: base, adapter a, adapter b; and each finds its own again."""
    talk = opening("apart")
    firsts = {model: await told(fleet, client, model, talk) for model in (MODEL, SQL, LAW)}
    for answered in firsts.values():
        assert (answered.predicted_tokens, answered.cached_tokens) == (0, 0)
    for model, first in firsts.items():
        second = await told(fleet, client, model, longer(talk, first))
        assert second.replica == first.replica
        assert second.reason == ("load" if model == LAW else "prefix")  # one has it: no choice
        assert second.cached_tokens >= first.prompt_tokens - 2 * BLOCK_TOKENS > 0
        assert is_right(second)


async def test_prompts_of_an_adapter_are_read_with_the_tokenizer_of_its_base(
    fleet: LocalFleet, client: openai.AsyncOpenAI
) -> None:
    answered = await ask(client, SQL, opening("tokens"))
    record = await fleet.decision(answered.request_id)
    assert record["is_exact"]
    assert record["model"] == SQL
    assert record["prompt_tokens"] == answered.prompt_tokens


async def test_an_adapter_goes_where_it_is_loaded(
    fleet: LocalFleet, engines: dict[str, AdapterEngine], client: openai.AsyncOpenAI
) -> None:
    for number in range(6):
        answered = await ask(client, LAW, opening(f"loaded {number}"))
        assert answered.replica == "b"
    assert engines["a"].asked == []
    assert await models_of(fleet) >= {MODEL, SQL, LAW}


async def test_loads_and_unloads_are_followed(
    fleet: LocalFleet, engines: dict[str, AdapterEngine], client: openai.AsyncOpenAI
) -> None:
    engines["a"].adapters["med"] = "/w/med"
    await lists(fleet, "a", {MODEL, SQL, "med"})
    assert (await ask(client, "med", opening("med"))).replica == "a"
    del engines["a"].adapters["med"]
    await lists(fleet, "a", {MODEL, SQL})
    with pytest.raises(openai.NotFoundError, match="expected one of the served models"):
        await ask(client, "med", opening("med"))
    assert engines["a"].asked.count("med") == 1
    assert engines["b"].asked.count("med") == 0


async def test_other_weights_under_one_name_void_its_pages_and_no_others(
    fleet: LocalFleet, engines: dict[str, AdapterEngine], client: openai.AsyncOpenAI
) -> None:
    """The path of the adapter changes; the engine does not find its old pages either."""
    talk, kept = opening("reload"), opening("kept")
    first = await told(fleet, client, LAW, talk)
    base = await told(fleet, client, MODEL, kept)
    before = (await fleet.seen())["b"]["resident_blocks"]
    engines["b"].adapters[LAW] = "/w/law/2"

    async def is_void() -> bool:
        return bool((await fleet.seen())["b"]["resident_blocks"] < before)

    await until(is_void, "fewer blocks")
    await asyncio.sleep(NEWS_S)  # so long a router counts on what it has just sent there
    again = await told(fleet, client, LAW, longer(talk, first))
    assert (again.predicted_tokens, again.cached_tokens) == (0, 0)
    third = await told(fleet, client, LAW, [*longer(talk, first), ("user", "So? " * 9)])
    assert third.cached_tokens >= again.prompt_tokens - 2 * BLOCK_TOKENS
    assert is_right(third)
    other = await told(fleet, client, MODEL, longer(kept, base))
    assert other.cached_tokens >= base.prompt_tokens - 2 * BLOCK_TOKENS
    assert is_right(other)


async def test_an_adapter_that_may_be_loaded_goes_to_any_replica_of_its_base_then_where_it_is(
    fleet: LocalFleet, engines: dict[str, AdapterEngine], client: openai.AsyncOpenAI
) -> None:
    for engine in engines.values():
        engine.loads_on_demand = True
    talk = opening("lazy")
    for model in (MODEL, SQL):  # what others hold of the same text is no credit
        await told(fleet, client, model, talk)
    first = await told(fleet, client, "lazy-1", talk)
    assert (first.predicted_tokens, first.cached_tokens) == (0, 0)
    has_it = engines[first.replica]
    assert has_it.adapters["lazy-1"] == "/adapters/lazy-1"
    await lists(fleet, first.replica, {MODEL, *has_it.adapters})
    second = await told(fleet, client, "lazy-1", longer(talk, first))
    assert second.replica == first.replica
    assert second.cached_tokens >= first.prompt_tokens - 2 * BLOCK_TOKENS
    assert is_right(second)
    for number in range(6):
        assert (await ask(client, "lazy-1", opening(f"lazy {number}"))).replica == first.replica
    assert sum("lazy-1" in engine.adapters for engine in engines.values()) == 1
    with pytest.raises(openai.NotFoundError, match="expected one of the served models"):
        await ask(client, "eager-1", talk)
