"""How a router ends: streams finish or are told, nobody is refused too early, nothing is left."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from support.fleet import FleetPlan, LocalFleet, until
from support.port import free_port
from support.raw import DONE, LAST, SSE, RawClient, chunk, get
from support.stage import EVENT, Actor, Stage, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from support.fleet import Router
    from support.raw import Received, Reply, Talk

STREAMS = 100


class Streaming:
    """Begins every stream, and ends it once ``let`` is set."""

    def __init__(self) -> None:
        self.let = asyncio.Event()

    async def answer(self, talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await self.let.wait()
        await talk.say(chunk(EVENT) + chunk(DONE) + LAST)


async def begun(stage: Stage, count: int) -> list[RawClient]:
    """Open so many streams through the router, each with a first event."""
    clients = [await stage.client() for _ in range(count)]
    for client in clients:
        client.send(post_to(chat_body()))

    async def are_there() -> bool:
        return len(stage.posts()) == count

    await until(are_there, f"{count} streams at the replica")
    return clients


async def status_of(port: int, path: str) -> int:
    client = await RawClient.connect(port)
    try:
        client.send(get(path))
        return (await client.reply()).status
    finally:
        client.abort()


async def ready_is(port: int, status: int) -> None:
    async def is_so() -> bool:
        return await status_of(port, "/readyz") == status

    await until(is_so, f"/readyz says {status}")


async def exit_code(router: Router) -> int:
    return await asyncio.to_thread(router.child.process.wait, 50)


async def test_a_hundred_streams_outlive_the_signal_and_new_requests_are_served_for_a_while(
    tmp_path: Path,
) -> None:
    """C-20: readiness first, then answers that close, then no more connections; exit 0."""
    streaming = Streaming()
    drain = {"accept_s": 5.0, "grace_s": 60.0}
    async with staged_router(tmp_path, [Actor("a", answer=streaming.answer)], drain=drain) as stage:
        router = stage.fleet.router
        idle = await stage.client()
        clients = await begun(stage, STREAMS)
        router.child.process.send_signal(signal.SIGTERM)
        await ready_is(router.port, 503)
        idle.send(get("/v1/models"))
        kept = await idle.reply()
        assert (kept.status, kept.all(b"connection")) == (200, [b"close"])
        late = await begun_late(stage, streaming)
        assert (late.status, late.all(b"connection")) == (200, [b"close"])
        for client in clients:
            reply = await client.reply()
            assert reply.is_complete
            assert reply.body.endswith(DONE)
        assert await exit_code(router) == 0
        with pytest.raises(ConnectionError):
            await RawClient.connect(router.port)


async def begun_late(stage: Stage, streaming: Streaming) -> Reply:
    """Ask a router that drains already; then let all streams end."""
    client = await stage.client()
    client.send(post_to(chat_body()))

    async def is_there() -> bool:
        return len(stage.posts()) == STREAMS + 1

    await until(is_there, "a request after the signal, at the replica")
    streaming.let.set()
    return await client.reply()


async def test_what_does_not_end_in_the_grace_is_told_so_and_leaves_no_claims(
    tmp_path: Path,
) -> None:
    """C-20: an error event and a cut; a 503 for who waits; the other router sees it at once."""
    streaming = Streaming()
    actors = [Actor("a", answer=streaming.answer)]
    config: dict[str, Any] = {
        "drain": {"accept_s": 0.0, "grace_s": 0.5},
        "admission": {"max_inflight": 5},
    }
    async with staged_router(tmp_path, actors, **config) as stage:
        fleet = stage.fleet
        other = await fleet.start_router()
        fleet.routers.append(other)
        await fleet.all_up(other)
        clients = await begun(stage, 5)
        waiter = await stage.client()
        waiter.send(post_to(chat_body()))

        async def elsewhere(count: int) -> bool:
            return bool((await fleet.seen(other))["a"]["inflight_elsewhere"] == count)

        await until(lambda: elsewhere(5), "the other router knows of five")
        async with Redis.from_url(fleet.state_url) as store:
            boards = [key async for key in store.scan_iter() if await store.type(key) == b"hash"]
            owners = {key: await store.hlen(key) for key in boards}
            fleet.router.child.process.send_signal(signal.SIGTERM)
            waited = await waiter.reply()
            assert (waited.status, waited.all(b"retry-after")) == (503, [b"1"])
            assert json.loads(waited.body)["error"]["code"] == "draining"
            for client in clients:
                reply = await client.reply()
                assert not reply.is_complete
                last = reply.body.split(b"data: ")[-1]
                assert json.loads(last)["error"]["code"] == "draining"
            assert await exit_code(fleet.router) == 0
            shrunk = [key for key in boards if await store.hlen(key) == owners[key] - 1]
            assert len(shrunk) == 1, "its own entry, and no other, is off the board at its exit"
            await until(lambda: elsewhere(0), "and that they are gone")


async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    """C-20."""
    streaming = Streaming()
    drain = {"accept_s": 60.0, "grace_s": 60.0}
    async with staged_router(tmp_path, [Actor("a", answer=streaming.answer)], drain=drain) as stage:
        router = stage.fleet.router
        clients = await begun(stage, 3)
        router.child.process.send_signal(signal.SIGTERM)
        await ready_is(router.port, 503)
        router.child.process.send_signal(signal.SIGINT)
        for client in clients:
            assert b'"draining"' in (await client.reply()).body
        assert await exit_code(router) == 0  # well within either time


async def test_an_interrupt_does_not_wait_for_load_balancers(tmp_path: Path) -> None:
    drain = {"accept_s": 60.0, "grace_s": 60.0}
    async with staged_router(tmp_path, [Actor("a")], drain=drain) as stage:
        stage.fleet.router.child.process.send_signal(signal.SIGINT)
        assert await exit_code(stage.fleet.router) == 0


# One of two routers restarts, again and again.


def open_files(router: Router) -> int | None:
    """Return a process's open file descriptors, where the system tells."""
    folder = Path(f"/proc/{router.child.process.pid}/fd")
    return len(list(folder.iterdir())) if folder.exists() else None


class Pair:
    """A client that goes to the other router when one refuses, cuts it off or says 503."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.answered = 0
        self.second_tries = 0

    async def run(self, number: int, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            faults = []
            for turn in range(2):
                fault = await self._ask(self.ports[(number + turn) % 2])
                if not fault:
                    self.answered += 1
                    break
                faults.append(fault)
            assert len(faults) < 2, faults
            self.second_tries += len(faults)
            await asyncio.sleep(0.02)

    async def _ask(self, port: int) -> str:
        """Return what went wrong; nothing for a good answer."""
        try:
            client = await RawClient.connect(port)
        except OSError as error:
            return repr(error)
        try:
            client.send(post_to(chat_body(stream=False)))
            reply = await client.reply()
        except (OSError, asyncio.IncompleteReadError) as error:
            return repr(error)
        finally:
            client.abort()
        return "" if reply.status == 200 and reply.is_complete else repr(reply)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("restarts", [3, pytest.param(10, marks=pytest.mark.heavy)])
async def test_one_of_two_routers_restarts_again_and_again_and_no_request_is_lost(
    tmp_path: Path, restarts: int
) -> None:
    """C-22: with a client that asks the other one; what stays has no more files than before."""
    ports = [free_port(), free_port()]
    actor = Actor("a")
    patient = {"interval_s": 0.1, "timeout_s": 5.0}  # the replica is in the test's own process
    endpoint = await actor.replica.start()
    plan = FleetPlan(
        replicas=0,
        routers=0,
        config={
            "replicas": [{"url": f"http://{endpoint.authority}", "name": "a"}],
            "attend_sidecars": False,
            "health": patient,
        },
    )
    async with LocalFleet(tmp_path, plan) as fleet:
        settings = [{"listen": f"127.0.0.1:{port}"} for port in ports]
        stays, leaves = [await fleet.start_router(**one) for one in settings]
        await fleet.all_up(stays, replicas=1)
        await fleet.all_up(leaves, replicas=1)
        pair, is_over = Pair(ports), asyncio.Event()
        clients = [asyncio.create_task(pair.run(number, is_over)) for number in range(4)]
        files = []
        for _ in range(restarts):
            await asyncio.to_thread(fleet.processes.stop, leaves.child)
            assert leaves.child.process.returncode == 0
            leaves = await fleet.start_router(**settings[1])
            await fleet.all_up(leaves, replicas=1)
            files.append(open_files(stays))
            for client in clients:
                assert not client.done(), client.exception()
        is_over.set()
        await asyncio.gather(*clients)
        assert pair.answered > 100
        assert await fleet.inflight(stays) == 0
        if sys.platform == "linux":
            early, late = files[1], files[-1]
            assert early is not None
            assert late is not None
            assert late <= early + len(clients) + 4
    await actor.replica.stop()
