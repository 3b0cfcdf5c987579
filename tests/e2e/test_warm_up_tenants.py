"""Warm-up where there are tenants: whose prefixes are kept, under which salt, and for how long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import zstandard

from support.fleet import FleetPlan, until
from support.tenancy import key_of, tenant, write_secret
from support.warm import WarmFleet, tokens_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.valkey import ValkeyProcess

PREFIX = 1_024


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


async def recorded(fleet: WarmFleet) -> list[dict[str, Any]]:
    """Return the lines of the router's recording."""
    async with fleet.http.get(f"{fleet.router.admin_url}/admin/recording") as answer:
        frame = await answer.read()
    lines = zstandard.ZstdDecompressor().decompress(frame, 1 << 24).splitlines()
    return [json.loads(line) for line in lines]


async def test_a_tenant_is_warmed_under_its_own_salt_if_it_may_be_kept_until_it_is_deleted(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    """Both tenants bring the same text: one is kept, the other one is not, and meets nothing."""
    secret = str(write_secret(tmp_path))
    plan = FleetPlan(
        state_url=valkey.url,
        replicas=0,
        routers=0,
        sidecar_flags=("--deployment-key-file", secret),
        config={
            "deployment_key_file": secret,
            "tenants_state_file": str(tmp_path / "epochs.json"),
            "tenants": [tenant("kept", warm_up=True), tenant("other")],
        },
    )
    async with WarmFleet(tmp_path, plan) as fleet:
        await fleet.start_engines(1)
        await fleet.add_router()
        text = tokens_of("system", PREFIX)
        for name in ("other", "kept"):
            await fleet.make_hot(text, headers=key(name))
        await fleet.kept(1)
        assert (await fleet.warm_ups())["kept_prefixes"] == 1
        billed = await fleet.get(f"{fleet.router.admin_url}/admin/billing")

        await fleet.restart(0)
        job = await fleet.job("warm_up", "w0")

        assert (job["end"], job["done"], job["spent_tokens"]) == ("done", 1, PREFIX)
        now = await fleet.get(f"{fleet.router.admin_url}/admin/billing")
        requests = {one["tenant"]: one["requests"] for one in now["tenants"]}
        assert requests == {one["tenant"]: one["requests"] for one in billed["tenants"]}
        own = [row for row in await recorded(fleet) if row["reason"] == "warm_up"]
        assert [row["tenant"] for row in own] == ["kept"] * len(own)
        assert sum(row["prompt_tokens"] - row["cached_tokens"] for row in own) == PREFIX
        mine = await fleet.ask(text + tokens_of("first", 70), headers=key("kept"))
        assert (mine.cached_tokens, mine.predicted_tokens) == (PREFIX, PREFIX)
        theirs = await fleet.ask(text + tokens_of("first", 70), headers=key("other"))
        assert (theirs.cached_tokens, theirs.predicted_tokens) == (0, 0)

        url = f"{fleet.router.admin_url}/admin/scopes/tenant:kept"
        async with fleet.http.delete(url) as answer:
            assert answer.status == 200
        told = await fleet.warm_ups()
        assert (told["kept_prefixes"], told["kept_bytes"]) == (0, 0)
        await fleet.restart(0)

        async def is_over() -> bool:
            rows = (await fleet.warm_ups())["jobs"]
            return [(row["end"], row["planned"]) for row in rows] == [("done", 0), ("done", 1)]

        await until(is_over, "a second warm-up that has nothing to do")
        again = await fleet.ask(text + tokens_of("again", 70), headers=key("kept"))
        assert (again.cached_tokens, again.predicted_tokens) == (0, 0)
