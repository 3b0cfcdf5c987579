"""Requests that wait in the router: whoever goes has a lease, whoever leaves has none."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from policies.hold import HoldEnd, HoldSettings
from policies.model import Decision, Reason
from router.error import NoReplicaError
from router.hold import REST_S, Hold
from state.lease import LeaseBook, Outcome
from state.model import ReplicaId

if TYPE_CHECKING:
    from router.chooser import Choice, Routed
    from state.lease import Lease

A = ReplicaId("a")


class Taken:
    """What a choice takes, as far as a queue cares."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def finish(self, outcome: Outcome, *, had_first_byte: bool) -> None:
        assert not had_first_byte
        self.lease.finish(outcome)


class Desk:
    """A queue before one replica that takes ``room`` requests at a time."""

    def __init__(self, room: int = 1, **settings: Any) -> None:
        self.room = room
        self.leases = LeaseBook()
        self.ends: list[HoldEnd] = []
        self.sent: list[str] = []
        self.peeks = 0
        self.fault: Exception | None = None
        self.knows_wait = True
        self.hold = Hold(
            HoldSettings(enabled=True, **settings),
            clock=time.monotonic,
            note=lambda end, _: self.ends.append(end),
            tenant_of=lambda routed: routed.prompt.salt,
        )

    def peek(self) -> Decision | None:
        self.peeks += 1
        if self.fault is not None:
            raise self.fault
        wait_ms = 0.0 if self.leases.open_count < self.room else 1_000.0
        return Decision(
            replica=A,
            reason=Reason.PREFIX,
            predicted_cached_tokens=0,
            candidates=(),
            predicted_wait_ms=wait_ms if self.knows_wait else None,
        )

    async def ask(self, name: str, tokens: int = 100, *, prompts: int = 1) -> Taken:
        """Return what the request took, once it was its turn."""

        def choose(_: Decision | None) -> Choice:
            if self.fault is not None:
                raise self.fault
            self.sent.append(name)
            return cast("Choice", Taken(self.leases.acquire(A, tokens, 0.0)))

        prompt = SimpleNamespace(prompts=(None,) * prompts, salt="")
        routed = cast("Routed", SimpleNamespace(prompt=prompt, prompt_tokens=tokens))
        taken, held_s = await self.hold.choose(routed, self.peek, choose)
        assert held_s >= 0
        return cast("Taken", taken)

    def start(self, name: str, tokens: int = 100) -> asyncio.Task[Taken]:
        return asyncio.create_task(self.ask(name, tokens))

    def free(self, taken: Taken) -> None:
        """End a request."""
        taken.lease.finish(Outcome.DONE)
        self.hold.wake()


async def waiting(desk: Desk, count: int) -> None:
    """Let ``count`` requests come to wait."""
    async with asyncio.timeout(20):
        while len(desk.hold) != count:  # noqa: ASYNC110 - observes from outside
            await asyncio.sleep(0)


async def test_requests_wait_for_the_replica_and_the_shortest_goes_first() -> None:
    desk = Desk()
    first = await desk.ask("first")
    tasks = [desk.start("long", 9_000), desk.start("short", 10)]
    await waiting(desk, 2)
    desk.free(first)
    desk.free(await tasks[1])
    desk.free(await tasks[0])
    assert desk.sent == ["first", "short", "long"]
    assert desk.ends == [HoldEnd.RELEASED] * 2
    assert desk.leases.open_count == 0


async def test_one_free_place_is_given_once() -> None:
    desk = Desk()
    first = await desk.ask("first")
    tasks = [desk.start(str(number)) for number in range(5)]
    await waiting(desk, 5)
    desk.free(first)
    await waiting(desk, 4)
    await asyncio.sleep(0.06)
    assert (desk.leases.open_count, len(desk.hold)) == (1, 4)
    desk.hold.drain()
    assert len(await asyncio.gather(*tasks)) == 5


async def test_what_nobody_calls_about_is_seen_at_the_next_tick() -> None:
    desk = Desk()
    first = await desk.ask("first")
    task = desk.start("second")
    await waiting(desk, 1)
    await asyncio.sleep(0.01)
    first.lease.finish(Outcome.DONE)
    async with asyncio.timeout(20):
        await task


async def test_nobody_waits_longer_than_allowed() -> None:
    desk = Desk(max_wait_s=0.05)
    await desk.ask("first")
    began_s = time.monotonic()
    async with asyncio.timeout(20):
        await desk.ask("second")
    assert time.monotonic() - began_s >= 0.05
    assert desk.ends == [HoldEnd.TIMED_OUT]


async def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    desk = Desk()
    first = await desk.ask("first")
    task = desk.start("leaver")
    await waiting(desk, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(desk.hold), desk.ends) == (0, [HoldEnd.LEFT])
    desk.free(first)
    await asyncio.sleep(0.06)
    assert desk.sent == ["first"]
    assert desk.leases.open_count == 0


async def test_a_client_that_leaves_in_the_moment_of_its_turn_gives_the_place_to_the_next() -> None:
    desk = Desk()
    first = await desk.ask("first")
    leaver, other = desk.start("leaver", 10), desk.start("other", 1_000)
    await waiting(desk, 2)
    first.lease.finish(Outcome.DONE)
    desk.hold._look()
    assert desk.sent == ["first", "leaver"]
    leaver.cancel()  # its choice is there, but it has not woken up
    with pytest.raises(asyncio.CancelledError):
        await leaver
    async with asyncio.timeout(20):
        desk.free(await other)
    assert sorted(desk.ends) == [HoldEnd.LEFT, HoldEnd.RELEASED]
    assert desk.leases.open_count == 0


async def test_a_cancelled_request_that_has_not_left_yet_is_sent_nowhere() -> None:
    desk = Desk()
    first = await desk.ask("first")
    task = desk.start("leaver")
    await waiting(desk, 1)
    task.cancel()
    first.lease.finish(Outcome.DONE)
    desk.hold._look()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert desk.sent == ["first"]
    assert (desk.leases.open_count, desk.ends) == (0, [HoldEnd.LEFT])


async def test_a_drain_lets_all_go_and_holds_nobody_any_more() -> None:
    desk = Desk()
    await desk.ask("first")
    tasks = [desk.start(str(number)) for number in range(3)]
    await waiting(desk, 3)
    desk.hold.drain()
    await asyncio.gather(*tasks)
    await desk.ask("late")
    assert desk.ends == [HoldEnd.DRAINED] * 3
    assert len(desk.hold) == 0


async def test_beyond_its_bound_the_queue_holds_nobody() -> None:
    desk = Desk(max_queue=1)
    await desk.ask("first")
    task = desk.start("waits")
    await waiting(desk, 1)
    await desk.ask("passes")
    assert desk.ends == [HoldEnd.BYPASSED]
    assert desk.sent == ["first", "passes"]
    desk.hold.drain()
    await task


async def test_requests_without_a_prefix_and_policies_without_a_wait_are_not_held() -> None:
    desk = Desk(room=0)
    await desk.ask("load only", prompts=0)
    assert desk.peeks == 0
    desk.knows_wait = False
    await desk.ask("no wait known")
    assert desk.ends == []


@pytest.mark.parametrize("fault", [NoReplicaError("none"), ZeroDivisionError()])
async def test_a_fault_goes_to_the_request_that_it_concerns(fault: Exception) -> None:
    desk = Desk()
    await desk.ask("first")
    tasks = [desk.start("one"), desk.start("two")]
    await waiting(desk, 2)
    desk.fault = fault
    async with asyncio.timeout(20):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert ended == [fault, fault]
    assert (len(desk.hold), desk.leases.open_count) == (0, 1)


async def test_with_nobody_waiting_there_is_no_timer() -> None:
    desk = Desk()
    first = await desk.ask("first")
    desk.hold.wake()
    assert desk.hold._timer is None
    task = desk.start("second")
    await waiting(desk, 1)
    desk.free(first)
    await task
    assert desk.hold._timer is None


async def test_however_often_something_frees_there_is_rest_between_wake_ups() -> None:
    desk = Desk()
    await desk.ask("first")
    task = desk.start("second")
    await waiting(desk, 1)
    before, began_s, calls = desk.peeks, time.monotonic(), 0
    while time.monotonic() - began_s < 0.02:
        desk.hold.wake()
        calls += 1
        await asyncio.sleep(0)
    most = 2 + (time.monotonic() - began_s) / REST_S
    assert 1 <= desk.peeks - before <= most < calls
    desk.hold.drain()
    await task
