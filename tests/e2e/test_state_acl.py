"""Router and sidecar as the limited user of the example's access rules."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support.fleet import FleetPlan, LocalFleet, until
from support.steady_load import SteadyLoad
from support.tokenizer import write_tokenizer
from support.valkey_acl import ValkeyAcl

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_fleet_lives_on_the_rights_of_the_example(tmp_path: Path) -> None:
    """S-14: registered, loaded, hit and deregistered, and the server refused nothing."""
    with ValkeyAcl() as server:
        await server.command("CONFIG", "SET", "maxmemory", "1gb")
        await server.command("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        plan = FleetPlan(
            state_url=server.url,
            replicas=1,
            tokenizer=write_tokenizer(tmp_path / "tokenizer"),
            config={"receipts": True},
        )
        async with LocalFleet(tmp_path, plan) as fleet:
            async with SteadyLoad(fleet.router.url) as load:
                await asyncio.sleep(1.0)

                async def is_predicted() -> bool:
                    gauges = await fleet.gauges(fleet.router.url)
                    return gauges["warmroute_predicted_cached_tokens_total"] > 0

                await until(is_predicted, "hits")
            assert set(load.outcomes) == {"200"}, load.outcomes
            sidecar = fleet.replicas[0].sidecar
            assert await asyncio.to_thread(fleet.processes.stop, sidecar) == 0
            await fleet.all_up(fleet.router, 0)
            log = fleet.router.child.log.read_text()
        assert await server.refusals() == []
    assert "needs an operator" not in log
    assert "maxmemory" not in log
    assert "change-me" not in log
