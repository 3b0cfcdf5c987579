"""Settings that operators change while real routers run: followed, refused, rolled back, kept."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from router.audit_log import verify
from state.client import command_client, run_command
from state.setting_store import DOCUMENT_KEY
from support.fleet import FleetPlan, LocalFleet, until
from support.setting_desk import FOLLOWED_S, SettingDesk, chat, one_more_router
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def fleet_with_two_routers(
    tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyProcess
) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        state_url=valkey.url,
        routers=2,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={"seed": 7, "policy": {"kind": "weighted", "w_prefix": 2.0}},
    )
    async with LocalFleet(folder, plan) as running:
        yield running


@pytest.fixture
def desks(fleet: LocalFleet) -> tuple[SettingDesk, SettingDesk]:
    one, two = fleet.routers
    return SettingDesk(fleet, one), SettingDesk(fleet, two)


async def test_a_change_is_in_force_here_at_once_and_in_every_router_within_a_second(
    fleet: LocalFleet, desks: tuple[SettingDesk, SettingDesk]
) -> None:
    one, two = desks
    before = await one.version()

    status, told = await one.set({"policy": {"w_queue": 0.75}, "hold": {"release_ms": 150}})

    assert (status, told["version"], told["previous"]) == (200, before + 1, before)
    assert {row["key"]: row["after"] for row in told["changes"]} == {
        "policy.w_queue": 0.75,
        "hold.release_ms": 150,
    }
    assert await one.version() == before + 1
    assert await two.has(before + 1) < FOLLOWED_S
    view = await two.get()
    assert view["values"]["policy"] | {"w_queue": 0.75, "w_prefix": 2.0} == view["values"]["policy"]
    assert view["sources"]["policy.w_queue"] == "document"
    assert view["sources"]["policy.w_prefix"] == "file"
    assert (view["author"], view["reason"]) == ("ann@ops", "a test")
    await chat(fleet, fleet.routers[1])
    [record] = await fleet.decisions(1, fleet.routers[1])
    assert record["settings_version"] == before + 1
    shown = await fleet.get(f"{fleet.routers[1].admin_url}/admin/router")
    assert (shown["policy"], shown["settings_version"]) == ("weighted", before + 1)


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"policy": {"w_queue": -1}}, "policy.w_queue"),
        ({"policy": {"kind": "magic"}}, "policy.kind"),
        ({"health": {"fall": 0}}, "health.fall"),
        ({"health": {"fall": 5}, "hold": {"release_ms": "much"}}, "hold.release_ms"),
        ({"admission": {"learned": True}}, "admission.learned"),
        ({"drains": ["no name!"]}, "drains[0]"),
        ({"drains": ["nosuch"]}, "drains: expected one of w0, w1, got 'nosuch'"),
        ({"listen": "127.0.0.1:1"}, "listen"),
        ({}, "patch: expected at least one key"),
    ],
)
async def test_a_wrong_value_is_refused_by_name_and_nothing_of_the_change_counts(
    desks: tuple[SettingDesk, SettingDesk], patch: dict[str, Any], named: str
) -> None:
    one, _ = desks
    before = await one.get()

    status, told = await one.set(patch)

    assert status == 400
    assert named in told["error"]["message"]
    assert await one.get() == before


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/admin/settings", b'"patch": {}, "expected_version": 0, "patch": {}', "patch"),
        (
            "/admin/settings",
            b'"expected_version": 0, "patch": {"hold": {"ageing": 1, "ageing": 2}}',
            "patch.hold.ageing",
        ),
        ("/admin/settings/rollback", b'"version": 0, "version": 0', "version"),
        ("/admin/canary", b'"policy": {"w_queue": 1, "w_queue": 9}', "policy.w_queue"),
        ("/admin/canary/promote", b'"dry_run": true, "dry_run": false', "dry_run"),
        ("/admin/canary/stop", b'"dry_run": true, "dry_run": false', "dry_run"),
        ("/admin/replicas/w0/drain", b'"hand_over": false, "hand_over": false', "hand_over"),
        ("/admin/replicas/w0/undrain", b'"author": "b"', "author"),
    ],
)
async def test_a_key_that_is_there_twice_is_refused_by_name_wherever_changes_are_made(
    desks: tuple[SettingDesk, SettingDesk], path: str, body: bytes, named: str
) -> None:
    """Which of two counts is not the same for all who read it."""
    one, _ = desks
    before = await one.get()
    status, told = await one.post(path, b'{"author": "ann", "reason": "a test", %b}' % body)
    assert (status, told["error"]["param"]) == (400, named)
    assert told["error"]["message"] == f"{named}: expected once, the key is there twice"
    assert await one.get() == before


async def test_a_change_of_an_older_version_is_a_conflict_that_names_the_one_there(
    desks: tuple[SettingDesk, SettingDesk],
) -> None:
    one, two = desks
    version = await one.version()
    results = await asyncio.gather(
        one.set({"policy": {"w_queue": 1.5}}, expected_version=version),
        two.set({"policy": {"w_queue": 1.25}}, expected_version=version),
    )

    assert sorted(status for status, _ in results) == [200, 409]
    lost = next(told for status, told in results if status == 409)
    assert lost["error"]["code"] == "conflict"
    words = f"{version} was expected to be the current version, and {version + 1} is"
    assert lost["error"]["message"].startswith(f"expected_version: {words}")
    await one.has(version + 1)
    await two.has(version + 1)


async def test_a_rollback_is_a_new_version_and_the_history_tells_who_and_why(
    desks: tuple[SettingDesk, SettingDesk],
) -> None:
    one, two = desks
    _, first = await one.set({"policy": {"w_queue": 3.0}, "health": {"fall": 4}})
    await one.set({"policy": {"w_queue": 4.0}, "health": None})

    status, told = await one.rollback(first["version"])
    assert (status, told["version"]) == (200, first["version"] + 2)
    assert {row["key"]: row["after"] for row in told["changes"]} == {
        "policy.w_queue": 3.0,
        "health.fall": 4,
    }
    await two.has(told["version"])
    history = await two.get("/history")
    assert [row["version"] for row in history[:3]] == [told["version"] - n for n in range(3)]
    assert (history[0]["author"], history[0]["reason"]) == ("ann@ops", "back")
    found = await two.get(f"/{told['version']}")
    assert found["document"] == (await two.get(f"/{first['version']}"))["document"]

    status, told = await one.rollback(0)
    assert status == 200
    assert (await one.get())["document"] == {}
    assert (await one.rollback(10**9))[0] == 404


async def test_a_dry_run_tells_the_changes_and_makes_none(
    desks: tuple[SettingDesk, SettingDesk],
) -> None:
    one, _ = desks
    before = await one.get()

    status, told = await one.set({"policy": {"w_queue": 7.0}}, dry_run=True)

    assert (status, told["dry_run"]) == (200, True)
    assert [row["key"] for row in told["changes"]] == ["policy.w_queue"]
    assert await one.get() == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 421),
        ({"Host": "evil.example"}, 421),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
async def test_a_page_of_another_origin_changes_nothing(
    desks: tuple[SettingDesk, SettingDesk], headers: dict[str, str], status: int
) -> None:
    one, _ = desks
    before = await one.get()
    body: dict[str, Any] = {
        "patch": {"policy": {"w_queue": 9.0}},
        "author": "eve",
        "reason": "evil",
    }
    body |= {"expected_version": before["version"]}

    answers = [
        await one.post(path, body, headers)
        for path in ("/admin/settings", "/admin/settings/rollback", "/admin/replicas/w0/drain")
    ]

    assert [answer for answer, _ in answers] == [status] * 3
    assert await one.get() == before


async def test_a_page_whose_name_was_made_to_lead_here_reads_nothing(fleet: LocalFleet) -> None:
    """DNS rebinding: to the browser it is of the listener's origin, whatever the path."""
    for path in ("/", "/dashboard", "/admin/settings", "/admin/events", "/metrics", "/livez",
                 "/openapi.json", "/debug/decisions"):  # fmt: skip
        url = f"{fleet.routers[0].admin_url}{path}"
        headers = {"Host": "evil.example:80", "Sec-Fetch-Site": "same-origin"}
        async with fleet.http.get(url, headers=headers, allow_redirects=False) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (421, "unknown_host")


async def test_the_listeners_own_page_may_change_settings(
    fleet: LocalFleet, desks: tuple[SettingDesk, SettingDesk]
) -> None:
    one, _ = desks
    headers = {"Origin": fleet.routers[0].admin_url, "Sec-Fetch-Site": "same-origin"}
    body: dict[str, Any] = {
        "patch": {"policy": {"w_queue": 2.5}},
        "author": "page",
        "reason": "form",
    }
    body |= {"expected_version": await one.version(), "dry_run": True}

    assert (await one.post("/admin/settings", body, headers))[0] == 200


async def test_a_drained_replica_gets_nothing_new_ends_what_it_has_and_comes_back(
    fleet: LocalFleet, desks: tuple[SettingDesk, SettingDesk]
) -> None:
    one, two = desks
    router = fleet.routers[1]
    who = {"author": "ann", "reason": "new driver"}
    status, told = await one.post("/admin/replicas/w0/drain", who)
    assert (status, [row["key"] for row in told["changes"]]) == (200, ["drains"])
    assert await two.has(told["version"]) < FOLLOWED_S
    assert (await fleet.seen(router))["w0"]["draining"]

    statuses = [await chat(fleet, router, f"{number} apples") for number in range(8)]

    assert statuses == [200] * 8
    chosen = [
        record["attempts"][-1]["decision"]["replica"] for record in await fleet.decisions(8, router)
    ]
    assert set(chosen) == {"w1"}
    status, told = await two.post("/admin/replicas/w0/undrain", who)
    assert (status, (await two.get())["values"]["drains"]) == (200, [])
    await one.has(told["version"])
    await fleet.all_up(router)
    assert (await one.post("/admin/replicas/nobody/drain", who))[0] == 404


async def test_what_a_drained_replica_answers_goes_on_to_its_end(
    fleet: LocalFleet, desks: tuple[SettingDesk, SettingDesk]
) -> None:
    one, two = desks
    router = fleet.routers[0]
    long = asyncio.create_task(chat(fleet, router, "a long answer", 6_000))

    async def is_running() -> bool:
        return await fleet.inflight(router) > 0

    await until(is_running, "a request in flight")
    seen = await fleet.seen(router)
    busy = next(name for name, shown in seen.items() if shown["inflight"])
    who = {"author": "ann", "reason": "now"}
    _, told = await one.post(f"/admin/replicas/{busy}/drain", who)

    assert await chat(fleet, router, "meanwhile") == 200
    [record] = await fleet.decisions(1, router)
    assert record["attempts"][-1]["decision"]["replica"] != busy
    assert not long.done(), "it was to be in flight all the time"
    assert await long == 200
    _, told = await one.post(f"/admin/replicas/{busy}/undrain", who)
    await two.has(told["version"])


async def test_a_document_that_is_no_good_is_refused_and_shown_until_it_is_rolled_back(
    fleet: LocalFleet, desks: tuple[SettingDesk, SettingDesk], valkey: ValkeyProcess
) -> None:
    """C72."""
    one, two = desks
    version = await one.version()
    bad: dict[str, Any] = {"version": version + 1, "settings": {"policy": {"kind": "of next year"}}}
    bad |= {"author": "new", "reason": "r", "unix_s": 1.0, "previous": version}
    client = command_client(valkey.settings)
    try:
        await run_command(client, "SET", DOCUMENT_KEY, json.dumps(bad), "PX", 600_000)
    finally:
        await client.aclose()

    async def is_refused() -> bool:
        url = fleet.routers[1].admin_url
        return (await fleet.gauges(url))["warmroute_settings_refused"] == 1.0

    await until(is_refused, "a refused document")
    await one.has(version)
    view = await two.get()
    assert (view["version"], view["stored_version"]) == (version, version + 1)
    assert "policy.kind" in view["fault"]
    assert (await two.set({"policy": {"w_queue": 1.0}}))[0] == 409
    assert await chat(fleet, fleet.routers[1]) == 200
    status, told = await two.rollback(version)
    assert (status, told["version"]) == (200, version + 2)
    assert await one.has(version + 2) < FOLLOWED_S
    assert (await two.get())["fault"] == ""


async def test_settings_outlive_a_flushed_store_and_a_start_without_it(
    fleet: LocalFleet,
    desks: tuple[SettingDesk, SettingDesk],
    valkey: ValkeyProcess,
    tmp_path: Path,
) -> None:
    _, two = desks
    kept, audit = tmp_path / "settings.json", tmp_path / "audit.jsonl"
    async with one_more_router(fleet, settings_file=str(kept), audit_log=str(audit)) as keeper:
        desk = SettingDesk(fleet, keeper)
        _, told = await desk.set({"policy": {"w_queue": 0.5}})
        version = told["version"]
        await two.has(version)
        await until(_is_kept(kept, version), "the file")
    assert verify(audit).faults == ()
    assert b'"settings.set"' in audit.read_bytes()
    assert b'"actor":"ann@ops"' in audit.read_bytes()

    await valkey.flush()

    async with one_more_router(fleet) as fresh:
        await SettingDesk(fleet, fresh).has(version)
    assert kept.stat().st_mode & 0o777 == 0o600

    away = {"redis": f"unix://{tmp_path}/away.sock"}
    async with one_more_router(fleet, settings_file=str(kept), state=away) as lonely:
        view = await SettingDesk(fleet, lonely).get()
        assert (view["version"], view["values"]["policy"]["w_queue"]) == (version, 0.5)
        status, told = await SettingDesk(fleet, lonely).set({"policy": {"w_queue": 0.25}})
        assert (status, told["error"]["code"]) == (503, "state_unavailable")
    async with one_more_router(fleet, state=away) as bare:
        assert (await SettingDesk(fleet, bare).get())["version"] == 0


def _is_kept(path: Path, version: int) -> Callable[[], Awaitable[bool]]:
    def is_there() -> bool:
        return path.exists() and f'"in_force": {version},' in path.read_text()

    async def is_so() -> bool:
        return is_there()

    return is_so


async def test_settings_stay_in_force_while_the_store_is_gone_and_after_it_is_back_empty(
    fleet: LocalFleet, desks: tuple[SettingDesk, SettingDesk], valkey: ValkeyProcess
) -> None:
    one, two = desks
    _, told = await one.set({"policy": {"w_queue": 0.125}})
    await two.has(told["version"])
    valkey.kill()
    try:
        assert await chat(fleet, fleet.routers[0]) == 200
        view = await two.get()
        assert (view["version"], view["values"]["policy"]["w_queue"]) == (told["version"], 0.125)
    finally:
        valkey.start()

    async with one_more_router(fleet) as fresh:
        await SettingDesk(fleet, fresh).has(told["version"])
