"""Hedging on real engines: whoever answers first is passed on, the other one is ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.fleet import until
from support.frail_engine import FrailFleet
from support.frail_rig import CHAT, Rig, rig

if TYPE_CHECKING:
    from pathlib import Path

HEDGE: dict[str, Any] = {"enabled": True, "share": 0.2, "delay_s": 1.0}
LATE_S = 60.0


async def lag(stand: Rig, number: int, lag_s: float) -> None:
    """Let one engine answer later."""
    await FrailFleet([stand.engines[number]]).tell(lag_s=lag_s)


async def are_gone(stand: Rig, left: int) -> None:
    """Wait until the engines have been left by so many requests, and nobody has any."""

    async def is_so() -> bool:
        return sum(await stand.frail.counts("left")) >= left

    await until(is_so, f"{left} requests were ended")
    await stand.fleet.settled()


async def hedges(stand: Rig, **labels: str) -> float:
    """Return how many second attempts ended so."""
    return await stand.labelled("warmroute_hedges_total", **labels)


@pytest.mark.parametrize("is_head_first", [False, True])
async def test_a_second_replica_answers_for_one_that_is_late(
    tmp_path: Path, *, is_head_first: bool
) -> None:
    """The late one is told to stop, its lease ends once, and the record says what was done."""
    async with rig(tmp_path, 2, hedge=HEDGE, policy={"kind": "round_robin"}) as stand:
        for number in (0, 1):
            await stand.frail.tell(lag_s=0.0)
            for _ in range(10):  # so that there is room for one more
                assert (await stand.ask(stream=True)).is_good
            await lag(stand, number, LATE_S)
            for _ in range(2):  # one of two goes to the late one
                reply = await stand.ask(stream=True, head_first=is_head_first)
                assert reply.is_good, reply
                assert reply.body.count(b'"by"') == 1
                assert b'"by":"r%d"' % (1 - number) in reply.body
        await are_gone(stand, 2)
        assert await hedges(stand, end="won") >= 2
        records = [
            record for record in await stand.fleet.decisions(100) if len(record["attempts"]) == 2
        ]
        assert len(records) == await hedges(stand)
        for record in records:
            loser, winner = record["attempts"]
            assert (loser["outcome"], loser["error"]) == ("cancelled", "hedge_lost")
            assert (winner["outcome"], record["status"]) == ("done", 200)
            assert winner["is_hedge"] is not loser["is_hedge"]
            assert loser["decision"]["replica"] != winner["decision"]["replica"]
        assert sum(record["attempts"][1]["is_hedge"] for record in records) >= 2
        assert await stand.metric("warmroute_retries_total") == 0


async def test_of_two_that_answer_at_much_the_same_time_one_is_passed_on(tmp_path: Path) -> None:
    """The client never sees bytes of both."""
    async with rig(tmp_path, 2, hedge=HEDGE) as stand:
        await stand.frail.tell(lag_s=4.0)
        reply = await stand.ask(stream=True, events=5)
        assert reply.is_good
        assert reply.body.count(b'"by"') == reply.body.count(b"[DONE]") == 1
        assert await stand.frail.counts("asked") == [1, 1]
        assert await hedges(stand, end="won") + await hedges(stand, end="lost") == 1
        await stand.fleet.settled()


async def test_a_client_that_leaves_ends_both(tmp_path: Path) -> None:
    async with rig(tmp_path, 2, hedge=HEDGE) as stand:
        await stand.frail.tell(lag_s=LATE_S)
        asked = asyncio.create_task(stand.ask(stream=True))

        async def are_both_asked() -> bool:
            return await stand.frail.counts("asked") == [1, 1]

        await until(are_both_asked, "both have it")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await are_gone(stand, 2)

        async def is_counted() -> bool:
            return await hedges(stand, end="left") == 1

        await until(is_counted, "it is counted")
        await stand.frail.tell(lag_s=0.0)
        assert (await stand.ask(stream=True)).is_good


async def test_one_that_fails_gives_way_to_the_other(tmp_path: Path) -> None:
    """Its failure counts for the replica, and the client gets the answer."""
    async with rig(tmp_path, 2, hedge=HEDGE) as stand:
        await stand.frail.tell(lag_s=8.0)
        asked = asyncio.create_task(stand.ask(stream=True))

        async def are_both_asked() -> bool:
            return await stand.frail.counts("asked") == [1, 1]

        await until(are_both_asked, "both have it")
        await stand.engines[0].kill()
        reply = await asked
        assert reply.is_good
        assert b'"by":"r1"' in reply.body
        await stand.stands("r0", "down")
        assert await hedges(stand) == 1


@pytest.mark.parametrize("fields", [{"stream": True, "n": 2}, {"stream": False}])
async def test_what_may_not_be_repeated_or_does_not_stream_is_never_hedged(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with rig(tmp_path, 2, hedge=HEDGE) as stand:
        assert (await stand.ask(delay_s=3.0, **fields)).is_good
        assert sum(await stand.frail.counts("asked")) == 1
        assert await hedges(stand) == 0


async def test_hedges_are_a_share_of_the_requests(tmp_path: Path) -> None:
    """All are late: that is no reason to compute everything twice."""
    hedge = {**HEDGE, "share": 0.1}
    async with rig(tmp_path, 2, hedge=hedge) as stand:
        await stand.frail.tell(lag_s=1.5)
        for number in range(12):
            assert (await stand.ask(f"{number}", stream=True)).is_good
        assert sum(await stand.frail.counts("asked")) == 12 + await hedges(stand)
        assert 1 <= await hedges(stand) <= 2
        denied = await stand.labelled("warmroute_hedges_denied_total")
        assert denied + await hedges(stand) == 12


async def test_off_a_request_is_sent_once_and_its_head_is_not_held_back(tmp_path: Path) -> None:
    async with rig(tmp_path, 2) as stand:
        body = {"model": "fleet-model", "stream": True, "head_first": True, "delay_s": LATE_S,
                "messages": [{"role": "user", "content": "x"}]}  # fmt: skip
        async with stand.fleet.http.post(stand.fleet.router.url + CHAT, json=body) as answer:
            assert answer.status == 200
        assert sum(await stand.frail.counts("asked")) == 1
