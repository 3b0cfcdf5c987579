"""Eight router processes whose state server goes and comes back, and clocks an hour apart."""

from __future__ import annotations

import asyncio
import ctypes.util
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.fleet import FleetPlan, LocalFleet, until
from support.slow_link import SlowLink
from support.steady_load import SteadyLoad
from support.tokenizer import write_tokenizer
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from support.fleet import Router

ROUTERS = 8
DOWN_S = 4.0
MOST_CONNECTS_PER_S = 20
STEP_S = 0.1
FAKETIME = (
    os.environ.get("WARMROUTE_FAKETIME", ""),
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
)


async def rung(fleet: LocalFleet, router: Router) -> str:
    return str((await fleet.get(f"{router.url}/readyz"))["rung"])


@pytest.mark.heavy
async def test_eight_routers_come_back_without_a_wave_of_connections(tmp_path: Path) -> None:
    """R-17: connects per router stay below 20 a second, down and up, and are spread in time."""
    with ValkeyProcess() as server:
        plan = FleetPlan(state_url=server.url, replicas=0)
        async with AsyncExitStack() as stack, LocalFleet(tmp_path, plan) as fleet:
            links = [
                await stack.enter_async_context(SlowLink(server.socket_path))
                for _ in range(ROUTERS)
            ]
            routers = [await fleet.start_router(state={"redis": link.url}) for link in links]

            async def are_all(wanted: str) -> bool:
                return all([await rung(fleet, router) == wanted for router in routers])

            await until(lambda: are_all("live"), "all live")
            loop = asyncio.get_running_loop()
            server.kill()
            for link in links:
                link.cut()
            down_s = loop.time()
            await until(lambda: are_all("stale"), "all stale")
            await asyncio.sleep(DOWN_S)
            server.start()
            up_s = loop.time()
            await until(lambda: are_all("live"), "all live again")
            for link in links:
                down = [one for one in link.connects_s if down_s <= one < up_s]
                assert len(down) <= MOST_CONNECTS_PER_S * (up_s - down_s)
                up = [one for one in link.connects_s if one >= up_s]
                assert len(up) <= MOST_CONNECTS_PER_S
                assert link.open_connections <= 10
            back_s = sorted(one for link in links for one in link.connects_s if one >= up_s)
            widest = max(
                sum(begin_s <= one < begin_s + STEP_S for one in back_s) for begin_s in back_s
            )
            assert widest <= len(back_s) / 2  # no wave of all of them


def faketime() -> str:
    """Return the path of the library; fails without one."""
    for path in (*FAKETIME, ctypes.util.find_library("faketime") or ""):
        if path and Path(path).exists():
            return path
    message = "needs libfaketime: WARMROUTE_FAKETIME=/path/to/libfaketime.so.1"
    raise AssertionError(message)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="the library is preloaded as on Linux")
async def test_processes_whose_clocks_are_an_hour_apart_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-19, C-15: a router an hour ahead, one an hour behind; nothing expires early or late."""
    monkeypatch.setenv("LD_PRELOAD", faketime())
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    monkeypatch.setenv("FAKETIME", "+1h")
    asked = [sys.executable, "-c", "import time; print(time.time())"]
    shifted = await asyncio.to_thread(subprocess.check_output, asked)
    assert float(shifted) - time.time() > 3_500  # the library does what it is here for
    monkeypatch.setenv("FAKETIME", "+0")
    with ValkeyProcess() as server:
        plan = FleetPlan(
            state_url=server.url,
            replicas=1,
            routers=0,
            tokenizer=write_tokenizer(tmp_path / "tokenizer"),
            config={"receipts": True},
        )
        async with LocalFleet(tmp_path, plan) as fleet:
            for shift in ("+1h", "-1h"):
                monkeypatch.setenv("FAKETIME", shift)
                fleet.routers.append(await fleet.start_router())
            for router in fleet.routers:
                await fleet.all_up(router, 1)
            ahead, behind = fleet.routers
            async with SteadyLoad(ahead.url, 20) as one, SteadyLoad(behind.url, 20) as other:
                for _ in range(80):  # longer than any record or lease lives without a heartbeat
                    for router in fleet.routers:
                        seen = await fleet.seen(router)
                        assert seen["w0"]["up"]
                        assert seen["w0"]["inflight_elsewhere"] >= 0
                        assert await rung(fleet, router) == "live"
                    await asyncio.sleep(0.1)
            for load in (one, other):
                assert set(load.outcomes) == {"200"}
                assert set(load.rungs) == {"live"}
            for router in fleet.routers:
                async with fleet.http.get(f"{router.url}/metrics") as answer:
                    text = await answer.text()
                values = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
                negative = [name for name, _, value in values if float(value) < 0]
                assert not negative
            behind.child.process.kill()

            async def are_gone() -> bool:
                return int((await fleet.seen(ahead))["w0"]["inflight_elsewhere"]) == 0

            await until(are_gone, "no lease of a dead router", 4)
            fleet.routers.remove(behind)
