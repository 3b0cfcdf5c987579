"""Two vLLM engines behind ``warmroute serve`` that was given their addresses, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest_asyncio

from support.attended import Served, serve_addresses
from support.conversation import ask, sdk
from support.engine_process import Engines
from support.fleet import FleetPlan, LocalFleet
from support.vllm import MODEL, vllm_command
from support.vllm_stand import MARKS, OUTPUT_TOKENS, PAGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

pytestmark = MARKS

BLOCK_TOKENS = 64
"""A page of vLLM, and what the index is in steps of: predictions can be right to the page."""
NEWS_S = 1.0
TEXT = "Why does the quick brown fox jump over the lazy dog, 🦙? " * 40


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(
    tmp_path_factory: pytest.TempPathFactory, vllm: Path, model: Path
) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("addresses")
    command = vllm_command(vllm, model, PAGES, "--block-size", str(BLOCK_TOKENS))
    plan = FleetPlan(replicas=0, routers=0)
    async with Engines(folder, command) as engines, LocalFleet(folder, plan) as fleet:
        urls = [engines.add(name).url for name in ("a0", "a1")]
        for engine in engines.engines:
            await engines.ready(engine)
        served = await serve_addresses(fleet, "--receipts", urls=urls)
        await served.until_followed()
        yield served


async def test_second_turns_land_on_the_warm_engine_and_are_predicted_to_the_page(
    served: Served,
) -> None:
    async with sdk(served.router.url) as client:
        for number in range(8):
            turns = [("system", f"{number}: You are helpful. "), ("user", TEXT)]
            first = await ask(client, MODEL, turns, OUTPUT_TOKENS)
            await asyncio.sleep(NEWS_S)
            turns += [("assistant", first.text), ("user", "And naïve llamas? " * 10)]
            second = await ask(client, MODEL, turns, OUTPUT_TOKENS)
            assert (second.replica, second.reason) == (first.replica, "prefix")
            assert second.cached_tokens >= first.prompt_tokens - BLOCK_TOKENS
            for told in (first, second):
                assert told.predicted_tokens // BLOCK_TOKENS == told.cached_tokens // BLOCK_TOKENS
                record = await served.fleet.decision(told.request_id, served.router)
                assert record["is_exact"]
                assert record["prompt_tokens"] == record["reported_prompt_tokens"]


async def test_what_was_found_is_said_once_per_engine(served: Served) -> None:
    lines = served.decisions()
    assert len(lines) == len(served.urls)
    for line in lines:
        assert f"vllm, model {MODEL}; pages of {BLOCK_TOKENS} tokens" in line
        assert f"cache of {PAGES * BLOCK_TOKENS} tokens" in line
        assert "prompts read with " in line
        assert "a sidecar of this router follows its KV events" in line
        assert "start it with" not in line
