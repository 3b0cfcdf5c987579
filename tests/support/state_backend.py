"""The backends that the state contract runs on, each with a writer and readers of its own."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from state.client import command_client, run_command
from state.direct import DirectReader
from state.memory import MemoryReader, MemoryState
from state.mirror import Mirror
from state.model import RouterId
from state.redis_writer import RedisWriter
from state.schema import REPLICA_INDEX, ReplicaKeys
from state.store import Question
from state.timing import LookupTiming, MirrorTiming, StoreTiming
from support.fleet_state import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    from state.client import RedisSettings
    from state.model import BlockId, Overlap, ReplicaFacts, ReplicaId
    from state.store import FleetReader, ReplicaWriter

FAST_ROUNDS = MirrorTiming(
    registry_interval_s=0.02,
    lease_interval_s=0.02,
    lease_heartbeat_s=0.1,
    block_s=0.02,
    stale_after_s=30.0,
    backoff_base_s=0.02,
    backoff_cap_s=0.1,
)
"""For tests in which the store does not fail: a machine that stands still is no outage."""
SOON_STALE = msgspec.structs.replace(
    FAST_ROUNDS, lease_alone_s=0.02, stale_after_s=0.3, live_after_s=0.2
)
"""As fast, for tests in which the store fails."""

LASTING = StoreTiming(record_ttl_s=600.0, load_ttl_s=600.0, lease_ttl_s=600.0)
"""What is written without heartbeats: it must not lapse on a busy machine."""
PATIENT_LOOKUPS = LookupTiming(wait_s=10.0)


class StateServer(Protocol):
    """Where a test's state lives: one server, or a cluster."""

    @property
    def url(self) -> str: ...

    @property
    def settings(self) -> RedisSettings: ...

    async def command(self, *arguments: str | bytes | float) -> Any: ...

    async def flush(self) -> None: ...

    async def keys_without_ttl(self) -> list[bytes]: ...


class Backend(Protocol):
    """A store under test."""

    writer: ReplicaWriter

    async def reader(self, router: str) -> FleetReader: ...

    async def overlap(
        self, reader: FleetReader, chain: Sequence[BlockId]
    ) -> Mapping[ReplicaId, Overlap]:
        """Return what ``reader`` answers for ``chain``, asked the way a router asks it."""
        ...

    def facts(self, reader: FleetReader) -> Mapping[ReplicaId, ReplicaFacts]:
        """Return what ``reader`` knows of the sidecars' facts."""
        ...

    async def lapse(self, replica: ReplicaId) -> None:
        """Let the heartbeats of ``replica`` lapse now."""
        ...


class MemoryBackend:
    def __init__(self) -> None:
        self.state = MemoryState(time.monotonic, LASTING)
        self.writer: ReplicaWriter = self.state

    async def reader(self, router: str) -> FleetReader:
        return self.state.reader(RouterId(router))

    async def overlap(
        self, reader: FleetReader, chain: Sequence[BlockId]
    ) -> Mapping[ReplicaId, Overlap]:
        return reader.overlap(chain)

    def facts(self, reader: FleetReader) -> Mapping[ReplicaId, ReplicaFacts]:
        assert isinstance(reader, MemoryReader)
        return reader.facts()

    async def lapse(self, replica: ReplicaId) -> None:
        if replica in self.state._entries:
            self.state._entries[replica].expires_s = 0.0
            self.state._entries[replica].load_expires_s = 0.0


class RedisBackend:
    """``lookup`` says which reader of the server is under test."""

    def __init__(self, server: StateServer, stack: AsyncExitStack, lookup: str = "mirror") -> None:
        self._server = server
        self._stack = stack
        self._lookup = lookup
        self.client = command_client(server.settings)
        stack.push_async_callback(self.client.aclose)
        self.writer: ReplicaWriter = self.open_writer()

    def open_writer(
        self, stream_cap_entries: int = 1024, timing: StoreTiming = LASTING
    ) -> RedisWriter:
        return RedisWriter(
            self.client,
            clock=time.monotonic,
            rng=Random(1),
            timing=timing,
            stream_cap_entries=stream_cap_entries,
        )

    async def reader(self, router: str) -> Mirror | DirectReader:
        if self._lookup == "direct":
            return await self.direct(router)
        return await self.mirror(router)

    async def mirror(
        self,
        router: str = "r1",
        timing: MirrorTiming = FAST_ROUNDS,
        store_timing: StoreTiming = LASTING,
    ) -> Mirror:
        mirror = self._mirror(router, timing, store_timing, has_index=True)
        return await self._stack.enter_async_context(mirror)

    async def direct(
        self,
        router: str = "r1",
        timing: MirrorTiming = FAST_ROUNDS,
        lookup_timing: LookupTiming = PATIENT_LOOKUPS,
        settings: RedisSettings | None = None,
    ) -> DirectReader:
        reader = DirectReader(
            self._mirror(router, timing, LASTING, has_index=False),
            settings or self._server.settings,
            clock=time.monotonic,
            rng=Random(4),
            timing=lookup_timing,
        )
        return await self._stack.enter_async_context(reader)

    def _mirror(
        self, router: str, timing: MirrorTiming, store_timing: StoreTiming, *, has_index: bool
    ) -> Mirror:
        return Mirror(
            self._server.settings,
            RouterId(router),
            clock=time.monotonic,
            rng=Random(2),
            timing=timing,
            store_timing=store_timing,
            has_index=has_index,
        )

    async def overlap(
        self, reader: FleetReader, chain: Sequence[BlockId]
    ) -> Mapping[ReplicaId, Overlap]:
        if isinstance(reader, DirectReader):
            question = Question(
                namespace=NAMESPACE, chain=tuple(chain), replicas=tuple(reader.replicas())
            )
            assert await reader.prepare([question])
        return reader.overlap(chain)

    def facts(self, reader: FleetReader) -> Mapping[ReplicaId, ReplicaFacts]:
        assert isinstance(reader, Mirror | DirectReader)
        return reader.facts()

    async def lapse(self, replica: ReplicaId) -> None:
        keys = ReplicaKeys(replica)
        await run_command(self.client, "DEL", keys.record, keys.load)
        await run_command(self.client, "ZADD", REPLICA_INDEX, "XX", "INCR", -5000, replica)
