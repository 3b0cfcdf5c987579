"""A canary that is split by tenant: each is on one side in both routers, and a bad one ends."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import pytest

from policies.least_loaded import LeastLoaded
from router.canary_setting import CanarySettings
from router.split import CANDIDATE, CONTROL, Side, Splitter
from support.canary_desk import CanaryDesk, conversation
from support.fleet import until
from support.tenancy import TenantFleet, key_of, tenant, tenant_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.fleet import Router
    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.timeout(600)

TENANTS: Final = tuple(f"t{number:02}" for number in range(24))
LEAST_GROUPS: Final = 9
"""One more than the statistics ask for."""
MOST_ROUNDS: Final = 60
BAD: Final = {"kind": "session_hash"}
"""All to one replica: tenants of one group have one scope, and all prompts begin alike."""
RAILS: Final[dict[str, Any]] = {
    "imbalance": {"limit": 1.5, "min_requests": 50},
    "ttft_mean": {"enabled": False},
    "ttft_p95": {"enabled": False},
    "token_hits": {"enabled": False},
}


def sides_of(seed: int) -> dict[str, Side]:
    """Return the side of each tenant under a seed, by the rule that routers go by."""
    return {name: _assigned(seed, name)[0] for name in TENANTS}


def _assigned(seed: int, name: str) -> tuple[Side, int]:
    splitter = Splitter(
        CanarySettings(
            id="c", started_unix_s=0.0, policy=LeastLoaded(), split="tenant", percent=50, seed=seed
        )
    )
    assigned = splitter.assign(None, name)
    assert assigned is not None
    return assigned.side, assigned.group


def even_seed() -> int:
    """Return a seed that puts tenants of enough groups on either side."""
    for seed in itertools.count():
        seen = {_assigned(seed, name) for name in TENANTS}
        sides = [side for side, _ in seen]
        if min(sides.count(CONTROL), sides.count(CANDIDATE)) >= LEAST_GROUPS:
            return seed
    raise AssertionError


@pytest.fixture
async def stand(
    tmp_path: Path, valkey: ValkeyProcess
) -> AsyncIterator[tuple[TenantFleet, list[CanaryDesk]]]:
    await valkey.flush()
    names = [tenant(name, share="team") for name in TENANTS]
    config: dict[str, Any] = {
        "groups": ["team"],
        "policy": {"kind": "round_robin"},
        "hot_prefix": {"min_arrivals": 100_000},
        "decisions_kept": 5_000,
    }
    async with tenant_fleet(tmp_path, valkey.url, *names, replicas=3, **config) as made:
        routers = [await made.router(name) for name in ("one", "two")]
        yield made, [CanaryDesk(made.fleet, router) for router in routers]


async def ask(stand: TenantFleet, router: Router, name: str, story: str) -> None:
    headers = {"Authorization": f"Bearer {key_of(name)}"}
    url = f"{router.url}/v1/chat/completions"
    async with stand.fleet.http.post(url, json=conversation(story), headers=headers) as answer:
        assert answer.status == 200, await answer.text()


async def ask_all(stand: TenantFleet, story: str) -> None:
    """Let each tenant ask both routers."""
    for router in stand.fleet.routers:
        for name in TENANTS:
            await ask(stand, router, name, f"{story} of {name}")


async def are_whole(stand: TenantFleet) -> bool:
    """Return whether the last request of each tenant was decided by the control in both routers."""
    records = [
        one
        for router in stand.fleet.routers
        for one in await stand.fleet.decisions(len(TENANTS), router)
    ]
    return {(one["side"], one["policy"]) for one in records} == {(None, "RoundRobin")}


async def seen_sides(stand: TenantFleet) -> dict[str, set[tuple[str | None, str]]]:
    """Return the sides and policies that each tenant's requests had, in both routers."""
    found: dict[str, set[tuple[str | None, str]]] = {}
    for router in stand.fleet.routers:
        for record in await stand.fleet.decisions(1_000, router):
            seen = (record["side"], record["policy"])
            found.setdefault(record["tenant"], set()).add(seen)
    return found


async def test_each_tenant_is_on_one_side_in_both_routers_and_a_bad_candidate_is_rolled_back(
    stand: tuple[TenantFleet, list[CanaryDesk]],
) -> None:
    made, desks = stand
    one, two = desks
    seed = even_seed()
    begun = await one.start(BAD, split="tenant", percent=50, seed=seed, guardrails=RAILS)
    await two.settings.has(begun["version"])

    await ask_all(made, "the first")
    policies = {CONTROL: "RoundRobin", CANDIDATE: "SessionHash"}
    expected = {name: {(side.value, policies[side])} for name, side in sides_of(seed).items()}

    async def is_so() -> bool:
        return await seen_sides(made) == expected

    await until(is_so, "each tenant on the side of the rule")

    for number in range(MOST_ROUNDS):
        for at, name in enumerate(TENANTS):
            await ask(made, made.fleet.routers[(number + at) % 2], name, f"{number} of {name}")
        if (await one.status())["state"] != "running":
            break

    for desk in desks:
        await desk.has_state("none")
        [last, *_] = await desk.settings.get("/history")
        assert last["author"] == "warmroute"
        assert "rolled back: imbalance" in last["reason"]
    await ask_all(made, "the last")
    await until(lambda: are_whole(made), "no side for anybody")


async def test_named_tenants_are_the_candidates_and_nobody_else_is(
    stand: tuple[TenantFleet, list[CanaryDesk]],
) -> None:
    made, (one, two) = stand
    named = list(TENANTS[:2])
    begun = await one.start({"kind": "least_loaded"}, split="tenant", tenants=named)
    await two.settings.has(begun["version"])
    for router in made.fleet.routers:
        for name in TENANTS[:6]:
            await ask(made, router, name, f"one of {name}")
    expected = {name: {"candidate" if name in named else "control"} for name in TENANTS[:6]}

    async def is_so() -> bool:
        found = await seen_sides(made)
        return {name: {side for side, _ in seen} for name, seen in found.items()} == expected

    await until(is_so, "the named ones on the candidate's side")
    verdict = (await one.status())["verdict"]
    measures = {row["name"]: row for row in verdict["measures"]}
    assert measures["errors"]["change"] is None, "two tenants are too few for an interval"
