"""What a real vLLM loses while it is idle is known before it tells; the worker tells at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest

from support.conversation import ask, sdk
from support.fleet import until
from support.vllm import MODEL
from support.vllm_stand import MARKS

if TYPE_CHECKING:
    from support.engine_process import Engine
    from support.vllm_stand import Stand

pytestmark = MARKS

NEWS_S: Final = 30.0
SAID: Final = "The quick brown fox jumps over the lazy dog, naïve as ever. 🦙 " * 30


async def warmed(stand: Stand, text: str) -> Engine:
    """Let an engine hold a prompt of ``text``, as the router knows; returns the engine."""
    await stand.informed()
    async with sdk(stand.fleet.router.url) as client:
        for _ in range(2):
            answered = await ask(client, MODEL, [("user", text)], temperature=0)
            await stand.informed()
    assert answered.predicted_tokens == answered.cached_tokens > 0
    return stand.engine(answered.replica)


async def called(stand: Stand, engine: Engine, path: str, body: Any = None) -> None:
    """Do something to ``engine`` behind the router's back."""
    async with stand.fleet.http.post(engine.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()


async def forgotten(stand: Stand, engine: Engine) -> None:
    """Wait until the router knows of nothing that ``engine`` holds."""

    async def is_so() -> bool:
        seen = (await stand.fleet.seen()).get(engine.name)
        return seen is not None and seen["resident_blocks"] == 0

    await until(is_so, f"nothing in {engine.name}", NEWS_S)


async def stepped(engine: Engine) -> None:
    """Let ``engine`` make a step, in which it tells what it has to tell."""
    async with sdk(engine.url) as client:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1)


async def predicted_and_cached(stand: Stand, text: str) -> tuple[int, int]:
    async with sdk(stand.fleet.router.url) as client:
        answered = await ask(client, MODEL, [("user", text)], temperature=0)
    return answered.predicted_tokens, answered.cached_tokens


async def test_a_reset_of_an_idle_engine_is_known_before_its_next_step(stand: Stand) -> None:
    text = "reset: " + SAID
    engine = await warmed(stand, text)
    log = stand.logs[engine.name]
    held_pages = log.held_pages
    await called(stand, engine, "/reset_prefix_cache")
    await forgotten(stand, engine)
    if await is_vllm(stand):
        assert log.held_pages == held_pages > 0  # nothing was told
    assert await predicted_and_cached(stand, text) == (0, 0)
    await stepped(engine)
    await stand.informed()


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_a_sleeping_engine_gets_nothing_until_it_wakes(stand: Stand, level: int) -> None:
    if not await is_vllm(stand):
        return
    text = f"sleep {level}: " + SAID
    engine = await warmed(stand, text)
    await called(stand, engine, f"/sleep?level={level}")

    async def is_off() -> bool:
        return engine.name not in await stand.fleet.seen()

    await until(is_off, f"{engine.name} asleep", NEWS_S)
    async with asyncio.timeout(NEWS_S):
        predicted, cached = await predicted_and_cached(stand, text)
    assert (predicted, cached) == (0, 0)  # of the other one
    await called(stand, engine, "/wake_up")
    await stand.ready()
    if level:
        await forgotten(stand, engine)
    await stepped(engine)
    await stand.informed()
    gauges = await stand.fleet.gauges(stand.sidecars[engine.name])
    assert bool(gauges["warmroute_sidecar_held_pages"] > 1) is (level == 0)


async def test_weights_that_are_loaded_again_begin_a_generation(stand: Stand) -> None:
    if not await is_vllm(stand):
        return
    text = "weights: " + SAID
    engine = await warmed(stand, text)
    before = await stand.fleet.gauges(stand.sidecars[engine.name])
    await called(stand, engine, "/collective_rpc", {"method": "reload_weights"})
    await called(stand, engine, "/reset_prefix_cache")
    await forgotten(stand, engine)
    after = await stand.fleet.gauges(stand.sidecars[engine.name])
    name = "warmroute_sidecar_generations_total"
    assert after[name] == before[name] + 1
    assert await predicted_and_cached(stand, text) == (0, 0)
    await stepped(engine)
    await stand.informed()


async def is_vllm(stand: Stand) -> bool:
    """Return whether the engines can sleep and change: the worker's weights and memory stay."""
    async with stand.fleet.http.get(f"{stand.engines.engines[0].url}/weight_info") as answer:
        assert answer.status in {200, 404}
        return answer.status == 200
