"""Shared state within one process: the reference that other backends are compared with.

``MemoryState`` is the store; it is a ``ReplicaWriter``, and ``reader`` opens one router's view.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from state.lease import sum_leases
from state.model import Fence, LeaseTotals, ReplicaState, Rung
from state.residency import Residency
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from state.model import (
        BlockId,
        ChangeBatch,
        Generation,
        NamespaceId,
        Overlap,
        ReplicaFacts,
        ReplicaId,
        ReplicaLoad,
        ReplicaRecord,
        RouterId,
        Tier,
    )


@dataclass(slots=True)
class _Entry:
    record: ReplicaRecord
    expires_s: float
    load: ReplicaLoad | None = None
    load_expires_s: float = 0.0
    facts: ReplicaFacts | None = None
    facts_expire_s: float = 0.0


class MemoryState:
    """The store and its writer. Times to live follow the injected clock."""

    def __init__(
        self,
        clock: Callable[[], float],
        timing: StoreTiming = StoreTiming(),  # noqa: B008 - a frozen value
    ) -> None:
        self._clock = clock
        self._timing = timing
        self._entries: dict[ReplicaId, _Entry] = {}
        self._generations: dict[ReplicaId, tuple[Generation, float]] = {}
        self._residency = Residency()
        self._leases: dict[RouterId, Mapping[ReplicaId, LeaseTotals]] = {}

    def reader(self, router: RouterId) -> MemoryReader:
        """Return the view of one router; close it when the router stops."""
        return MemoryReader(self, router)

    async def register(self, record: ReplicaRecord) -> None:
        """Make ``record`` the replica's entry; a new generation starts with nothing resident."""
        known = self._entries.get(record.replica)
        entry = _Entry(record, self._clock() + self._timing.record_ttl_s)
        if self._current_generation(record.replica) != record.generation:
            self._residency.drop(record.replica)
        elif known is not None:
            entry.load, entry.load_expires_s = known.load, known.load_expires_s
            entry.facts, entry.facts_expire_s = known.facts, known.facts_expire_s
        self._entries[record.replica] = entry
        self._hold_generation(record)

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        """Keep the replica and its residency alive and publish ``load``, if still ours."""
        entry = self._live_entry(record.replica)
        if entry is None:
            return Fence.UNKNOWN
        holder = (entry.record.generation, entry.record.sidecar)
        if holder != (record.generation, record.sidecar):
            return Fence.FENCED
        now_s = self._clock()
        entry.record = record
        entry.expires_s = now_s + self._timing.record_ttl_s
        if load is not None:
            entry.load, entry.load_expires_s = load, now_s + self._timing.load_ttl_s
        if facts is not None:
            entry.facts, entry.facts_expire_s = facts, now_s + self._timing.facts_ttl_s
        self._hold_generation(record)
        return Fence.HELD

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        """Store residency changes, in order; those of a dead generation have no effect."""
        for batch in changes:
            if self._current_generation(batch.replica) != batch.generation:
                continue
            if batch.is_clear:
                self._residency.drop(batch.replica)
            self._residency.remove(batch.replica, batch.tier, batch.removed)
            self._residency.store(batch.replica, batch.tier, batch.stored)

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        """Remove the replica and all that is known of it, if the generation is still current."""
        if self._current_generation(replica) == generation:
            self._entries.pop(replica, None)
            self._generations.pop(replica, None)
            self._residency.drop(replica)

    async def copy(self, changes: Sequence[ChangeBatch]) -> None:
        """Do nothing: what is in memory does not expire block by block."""

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        """Return whether the replica still is of this generation and holds so many blocks."""
        held = self._residency.resident(replica)
        is_current = self._current_generation(replica) == generation
        return is_current and held == sum(copied_blocks.values())

    def live(self) -> dict[ReplicaId, ReplicaState]:
        """Return the registered replicas whose heartbeats have not lapsed."""
        now_s = self._clock()
        states = {}
        for replica in self._entries:
            entry = self._live_entry(replica)
            if entry is not None:
                load = entry.load if now_s < entry.load_expires_s else None
                states[replica] = ReplicaState(record=entry.record, load=load)
        return states

    def facts(self) -> dict[ReplicaId, ReplicaFacts]:
        """Return what sidecars told of the live replicas."""
        now_s = self._clock()
        entries = {replica: self._live_entry(replica) for replica in self._entries}
        return {
            replica: entry.facts
            for replica, entry in entries.items()
            if entry and entry.facts and now_s < entry.facts_expire_s
        }

    def overlap(self, chain: Sequence[BlockId]) -> dict[ReplicaId, Overlap]:
        """Return the leading resident runs of ``chain`` on live replicas."""
        found = self._residency.overlap(chain)
        return {
            replica: overlap
            for replica, overlap in found.items()
            if self._live_entry(replica) and self._current_generation(replica)
        }

    def gpu_blocks(self, replica: ReplicaId) -> int:
        """Return how many blocks ``replica`` holds in GPU memory, if it lives."""
        return self._residency.gpu_blocks(replica) if self._live_entry(replica) else 0

    def set_leases(self, router: RouterId, totals: Mapping[ReplicaId, LeaseTotals] | None) -> None:
        """Replace what ``router`` has in flight; None takes the router off."""
        if totals is None:
            self._leases.pop(router, None)
        else:
            self._leases[router] = dict(totals)

    def leases_besides(self, router: RouterId) -> dict[ReplicaId, LeaseTotals]:
        """Return what all routers but ``router`` have in flight, summed per replica."""
        return sum_leases(totals for other, totals in self._leases.items() if other != router)

    def _hold_generation(self, record: ReplicaRecord) -> None:
        until_s = self._clock() + self._timing.residency_ttl_s
        self._generations[record.replica] = (record.generation, until_s)

    def _current_generation(self, replica: ReplicaId) -> Generation | None:
        generation, until_s = self._generations.get(replica, (None, 0.0))
        return generation if self._clock() < until_s else None

    def _live_entry(self, replica: ReplicaId) -> _Entry | None:
        entry = self._entries.get(replica)
        return entry if entry is not None and self._clock() < entry.expires_s else None


class MemoryReader:
    """One router's ``FleetReader``: always live, never behind."""

    def __init__(self, state: MemoryState, router: RouterId) -> None:
        self._state = state
        self._router = router

    def replicas(self) -> Mapping[ReplicaId, ReplicaState]:
        """Return the registered replicas; the mapping is a snapshot and does not change."""
        return MappingProxyType(self._state.live())

    def facts(self) -> Mapping[ReplicaId, ReplicaFacts]:
        """Return what the sidecars detected of their engines."""
        return MappingProxyType(self._state.facts())

    def overlap(self, chain: Sequence[BlockId]) -> Mapping[ReplicaId, Overlap]:
        """Return the leading resident run of ``chain`` per replica; absent means none."""
        return self._state.overlap(chain)

    def gpu_blocks(self, replica: ReplicaId) -> int | None:
        """Return how many blocks ``replica`` holds in GPU memory."""
        return self._state.gpu_blocks(replica)

    def publish_leases(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        """Set this router's own leases."""
        self._state.set_leases(self._router, totals)

    def foreign_leases(self) -> Mapping[ReplicaId, LeaseTotals]:
        """Return the leases of all other live routers, summed per replica."""
        return self._state.leases_besides(self._router)

    def freshness(self) -> tuple[Rung, float]:
        """Return LIVE and no age: there is nothing in between."""
        return Rung.LIVE, 0.0

    async def settle(self, timeout_s: float) -> bool:
        """Return True: every change is visible once it is stored."""
        return timeout_s >= 0

    def close(self) -> None:
        """Take the router's leases off."""
        self._state.set_leases(self._router, None)
