"""Requests on a replica that froze: they do not wait for a limit of minutes."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from support.fleet import until
from support.frail_engine import FrailFleet
from support.frail_rig import FAST, Rig, rig

if TYPE_CHECKING:
    from pathlib import Path

    from support.frail_engine import FrailEngine

SOON: dict[str, Any] = {**FAST, "silent_s": 0.5}


async def asked(stand: Rig, count: int) -> None:
    """Wait until the engines had ``count`` requests."""

    async def are_there() -> bool:
        return sum(await stand.frail.counts("asked")) == count

    await until(are_there, f"{count} requests are with the engines")


async def busy_of(stand: Rig) -> FrailEngine:
    """Return the engine that had a request."""
    counts = await stand.frail.counts("asked")
    return stand.engines[counts.index(max(counts))]


async def test_unanswered_requests_of_a_frozen_replica_are_moved(tmp_path: Path) -> None:
    """C-02, C-13: each once, and the replica is not held to have failed them."""
    async with rig(tmp_path, 2, health=SOON) as stand:
        waiting = [asyncio.create_task(stand.ask(f"{n}", delay_s=2.0)) for n in range(6)]
        await asked(stand, 6)
        frozen = stand.engines[0]
        frozen.send(signal.SIGSTOP)
        try:
            replies = await asyncio.gather(*waiting)
            assert all(reply.is_good for reply in replies), replies
            assert await stand.labelled("warmroute_retries_total", reason="silent") == 3
            assert (await stand.standing("r0"))["standing"] == "down"
        finally:
            frozen.send(signal.SIGCONT)
        await stand.stands("r0", "slow_start")
        assert await stand.metric("warmroute_ejections_total") == 0


@pytest.mark.parametrize(
    ("fields", "config"), [({"n": 2}, {}), ({}, {"retry": {"after_send": "never"}})]
)
async def test_what_may_not_be_sent_twice_ends_with_a_clear_error(
    tmp_path: Path, fields: dict[str, Any], config: dict[str, Any]
) -> None:
    async with rig(tmp_path, 2, health=SOON, **config) as stand:
        waiting = asyncio.create_task(stand.ask(delay_s=60.0, **fields))
        await asked(stand, 1)
        frozen = await busy_of(stand)
        frozen.send(signal.SIGSTOP)
        try:
            reply = await waiting
        finally:
            frozen.send(signal.SIGCONT)
        assert (reply.status, b'"replica_silent"' in reply.body) == (504, True)
        assert sum(await stand.frail.counts("asked")) == 1


async def test_a_stream_that_began_on_a_frozen_replica_ends_with_an_event(tmp_path: Path) -> None:
    async with rig(tmp_path, 2, health=SOON) as stand:
        waiting = asyncio.create_task(stand.ask(stream=True, events=600, pause_s=0.1))
        await asked(stand, 1)
        await asyncio.sleep(0.3)
        frozen = await busy_of(stand)
        frozen.send(signal.SIGSTOP)
        try:
            reply = await waiting
        finally:
            frozen.send(signal.SIGCONT)
        assert b'"delta"' in reply.body
        assert reply.body.rstrip().endswith(b"}}")
        assert b'"replica_silent"' in reply.body
        assert b"[DONE]" not in reply.body


async def test_a_replica_that_answers_its_checks_badly_is_not_silent(tmp_path: Path) -> None:
    """It is out, and whatever it has goes on, however long that takes."""
    async with rig(tmp_path, 2, health=SOON) as stand:
        waiting = [
            asyncio.create_task(stand.ask("a", delay_s=4.0)),
            asyncio.create_task(stand.ask("b", stream=True, events=2, pause_s=2.0)),
        ]
        await asked(stand, 2)
        await FrailFleet(stand.engines[:1]).tell(health=500)
        await stand.stands("r0", "down")
        replies = await asyncio.gather(*waiting)
        assert all(reply.is_good for reply in replies), replies
        assert await stand.metric("warmroute_retries_total") == 0


async def test_the_only_replica_is_waited_for_longer_and_not_for_ever(tmp_path: Path) -> None:
    """Nobody else could take the request, and the fault may be the router's own."""
    patient = {**SOON, "silent_s": 1.0}
    async with rig(tmp_path, 1, health=patient) as stand:
        (only,) = stand.engines
        waiting = asyncio.create_task(stand.ask(delay_s=2.0))
        await asked(stand, 1)
        only.send(signal.SIGSTOP)
        await stand.stands("r0", "down")
        await asyncio.sleep(2.0)
        only.send(signal.SIGCONT)
        assert (await waiting).is_good
        await stand.stands("r0", "up")
        waiting = asyncio.create_task(stand.ask(delay_s=60.0))
        await asked(stand, 2)
        only.send(signal.SIGSTOP)
        try:
            reply = await waiting
        finally:
            only.send(signal.SIGCONT)
        assert (reply.status, b'"replica_silent"' in reply.body) == (504, True)
        denied = await stand.labelled("warmroute_retries_denied_total", reason="no_replica")
        assert denied == 1


async def test_a_router_that_stood_still_blames_no_replica(tmp_path: Path) -> None:
    """C-18: its checks ran out of time, and so did everything that it was waiting for."""
    async with rig(tmp_path, 2, health={**SOON, "silent_s": 0.2}) as stand:
        waiting = [asyncio.create_task(stand.ask(f"{n}", delay_s=4.0)) for n in range(4)]
        await asked(stand, 4)
        router = stand.fleet.router.child.process
        for _ in range(3):
            router.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.8)
            router.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.05)
        replies = await asyncio.gather(*waiting)
        assert all(reply.is_good for reply in replies), replies
        assert await stand.metric("warmroute_retries_total") == 0


async def test_requests_of_a_replica_that_left_and_froze_are_moved_too(tmp_path: Path) -> None:
    """Whoever has requests of ours is checked, in the fleet or not."""
    path = tmp_path / "replicas.yaml"
    async with rig(
        tmp_path,
        2,
        health=SOON,
        replicas=[],
        discovery={"file": str(path), "file_interval_s": 0.2},
    ) as stand:
        listed = [f"- {{url: '{each.url}', name: {each.name}}}\n" for each in stand.engines]
        path.write_text("".join(listed), encoding="utf-8")
        await until(lambda: are_up(stand), "both are up")
        waiting = [asyncio.create_task(stand.ask(f"{n}", delay_s=3.0)) for n in range(4)]
        await asked(stand, 4)
        frozen = stand.engines[0]
        frozen.send(signal.SIGSTOP)
        try:
            other = tmp_path / "other.yaml"
            other.write_text(listed[1], encoding="utf-8")
            other.replace(path)
            replies = await asyncio.gather(*waiting)
        finally:
            frozen.send(signal.SIGCONT)
        assert "r0" not in await stand.fleet.seen()
        assert all(reply.is_good for reply in replies), replies
        assert await stand.labelled("warmroute_retries_total", reason="silent") == 2


async def are_up(stand: Rig) -> bool:
    """Return whether both replicas are there and up."""
    seen = await stand.fleet.seen()
    return len(seen) == 2 and all(one["up"] for one in seen.values())
