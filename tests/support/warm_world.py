"""A world of prefixes and replicas in which warm-up jobs are done, without a network."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from policies.warm_plan import WarmPart
from router.endpoint import Endpoint
from router.fleet import Member
from router.kv_source import KvTransferSettings
from router.warm_call import WarmEnd, WarmResult
from router.warm_job import Job, JobKind
from router.warm_look import Seen
from router.warm_setting import WarmUpSettings
from router.warm_work import WarmWork, WarmWorkParts
from state.model import BlockId, ModelIdentity, ReplicaId, RouterId, Rung
from state.store import StateError
from state.warm_claim import Claimed, MemoryWarmClaims, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from router.warm_call import WarmCalls
    from router.warm_look import WarmLook
    from router.warm_room import WarmRoom
    from router.warm_text import KeptPrefix
    from state.store import FleetReader

BLOCK: Final = 64
IDENTITY: Final = ModelIdentity(model="m", block_tokens=BLOCK)
Sent = tuple[str, str, int, int]
"""Replica, prefix, up to where, from where."""


class FrailClaims(MemoryWarmClaims):
    """A store that may be away."""

    is_away = False

    async def take(self, subject: Subject, tokens: int, budget_tokens: int) -> Claimed:
        if self.is_away:
            message = "away"
            raise StateError(message)
        return await super().take(subject, tokens, budget_tokens)

    async def give_back(self, subject: Subject) -> None:
        if self.is_away:
            message = "away"
            raise StateError(message)
        await super().give_back(subject)


class World:
    """``prefixes`` are tokens and holders by name; each is a part of its own."""

    def __init__(self, *replicas: str, **settings: Any) -> None:
        self.names = [ReplicaId(name) for name in replicas]
        self.settings = WarmUpSettings(enabled=True, **{"step_tokens": 4 * BLOCK, **settings})
        self.rung = Rung.LIVE
        self.prefixes: dict[str, tuple[int, float, int]] = {}
        self.held: dict[tuple[str, str], int] = {}
        self.ended: set[str] = set()
        self.closed: set[str] = set()
        self.has_room = True
        self.must_yield = False
        self.sent: list[Sent] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.answers: dict[str, WarmEnd] = {}
        self.loses_tokens = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.book: dict[Subject, tuple[RouterId | None, float, int]] = {}
        self.claims = FrailClaims(RouterId("one"), time.monotonic, self.book)
        self.rival = FrailClaims(RouterId("two"), time.monotonic, self.book)

    def add(self, name: str, blocks: int, rate: float = 1.0, wanted: int = 9) -> None:
        """Add a prefix that everybody should hold, unless fewer are ``wanted``."""
        self.prefixes[name] = (blocks * BLOCK, rate, wanted)

    def job(self, kind: JobKind = JobKind.WARM_UP, seconds: float = 60.0) -> Job:
        """Return a job of the first replica."""
        return Job(kind, self.names[0], "life", 0.0, time.monotonic() + seconds)

    async def do(self, job: Job) -> Job:
        """Do a job to its end."""
        await self.work().run(job, self.members()[self.names[0]])
        return job

    def work(self) -> WarmWork:
        """Return what does jobs."""
        return WarmWork(
            WarmWorkParts(
                settings=self.settings,
                transfer=KvTransferSettings(),
                fleet=cast("Any", SimpleNamespace(members=self.members)),
                reader=cast("FleetReader", SimpleNamespace(freshness=lambda: (self.rung, 0.0))),
                look=cast("WarmLook", _Look(self)),
                room=cast("WarmRoom", _Room(self)),
                calls=cast("WarmCalls", _Calls(self)),
                claims=self.claims,
                clock=time.monotonic,
                empty=lambda: self.names[:1],
                note=lambda *_: None,
            )
        )

    def members(self) -> dict[ReplicaId, Member]:
        """Return the replicas that did not leave."""
        endpoint = Endpoint.configured("http://127.0.0.1:1")
        return {
            name: Member(replica=name, endpoint=endpoint, identity=IDENTITY, has_events=True)
            for name in self.names
        }


class _Look:
    def __init__(self, world: World) -> None:
        self._world = world

    async def seen(
        self, _: Member, __: float, held: Collection[tuple[ReplicaId, BlockId]] = ()
    ) -> Seen:
        parts, texts = {}, {}
        for name, (tokens, rate, wanted) in self._world.prefixes.items():
            key = BlockId(name.encode())
            holders = {
                r for (r, n), have in self._world.held.items() if n == name and have >= tokens
            }
            holders |= {replica for replica, one in held if one == key}
            parts[key] = WarmPart(
                name=key,
                parent=None,
                start_tokens=0,
                end_tokens=tokens,
                block_tokens=BLOCK,
                rate_per_s=rate,
                wanted_holders=wanted,
                holders=frozenset(map(ReplicaId, holders)),
                begun={
                    ReplicaId(replica): have
                    for (replica, n), have in self._world.held.items()
                    if n == name and 0 < have < tokens
                },
            )
            texts[key] = SimpleNamespace(name=name, block_tokens=BLOCK)
        return Seen(parts, cast("dict[BlockId, KeptPrefix]", texts))

    def held_tokens(self, text: Any, replica: str, _: float) -> int:
        return self._world.held.get((replica, text.name), 0)

    def is_kept(self, text: Any) -> bool:
        return text.name not in self._world.ended

    def source(self, *_: object) -> None:
        return None


class _Room:
    def __init__(self, world: World) -> None:
        self._world = world

    def is_open(self, replica: ReplicaId) -> bool:
        return replica in self._world.names and replica not in self._world.closed

    def has_room(self, _: Member) -> bool:
        return self._world.has_room

    def must_yield(self, _: str, __: int) -> bool:
        return self._world.must_yield

    def clients(self, _: str) -> int:
        return 0


class _Calls:
    def __init__(self, world: World) -> None:
        self._world = world

    async def send(
        self, _: str, member: Member, text: Any, end_tokens: int, held: int, __: object
    ) -> WarmResult:
        world, replica = self._world, member.replica
        assert replica not in world.running, "one at a time on a replica"
        world.sent.append((replica, text.name, end_tokens, held))
        world.running.add(replica)
        world.most_running = max(world.most_running, len(world.running))
        try:
            await world.gate.wait()
            await asyncio.sleep(0)
        finally:
            world.running.discard(replica)
        end = world.answers.get(text.name, WarmEnd.DONE)
        if end is not WarmEnd.DONE:
            return WarmResult(end)
        world.held[replica, text.name] = end_tokens
        cached = max(0, held - world.loses_tokens)
        return WarmResult(end, end_tokens, cached)


async def soon(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(60.0):
        while not is_so():  # noqa: ASYNC110 - the world has no events
            await asyncio.sleep(0.001)
