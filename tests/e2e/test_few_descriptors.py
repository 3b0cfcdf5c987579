"""C-16: a router that may open few files, and clients that want more than there are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.fleet import until
from support.raw import DONE, LAST, SSE, RawClient, Received, Talk, chunk, get, split_head
from support.stage import EVENT, Actor, Stage, allow_sockets, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="counts the router's files in /proc"),
]

OPEN_FILES = 256
STREAMS = 20
PAUSE_S = 0.05
CLIENTS_MOST = (OPEN_FILES - 48 - 16 - 16) // 2


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["uvloop", "asyncio"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    allow_sockets()
    async with staged_router(
        tmp_path_factory.mktemp("files"),
        [Actor("a")],
        router_flags=("--loop", request.param),
        router_prefix=("sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh"),
    ) as stage:
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.reset()
    return running


class Beating:
    """A replica whose streams go on until ``end``."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def answer(self, talk: Talk, _: Received) -> None:
        """Send an event now and then."""
        await talk.say(SSE)
        while not self.end.is_set():
            await talk.say(chunk(EVENT))
            await asyncio.sleep(PAUSE_S)
        await talk.say(chunk(DONE) + LAST)


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(pid: int) -> int:
    """Return how many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def livez(stage: Stage) -> int:
    """Ask the operator's listener, on a connection of its own."""
    client = await RawClient.connect(int(stage.fleet.router.admin_url.rpartition(":")[2]))
    client.send(get("/livez", host=b"localhost"))
    try:
        return (await client.reply()).status
    finally:
        client.abort()


async def begin_streams(stage: Stage) -> list[RawClient]:
    """Return clients that each have the beginning of a stream."""
    clients = []
    for _ in range(STREAMS):
        client = await stage.client()
        client.send(post_to(chat_body()))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        clients.append(client)
    return clients


async def are_alive(clients: list[RawClient]) -> None:
    """Check that each stream still says something new."""
    for client in clients:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):  # what was said before
                while await client.reader.read(65536):
                    pass
        async with asyncio.timeout(20):
            assert await client.reader.read(65536)


async def is_silent(client: RawClient) -> bool:
    """Return whether a client was neither told anything nor left."""
    try:
        async with asyncio.timeout(0.002):
            told = await client.reader.read(65536)
    except TimeoutError:
        return True
    except ConnectionError:
        return False
    assert not told or told.startswith(b"HTTP/1.1 503 ")
    return False


async def until_ended(clients: list[RawClient]) -> None:
    """Check that each stream has its end."""
    for client in clients:
        async with asyncio.timeout(20):
            await client.reader.readuntil(chunk(DONE) + LAST)


async def test_more_clients_than_files_are_told_and_nothing_else_suffers(stage: Stage) -> None:
    """C-16, L-03: streams live, operators get in, the rest is told or closed, the loop rests."""
    beating = Beating()
    stage.cast(beating.answer)
    pid = stage.fleet.router.child.process.pid
    streams = await begin_streams(stage)
    crowd = [await stage.client() for _ in range(400)]
    kept = list(crowd)

    async def are_told() -> bool:
        kept[:] = [client for client in kept if await is_silent(client)]
        return len(kept) <= CLIENTS_MOST - STREAMS

    await until(are_told, "the clients beyond the files are told")
    assert open_files(pid) < OPEN_FILES
    assert await livez(stage) == 200
    await are_alive(streams)
    assert len(kept) > CLIENTS_MOST // 2
    began_s, began_cpu_s = time.monotonic(), cpu_s(pid)
    for _ in range(10):
        assert await livez(stage) == 200
        await asyncio.sleep(0.1)
    assert cpu_s(pid) - began_cpu_s < 0.5 * (time.monotonic() - began_s)
    for client in kept:
        client.send(get("/livez"))
    assert [(await client.reply()).status for client in kept] == [200] * len(kept)
    beating.end.set()
    await until_ended(streams)
    for client in crowd:
        client.abort()
    assert await serves_again(stage)


async def test_requests_beyond_the_files_are_nobodys_fault(stage: Stage) -> None:
    """C-16: 200 or 503 with Retry-After; the replica is not taken out."""
    beating = Beating()
    stage.cast(beating.answer)

    async def status() -> int:
        with contextlib.suppress(ConnectionError, EOFError):
            client = await stage.client()
            client.send(post_to(chat_body()))
            line, headers = split_head(await client.reader.readuntil(b"\r\n\r\n"))
            code = int(line.split(b" ")[1])
            assert code == 200 or b"retry-after" in {name.lower() for name, _ in headers}
            return code
        return 503  # closed without a word

    found = await asyncio.gather(*(status() for _ in range(150)))
    assert set(found) == {200, 503}
    assert found.count(200) >= CLIENTS_MOST * 3 // 4
    assert (await stage.fleet.seen())["a"]["up"]
    beating.end.set()
    for client in stage.clients:
        client.abort()
    assert await serves_again(stage)


async def test_no_file_at_all_stops_accepting_for_a_while_only(stage: Stage) -> None:
    """C-16: something else took them; no busy loop, streams live, and clients come in again."""
    beating = Beating()
    stage.cast(beating.answer)
    pid = stage.fleet.router.child.process.pid
    streams = await begin_streams(stage)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files(pid), OPEN_FILES))
    try:
        crowd = []
        for _ in range(60):
            with contextlib.suppress(ConnectionError):
                crowd.append(await stage.client())
        began_s, began_cpu_s = time.monotonic(), cpu_s(pid)
        await asyncio.sleep(1.5)
        assert cpu_s(pid) - began_cpu_s < 0.5 * (time.monotonic() - began_s)
        await are_alive(streams)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    await asyncio.sleep(1.1)  # asyncio accepts again after a second, uvloop at once
    assert await livez(stage) == 200
    beating.end.set()
    await until_ended(streams)
    for client in crowd:
        client.abort()
    assert await serves_again(stage)
    assert (await stage.fleet.seen())["a"]["up"]


async def serves_again(stage: Stage) -> bool:
    """Return whether a new client is served, when the others have left."""
    stage.reset()
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(ConnectionError, EOFError):
                if (await stage.ask(post_to(chat_body()))).status == 200:
                    return True
            await asyncio.sleep(0.1)
