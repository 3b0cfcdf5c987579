"""Jobs of warm-up: their steps, their budget, their claim, who goes first, and how they end."""

from __future__ import annotations

import asyncio

import pytest

from router import warm_work
from router.warm_call import WarmEnd
from router.warm_job import JobEnd, JobKind, JobState
from state.model import Rung
from support.warm_world import BLOCK, World, soon


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_S", "RETRY_S", "ROOM_S", "BUSY_S", "WATCH_S"):
        monkeypatch.setattr(warm_work, name, 0.001)


def tokens(world: World) -> int:
    """Return how many tokens were sent that were not held."""
    return sum(end - held for _, _, end, held in world.sent)


async def test_prefixes_are_placed_in_steps_and_the_budget_is_spent_to_the_block() -> None:
    world = World("a", "b", tokens=13 * BLOCK + 5)
    world.add("cool", 9, rate=1.0)
    world.add("hot", 10, rate=5.0)
    job = await world.do(world.job())
    assert world.sent == [
        ("a", "hot", 4 * BLOCK, 0),
        ("a", "hot", 8 * BLOCK, 4 * BLOCK),
        ("a", "hot", 10 * BLOCK, 8 * BLOCK),
        ("a", "cool", 3 * BLOCK, 0),
    ]
    assert (job.end, job.state) == (JobEnd.TOKENS, JobState.ENDED)
    assert (job.done, job.spent_tokens, job.computed_tokens) == (2, 13 * BLOCK, 13 * BLOCK)


async def test_as_many_prefixes_as_may_be_are_placed() -> None:
    world = World("a", prefixes=2)
    for name in ("p", "q", "r"):
        world.add(name, 2)
    job = await world.do(world.job())
    assert (job.end, job.done, len(world.sent)) == (JobEnd.TOKENS, 2, 2)


async def test_what_is_held_already_is_neither_sent_nor_paid_for() -> None:
    world = World("a")
    world.add("p", 6)
    world.add("there", 6)
    world.held = {("a", "p"): 4 * BLOCK, ("a", "there"): 6 * BLOCK}
    job = await world.do(world.job())
    assert world.sent == [("a", "p", 6 * BLOCK, 4 * BLOCK)]
    assert (job.end, job.spent_tokens) == (JobEnd.DONE, 2 * BLOCK)


async def test_what_an_engine_lost_meanwhile_is_charged_and_ends_the_budget() -> None:
    world = World("a", tokens=10 * BLOCK)
    world.add("p", 20)
    world.loses_tokens = 3 * BLOCK
    job = await world.do(world.job())
    assert job.end is JobEnd.TOKENS
    assert job.computed_tokens == job.spent_tokens <= 10 * BLOCK + 3 * BLOCK


async def test_nothing_is_sent_while_another_router_has_the_claim_and_one_budget_is_for_both() -> (
    None
):
    world = World("a", tokens=6 * BLOCK)
    world.add("p", 8)
    job = world.job()
    await world.rival.take(job.subject, 4 * BLOCK, world.settings.tokens)
    task = asyncio.create_task(world.do(job))
    await soon(lambda: job.state is JobState.ELSEWHERE)
    assert not world.sent
    world.held["a", "p"] = 4 * BLOCK
    await world.rival.give_back(job.subject)
    await task
    assert world.sent == [("a", "p", 6 * BLOCK, 4 * BLOCK)]
    assert (job.end, job.spent_tokens) == (JobEnd.TOKENS, 6 * BLOCK)
    assert world.book[job.subject][0] is None, "the claim is given back"


async def test_without_the_store_nothing_is_sent_and_what_is_under_way_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_work, "RENEW_S", 0.0)
    world = World("a")
    world.add("p", 4)
    world.claims.is_away = True
    job = world.job()
    task = asyncio.create_task(world.do(job))
    await asyncio.sleep(0.02)
    assert (world.sent, job.state) == ([], JobState.WAITING)
    world.gate.clear()
    world.claims.is_away = False
    await soon(lambda: bool(world.running))
    world.claims.is_away = True
    await soon(lambda: not world.running)
    assert job.gave_way == 1
    world.gate.set()
    world.claims.is_away = False
    await task
    assert (job.end, job.done) == (JobEnd.DONE, 1)


async def test_without_a_live_view_nothing_is_planned() -> None:
    world = World("a")
    world.add("p", 4)
    world.rung = Rung.STALE
    task = asyncio.create_task(world.do(world.job()))
    await asyncio.sleep(0.02)
    assert not world.sent
    world.rung = Rung.LIVE
    assert (await task).done == 1


async def test_a_step_waits_for_room_and_gives_way_and_goes_on() -> None:
    world = World("a")
    world.add("p", 8)
    world.has_room = False
    job = world.job()
    task = asyncio.create_task(world.do(job))
    await soon(lambda: job.state is JobState.WORKING)
    await asyncio.sleep(0.02)
    assert not world.sent
    world.gate.clear()
    world.has_room = True
    await soon(lambda: bool(world.running))
    world.has_room, world.must_yield = False, True
    await soon(lambda: not world.running)
    world.gate.set()
    world.has_room, world.must_yield = True, False
    await task
    assert [end for _, _, end, _ in world.sent] == [4 * BLOCK, 4 * BLOCK, 8 * BLOCK]
    assert (job.end, job.gave_way, job.spent_tokens) == (JobEnd.DONE, 1, 12 * BLOCK)


@pytest.mark.parametrize(("answer", "tries"), [(WarmEnd.REFUSED, 1), (WarmEnd.FAILED, 3)])
async def test_what_fails_is_given_up_and_the_rest_goes_on(answer: WarmEnd, tries: int) -> None:
    world = World("a")
    world.add("bad", 2, rate=9.0)
    world.add("good", 2)
    world.answers["bad"] = answer
    job = await world.do(world.job())
    assert [name for _, name, _, _ in world.sent] == ["bad"] * tries + ["good"]
    assert (job.end, job.done, job.failed) == (JobEnd.DONE, 1, 1)


async def test_a_job_whose_prefixes_all_fail_has_failed() -> None:
    world = World("a")
    world.add("bad", 2)
    world.answers["bad"] = WarmEnd.REFUSED
    assert (await world.do(world.job())).end is JobEnd.FAILED


async def test_time_ends_a_job_with_what_it_has_under_way() -> None:
    world = World("a")
    world.add("p", 2)
    world.gate.clear()
    job = await world.do(world.job(seconds=0.05))
    assert (job.end, world.running) == (JobEnd.TIME, set())


async def test_a_text_whose_scope_ended_is_not_sent_any_further() -> None:
    world = World("a")
    world.add("p", 8)
    world.gate.clear()
    job = world.job()
    task = asyncio.create_task(world.do(job))
    await soon(lambda: bool(world.running))
    world.ended.add("p")
    world.gate.set()
    await task
    assert [end for _, _, end, _ in world.sent] == [4 * BLOCK]
    assert (job.end, job.failed) == (JobEnd.FAILED, 1)


async def test_a_replica_that_is_not_open_is_waited_for() -> None:
    world = World("a")
    world.add("p", 2)
    world.closed.add("a")
    job = world.job()
    task = asyncio.create_task(world.do(job))
    await asyncio.sleep(0.02)
    assert (job.state, world.sent) == (JobState.WAITING, [])
    world.closed.clear()
    assert (await task).end is JobEnd.DONE


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_hand_over_gives_to_so_many_replicas_at_a_time_as_it_may(
    concurrency: int,
) -> None:
    world = World("a", "b", "c", "d", concurrency=concurrency)
    for name in ("p", "q", "r"):
        world.add(name, 4, wanted=3)
        world.held["a", name] = 4 * BLOCK
    world.gate.clear()
    job = world.job(JobKind.HAND_OVER)
    task = asyncio.create_task(world.do(job))
    await soon(lambda: len(world.running) == concurrency)
    world.gate.set()
    await task
    assert {replica for replica, *_ in world.sent} == {"b", "c", "d"}
    assert (job.end, job.done, world.most_running) == (JobEnd.DONE, 9, concurrency)
    assert tokens(world) == job.spent_tokens == 9 * 4 * BLOCK


async def test_a_hand_over_goes_on_with_its_plan_when_the_replica_is_gone() -> None:
    world = World("a", "b")
    for name in ("p", "q"):
        world.add(name, 2, wanted=1)
        world.held["a", name] = 2 * BLOCK
    world.gate.clear()
    job = world.job(JobKind.HAND_OVER)
    task = asyncio.create_task(world.do(job))
    await soon(lambda: bool(world.running))
    world.names = world.names[1:]
    world.held = {}
    world.gate.set()
    await task
    assert (job.end, job.done) == (JobEnd.DONE, 2)
    assert sorted(name for _, name, _, _ in world.sent) == ["p", "q"]


async def test_a_hand_over_waits_for_an_heir_that_takes_nothing_now() -> None:
    world = World("a", "b")
    world.add("p", 2, wanted=1)
    world.held["a", "p"] = 2 * BLOCK
    world.closed.add("b")
    job = world.job(JobKind.HAND_OVER)
    task = asyncio.create_task(world.do(job))
    await asyncio.sleep(0.02)
    assert (job.end, job.state, world.sent) == (None, JobState.WAITING, [])
    world.closed.clear()
    await task
    assert (job.end, world.sent) == (JobEnd.DONE, [("b", "p", 2 * BLOCK, 0)])


@pytest.mark.parametrize("replicas", [("a",), ("a", "b")])
async def test_a_hand_over_that_nobody_could_take_has_failed(replicas: tuple[str, ...]) -> None:
    world = World(*replicas)
    world.add("p", 2, wanted=1)
    world.held["a", "p"] = 2 * BLOCK
    world.closed.add("b")
    job = await world.do(world.job(JobKind.HAND_OVER, seconds=60.0 if len(replicas) == 1 else 0.1))
    assert (job.end, world.sent) == (JobEnd.FAILED, [])


async def test_a_replica_that_holds_nothing_has_nothing_to_hand_over() -> None:
    world = World("a")
    world.add("p", 2, wanted=1)
    assert (await world.do(world.job(JobKind.HAND_OVER))).end is JobEnd.DONE


async def test_an_heir_that_dies_gives_way_to_another_one() -> None:
    world = World("a", "b", "c")
    world.add("p", 2, wanted=1)
    world.held["a", "p"] = 2 * BLOCK
    world.gate.clear()
    job = world.job(JobKind.HAND_OVER)
    task = asyncio.create_task(world.do(job))
    await soon(lambda: bool(world.running))
    [dead] = world.running
    world.closed.add(dead)
    world.must_yield = True
    await soon(lambda: dead not in world.running)
    world.must_yield = False
    world.gate.set()
    await task
    [heir] = {"b", "c"} - {dead}
    assert (job.end, job.done) == (JobEnd.DONE, 1)
    assert world.held[heir, "p"] == 2 * BLOCK
