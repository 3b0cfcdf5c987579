"""What clients name makes no series of a metric."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from router.server import LOAD_PATHS, PREFIX_PATHS
from support.fleet import FleetPlan, LocalFleet, Router
from support.raw import RawClient
from support.stage import Actor, post_to
from support.talking import fleet_is_up, talking_router
from support.tenant import tenant_config

if TYPE_CHECKING:
    from pathlib import Path

PATHS: Final = sorted(PREFIX_PATHS | LOAD_PATHS)
WARM_UP: Final = 200
"""Names until every outcome was there once: too many unknown keys among them."""


async def test_ten_thousand_names_make_no_series(tmp_path: Path) -> None:
    """G-03: models, tenants' keys, paths, ids and users are labels of no metric."""
    actor = Actor("a")
    actor.url = f"http://{(await actor.replica.start()).authority}"
    config: dict[str, Any] = {
        "replicas": [{"url": actor.url, "name": "a"}],
        "attend_sidecars": False,
        "health": {"interval_s": 0.1},
    }
    async with LocalFleet(tmp_path, FleetPlan(replicas=0, routers=0)) as fleet:
        config["state"] = {"redis": fleet.state_url}
        async with talking_router(fleet, tmp_path, "router-open", **config) as router:
            await fleet_is_up(fleet, router)
            assert await series_that_names_make(fleet, router, 6_000) == set()
        config |= tenant_config(tmp_path, "acme")
        async with talking_router(fleet, tmp_path, "router-tenants", **config) as router:
            await fleet_is_up(fleet, router)
            assert await series_that_names_make(fleet, router, 4_000) == set()
    await actor.replica.stop()


async def series_that_names_make(
    fleet: LocalFleet, router: Router, names: int
) -> set[tuple[str, ...]]:
    """Return the series that there are more after so many names than after a few."""
    await send_names(router, range(WARM_UP))
    before = await series(fleet, router)
    await send_names(router, range(WARM_UP, WARM_UP + names))
    return await series(fleet, router) - before


async def send_names(router: Router, numbers: range) -> None:
    """Send a request for each number, with a name of its own everywhere."""

    async def send(mine: range) -> None:
        client = await RawClient.connect(router.port)
        for number in mine:
            name = f"name-{number}"
            path = f"/{name}" if number % 3 == 0 else PATHS[number % len(PATHS)]
            body = msgspec.json.encode(
                {"model": name, "prompt": name, "input": name, "user": name, "cache_salt": name}
                | {"messages": [{"role": "user", "content": name}], "max_tokens": 1}
            )
            client.send(post_to(body, path, Authorization=f"Bearer {name}", X_Request_Id=name))
            answer = await client.reply()
            if b"close" in answer.all(b"connection"):
                await client.close()
                client = await RawClient.connect(router.port)
        await client.close()

    await asyncio.gather(*(send(numbers[start::8]) for start in range(8)))


async def series(fleet: LocalFleet, router: Router) -> set[tuple[str, ...]]:
    """Return the names and labels of all samples."""
    async with fleet.http.get(f"{router.admin_url}/metrics") as answer:
        text = await answer.text()
    assert "name-" not in text
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples)
    return {(one.name, *itertools.chain(*sorted(one.labels.items()))) for one in samples}
