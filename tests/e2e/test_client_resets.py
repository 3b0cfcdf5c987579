"""A client that resets its connection: no end of its bytes comes first, only a lost connection."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import pytest

from support.fleet import until
from support.raw import SSE, Received, Talk, chunk
from support.stage import EVENT, Actor, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the head", "amid the stream"])
async def test_a_client_that_resets_frees_the_replica(tmp_path: Path, *, has_begun: bool) -> None:
    """A29, A30: as one that closes; a mobile network or a killed process looks like this."""
    gone: list[bool] = []

    async def silent(talk: Talk, _: Received) -> None:
        if has_begun:
            await talk.say(SSE + chunk(EVENT))
        await talk.until_gone()
        gone.append(True)

    actor = Actor("a")
    actor.answer = silent
    async with staged_router(tmp_path, [actor]) as stage:
        client = await stage.client()
        client.send(post_to(chat_body(), x_request_id="reset"))

        async def is_waiting() -> bool:
            return len(actor.posts()) == 1 and await stage.fleet.inflight() == 1

        await until(is_waiting, "a request at the replica")
        if has_begun:
            await client.reader.readuntil(EVENT)
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()

        async def is_noticed() -> bool:
            return bool(gone)

        await until(is_noticed, "the replica's connection closed")
        await stage.fleet.settled()
        record = await stage.fleet.decision("reset")
        assert record["outcome"] == "cancelled"
