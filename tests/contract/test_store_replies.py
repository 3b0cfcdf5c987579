"""What a state server may answer instead of what was asked: told apart, survived, not repeated."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest

from state.client import RedisSettings, command_client
from state.fault import Fault
from state.mirror import Mirror
from state.model import RouterId, Rung
from state.redis_writer import RedisWriter
from state.store import StateError
from support.fake_store import FakeStore
from support.fleet_state import A, record
from support.state_backend import FAST_ROUNDS, SOON_STALE
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from support.state_backend import RedisBackend

SECRET = "hunter2"  # noqa: S105 - made up, to be looked for
RETRYABLE = {
    "LOADING": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "MASTERDOWN": b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set "
    b"to 'no'.\r\n",
    "BUSY": b"-BUSY Valkey is busy running a script.\r\n",
    "CLUSTERDOWN": b"-CLUSTERDOWN The cluster is down\r\n",
    "TRYAGAIN": b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    "silence": b"",
}
CLOSING = {
    "maxclients": b"-ERR max number of clients reached\r\n",
    "CLIENT KILL": b"",
    "half a reply": b"$100\r\nhalf",
}
REFUSED = {
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "MISCONF": b"-MISCONF Errors writing to the AOF file\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
}
CONFIG = {
    "protected": b"-DENIED Valkey is running in protected mode\r\n",
    "no such command": b"-ERR unknown command 'EVALSHA', with args beginning with: \r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "bytes": b"\x00\xff\xfe\x80\r\n",
    "no number": b":many\r\n",
    "no length": b"$long\r\n",
    "negative length": b"$-7\r\n",
    "nested": b"*1\r\n" * 20_000,
    "an endless line": b"+" + b"x" * 200_000,
    "another shape": b"+OK\r\n",
    "another type": b":7\r\n",
}
SECURITY = {
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "WRONGPASS": b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
    "NOPERM": b"-NOPERM User warmroute has no permissions to run the 'zrange' command\r\n",
}
TABLE = [
    pytest.param(reply, fault, closes, id=name)
    for replies, fault, closes in (
        (RETRYABLE, Fault.RETRYABLE, False),
        (CLOSING, Fault.RETRYABLE, True),
        (REFUSED, Fault.REFUSED, False),
        (CONFIG, Fault.CONFIG, False),
        (SECURITY, Fault.SECURITY, False),
    )
    for name, reply in replies.items()
]


async def _until_registered(writer: RedisWriter) -> None:
    """Register; a busy machine may take longer than the limit, which the faults need."""
    async with asyncio.timeout(20):
        while True:
            with suppress(StateError):
                await writer.register(record())
                return


@pytest.mark.parametrize(("reply", "fault", "closes"), TABLE)
async def test_every_kind_of_answer_is_told_apart_and_survived(
    reply: bytes,
    fault: Fault,
    closes: bool,  # noqa: FBT001 - a column of the table
    valkey: ValkeyProcess,
    redis_backend: RedisBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R-14, C-11: local meanwhile, one alert where only an operator helps, live once it is over."""
    caplog.set_level(logging.DEBUG)
    await redis_backend.writer.register(record())
    greets = fault is Fault.CONFIG
    async with FakeStore(valkey.socket_path, reply, closes=closes, greets=greets) as fake:
        url = f"redis://warmroute:{SECRET}@127.0.0.1:{fake.port}/0"
        settings = RedisSettings(url=url, command_timeout_s=0.5, connect_timeout_s=1.0)
        mirror = Mirror(
            settings, RouterId("r"), clock=time.monotonic, rng=Random(1), timing=FAST_ROUNDS
        )
        client = command_client(settings)
        writer = RedisWriter(client, clock=time.monotonic, rng=Random(2))
        async with mirror:
            for attempt in (writer.register(record()), writer.heartbeat(record(), None)):
                with pytest.raises(StateError) as raised:
                    await attempt
                assert SECRET not in str(raised.value)
            await eventually(lambda: mirror.figures().faults[fault] > 1)
            assert mirror.freshness()[0] is Rung.LOCAL
            assert not mirror.replicas()
            fake.reply, fake.closes = None, False
            await eventually(lambda: A in mirror.replicas())
            await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
            await _until_registered(writer)
            counts = mirror.figures().faults
        await client.aclose()
    of_slow_machines = {fault, Fault.RETRYABLE}
    assert not any(n for one, n in counts.items() if one not in of_slow_machines), counts
    alerts = [line for line in caplog.records if "needs an operator" in line.getMessage()]
    assert len(alerts) == (fault in {Fault.CONFIG, Fault.SECURITY})
    assert all(line.levelno == logging.ERROR and f"({fault})" in line.message for line in alerts)
    assert SECRET not in caplog.text


async def test_a_password_that_is_changed_is_an_alert_and_no_outage_of_requests(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """R-14: WRONGPASS of a real server under a live view; the copy stays, an operator hears."""
    await own_server.command("CONFIG", "SET", "requirepass", "first")
    url = f"unix://:first@{own_server.socket_path}"
    settings = RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0)
    client = command_client(settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=Random(2))
    async with Mirror(
        settings, RouterId("r"), clock=time.monotonic, rng=Random(1), timing=SOON_STALE
    ) as mirror:
        await writer.register(record())
        assert await mirror.settle(30)
        await client.execute_command("CONFIG", "SET", "requirepass", "second")
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
        await eventually(lambda: mirror.freshness()[0] is Rung.STALE)
        assert A in mirror.replicas()
        assert mirror.figures().faults[Fault.SECURITY] > 0
        admin = command_client(RedisSettings(url=url.replace("first", "second")))
        await admin.execute_command("CONFIG", "SET", "requirepass", "first")
        await admin.aclose()
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
    await client.aclose()
    alerts = [line for line in caplog.records if "needs an operator" in line.getMessage()]
    assert len(alerts) == 1
    assert "(security)" in alerts[0].message
    assert "first" not in caplog.text
