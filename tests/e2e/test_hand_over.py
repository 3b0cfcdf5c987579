"""A replica that is drained on purpose: what it alone holds is elsewhere before it goes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.fleet import FleetPlan, until
from support.warm import BLOCK_TOKENS, WARM, WarmFleet, tokens_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.valkey import ValkeyProcess

PREFIX = 1_024


async def drain(fleet: WarmFleet, command: str, replica: str, *flags: str) -> tuple[int, str, str]:
    """Run ``warmroute drain`` or ``undrain``; return exit code, output and what it told."""
    words = [command, replica, "--reason", "a test", "--admin", fleet.router.admin_url, *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "warmroute",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def fleet(tmp_path: Path, valkey: ValkeyProcess) -> AsyncIterator[WarmFleet]:
    await valkey.flush()  # another test's drains are in the settings document there
    plan = FleetPlan(state_url=valkey.url, replicas=0, routers=0)
    async with WarmFleet(tmp_path, plan) as running:
        yield running


async def only_holder(fleet: WarmFleet, prefix: list[int]) -> tuple[str, str]:
    """Make a prefix hot; return who holds it, and who does not."""
    holders = {got.replica for got in await fleet.make_hot(prefix)}
    assert len(holders) == 1
    await fleet.kept(1)
    [holder] = holders
    [other] = {"w0", "w1"} - holders
    return holder, other


async def test_a_drain_hands_over_and_the_next_request_is_a_hit_elsewhere(
    fleet: WarmFleet,
) -> None:
    await fleet.start_engines(2)
    part = 2 * BLOCK_TOKENS
    await fleet.add_router(warm_up={**WARM, "tokens": PREFIX + part})
    prefix = tokens_of("system", PREFIX)
    holder, other = await only_holder(fleet, prefix)

    code, out, err = await drain(fleet, "drain", holder, "--hand-over")

    assert (code, f'hand_overs: [] -> ["{holder}"]' in out) == (0, True)
    assert f"hand-over of {holder}: ended: done, 1 of 1 prefixes, 1,024 of 1,152 tokens" in err
    assert (await fleet.seen())[holder]["draining"]
    first = await fleet.ask(prefix + tokens_of("first", 70))
    assert first.replica == other
    assert (first.cached_tokens, first.predicted_tokens) == (PREFIX, PREFIX)
    row = await fleet.job("hand_over", holder)
    assert (row["end"], row["spent_tokens"], row["computed_tokens"]) == ("done", PREFIX, PREFIX)

    code, _, err = await drain(fleet, "drain", holder, "--hand-over")
    assert (code, "no hand-over began" in err) == (1, True)
    code, out, _ = await drain(fleet, "undrain", holder, "--json")
    keys = {row["key"]: row["after"] for row in json.loads(out)["changes"]}
    assert (code, keys) == (0, {"drains": [], "hand_overs": []})


async def test_every_drain_hands_over_where_the_file_says_so_up_to_its_budget(
    fleet: WarmFleet,
) -> None:
    """Another one that is drained later finds the replica that is left with it."""
    await fleet.start_engines(2)
    warm_up = {**WARM, "hand_over": "always", "tokens": PREFIX - 1}
    await fleet.add_router(warm_up=warm_up)
    prefix = tokens_of("system", PREFIX)
    holder, other = await only_holder(fleet, prefix)
    code, out, _ = await drain(fleet, "drain", holder)
    assert (code, "hand_overs" in out) == (0, False)
    row = await fleet.job("hand_over", holder)
    cut = PREFIX - BLOCK_TOKENS
    assert (row["end"], row["spent_tokens"]) == ("tokens", cut)
    first = await fleet.ask(prefix + tokens_of("first", 70))
    assert (first.replica, first.cached_tokens) == (other, cut)


async def test_a_hand_over_whose_time_is_over_says_what_is_missing_and_exits_with_1(
    fleet: WarmFleet,
) -> None:
    """A worker that takes a third of a second for each step has no time for eight of them."""
    await fleet.start_engines(2, "--preset", "llama-8b-h100", "--speed-up", "0.2")
    await fleet.add_router(warm_up={**WARM, "seconds": 1.0})
    holder, _ = await only_holder(fleet, tokens_of("system", 4 * PREFIX))
    code, _, err = await drain(fleet, "drain", holder, "--hand-over")
    assert (code, f"warmroute drain: {holder}: nothing was handed over: " in err) == (1, True)
    end = (await fleet.job("hand_over", holder))["end"]
    assert end in {"time", "failed"}, "failed: it had to wait all the time"


async def test_a_hand_over_of_two_processes_is_told_as_one(fleet: WarmFleet) -> None:
    """One of them had the requests, and has the prefix; the other one has nothing to give."""
    await fleet.start_engines(2)
    await fleet.add_router(processes=2)
    prefix = tokens_of("system", PREFIX)
    holder, other = await only_holder(fleet, prefix)
    assert (await fleet.warm_ups())["kept_prefixes"] == 1
    code, _, err = await drain(fleet, "drain", holder, "--hand-over")
    assert (code, f"hand-over of {holder}: ended: done, 1 of 1 prefixes" in err) == (0, True)
    jobs = [job for job in (await fleet.warm_ups())["jobs"] if job["replica"] == holder]
    assert sorted((job["kind"], job["end"], job["done"]) for job in jobs) == [
        ("hand_over", "done", 0),
        ("hand_over", "done", 1),
    ]
    first = await fleet.ask(prefix + tokens_of("first", 70))
    assert (first.replica, first.cached_tokens) == (other, PREFIX)


async def test_what_is_handed_over_is_fetched_from_the_replica_that_leaves(
    fleet: WarmFleet,
) -> None:
    flags = ("--compute", "numpy", "--threads", "1", "--page-tokens", "16", "--model", "tiny")
    await fleet.start_engines(2, *flags, peers=True)
    await fleet.add_router(kv_transfer={"min_tokens": 256})
    fields: dict[str, Any] = {"model": "tiny"}
    prefix = tokens_of("system", PREFIX // 2)
    holders = {got.replica for got in await fleet.make_hot(prefix, **fields)}
    [holder] = holders
    [other] = {"w0", "w1"} - holders
    await fleet.kept(1)

    async def can_fetch() -> bool:
        return all(one["can_fetch"] for one in (await fleet.seen()).values())

    await until(can_fetch, "both are known to fetch pages")
    code, _, err = await drain(fleet, "drain", holder, "--hand-over")
    assert (code, "ended: done, 1 of 1" in err) == (0, True)
    row = await fleet.job("hand_over", holder)
    # The last page of a prompt is computed, whatever is fetched.
    assert row["cached_tokens"] >= len(prefix) - 2 * 16
    assert row["computed_tokens"] <= 2 * 16
    first = await fleet.ask(prefix + tokens_of("first", 70), **fields)
    assert first.replica == other
    assert first.cached_tokens >= len(prefix) - 16
