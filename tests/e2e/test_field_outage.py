"""Requests while the state server is frozen, refuses or swallows: answered as before."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.blackhole import Blackhole
from support.conversation import ask, sdk
from support.fleet import MODEL, LocalFleet, until
from support.stage import chat_body

if TYPE_CHECKING:
    from pathlib import Path

    from support.conversation import Answered
    from support.fleet import Router
    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "quick brown foxes jump over lazy dogs " * 60
BUDGET_S = 0.005
"""What a lookup may add to a request while the state store is away."""
AFFINITY_ONLY = {"kind": "weighted", "w_queue": 0, "w_recent": 0}


async def slow_decisions(fleet: LocalFleet, router: Router) -> tuple[float, float]:
    """Return how many decisions took longer than the budget, and how many there were."""
    async with fleet.http.get(f"{router.url}/metrics") as answer:
        text = await answer.text()
    [family] = [
        one
        for one in text_string_to_metric_families(text)
        if one.name == "warmroute_decision_seconds"
    ]
    buckets = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
    return buckets["+Inf"] - buckets[str(BUDGET_S)], buckets["+Inf"]


async def rung(fleet: LocalFleet, router: Router) -> str:
    return str((await fleet.get(f"{router.url}/readyz"))["rung"])


async def until_rung(fleet: LocalFleet, wanted: str, router: Router) -> None:
    async def is_so() -> bool:
        return await rung(fleet, router) == wanted

    await until(is_so, f"rung {wanted}")


async def test_a_frozen_server_delays_no_request_and_hides_no_warmth(
    fleet: LocalFleet, valkey: ValkeyProcess
) -> None:
    """C16, A83: answered from the local view, within the budget; and it recovers."""
    names = [f"freeze {number} " for number in range(8)]
    async with sdk(fleet.router.url) as client:

        async def turn(name: str) -> Answered:
            return await ask(client, MODEL, [("user", name + TEXT)])

        before = [await turn(name) for name in names]
        expected = sum(one.prompt_tokens // 64 for one in before)

        async def is_all_known() -> bool:
            held = [int(one["resident_blocks"]) for one in (await fleet.seen()).values()]
            return sum(held) >= expected

        await until(is_all_known, "the first turns are announced")
        valkey.freeze()
        try:
            await until_rung(fleet, "stale", fleet.router)
            slow_before, all_before = await slow_decisions(fleet, fleet.router)
            during = [await turn(name) for name in names]
            fresh = [await turn(f"{name} and new") for name in names]
            slow, decided = await slow_decisions(fleet, fleet.router)
            assert decided - all_before == len(during) + len(fresh)
            assert slow - slow_before < (decided - all_before) / 2
            assert await rung(fleet, fleet.router) == "stale"
        finally:
            valkey.thaw()
        for old, new in zip(before, during, strict=True):
            assert (new.replica, new.reason) == (old.replica, "prefix")
            assert new.predicted_tokens > new.prompt_tokens - 65
        await until_rung(fleet, "live", fleet.router)
        for old in fresh:
            assert old.text

        async def is_known() -> bool:
            again = await turn(names[0] + " and new")
            return again.predicted_tokens > again.prompt_tokens - 65

        await until(is_known, "what was computed meanwhile")
        await fleet.all_up(fleet.router)
        gauges = await fleet.gauges(fleet.router.url)
        assert gauges["warmroute_resident_blocks"] > 0


async def served_well(fleet: LocalFleet, url: str, requests: int) -> Counter[str]:
    """Send distinct prompts; all must be answered. Return how often each replica was chosen."""
    chosen: Counter[str] = Counter()
    for number in range(requests):
        body = chat_body(f"{number} {TEXT}", stream=False, max_tokens=1)
        async with fleet.http.post(f"{url}/v1/chat/completions", data=body) as answer:
            await answer.read()
            assert answer.status == 200
            assert answer.headers["x-warmroute-rung"] == "local"
            chosen[answer.headers["x-warmroute-replica"]] += 1
    return chosen


async def start_apart(fleet: LocalFleet, state_url: str) -> Router:
    """Start a router that knows the workers by its configuration; prefix is its only term."""
    configured = [{"url": one.url, "name": f"static-{one.name}"} for one in fleet.replicas]
    state = {"redis": state_url}
    router = await fleet.start_router(replicas=configured, state=state, policy=AFFINITY_ONLY)
    await fleet.all_up(router, len(configured))
    return router


async def test_without_a_state_server_affinity_alone_still_routes(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    """A87: it is refused, and prefix is the only term; every request is answered, by both."""
    router = await start_apart(fleet, f"unix://{tmp_path}/nothing-listens-here")
    chosen = await served_well(fleet, router.url, 40)
    assert set(chosen) == {"static-w0", "static-w1"}
    again = await served_well(fleet, router.url, 40)
    assert again == chosen  # each prompt where it was: own placements count
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0


async def test_a_state_server_that_swallows_connections_holds_up_nothing(
    fleet: LocalFleet, valkey: ValkeyProcess
) -> None:
    """B46: the start does not fail, requests do not wait, and it heals; the sidecar's too."""
    async with Blackhole() as hole:
        router = await start_apart(fleet, hole.url)
        engine = fleet.replicas[0].url
        sidecar = fleet.start_sidecar("late", engine, "--redis", hole.url)
        await served_well(fleet, router.url, 30)
        slow, decided = await slow_decisions(fleet, router)
        assert decided == 30
        assert slow < 15
        await asyncio.sleep(1.2)  # more than a connect may take
        assert await hole.is_hanging()
        assert sidecar.is_alive()
        assert await rung(fleet, router) == "local"
        await hole.heal(valkey.socket_path)
        await sidecar.ready()
        await until_rung(fleet, "live", router)

        async def is_seen() -> bool:
            seen = await fleet.seen(router)
            return all(seen.get(name, {}).get("up") for name in ("w0", "w1", "late"))

        await until(is_seen, "the replicas of the healed state")
        for child in (sidecar, router.child):
            assert await asyncio.to_thread(fleet.processes.stop, child) == 0
