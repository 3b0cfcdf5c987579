"""Clients and replicas that misbehave, against a whole router process."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from router.server import LOAD_PATHS, PREFIX_PATHS
from support.fleet import until
from support.raw import DONE, LAST, SSE, Received, Talk, chunk
from support.stage import (
    ANSWER,
    EVENT,
    Actor,
    Stage,
    answer_at_once,
    chat_body,
    post_to,
    staged_router,
    stream_two_events,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    actors = [Actor("a"), Actor("b")]
    async with staged_router(
        tmp_path_factory.mktemp("stage"),
        actors,
        upstream={"pool_idle_s": 0.2},
        # What one test lets fail must not eject a replica of the next: with one ejected, one that
        # fails its checks is asked, too, as half of the fleet is not there (panic).
        ejection={"most_fraction": 0.0},
    ) as stage:
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.reset()
    return running


async def began(stage: Stage, requests: int = 1) -> None:
    """Wait until the replicas have that many requests."""

    async def is_so() -> bool:
        return len(stage.posts()) >= requests

    await until(is_so, f"{requests} requests at the replicas")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model":"fleet-model"}',
        b'{"model":"fleet-model","messages":null}',
        b'{"model":"fleet-model","messages":[]}',
        b'{"model":"fleet-model","messages":"hello"}',
        b'{"messages":[{"role":"user","content":"hello"}]}',
        b'{"model":7,"messages":[{"role":"user","content":"hello"}]}',
    ],
)
async def test_a_malformed_chat_is_a_400_that_no_replica_sees(stage: Stage, body: bytes) -> None:
    """A41: no retry, no effect on health."""
    reply = await stage.ask(post_to(body, x_request_id="a41"))
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"
    assert stage.posts() == []
    record = await stage.fleet.decision("a41")
    assert (record["attempts"], record["outcome"]) == ([], "refused")
    assert all(one["up"] for one in (await stage.fleet.seen()).values())


@pytest.mark.parametrize("prompt", ["null", "[]", "{}", "[null]"])
async def test_a_malformed_completion_is_a_400_that_no_replica_sees(
    stage: Stage, prompt: str
) -> None:
    """A41: the same for ``prompt``."""
    body = f'{{"model":"fleet-model","prompt":{prompt}}}'.encode()
    reply = await stage.ask(post_to(body, "/v1/completions"))
    assert reply.status == 400
    assert stage.posts() == []


@pytest.mark.parametrize("path", sorted(PREFIX_PATHS | LOAD_PATHS))
async def test_every_proxied_path_takes_a_lease_and_gives_it_back(stage: Stage, path: str) -> None:
    """C56, A26."""
    may_answer = asyncio.Event()

    async def answer_when_told(talk: Talk, received: Received) -> None:
        await may_answer.wait()
        await answer_at_once(talk, received)

    stage.cast(answer_when_told)
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    field = {name: "hello"} if name is not None else {}
    asked = asyncio.create_task(stage.ask(post_to(chat_body(stream=False, **field), path)))
    await began(stage)
    assert await stage.fleet.inflight() == 1
    may_answer.set()
    reply = await asked
    assert reply.status == 200
    assert ANSWER.endswith(reply.body)
    assert stage.posts()[0].line == f"POST {path} HTTP/1.1".encode()
    await stage.fleet.settled()


async def test_a_burst_spreads_before_any_replica_answers(stage: Stage) -> None:
    """A03: what was sent counts at once, not when the head of the answer comes."""
    may_answer = asyncio.Event()

    async def answer_when_told(talk: Talk, received: Received) -> None:
        await may_answer.wait()
        await answer_at_once(talk, received)

    stage.cast(answer_when_told)
    bodies = [chat_body(f"{number} " * 8_000, stream=False) for number in range(32)]
    asked = [asyncio.create_task(stage.ask(post_to(body))) for body in bodies]
    await began(stage, 32)
    assert all(abs(len(actor.posts()) - 16) <= 1 for actor in stage.actors)
    may_answer.set()
    assert {(await reply).status for reply in asked} == {200}


async def test_requests_that_follow_each_other_on_one_connection_each_count(stage: Stage) -> None:
    """C02: nothing of a finished request is left to be mistaken for the next one's."""
    may_answer = asyncio.Event()

    async def answer_when_told(talk: Talk, received: Received) -> None:
        await may_answer.wait()
        await answer_at_once(talk, received)

    stage.cast(answer_when_told)
    client = await stage.client()
    for number in range(1, 4):
        may_answer.clear()
        client.send(post_to(chat_body(stream=False)))
        await began(stage, number)
        assert await stage.fleet.inflight() == 1
        may_answer.set()
        assert (await client.reply()).status == 200
        await stage.fleet.settled()
    await client.close()


async def test_the_connections_gauge_is_the_number_of_sockets(stage: Stage) -> None:
    """A27: after 155 cancelled streams, and while 5 run."""

    async def endless(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await talk.until_gone()

    stage.cast(endless)
    clients = [await stage.client() for _ in range(160)]
    for client in clients:
        client.send(post_to(chat_body()))
    for client in clients:
        await client.reader.readuntil(EVENT)
    for client in clients[:155]:
        client.abort()

    async def is_true() -> bool:
        gauges = await stage.fleet.gauges(stage.fleet.router.url)
        sockets = sum(actor.replica.open for actor in stage.actors)
        return 5 <= sockets <= 9 and gauges["warmroute_replica_connections"] == sockets

    await until(is_true, "the gauge shows the sockets")
    assert await stage.fleet.inflight() == 5
    for client in clients[155:]:
        client.abort()
    await stage.fleet.settled()


async def test_ends_that_come_together_end_a_request_once(stage: Stage) -> None:
    """B40, C01, C04: the replica breaks off or finishes just as the client leaves."""
    requests = 60

    async def end_at_once(talk: Talk, received: Received) -> None:
        number = int(received.all(b"x-request-id")[0].removeprefix(b"c04-"))
        await talk.say(SSE + chunk(EVENT))
        if number % 3 == 0:
            talk.reset()
        elif number % 3 == 1:
            await talk.say(chunk(DONE) + LAST)
        else:
            talk.writer.close()

    async def one(number: int) -> None:
        client = await stage.client()
        client.send(post_to(chat_body(), x_request_id=f"c04-{number}"))
        await client.reader.readuntil(EVENT)
        client.abort()

    stage.cast(end_at_once)
    await asyncio.gather(*(one(number) for number in range(requests)))
    await stage.fleet.settled()
    for number in range(requests):
        record = await stage.fleet.decision(f"c04-{number}")
        assert len(record["attempts"]) == 1
        assert record["outcome"] in {"done", "failed", "cancelled"}
    gauges = await stage.fleet.gauges(stage.fleet.router.url)
    assert gauges["warmroute_inflight_requests"] == 0
    assert all(one["up"] for one in (await stage.fleet.seen()).values())


async def test_health_checks_leave_the_load_alone(stage: Stage) -> None:
    """C05: a stream counts for as long as it runs, over many checks, good and bad."""
    may_end = asyncio.Event()

    async def long_stream(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await may_end.wait()
        await talk.say(chunk(DONE) + LAST)

    stage.cast(long_stream)
    asked = asyncio.create_task(stage.ask(post_to(chat_body())))
    await began(stage)
    busy = next(actor for actor in stage.actors if actor.posts())
    for is_healthy in (True, False, True):
        busy.is_healthy = is_healthy

        async def is_noticed(*, wanted: bool = is_healthy) -> bool:
            return (await stage.fleet.seen())[busy.name]["up"] is wanted

        await until(is_noticed, "the checks notice")
        assert (await stage.fleet.seen())[busy.name]["inflight"] == 1
    may_end.set()
    assert (await asked).is_complete
    await stage.fleet.settled()


async def test_a_stream_with_long_pauses_outlives_every_idle_limit(stage: Stage) -> None:
    """A43: pauses longer than the life of idle connections cut nothing."""

    async def with_pauses(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await asyncio.sleep(0.5)
        await talk.say(chunk(EVENT))
        await asyncio.sleep(0.5)
        await talk.say(chunk(DONE) + LAST)

    stage.cast(with_pauses)
    reply = await stage.ask(post_to(chat_body()))
    assert reply.is_complete
    assert reply.body == EVENT + EVENT + DONE


async def test_a_slow_reader_holds_the_replica_back(stage: Stage) -> None:
    """A42: what a client does not take stays at the replica, not in the router."""
    sent_bytes = 0
    part = chunk(b"data: " + b"x" * 65_536 + b"\n\n")

    async def torrent(talk: Talk, _: Received) -> None:
        nonlocal sent_bytes
        await talk.say(SSE)
        while True:
            await talk.say(part)
            sent_bytes += len(part)

    stage.cast(torrent)
    client = await stage.client()
    client.send(post_to(chat_body()))
    await client.reader.readexactly(1)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    seen_bytes = -1
    while sent_bytes != seen_bytes or not sent_bytes:
        seen_bytes = sent_bytes
        await asyncio.sleep(0.3)
    assert 0 < sent_bytes < 32 * 2**20
    client.abort()
    await stage.fleet.settled()


async def test_only_healthy_replicas_are_candidates_and_none_is_a_503(stage: Stage) -> None:
    """C09, A53, B43: one healthy one takes all; without any, 503 with Retry-After, then back."""

    async def up_is(*names: str) -> None:
        async def is_so() -> bool:
            seen = await stage.fleet.seen()
            return {name for name, one in seen.items() if one["up"]} == set(names)

        await until(is_so, f"up: {names}")

    first, second = stage.actors
    first.is_healthy = False
    await up_is(second.name)
    for _ in range(10):
        assert (await stage.ask(post_to(chat_body(stream=False)))).status == 200
    assert (len(first.posts()), len(second.posts())) == (0, 10)
    second.is_healthy = False
    await up_is()
    reply = await stage.ask(post_to(chat_body(stream=False)))
    assert reply.status == 503
    assert int(reply.all(b"retry-after")[0]) >= 1
    assert json.loads(reply.body)["error"]["code"] == "no_replica"
    first.is_healthy = second.is_healthy = True
    await up_is(first.name, second.name)
    stage.cast(stream_two_events)
    assert (await stage.ask(post_to(chat_body()))).status == 200
