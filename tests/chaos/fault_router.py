"""Faults of routers: their end in good order, their death, restarts, too few files, no memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from chaos.evidence import End, read_ledger
from chaos.fault import Fault, Finding, no_errors, now, told, within
from chaos.fault_replica import LONG, raw_head
from chaos.watch import of_process
from chaos.wire import CutError, Wire

if TYPE_CHECKING:
    import random

    from chaos.rig import Rig, RouterProcess

END_S: Final = 25.0
LEASE_S: Final = 3.0


async def drained(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-20."""
    router = rig.routers[rng.randrange(len(rig.routers))]
    other = rig.routers[1 - router.index]
    streams = [
        asyncio.create_task(rig.crowd.ask(is_stream=True, pieces=2 * LONG, router=router.index))
        for _ in range(20)
    ]
    await asyncio.sleep(0.5)
    assert router.child is not None
    outage = rig.begin_outage(router)
    router.child.process.send_signal(signal.SIGTERM)
    ready, head = -1, {}
    with contextlib.suppress(CutError, TimeoutError):
        await asyncio.sleep(0.1)
        ready, _ = await rig.watch.get(router.admin, "/readyz")
        head = await raw_head(rig, router.index)
    lines = await asyncio.gather(*streams)
    status = await ended(router)
    keys = await rig.valkey.command("KEYS", "*")
    gone_s = await no_leases_elsewhere(rig, other)
    cut = [one for one in lines if one.end is not End.COMPLETE]
    findings = [
        Finding("not ready at once", ready == 503, f"status {ready}"),
        Finding("it still serves, and closes", head.get("connection") == "close", str(head)),
        Finding("streams end well", not cut, f"{len(cut)} of {len(lines)} were cut"),
        Finding("exit 0", status == 0, f"status {status}"),
        within("its claims are gone", gone_s, 0.5),
        Finding("keys stay in bounds", len(keys) < 5_000, f"{len(keys)} keys"),
    ]
    await rig.bring_back(router, outage)
    return findings


async def ended(router: RouterProcess) -> int | None:
    """Wait for the end of a router's process; return its status, None where it does not end."""
    assert router.child is not None
    until_s = now() + END_S
    while router.child.is_alive():
        if now() > until_s:
            return None
        await asyncio.sleep(0.03)
    return router.child.process.returncode


async def no_leases_elsewhere(rig: Rig, router: RouterProcess) -> float | None:
    """Wait until a router sees nothing of others in flight, by its own view of them."""
    began_s = now()
    while now() - began_s < 15.0:
        _, body = await rig.watch.get(router.admin, "/admin/replicas")
        if not sum(one["inflight_elsewhere"] for one in json.loads(body)):
            return now() - began_s
        await asyncio.sleep(0.05)
    return None


async def killed_router(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-21."""
    router = rig.routers[rng.randrange(len(rig.routers))]
    other = rig.routers[1 - router.index]
    from_s = now()
    streams = [
        asyncio.create_task(rig.crowd.ask(is_stream=True, pieces=LONG, router=router.index))
        for _ in range(20)
    ]
    await asyncio.sleep(0.3)
    await rig.watch.sample(router)  # what it knows is lost with it
    outage = rig.begin_outage(router)
    assert router.child is not None
    open_then = {
        line.request
        for line in rig.crowd.ledger
        if line.router == router.index and line.ended_s == float("inf")
    }
    router.child.process.kill()
    router.child.process.wait()
    healed_s = await no_leases_elsewhere(rig, other)
    freed_s = await replicas_hear_of_it(rig, open_then)
    await asyncio.gather(*streams)
    calm = no_errors(rig, from_s, other.index)
    await rig.bring_back(router, outage)
    return [
        calm,
        within("its claims are gone", healed_s, LEASE_S),
        within("replicas stop computing for it", freed_s, 1.0),
    ]


async def replicas_hear_of_it(rig: Rig, requests: set[str]) -> float | None:
    """Wait until no replica computes any of ``requests``; return how long it took."""
    began_s = now()
    while now() - began_s < 15.0:
        lines = [one for engine in rig.engines for one in read_ledger(engine.ledger)]
        begun = {one["attempt"] for one in lines if one.get("request") in requests}
        ended = {one["attempt"] for one in lines if one["event"] == "end"}
        dead = {one for one in begun if not _is_of_this_life(rig, one)}
        if not begun - ended - dead:
            return now() - began_s
        await asyncio.sleep(0.05)
    return None


def _is_of_this_life(rig: Rig, attempt: str) -> bool:
    return any(f"-{engine.lives[-1]}-" in attempt for engine in rig.engines)


async def restarted(rig: Rig, _: random.Random) -> list[Finding]:
    """C-22: both routers in turn, with a client that asks the other one when one refuses."""
    failed, asked = 0, 0
    stop = asyncio.Event()

    async def go_on() -> None:
        nonlocal failed, asked
        while not stop.is_set():
            asked += 1
            for index in (asked % 2, 1 - asked % 2):
                line = await rig.crowd.ask(is_stream=False, router=index)
                if line.end is End.COMPLETE:
                    break
            else:
                failed += 1
            await asyncio.sleep(0.02)

    going = [asyncio.create_task(go_on()) for _ in range(3)]
    statuses = []
    for router in rig.routers:
        assert router.child is not None
        outage = rig.begin_outage(router)
        router.child.process.send_signal(signal.SIGTERM)
        statuses.append(await ended(router))
        await rig.bring_back(router, outage)
    stop.set()
    await asyncio.gather(*going)
    return [
        Finding(
            "no request is lost to a client with two routers", not failed, f"{failed} of {asked}"
        ),
        Finding("exit 0", statuses == [0, 0], str(statuses)),
    ]


async def restart_with(
    rig: Rig, router: RouterProcess, prefix: tuple[str, ...] = (), **config: Any
) -> None:
    """Restart a router in another setting."""
    assert router.child is not None
    outage = rig.begin_outage(router)
    router.child.process.send_signal(signal.SIGTERM)
    await ended(router)
    await rig.start_router(router, prefix, config)
    await rig.settle()
    outage.until_s = now()


async def few_files(rig: Rig, _: random.Random) -> list[Finding]:
    """C-16."""
    router = rig.routers[1]
    code = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    await restart_with(rig, router, (sys.executable, "-S", "-c", code))
    stream = asyncio.create_task(
        rig.crowd.ask(is_stream=True, pieces=3 * LONG, router=router.index)
    )
    await asyncio.sleep(0.3)
    outage = rig.begin_outage(router)  # who comes late finds no place
    idle = []
    for _number in range(400):
        with contextlib.suppress(CutError):
            idle.append(await Wire.open(router.listen))
    await asyncio.sleep(0.5)
    live, _body = await rig.watch.get(router.admin, "/livez")
    _rss, descriptors = of_process(router.pid)
    line = await stream
    for wire in idle:
        wire.reset()
    await asyncio.sleep(0.5)
    after = await rig.crowd.ask(router=router.index)
    outage.until_s = now()
    assert router.child is not None
    findings = [
        Finding("operators get in", live == 200, f"status {live}, {descriptors} descriptors"),
        Finding("streams go on", line.end is End.COMPLETE, str(line.end)),
        Finding("served again", after.end is End.COMPLETE, str(after.end)),
        Finding("it lives", router.child.is_alive(), f"{len(idle)} idle connections"),
    ]
    await restart_with(rig, router)
    return findings


async def no_memory(rig: Rig, _: random.Random) -> list[Finding]:
    """C-17."""
    router = rig.routers[1]
    rss, _count = of_process(router.pid)
    seen = {}
    parts = {"shed_low": 0.1, "close": 0.2, "refuse": 0.95}
    for rung, factor in (("close", 2.0), ("refuse", 0.5)):
        overload = {"memory_bytes": int(rss * factor), "memory": parts}
        await restart_with(rig, router, admission={"overload": overload})
        await asyncio.sleep(1.0)
        head = await raw_head(rig, router.index)
        series = await rig.watch.series(router)
        seen[rung] = (head[":status"], head.get("connection", ""), _rung(series))
    await restart_with(rig, router)
    head = await raw_head(rig, router.index)
    return [
        Finding("close: connections end", seen["close"][1] == "close", str(seen["close"])),
        Finding("refuse: 503", seen["refuse"][0] == "503", str(seen["refuse"])),
        Finding("enough: served", head[":status"] == "200", head[":status"]),
    ]


def _rung(series: dict[str, float]) -> str:
    for name, value in series.items():
        if name.startswith("warmroute_overload_rung{") and value:
            return name.partition('"')[2].rstrip('"}')
    return ""


async def skewed(rig: Rig, _: random.Random) -> list[Finding]:
    """C-15: one router an hour ahead, with libfaketime where WARMROUTE_FAKETIME names it."""
    library = os.environ.get("WARMROUTE_FAKETIME")
    if library is None:
        return [told("skipped: WARMROUTE_FAKETIME names no library", "not run")]
    router, from_s = rig.routers[1], now()
    prefix = ("env", f"LD_PRELOAD={library}", "FAKETIME=+1h", "FAKETIME_DONT_FAKE_MONOTONIC=1")
    await restart_with(rig, router, prefix)
    await asyncio.sleep(6.0)
    names = {engine.name for engine in rig.engines}
    took_s = await rig.until(
        lambda looks: all(look.rung == "live" and set(look.replicas) == names for look in looks)
    )
    series = await rig.watch.series(router)
    negative = [name for name, value in series.items() if "seconds" in name and value < 0]
    calm = no_errors(rig, from_s, 0)
    await restart_with(rig, router)
    return [
        within("nothing has expired", took_s, 1.0),
        Finding("no negative time", not negative, str(negative)),
        calm,
    ]


ROUTER_FAULTS: Final = (
    Fault("C-15", "a clock is an hour ahead", skewed),
    Fault("C-16", "256 files", few_files),
    Fault("C-17", "no memory left", no_memory),
    Fault("C-20", "a router ends in good order", drained, in_slice=True),
    Fault("C-21", "a router is killed", killed_router, in_slice=True),
    Fault("C-22", "routers restart in turn", restarted),
)
