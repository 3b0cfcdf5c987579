"""Routers that keep no index: for each request they ask a cluster, which then freezes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from support.conversation import ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet, Router, until
from support.tokenizer import write_tokenizer
from support.valkey_cluster import ValkeyCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

TALKS = 12
LOOKUPS = "warmroute_state_lookups_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    tmp_path_factory: pytest.TempPathFactory, cluster: ValkeyCluster
) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("direct")
    plan = FleetPlan(
        state_url=cluster.url,
        routers=2,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={"receipts": True, "state": {"redis": cluster.url, "lookup": "direct"}},
    )
    async with LocalFleet(folder, plan) as running:
        yield running


def opening(number: int) -> list[tuple[str, str]]:
    return [("user", f"{number} is my number. " + "fox jumps over the lazy dog " * 60)]


async def lookups(fleet: LocalFleet, router: Router) -> dict[str, float]:
    """Return how many lookups ended in which way."""
    async with fleet.http.get(f"{router.admin_url}/metrics") as answer:
        text = await answer.text()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    return {s.labels["outcome"]: s.value for s in samples if s.name == LOOKUPS}


async def test_another_router_finds_the_warm_replica_through_the_cluster(
    fleet: LocalFleet,
) -> None:
    """The second router never saw the first turn: what it knows, it asked the cluster."""
    one, other = fleet.routers
    async with sdk(one.url) as first, sdk(other.url) as second:
        openings = [opening(number) for number in range(TALKS)]
        cold = [await ask(first, MODEL, talk) for talk in openings]
        assert len({answer.replica for answer in cold}) == 2
        await asyncio.sleep(1.0)  # events reach the cluster
        judged = 0
        for talk, before in zip(openings, cold, strict=True):
            answered = (await lookups(fleet, other))["answered"]
            turn = [*talk, ("assistant", before.text), ("user", "and now?")]
            after = await ask(second, MODEL, turn)
            if (await lookups(fleet, other))["answered"] == answered:
                continue  # late, as it may be on a busy machine
            judged += 1
            assert after.replica == before.replica
            assert after.predicted_tokens > before.prompt_tokens // 2
            assert after.error_tokens <= 0
        assert judged >= 2


async def test_a_cluster_that_freezes_fails_no_request_and_lookups_rest_until_it_thaws(
    fleet: LocalFleet, cluster: ValkeyCluster
) -> None:
    """R-03, F7: meanwhile everything is served by load and own placements."""
    async with sdk(fleet.router.url) as client:
        await ask(client, MODEL, opening(0))
        for address in cluster.addresses:
            cluster.freeze(address)
        try:
            for number in range(30):
                await ask(client, MODEL, opening(number))
            records = await fleet.decisions(30)
            assert {record["status"] for record in records} == {200}
            assert records[-1]["rung"] in {"local", "stale"}
        finally:
            for address in cluster.addresses:
                cluster.thaw(address)
        before = await lookups(fleet, fleet.router)
        assert before["late"] + before["failed"] >= 3

        async def is_warm() -> bool:
            again = await ask(client, MODEL, opening(0))
            [record] = await fleet.decisions(1)
            answered = (await lookups(fleet, fleet.router))["answered"] - before["answered"]
            return bool(record["rung"] == "live") and again.predicted_tokens > 0 and answered > 0

        await until(is_warm, "lookups that go on and find the prompt")


async def test_no_key_lives_for_ever(fleet: LocalFleet, cluster: ValkeyCluster) -> None:
    assert len(fleet.replicas) == 2
    assert await cluster.keys_without_ttl() == []
