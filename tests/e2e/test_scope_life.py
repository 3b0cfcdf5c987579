"""S-10: what a tenant had cached is out of reach at once on every router, and stays so."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from router.audit_log import verify
from state.client import command_client, run_command
from support.fleet import MODEL, until
from support.slow_link import SlowLink
from support.tenancy import TEXT, TenantFleet, tenant, tenant_fleet
from warmroute.cli import main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.fleet import Router
    from support.tenancy import Got
    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

KNOWN_S = 2.0
"""So soon every router knows of a deletion; machines that run tests are given more."""
PATIENCE_S = 60.0
TOKEN_BYTES = 100
"""What a token takes, as the configuration has it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(
    tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyProcess
) -> AsyncIterator[TenantFleet]:
    folder = tmp_path_factory.mktemp("scopes")
    tenants = ("a", "b", tenant("c", share="blue"), tenant("d", share="blue"))
    billing = {"interval_s": 0.2, "kv_bytes_per_token": {MODEL: TOKEN_BYTES}}
    async with tenant_fleet(
        folder, valkey.url, *tenants, groups=["blue"], billing=billing
    ) as running:
        for name in ("r1", "r2"):
            await running.router(name)
        yield running


async def warm(stand: TenantFleet, router: Router, name: str, text: str = TEXT) -> Got:
    """Ask until the router predicts what the engine has."""
    got: list[Got] = []

    async def is_warm() -> bool:
        got.append(await stand.ask(router, name, text))
        return 0 < got[-1].predicted_tokens == got[-1].cached_tokens // 64 * 64

    await until(is_warm, f"{name} is warm", PATIENCE_S)
    return got[-1]


async def residency_keys(valkey: ValkeyProcess) -> set[bytes]:
    client = command_client(valkey.settings)
    try:
        return set(await run_command(client, "KEYS", "wr:1:*:blocks:*"))
    finally:
        await client.aclose()


async def test_a_deletion_leaves_nothing_to_hit_and_nothing_in_the_index(
    stand: TenantFleet, valkey: ValkeyProcess
) -> None:
    """S-10, S-12: a miss on both routers, no key left, other tenants untouched, written down."""
    first, second = stand.fleet.routers[:2]
    for router in (first, second):
        await warm(stand, router, "b", "another tenant's " + TEXT)
    kept = await residency_keys(valkey)
    for router in (first, second):
        await warm(stand, router, "a")
    held = (await stand.fleet.seen(second))["w0"]["resident_blocks"]
    doomed = await residency_keys(valkey) - kept
    assert len(doomed) == 1
    status, told = await stand.call("DELETE", first, "/admin/scopes/tenant:a")
    assert (status, told["result"]) == (200, "done")
    assert told["index"]["keys"] == 1
    assert told["index"]["blocks"] > 0
    assert told["local"]["roots"] > 0
    assert await residency_keys(valkey) == kept

    async def has_heard() -> bool:
        return bool(await stand.epoch(second, "tenant:a") == told["epoch"])

    await until(has_heard, "the other router knows", PATIENCE_S)

    async def has_forgotten() -> bool:
        left = (await stand.fleet.seen(second))["w0"]["resident_blocks"]
        return bool(int(left) == held - told["index"]["blocks"])

    await until(has_forgotten, "no local entry is left", PATIENCE_S)
    again = await stand.ask(second, "a")
    assert (again.predicted_tokens, again.cached_tokens) == (0, 0)
    assert (await stand.ask(second, "b", "another tenant's " + TEXT)).cached_tokens > 0
    records = [json.loads(line) for line in stand.audit("r1").read_text().splitlines()]
    begun, done = records[-2:]
    assert [one["result"] for one in (begun, done)] == ["begun", "done"]
    assert done["scope"] == "tenant:a"
    assert done["action"] == "scope.delete"
    assert done["epoch"] == told["epoch"] > begun["epoch"]
    assert done["counts"]["index_blocks"] == told["index"]["blocks"]
    assert verify(stand.audit("r1")).faults == ()
    await warm(stand, second, "a")


async def test_a_router_that_was_cut_off_knows_of_a_deletion_before_its_view_is_live(
    stand: TenantFleet, valkey: ValkeyProcess
) -> None:
    """S-10: three routers, one without the store: it never hits again once it is back."""
    first = stand.fleet.routers[0]
    async with SlowLink(valkey.socket_path) as link:
        cut_off = await stand.router("cut", state={"redis": link.url})
        await warm(stand, cut_off, "a")
        link.target = valkey.socket_path.with_name("nobody")
        link.cut()

        async def is_away() -> bool:
            told = await stand.fleet.get(f"{cut_off.url}/readyz")
            return bool(told["rung"] != "live")

        await until(is_away, "the third router is cut off", PATIENCE_S)
        status, told = await stand.call("DELETE", first, "/admin/scopes/tenant:a")
        assert (status, told["is_shared"]) == (200, True)
        assert await stand.epoch(cut_off, "tenant:a") < told["epoch"]
        link.target = valkey.socket_path

        async def is_back() -> bool:
            state = await stand.fleet.get(f"{cut_off.url}/readyz")
            if state["rung"] != "live":
                return False
            assert await stand.epoch(cut_off, "tenant:a") == told["epoch"]
            return True

        await until(is_back, "the third router is back", PATIENCE_S)
        again = await stand.ask(cut_off, "a")
        assert (again.predicted_tokens, again.cached_tokens) == (0, 0)
        stand.fleet.processes.stop(cut_off.child)
        stand.fleet.routers.remove(cut_off)


async def test_a_deletion_without_the_store_counts_here_and_reaches_the_others_later(
    stand: TenantFleet, valkey: ValkeyProcess
) -> None:
    """S-10: answered with 202, and never taken back by what the store still has."""
    first, second = stand.fleet.routers[:2]
    await warm(stand, first, "a")
    valkey.freeze()
    try:
        status, told = await stand.call("DELETE", first, "/admin/scopes/tenant:a")
        assert (status, told["result"], told["is_shared"]) == (202, "pending", False)
        assert told["index"] is None
        assert (await stand.ask(first, "a", TEXT)).cached_tokens == 0
    finally:
        valkey.thaw()

    async def has_heard() -> bool:
        return bool(await stand.epoch(second, "tenant:a") >= told["epoch"])

    await until(has_heard, "the other router knows", PATIENCE_S)
    assert await stand.epoch(first, "tenant:a") == await stand.epoch(second, "tenant:a")


async def test_neither_a_flushed_store_nor_a_restart_brings_a_deleted_epoch_back(
    stand: TenantFleet, valkey: ValkeyProcess
) -> None:
    """S-10: the highest counter wins; a router that begins after the loss has it from its file."""
    first, second = stand.fleet.routers[:2]
    _, told = await stand.call("DELETE", first, "/admin/scopes/tenant:a")
    await valkey.flush()
    third = await stand.router("third")

    async def is_agreed() -> bool:
        known = {await stand.epoch(router, "tenant:a") for router in (first, second, third)}
        return bool(known == {told["epoch"]})

    await until(is_agreed, "all routers know the newest epoch", PATIENCE_S)
    assert await valkey.keys_without_ttl() == []
    stand.fleet.processes.stop(third.child)
    stand.fleet.routers.remove(third)
    # Nobody is left but the file, and the store is another one.
    assert stand.epochs("third").stat().st_mode & 0o777 == 0o600
    alone = await stand.fleet.start_router(
        **stand.config, state={}, tenants_state_file=str(stand.epochs("third"))
    )
    assert await stand.epoch(alone, "tenant:a") == told["epoch"]
    stand.fleet.processes.stop(alone.child)


async def test_two_epochs_live_after_a_rotation_and_neither_shares_with_another_scope(
    stand: TenantFleet, valkey: ValkeyProcess
) -> None:
    """S-03: a router on the epoch before goes on hitting; the next deletion ends both."""
    first, second = stand.fleet.routers[:2]
    await asyncio.gather(warm(stand, first, "c"), warm(stand, first, "b"))
    async with SlowLink(valkey.socket_path) as link:
        slow = await stand.router("slow", state={"redis": link.url})
        await warm(stand, slow, "c")
        link.delay_s = lambda: 0.4
        status, told = await stand.call("POST", first, "/admin/scopes/group:blue/rotate")
        assert (status, told["result"], told["index"]["keys"]) == (200, "done", 0)
        old = await stand.ask(slow, "d")
        new = await stand.ask(first, "c")
        if await stand.epoch(slow, "group:blue") < told["epoch"]:
            assert old.cached_tokens > 0, "the epoch before still hits"
        assert new.cached_tokens == 0
        link.delay_s = float
        await warm(stand, first, "d")
        await warm(stand, slow, "c")
        for name in ("a", "b"):
            assert (await stand.ask(first, name, "c" + TEXT)).cached_tokens == 0
        stand.fleet.processes.stop(slow.child)
        stand.fleet.routers.remove(slow)
    _, told = await stand.call("DELETE", second, "/admin/scopes/group%3Ablue")
    assert told["index"]["keys"] == 2, "what the epoch before left was there until now"
    assert (await stand.ask(second, "d")).cached_tokens == 0


async def test_a_scope_is_shown_with_the_name_that_the_engine_has_for_it(
    stand: TenantFleet,
) -> None:
    """Whoever guarantees it pages in a bundled worker needs that name, of the present epoch."""
    first, [replica] = stand.fleet.routers[0], stand.fleet.replicas
    await stand.call("DELETE", first, "/admin/scopes/tenant:a")
    await warm(stand, first, "a", "name " + TEXT)
    _, scopes = await stand.call("GET", first, "/admin/scopes")
    [named] = [one["engine_tenant"] for one in scopes if one["scope"] == "tenant:a"]
    async with stand.fleet.http.get(f"{replica.url}/debug/kv") as answer:
        assert f'"{named}"' in await answer.text()


async def test_engines_forget_too_where_that_is_asked_for(stand: TenantFleet) -> None:
    """S-10: the fan-out goes to every engine; who cannot do it is named."""
    first = stand.fleet.routers[0]
    await warm(stand, first, "b", "reset " + TEXT)
    path = "/admin/scopes/tenant:a?reset_engines=true"
    status, told = await stand.call("DELETE", first, path)
    assert (status, told["engines"]) == (200, {"reset": 1, "failed": {}})
    assert (await stand.ask(first, "b", "reset " + TEXT)).cached_tokens == 0


async def test_wrong_requests_change_nothing_and_say_what_was_expected(stand: TenantFleet) -> None:
    """Neither an unknown scope nor another parameter; clients have no such path at all."""
    first = stand.fleet.routers[0]
    before = await stand.call("GET", first, "/admin/scopes")
    for method, path, status, param in (
        ("DELETE", "/admin/scopes/tenant:nobody", 404, "scope"),
        ("DELETE", "/admin/scopes/tenant:a/..%2f", 404, "scope"),
        ("DELETE", "/admin/scopes/tenant:a?reset_engines=1", 400, "reset_engines"),
        ("DELETE", "/admin/scopes/tenant:a?force=true", 400, "reset_engines"),
        ("POST", "/admin/scopes/tenant:a", 405, None),
        ("DELETE", "/admin/scopes/tenant:a/rotate", 405, None),
    ):
        answered, told = await stand.call(method, first, path)
        assert (answered, told["error"]["param"]) == (status, param), path
    async with stand.fleet.http.delete(f"{first.url}/admin/scopes/tenant:a") as answer:
        assert answer.status == 404
    for origin in ("http://example.com", "null"):  # a page of the web in an operator's browser
        url, headers = f"{first.admin_url}/admin/scopes/tenant:a/rotate", {"Origin": origin}
        async with stand.fleet.http.post(url, headers=headers) as answer:
            assert answer.status == 403
    assert await stand.call("GET", first, "/admin/scopes") == before


async def test_without_a_file_nothing_can_be_renewed(stand: TenantFleet) -> None:
    """A restart would bring the deleted epoch back: the answer names the key."""
    lone = await stand.fleet.start_router(**stand.config, state={})
    status, told = await stand.call("DELETE", lone, "/admin/scopes/tenant:a")
    assert (status, told["error"]["param"]) == (409, "tenants_state_file")
    stand.fleet.processes.stop(lone.child)


async def test_the_bill_has_what_tenants_got_and_what_their_scopes_hold(
    stand: TenantFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests are a router's own, what is held is the fleet's: counted where it is stored."""
    first, second = stand.fleet.routers[:2]
    await stand.call("DELETE", first, "/admin/scopes/tenant:b")
    (before, before_two) = [await bill(stand, router) for router in (first, second)]
    cold = await stand.ask(first, "b", "bill " + TEXT)
    hot = await warm(stand, first, "b", "bill " + TEXT)
    after = await bill(stand, first)
    use, was = after["tenants"]["b"], before["tenants"]["b"]
    requests = use["requests"] - was["requests"]
    assert requests >= 2
    assert use["hits"] - was["hits"] == requests - 1
    assert use["saved_tokens"] - was["saved_tokens"] == (requests - 1) * hot.cached_tokens
    assert use["prompt_tokens"] - was["prompt_tokens"] == requests * cold.prompt_tokens
    assert after["tenants"]["a"] == before["tenants"]["a"]
    assert (await bill(stand, second))["tenants"] == before_two["tenants"]
    held = hot.prompt_tokens // 64 * 64

    async def is_counted() -> bool:
        scopes = [(await bill(stand, router))["scopes"] for router in (first, second)]
        return all(one["tenant:b"]["held_tokens"] == held for one in scopes)

    await until(is_counted, "what b holds is counted", PATIENCE_S)
    told = (await bill(stand, first))["scopes"]["tenant:b"]
    assert told["held_bytes"] == held * TOKEN_BYTES

    async def has_grown() -> bool:
        later = (await bill(stand, first))["scopes"]["tenant:b"]
        assert later["held_byte_seconds"] == pytest.approx(
            later["held_token_seconds"] * TOKEN_BYTES, rel=1e-6
        )
        return bool(later["held_token_seconds"] > told["held_token_seconds"])

    await until(has_grown, "the bill grows with time", PATIENCE_S)
    flags = [flag for router in (first, second) for flag in ("--admin", router.admin_url)]
    assert await asyncio.to_thread(main, ["tenants", "report", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    [row] = [one for one in report["tenants"] if one["tenant"] == "b"]
    ours = [(await bill(stand, router))["tenants"]["b"] for router in (first, second)]
    assert row["requests"] == sum(one["requests"] for one in ours)
    assert await asyncio.to_thread(main, ["tenants", "report", *flags]) == 0
    printed = capsys.readouterr().out
    assert f"{row['saved_tokens']:,}" in printed
    assert f"{held:,}" in printed
    async with stand.fleet.http.get(f"{first.admin_url}/metrics") as answer:
        text = await answer.text()
    rows = [line for line in text.splitlines() if line.startswith("warmroute_cache_hits_total")]
    assert sorted(rows)[1].startswith('warmroute_cache_hits_total{tenant="b"}')
    assert len(rows) == 4
    assert f'warmroute_held_tokens{{scope="tenant:b"}} {float(held)}' in text


async def bill(stand: TenantFleet, router: Router) -> dict[str, Any]:
    """Return one router's bill, its rows by name."""
    status, told = await stand.call("GET", router, "/admin/billing")
    assert status == 200
    return {
        "tenants": {one["tenant"]: one for one in told["tenants"]},
        "scopes": {one["scope"]: one for one in told["scopes"]},
    }
