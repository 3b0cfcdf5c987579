"""S-08: what one tenant may take of what all share; the others do not notice it."""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from support.fleet import until
from support.stage import Actor, chat_body, post_to, staged_router
from support.tenancy import TEXT, key_of, tenant, tenant_fleet, write_secret
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from pathlib import Path

    from support.fleet import Router
    from support.raw import Received, Talk
    from support.tenancy import TenantFleet

PAGES = 512
"""Of 16 tokens: two dozen prompts of these tests."""
INDEX_BYTES = 1 << 16


async def hit_rate(stand: TenantFleet, router: Router, prompts: int) -> float:
    """Return which part of the second tenant's prompts the engine had."""
    got = [await stand.ask(router, "b", f"mine {number} {TEXT}") for number in range(prompts)]
    return sum(one.cached_tokens for one in got) / sum(one.prompt_tokens for one in got)


async def flooded(folder: Path, eviction: str, prompts: int, repeats: int) -> tuple[float, float]:
    """Return the second tenant's hit rate before and while the first one floods the fleet."""
    with ValkeyProcess() as valkey:
        tenants = (tenant("a", quota={"index_bytes": INDEX_BYTES}), "b")
        flags = ("--eviction", eviction)
        async with tenant_fleet(
            folder, valkey.url, *tenants, pages=PAGES, worker_flags=flags
        ) as stand:
            router = await stand.router("r1")
            await hit_rate(stand, router, 4)
            before = await hit_rate(stand, router, 4)
            during, flood_tokens = [], 0
            for number in range(prompts):
                words = f"flood {number} " + f"{number} words " * repeats
                got = await stand.ask(router, "a", words)
                assert (got.status, got.cached_tokens < 256) == (200, True)
                flood_tokens += got.prompt_tokens
                if number % (prompts // 4) == prompts // 4 - 1:
                    during.append(await hit_rate(stand, router, 4))
            assert flood_tokens > 2 * PAGES * 16
            print(f"S-08: {eviction} eviction: {flood_tokens // 64} blocks came in the flood")  # noqa: T201 - a figure
            return before, fmean(during)


async def test_a_flood_of_one_tenant_costs_another_one_no_hits(tmp_path: Path) -> None:
    """S-08: less than 5 % of its hit rate, with an engine that evicts by quota."""
    before, during = await flooded(tmp_path, "quota", 40, 200)
    assert before > 0.8
    assert during >= 0.95 * before


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("eviction", ["quota", "lru"])
async def test_a_flood_of_a_hundred_thousand_blocks(tmp_path: Path, eviction: str) -> None:
    """S-08, whole. By age alone the other tenant loses what it had: the test of the test."""
    before, during = await flooded(tmp_path, eviction, 4_000, 200)
    print(f"S-08: {eviction} eviction: hit rate {before:.3f} before, {during:.3f} in the flood")  # noqa: T201 - a figure
    assert before > 0.8
    if eviction == "quota":
        assert during >= 0.95 * before
    else:
        assert during < 0.5 * before


async def test_requests_beyond_a_quota_are_refused_before_any_work_is_done(tmp_path: Path) -> None:
    """S-08: with 429 and when to come again; a client that leaves gives its place back."""
    arrived, go_on = asyncio.Event(), asyncio.Event()
    actor = Actor("r1")
    answer = actor.answer

    async def wait(talk: Talk, received: Received) -> None:
        arrived.set()
        await go_on.wait()
        await answer(talk, received)

    actor.answer = wait
    tenants = [
        tenant("a", quota={"max_inflight": 1}),
        tenant("b"),
        tenant("c", quota={"new_blocks_per_s": 0.1, "burst_s": 20}),
    ]
    secret = str(write_secret(tmp_path))
    async with staged_router(
        tmp_path, [actor], tenants=tenants, deployment_key_file=secret
    ) as stage:

        def ask(name: str) -> bytes:
            body = chat_body(TEXT, stream=False)
            return post_to(body, Authorization=f"Bearer {key_of(name)}")

        leaving = await stage.client()
        leaving.send(ask("a"))
        await arrived.wait()
        refused = await stage.ask(ask("a"))
        assert refused.status == 429
        assert refused.all(b"retry-after") == [b"1"]
        assert b"max_inflight" in refused.body
        assert len(actor.posts()) == 1
        leaving.abort()
        arrived.clear()

        async def is_free() -> bool:
            return await stage.fleet.inflight() == 0

        await until(is_free, "the place of the client that left is free")
        go_on.set()
        for name in ("a", "a", "b"):
            assert (await stage.ask(ask(name))).status == 200
        posts = len(actor.posts())
        assert (await stage.ask(ask("c"))).status == 200
        refused = await stage.ask(ask("c"))
        assert refused.status == 429
        [retry_after] = refused.all(b"retry-after")
        assert int(retry_after) >= 1
        assert b"new_blocks_per_s" in refused.body
        assert len(actor.posts()) == posts + 1
        assert (await stage.ask(ask("b"))).status == 200
