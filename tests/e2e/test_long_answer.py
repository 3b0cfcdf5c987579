"""An answer that goes on for long lets go of its request, and nobody notices."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from router.body import read_body
from router.config import LimitSettings
from router.reply import own_response
from support.front import Front, staged
from support.listening import listening
from support.raw import DONE, LAST, SSE, Talk, chunk, post, sized, with_both_loops

if TYPE_CHECKING:
    from router.client import Answer
    from router.request import Request

BODY = b'{"prompt":"%b"}' % (b"x" * 4_000)
EVENT = b"data: {}\n\n"
CODED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nTransfer-Encoding: chunked\r\n\r\n%b%b"
) % (chunk(BODY), LAST)


class Play:
    """A replica whose first answer goes on until it is told to end; later ones are short."""

    def __init__(self) -> None:
        self.may_end, self.let_go = asyncio.Event(), asyncio.Event()
        self.times = 0

    def watch(self, front: Front) -> None:
        """Have the front's connections let go of what they can."""

        def on_long() -> None:
            front.connections[-1].lighten()
            self.times += 1
            self.let_go.set()

        front.template["on_long"] = on_long

    async def script(self, talk: Talk) -> None:
        await talk.request()
        await talk.say(SSE + chunk(EVENT))
        await self.may_end.wait()
        await talk.say(chunk(EVENT))
        await talk.say(chunk(DONE) + LAST)
        while True:
            await talk.request()
            await talk.say(sized(b"{}"))


@pytest.mark.parametrize("is_pipelined", [False, True])
@with_both_loops
async def test_its_body_is_gone_and_the_next_request_is_read_as_ever(
    is_pipelined: bool,  # noqa: FBT001 - drawn
) -> None:
    play = Play()
    async with staged(play.script) as front:
        play.watch(front)
        client = await front.client()
        client.send(post(BODY))
        if is_pipelined:
            client.send(post(b'{"next":1}'))
        await play.let_go.wait()
        assert front.server.bodies.held_bytes == 0
        assert not front.connections[-1].is_timed
        play.may_end.set()
        reply = await client.reply()
        assert (reply.is_complete, reply.body) == (True, EVENT + EVENT + DONE)
        if not is_pipelined:
            client.send(post(b'{"next":1}'))
        assert (await client.reply()).body == b"{}"
        assert [one.body for one in front.replica.requests] == [BODY, b'{"next":1}']
        assert play.times == 1
        await front.settled()
        assert front.server.bodies.held_bytes == 0
        assert front.connections[-1].is_timed


@with_both_loops
async def test_a_body_in_chunks_is_gone_too() -> None:
    play = Play()
    async with staged(play.script) as front:
        play.watch(front)
        client = await front.client()
        client.send(CODED)
        await play.let_go.wait()
        assert front.server.bodies.held_bytes == 0
        play.may_end.set()
        assert (await client.reply()).body == EVENT + EVENT + DONE
        client.send(CODED)
        assert (await client.reply()).body == b"{}"
        assert [one.body for one in front.replica.requests] == [BODY, BODY]


@with_both_loops
async def test_after_a_long_answer_the_next_head_has_its_deadline_as_ever() -> None:
    """While it goes on nobody looks at the connection's deadlines."""
    limits = LimitSettings(head_deadline_s=0.1)
    may_end = asyncio.Event()

    async def handle(request: Request) -> Answer:
        await read_body(request, limits)
        await may_end.wait()
        return own_response(b"done", "text/plain")

    async with listening(limits, handle) as server:
        client = await server.client()
        client.send(post(b"{}"))
        while not server.handled or server.handled[0].connection.is_timed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        may_end.set()
        assert (await client.reply()).body == b"done"
        client.send(b"POST / HTTP/1.1\r\nHost:")
        assert (await client.reply()).status == 408
        assert await client.is_closed()
