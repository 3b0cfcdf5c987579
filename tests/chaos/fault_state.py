"""Faults of the shared state: frozen, killed, emptied, cut off from one router; scopes that end."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from chaos.fault import Fault, Finding, no_errors, now, told, within
from chaos.wire import Wire, request_bytes

if TYPE_CHECKING:
    import random

    from chaos.rig import Rig

AWAY_S: Final = 1.5
KNOWN_S: Final = 20.0


async def on_rung(rig: Rig, wanted: dict[int, str], timeout_s: float = 40.0) -> float | None:
    """Wait until the routers are on these rungs; return how long it took."""
    return await rig.until(
        lambda looks: all(look.rung == wanted.get(look.router, look.rung) for look in looks),
        timeout_s,
    )


async def frozen_state(rig: Rig, _: random.Random) -> list[Finding]:
    """C-11, R-03."""
    from_s = now()
    rig.valkey.freeze()
    took_s = await on_rung(rig, {0: "stale", 1: "stale"})
    await asyncio.sleep(AWAY_S)
    rig.valkey.thaw()
    back_s = await on_rung(rig, {0: "live", 1: "live"})
    return [
        within("stale", took_s, 1.5),
        within("live again", back_s, 3.0),
        no_errors(rig, from_s),
    ]


async def killed_state(rig: Rig, _: random.Random) -> list[Finding]:
    """C-11, R-02: an empty server comes back."""
    from_s = now()
    held = await _held(rig)
    rig.valkey.kill()
    took_s = await on_rung(rig, {0: "stale", 1: "stale"})
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(rig.valkey.start)
    back_s = await on_rung(rig, {0: "live", 1: "live"})
    again_s = await _known_again(rig, held)
    return [
        within("stale", took_s, 1.5),
        within("live again", back_s, 3.0),
        within("all is known again", again_s, 3.0),
        no_errors(rig, from_s),
    ]


async def emptied_state(rig: Rig, _: random.Random) -> list[Finding]:
    """C-11, R-06."""
    from_s = now()
    held = await _held(rig)
    await rig.valkey.flush()
    again_s = await _known_again(rig, held)
    await asyncio.sleep(AWAY_S)
    return [within("all is known again", again_s, 3.0), no_errors(rig, from_s)]


async def _held(rig: Rig) -> int:
    looks = await rig.watch.looks()
    return min(sum(one.resident_blocks for one in look.replicas.values()) for look in looks)


async def _known_again(rig: Rig, held: int) -> float | None:
    """Wait until the store names what routers held, and they hold it; return how long it took.

    Routers alone prove nothing: they go on with what they knew before.
    """
    began_s, wanted = now(), 0.9 * held
    while now() - began_s < KNOWN_S:
        if await _stored(rig) >= wanted > 0 and await _held(rig) >= wanted:
            return now() - began_s
        await asyncio.sleep(0.05)
    return None


async def _stored(rig: Rig) -> int:
    keys = await rig.valkey.command("KEYS", "*:blocks:*")
    return sum([await rig.valkey.command("SCARD", key) for key in keys])


async def slow_state(rig: Rig, _: random.Random) -> list[Finding]:
    """C-11, R-04."""
    from_s = now()
    for router in rig.routers:
        router.link.delay_s = 0.05
    await asyncio.sleep(4.0)
    looks = await rig.watch.looks()
    for router in rig.routers:
        router.link.delay_s = 0.0
    back_s = await on_rung(rig, {0: "live", 1: "live"})
    return [
        told("its age is told", ", ".join(look.rung for look in looks)),
        within("live again", back_s, 3.0),
        no_errors(rig, from_s),
    ]


async def parted_state(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-12: one router is cut off, and a scope ends meanwhile."""
    from_s = now()
    cut = rng.randrange(len(rig.routers))
    other = 1 - cut
    before = await epochs(rig, cut)
    rig.routers[cut].link.part(replies_only=rng.random() < 0.5)
    took_s = await on_rung(rig, {cut: "stale"})
    live_s = await on_rung(rig, {cut: "stale", other: "live"})
    status = await operate(rig, other, "DELETE", "/admin/scopes/tenant:acme")
    await asyncio.sleep(AWAY_S)
    rig.routers[cut].link.heal()
    back_s = await on_rung(rig, {0: "live", 1: "live"})
    heard_s = await _agreed(rig)
    ended = _is_another(before, await epochs(rig, cut), "tenant:acme")
    return [
        within("the one that is cut off is stale", took_s, 2.0),
        within("the other is live", live_s, 0.5),
        Finding("a scope ends meanwhile", status in (200, 202, 207) and ended, f"status {status}"),
        within("live again", back_s, 5.0),
        within("its end is known on both sides", heard_s, 5.0),
        no_errors(rig, from_s),
    ]


async def operate(rig: Rig, router: int, method: str, path: str) -> int:
    """Return the status of an operator's request."""
    async with asyncio.timeout(30):
        wire = await Wire.open(rig.routers[router].admin)
        try:
            wire.send(request_bytes(path, b"", {"Connection": "close"}, method))
            return (await wire.head()).status
        finally:
            wire.close()


async def epochs(rig: Rig, router: int) -> dict[str, int]:
    """Return the epoch of each scope as a router knows it."""
    _, body = await rig.watch.get(rig.routers[router].admin, "/admin/scopes")
    return {one["scope"]: one["epoch"] for one in json.loads(body)}


def _is_another(before: dict[str, int], after: dict[str, int], scope: str) -> bool:
    return after.get(scope) not in (None, before.get(scope))


async def _agreed(rig: Rig) -> float | None:
    began_s = now()
    while now() - began_s < 20.0:
        if await epochs(rig, 0) == await epochs(rig, 1):
            return now() - began_s
        await asyncio.sleep(0.1)
    return None


async def rotated(rig: Rig, rng: random.Random) -> list[Finding]:
    """C-23."""
    from_s = now()
    before = await epochs(rig, 0)
    statuses = []
    for name in ("acme", "globex"):
        router = rng.randrange(len(rig.routers))
        path = f"/admin/scopes/tenant:{name}/rotate"
        statuses.append(await operate(rig, router, "POST", path))
        await asyncio.sleep(0.5)
        path = f"/admin/scopes/tenant:{name}"
        statuses.append(await operate(rig, 1 - router, "DELETE", path))
        await asyncio.sleep(0.5)
    agreed_s = await _agreed(rig)
    await asyncio.sleep(1.0)
    after = await epochs(rig, 0)
    return [
        Finding("taken", all(one in (200, 202, 207) for one in statuses), str(statuses)),
        Finding(
            "every scope has another epoch",
            all(_is_another(before, after, f"tenant:{name}") for name in ("acme", "globex")),
            f"{before} -> {after}",
        ),
        within("both routers agree", agreed_s, 2.0),
        no_errors(rig, from_s),
    ]


STATE_FAULTS: Final = (
    Fault("C-11 freeze", "the store is frozen", frozen_state, in_slice=True),
    Fault("C-11 kill", "the store is killed and comes back empty", killed_state, in_slice=True),
    Fault("C-11 flush", "the store is emptied", emptied_state, in_slice=True),
    Fault("C-11 slow", "the store takes 100 ms", slow_state),
    Fault("C-12", "one router is cut off from the store", parted_state, in_slice=True),
    Fault("C-23", "scopes rotate and end", rotated),
)
