"""The state moves to other servers under a steady load: sentinels, a cluster that is resharded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from state.model import ReplicaId
from state.schema import REPLICA_INDEX, ReplicaKeys
from support.fleet import FleetPlan, LocalFleet, until
from support.steady_load import SteadyLoad, rungs_told
from support.tokenizer import write_tokenizer
from support.valkey_cluster import ValkeyCluster
from support.valkey_sentinel import ValkeySentinel

if TYPE_CHECKING:
    from pathlib import Path


def plan_on(url: str, folder: Path) -> FleetPlan:
    return FleetPlan(
        state_url=url,
        replicas=1,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={"receipts": True},
    )


async def is_live(fleet: LocalFleet) -> bool:
    return str((await fleet.get(f"{fleet.router.url}/readyz"))["rung"]) == "live"


async def resident_blocks(fleet: LocalFleet) -> float:
    return (await fleet.gauges(fleet.router.url))["warmroute_resident_blocks"]


async def test_a_failover_under_load_fails_no_request(tmp_path: Path) -> None:
    """R-08, R-12, C-11: down once, up once, and what the engine holds is announced again."""
    with ValkeySentinel(down_after_ms=500) as setup:
        old, new = setup.servers
        async with LocalFleet(tmp_path, plan_on(setup.url, tmp_path)) as fleet:
            await until(lambda: is_live(fleet), "live before")
            generation = (await fleet.seen())["w0"]["generation"]
            async with SteadyLoad(fleet.router.url) as load:
                await asyncio.sleep(0.5)
                setup.kill(old)

                async def is_stale() -> bool:
                    return not await is_live(fleet)

                await until(is_stale, "stale")

                async def is_back() -> bool:
                    seen = await fleet.seen()
                    is_anew = seen["w0"]["generation"] != generation
                    return is_anew and seen["w0"]["up"] and await is_live(fleet)

                await until(is_back, "live on the other server, announced again")
                assert await resident_blocks(fleet) > 0
            assert setup.named() == new
            assert set(load.outcomes) == {"200"}, load.outcomes
            assert load.slowest_s(0.9) <= 0.1
            log = fleet.router.child.log.read_text()
    told = rungs_told(log)
    assert told[-2:] == ["stale", "live"]
    assert told.count("stale") in range(1, 2 + load.stalls)


async def test_slots_that_move_under_load_fail_no_request(tmp_path: Path) -> None:
    """R-13: the slot of a replica's keys, then that of the index and the leases."""
    with ValkeyCluster() as cluster:
        async with LocalFleet(tmp_path, plan_on(cluster.url, tmp_path)) as fleet:
            await until(lambda: is_live(fleet), "live before")
            async with SteadyLoad(fleet.router.url) as load:

                async def pause() -> None:
                    await asyncio.sleep(0.3)

                for key in (ReplicaKeys(ReplicaId("w0")).record, REPLICA_INDEX):
                    before = await cluster.owner(key)
                    assert await cluster.move_slot(key, pause) != before
                    assert list(await fleet.seen()) == ["w0"]
                await until(lambda: is_live(fleet), "live after")
                await fleet.all_up(fleet.router)

                async def is_known() -> bool:
                    return await resident_blocks(fleet) > 0

                await until(is_known, "what the engine holds")
            assert set(load.outcomes) == {"200"}, load.outcomes
            assert load.slowest_s(0.9) <= 0.1
