"""Looks at routers from outside: what they show, their records, their metrics, their processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chaos.evidence import Rest, Sample
from chaos.wire import CutError, Wire, request_bytes

if TYPE_CHECKING:
    from chaos.rig import Rig, RouterProcess

LOOK_S: Final = 1.0
ASK_S: Final = 8.0
REST_S: Final = 30.0
SPARE_DECISIONS: Final = 100
MOST_DECISIONS: Final = 1_000
HAS_PROC: Final = Path("/proc/self/fd").is_dir()
CLOSE_WAIT: Final = "08"


@dataclass(slots=True)
class Seen:
    """One replica as a router shows it."""

    is_up: bool
    standing: str
    inflight: int
    generation: str
    resident_blocks: int
    left_s: float | None


@dataclass(slots=True)
class Look:
    """One router as it shows itself."""

    router: int
    is_ready: bool
    rung: str
    replicas: dict[str, Seen]


class Watch:
    """Collects samples while the run goes on; ``rest`` closes the books."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.records: dict[str, dict[str, Any]] = {}
        self._by_life: dict[tuple[int, int], int] = {}
        self._counted: dict[tuple[int, int], int] = {}
        self.samples: list[Sample] = []
        self.rests: list[Rest] = []
        self.replica_active: dict[str, int] = {}
        self.shown: dict[str, str] = {}
        self.keys_without_ttl: list[str] = []
        self.redis_clients = (0, 0)
        self.before: dict[tuple[int, int], Sample] = {}
        self.missed: list[str] = []

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            for router in self._rig.routers:
                await self.sample(router)
            await asyncio.sleep(LOOK_S)

    async def get(self, port: int, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET; raises CutError and TimeoutError."""
        async with asyncio.timeout(ASK_S):
            wire = await Wire.open(port)
            try:
                wire.send(request_bytes(path, b"", {"Connection": "close"}, "GET"))
                head = await wire.head()
                return head.status, b"".join([part async for part in wire.body(head)])
            finally:
                wire.close()

    async def looks(self) -> list[Look]:
        """Return a look at each router that answers."""
        found = []
        for router in self._rig.routers:
            if router.child is None or not router.child.is_alive():
                continue
            with contextlib.suppress(CutError, TimeoutError):
                found.append(await self.look(router))
        return found

    async def look(self, router: RouterProcess) -> Look:
        """Return a look at one router; raises CutError and TimeoutError."""
        replicas = json.loads((await self.get(router.admin, "/admin/replicas"))[1])
        about = json.loads((await self.get(router.admin, "/admin/router"))[1])
        ready, _ = await self.get(router.admin, "/readyz")
        seen = {
            one["replica"]: Seen(
                is_up=one["up"],
                standing=(one.get("standing") or {}).get("standing", ""),
                inflight=one["inflight"],
                generation=str(one["generation"]),
                resident_blocks=one["resident_blocks"],
                left_s=(one.get("standing") or {}).get("left_s"),
            )
            for one in replicas
        }
        return Look(router.index, ready == 200, about["rung"], seen)

    async def series(self, router: RouterProcess) -> dict[str, float]:
        """Return a router's metrics by name and labels, as they are written."""
        _, body = await self.get(router.admin, "/metrics")
        self.shown[f"metrics of router {router.index}"] = body.decode()
        lines = (line for line in body.decode().splitlines() if line and line[0] != "#")
        pairs = (line.rpartition(" ") for line in lines)
        return {sys.intern(name): float(value) for name, _, value in pairs}

    async def sample(self, router: RouterProcess) -> Sample | None:
        """Note a sample of one router and its new records; None where it does not answer."""
        if router.child is None or not router.child.is_alive():
            return None
        life = router.life
        try:
            began_s = time.monotonic()
            await self.get(router.admin, "/livez")
            live_ms = 1000 * (time.monotonic() - began_s)
            series = await self.series(router)
            # As many as have ended since the last look, and some more for those that do meanwhile.
            count = int(_total(series, "warmroute_requests_total"))
            fresh = count - self._counted.get((router.index, life), 0)
            limit = max(SPARE_DECISIONS, min(fresh + SPARE_DECISIONS, MOST_DECISIONS))
            _, body = await self.get(router.admin, f"/debug/decisions?limit={limit}")
        except (CutError, TimeoutError) as error:
            self.missed.append(f"router {router.index}: {error!r}")
            return None
        self._counted[router.index, life] = count
        self._keep(router, life, body)
        rss, descriptors = of_process(router.pid)
        sample = Sample(
            router=router.index,
            life=life,
            at_s=time.monotonic(),
            series=series,
            rss_bytes=rss,
            descriptors=descriptors,
            requests=-1,
            live_ms=live_ms,
        )
        self.samples.append(sample)
        return sample

    def _keep(self, router: RouterProcess, life: int, body: bytes) -> None:
        text = body.decode()
        self.shown[f"decisions of router {router.index}"] = text
        for record in json.loads(text):
            if record["request_id"] not in self.records:
                self.records[record["request_id"]] = _judged(record)
                key = (router.index, life)
                self._by_life[key] = self._by_life.get(key, 0) + 1

    async def warm(self) -> None:
        """Take what is compared with at the end, once clients have asked for a while."""
        for router in self._rig.routers:
            sample = await self.sample(router)
            assert sample is not None, f"router {router.index} does not answer: {self.missed}"
            self.before[router.index, router.life] = sample
        self.redis_clients = (await self._redis_clients(), 0)

    async def rest(self) -> None:
        """Wait until nothing is in flight, then close the books."""
        deadline_s = time.monotonic() + REST_S
        while time.monotonic() < deadline_s:
            looks = await self.looks()
            states = [await engine.state() for engine in self._rig.engines if engine.is_alive]
            inflight = sum(one.inflight for look in looks for one in look.replicas.values())
            if not inflight and not any(state["active"] for state in states):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * LOOK_S)  # idle connections of the pool close after a second
        while any(half_closed(one.pid) for one in self._rig.routers):
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        for router in self._rig.routers:
            sample = await self.sample(router)
            assert sample is not None, f"router {router.index} does not answer: {self.missed}"
            sample.requests = self._by_life.get((router.index, router.life), 0)
            before = self.before.get((router.index, router.life), sample)
            self.rests.append(
                Rest(
                    router=router.index,
                    inflight=_sum(sample, "warmroute_inflight_requests"),
                    descriptors=sample.descriptors,
                    descriptors_before=before.descriptors,
                    pool=int(_sum(sample, "warmroute_replica_connections")),
                    half_closed=half_closed(router.pid),
                    rss_bytes=sample.rss_bytes,
                    rss_before=before.rss_bytes,
                )
            )
        for engine in self._rig.engines:
            self.replica_active[engine.name] = (await engine.state())["active"]
        keys = await self._rig.valkey.keys_without_ttl()
        self.keys_without_ttl = [key.decode("utf-8", "replace") for key in keys]
        self.redis_clients = (self.redis_clients[0], await self._redis_clients())

    async def _redis_clients(self) -> int:
        told = str(await self._rig.valkey.command("INFO", "clients"))
        return int(told.partition("connected_clients:")[2].split("\\r")[0].split()[0])


def _judged(record: dict[str, Any]) -> dict[str, Any]:
    """Return what anybody looks at: a soak has a million of them."""
    kept = {name: record[name] for name in ("client_request_id", "outcome", "tenant")}
    name = "predicted_cached_tokens"
    attempts = [{"decision": {name: one["decision"][name]}} for one in record["attempts"]]
    return {**kept, "attempts": attempts}


def _sum(sample: Sample, name: str) -> float:
    return _total(sample.series, name)


def _total(series: dict[str, float], name: str) -> float:
    return sum(value for key, value in series.items() if key.partition("{")[0] == name)


def of_process(pid: int) -> tuple[int, int]:
    """Return resident bytes and open descriptors of a process; zeros where nobody tells."""
    if not HAS_PROC:
        return 0, 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0, 0


def half_closed(pid: int) -> int:
    """Return how many sockets of a process are in CLOSE_WAIT."""
    if not HAS_PROC:
        return 0
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == CLOSE_WAIT and row[9] in inodes for row in rows)
