"""Many streams at once through one router process."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.raw import DONE, LAST, SSE, RawClient, Received, Talk, chunk
from support.running_clock import RunningClock
from support.stage import (
    EVENT,
    Actor,
    Stage,
    allow_sockets,
    answer_at_once,
    chat_body,
    post_to,
    staged_router,
)
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAUSE_S = 0.2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    allow_sockets()
    folder = tmp_path_factory.mktemp("stage")
    tokenizer = write_tokenizer(folder / "tokenizer")
    async with staged_router(folder, [Actor("a")], tokenizer) as running:
        yield running


@contextlib.contextmanager
def few_files(soft: int = 256) -> Iterator[None]:
    """Start processes with the limit on open files that some systems have by default."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


async def test_a_thousand_streams_run_at_once_and_livez_answers(stage: Stage) -> None:
    """A46, C54, C50: no stall at 100 connections, none at a low limit on open files."""
    streams = 1000
    may_end = asyncio.Event()

    async def wait_and_end(talk: Talk, _: Received) -> None:
        await talk.say(SSE + chunk(EVENT))
        await may_end.wait()
        await talk.say(chunk(DONE) + LAST)

    stage.reset()
    stage.cast(wait_and_end)
    with few_files():
        router = await stage.fleet.start_router(upstream={"connect_timeout_s": 20.0})
    await stage.fleet.all_up(router)
    clients = [await RawClient.connect(router.port) for _ in range(streams)]
    stage.clients += clients
    for client in clients:
        client.send(post_to(chat_body(), Connection="close"))
    async with asyncio.timeout(100):
        heads = [await client.reader.readuntil(EVENT) for client in clients]
    assert all(head.startswith(b"HTTP/1.1 200 ") for head in heads)
    assert await stage.fleet.inflight(router) == streams
    took_s = []
    for _ in range(5):
        began_s = time.monotonic()
        async with stage.fleet.http.get(f"{router.url}/livez") as answer:
            assert answer.status == 200
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < 1.0
    may_end.set()
    async with asyncio.timeout(100):
        tails = [await client.reader.read(-1) for client in clients]
    assert all(tail.endswith(LAST) for tail in tails)
    assert await stage.fleet.inflight(router) == 0
    assert stage.fleet.processes.stop(router.child) == 0


async def test_streams_go_on_while_a_long_prompt_is_tokenized(stage: Stage) -> None:
    """A47: 500 streams, then a prompt of 400,000 tokens."""
    may_end = asyncio.Event()

    async def tick(talk: Talk, received: Received) -> None:
        if len(received.body) > 100_000:
            await answer_at_once(talk, received)
            return
        await talk.say(SSE)
        while not may_end.is_set():
            await talk.say(chunk(EVENT))
            await asyncio.sleep(PAUSE_S)
        await talk.say(chunk(DONE) + LAST)

    stage.reset()
    stage.cast(tick)
    clients = [await stage.client() for _ in range(500)]
    for client in clients:
        client.send(post_to(chat_body()))
    for client in clients:
        await client.reader.readuntil(EVENT)
    watched = asyncio.create_task(_pauses(clients[0]))
    text = " ".join(f"{number} brown foxes" for number in range(50_000))
    lags = asyncio.create_task(_loop_lags(stage, may_end))
    async with RunningClock() as clock:
        began_s, began_running_s = time.monotonic(), clock()
        reply = await stage.ask(post_to(chat_body(text, stream=False), x_request_id="a47"))
        took_s = time.monotonic() - began_s
        stood_s = took_s - (clock() - began_running_s)  # the machine, not the router
    may_end.set()
    assert reply.status == 200
    record = await stage.fleet.decision("a47")
    assert record["is_exact"]
    assert record["prompt_tokens"] > 400_000
    assert max(await lags) < took_s / 2 + stood_s
    assert max(await watched) < PAUSE_S + took_s / 2 + stood_s


async def _loop_lags(stage: Stage, may_end: asyncio.Event) -> list[float]:
    """Return what the router measured until then."""
    lags = []
    while not may_end.is_set():
        await asyncio.sleep(0.02)
        gauges = await stage.fleet.gauges(stage.fleet.router.admin_url)
        lags.append(gauges["warmroute_loop_lag_seconds"])
    return lags


async def _pauses(client: RawClient) -> list[float]:
    pauses = []
    last_s = time.monotonic()
    while True:
        data = await client.reader.read(65_536)
        now_s = time.monotonic()
        pauses.append(now_s - last_s)
        last_s = now_s
        if not data or data.endswith(LAST):
            return pauses
