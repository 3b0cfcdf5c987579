"""Faults of answers, of the way to replicas, and of what is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from chaos.client import Leaving
from chaos.evidence import End, read_ledger
from chaos.fault import (
    Fault,
    Finding,
    bad,
    down,
    no_errors,
    now,
    only_begun_fail,
    since,
    told,
    within,
)
from chaos.fault_replica import no_errors_begun_after, p99
from chaos.link import Trouble
from chaos.speech import MODEL, PATH, POISON
from chaos.wire import CutError, Wire, request_bytes

if TYPE_CHECKING:
    import random

    from chaos.rig import Rig

HOT_RATE_HZ: Final = 40.0
HOT_S: Final = 5.0
HOT_FACTOR: Final = 1.5
HIT_SHARE: Final = 0.8
_CHAT: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
HOSTILE: Final = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    _CHAT + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _CHAT + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    _CHAT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /v1/../admin/replicas HTTP/1.1\r\nHost: a\r\n\r\n",
    _CHAT + b"X-A: b\r\n" * 200 + b"\r\n",
    _CHAT + b"X-B: " + b"c" * 40_000 + b"\r\n\r\n",
    _CHAT + b"Host : a\r\n\r\n",
    b"\r\n\r\n\r\n\x00\x00",
)


async def flapped(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-08."""
    victim = rng.choice(rig.engines)
    before, from_s = await ejections(rig, "flapping"), now()
    left_s: list[float] = []

    async def look() -> None:
        while True:
            for one in await rig.watch.looks():
                seen = one.replicas.get(victim.name)
                if seen and seen.standing == "ejected" and seen.left_s is not None:
                    left_s.append(seen.left_s)
            await asyncio.sleep(0.1)

    looking = asyncio.create_task(look())
    for _ in range(4):
        victim.kill()
        await asyncio.sleep(1.0)
        await victim.start()
        await asyncio.sleep(1.5)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    after = await ejections(rig, "flapping")
    return [
        Finding("it is ejected for it", after > before, f"{before:.0f} -> {after:.0f}"),
        told("for so long", f"up to {max(left_s, default=0.0):.1f} s"),
        only_begun_fail(rig, from_s),
    ]


async def ejections(rig: Rig, cause: str) -> float:
    """Return how many ejections both routers count."""
    total = 0.0
    for router in rig.routers:
        series = await rig.watch.series(router)
        total += series.get(f'warmroute_ejections_total{{cause="{cause}"}}', 0.0)
    return total


async def truncated(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-09."""
    victims, from_s = rng.sample(rig.engines, 2), now()
    ks = []
    for _ in range(3):
        for victim in victims:
            ks.append(rng.randint(0, 1_500))
            await victim.mode("truncate", at_bytes=ks[-1])
        await asyncio.sleep(1.0)
    for victim in victims:
        await victim.mode("normal")
    await asyncio.sleep(0.5)
    lines = since(rig, from_s)
    cut = [one for one in lines if one.end in (End.ERROR_EVENT, End.CLOSED)]
    names = tuple(f"{victim.name}-" for victim in victims)
    false = [one for one in lines if one.end is End.COMPLETE and one.pieces != one.wanted_pieces]
    strays = [one for one in cut if one.attempts and not one.attempts[0].startswith(names)]
    return [
        Finding("something was cut", bool(cut), f"{len(cut)} of {len(lines)}, at bytes {ks}"),
        Finding("nothing that was cut looks whole", not false, f"{len(false)} do"),
        Finding("answers of others are whole", not strays, f"{len(strays)} are not"),
    ]


async def hostile(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-10."""
    from_s, statuses = now(), Counter[str]()
    victim = rng.choice(rig.engines)
    await victim.mode("garbage")
    for data in HOSTILE * 3:
        for router in rig.routers:
            statuses[await _answer_to(router.listen, data)] += 1
    await asyncio.sleep(1.5)
    await victim.mode("normal")
    lines = since(rig, from_s)
    wrong = [one for one in bad(lines) if one.status != 502]
    good = [name for name in statuses if name.startswith("2")]
    return [
        Finding("no hostile request is served", not good, str(dict(statuses))),
        Finding(
            "others do not notice, but for 502 where a replica talks nonsense",
            not wrong,
            f"{len(lines)} requests, {len(bad(lines)) - len(wrong)} with 502, {len(wrong)} wrong",
        ),
    ]


async def _answer_to(port: int, data: bytes) -> str:
    try:
        async with asyncio.timeout(3.0):
            wire = await Wire.open(port)
            try:
                wire.send(data)
                wire.half_close()
                return str((await wire.head()).status)
            finally:
                wire.close()
    except CutError:
        return "closed"
    except TimeoutError:
        return "silent"


async def one_way(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-13."""
    victim, from_s = rng.choice(rig.engines), now()
    victim.link.trouble = Trouble(loses_replies=True)
    took_s = await rig.until(down(victim.name), 40.0)
    known_s = now()
    await asyncio.sleep(3.0)
    calm = no_errors_begun_after(rig, known_s)
    await asyncio.sleep(2.0)
    victim.link.heal()
    codes = Counter(f"{one.end} {one.status or ''}" for one in bad(since(rig, from_s)))
    return [within("it is out", took_s, 3.5), calm, told("before: told", str(dict(codes)))]


async def lossy(rig: Rig, _: random.Random) -> list[Finding]:
    """C-14: what lost packets do to a stream of bytes is to hold it up and to cut it up."""
    from_s = now()
    for engine in rig.engines:
        engine.link.trouble = Trouble(delay_s=0.04, slice_bytes=97)
    await asyncio.sleep(5.0)
    findings = [no_errors(rig, from_s)]
    times = [one.first_byte_s or 0.0 for one in since(rig, from_s)]
    for engine in rig.engines:
        engine.link.heal()
    return [*findings, told("it costs time only", f"p99 to first byte {p99(times):.2f} s")]


async def stormed(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-19."""
    from_s = now()
    drips = []
    for index in range(200):
        with contextlib.suppress(CutError):
            wire = await Wire.open(rig.routers[index % 2].listen)
            wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-")
            drips.append(wire)
    for _ in range(5):
        leaving = [rig.crowd.leave(rig.crowd.draw(), rng.choice(list(Leaving))) for _ in range(30)]
        await asyncio.gather(*leaving)
        for wire in drips:
            wire.send(b"a")
        for index in range(150):
            with contextlib.suppress(CutError):
                (await Wire.open(rig.routers[index % 2].listen)).reset()
        await asyncio.sleep(0.3)
    for wire in drips:
        wire.reset()
    times = [one.first_byte_s or 0.0 for one in since(rig, from_s)]
    return [
        no_errors(rig, from_s),
        told("good clients go on", f"p99 to first byte {p99(times):.2f} s"),
    ]


async def hot(rig: Rig, _: random.Random) -> list[Finding]:
    """C-24."""
    shape = rig.crowd.shape
    rig.crowd.shape = replace(shape, rate_hz=HOT_RATE_HZ, hot_share=0.9, leave_share=0.0)
    began_s = now()
    from_bytes = {engine.name: engine.ledger.stat().st_size for engine in rig.engines}
    totals: Counter[str] = Counter()
    looks = 0
    while now() - began_s < HOT_S:
        states = await asyncio.gather(*(engine.state() for engine in rig.engines))
        looks += 1
        totals.update({e.name: s["active"] for e, s in zip(rig.engines, states, strict=True)})
        await asyncio.sleep(0.03)
    ended_s = now()
    rig.crowd.shape = shape
    lines = since(rig, began_s)
    begun = [
        one
        for engine in rig.engines
        for one in read_ledger(engine.ledger, from_bytes[engine.name])
        if one["event"] == "begin" and began_s <= one["at_s"] <= ended_s
    ]
    # With pure affinity all of what is shared would be a hit: the system prompt, and own turns.
    own = {line.request: line.own_prefix_tokens // 64 * 64 for line in lines}
    best = sum(own.get(one["request"], 0) for one in begun)
    hits = sum(one["cached_tokens"] for one in begun if one["request"] in own)
    mean = sum(totals.values()) / len(rig.engines)
    factor = max(totals.values()) / mean if mean else 0.0
    return [
        no_errors(rig, began_s),
        Finding(
            f"at least {HIT_SHARE:.0%} of the hits of pure affinity",
            hits >= HIT_SHARE * best > 0,
            f"{hits / best:.1%}" if best else "nothing to hit",
        ),
        Finding(
            "max / mean in flight",
            factor <= HOT_FACTOR or mean / looks < 1.0,
            f"{factor:.2f}, {mean / looks:.2f} in flight on each in the mean",
        ),
    ]


async def poisoned(rig: Rig, _: random.Random) -> list[Finding]:
    """C-25."""
    messages = [{"role": "user", "content": POISON}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4}).encode()
    fields = {
        "Authorization": f"Bearer {rig.tenants[0].key}",
        "Content-Type": "application/json",
    }
    from_s, statuses = now(), []
    for _number in range(5):
        async with asyncio.timeout(30):
            wire = await Wire.open(rig.routers[0].listen)
            wire.send(request_bytes(PATH, body, fields))
            statuses.append((await wire.head()).status)
            wire.close()
        await asyncio.sleep(0.2)
    dead = [engine for engine in rig.engines if not engine.is_alive]
    begun = only_begun_fail(rig, from_s)
    for engine in dead:
        await engine.start()
    return [
        Finding("at most two replicas die of it", len(dead) <= 2, f"{len(dead)} died"),
        Finding("then it is refused", statuses[-1] == 422, str(statuses)),
        begun,
    ]


async def storm_of_retries(rig: Rig, _: random.Random) -> list[Finding]:
    """C-26: the budget is one of all requests since the start, so the sums since then count."""
    findings = []
    for kind in ("error", "close"):
        began, asked = _attempts(rig), len(rig.crowd.ledger)
        for engine in rig.engines:
            await engine.mode(kind)
        await asyncio.sleep(3.0)
        for engine in rig.engines:
            await engine.mode("normal")
        await asyncio.sleep(0.3)
        attempts, requests = _attempts(rig), len(rig.crowd.ledger)
        findings.append(
            Finding(
                f"all {kind}: attempts at most 1.2 times requests and 3 by router",
                attempts <= 1.2 * requests + 3 * len(rig.routers),
                f"{attempts} for {requests}; {attempts - began} for {requests - asked} meanwhile",
            )
        )
        await rig.settle()
    return findings


def _attempts(rig: Rig) -> int:
    return sum(engine.attempts.total() for engine in rig.engines)


async def starved(rig: Rig, _: random.Random) -> list[Finding]:
    """C-18."""
    before = sum([await ejections(rig, cause) for cause in ("failures", "flapping", "probation")])
    from_s = now()
    burners = [
        await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done") for _ in range(4)
    ]
    await asyncio.sleep(6.0)
    for burner in burners:
        burner.send_signal(signal.SIGKILL)
        await burner.wait()
    after = sum([await ejections(rig, cause) for cause in ("failures", "flapping", "probation")])
    lags = [
        (await rig.watch.series(router))["warmroute_loop_lag_seconds"] for router in rig.routers
    ]
    return [
        no_errors(rig, from_s),
        Finding("nobody is ejected for it", after == before, f"{before:.0f} -> {after:.0f}"),
        told("the lag is told", ", ".join(f"{1000 * lag:.0f} ms" for lag in lags)),
    ]


TRAFFIC_FAULTS: Final = (
    Fault("C-08", "a replica flaps", flapped),
    Fault("C-09", "answers break off at any byte", truncated, in_slice=True),
    Fault("C-10", "hostile requests and answers", hostile),
    Fault("C-13", "replies of a replica are lost", one_way),
    Fault("C-14", "a lossy network", lossy),
    Fault("C-18", "CPU starvation", starved),
    Fault("C-19", "a storm of clients", stormed),
    Fault("C-24", "a hot prefix", hot, in_slice=True),
    Fault("C-25", "a request kills replicas", poisoned, in_slice=True),
    Fault("C-26", "all replicas fail", storm_of_retries, in_slice=True),
)
