"""``processes: 2``: one router to clients and operators, whichever process does the work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import zstandard

from router.recording import NEXT_HEADER
from support.fleet import until
from support.raw import DONE, LAST, SSE, RawClient, chunk
from support.stage import EVENT, Actor, Stage, answer_at_once, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.raw import Received, Reply, Talk

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROCESSES = 2
LOOKS_S = 300.0
"""A start of two processes takes seconds of two cores' time."""
DRAIN = {"accept_s": 0.2, "grace_s": 120.0}
LIMIT = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Start a router of two processes before one scripted replica."""
    folder = tmp_path_factory.mktemp("processes")
    config: dict[str, Any] = {
        "processes": PROCESSES,
        "drain": DRAIN,
        "decisions": {"path": str(folder / "decisions.jsonl")},
        "settings_file": str(folder / "settings.json"),
        "audit_log": str(folder / "audit.log"),
        "admission": {"max_inflight": LIMIT},
    }
    async with staged_router(folder, [Actor("a")], **config) as running:
        yield running


async def operators(stage: Stage, path: str) -> Any:
    return await stage.fleet.get(f"{stage.fleet.router.admin_url}{path}")


async def processes(stage: Stage) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await operators(stage, "/admin/processes")
    return rows


async def ask(port: int, name: str) -> Reply:
    """Send one chat on a connection of its own; raises OSError where that is refused or cut."""
    client = await RawClient.connect(port)
    try:
        client.send(post_to(chat_body(stream=False), X_Request_Id=name, Connection="close"))
        return await client.reply()
    finally:
        await client.close()


async def asked(stage: Stage, prefix: str, count: int) -> list[str]:
    """Send so many chats; return what they are called."""
    names = [f"{prefix}-{number}" for number in range(count)]
    for name in names:
        assert (await ask(stage.fleet.router.port, name)).status == 200
    return names


async def done(stage: Stage, url: str | None = None) -> float:
    return (await stage.fleet.gauges(url or stage.fleet.router.admin_url)).get(
        "warmroute_requests_total", 0.0
    )


async def accept(stage: Stage, count: int) -> None:
    async def is_so() -> bool:
        return [row["accepts"] for row in await processes(stage)].count(True) == count

    await until(is_so, f"{count} processes accept", LOOKS_S)


async def test_operators_see_one_router_whichever_process_decided(stage: Stage) -> None:
    """Every request is found, counted once at both listeners, recorded, and in the snapshot."""
    before = await done(stage)
    names = await asked(stage, "seen", 24)
    records = [await stage.fleet.decision(name) for name in names]
    assert {record["client_request_id"] for record in records} == set(names)
    explained = await operators(stage, f"/admin/explain?request={names[7]}")
    assert explained["record"]["client_request_id"] == names[7]
    latest = await operators(stage, "/debug/decisions?limit=24")
    assert [one["client_request_id"] for one in latest] == names[::-1]
    for url in (stage.fleet.router.admin_url, stage.fleet.router.url):
        await counted(stage, url, before + 24)
    rows = await processes(stage)
    assert len({row["pid"] for row in rows}) == PROCESSES
    assert [row["leads"] for row in rows].count(True) == 1
    gauges = await stage.fleet.gauges(stage.fleet.router.admin_url)
    assert gauges["warmroute_processes"] == PROCESSES
    assert gauges["warmroute_live_routers"] == PROCESSES

    async def is_shown() -> bool:
        history = await operators(stage, "/admin/history")
        return bool(sum(point["requests"] for point in history["tens"]) == before + 24)

    await until(is_shown, "the requests of all in the history", LOOKS_S)
    snapshot = await operators(stage, "/admin/snapshot")
    assert [row["replica"] for row in snapshot["replicas"]] == ["a"]

    async def is_recorded() -> bool:
        arrived = {one["arrived_unix_s"] for one in await recorded(stage)}
        return {record["started_unix_s"] for record in records} <= arrived

    await until(is_recorded, "every request in the recording", LOOKS_S)


async def counted(stage: Stage, url: str, wanted: float) -> None:
    async def is_so() -> bool:
        found = await done(stage, url)
        assert found <= wanted
        return found == wanted

    await until(is_so, f"{wanted} requests at {url}", LOOKS_S)


async def recorded(stage: Stage) -> list[dict[str, Any]]:
    """Return the lines of the whole recording."""
    found, following = [], "0"
    while following:
        url = f"{stage.fleet.router.admin_url}/admin/recording?from={following}"
        async with stage.fleet.http.get(url) as answer:
            if answer.status != 200:  # a process that had no time: not all of it can be had
                return []
            frame, following = await answer.read(), answer.headers.get(NEXT_HEADER, "")
        if frame:
            found += zstandard.ZstdDecompressor().decompress(frame, 1 << 24).splitlines()
    return [json.loads(line) for line in found]


async def test_limits_hold_for_all_processes_together(stage: Stage) -> None:
    """``max_inflight`` and settings that change it are shared out; none gets N times as large."""
    assert (await operators(stage, "/readyz"))["places"] == LIMIT
    url = f"{stage.fleet.router.admin_url}/admin/settings"
    body = {
        "patch": {"admission": {"max_inflight": 2 * LIMIT}},
        "author": "a test",
        "reason": "more places",
        "expected_version": 0,
    }
    async with stage.fleet.http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()

    async def is_so() -> bool:
        ready = await operators(stage, "/readyz")
        gauges = await stage.fleet.gauges(stage.fleet.router.admin_url)
        return bool(ready["places"] == 2 * LIMIT and gauges["warmroute_settings_version"] == 1)

    await until(is_so, "the settings at every process", LOOKS_S)
    body |= {"patch": {"admission": {"max_inflight": 1}}, "expected_version": 1}
    async with stage.fleet.http.post(url, json=body) as answer:
        assert answer.status == 400
        assert "admission.max_inflight: expected at least 2" in await answer.text()


class Streaming:
    """Answers at once what asks for no stream, and ends streams once ``let`` is set."""

    def __init__(self) -> None:
        self.let = asyncio.Event()

    async def answer(self, talk: Talk, received: Received) -> None:
        if b'"stream": true' not in received.body:
            await answer_at_once(talk, received)
            return
        await talk.say(SSE + chunk(EVENT))
        await self.let.wait()
        await talk.say(chunk(EVENT) + chunk(DONE) + LAST)


class Storm:
    """Clients that connect, ask and leave, and somebody who scrapes; what fails is raised."""

    def __init__(self, stage: Stage, before: float) -> None:
        self.stage = stage
        self.sent = 0
        self.counted = [before]
        self.is_over = asyncio.Event()
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(4)]
        self.tasks.append(asyncio.create_task(self._watch()))

    async def _ask(self, number: int) -> None:
        while not self.is_over.is_set():
            reply = await ask(self.stage.fleet.router.port, f"storm-{number}")
            assert reply.status == 200
            self.sent += 1

    async def _watch(self) -> None:
        while not self.is_over.is_set():
            self.counted.append(await done(self.stage))

    def check(self) -> None:
        """Raise what any of them met with."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        """Let all finish what they began."""
        self.is_over.set()
        await asyncio.gather(*self.tasks)


async def test_a_restart_cuts_and_refuses_nobody_and_no_counter_goes_back(stage: Stage) -> None:
    """C-20: a storm of connections and an open stream during SIGUSR2."""
    streaming, router = Streaming(), stage.fleet.router
    stage.actors[0].answer = streaming.answer
    before = {row["pid"] for row in await processes(stage)}
    open_client = await stage.client()
    storm = Storm(stage, await done(stage))
    open_client.send(post_to(chat_body()))
    router.child.process.send_signal(signal.SIGUSR2)

    async def is_replaced() -> bool:
        storm.check()
        rows = await processes(stage)
        fresh = [row for row in rows if row["accepts"] and row["pid"] not in before]
        if len(rows) > len(fresh) > 0:
            streaming.let.set()  # the one that has the stream waits for its end
        return len(fresh) == PROCESSES

    await until(is_replaced, "every process replaced", LOOKS_S)
    await storm.end()
    reply = await open_client.reply()
    assert reply.is_complete
    assert reply.body.endswith(DONE)
    stage.actors[0].answer = answer_at_once

    async def is_whole() -> bool:
        storm.counted.append(await done(stage))
        return storm.counted[-1] == storm.counted[0] + storm.sent + 1

    await until(is_whole, "every request counted")
    assert storm.counted == sorted(storm.counted)
    restarts = (await stage.fleet.gauges(router.admin_url))["warmroute_process_restarts_total"]
    assert restarts == PROCESSES


async def test_a_killed_process_costs_its_own_requests_only(stage: Stage) -> None:
    """The other one serves on, the leases of the dead one end, another one comes."""
    rows = await processes(stage)
    before = await done(stage)
    os.kill(rows[0]["pid"], signal.SIGKILL)
    await accept(stage, 1)
    await asked(stage, "after", 8)
    assert await done(stage) >= 8
    await accept(stage, PROCESSES)
    assert rows[0]["pid"] not in {row["pid"] for row in await processes(stage)}
    assert await done(stage) >= before
    await asked(stage, "again", 8)
    assert (await operators(stage, "/readyz"))["ready"]


async def test_all_processes_drain_and_leave_nothing_behind(stage: Stage) -> None:
    """SIGTERM: the open stream ends well, then exit 0; the logs are each process's own."""
    streaming = Streaming()
    stage.actors[0].answer = streaming.answer
    router = stage.fleet.router
    pids = [row["pid"] for row in await processes(stage)]
    client = await stage.client()
    client.send(post_to(chat_body()))

    async def is_there() -> bool:
        return any(b"stream" in one.body for one in stage.posts()[-1:])

    await until(is_there, "the stream at the replica")
    router.child.process.send_signal(signal.SIGTERM)

    async def is_refused() -> bool:
        try:
            late = await RawClient.connect(router.port)
        except ConnectionError:
            return True
        late.abort()
        return False

    await until(is_refused, "no more connections")
    streaming.let.set()
    reply = await client.reply()
    assert reply.body.endswith(DONE)
    assert await asyncio.to_thread(router.child.process.wait, 60) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    logs = sorted(path.name for path in stage.fleet.directory.glob("decisions.jsonl*"))
    assert "decisions.jsonl" not in logs
    assert {"decisions.jsonl.p0", "decisions.jsonl.p1"} <= set(logs)


async def test_processes_whose_supervisor_was_killed_end_by_themselves(tmp_path: Any) -> None:
    async with staged_router(tmp_path, [Actor("a")], processes=2, drain=DRAIN) as alone:
        pids = [row["pid"] for row in await processes(alone)]
        alone.fleet.router.child.process.kill()

        async def are_gone() -> bool:
            return not any(is_alive(pid) for pid in pids)

        await until(are_gone, "the processes gone", LOOKS_S)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
