"""A router before a vLLM with two data-parallel ranks and two adapters behind one address."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from support.conversation import Answered, ask, sdk
from support.engine_process import Engine, Engines
from support.fleet import FleetPlan, LocalFleet, until
from support.vllm import MODEL, vllm_command
from support.vllm_stand import MARKS, OUTPUT_TOKENS, PAGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import openai

pytestmark = MARKS

BLOCK_TOKENS: Final = 64
"""A page of vLLM, and what the index is in steps of: predictions can be right to the page."""
SQL, LAW = "sql", "law"
MODELS: Final = (MODEL, SQL, LAW)
RANKS: Final = {"gpu@dp0", "gpu@dp1"}
TALKS: Final = 4
"""Of each model."""
Talk = list[tuple[str, str]]


@dataclass(slots=True)
class RankedStand:
    """A running engine, the folders of its adapters, and the fleet before it."""

    engine: Engine
    adapters: dict[str, Path]
    fleet: LocalFleet


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, vllm: Path, model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    written = {name: folder / name for name in (SQL, LAW, "law-2")}
    script = Path(__file__).parents[1] / "support" / "tiny_adapter.py"
    words = [str(vllm.with_name("python")), "-P", str(script), str(model)]
    words += map(str, written.values())
    subprocess.run(words, check=True)
    return written


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stand(
    tmp_path_factory: pytest.TempPathFactory, vllm: Path, model: Path, adapters: dict[str, Path]
) -> AsyncIterator[RankedStand]:
    folder = tmp_path_factory.mktemp("ranks")
    loaded = [f"{name}={adapters[name]}" for name in (SQL, LAW)]
    serve = vllm_command(
        vllm,
        model,
        PAGES,
        *("--block-size", str(BLOCK_TOKENS), "--data-parallel-size", "2"),
        *("--api-server-count", "1", "--enable-lora", "--max-loras", "2"),
        *("--max-lora-rank", "8", "--lora-modules", *loaded),
    )
    plan = FleetPlan(replicas=0, model=MODEL, tokenizer=model, config={"receipts": True})

    def command(engine: Engine) -> list[str]:
        return ["env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", *serve(engine)]

    async with Engines(folder, command) as engines, LocalFleet(folder, plan) as fleet:
        engine = engines.add("ranked")
        await engines.ready(engine)
        sidecar = await fleet.start_sidecar("gpu", engine.url).ready()
        await fleet.all_up(fleet.router, len(RANKS))
        yield RankedStand(engine, adapters, fleet)
        await asyncio.to_thread(fleet.processes.stop, sidecar)


def opening(model: str, number: int) -> Talk:
    text = "Why does the quick brown fox jump over the lazy dog? " * 12
    return [("system", f"{number} of {model}: You are helpful. "), ("user", text)]


def longer(talk: Talk, answered: Answered) -> Talk:
    return [*talk, ("assistant", answered.text), ("user", "And naïve llamas? " * 10)]


async def told(stand: RankedStand, client: openai.AsyncOpenAI, model: str, talk: Talk) -> Answered:
    """Ask, and wait until the events of what was computed came."""

    async def blocks() -> int:
        return sum(one["resident_blocks"] for one in (await stand.fleet.seen()).values())

    before = await blocks()
    answered = await ask(client, model, talk, OUTPUT_TOKENS)
    if answered.prompt_tokens - answered.cached_tokens >= BLOCK_TOKENS:

        async def is_so() -> bool:
            return await blocks() > before

        await until(is_so, "news of the prompt", 20.0)
    return answered


def is_right(answered: Answered) -> bool:
    return answered.predicted_tokens // BLOCK_TOKENS == answered.cached_tokens // BLOCK_TOKENS


async def test_each_rank_and_each_adapter_is_predicted_to_the_page(stand: RankedStand) -> None:
    """A69, B16: all second turns are warm where the first ones were, and nowhere else."""
    seen = await stand.fleet.seen()
    assert set(seen) == RANKS
    assert all(set(one["models"]) == set(MODELS) for one in seen.values())
    assert {one["capacity_tokens"] for one in seen.values()} == {PAGES * BLOCK_TOKENS}
    async with sdk(stand.fleet.router.url) as client:
        firsts = [
            (model, talk, await told(stand, client, model, talk))
            for model in MODELS
            for talk in (opening("any", number) for number in range(TALKS))
        ]
        assert {first.replica for _, _, first in firsts} == RANKS
        assert all(first.cached_tokens == 0 and is_right(first) for _, _, first in firsts)
        for model, talk, first in firsts:
            second = await told(stand, client, model, longer(talk, first))
            assert (second.replica, second.reason) == (first.replica, "prefix")
            assert second.cached_tokens >= first.prompt_tokens - BLOCK_TOKENS
            assert is_right(second)
            assert (await stand.fleet.decision(second.request_id))["is_exact"]


async def test_an_adapter_from_another_path_begins_cold_and_nothing_else_does(
    stand: RankedStand,
) -> None:
    """The engine does not find the old pages, and the router does not count on them."""
    async with sdk(stand.fleet.router.url) as client:
        talks = {model: opening(f"reload {model}", 0) for model in MODELS}
        firsts = {model: await told(stand, client, model, talks[model]) for model in MODELS}
        before = sum(one["resident_blocks"] for one in (await stand.fleet.seen()).values())
        reload = {
            "lora_name": LAW,
            "lora_path": str(stand.adapters["law-2"]),
            "load_inplace": True,
        }
        url = f"{stand.engine.url}/v1/load_lora_adapter"
        async with stand.fleet.http.post(url, json=reload) as answer:
            assert answer.status == 200, await answer.text()

        async def is_void() -> bool:
            seen = (await stand.fleet.seen()).values()
            return bool(sum(one["resident_blocks"] for one in seen) < before)

        await until(is_void, "fewer blocks", 20.0)
        for model in MODELS:
            again = await told(stand, client, model, longer(talks[model], firsts[model]))
            assert is_right(again)
            assert (again.cached_tokens == 0) is (model == LAW)
