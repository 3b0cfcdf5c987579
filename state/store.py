"""The two seams of shared state: what a sidecar writes and what a router reads.

Every backend passes ``tests/contract``. Errors of a backend are ``StateError``; a reader never
raises one: it answers from what it knows and says how good that is (``Rung``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from state.model import BlockId, NamespaceId, ReplicaId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from state.model import (
        ChangeBatch,
        Fence,
        Generation,
        LeaseTotals,
        Overlap,
        ReplicaFacts,
        ReplicaLoad,
        ReplicaRecord,
        ReplicaState,
        Rung,
        Tier,
    )


class StateError(Exception):
    """The state backend failed or did not answer in time; never reaches a client."""


class ReplicaWriter(Protocol):
    """What a sidecar tells about its replica. Every method raises StateError when not stored."""

    async def register(self, record: ReplicaRecord) -> None:
        """Make ``record`` the replica's entry; a new generation starts with nothing resident."""
        ...

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        """Keep the replica and its residency alive and publish ``load``, if still ours.

        Also stores a changed ``is_draining``, and ``facts`` unless there are none to tell. FENCED
        when another sidecar registered the replica.
        """
        ...

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        """Store residency changes, in order; those of a dead generation have no effect."""
        ...

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        """Remove the replica and all that is known of it, if the generation is still current."""
        ...

    async def copy(self, changes: Sequence[ChangeBatch]) -> None:
        """Store all resident blocks once more, unseen by readers until ``swap``.

        The first batch of each namespace and tier has ``is_clear``.
        """
        ...

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        """Let the copies, of so many blocks each, take the place of the same blocks stored before.

        They live as long as if they were announced now. False when the store lost part of one.
        """
        ...


class FleetReader(Protocol):
    """What a router knows of the fleet. All but ``settle`` are synchronous and do no I/O."""

    def replicas(self) -> Mapping[ReplicaId, ReplicaState]:
        """Return the registered replicas; the mapping is a snapshot and does not change."""
        ...

    def overlap(self, chain: Sequence[BlockId]) -> Mapping[ReplicaId, Overlap]:
        """Return the leading resident run of ``chain`` per replica; absent means none."""
        ...

    def gpu_blocks(self, replica: ReplicaId) -> int | None:
        """Return how many blocks ``replica`` holds in GPU memory; None without an index."""
        ...

    def publish_leases(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        """Set this router's own leases; they reach the other routers in the background."""
        ...

    def foreign_leases(self) -> Mapping[ReplicaId, LeaseTotals]:
        """Return the leases of all other live routers, summed per replica."""
        ...

    def freshness(self) -> tuple[Rung, float]:
        """Return the rung and the age of the view in seconds."""
        ...

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every change stored before the call is visible; False when it is not."""
        ...


class Question(Struct, frozen=True, kw_only=True):
    """One chain of a request and the replicas on which its blocks may be resident.

    ``namespace`` is that of the identity from which the chain starts.
    """

    namespace: NamespaceId
    chain: tuple[BlockId, ...]
    replicas: tuple[ReplicaId, ...]


class Lookup(Protocol):
    """What a reader has besides that keeps no index but asks the store for each request."""

    async def prepare(self, questions: Sequence[Question]) -> bool:
        """Let ``overlap`` answer for these chains until the next call; waits a few ms at most.

        False when the store did not answer in time: then ``overlap`` knows of nothing. Whoever
        calls must read the overlaps before it awaits anything.
        """
        ...
