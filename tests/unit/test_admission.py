"""Who is admitted, who waits, who is shed: on fakes, with the real rules and the real queue."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from policies.hold import HoldEnd
from router.admission import ASSUMED_PLACES
from router.admission_setting import LearnSettings, Priority
from router.concurrency import ReplicaLimits
from router.overload import LoadRung
from router.shed import InflightCapError, LowPriorityShedError, QueueFullError, RouterOverloadError
from state.model import LeaseTotals, ReplicaId
from support.admitting import Desk, shed_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.admitting import Placed

A = ReplicaId("a")


async def waiting(desk: Desk, count: int) -> None:
    async with asyncio.timeout(20):
        while len(desk.hold) != count:  # noqa: ASYNC110 - observes from outside
            await asyncio.sleep(0)


async def all_of(tasks: Sequence[asyncio.Task[Placed]]) -> list[Placed]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*tasks)


# Places.


async def test_by_default_there_are_far_more_places_than_engines_use() -> None:
    desk = Desk()
    assert desk.admission.cap == 2 * ASSUMED_PLACES
    assert desk.admission.most_open == 2 * ASSUMED_PLACES + 1_024
    taken = await all_of([desk.start(str(number)) for number in range(500)])
    assert (len(desk.hold), desk.leases.open_count, len(taken)) == (0, 500, 500)


async def test_the_places_follow_the_fleet_and_an_empty_one_waits_for_nobody() -> None:
    desk = Desk(max_inflight_per_replica=3)
    assert desk.admission.cap == 6
    desk.up.pop()
    desk.admission.refresh()
    assert desk.admission.cap == 3
    desk.up.clear()
    desk.admission.refresh()
    assert desk.admission.blocked(desk.routed()) is None


async def test_beyond_the_cap_requests_wait_and_go_as_places_become_free() -> None:
    desk = Desk(max_inflight=2)
    taken = [await desk.ask("1"), await desk.ask("2")]
    tasks = [desk.start("3"), desk.start("4")]
    await waiting(desk, 2)
    desk.free(taken[0])
    await waiting(desk, 1)
    await asyncio.sleep(0.06)
    assert (len(desk.hold), desk.leases.open_count) == (1, 2), "one place is given once"
    desk.free(taken[1])
    await all_of(tasks)
    assert desk.ends == [HoldEnd.RELEASED] * 2


async def test_a_replica_takes_no_more_than_its_limit_with_what_other_routers_have_there() -> None:
    desk = Desk(max_inflight_per_replica=3)
    desk.foreign[A] = LeaseTotals(inflight=2)
    await all_of([desk.start(str(number)) for number in range(4)])
    assert desk.leases.inflight(A) == 1
    assert desk.leases.inflight(ReplicaId("b")) == 3
    task = desk.start("5")
    await waiting(desk, 1)
    desk.foreign.clear()  # the other router ended: nobody calls about that
    await all_of([task])
    assert desk.leases.inflight(A) == 2


async def test_nobody_is_shed_while_a_replica_with_the_model_has_room() -> None:
    desk = Desk(models={"x": ["a"], "y": ["b"]}, max_inflight_per_replica=1, pending=1)
    await desk.ask("1", model="x")
    task = desk.start("2", model="x")
    await waiting(desk, 1)
    with pytest.raises(QueueFullError):
        await desk.ask("3", model="x")
    await desk.ask("4", model="y")
    task.cancel()


async def test_a_newcomer_does_not_take_a_place_from_those_who_wait() -> None:
    desk = Desk(max_inflight=1)
    first = await desk.ask("1")
    task = desk.start("2")
    await waiting(desk, 1)
    first.lease.finish(cast("Any", "done"))  # free, and nobody looked yet
    late = desk.start("3")
    second = (await all_of([task]))[0]
    assert desk.sent == ["1", "2"]
    desk.free(second)
    await all_of([late])


async def test_a_learned_limit_is_a_limit_of_its_replica() -> None:
    settings = LearnSettings(initial=4, minimum=2)
    limits = ReplicaLimits(settings, 100, lambda _: 7)
    desk = Desk(["a"], limits=limits)
    assert (desk.admission.cap, limits.began(A)) == (4, 7)
    await all_of([desk.start(str(number)) for number in range(4)])
    task = desk.start("5")
    await waiting(desk, 1)
    for number in range(400):
        limits.first_byte(A, work_ms=100.0, ttft_ms=110.0, inflight=4, now_s=0.1 * number)
    assert (desk.admission.limit(A) or 0) > 4
    desk.admission.refresh()
    await all_of([task])
    for number in range(100):
        limits.dropped(A, 1e3 + number)
    assert desk.admission.limit(A) == 2
    limits.forget(A)
    assert desk.admission.limit(A) == 4


# The queue.


async def test_a_full_queue_sheds_at_once() -> None:
    desk = Desk(max_inflight=1, pending=2)
    await desk.ask("1")
    tasks = [desk.start("2"), desk.start("3")]
    await waiting(desk, 2)
    with pytest.raises(QueueFullError) as refused:
        await desk.ask("4")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (len(desk.hold), desk.leases.open_count) == (0, 1)


async def test_who_finds_no_place_in_time_is_shed() -> None:
    desk = Desk(max_inflight=1, queue_timeout_s=0.02)
    await desk.ask("1")
    assert await shed_reason(desk.start("2")) == "queue_timeout"
    assert desk.ends == [HoldEnd.SHED]
    assert desk.leases.open_count == 1


async def test_a_higher_priority_goes_first_and_a_lower_one_gives_way_in_a_full_queue() -> None:
    desk = Desk(max_inflight=1, pending=3)
    first = await desk.ask("first")
    low = [desk.start(f"low{n}", priority=Priority.LOW) for n in range(2)]
    normal = desk.start("normal")
    await waiting(desk, 3)
    high = desk.start("high", priority=Priority.HIGH)
    await asyncio.sleep(0)
    assert len(desk.hold) == 3
    assert await shed_reason(low[1]) == "queue_full"
    with pytest.raises(QueueFullError):
        await desk.ask("low2", priority=Priority.LOW)
    for task in (high, normal, low[0]):
        desk.free(first)
        first = (await all_of([task]))[0]
    assert desk.sent == ["first", "high", "normal", "low0"]


async def test_in_a_full_queue_the_tenant_with_most_waiting_gives_way_to_one_with_less() -> None:
    """Also by the headers alone, before a body is read."""
    desk = Desk(max_inflight=1, pending=3)
    desk.admission.gives_way = desk.hold.gives_way
    await desk.ask("first")
    flood = [desk.start(f"flood{n}", tenant="flood") for n in range(3)]
    await waiting(desk, 3)
    desk.enter(open_requests=5)
    victims = [desk.start("victim0", tenant="victim")]
    assert await shed_reason(flood[2]) == "queue_full"
    with pytest.raises(QueueFullError):
        await desk.ask("flood3", tenant="flood")
    with pytest.raises(QueueFullError):
        await desk.ask("victim1", tenant="victim")
    with pytest.raises(QueueFullError):
        desk.enter(open_requests=4 + 3 + 1)
    desk.hold.shed_all()
    await asyncio.gather(*flood, *victims, return_exceptions=True)
    with pytest.raises(QueueFullError):
        desk.enter(open_requests=5)


async def test_a_flooding_tenant_does_not_keep_another_one_waiting() -> None:
    desk = Desk(max_inflight=1)
    taken = await desk.ask("first", tenant="flood")
    flood = [desk.start(f"flood{n}", tenant="flood") for n in range(20)]
    await waiting(desk, 20)
    victims = [desk.start(f"victim{n}", tenant="victim") for n in range(3)]
    await waiting(desk, 23)
    for _ in range(8):
        before = len(desk.sent)
        desk.free(taken)
        async with asyncio.timeout(20):
            while len(desk.sent) == before:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        [taken] = [t.result() for t in flood + victims if t.done() and not t.result().lease.outcome]
    assert sum(name.startswith("victim") for name in desk.sent) == 3
    for task in flood:
        task.cancel()


async def test_who_leaves_while_it_waits_leaves_nothing() -> None:
    desk = Desk(max_inflight=1)
    taken = await desk.ask("1")
    tasks = [desk.start("2"), desk.start("3")]
    await waiting(desk, 2)
    tasks[0].cancel()
    desk.free(taken)
    await all_of(tasks[1:])
    assert (desk.sent, desk.leases.open_count, len(desk.hold)) == (["1", "3"], 1, 0)


async def test_a_drain_goes_on_giving_places_and_its_end_sheds_who_still_waits() -> None:
    """C-20."""
    desk = Desk(max_inflight=1)
    taken = await desk.ask("1")
    tasks = [desk.start("2"), desk.start("3")]
    await waiting(desk, 2)
    desk.hold.drain()
    assert len(desk.hold) == 2
    desk.free(taken)
    await all_of(tasks[:1])
    desk.hold.shed_all()
    assert await shed_reason(tasks[1]) == "draining"
    assert desk.leases.open_count == 1


# Before the body.


async def test_more_open_requests_than_may_wait_are_refused_by_their_headers() -> None:
    desk = Desk(max_inflight=4, pending=3)
    desk.enter(open_requests=7)
    with pytest.raises(QueueFullError):
        desk.enter(open_requests=8)
    with pytest.raises(InflightCapError):
        Desk(max_inflight=4, pending=0).enter(open_requests=5)


async def test_without_a_queue_a_request_beyond_the_cap_is_refused() -> None:
    desk = Desk(max_inflight=1)
    desk.admission.check(desk.routed())
    await desk.ask("1")
    with pytest.raises(InflightCapError):
        desk.admission.check(desk.routed())


@pytest.mark.parametrize(
    ("tenants", "asked", "allowed", "given"),
    [
        (Priority.NORMAL, "low", True, Priority.LOW),
        (Priority.NORMAL, "high", True, Priority.NORMAL),
        (Priority.HIGH, "normal", True, Priority.NORMAL),
        (Priority.HIGH, "low", False, Priority.HIGH),
        (Priority.LOW, "", True, Priority.LOW),
    ],
)
async def test_a_client_may_lower_its_priority_where_it_is_let_and_never_raise_it(
    tenants: Priority,
    asked: str,
    allowed: bool,  # noqa: FBT001 - drawn from a row
    given: Priority,
) -> None:
    desk = Desk(client_priority=allowed)
    assert desk.enter(priority=tenants, asked=asked).priority is given


async def test_each_rung_of_the_ladder_stops_a_little_more() -> None:
    """C-17."""
    desk = Desk()
    request = cast("Any", SimpleNamespace(headers=SimpleNamespace(priority=None), keep_alive=True))
    overload = desk.admission._parts.overload
    overload.rung = LoadRung.SHED_LOW
    desk.enter()
    with pytest.raises(LowPriorityShedError) as low:
        desk.enter(priority=Priority.LOW)
    assert (low.value.status, low.value.code) == (429, "overload")
    overload.rung = LoadRung.CLOSE
    call = desk.enter()
    desk.admission.enter(request, call, 1)
    assert not request.keep_alive
    overload.rung = LoadRung.REFUSE
    with pytest.raises(RouterOverloadError) as refused:
        desk.enter(priority=Priority.HIGH)
    assert refused.value.status == 503
