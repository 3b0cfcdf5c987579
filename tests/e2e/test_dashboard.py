"""The operators' page and its events on real routers: snapshots, streams, drain."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from router.live import VIEWERS_MOST
from router.snapshot import Snapshot
from support.fleet import FleetPlan, LocalFleet, until
from support.raw import SSE, RawClient, Received, Talk, chunk, get
from support.stage import EVENT, Actor, Stage, chat_body, post_to, staged_router, stream_two_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE_FILES = ("", "/app.js", "/page.css", "/vendor/uPlot.iife.min.js")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="stage")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    actors = [Actor("a", answer=stream_two_events), Actor("b", answer=stream_two_events)]
    async with staged_router(tmp_path_factory.mktemp("stage"), actors) as stage:
        await stage.fleet.all_up(stage.fleet.router)
        yield stage


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """Yield name and data of each event until the stream ends."""
    name = ""
    async for line in answer.content:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, msgspec.json.decode(value)


@contextlib.asynccontextmanager
async def watched(url: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Be a viewer of the router whose operators' listener is at ``url``."""
    async with (
        aiohttp.ClientSession(read_bufsize=2**22) as http,
        http.get(f"{url}/admin/events") as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        yield events(answer)


async def first(stream: AsyncIterator[tuple[str, Any]], wanted: str) -> Any:
    """Return the data of the next event of that name."""
    async with asyncio.timeout(20):
        async for name, data in stream:
            if name == wanted:
                return data
    return None


async def test_the_page_is_on_the_operators_listener_and_not_on_the_clients(stage: Stage) -> None:
    fleet = stage.fleet
    for name in PAGE_FILES:
        async with fleet.http.get(f"{fleet.router.admin_url}/dashboard{name}") as answer:
            assert answer.status == 200
            assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
            tag = answer.headers["ETag"]
        known = {"If-None-Match": tag}
        url = f"{fleet.router.admin_url}/dashboard{name}"
        async with fleet.http.get(url, headers=known) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
    for path in ("/dashboard", "/admin/events", "/admin/snapshot", "/admin/history", "/"):
        async with fleet.http.get(f"{fleet.router.url}{path}") as answer:
            assert answer.status == 404
    async with fleet.http.get(f"{fleet.router.admin_url}/") as answer:
        assert answer.url.path == "/dashboard"


async def test_a_request_is_seen_as_it_happens_and_in_the_figures(stage: Stage) -> None:
    stage.reset()
    stage.cast(stream_two_events)
    url = stage.fleet.router.admin_url
    async with watched(url) as stream:
        before = await first(stream, "snapshot")
        assert [row["replica"] for row in before["replicas"]] == ["a", "b"]
        assert before["replicas"][0]["notes"] == ["no_sidecar"]
        assert before["replicas"][0]["kv_used_fraction"] is None
        await stage.ask(post_to(chat_body("hello"), x_request_id="mine"))
        (seen,) = (await first(stream, "decisions"))["decisions"]
        assert (seen["status"], seen["outcome"], seen["model"]) == (200, "done", "fleet-model")
        points = await first(stream, "points")
        while not sum(point["requests"] for point in points["seconds"]):
            points = await first(stream, "points")
        after = await first(stream, "snapshot")
        assert after["last"]["requests"] == before["last"]["requests"] + 1
        assert after["viewers"] == 1
        explained = await stage.fleet.get(f"{url}/admin/explain?request=mine")
        assert explained["record"]["request_id"] == seen["request_id"]
        assert explained["lines"][0].startswith(f"request {seen['request_id']}")
    async with stage.fleet.http.get(f"{url}/admin/explain?request=nobodys") as answer:
        assert answer.status == 404


async def test_a_viewer_comes_back_and_finds_what_it_missed(stage: Stage) -> None:
    stage.reset()
    stage.cast(stream_two_events)
    url = stage.fleet.router.admin_url
    async with watched(url) as stream:
        last = (await first(stream, "snapshot"))["last"]["requests"]
    for number in range(3):
        await stage.ask(post_to(chat_body(f"while away {number}"), x_request_id=f"away-{number}"))
    await asyncio.sleep(1.5)
    async with watched(url) as stream:
        history = await first(stream, "history")
        assert sum(point["requests"] for point in history["seconds"][-6:]) >= 3
        decisions = (await first(stream, "decisions"))["decisions"]
        assert len(decisions) >= 3
        assert (await first(stream, "snapshot"))["last"]["requests"] == last + 3


async def test_viewers_are_bounded_and_requests_do_not_notice_them(stage: Stage) -> None:
    stage.reset()
    stage.cast(stream_two_events)
    url = stage.fleet.router.admin_url
    port = int(url.rpartition(":")[2])

    async def are_all_out() -> bool:
        return bool((await stage.fleet.get(f"{url}/admin/snapshot"))["viewers"] == 0)

    await until(are_all_out, "the viewers of earlier tests are out")
    sleepers = [await RawClient.connect(port) for _ in range(VIEWERS_MOST)]
    try:
        for sleeper in sleepers:  # they never read
            sleeper.send(get("/admin/events", host=b"localhost"))

        async def are_all_in() -> bool:
            shown = await stage.fleet.get(f"{url}/admin/snapshot")
            return bool(shown["viewers"] == VIEWERS_MOST)

        await until(are_all_in, "all viewers in")
        async with stage.fleet.http.get(f"{url}/admin/events") as answer:
            assert answer.status == 503
        for number in range(20):
            reply = await stage.ask(post_to(chat_body(f"beside {number}")))
            assert reply.status == 200
    finally:
        for sleeper in sleepers:
            sleeper.abort()
    await until(are_all_out, "all viewers out")


async def test_what_the_router_tells_is_what_the_command_reads(stage: Stage) -> None:
    url = stage.fleet.router.admin_url
    async with stage.fleet.http.get(f"{url}/admin/snapshot") as answer:
        body = await answer.read()
    shown = msgspec.json.decode(body, type=Snapshot)
    assert shown.router.listen == stage.fleet.router.url
    child = stage.fleet.processes.start("top", "top", "--admin", url, "--sort", "name")
    assert await asyncio.to_thread(child.process.wait, 60) == 0
    text = child.output.read_text()
    assert "2 of 2 replicas up" in text
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("a ", "b "))]
    assert rows == ["a", "b"]


async def test_a_stream_shows_the_drain_and_ends_with_it(stage: Stage) -> None:
    """A viewer does not keep a router from ending, and is told."""
    stage.reset()
    may_end = asyncio.Event()

    async def wait(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await may_end.wait()
        talk.reset()

    stage.cast(wait)
    router = await stage.fleet.start_router(admin="127.0.0.1:0")
    await stage.fleet.all_up(router)
    client = await RawClient.connect(router.port)
    async with watched(router.admin_url) as stream:
        await first(stream, "snapshot")
        client.send(post_to(chat_body("long")))
        snapshot = await first(stream, "snapshot")
        while snapshot["open_requests"] != 1:
            snapshot = await first(stream, "snapshot")
        router.child.process.terminate()
        while not snapshot["is_draining"]:
            snapshot = await first(stream, "snapshot")
        assert snapshot["open_requests"] == 1
        may_end.set()
        assert (await first(stream, "end"))["reason"] == "the router ends"
        assert await first(stream, "anything more") is None
    assert await asyncio.to_thread(router.child.process.wait, 60) == 0
    client.abort()


async def test_an_empty_fleet_has_a_page_too(tmp_path: Any) -> None:
    async with LocalFleet(tmp_path, FleetPlan(replicas=0)) as fleet:
        shown = await fleet.get(f"{fleet.router.admin_url}/admin/snapshot")
        assert (shown["replicas"], shown["hot_prefixes"]) == ([], [])
        assert not any(shown["rates"])
        assert shown["last"]["ttft_p50_s"] is None
