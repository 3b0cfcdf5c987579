"""What takes a replica out and what brings it back, on real listeners."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from typing import TYPE_CHECKING

import pytest

from router.config import StaticReplica
from router.fleet import FleetTable
from router.health import Health
from router.health_setting import HealthSettings
from router.upstream import UpstreamPool, UpstreamSettings
from state.memory import MemoryState
from state.model import ReplicaId, RouterId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

from contextlib import asynccontextmanager

GPU = ReplicaId("gpu-0")
MODELS = b'{"object":"list","data":[{"id":"m"}]}'


class Engine:
    """A listener that answers /health and /v1/models, or 500 when it is told to be ill."""

    def __init__(self) -> None:
        self.is_ill = False
        self.is_silent = False
        self.pause_s = 0.0
        self.checks = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                is_check = head.startswith(b"GET /health")
                self.checks += is_check
                if self.is_silent:
                    continue
                await asyncio.sleep(self.pause_s if is_check else 0.0)
                status = b"500 Ill" if self.is_ill else b"200 OK"
                body = b"" if is_check else MODELS
                writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def watched(engine: Engine, timeout_s: float = 1.0) -> AsyncIterator[Health]:
    server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with checked(f"http://127.0.0.1:{port}", timeout_s) as health:
            yield health
    finally:
        server.close()


@asynccontextmanager
async def checked(url: str, timeout_s: float = 1.0) -> AsyncIterator[Health]:
    reader = MemoryState(clock=lambda: 0.0).reader(RouterId("me"))
    fleet = FleetTable(reader, [StaticReplica(url=url, name=GPU)])
    pool = UpstreamPool(UpstreamSettings())
    settings = HealthSettings(interval_s=0.05, timeout_s=timeout_s, fall=3, rise=2)
    health = Health(fleet, pool, settings, random.Random(1))
    task = asyncio.create_task(health.run())
    try:
        yield health
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.close()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the checks under test set no event
            await asyncio.sleep(0.01)


async def test_a_configured_replica_is_up_once_it_answers_and_names_its_models() -> None:
    async with watched(Engine()) as health:
        assert not health.is_up(GPU)
        await eventually(lambda: health.is_up(GPU))
        assert health.served_models(GPU) == {"m"}


async def test_three_failed_checks_take_a_replica_out_and_good_ones_bring_it_back() -> None:
    """C22: fewer than three do not."""
    engine = Engine()
    async with watched(engine) as health:
        await eventually(lambda: health.is_up(GPU))
        engine.is_ill, before = True, engine.checks
        await eventually(lambda: not health.is_up(GPU))
        assert engine.checks - before >= 3
        engine.is_ill = False
        await eventually(lambda: health.is_up(GPU))


async def test_a_refused_connection_takes_a_replica_out_at_once() -> None:
    async with watched(Engine()) as health:
        await eventually(lambda: health.is_up(GPU))
        health.refused(GPU)
        assert not health.is_up(GPU)
        await eventually(lambda: health.is_up(GPU))


async def test_a_check_does_not_count_that_ran_out_of_time_because_we_were_late() -> None:
    """C-18: a router without CPU takes nobody out; a silent replica is taken out afterwards."""
    engine = Engine()
    async with watched(engine, timeout_s=0.4) as health:
        await eventually(lambda: health.is_up(GPU))
        engine.is_silent = True
        for _ in range(10):
            await asyncio.sleep(0.02)
            time.sleep(0.25)  # noqa: ASYNC251 - it is the event loop that is to be late
        assert health.is_up(GPU)
        assert health.was_late(0.4)
        await eventually(lambda: not health.is_up(GPU))
        assert not health.is_answering(GPU)
        engine.is_silent = False
        await eventually(lambda: health.is_up(GPU))


async def test_checks_that_an_engine_computes_something_for_may_take_that_long() -> None:
    """SGLang answers a check after 1 s, or 2 s; who went down may come back as such an engine."""
    engine = Engine()
    engine.pause_s = 0.25
    async with watched(engine, timeout_s=0.2) as health:
        await eventually(lambda: health.is_up(GPU))
        before = engine.checks
        await eventually(lambda: engine.checks >= before + 5)
        assert health.is_up(GPU)
        engine.pause_s = 0.5
        await eventually(lambda: engine.checks >= before + 10)
        assert health.is_up(GPU)
        engine.is_silent = True
        await eventually(lambda: not health.is_up(GPU))
        assert health.silent


@pytest.mark.parametrize("is_refusing", [True, False])
async def test_another_engine_in_the_place_of_a_fast_one_may_be_slow(*, is_refusing: bool) -> None:
    engine = Engine()
    async with watched(engine, timeout_s=0.2) as health:
        await eventually(lambda: health.is_up(GPU))
        if is_refusing:
            engine.pause_s = 0.4
            health.refused(GPU)
        else:
            engine.is_ill = True
            await eventually(lambda: not health.is_up(GPU))
            engine.is_ill, engine.pause_s = False, 0.4
        assert not health.is_up(GPU)
        await eventually(lambda: health.is_up(GPU))


async def test_what_is_good_news_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changes = 0

    def count() -> None:
        nonlocal changes
        changes += 1

    engine = Engine()
    async with watched(engine) as health:
        health.on_change = count
        await eventually(lambda: health.is_up(GPU))
        engine.is_ill = True
        await eventually(lambda: not health.is_up(GPU))
        assert health.is_answering(GPU)
        assert health.why_down(GPU) == "failed its checks"
    told = {record.getMessage(): record.levelname for record in caplog.records}
    assert told["replica gpu-0 is up"] == "INFO"
    assert told["replica gpu-0 is down: 3 checks failed"] == "WARNING"
    assert changes == 2


async def test_who_is_not_there_is_named_with_the_address_and_what_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        async with checked(url) as health:
            await eventually(lambda: health.fault(GPU) is not None)
            assert health.fault(GPU) == "connection refused"
    [told] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"][:1]
    assert told.startswith(f"replica gpu-0 at {url}: connection refused: nobody listens there")
    assert "warmroute doctor" in told


async def test_a_slow_connect_only_asks_for_a_check() -> None:
    """A57: a burst on a busy machine must not empty the fleet."""
    engine = Engine()
    async with watched(engine) as health:
        await eventually(lambda: health.is_up(GPU))
        before = engine.checks
        health.doubt(GPU)
        assert health.is_up(GPU)
        await eventually(lambda: engine.checks > before)
        assert health.is_up(GPU)


@pytest.mark.parametrize("is_silent", [True, False])
async def test_only_checks_that_run_out_of_time_make_a_replica_silent(*, is_silent: bool) -> None:
    engine = Engine()
    async with watched(engine, timeout_s=0.2) as health:
        await eventually(lambda: health.is_up(GPU))
        assert health.silent == {}
        engine.is_silent, engine.is_ill = is_silent, not is_silent
        await eventually(lambda: not health.is_up(GPU))
        assert bool(health.silent) is is_silent
        engine.is_silent = False
        await eventually(lambda: not health.silent)
