"""A sidecar running against ``KvEngine``, and what a router sees of its replica."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar.profile import SidecarSettings
from sidecar.rank import run_agent
from state.memory import MemoryState
from state.model import ModelIdentity, ReplicaId, ReplicaState, RouterId
from state.prefix import chain_of, chain_root, pack_tokens, salt_scope
from state.store import StateError
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from state.model import (
        ChangeBatch,
        Fence,
        Generation,
        NamespaceId,
        ReplicaFacts,
        ReplicaLoad,
        ReplicaRecord,
        Tier,
    )
    from state.store import ReplicaWriter
    from support.kv_engine import KvEngine

REPLICA = ReplicaId("r1")
IDENTITY = ModelIdentity(model="tiny", block_tokens=4)
TIMEOUT_S = 60.0


def settings_for(engine: KvEngine, **changes: Any) -> SidecarSettings:
    settings = SidecarSettings(
        engine=engine.url,
        replica=REPLICA,
        block_tokens=4,
        heartbeat_interval_s=0.05,
        scrape_interval_s=0.05,
        drain_grace_s=0.0,
    )
    return msgspec.structs.replace(settings, **changes)


class Fleet:
    """The shared state and what a router sees of the one replica."""

    def __init__(self) -> None:
        self.state = MemoryState(time.monotonic, StoreTiming(load_ttl_s=0.5))
        self.reader = self.state.reader(RouterId("router"))
        self.generations: list[Generation] = []
        self.lives: list[str] = []
        """What the cache's life was called, one after another; empty where it was not known."""

    async def register(self, record: ReplicaRecord) -> None:
        self.generations.append(record.generation)
        self._note_life(record)
        await self.state.register(record)

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        self._note_life(record)
        return await self.state.heartbeat(record, load, facts)

    def _note_life(self, record: ReplicaRecord) -> None:
        if self.lives[-1:] != [record.cache_life]:
            self.lives.append(record.cache_life)

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        await self.state.apply(changes)

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        await self.state.deregister(replica, generation)

    async def copy(self, changes: Sequence[ChangeBatch]) -> None:
        await self.state.copy(changes)

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        return await self.state.swap(replica, generation, copied_blocks)

    def replica(self) -> ReplicaState | None:
        return self.reader.replicas().get(REPLICA)

    def is_registered(self) -> bool:
        return self.replica() is not None

    def blocks(
        self, tokens: list[int], *, identity: ModelIdentity = IDENTITY, salt: str = ""
    ) -> int:
        named = msgspec.structs.replace(identity, scope=salt_scope(salt))
        chain = chain_of(chain_root(named, 0), pack_tokens(tokens), identity.block_tokens, 0)
        overlap = self.reader.overlap(chain).get(REPLICA)
        return overlap.gpu_blocks if overlap else 0

    def holds(self, tokens: list[int], blocks: int, **named: Any) -> Callable[[], bool]:
        return lambda: self.blocks(tokens, **named) == blocks


class BrokenFleet(Fleet):
    """A state store that fails while ``is_broken``; it may store what it does not confirm."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.is_register_broken = False
        self.does_store_anyway = False
        self.failures = 0

    async def register(self, record: ReplicaRecord) -> None:
        if not self.is_broken or self.does_store_anyway:
            await super().register(record)
        if self.is_register_broken:
            self.failures += 1
            message = "not confirmed"
            raise StateError(message)
        self._fail()

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        self._fail()
        return await super().heartbeat(record, load, facts)

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        self._fail()
        await super().apply(changes)

    def _fail(self) -> None:
        if self.is_broken:
            self.failures += 1
            message = "broken on purpose"
            raise StateError(message)


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110 - the state is polled like a router's view
            await asyncio.sleep(0.005)


@asynccontextmanager
async def sidecar(
    settings: SidecarSettings, writer: ReplicaWriter
) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    running = asyncio.create_task(run_agent(settings, writer, stop=stop, rng=random.Random(1)))
    try:
        yield running
    finally:
        stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(running, return_exceptions=True)


def page(number: int) -> list[int]:
    return [number] * 4


def pages(*numbers: int) -> list[int]:
    return [token for number in numbers for token in page(number)]
