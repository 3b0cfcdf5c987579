"""A fleet of real processes of which some fail: what clients see, and what the router does."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import TYPE_CHECKING

from support.fleet import until
from support.frail_engine import POISON, FrailFleet
from support.frail_rig import Rig, rig

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_replica_that_is_killed_under_load_costs_no_client_an_error(tmp_path: Path) -> None:
    """C-01: what was unanswered is asked of another; the dead one is out at once."""
    async with rig(tmp_path, 3) as stand:
        load = asyncio.create_task(stand.load(3.0, 12, delay_s=0.15))
        await asyncio.sleep(1.0)
        await stand.engines[0].kill()
        await stand.stands("r0", "down")
        replies = await load
        assert [reply for reply in replies if not reply.is_good] == []
        assert len(replies) > 12
        assert await stand.metric("warmroute_retries_total") >= 1
        assert await stand.metric("warmroute_quarantined_requests") == 0


async def test_a_stream_that_began_on_a_killed_replica_ends_with_an_error(tmp_path: Path) -> None:
    """C-01: and no other replica ever adds to it."""
    async with rig(tmp_path, 2) as stand:
        asked = asyncio.create_task(stand.ask(stream=True, events=50, pause_s=0.1))

        async def has_begun() -> bool:
            return sum(await stand.frail.counts("asked")) == 1

        await until(has_begun, "the request")
        await asyncio.sleep(0.5)  # some events
        busy = next(e for e, n in zip(stand.engines, await stand.frail.counts("asked"),
                                      strict=True) if n)  # fmt: skip
        await busy.kill()
        reply = await asked
        assert b'"replica_closed"' in reply.body
        assert b"[DONE]" not in reply.body
        await stand.stands(busy.name, "down")
        assert (await stand.ask()).is_good


async def test_a_frozen_replica_costs_time_and_no_error(tmp_path: Path) -> None:
    """C13, C-02, C-13: no answer in time is asked of another once; checks take it out meanwhile."""
    async with rig(tmp_path, 2, upstream={"first_byte_timeout_s": 1.0}) as stand:
        frozen = stand.engines[0]
        frozen.send(signal.SIGSTOP)
        try:
            replies = await asyncio.gather(*(stand.ask(f"{n}") for n in range(6)))
            assert all(reply.is_good for reply in replies), replies
            assert any(reply.took_s >= 0.9 for reply in replies)
            await stand.stands(frozen.name, "down")
            tries = await stand.metric("warmroute_retries_total")
            assert (await stand.ask()).is_good
            assert await stand.metric("warmroute_retries_total") == tries > 0
        finally:
            frozen.send(signal.SIGCONT)
        await stand.stands(frozen.name, "slow_start")
        await stand.fleet.settled()


async def test_a_fleet_that_is_gone_is_a_quick_503_and_is_back_soon(tmp_path: Path) -> None:
    """C-04."""
    async with rig(tmp_path, 2) as stand:
        for engine in stand.engines:
            await engine.kill()
            await stand.stands(engine.name, "down")
        refused = [await stand.ask() for _ in range(20)]
        assert {reply.status for reply in refused} == {503}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert sorted(reply.took_s for reply in refused)[10] < 1.0
        await asyncio.gather(*(engine.start() for engine in stand.engines))
        for engine in stand.engines:
            await stand.stands(engine.name, "slow_start")
        assert (await stand.ask()).is_good


async def test_a_fleet_of_which_most_fail_uses_all_that_answer(tmp_path: Path) -> None:
    """C-05: panic is entered below half, is told, and is left with patience."""
    async with rig(tmp_path, 3, ejection={"panic_leave_s": 0.5}) as stand:
        for engine in stand.engines[:2]:
            await FrailFleet([engine]).tell(health=500)
            await stand.stands(engine.name, "down")
        await until(lambda: is_one(stand, "warmroute_panic_models", 1.0), "panic")
        replies = [await stand.ask(delay_s=0.0) for _ in range(12)]
        assert all(reply.is_good for reply in replies)
        assert min(await stand.frail.counts("asked")) > 0
        await FrailFleet(stand.engines).tell(health=200)
        await until(lambda: is_one(stand, "warmroute_panic_models", 0.0), "the end of panic")
        assert await stand.metric("warmroute_panics_total") == 1


async def is_one(stand: Rig, name: str, wanted: float) -> bool:
    """Return whether a figure is as wanted."""
    return await stand.metric(name) == wanted


async def test_a_replica_that_fails_requests_is_ejected_and_taken_back_by_one(
    tmp_path: Path,
) -> None:
    """A50: five failures in a row, a pause, one request, and then slowly all."""
    ejection = {"base_s": 3.0, "jitter": 0.0}
    async with rig(tmp_path, 3, ejection=ejection) as stand:
        bad = FrailFleet(stand.engines[:1])
        await bad.tell(mode="500")
        replies = []
        while (await stand.standing("r0"))["standing"] == "up":
            replies.append(await stand.ask())
            assert len(replies) < 50
        assert sum(reply.status == 500 for reply in replies) == 5
        asked = (await bad.counts("asked"))[0]
        assert all([(await stand.ask()).is_good for _ in range(10)])
        assert (await bad.counts("asked"))[0] == asked
        await bad.tell(mode="ok")
        await stand.stands("r0", "probation")
        replies = await asyncio.gather(*(stand.ask(f"{n}", delay_s=0.3) for n in range(50)))
        assert all(reply.is_good for reply in replies)
        assert (await bad.counts("asked"))[0] == asked + 1
        await stand.stands("r0", "slow_start")
        assert await stand.metric("warmroute_ejections_total") == 1


async def test_a_flapping_replica_is_ejected_and_its_falls_meanwhile_add_nothing(
    tmp_path: Path,
) -> None:
    """C-08."""
    async with rig(tmp_path, 3, ejection={"base_s": 300.0, "jitter": 0.0}) as stand:
        engine, left_s = stand.engines[0], []
        for _ in range(3):
            await engine.kill()
            await stand.stands("r0", "down")
            await engine.start()

            async def is_back() -> bool:
                return bool((await stand.fleet.seen())["r0"]["up"])

            await until(is_back, "r0 passes its checks")
            left_s.append((await stand.standing("r0"))["left_s"])
            assert (await stand.ask()).is_good
        first, second, third = left_s
        assert first <= 30.0 < second  # slow start, then out
        assert (await stand.standing("r0"))["standing"] == "ejected"
        assert third < second  # it is still out: falling while it is out adds nothing
        assert (await stand.standing("r0"))["reason"] == "flapping"


async def test_a_request_that_kills_replicas_is_kept_from_the_third(tmp_path: Path) -> None:
    """C-25: two are lost; the client is told not to try again, and the fleet goes on."""
    async with rig(tmp_path, 4) as stand:
        load = asyncio.create_task(stand.load(2.0, 6, delay_s=0.1))
        await asyncio.sleep(0.5)
        poisoned = [await stand.ask(POISON) for _ in range(5)]
        replies = await load
        assert stand.frail.alive == 2
        assert {reply.status for reply in poisoned} == {422}
        assert all(b"request_quarantined" in reply.body for reply in poisoned)
        assert await stand.metric("warmroute_quarantine_refusals_total") >= 5
        assert len([reply for reply in replies if not reply.is_good]) <= 1  # at most a bystander
        assert (await stand.ask()).is_good
        assert await stand.metric("warmroute_quarantined_requests") >= 1


async def test_a_fleet_that_fails_all_requests_is_not_asked_much_more_often(
    tmp_path: Path,
) -> None:
    """C-26: at most a fifth more, and three."""
    async with rig(tmp_path, 3) as stand:
        requests = 0
        for mode in ("500", "503", "close"):
            await stand.frail.tell(mode=mode)
            replies = await stand.load(1.2, 5)
            requests += len(replies)
            assert sum(await stand.frail.counts("asked")) <= 1.2 * requests + 3
            assert Counter(reply.is_good for reply in replies) == {False: len(replies)}
        assert requests > 15


async def test_a_replica_that_closes_every_connection_gets_no_request_twice(tmp_path: Path) -> None:
    """C-26: health checks keep the pool filled, so that each one goes on a pooled connection."""
    budget = {"reserve": 2, "ratio": 0.0}
    async with rig(tmp_path, 1, retry=budget, ejection={"failures": 1_000}) as stand:
        await stand.frail.tell(mode="close")
        for number in range(10):
            await asyncio.sleep(0.5)
            assert (await stand.ask(f"{number}")).status == 502
        assert await stand.frail.counts("asked") == [12]


async def test_a_busy_replica_is_passed_over_and_never_ejected(tmp_path: Path) -> None:
    """C20, F11: 503 means no room, not death."""
    async with rig(tmp_path, 2) as stand:
        busy = FrailFleet(stand.engines[:1])
        await busy.tell(mode="503")
        for _ in range(5):
            replies = await asyncio.gather(*(stand.ask(f"{n}", delay_s=0.02) for n in range(4)))
            assert all(reply.is_good for reply in replies)
            await asyncio.sleep(0.3)
        assert (await busy.counts("asked"))[0] >= 2
        assert (await stand.standing("r0"))["standing"] in {"up", "back_pressure"}
        assert await stand.metric("warmroute_ejections_total") == 0
