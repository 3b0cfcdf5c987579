"""U-08: a replica that answers while its request is still on its way, behind a whole router."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.raw import Talk, get, sized
from support.stage import Actor, Stage, answer_at_once, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = bytes(6_000_000)
"""More than the sockets on the way hold."""


@dataclass(slots=True, eq=False)
class EarlyActor(Actor):
    """Answers to uploads with ``status`` when it has their head, and reads no further."""

    status: bytes = b""
    was_left: bool = False

    async def play(self, talk: Talk) -> None:
        """Serve one connection."""
        head = await talk.reader.readuntil(b"\r\n\r\n")
        if b"/x" not in head.split(b"\r\n")[0]:
            talk.reader.feed_data(head)
            await Actor.play(self, talk)
            return
        await talk.say(sized(b"no", status=self.status))
        await asyncio.sleep(0.3)
        await talk.until_gone()
        self.was_left = True


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["uvloop", "asyncio"])
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    flags = ("--loop", request.param)
    async with staged_router(
        tmp_path_factory.mktemp("early"),
        [EarlyActor("a")],
        router_flags=flags,
        paths=["/x"],
        upstream={"pool_idle_s": 600.0},  # what is closed was closed for the answer
        health={"interval_s": 3600.0},
    ) as running:
        yield running


@pytest.mark.parametrize("status", [b"413 Payload Too Large", b"429 Too Many Requests"])
async def test_an_early_answer_is_passed_on_and_the_upload_stops(
    stage: Stage, status: bytes
) -> None:
    """U-08: the replica's connection ends; the client's goes on, its body was read before."""
    actor = stage.actors[0]
    assert isinstance(actor, EarlyActor)
    actor.status, actor.was_left, actor.answer = status, False, answer_at_once
    client = await stage.client()
    async with asyncio.timeout(20):
        client.send(post_to(BODY, "/x"))
        reply = await client.reply()
        assert (reply.status, reply.body) == (int(status[:3]), b"no")
        client.send(get("/livez"))
        assert (await client.reply()).status == 200
        while not actor.was_left:  # noqa: ASYNC110 - observes from outside
            await asyncio.sleep(0.01)
