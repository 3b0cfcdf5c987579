"""A fleet of real processes of which some fail: what clients see, and what the router does."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from msgspec import Struct

from support.fleet import FleetPlan, LocalFleet, until
from support.frail_engine import MODEL, POISON, FrailEngine, FrailFleet
from support.kv_engine import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT = "/v1/chat/completions"
FAST: dict[str, Any] = {"interval_s": 0.2, "timeout_s": 0.5}


class Reply(Struct):
    """What a client got. ``code`` is that of the error, in the body or in the stream."""

    status: int
    body: bytes
    headers: dict[str, str]
    took_s: float
    is_cut: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it is a whole answer."""
        return self.status == 200 and not self.is_cut and b'"error"' not in self.body


class Rig:
    """A router in front of frail engines."""

    def __init__(self, fleet: LocalFleet, frail: FrailFleet) -> None:
        self.fleet = fleet
        self.frail = frail
        self.engines = frail.engines

    async def ask(self, text: str = "hello", **fields: Any) -> Reply:
        """Send one chat."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        began_s, received, is_cut = time.monotonic(), bytearray(), False
        async with self.fleet.http.post(self.fleet.router.url + CHAT, json=body) as answer:
            try:
                async for part in answer.content.iter_any():
                    received += part
            except aiohttp.ClientError:
                is_cut = True
            took_s = time.monotonic() - began_s
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return Reply(answer.status, bytes(received), headers, took_s, is_cut)

    async def load(self, seconds: float, width: int, **fields: Any) -> list[Reply]:
        """Let ``width`` clients ask one thing after the other."""
        until_s = time.monotonic() + seconds
        replies: list[Reply] = []

        async def client(number: int) -> None:
            count = 0
            while time.monotonic() < until_s:
                count += 1
                replies.append(await self.ask(f"client {number} asks {count}", **fields))

        await asyncio.gather(*map(client, range(width)))
        return replies

    async def standing(self, name: str) -> dict[str, Any]:
        """Return what the router makes of a replica."""
        found: dict[str, Any] = (await self.fleet.seen())[name]["standing"]
        return found

    async def stands(self, name: str, standing: str, timeout_s: float = 10.0) -> None:
        """Wait until a replica is something."""

        async def is_so() -> bool:
            return bool((await self.standing(name))["standing"] == standing)

        await until(is_so, f"{name} is {standing}", timeout_s)

    async def metric(self, name: str) -> float:
        """Return one figure of the router."""
        return (await self.fleet.gauges(self.fleet.router.url)).get(name, 0.0)


@asynccontextmanager
async def rig(folder: Path, count: int, **config: Any) -> AsyncIterator[Rig]:
    """Start ``count`` engines and a router that knows them."""
    engines = [FrailEngine(f"r{number}", free_port()) for number in range(count)]
    settings: dict[str, Any] = {
        "replicas": [{"url": each.url, "name": each.name} for each in engines],
        "attend_sidecars": False,
        "health": FAST,
        "policy": {"kind": "least_loaded"},
        **config,
    }
    async with (
        FrailFleet(engines) as frail,
        LocalFleet(folder, FleetPlan(replicas=0, config=settings)) as fleet,
    ):
        yield Rig(fleet, frail)


async def test_a_replica_that_is_killed_under_load_costs_no_client_an_error(tmp_path: Path) -> None:
    """C-01: what was unanswered is asked of another; the dead one is out at once."""
    async with rig(tmp_path, 3) as stand:
        load = asyncio.create_task(stand.load(3.0, 12, delay_s=0.15))
        await asyncio.sleep(1.0)
        await stand.engines[0].kill()
        await stand.stands("r0", "down", 1.0)
        replies = await load
        assert [reply for reply in replies if not reply.is_good] == []
        assert len(replies) > 50
        assert await stand.metric("warmroute_retries_total") >= 1
        assert await stand.metric("warmroute_quarantined_requests") == 0


async def test_a_stream_that_began_on_a_killed_replica_ends_with_an_error(tmp_path: Path) -> None:
    """C-01: and no other replica ever adds to it."""
    async with rig(tmp_path, 2) as stand:
        asked = asyncio.create_task(stand.ask(stream=True, events=50, pause_s=0.1))
        await asyncio.sleep(0.5)
        busy = next(e for e, n in zip(stand.engines, await stand.frail.counts("asked"),
                                      strict=True) if n)  # fmt: skip
        await busy.kill()
        killed_s = time.monotonic()
        reply = await asked
        assert time.monotonic() - killed_s < 1.0
        assert b'"replica_closed"' in reply.body
        assert b"[DONE]" not in reply.body
        await stand.stands(busy.name, "down", 2.0)
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
            await stand.stands(frozen.name, "down", 5.0)
            assert (await stand.ask()).took_s < 0.9
        finally:
            frozen.send(signal.SIGCONT)
        await stand.stands(frozen.name, "slow_start", 5.0)
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
        assert sorted(reply.took_s for reply in refused)[10] < 0.05
        await asyncio.gather(*(engine.start() for engine in stand.engines))
        for engine in stand.engines:
            await stand.stands(engine.name, "slow_start", 3.0)
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
    ejection = {"base_s": 1.0, "jitter": 0.0}
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
        await stand.stands("r0", "probation", 3.0)
        replies = await asyncio.gather(*(stand.ask(f"{n}", delay_s=0.3) for n in range(50)))
        assert all(reply.is_good for reply in replies)
        assert (await bad.counts("asked"))[0] == asked + 1
        await stand.stands("r0", "slow_start", 1.0)
        assert await stand.metric("warmroute_ejections_total") == 1


async def test_a_flapping_replica_is_ejected_and_its_falls_meanwhile_add_nothing(
    tmp_path: Path,
) -> None:
    """C-08."""
    async with rig(tmp_path, 3, ejection={"base_s": 20.0, "jitter": 0.0}) as stand:
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
        assert first > 20.0  # slow start, 30 s
        assert (await stand.standing("r0"))["standing"] == "ejected"
        assert second <= 20.0
        assert third <= 20.0  # it is still out: falling while it is out adds nothing
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
        assert requests > 60


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
