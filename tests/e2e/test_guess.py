"""Servers that tell nothing of what they hold: it is guessed, within bounds."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from router.upkeep import TICK_S
from support.fleet import FleetPlan, LocalFleet, until
from support.plain_engine import MODEL, PlainEngine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GUESS_S = 2.0
BLOCK_TOKENS = 64
PROMPT_BYTES = 4_000
"""Some 1,000 tokens as tokens are guessed, too."""
VLLM_OFF = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="256"} 1.0\n'
"""4,096 tokens, and no events."""


async def held(fleet: LocalFleet) -> Mapping[str, int]:
    """Return the blocks that each replica is guessed to hold."""
    return {name: one["resident_blocks"] for name, one in (await fleet.seen()).items()}


@pytest.mark.asyncio
async def test_guesses_are_bounded_by_the_capacity_that_was_found_and_by_their_time(
    tmp_path: Path,
) -> None:
    """A90: distinct prompts, without end. B47: what is guessed ends."""
    capacities = {"told": 4_096, "given": 2_048, "plain": 400_000}
    async with AsyncExitStack() as stack:
        engines = {
            "told": await stack.enter_async_context(PlainEngine(metrics=VLLM_OFF)),
            "given": await stack.enter_async_context(PlainEngine(metrics=VLLM_OFF)),
            "plain": await stack.enter_async_context(PlainEngine()),
        }
        replicas = [{"url": engine.url, "name": name} for name, engine in engines.items()]
        given = {"kv_capacity_tokens": capacities["given"]}
        config = {
            "replicas": [one | given if one["name"] == "given" else one for one in replicas],
            "placements": {"guess_s": GUESS_S},
            "policy": {"kind": "round_robin"},
            "health": {"interval_s": 0.1},
        }
        plan = FleetPlan(replicas=0, model=MODEL, config=config)
        fleet = await stack.enter_async_context(LocalFleet(tmp_path, plan))

        async def is_known() -> bool:
            seen = await fleet.seen()
            return {name: one["capacity_tokens"] for name, one in seen.items()} == capacities

        await until(is_known, "the capacity that the metrics tell")
        await asyncio.sleep(10 * TICK_S)  # it is the bound from the next round on
        most = dict.fromkeys(engines, 0)
        for number in range(60):
            await complete(fleet, f"{number:05d} " * (PROMPT_BYTES // 6))
            for name, blocks in (await held(fleet)).items():
                most[name] = max(most[name], blocks)
        assert most["told"] == capacities["told"] // BLOCK_TOKENS
        assert most["given"] == capacities["given"] // BLOCK_TOKENS
        assert capacities["told"] // BLOCK_TOKENS < most["plain"]
        assert most["plain"] <= 20 * (PROMPT_BYTES // BLOCK_TOKENS)
        await asyncio.sleep(GUESS_S)
        for number in range(len(engines)):
            await complete(fleet, f"late {number}" * 200)
        assert max((await held(fleet)).values()) <= 2_000 // BLOCK_TOKENS
        assert {
            path.partition("?")[0] for path in engines["plain"].asked if "completions" not in path
        } <= {
            "/health",
            "/v1/models",
            "/metrics",
            "/kv_event_sources",
            "/server_info",
            "/get_server_info",
            "/v1/loads",
            "/get_load",
        }
    lines = [line for line in fleet.router.child.log.read_text().splitlines() if "attend" in line]
    assert len(lines) == len(engines)
    assert sum("no KV events: what it holds is guessed" in line for line in lines) == len(engines)
    [advised, _] = [line for line in lines if "--kv-events-config" in line]
    assert "vllm, model plain-model; pages of 16 tokens; cache of 4096 tokens" in advised


async def complete(fleet: LocalFleet, prompt: str) -> None:
    """Ask for a completion."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1})
    async with fleet.http.post(f"{fleet.router.url}/v1/completions", data=body) as answer:
        assert answer.status == 200
