"""The router's queue in front of real processes: who waits, goes first, leaves, is drained."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support.conversation import ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet, Replica, until
from support.stage import ANSWER, Actor, Stage, chat_body, post_to, staged_router
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.fleet import Router
    from support.raw import RawClient, Received, Talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICY = {"kind": "expected_ttft"}
HOLD = {"enabled": True, "max_wait_s": 30.0}
WORDS = "quick brown foxes jump over lazy dogs "
PREFIX = WORDS * 400
LONG, SHORT = WORDS * 150, WORDS
LONGS, SHORTS = 4, 4


# Replicas that never answer: what waits, waits.


class Silent:
    """Keeps every request without an answer until ``let`` is set, then answers all."""

    def __init__(self) -> None:
        self.let = asyncio.Event()

    async def answer(self, talk: Talk, _: Received) -> None:
        await self.let.wait()
        await talk.say(ANSWER)


def big_request(name: str) -> bytes:
    """Return one that no replica holds anything of, and whose prefill is to take minutes."""
    text = f"{name} {time.monotonic_ns()} " + "words to compute " * 24_000
    body = chat_body(text, stream=False)
    return post_to(body, x_request_id=name)


async def gauge(fleet: LocalFleet, name: str) -> float:
    return (await fleet.gauges(fleet.router.admin_url)).get(f"warmroute_{name}", 0.0)


async def held(stage: Stage, count: int) -> None:
    """Wait until so many requests wait in the router."""

    async def is_so() -> bool:
        return await gauge(stage.fleet, "held_requests") == count

    await until(is_so, f"{count} requests held")


async def busy_stage(stage: Stage) -> tuple[Silent, RawClient]:
    """Give the replica one request that it keeps; return it and who waits for it."""
    silent = Silent()
    stage.cast(silent.answer)
    client = await stage.client()
    client.send(big_request("first"))

    async def is_there() -> bool:
        return len(stage.posts()) == 1

    await until(is_there, "the first request at the replica")
    return silent, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    config: dict[str, Any] = {"policy": POLICY, "hold": HOLD, "tokens": {"source": "bytes"}}
    async with staged_router(folder, [Actor("a")], **config) as stage:
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.reset()
    return running


async def test_a_request_waits_in_the_router_until_its_replica_has_answered(stage: Stage) -> None:
    before = [await gauge(stage.fleet, name) for name in ("holds_total", "held_seconds_count")]
    silent, first = await busy_stage(stage)
    second = await stage.client()
    second.send(big_request("second"))
    await held(stage, 1)
    await asyncio.sleep(0.2)
    assert len(stage.posts()) == 1
    silent.let.set()
    for client in (first, second):
        assert (await client.reply()).status == 200
    records = [await stage.fleet.decision(name) for name in ("first", "second")]
    assert records[0]["held_s"] == 0.0
    assert records[1]["held_s"] > 0.2
    after = [await gauge(stage.fleet, name) for name in ("holds_total", "held_seconds_count")]
    assert after == [count + 1 for count in before]
    assert await gauge(stage.fleet, "held_requests") == 0


async def test_a_receipt_says_how_long_a_request_waited(stage: Stage) -> None:
    silent, first = await busy_stage(stage)
    second = await stage.client()
    second.send(big_request("second"))
    await held(stage, 1)
    silent.let.set()
    replies = [await client.reply() for client in (first, second)]
    held_ms = [int(reply.all(b"x-warmroute-held-ms")[0]) for reply in replies]
    assert held_ms[0] == 0 < held_ms[1]


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(stage: Stage) -> None:
    silent, first = await busy_stage(stage)
    leaver = await stage.client()
    leaver.send(big_request("leaver"))
    await held(stage, 1)
    leaver.abort()
    await held(stage, 0)
    record = await stage.fleet.decision("leaver")
    assert (record["status"], record["outcome"], record["attempts"]) == (499, "cancelled", [])
    assert record["held_s"] > 0
    assert await stage.fleet.inflight() == 1
    silent.let.set()
    assert (await first.reply()).status == 200
    await stage.fleet.settled()
    assert len(stage.posts()) == 1


async def test_a_load_only_request_passes_those_that_wait(stage: Stage) -> None:
    silent, first = await busy_stage(stage)
    waits = await stage.client()
    waits.send(big_request("waits"))
    await held(stage, 1)
    passes = await stage.client()
    passes.send(post_to(b'{"model": "%s"}' % MODEL.encode(), path="/v1/embeddings"))

    async def is_there() -> bool:
        return len(stage.posts()) == 2

    await until(is_there, "the request without a prefix at the replica")
    assert await gauge(stage.fleet, "held_requests") == 1
    silent.let.set()
    for client in (first, waits, passes):
        assert (await client.reply()).status == 200


async def test_a_drain_lets_the_waiting_go_at_once(stage: Stage) -> None:
    silent, first = await busy_stage(stage)
    second = await stage.client()
    second.send(big_request("second"))
    await held(stage, 1)
    child = stage.fleet.router.child
    child.process.send_signal(signal.SIGTERM)

    async def are_there() -> bool:
        return len(stage.posts()) == 2

    await until(are_there, "both requests at the replica")
    silent.let.set()
    for client in (first, second):
        assert (await client.reply()).status == 200
    assert await asyncio.to_thread(child.process.wait, 60) == 0


# Workers with a clock.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        replicas=1,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        preset="llama-70b-fp8-2xh100",
        speed_up=0.25,
        worker_flags=("--max-num-batched-tokens", "512"),  # what is released can still overtake
        config={
            "receipts": True,
            "hold": {"enabled": False},
            "policy": POLICY | {"w_share": 0.0, "prefill": {"token_ms": 0.5}},
        },
    )
    async with LocalFleet(folder, plan) as running:
        yield running


def prefix_of(session: int) -> str:
    return f"{session} {PREFIX}"


async def warm_up(fleet: LocalFleet, router: Router) -> None:
    """Let the only replica hold every session; then another one comes, which holds nothing."""
    async with sdk(router.url) as client:
        turns = [[("user", prefix_of(session))] for session in range(LONGS + SHORTS)]
        await asyncio.gather(*(ask(client, MODEL, turn) for turn in turns))
    worker = await fleet.start_worker("w1").ready()
    sidecar = await fleet.start_sidecar("w1", worker.words[0]).ready()
    fleet.replicas.append(Replica("w1", worker, sidecar))


async def idle(fleet: LocalFleet) -> None:
    """Wait until nothing runs, and until every router has heard that."""
    await fleet.settled()

    async def is_known() -> bool:
        seen = [one for router in fleet.routers for one in (await fleet.seen(router)).values()]
        loads = [one["load"] for one in seen]
        return all(load and not load["queued"] and not load["running"] for load in loads)

    await until(is_known, "no load reported")


async def rush(fleet: LocalFleet, router: Router, name: str) -> list[dict[str, Any]]:
    """Let all sessions go on at once, the long turns first; return their records."""
    async with sdk(router.url) as client:
        asked = []
        for session, text in enumerate([LONG] * LONGS + [SHORT] * SHORTS):
            turn = [("user", prefix_of(session)), ("user", f"{name} {text}")]
            asked.append(asyncio.create_task(ask(client, MODEL, turn)))
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*asked)
    return [await fleet.decision(one.request_id, router) for one in answers]


async def test_short_requests_that_wait_for_the_warm_replica_overtake_long_ones(
    fleet: LocalFleet,
) -> None:
    """The same rush through a router with the queue, then through one without it."""
    await warm_up(fleet, fleet.router)
    holding, plain = await fleet.start_router(hold=HOLD), fleet.router
    for router in (holding, plain):
        await fleet.all_up(router, replicas=2)
    fleet.routers.append(holding)
    await idle(fleet)
    held = await rush(fleet, holding, "with")
    await idle(fleet)
    moved = await rush(fleet, plain, "without")
    await fleet.settled()
    waited = [one for one in held[LONGS:] if one["held_s"] > 0]
    assert len(waited) >= SHORTS - 1
    assert {one["attempts"][0]["decision"]["replica"] for one in waited} == {"w0"}
    assert not any(one["held_s"] for one in moved)
    answered_s = [one["started_unix_s"] + one["ttft_s"] for one in held]
    assert max(answered_s[LONGS:]) < max(answered_s[:LONGS]), "the short ones overtake a long one"
