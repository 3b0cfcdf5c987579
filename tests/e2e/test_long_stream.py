"""A stream of a real router that goes on for long, and what is told of it when it has ended."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from support.fleet import until
from support.raw import DONE, LAST, SSE, RawClient, Received, Talk, chunk, get, sized
from support.stage import EVENT, Actor, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from pathlib import Path

    from support.stage import Stage

BODY_BYTES = 3_000
LONG, SHORT = "long " * 400, "short " * 333
"""Two of them together are more than ``buffered_bytes``."""


class Play:
    """Replicas that answer at once; but to what is long with a stream, until it may end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def answer(self, talk: Talk, received: Received) -> None:
        if b"long" not in received.body:
            await talk.say(sized(b"{}"))
            return
        await talk.say(SSE + chunk(EVENT))
        await self.may_end.wait()
        await talk.say(chunk(EVENT)[:3])
        await talk.say(chunk(EVENT)[3:] + chunk(DONE) + LAST)


async def decision_of(stage: Stage, request_id: str) -> dict[str, object]:
    """Return what operators are told of a request."""
    client = await RawClient.connect(int(stage.fleet.router.admin_url.rpartition(":")[2]))
    client.send(get(f"/debug/decisions/{request_id}", host=b"localhost"))
    try:
        found: dict[str, object] = json.loads((await client.reply()).body)
    finally:
        client.abort()
    return found


async def test_its_decision_is_explained_as_ever_although_its_request_was_let_go(
    tmp_path: Path,
) -> None:
    """Its body no longer counts once it is gone: then there is room for another one."""
    limits = {"body_bytes": BODY_BYTES, "buffered_bytes": BODY_BYTES}
    actors = [Actor("a"), Actor("b")]
    async with staged_router(tmp_path, actors, limits=limits) as stage:
        play = Play()
        stage.cast(play.answer)
        client = await stage.client()
        client.send(post_to(chat_body(LONG), x_request_id="long-one"))

        async def is_with_a_replica() -> bool:
            return any(b"long" in post.body for post in stage.posts())

        await until(is_with_a_replica, "a replica has the request")

        async def is_let_go() -> bool:
            return (await stage.ask(post_to(chat_body(SHORT)))).status == 200

        await until(is_let_go, "there is room for another body")
        play.may_end.set()
        reply = await client.reply()
        assert (reply.is_complete, reply.body) == (True, EVENT + EVENT + DONE)
        decision = json.dumps(await decision_of(stage, "long-one"))
        assert decision.count('"terms"') == len(actors)
        client.send(post_to(chat_body(SHORT)))
        assert (await client.reply()).status == 200
