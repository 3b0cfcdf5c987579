"""The clients of the shared store under pressure: cancelled, exhausted, reconnecting in herds."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

from state.client import STORE_ERRORS, command_client, run_command
from state.mirror import Mirror
from state.model import RouterId, Rung
from state.script import Script, run_scripts
from state.timing import MirrorTiming
from support.fleet_state import A, record
from support.running_clock import RunningClock
from support.slow_link import SlowLink
from support.valkey import ValkeyProcess, eventually

if TYPE_CHECKING:
    from support.state_backend import RedisBackend


async def test_cancelled_commands_never_leave_their_replies_to_others(
    valkey: ValkeyProcess,
) -> None:
    """C77, R-15: 750 commands over a slow link, most of them cancelled: no reply is mixed up.

    The values are told apart by the number that each command carries.
    """
    rng = Random(1)
    touch = Script("touch")
    outcomes = {"answered": 0, "failed": 0}

    async with SlowLink(valkey.socket_path, lambda: rng.uniform(0.0, 0.004)) as link:
        client = command_client(link.settings(timeout_s=10.0))

        async def ask(number: int) -> None:
            word = b"word-%d" % number
            try:
                if number % 3:
                    assert await run_command(client, "ECHO", word) == word
                else:
                    pipeline = client.pipeline(transaction=number % 2 == 0)
                    pipeline.execute_command("ECHO", word)
                    pipeline.execute_command("ECHO", word + b"!")
                    assert await pipeline.execute() == [word, word + b"!"]
                outcomes["answered"] += 1
            except STORE_ERRORS:
                outcomes["failed"] += 1

        for _ in range(25):
            tasks = [asyncio.create_task(ask(rng.randrange(1 << 30))) for _ in range(30)]
            for task in tasks:
                await asyncio.sleep(rng.uniform(0.0, 0.001))
                if rng.random() < 0.8:
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            faults = [one for one in results if isinstance(one, AssertionError)]
            assert not faults
        assert outcomes["answered"] > 50
        word = b"after"
        for _ in range(20):
            assert await run_command(client, "ECHO", word) == word
        assert await run_scripts(client, [touch.call(["t"], ["a", 1000])]) == [1]
        await eventually(lambda: link.open_connections <= 8)
        await client.aclose()


async def test_a_burst_beyond_the_pool_waits_its_turn_or_fails_in_time(
    valkey: ValkeyProcess,
) -> None:
    """C68, R-16: 500 commands at once on eight connections, then against a server that pauses."""
    async with SlowLink(valkey.socket_path) as link:
        client = command_client(link.settings(timeout_s=10.0))
        burst = [run_command(client, "ECHO", str(number)) for number in range(500)]
        assert await asyncio.gather(*burst) == [str(number).encode() for number in range(500)]
        assert len(link.connects_s) <= 8
        await client.aclose()
        impatient = command_client(link.settings(timeout_s=0.05))
        await run_command(impatient, "PING")
        link.delay_s = lambda: 0.5
        async with RunningClock() as clock:
            began_s = clock()
            results = await asyncio.gather(
                *(run_command(impatient, "ECHO", str(number)) for number in range(500)),
                return_exceptions=True,
            )
            took_s = clock() - began_s
        assert all(isinstance(one, STORE_ERRORS) for one in results)
        assert took_s < 5
        link.delay_s = float

        async def answers() -> bool:
            try:
                return bool(await run_command(impatient, "PING") == b"PONG")
            except STORE_ERRORS:
                return False

        end_s = time.monotonic() + 60
        while not await answers():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)
        await eventually(lambda: link.open_connections <= 8)
        await impatient.aclose()


async def test_routers_come_back_one_by_one_after_an_outage(
    own_server: ValkeyProcess, redis_backend: RedisBackend
) -> None:
    """R-17: eight mirrors dial with full jitter while the server is down, and not in one wave."""
    del redis_backend
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(SlowLink(own_server.socket_path))
        mirrors = [
            await stack.enter_async_context(
                Mirror(
                    link.settings(timeout_s=10.0),
                    RouterId(f"r{number}"),
                    clock=time.monotonic,
                    rng=Random(number),
                    timing=MirrorTiming(stale_after_s=0.3, live_after_s=0.2),
                )
            )
            for number in range(8)
        ]
        await eventually(lambda: all(one.freshness()[0] is Rung.LIVE for one in mirrors))
        loop = asyncio.get_running_loop()
        own_server.kill()
        link.cut()
        await eventually(lambda: all(one.freshness()[0] is not Rung.LIVE for one in mirrors))
        down_s, before = loop.time(), len(link.connects_s)
        await asyncio.sleep(2)
        dialled = link.connects_s[before:]
        assert len(dialled) / 8 / (loop.time() - down_s) < 20
        assert len(dialled) >= 8
        up_s = loop.time()
        own_server.start()
        await eventually(lambda: all(one.freshness()[0] is Rung.LIVE for one in mirrors))
        back_s = sorted(one - up_s for one in link.connects_s if one >= up_s)
        widest = max(sum(begin_s <= one < begin_s + 0.1 for one in back_s) for begin_s in back_s)
        assert widest <= 16  # of up to three connections each
        await eventually(lambda: link.open_connections <= 8 * 4)


async def test_a_replica_in_grace_is_not_taken_for_another_life_of_it(
    redis_backend: RedisBackend,
) -> None:
    """R-18: a registration of another generation voids what was known, before any block comes."""
    mirror = await redis_backend.mirror()
    await redis_backend.writer.register(record())
    assert await mirror.settle(30)
    await redis_backend.lapse(A)
    await redis_backend.writer.register(record(generation="g2"))
    await eventually(lambda: mirror.replicas()[A].record.generation == "g2")
    assert mirror.holdings()[A].blocks == 0
