"""Pages of one real worker fetched by another, and what happens when they do not come."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from support.fleet import until
from support.peer_stub import HalfPeer
from support.tiered import (
    MODEL,
    PAGE_TOKENS,
    SOURCE_HEADER,
    Answer,
    complete,
    prompt_of,
    settings_of,
    tiers_of,
)
from support.worker import RunningWorker, get_text, metrics_of, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE_BYTES: Final = 49_152
TOKENS: Final = 256
REUSABLE: Final = TOKENS - PAGE_TOKENS
PEER_PAGES: Final = 512


@pytest.fixture(scope="module", name="warm")
def worker_with_pages() -> Iterator[RunningWorker]:
    with running_worker(settings_of(pages=PEER_PAGES, transfer_port=0)) as worker:
        yield worker


@pytest.fixture(scope="module", name="other")
def worker_with_other_weights() -> Iterator[RunningWorker]:
    with running_worker(settings_of(pages=PEER_PAGES, transfer_port=0, seed=1)) as worker:
        yield worker


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="half")
async def peer_that_stops(warm: RunningWorker) -> AsyncIterator[HalfPeer]:
    async with HalfPeer(warm.url, PAGE_BYTES, pages=3) as peer:
        yield peer


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="mute")
async def peer_that_says_nothing(warm: RunningWorker) -> AsyncIterator[HalfPeer]:
    async with HalfPeer(warm.url, PAGE_BYTES, is_mute=True) as peer:
        yield peer


@pytest.fixture(scope="module")
def gone() -> str:
    """Return the address of a worker that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module", name="cold")
def worker_that_fetches(
    warm: RunningWorker, other: RunningWorker, half: HalfPeer, mute: HalfPeer, gone: str
) -> Iterator[RunningWorker]:
    peers = f"{warm.url},{other.url},{half.url},{mute.url},{gone}"
    settings = settings_of(pages=PEER_PAGES, transfer_peers=peers, fetch="always", host_mib=8)
    with running_worker(settings) as worker:
        yield worker


def peers_of(worker: RunningWorker) -> dict[str, float]:
    """Return what ``/debug/kv`` tells of other workers."""
    peers: dict[str, float] = json.loads(get_text(worker, "/debug/kv"))["peers"]
    return peers


async def ask(worker: RunningWorker, prompt: list[int], source: str | None = None) -> Answer:
    return await asyncio.to_thread(complete, worker, prompt, source)


def nothing_is_held(worker: RunningWorker) -> bool:
    held = [tier["states"] for tier in tiers_of(worker).values()]
    return all(states["used"] == states["reserved"] == states["allocated"] == 0 for states in held)


async def test_a_prefix_is_fetched_and_not_computed(
    warm: RunningWorker, cold: RunningWorker
) -> None:
    prompt = prompt_of(1, TOKENS)
    there = await ask(warm, prompt)
    before = await asyncio.to_thread(peers_of, cold)
    here = await ask(cold, prompt, warm.url)
    assert there == Answer(there.token_ids, 0)
    assert here == Answer(there.token_ids, REUSABLE)
    after = await asyncio.to_thread(peers_of, cold)
    assert after["hits"] - before["hits"] == 1
    assert after["hit_pages"] - before["hit_pages"] == REUSABLE // PAGE_TOKENS
    moved_bytes = after["moved_out_bytes"] - before["moved_out_bytes"]
    assert moved_bytes == REUSABLE // PAGE_TOKENS * PAGE_BYTES
    assert after["saved_ms"] > before["saved_ms"]
    assert after["spent_ms"] > before["spent_ms"]
    again = await ask(cold, prompt)
    assert again == Answer(there.token_ids, REUSABLE)


async def test_what_this_worker_has_is_not_fetched(
    warm: RunningWorker, cold: RunningWorker
) -> None:
    """Half of the prompt is here: the peer gives the rest, and the answer is the same."""
    prompt = prompt_of(2, TOKENS)
    there = await ask(warm, prompt)
    await ask(cold, prompt[: TOKENS // 2])
    here = await ask(cold, prompt, warm.url)
    assert here == Answer(there.token_ids, REUSABLE)


@pytest.mark.parametrize("trouble", ["gone", "mute", "other", "stranger", "self"])
async def test_what_cannot_be_had_is_computed(
    request: pytest.FixtureRequest, warm: RunningWorker, cold: RunningWorker, trouble: str
) -> None:
    prompt = prompt_of(10 + len(trouble) * ord(trouble[0]), TOKENS)
    expected = (await ask(warm, prompt)).token_ids
    if trouble == "stranger":
        source = warm.url.replace("127.0.0.1", "localhost")
    elif trouble == "self":
        source = cold.url
    else:
        named = request.getfixturevalue(trouble)
        source = named if isinstance(named, str) else named.url
    if trouble == "other":
        await ask(request.getfixturevalue("other"), prompt)
    assert await ask(cold, prompt, source) == Answer(expected, 0)


async def test_what_the_peer_does_not_have_is_computed(
    warm: RunningWorker, cold: RunningWorker
) -> None:
    prompt = prompt_of(3, TOKENS)
    shared = prompt[: TOKENS // 2]
    await ask(warm, shared)
    part = await ask(cold, prompt, warm.url)
    whole = await ask(warm, prompt)
    assert part == Answer(whole.token_ids, TOKENS // 2)


async def test_a_stopped_process_costs_time_and_no_answer(
    warm: RunningWorker, cold: RunningWorker
) -> None:
    prompt = prompt_of(4, TOKENS)
    there = await ask(warm, prompt)
    await ask(cold, prompt_of(1, TOKENS), warm.url)  # it knows where pages are
    warm.process.send_signal(signal.SIGSTOP)
    try:
        here = await ask(cold, prompt, warm.url)
    finally:
        warm.process.send_signal(signal.SIGCONT)
    assert here == Answer(there.token_ids, 0)


async def test_pages_that_came_before_a_peer_hung_are_used(
    warm: RunningWorker, cold: RunningWorker, half: HalfPeer
) -> None:
    prompt = prompt_of(5, TOKENS)
    there = await ask(warm, prompt)
    here = await ask(cold, prompt, half.url)
    assert here == Answer(there.token_ids, 3 * PAGE_TOKENS)


async def test_a_client_that_leaves_during_a_fetch_leaves_no_pages(
    cold: RunningWorker, half: HalfPeer
) -> None:
    half.asked.clear()
    with closing(send(cold, prompt_of(6, TOKENS), half.url)):
        async with asyncio.timeout(20):
            await half.asked.wait()
        metrics = await asyncio.to_thread(metrics_of, cold)
        assert metrics["num_requests_running"] == 1
        assert not await asyncio.to_thread(nothing_is_held, cold)

    async def is_free() -> bool:
        metrics = await asyncio.to_thread(metrics_of, cold)
        return not metrics["num_requests_running"] and await asyncio.to_thread(
            nothing_is_held, cold
        )

    await until(is_free, "no pages held")
    after = await asyncio.to_thread(metrics_of, cold)
    assert after["generation_tokens_total"] == metrics["generation_tokens_total"]


async def test_nothing_is_held_once_all_is_answered(
    warm: RunningWorker, cold: RunningWorker
) -> None:
    for worker in (warm, cold):
        assert await asyncio.to_thread(nothing_is_held, worker)


def send(worker: RunningWorker, prompt: list[int], source: str) -> socket.socket:
    """Send a completion on a connection of its own, and read nothing."""
    host, port = worker.url.removeprefix("http://").split(":")
    raw = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 6})
    head = f"Host: w\r\nContent-Length: {len(raw)}\r\n{SOURCE_HEADER}: {source}\r\n"
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{raw}".encode())
    return connection
