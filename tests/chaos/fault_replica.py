"""Faults of replicas: death, silence, another life, errors, slowness, nonsense."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

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
from chaos.link import Trouble
from chaos.speech import MODEL, PATH
from chaos.wire import Wire, request_bytes

if TYPE_CHECKING:
    import random

    from chaos.engines import Engine
    from chaos.rig import Rig

FROZEN_S: Final = 5.0
TOLD_PATIENCE_S: Final = 3.0
"""Less than the time after which a router gives a silent stream up anyway."""
LONG: Final = 60
PREDICTED_SLACK_TOKENS: Final = 64
ON_ITS_WAY_S: Final = 2.0


async def busiest(rig: Rig) -> Engine:
    """Return the replica that computes most."""
    states = [(await one.state())["active"] for one in rig.engines]
    return rig.engines[max(range(len(states)), key=states.__getitem__)]


async def long_streams(rig: Rig, count: int) -> list[asyncio.Task[Any]]:
    """Begin streams that last for half a second and more."""
    tasks = [asyncio.create_task(rig.crowd.ask(is_stream=True, pieces=LONG)) for _ in range(count)]
    await asyncio.sleep(0.25)
    return tasks


async def killed(rig: Rig, _: random.Random) -> list[Finding]:
    """C-01."""
    from_s = now()
    tasks = await long_streams(rig, 12)
    victim = await busiest(rig)
    struck_s = now()
    victim.kill()
    took_s = await rig.until(down(victim.name))
    lines = await asyncio.gather(*tasks)
    late = [one.ended_s - struck_s for one in lines if one.end is End.ERROR_EVENT]
    await asyncio.sleep(0.5)
    findings = [
        only_begun_fail(rig, from_s),
        within("the last cut stream is told of it", max(late, default=0.0), 0.1, TOLD_PATIENCE_S),
        within(f"no router offers {victim.name} any more", took_s, 1.0),
    ]
    await victim.start()
    return findings


async def frozen(rig: Rig, _: random.Random) -> list[Finding]:
    """C-02."""
    from_s = now()
    tasks = await long_streams(rig, 12)
    victim = await busiest(rig)
    victim.send(signal.SIGSTOP)
    took_s = await rig.until(down(victim.name), 40.0)
    detected_s = now()
    await asyncio.sleep(FROZEN_S)
    calm = no_errors_begun_after(rig, detected_s)
    victim.send(signal.SIGCONT)
    await asyncio.gather(*tasks)
    lines = since(rig, from_s)
    wrong = [one for one in bad(lines) if one.end is not End.ERROR_EVENT]
    timeouts = [one for one in wrong if one.status == 504]
    return [
        Finding(
            "what had not begun is tried again, or ends with 504 where the budget is used up",
            len(wrong) == len(timeouts) + sum(not o.is_stream and o.status == 200 for o in wrong),
            f"{len(lines)} requests, {len(timeouts)} with 504,"
            f" {sum(one.end is End.ERROR_EVENT for one in lines)} begun ones told",
        ),
        within(f"no router offers {victim.name} any more", took_s, 3.5),
        calm,
    ]


def no_errors_begun_after(rig: Rig, from_s: float) -> Finding:
    """Expect that what came once routers knew fails no more."""
    lines = [one for one in since(rig, from_s) if one.began_s >= from_s]
    wrong = bad(lines)
    text = "nothing fails that comes once routers know"
    return Finding(text, not wrong, f"{len(wrong)} of {len(lines)} failed")


async def reborn(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-03."""
    victim = rng.choice(rig.engines)
    before = victim.lives[-1]
    victim.kill()
    await victim.start()
    life = victim.lives[-1]
    standings: set[str] = set()

    def knows(looks: list[Any]) -> bool:
        seen = [look.replicas.get(victim.name) for look in looks]
        standings.update(one.standing for one in seen if one is not None)
        return all(one is not None and one.generation == life and one.is_up for one in seen)

    took_s = await rig.until(knows)
    known_s, from_byte = now(), victim.ledger.stat().st_size
    # A router may know of the life a moment before it is careful with it.
    await rig.until(lambda looks: knows(looks) and "slow_start" in standings, 2.0)
    await asyncio.sleep(0.5)  # slow start: it gets little
    for _ in range(8):
        await asyncio.gather(*(rig.crowd.ask(pieces=20) for _ in range(12)))
    for router in rig.routers:
        await rig.watch.sample(router)
    lines = [one for one in read_ledger(victim.ledger, from_byte) if one["life"] == life]
    wrong, count = _predicted_too_much(rig, lines, known_s)
    return [
        Finding("it has another generation", life != before, f"{before} -> {life}"),
        within("both routers know of it", took_s, 2.0),
        Finding("it comes back in slow start", "slow_start" in standings, str(sorted(standings))),
        Finding(
            "nothing of the last life is predicted", not wrong, f"{count} requests, wrong {wrong}"
        ),
    ]


def _predicted_too_much(
    rig: Rig, lines: list[dict[str, Any]], from_s: float
) -> tuple[list[tuple[str, int, int]], int]:
    """Return which requests of a life were thought to find more than they can have, of how many.

    A request may have been on its way there with the same beginning, and have come later.
    """
    begun = [one for one in lines if one["event"] == "begin"]
    records = {one["client_request_id"]: one for one in rig.watch.records.values()}
    wrong, count = [], 0
    for index, line in enumerate(begun):
        record = records.get(line["request"])
        if line["at_s"] < from_s or record is None:
            continue
        count += 1
        predicted = record["attempts"][-1]["decision"]["predicted_cached_tokens"]
        if predicted <= line["cached_tokens"] + PREDICTED_SLACK_TOKENS:
            continue
        beginning = rig.crowd.prompts[line["request"]][:predicted]
        later = [
            one
            for one in begun[index + 1 :]
            if one["at_s"] < line["at_s"] + ON_ITS_WAY_S
            and rig.crowd.prompts.get(one["request"], b"").startswith(beginning)
        ]
        if not later:
            wrong.append((line["request"], predicted, line["cached_tokens"]))
    return wrong, count


async def all_down(rig: Rig, _: random.Random) -> list[Finding]:
    """C-04."""
    for engine in rig.engines:
        engine.kill()
    await rig.until(lambda looks: all(not s.is_up for one in looks for s in one.replicas.values()))
    began_s = now()
    line = await rig.crowd.ask()
    head = await raw_head(rig, 0)
    took_s = min(line.took_s, now() - began_s)
    await asyncio.sleep(2.0)
    await asyncio.gather(*(engine.start() for engine in rig.engines))
    back_s = now()
    recovered = await rig.until(
        lambda looks: all(s.is_up for one in looks for s in one.replicas.values())
    )
    most = [(await one.state())["most_active"] for one in rig.engines]
    return [
        Finding("503", line.status == 503, f"status {line.status} {line.error_code}"),
        Finding("with Retry-After", "retry-after" in head, str(head)),
        within("at once", took_s, 0.05),
        within("served again", recovered, 3.0),
        Finding("no herd", max(most) <= 64, f"at most {max(most)} at a time {now() - back_s:.1f}"),
    ]


async def raw_head(rig: Rig, router: int) -> dict[str, str]:
    """Return the fields of one answer of a router."""
    body = b'{"model":"%b","messages":[{"role":"user","content":"x"}]}' % MODEL.encode()
    key = rig.tenants[0].key
    wire = await Wire.open(rig.routers[router].listen)
    try:
        fields = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        wire.send(request_bytes(PATH, body, fields))
        head = await wire.head()
    finally:
        wire.close()
    return {":status": str(head.status), **head.fields}


async def panicked(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-05."""
    victims = rng.sample(rig.engines, 4)
    from_s = now()
    for victim in victims:
        await victim.mode("normal", is_healthy=False)
    panic_s = await in_panic(rig, wanted=True)
    await asyncio.sleep(2.0)
    calm = no_errors(rig, from_s)
    for victim in victims:
        await victim.mode("normal")
    left_s = await in_panic(rig, wanted=False)
    return [
        within("panic with 2 of 6 healthy", panic_s, 3.0),
        within("panic ends", left_s, 3.0),
        calm,
    ]


async def in_panic(rig: Rig, *, wanted: bool) -> float | None:
    """Wait until every router says so by its gauge; return how long it took."""
    began_s = now()
    while now() - began_s < 20.0:
        told = [await rig.watch.series(router) for router in rig.routers]
        if all(bool(one["warmroute_panic_models"]) is wanted for one in told):
            return now() - began_s
        await asyncio.sleep(0.1)
    return None


async def zone_lost(rig: Rig, _: random.Random) -> list[Finding]:
    """C-06."""
    lost, from_s = rig.engines[3:], now()
    for engine in lost:
        engine.link.trouble = Trouble(loses_requests=True, loses_replies=True)
    names = [engine.name for engine in lost]
    took_s = await rig.until(lambda looks: all(down(name)(looks) for name in names), 40.0)
    known_s = now()
    await asyncio.sleep(4.0)
    calm = no_errors_begun_after(rig, known_s)
    for engine in lost:
        engine.link.heal()
    lines = since(rig, from_s)
    codes = Counter(f"{one.end} {one.status or ''}" for one in bad(lines))
    return [
        within("the other zone has it all", took_s, 3.5),
        calm,
        told("what was there ends with a word", str(dict(codes))),
    ]


async def slowed(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-07."""
    victim, from_s = rng.choice(rig.engines), now()
    before = [one.first_byte_s for one in since(rig, from_s - 5) if one.first_byte_s is not None]
    await victim.mode("slow")
    await asyncio.sleep(5.0)
    lines = since(rig, from_s)
    others = [
        one.first_byte_s
        for one in lines
        if one.first_byte_s is not None
        and one.attempts
        and not one.attempts[0].startswith(victim.name)
    ]
    await victim.mode("normal")
    shares = Counter(one.attempts[0].partition("-")[0] for one in lines if one.attempts)
    return [
        no_errors(rig, from_s),
        Finding(
            "others stay as fast",
            p99(others) <= 1.1 * p99(before) + 1.0,
            f"p99 {p99(before):.3f} -> {p99(others):.3f} s",
        ),
        Finding(
            "it gets less than its share",
            shares[victim.name] <= 1.3 * len(lines) / len(rig.engines),
            str(dict(sorted(shares.items()))),
        ),
    ]


def p99(values: list[float]) -> float:
    """Return the 99th percentile; 0 of nothing."""
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0


REPLICA_FAULTS: Final = (
    Fault("C-01", "a replica is killed under load", killed, in_slice=True),
    Fault("C-02", "a replica is frozen", frozen, in_slice=True),
    Fault("C-03", "a replica begins another life on its port", reborn, in_slice=True),
    Fault("C-04", "all replicas are down, then up", all_down),
    Fault("C-05", "most replicas fail their checks", panicked),
    Fault("C-06", "half of the replicas are cut off at once", zone_lost),
    Fault("C-07", "a replica is ten times slower", slowed),
)
