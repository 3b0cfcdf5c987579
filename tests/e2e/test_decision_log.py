"""The decision log of a real router: mixed requests on real workers, replayed bit for bit."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, get_args

import pytest
import pytest_asyncio

from policies.least_loaded import LeastLoaded
from policies.round_robin import RoundRobin
from policies.union import AnyPolicy
from policies.weighted import Weighted
from replay.decision import LoggedTrace, replay_decisions
from replay.decision_file import DecisionLogReader
from support.conversation import at_once
from support.fleet import MODEL, FleetPlan, LocalFleet, Router, until
from support.raw import RawClient, sized
from support.stage import Actor, chat_body, post_to
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from replay.decision import DecisionComparison
    from support.raw import Received, Talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = sorted(kind.__struct_config__.tag for kind in get_args(AnyPolicy))
DECIDED = 180
"""Of two hundred mixed requests one in ten is refused before a decision."""
CANARY = "canary words of a client"
BUSY = sized(b'{"error":{"message":"busy"}}', status=b"503 Service Unavailable")


async def answer_busy(talk: Talk, _: Received) -> None:
    """Answer that the replica has no room."""
    await talk.say(BUSY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy() -> AsyncIterator[Actor]:
    """Run a replica that never has room: its requests are tried again elsewhere."""
    actor = Actor("busy", answer=answer_busy)
    actor.url = f"http://{(await actor.replica.start()).authority}"
    yield actor
    await actor.replica.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(replicas=3, routers=0, tokenizer=write_tokenizer(folder / "tokenizer"))
    async with LocalFleet(folder, plan) as running:
        yield running


def mixed_body(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request: chats that grow, completions, unreadable and refused."""
    topic = f"topic {rng.randrange(6)}. {CANARY}. "
    text = topic + "the quick brown fox jumps over lazy dogs " * rng.randrange(1, 60)
    base: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randrange(1, 5)}
    kind = number % 10
    if kind == 7:
        return "/v1/completions", base | {"prompt": [topic * 30, text], "stream": True}
    if kind == 8:
        parts = [{"type": "image_embeds", "image_embeds": "AAAA"}]
        return "/v1/chat/completions", base | {"messages": [{"role": "user", "content": parts}]}
    if kind == 9:
        return "/v1/completions", base | {"prompt": 7}
    messages = [{"role": "system", "content": topic * 40}, {"role": "user", "content": text}]
    options = {"stream": True, "stream_options": {"include_usage": True}} if kind % 2 else {}
    return "/v1/chat/completions", base | {"messages": messages, "session": "s"} | options


async def logged_router(
    fleet: LocalFleet, path: Path, actor: Actor, policy: str, **settings: Any
) -> Router:
    """Start a router that logs at ``path``; it also knows a replica that is always busy."""
    router = await fleet.start_router(
        policy={"kind": policy},
        decisions={"path": str(path), **settings},
        health={"interval_s": 0.1},
        replicas=[{"url": actor.url, "name": actor.name}],
    )
    await fleet.all_up(router, 4)
    return router


async def send_mixed(fleet: LocalFleet, router: Router, count: int) -> list[int]:
    """Send so many mixed requests, eight at a time; return their status."""
    rng = random.Random(3)
    bodies = [mixed_body(rng, number) for number in range(count)]

    async def send(one: tuple[str, dict[str, Any]]) -> int:
        path, body = one
        async with fleet.http.post(f"{router.url}{path}", json=body) as answer:
            await answer.read()
            return answer.status

    return await at_once(bodies, 8, send)


async def stop(fleet: LocalFleet, router: Router) -> None:
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0


async def test_two_hundred_mixed_requests_repeat_and_compare_and_are_a_trace(
    fleet: LocalFleet, busy: Actor, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    router = await logged_router(fleet, path, busy, "weighted", chains=True)
    statuses = await send_mixed(fleet, router, 200)
    client = await RawClient.connect(router.port)
    client.send(post_to(chat_body("lazy dogs " * 40, max_tokens=4_000, ignore_eos=True)))
    await client.reader.readuntil(b"data: ")
    client.abort()
    records = (await fleet.decisions(1_000, router))[-201:]
    await stop(fleet, router)
    assert set(statuses) == {200, 400}

    logged = [line.decision for line in DecisionLogReader(path)]
    results = [one for one in logged if one.result is not None]
    assert len(results) == len({one.id for one in logged}) == DECIDED + 1
    assert any(one.attempt > 1 for one in logged), "no request was tried again"
    assert any(one.error for one in logged)
    assert any(one.unroutable for one in logged)
    assert any(one.decision.predicted_cached_tokens for one in logged)
    told = {one["request_id"]: one for one in records}
    for one in results:
        if one.id in told and one.result is not None:
            kept = told[one.id]
            assert one.result.cached_tokens == kept["reported_cached_tokens"]
            assert one.result.duration_s == kept["duration_s"]
            assert one.decision.replica == kept["attempts"][-1]["decision"]["replica"]
    assert CANARY.encode() not in path.read_bytes()

    comparison = replay_decisions(path)
    assert comparison.first_difference is None
    assert comparison.is_exact
    assert (comparison.decisions, comparison.requests) == (len(logged), DECIDED + 1)
    other = replay_decisions(path, RoundRobin())
    assert 0 < other.same_replica < other.decisions
    assert other.moved == other.decisions - other.same_replica
    assert other.replayed.cached_tokens < other.logged.cached_tokens
    assert len(other.worst) == 10
    assert replay_decisions(path, Weighted()).is_exact
    assert not replay_decisions(path, LeastLoaded()).is_exact

    trace = LoggedTrace(path)
    requests = list(trace)
    prompts = sum(max(1, len(one.prompts or ())) for one in results)
    assert (len(requests), trace.block_tokens) == (prompts, 64)
    assert [one.arrival_s for one in requests] == sorted(one.arrival_s for one in requests)
    shared = {one.chain[0] for one in requests if one.chain}
    assert 6 <= len(shared) < len(requests) / 2


@pytest.mark.timeout(300)
async def test_each_kind_of_policy_repeats_its_decisions_bit_for_bit(
    fleet: LocalFleet, busy: Actor, tmp_path: Path
) -> None:
    async def replayed(kind: str) -> DecisionComparison:
        path = tmp_path / f"{kind}.jsonl"
        router = await logged_router(fleet, path, busy, kind)
        await send_mixed(fleet, router, 40)
        await stop(fleet, router)
        return replay_decisions(path)

    comparisons = await at_once(KINDS, 2, replayed)
    assert [one.logged_policies[0]["kind"] for one in comparisons] == KINDS
    assert {one.log: one.first_difference for one in comparisons if not one.is_exact} == {}
    assert {one.requests for one in comparisons} == {36}
    assert all(one.logged == one.replayed for one in comparisons)


async def test_a_router_that_cannot_write_its_log_serves_and_counts_what_it_drops(
    fleet: LocalFleet, busy: Actor, tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "log"
    router = await logged_router(fleet, path, busy, "weighted")
    statuses = await send_mixed(fleet, router, 20)
    assert set(statuses) == {200, 400}

    async def are_counted() -> bool:
        gauges = await fleet.gauges(router.admin_url)
        return gauges["warmroute_decision_log_dropped_total"] >= 18

    await until(are_counted, "dropped decisions are counted")
    assert (await fleet.gauges(router.admin_url))["warmroute_decision_log_written_total"] == 0
    await stop(fleet, router)
    assert router.child.log.read_bytes().count(b"cannot write") == 1
    assert not path.parent.exists()


async def test_a_killed_router_leaves_a_log_that_the_next_one_continues(
    fleet: LocalFleet, busy: Actor, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    router = await logged_router(fleet, path, busy, "weighted")
    await send_mixed(fleet, router, 40)

    async def is_written() -> bool:
        gauges = await fleet.gauges(router.admin_url)
        return gauges["warmroute_decision_log_written_total"] >= 36

    await until(is_written, "the records are in the file")
    router.child.process.kill()
    await asyncio.to_thread(router.child.process.wait)
    with path.open("ab") as file:
        file.write(b'{"id":"torn')
    again = await logged_router(fleet, path, busy, "random", sample=0.5)
    await send_mixed(fleet, again, 40)
    await stop(fleet, again)
    comparison = replay_decisions(path)
    assert comparison.is_exact
    assert comparison.torn_lines == 1
    assert 36 < comparison.requests < 72
    assert [one["kind"] for one in comparison.logged_policies] == ["weighted", "random"]


async def test_a_router_without_the_setting_has_no_log_and_no_count_of_it(
    fleet: LocalFleet,
) -> None:
    router = await fleet.start_router()
    await fleet.all_up(router, 3)
    await send_mixed(fleet, router, 10)
    assert not [name for name in await fleet.gauges(router.admin_url) if "decision_log" in name]
    await stop(fleet, router)
