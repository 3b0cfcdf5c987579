"""Whom a worker asks for pages, how often it asks where they are, and when it gives up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from sidecar import peer
from sidecar.peer import LocalPages, Peers
from sidecar.transfer_client import Fetched, TransferClient
from state.model import BlockId
from support.engine_rig import EngineRig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from sidecar.transfer_client import Why

NAMESPACE = bytes(32)
KEYS = [BlockId(bytes([number]) * 16) for number in range(4)]


class Client:
    """Brings ``pages`` and ends for the next reason of ``whys``; without one it never ends."""

    def __init__(self) -> None:
        self.whys: list[Why] = []
        self.pages = 0
        self.ports: list[int] = []

    async def fetch(
        self, host: str, port: int, keys: Sequence[BlockId], take: Callable[[int, bytes], None]
    ) -> Fetched:
        assert host == "127.0.0.1"
        self.ports.append(port)
        for index in range(min(self.pages, len(keys))):
            take(index, b"page")
        if not self.whys:
            await asyncio.Event().wait()
        return Fetched(self.pages, 4 * self.pages, 0.0, self.whys.pop(0))


class Stage:
    """A worker that says where pages are, and the peers of one that asks it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Client()
        self.peers = Peers(cast("TransferClient", self.client), NAMESPACE, frozenset((url,)))
        self.questions = 0
        self.port = 7
        self.namespace = NAMESPACE
        self.taken: list[int] = []

    async def fetch(self, why: Why | None, patience_s: float | None = None) -> int:
        self.client.whys = [] if why is None else [why]
        async with asyncio.timeout(10):
            return await self.peers.fetch(
                self.url, KEYS, lambda index, _: self.taken.append(index), patience_s
            )


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    stage: Stage

    async def told(_: web.Request) -> web.Response:
        stage.questions += 1
        answer: dict[str, Any] = {"port": stage.port, "namespace": stage.namespace.hex()}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/kv_transfer", told)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stage = Stage(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield stage
    finally:
        await runner.cleanup()


async def test_a_peer_that_answers_is_asked_once_where_its_pages_are() -> None:
    async with staged() as stage:
        stage.client.pages = 4
        assert [await stage.fetch("all") for _ in range(3)] == [4, 4, 4]
        assert stage.questions == 1
        assert stage.client.ports == [7, 7, 7]


@pytest.mark.parametrize("why", ["missing", "busy", "limit"])
async def test_a_peer_without_these_pages_is_still_where_it_was(why: Why) -> None:
    async with staged() as stage:
        for _ in range(3):
            assert await stage.fetch(why) == 0
        assert stage.questions == 1


@pytest.mark.parametrize("why", ["unreachable", "closed", "wrong_namespace", "malformed"])
async def test_a_peer_that_is_gone_may_be_back_on_another_port(why: Why) -> None:
    async with staged() as stage:
        assert await stage.fetch(why) == 0
        stage.port = 8
        await stage.fetch("all")
        assert stage.client.ports == [7, 8]


async def test_a_peer_that_hangs_is_left_alone_for_a_while() -> None:
    async with staged() as stage:
        assert await stage.fetch("stalled") == 0
        stage.client.pages = 4
        assert await stage.fetch("all") == 0
        assert len(stage.client.ports) == 1


async def test_what_came_before_patience_ended_is_kept() -> None:
    async with staged() as stage:
        stage.client.pages = 2
        assert await stage.fetch("missing") == 2
        stage.taken.clear()
        assert await stage.fetch(None, patience_s=0.05) == 2
        assert stage.taken == [0, 1]
        assert await stage.fetch("all") == 2  # slow is not gone


async def test_pages_that_mean_something_else_are_not_asked_for() -> None:
    async with staged() as stage:
        stage.namespace = bytes(31) + b"x"
        assert await stage.fetch("all") == 0
        assert not stage.client.ports


async def test_nobody_else_is_asked() -> None:
    async with staged() as stage:
        peers = Peers(cast("TransferClient", stage.client), NAMESPACE, frozenset())
        assert await peers.fetch(stage.url, KEYS, lambda _, __: None) == 0
        assert stage.questions == 0


@pytest.mark.parametrize(("group_pages", "reads"), [(None, 1), (20, 3)])
async def test_a_device_is_read_in_few_long_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_pages: int | None, reads: int
) -> None:
    """Each read waits for the step under way; a group is bounded by its bytes."""
    rig = EngineRig(tmp_path, pages=64)
    if group_pages is not None:
        monkeypatch.setattr(peer, "GROUP_BYTES", group_pages * rig.runner.content_bytes)
    read, counted = rig.runner.read, []

    async def counting(pages: tuple[Any, ...]) -> list[bytes]:
        counted.append(len(pages))
        return await read(pages)

    monkeypatch.setattr(rig.runner, "read", counting)
    async with rig.running():
        asked = await rig.answer(range(200), 2)
        assert asked.ticket is not None
        chain = asked.ticket.sequence.table.chain[:50]
        local = LocalPages(rig.cache, rig.runner, None, rig.ledger.note)
        contents = [content async for content in local.pages(chain)]
    assert len(contents) == sum(counted) == 50
    assert len(counted) == reads
    rig.proven()
