"""The state store behind TLS: whose certificate is believed, and what the server may ask for."""

from __future__ import annotations

import asyncio
import logging
import time
from random import Random
from typing import TYPE_CHECKING

import pytest
import uvloop

from state.client import RedisSettings, command_client
from state.fault import Fault
from state.mirror import Mirror
from state.model import RouterId, Rung
from state.redis_writer import RedisWriter
from support import tls
from support.fleet_state import A, batch, blocks, record
from support.state_backend import FAST_ROUNDS
from support.tls_front import TlsFront
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("authority"))


def _mirror(url: str) -> Mirror:
    settings = RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0)
    return Mirror(settings, RouterId("r"), clock=time.monotonic, rng=Random(1), timing=FAST_ROUNDS)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_store_behind_tls_is_used_like_any_other(
    valkey: ValkeyProcess, authority: tls.Authority, loop: str
) -> None:
    """S-14: the server's certificate is checked, and ours is shown where one is asked for."""
    factory: Callable[[], asyncio.AbstractEventLoop] = LOOPS[loop]
    pair, own = authority.issue(), authority.issue("warmroute")

    async def use() -> None:
        await valkey.flush()
        context = tls.server(pair, authority.ca)
        async with TlsFront(valkey.socket_path, context) as front:
            query = f"ca={authority.ca}&cert={own.certificate}&key={own.key}"
            url = f"rediss://127.0.0.1:{front.port}/0?{query}"
            client = command_client(
                RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0)
            )
            writer = RedisWriter(client, clock=time.monotonic, rng=Random(1))
            await writer.register(record())
            await writer.apply([batch(1, stored=blocks(1, 2))])
            async with _mirror(url) as mirror:
                assert await mirror.settle(30)
                assert mirror.freshness()[0] is Rung.LIVE
                assert mirror.overlap(blocks(1, 2))[A].gpu_blocks == 2
                assert sum(mirror.figures().faults.values()) == 0
            await client.aclose()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(use())


@pytest.mark.parametrize("wrong", ["authority", "name", "no TLS there"])
async def test_a_store_that_cannot_be_trusted_is_not_used(
    wrong: str,
    valkey: ValkeyProcess,
    authority: tls.Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R-14: local, and one alert that says why."""
    caplog.set_level(logging.INFO)
    pair = authority.issue("elsewhere.example") if wrong == "name" else authority.issue()
    believed = tls.Authority(tmp_path).ca if wrong == "authority" else authority.ca
    async with TlsFront(valkey.socket_path, tls.server(pair)) as front:
        port = front.port
        plain = await asyncio.start_server(_greet, "127.0.0.1", 0)
        if wrong == "no TLS there":
            port = int(plain.sockets[0].getsockname()[1])
        kind = Fault.CONFIG if wrong == "no TLS there" else Fault.SECURITY
        async with _mirror(f"rediss://127.0.0.1:{port}?ca={believed}") as mirror:
            await eventually(lambda: mirror.figures().faults[kind] > 1)
            assert mirror.freshness()[0] is Rung.LOCAL
        plain.close()
    alerts = [line.message for line in caplog.records if "needs an operator" in line.getMessage()]
    assert len(alerts) == 1
    assert f"({kind})" in alerts[0]


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"-ERR Protocol error\r\n")
    writer.close()
