"""A canary and a shadow under ``processes: 2``: operators are told of all, whoever leads."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import pytest_asyncio

from prompt.opening import opening_of
from router.burst import FAILED, LAST
from router.canary_setting import CanarySettings
from router.split import CANDIDATE, CONTROL, Side, Splitter
from support.canary_desk import CanaryDesk
from support.fleet import until
from support.raw import RawClient, sized
from support.stage import ANSWER, Actor, Stage, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from support.raw import Received, Talk
    from support.valkey import ValkeyProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROCESSES: Final = 2
BAD: Final = b"this breaks engines"
LOOKS_S: Final = 300.0
REQUESTS: Final = 48


async def answer(talk: Talk, received: Received) -> None:
    """Fail where the prompt says so."""
    failed = sized(b'{"error":{"message":"broken"}}', status=b"500 Internal Server Error")
    await talk.say(failed if BAD in received.body else ANSWER)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(tmp_path: Any, valkey: ValkeyProcess) -> AsyncIterator[Stage]:
    await valkey.flush()
    config: dict[str, Any] = {
        "processes": PROCESSES,
        "state": {"redis": valkey.url},
        "policy": {"kind": "round_robin"},
        "ejection": {"failures": 1_000},
        "drain": {"accept_s": 0.0, "grace_s": 30.0},
        "shadow": {"policy": {"kind": "weighted"}, "sample": 1.0},
    }
    actors = [Actor("a", answer=answer), Actor("b", answer=answer)]
    async with staged_router(tmp_path, actors, **config) as running:
        yield running


def stories(settings: CanarySettings, side: Side) -> Iterator[bytes]:
    """Yield bodies of conversations of one side, of another group each time."""
    splitter, groups = Splitter(settings), set()
    for number in itertools.count():
        body = chat_body(
            f"story {number} {BAD.decode() if side is CANDIDATE else ''}", stream=False
        )
        assigned = splitter.assign(opening_of(body), None)
        if assigned is not None and assigned.side is side and assigned.group not in groups:
            groups.add(assigned.group)
            yield body


async def begun(stage: Stage) -> CanaryDesk:
    """Start a canary, and wait until every process splits."""
    desk = CanaryDesk(stage.fleet, stage.fleet.router)
    await desk.start({"kind": "least_loaded"}, percent=50, seed=5)

    async def splits() -> bool:
        rows = (await desk.status())["processes"]
        return [row["state"] for row in rows] == ["running"] * PROCESSES

    await until(splits, "a canary in every process", LOOKS_S)
    return desk


async def shown(stage: Stage) -> Any:
    """Return what the snapshot has of a canary."""
    return (await stage.fleet.get(f"{stage.fleet.router.admin_url}/admin/snapshot"))["canary"]


async def ask(client: RawClient, body: bytes) -> int:
    client.send(post_to(body))
    return (await client.reply()).status


async def test_the_figures_are_those_of_all_processes_and_each_tells_its_own(stage: Stage) -> None:
    desk = await begun(stage)
    for number in range(REQUESTS):
        client = await stage.client()
        assert await ask(client, chat_body(f"tale {number}", stream=False)) == 200
        await client.close()

    await until(lambda: desk.has_counted(REQUESTS), "the requests of both", LOOKS_S)
    view = await desk.status()
    assert (view["state"], view["counted_by"], view["fault"]) == ("running", PROCESSES, "")
    own = [row["own"] for row in view["processes"]]
    assert all(one["control"] + one["candidate"] > 0 for one in own)
    verdict = view["verdict"]
    assert sum(one["control"] for one in own) == verdict["control_requests"]
    assert sum(one["candidate"] for one in own) == verdict["candidate_requests"]
    assert verdict["control_requests"] + verdict["candidate_requests"] == REQUESTS

    async def is_in_snapshot() -> bool:
        row = await shown(stage)
        assert (row["state"], row["candidate"], row["percent"]) == ("running", "least_loaded", 50.0)
        return bool(row["control_requests"] + row["candidate_requests"] == REQUESTS)

    await until(is_in_snapshot, "the canary in the snapshot", LOOKS_S)
    assert (await desk.post("stop", "seen"))[0] == 200
    await desk.has_state("none", LOOKS_S)

    async def is_gone() -> bool:
        return await shown(stage) is None

    await until(is_gone, "no canary in the snapshot", LOOKS_S)


async def test_the_shadow_report_is_of_all_processes(stage: Stage) -> None:
    for number in range(REQUESTS):
        client = await stage.client()
        assert await ask(client, chat_body(f"tale {number}", stream=False)) == 200
        await client.close()

    async def has_all() -> bool:
        told = await stage.fleet.get(f"{stage.fleet.router.admin_url}/admin/shadow")
        looked_at = told["overall"]["decisions"] + told["unanswered"] + told["skipped"]
        return bool(looked_at == REQUESTS)

    await until(has_all, "every decision in the report", LOOKS_S)


async def test_one_process_that_ended_it_is_told_whoever_leads(
    stage: Stage, valkey: ValkeyProcess
) -> None:
    """Without the store the others cannot know yet: they split on, and that is told, too."""
    desk = await begun(stage)
    settings = msgspec.convert((await desk.status())["settings"], CanarySettings)
    good, bad = stories(settings, CONTROL), stories(settings, CANDIDATE)
    rows = await stage.fleet.get(f"{stage.fleet.router.admin_url}/admin/processes")
    [follower] = [row["process"] for row in rows if not row["leads"]]
    valkey.kill()
    try:
        client = await client_of(stage, desk, follower)
        for _ in range(12):
            assert await ask(client, next(good)) == 200
            assert await ask(client, next(bad)) == 500
        await desk.has_state("ending", LOOKS_S)
        view = await desk.status()
        states = {row["process"]: row["state"] for row in view["processes"]}
        assert states.pop(follower) == "ending"
        assert list(states.values()) == ["running"]
        assert view["fault"]
        assert (await shown(stage))["is_alone"]
    finally:
        valkey.start()
    await desk.has_state("none", LOOKS_S)
    assert "rolled back" in (await desk.status())["last"]["reason"]


async def test_one_client_that_breaks_engines_ends_no_canary_and_many_of_them_do(
    stage: Stage,
) -> None:
    """One connection, so that one process sees it all."""
    desk = await begun(stage)
    settings = msgspec.convert((await desk.status())["settings"], CanarySettings)
    good, bad = stories(settings, CONTROL), stories(settings, CANDIDATE)
    client, looping = await stage.client(), next(bad)
    for number in range(3 * LAST):
        assert await ask(client, looping) == 500
        if number % 4 == 0:
            assert await ask(client, next(good)) == 200

    await until(lambda: desk.has_counted(3 * LAST), "the requests", LOOKS_S)
    view = await desk.status()
    assert (view["state"], view["verdict"]["candidate_requests"]) == ("running", 3 * LAST)
    for _ in range(FAILED + 2):
        assert await ask(client, next(good)) == 200
        assert await ask(client, next(bad)) == 500
    await desk.has_state("none", LOOKS_S)
    assert "requests of the candidate failed" in (await desk.status())["last"]["reason"]


async def client_of(stage: Stage, desk: CanaryDesk, process: int) -> RawClient:
    """Return a client whose connection is with that process."""

    async def counted() -> int:
        [row] = [one for one in (await desk.status())["processes"] if one["process"] == process]
        return int(row["own"]["control"] + row["own"]["candidate"])

    before = await counted()
    for number in itertools.count():
        client = await stage.client()
        assert await ask(client, chat_body(f"who is there, {number}", stream=False)) == 200
        if await counted() > before:
            return client
        await client.close()
    raise AssertionError
