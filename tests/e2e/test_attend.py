"""``warmroute serve`` with nothing but addresses: it finds out what the engines are, and hold."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.attended import FOLLOW_S, Served, attended_pids, has_ended, serve_addresses
from support.conversation import ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.news import News
from support.tokenizer import write_tokenizer
from warmroute.attend import POLL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE_TOKENS = 64
TEXT = "quick brown foxes jump over lazy dogs " * 60
HEARTBEATS_S = 1.5
"""Until a sidecar that another one took over notices."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    """Two workers that know a tokenizer's directory, and nothing else."""
    folder = tmp_path_factory.mktemp("attended")
    tokenizer = write_tokenizer(folder / "tokenizer")
    flags = ("--tokenizer", str(tokenizer), "--page-tokens", str(PAGE_TOKENS))
    plan = FleetPlan(replicas=0, routers=0, worker_flags=flags)
    async with LocalFleet(folder, plan) as running:
        workers = [running.start_worker(name) for name in ("w0", "w1")]
        for worker in workers:
            await worker.ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: LocalFleet) -> Served:
    """Start a router of these two with their addresses alone."""
    served = await serve_addresses(fleet, "--receipts")
    await served.until_followed()
    return served


async def test_second_turns_are_predicted_to_the_page(served: Served) -> None:
    """A59: two addresses are all that a router needs for exact predictions."""
    news = News(served.fleet, served.router, PAGE_TOKENS)
    await news.begin()
    async with sdk(served.router.url) as client:
        for number in range(6):
            turns = [("user", f"{number} {TEXT}")]
            first = await ask(client, MODEL, turns)
            await news.of(first)
            turns += [("assistant", first.text), ("user", "and then? " * 20)]
            second = await ask(client, MODEL, turns)
            await news.of(second, first)
            assert second.replica == first.replica
            assert second.cached_tokens >= first.prompt_tokens - PAGE_TOKENS
            for told in (first, second):
                assert told.predicted_tokens // PAGE_TOKENS == told.cached_tokens // PAGE_TOKENS
                record = await served.fleet.decision(told.request_id, served.router)
                assert record["is_exact"]
                assert record["prompt_tokens"] == record["reported_prompt_tokens"]


async def test_what_was_decided_is_said_once_per_replica(served: Served) -> None:
    lines = served.decisions()
    assert len(lines) == len(served.urls)
    for line in lines:
        assert f"warmroute, model {MODEL}; pages of {PAGE_TOKENS} tokens" in line
        assert "prompts read with " in line
        assert "a sidecar of this router follows its KV events" in line


async def test_a_sidecar_that_dies_is_started_again(served: Served) -> None:
    [victim, other] = attended_pids(served.router.child)
    os.kill(victim, signal.SIGKILL)

    async def is_back() -> bool:
        pids = attended_pids(served.router.child)
        return len(pids) == 2 and victim not in pids

    await until(is_back, "another sidecar", FOLLOW_S)
    await served.until_followed()
    assert other in attended_pids(served.router.child)


async def test_sidecars_end_with_a_router_that_is_killed(fleet: LocalFleet) -> None:
    served = await serve_addresses(fleet)
    await served.until_followed()
    pids = attended_pids(served.router.child)
    assert len(pids) == 2
    how = signal.SIGKILL
    assert await asyncio.to_thread(fleet.processes.stop, served.router.child, number=how) == -how
    await until(partial(has_ended, pids), "the end of the sidecars")


async def test_without_sidecars_what_replicas_hold_is_guessed(fleet: LocalFleet) -> None:
    served = await serve_addresses(fleet, "--no-sidecars", "--receipts")
    await fleet.all_up(served.router, 2)
    await served.until_live()
    await asyncio.sleep(2 * POLL_S)  # as long as an attendant would need
    async with sdk(served.router.url) as client:
        turns = [("user", f"guess {TEXT}")]
        first = await ask(client, MODEL, turns)
        turns += [("assistant", first.text), ("user", "and then? " * 20)]
        second = await ask(client, MODEL, turns)
    assert (second.replica, second.reason) == (first.replica, "prefix")
    seen = await fleet.seen(served.router)
    assert not any(one["has_events"] or one["registered"] for one in seen.values())
    assert attended_pids(served.router.child) == []
    assert not any("warmroute.attend" in line for line in served.logged())
    assert await asyncio.to_thread(fleet.processes.stop, served.router.child) == 0


async def test_two_routers_share_sidecars_and_one_takes_over_when_the_other_leaves(
    fleet: LocalFleet, valkey: ValkeyProcess
) -> None:
    """Both start at once; each replica ends up with one sidecar, whose generation stays."""
    shared = ("--redis", f"unix://{valkey.socket_path}")
    routers = await asyncio.gather(serve_addresses(fleet, *shared), serve_addresses(fleet, *shared))

    def sidecars() -> list[int]:
        return [pid for one in routers for pid in attended_pids(one.router.child)]

    async def is_settled() -> bool:
        return len(sidecars()) == 2

    for one in routers:
        await one.until_followed()
    await until(is_settled, "one sidecar for each replica", FOLLOW_S)
    pids, generations = sidecars(), await routers[0].generations()
    await asyncio.sleep(HEARTBEATS_S)
    assert sidecars() == pids
    assert await routers[0].generations() == generations
    leaver, stayer = sorted(routers, key=lambda one: -len(attended_pids(one.router.child)))
    left = attended_pids(leaver.router.child)
    assert await asyncio.to_thread(fleet.processes.stop, leaver.router.child) == 0
    assert await has_ended(left)

    async def has_taken_over() -> bool:
        return len(attended_pids(stayer.router.child)) == 2

    await until(has_taken_over, "sidecars of the router that stayed", FOLLOW_S)
    await stayer.until_followed()
    assert await asyncio.to_thread(fleet.processes.stop, stayer.router.child) == 0
