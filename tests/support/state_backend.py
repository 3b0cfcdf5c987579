"""The backends that the state contract runs on, each with a writer and readers of its own."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING, Protocol

from state.client import command_client, run_command
from state.memory import MemoryState
from state.mirror import Mirror
from state.model import RouterId
from state.redis_writer import RedisWriter
from state.schema import ReplicaKeys
from state.timing import MirrorTiming, StoreTiming

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from state.model import ReplicaId
    from state.store import FleetReader, ReplicaWriter
    from support.valkey import ValkeyProcess

FAST_ROUNDS = MirrorTiming(
    registry_interval_s=0.02,
    lease_interval_s=0.02,
    lease_heartbeat_s=0.1,
    block_s=0.02,
    backoff_base_s=0.02,
    backoff_cap_s=0.1,
)

STORE_TIMES = StoreTiming()


class Backend(Protocol):
    """A store under test."""

    writer: ReplicaWriter

    async def reader(self, router: str) -> FleetReader: ...

    async def lapse(self, replica: ReplicaId) -> None:
        """Let the heartbeats of ``replica`` lapse now."""
        ...


class MemoryBackend:
    def __init__(self) -> None:
        self.state = MemoryState(time.monotonic)
        self.writer: ReplicaWriter = self.state

    async def reader(self, router: str) -> FleetReader:
        return self.state.reader(RouterId(router))

    async def lapse(self, replica: ReplicaId) -> None:
        if replica in self.state._entries:
            self.state._entries[replica].expires_s = 0.0
            self.state._entries[replica].load_expires_s = 0.0


class RedisBackend:
    def __init__(self, server: ValkeyProcess, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack
        self.client = command_client(server.settings)
        stack.push_async_callback(self.client.aclose)
        self.writer: ReplicaWriter = self.open_writer()

    def open_writer(self, stream_cap_entries: int = 1024) -> RedisWriter:
        return RedisWriter(
            self.client,
            clock=time.monotonic,
            rng=Random(1),
            stream_cap_entries=stream_cap_entries,
        )

    async def reader(self, router: str) -> Mirror:
        return await self.mirror(router)

    async def mirror(
        self,
        router: str = "r1",
        timing: MirrorTiming = FAST_ROUNDS,
        store_timing: StoreTiming = STORE_TIMES,
    ) -> Mirror:
        mirror = Mirror(
            self._server.settings,
            RouterId(router),
            clock=time.monotonic,
            rng=Random(2),
            timing=timing,
            store_timing=store_timing,
        )
        return await self._stack.enter_async_context(mirror)

    async def lapse(self, replica: ReplicaId) -> None:
        keys = ReplicaKeys(replica)
        await run_command(self.client, "DEL", keys.record, keys.load)
