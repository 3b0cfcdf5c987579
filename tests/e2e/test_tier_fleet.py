"""The whole chain: a router spills a warm prefix, and its pages go to the other engine by TCP."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

from support.fleet import FleetPlan, LocalFleet, Replica, until
from support.port import free_ports
from support.tiered import MODEL, PAGE_TOKENS, prompt_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKENS: Final = 512
FETCHABLE: Final = 496
"""Tokens in full pages before the last token."""


class PeerFleet(LocalFleet):
    """Two engines with real arithmetic that give each other pages, and a router in front."""

    async def start_engines(self, **config: Any) -> None:
        ports = free_ports(2)
        peers = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        flags = ["--compute", "numpy", "--threads", "1", "--page-tokens", str(PAGE_TOKENS)]
        flags += ["--transfer-port", "0", "--transfer-peers", peers, "--fetch", "always"]
        workers = [
            self.start_worker(f"w{at}", *flags, "--port", str(port))
            for at, port in enumerate(ports)
        ]
        for at, worker in enumerate(workers):
            await worker.ready()
            sidecar = await self.start_sidecar(f"w{at}", worker.words[0]).ready()
            self.replicas.append(Replica(f"w{at}", worker, sidecar))
        self.routers.append(await self.start_router(**config))
        await self.all_up(self.router, 2)

    async def ask(self, prompt: list[int], max_tokens: int = 4) -> tuple[str, int, list[int]]:
        """Return replica, tokens that it did not compute, and the greedy answer."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        async with self.http.post(
            f"{self.router.url}/v1/completions",
            data=json.dumps(body | {"return_token_ids": True, "ignore_eos": True}),
        ) as answer:
            assert answer.status == 200, await answer.text()
            told = await answer.json()
            name = answer.headers["x-warmroute-replica"]
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return name, cached, told["choices"][0]["token_ids"]

    async def knows(self, blocks: int) -> None:
        """Wait until the router knows so many blocks in the fleet."""

        async def is_so() -> bool:
            seen = await self.seen()
            return sum(int(one["resident_blocks"]) for one in seen.values()) >= blocks

        await until(is_so, f"{blocks} blocks")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[PeerFleet]:
    plan = FleetPlan(replicas=0, routers=0, model=MODEL, pages=512, config={"receipts": True})
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(PeerFleet(tmp_path, plan))


async def test_a_prefix_that_goes_elsewhere_arrives_there_by_transfer(fleet: PeerFleet) -> None:
    await fleet.start_engines(
        policy={"kind": "round_robin"},
        kv_transfer={"min_tokens": 256},
        placements={"pending_s": 0.001},
    )
    prompt = prompt_of(1, TOKENS)
    first, cached, answer = await fleet.ask(prompt)
    assert cached == 0
    await fleet.knows(TOKENS // 64)
    second, cached, again = await fleet.ask(prompt)
    assert {first, second} == {"w0", "w1"}
    assert (cached, again) == (FETCHABLE, answer)
    [record] = await fleet.decisions(1)
    assert record["attempts"][-1]["kv_source"] == first


async def test_a_hot_prefix_is_spilled_and_fetched(fleet: PeerFleet) -> None:
    """Many at once are too many for the warm engine: the other one gets the prefix from it."""
    await fleet.start_engines(
        policy={"kind": "weighted"},
        kv_transfer={"min_tokens": 256},
        placements={"pending_s": 0.001},
    )
    prefix = prompt_of(2, TOKENS)
    warm, _, _ = await fleet.ask(prefix)
    await fleet.knows(TOKENS // 64)
    prompts = [[*prefix, *prompt_of(10 + at, 16)] for at in range(12)]
    told = await asyncio.gather(*(fleet.ask(prompt, 24) for prompt in prompts))
    spilled = [cached for name, cached, _ in told if name != warm]
    assert spilled
    assert max(spilled) >= FETCHABLE
    alone = [await fleet.ask(prompt, 24) for prompt in prompts]
    assert [answer for *_, answer in alone] == [answer for *_, answer in told]
    gauges = await fleet.gauges(fleet.router.url)
    assert gauges["warmroute_kv_sources_total"] >= 1
