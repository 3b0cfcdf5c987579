"""Clients that leave before they have their answer, and after, against a whole router process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.fleet import until
from support.raw import DONE, SSE, RawClient, Received, Talk, chunk
from support.stage import EVENT, Actor, Stage, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

AT_ONCE_S = 10.0
"""On a machine that may stand still; what is not noticed at once stays until the answer ends."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with staged_router(tmp_path_factory.mktemp("stage"), [Actor("a"), Actor("b")]) as stage:
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.reset()
    return running


class Gone:
    """Notes how long after ``left_s`` the router closed the connections to its replicas."""

    def __init__(self) -> None:
        self.left_s = 0.0
        self.after_s: list[float] = []

    async def note(self, talk: Talk) -> None:
        await talk.until_gone()
        self.after_s.append(time.monotonic() - self.left_s)

    async def is_told(self) -> bool:
        return bool(self.after_s)


async def began(stage: Stage) -> None:
    """Wait until the replicas have a request."""

    async def is_so() -> bool:
        return len(stage.posts()) > 0

    await until(is_so, "a request at a replica")


async def leave(client: RawClient, gone: Gone) -> None:
    """Abort the client's connection and wait until a replica notices."""
    gone.left_s = time.monotonic()
    client.abort()
    await until(gone.is_told, "the replica's connection closed")


async def test_a_client_that_leaves_before_the_head_frees_the_replica(stage: Stage) -> None:
    """A29, C10: the engine computes a long prompt and has not answered a byte."""
    gone = Gone()

    async def silent(talk: Talk, _: Received) -> None:
        await gone.note(talk)

    stage.cast(silent)
    client = await stage.client()
    client.send(post_to(chat_body(), x_request_id="a29"))
    await began(stage)
    assert await stage.fleet.inflight() == 1
    await leave(client, gone)
    assert gone.after_s[0] < AT_ONCE_S
    await stage.fleet.settled()
    record = await stage.fleet.decision("a29")
    assert (record["status"], record["outcome"]) == (499, "cancelled")
    assert record["ttft_s"] is None


async def test_a_client_that_leaves_an_unstreamed_answer_is_a_499_and_nobodys_fault(
    stage: Stage,
) -> None:
    """A30: closed within a second, not a failure of the replica."""
    gone = Gone()

    async def silent(talk: Talk, _: Received) -> None:
        await gone.note(talk)

    stage.cast(silent)
    client = await stage.client()
    client.send(post_to(chat_body(stream=False), x_request_id="a30"))
    await began(stage)
    await leave(client, gone)
    assert gone.after_s[0] < AT_ONCE_S
    record = await stage.fleet.decision("a30")
    assert (record["status"], record["outcome"]) == (499, "cancelled")
    assert len(record["attempts"]) == 1
    assert all(one["up"] for one in (await stage.fleet.seen()).values())
    assert (await stage.fleet.gauges(stage.fleet.router.url))["warmroute_retries_total"] == 0


async def test_a_client_that_leaves_after_the_last_event_has_its_answer(stage: Stage) -> None:
    """The last event says that nothing follows: clients leave then, before the body has ended."""
    gone = Gone()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'

    async def without_an_end(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT) + chunk(usage) + chunk(DONE))
        await gone.note(talk)

    stage.cast(without_an_end)
    client = await stage.client()
    client.send(post_to(chat_body(), x_request_id="left-at-the-end"))
    await client.reader.readuntil(b"[DONE]")
    await leave(client, gone)
    assert gone.after_s[0] < AT_ONCE_S
    record = await stage.fleet.decision("left-at-the-end")
    assert (record["status"], record["outcome"]) == (200, "done")
    assert record["attempts"][0]["outcome"] == "done"
    assert record["reported_prompt_tokens"] == 7


async def test_a_client_that_leaves_between_two_slow_tokens_frees_the_replica(
    stage: Stage,
) -> None:
    """A31: noticed at once, not with the next token."""
    gone = Gone()

    async def one_token(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await gone.note(talk)

    stage.cast(one_token)
    client = await stage.client()
    client.send(post_to(chat_body(), x_request_id="a31"))
    await client.reader.readuntil(EVENT)
    await leave(client, gone)
    assert gone.after_s[0] < AT_ONCE_S
    record = await stage.fleet.decision("a31")
    assert record["outcome"] == "cancelled"
    assert record["ttft_s"] is not None
    await stage.fleet.settled()
