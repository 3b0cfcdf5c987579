"""A canary on real routers, a real store and a real fleet: judged, promoted, rolled back, kept."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import pytest_asyncio

from router.canary_setting import CanarySettings
from router.split import Splitter
from support.canary_desk import CanaryDesk, conversation, talk
from support.fleet import FleetPlan, LocalFleet, until
from support.setting_desk import one_more_router
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.valkey import ValkeyProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

CONTROL: Final = {"kind": "round_robin"}
ALL_TO_ONE: Final = {"kind": "session_hash"}
"""By the first blocks of the prompt, whatever the load: all prompts of this test begin alike."""
ONLY_IMBALANCE: Final[dict[str, Any]] = {
    "imbalance": {"limit": 1.5, "min_requests": 50},
    "ttft_mean": {"enabled": False},
    "ttft_p95": {"enabled": False},
    "token_hits": {"enabled": False},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def fleet_with_two_routers(
    tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyProcess
) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        state_url=valkey.url,
        replicas=3,
        routers=2,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={
            "seed": 7,
            "policy": CONTROL,
            "hot_prefix": {"min_arrivals": 100_000},
            "decisions_kept": 5_000,
        },
    )
    async with LocalFleet(folder, plan) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def desks(fleet: LocalFleet) -> AsyncIterator[tuple[CanaryDesk, CanaryDesk]]:
    one, two = (CanaryDesk(fleet, router) for router in fleet.routers)
    yield one, two
    if (await one.status())["state"] == "running":  # what a test that failed left
        await one.post("stop", "the test has ended")
        await two.has_state("none")


async def test_a_bad_candidate_is_rolled_back_by_itself_on_both_routers(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    one, two = desks
    begun = await one.start(ALL_TO_ONE, percent=50, guardrails=ONLY_IMBALANCE)
    await two.settings.has(begun["version"])

    await talk(fleet, until_over=one)

    for desk in desks:
        await desk.has_state("none")
        history = await desk.settings.get("/history")
        assert history[0]["author"] == "warmroute"
        assert "rolled back: imbalance" in history[0]["reason"]
        measures = {row["name"]: row for row in history[0]["verdict"]["measures"]}
        assert measures["imbalance"]["is_broken"]
        assert measures["imbalance"]["low"] > 1.5
        assert (await desk.settings.get())["values"]["policy"]["kind"] == "round_robin"
    await talk(fleet, 6)
    for router in fleet.routers:
        assert {one["side"] for one in await fleet.decisions(3, router)} == {None}
    records = [one for router in fleet.routers for one in await fleet.decisions(1_000, router)]
    policies = {(record["side"], record["policy"]) for record in records}
    assert policies == {
        ("control", "RoundRobin"),
        ("candidate", "SessionHash"),
        (None, "RoundRobin"),
    }


async def test_a_good_candidate_gets_a_verdict_and_is_promoted(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    """Turns among replicas that are alike are more even than a draw: it can only be better."""
    one, two = desks
    status, told = await one.settings.set({"policy": {"kind": "random"}})
    assert status == 200, told
    await two.settings.has(told["version"])
    rails = {name: {"min_requests": 50} for name in ("ttft_mean", "errors", "imbalance")}
    begun = await one.start({"kind": "round_robin"}, percent=50, guardrails=rails, seed=11)
    await two.settings.has(begun["version"])
    await talk(fleet, 160)

    async def has_all() -> bool:
        known = [await desk.has_counted(160) for desk in desks]
        return all(known) and (await one.status())["counted_by"] == 2

    await until(has_all, "figures of both routers")
    view = await one.status()
    assert view["state"] == "running"
    measures = {row["name"]: row for row in view["verdict"]["measures"]}
    assert view["verdict"]["word"] != "worse", measures
    assert measures["errors"]["change"] == 0.0
    assert measures["ttft_mean"]["low"] < measures["ttft_mean"]["change"]
    status, told = await two.post("promote", "as good")
    assert status == 200
    await one.settings.has(told["version"])
    settings = await one.settings.get()
    assert settings["document"] == {"policy": {"kind": "round_robin"}}
    last = (await one.status())["last"]
    assert (last["reason"], last["verdict"]["candidate_requests"] > 50) == ("as good", True)
    await one.settings.rollback(0)
    await two.settings.has(told["version"] + 1)


async def test_what_all_begins_alike_is_said_to_be_and_is_promoted_by_force_alone(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    """As operators see it: on the command line, with its exit codes."""
    one, two = desks
    why = ("--reason", "a try")
    code, told = await one.run("start", "--policy", "expected_ttft", "--percent", "30", *why)
    assert code == 0, told
    assert "canary.policy.kind: - -> " in told
    assert re.search(r"canary\.started_unix_s: - -> [\d-]{10} [\d:]{8} UTC\n", told), told
    assert not [line for line in told.splitlines() if line.endswith(": - -> -")]
    await two.settings.has((await one.settings.get())["version"])
    for router in (fleet.routers[0], fleet.routers[1]) * 20:
        body = conversation("one story")
        async with fleet.http.post(f"{router.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
    await until(lambda: one.has_counted(40), "all of them are counted")

    code, told = await one.run("status")
    assert (code, "all 40 requests fell on one side, the " in told) == (0, True), told
    assert "they begin in few ways (docs/canary.md#who-gets-the-candidate)" in told
    assert (await one.status())["note"] in told
    code, told = await one.run("promote", *why)
    assert (code, 'the verdict is "too little to tell" (' in told) == (2, True), told
    status, refusal = await one.post("promote", "a try", dry_run=True)
    assert (status, refusal["error"]["code"]) == (409, "canary_unproven"), refusal
    assert (await one.settings.get())["values"]["policy"]["kind"] == "round_robin"

    code, told = await one.run("promote", "--force", *why)
    assert (code, told.startswith("too little to tell: ")) == (0, True), told
    assert 'policy.kind: "round_robin" -> "expected_ttft"' in told
    assert not [line for line in told.splitlines() if line.endswith(": - -> -")]
    for action in ("promote", "stop"):
        code, told = await one.run(action, *why)
        assert (code, told) == (2, "warmroute canary: no canary runs\n")
    _, back = await one.settings.rollback(0)
    await two.settings.has(back["version"])


async def test_a_conversation_is_on_one_side_in_all_turns_and_in_both_routers(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    one, two = desks
    begun = await one.start({"kind": "least_loaded"}, percent=30, seed=12)
    await two.settings.has(begun["version"])
    sides: dict[str, set[str]] = {}
    for number in range(24):
        for turns, router in ((1, fleet.routers[0]), (2, fleet.routers[1]), (3, fleet.routers[0])):
            body = conversation(f"story {number}", turns)
            async with fleet.http.post(f"{router.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
            [record] = await fleet.decisions(1, router)
            sides.setdefault(f"story {number}", set()).add(record["side"])

    assert all(len(seen) == 1 for seen in sides.values()), sides
    assert {"control", "candidate"} == set.union(*sides.values())
    view = await one.status()
    settings = msgspec.convert(view["settings"], CanarySettings)
    assert Splitter(settings).assign(None, None) is None
    assert (await one.post("stop", "enough"))[0] == 200
    await two.has_state("none")


async def test_without_a_store_each_router_judges_by_itself_and_the_canary_ends_everywhere(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk], valkey: ValkeyProcess
) -> None:
    one, two = desks
    begun = await one.start(ALL_TO_ONE, percent=50, guardrails=ONLY_IMBALANCE)
    await two.settings.has(begun["version"])
    valkey.kill()
    try:
        await talk(fleet, until_over=one, routers=fleet.routers[:1])
        view = await one.status()
        assert view["state"] == "ending", "nobody else knows yet"
        assert view["fault"]
        assert (await two.status())["state"] == "running", "it has seen nothing"
        await talk(fleet, 5, routers=fleet.routers[:1])
        assert {r["side"] for r in await fleet.decisions(5, fleet.routers[0])} == {None}
    finally:
        valkey.start()

    for desk in desks:
        await desk.has_state("none")
        assert "rolled back" in (await desk.settings.get("/history"))[0]["reason"]


async def test_a_router_that_starts_anew_goes_on_with_what_was_counted(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    one, two = desks
    begun = await one.start({"kind": "least_loaded"}, percent=50, seed=3)
    await two.settings.has(begun["version"])
    async with one_more_router(fleet) as third:
        desk = CanaryDesk(fleet, third)
        await desk.settings.has(begun["version"])
        await fleet.all_up(third)
        await talk(fleet, 30, routers=[third])
        await until(lambda: one.has_counted(30), "what the third one counted")
    async with one_more_router(fleet) as fourth:
        desk = CanaryDesk(fleet, fourth)
        await desk.settings.has(begun["version"])
        await until(lambda: desk.has_counted(30), "what was counted before")
    assert (await two.post("stop", "seen"))[0] == 200
    await one.has_state("none")


async def test_a_canary_whose_time_is_over_waits_and_gets_nothing(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    one, two = desks
    await one.start({"kind": "least_loaded"}, percent=50, duration_s=10)
    for desk in desks:
        await desk.has_state("waiting")
    await talk(fleet, 6)
    for router in fleet.routers:
        assert {record["side"] for record in await fleet.decisions(3, router)} == {None}
    assert "ended after 10 s" in (await one.status())["last"]["reason"]
    assert (await two.post("stop", "seen"))[0] == 200
    await one.has_state("none")


async def test_what_cannot_be_is_refused_by_name(
    fleet: LocalFleet, desks: tuple[CanaryDesk, CanaryDesk]
) -> None:
    one, _ = desks
    for wrong, named in (
        ({"percent": 60}, "percent"),
        ({"percent": 10, "split": "tenant"}, "canary.split"),
        ({}, "canary.percent"),
        ({"percent": 10, "policy": {"kind": "preble"}}, "canary.policy.kind"),
        ({"percent": 10, "guardrails": {"errors": {"limit": 3}}}, "canary.guardrails.errors.limit"),
        ({"percent": 10, "duration_s": 1}, "duration_s"),
        ({"percent": 10, "policy": {}}, "policy: expected what differs from the one in force"),
    ):
        status, told = await one.try_start({"policy": {"kind": "least_loaded"}, **wrong})
        assert (status, named in told["error"]["message"]) == (400, True), told
    assert (await one.post("promote", "none"))[0] == 404
    status, told = await one.settings.set({"canary": {"percent": 3}})
    assert (status, told["error"]["param"]) == (400, "canary")
    await one.start({"kind": "least_loaded"}, percent=10)
    status, told = await one.try_start({"policy": {"kind": "least_loaded"}, "percent": 10})
    assert (status, told["error"]["code"]) == (409, "conflict")
    # A rollback leaves it out.
    version = (await one.settings.get())["version"]
    assert (await one.post("stop", "enough"))[0] == 200
    assert (await one.settings.rollback(version))[0] == 200
    await one.has_state("none")
    await asyncio.sleep(0)
    assert await fleet.inflight() == 0
