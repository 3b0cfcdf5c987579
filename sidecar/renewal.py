"""Writes a replica's residency once more before the store's cap on its life is reached.

Keys of blocks live until a cap, however often heartbeats extend them. Well before it, all blocks
are copied beside what is there and swapped in. Nobody sees a copy, so one that fails harms nobody:
it is tried again in the same generation.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from state.model import ChangeBatch
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from random import Random

    from state.model import BlockId, NamespaceId, ReplicaRecord, Tier
    from state.store import ReplicaWriter

    Resident = Mapping[tuple[NamespaceId, Tier], tuple[BlockId, ...]]

COPY_BLOCKS: Final = 4_000
_DUE_FRACTIONS: Final = (0.75, 0.9)
"""When it is time, of the cap: not at the same time for all replicas."""
_RETRY_FRACTIONS: Final = (0.005, 0.01)
_LOG = logging.getLogger("warmroute.sidecar")


class Renewal:
    """When one announcement is to be renewed, and how."""

    def __init__(
        self, writer: ReplicaWriter, clock: Callable[[], float], rng: Random, cap_s: float
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._rng = rng
        self._cap_s = cap_s
        self.due_s = float("inf")

    def plan(self) -> None:
        """Note that everything was announced just now."""
        self._plan(_DUE_FRACTIONS)

    async def renew(
        self, record: ReplicaRecord, resident: Resident, may_go_on: Callable[[], Awaitable[bool]]
    ) -> None:
        """Copy ``resident`` and swap it in; nothing may change in the store meanwhile.

        ``may_go_on`` is asked between writes; what it raises ends the renewal.
        """
        self._plan(_RETRY_FRACTIONS)
        for batch in _copies(record, resident):
            if not await self._copy(batch) or not await may_go_on():
                return
        counts = {key: len(blocks) for key, blocks in resident.items()}
        try:
            is_whole = await self._writer.swap(record.replica, record.generation, counts)
        except StateError as error:
            _LOG.warning("renewal failed, retrying later: %s", error)
            return
        if not is_whole:
            _LOG.warning("renewal lost blocks, retrying later: replica=%s", record.replica)
            return
        self.plan()
        _LOG.info("residency renewed: replica=%s blocks=%d", record.replica, sum(counts.values()))

    async def _copy(self, batch: ChangeBatch) -> bool:
        try:
            await self._writer.copy([batch])
        except StateError as error:
            _LOG.warning("renewal failed, retrying later: %s", error)
            return False
        return True

    def _plan(self, fractions: tuple[float, float]) -> None:
        self.due_s = self._clock() + self._cap_s * self._rng.uniform(*fractions)


def _copies(record: ReplicaRecord, resident: Resident) -> Iterator[ChangeBatch]:
    for (namespace, tier), blocks in resident.items():
        for start in range(0, len(blocks), COPY_BLOCKS):
            yield ChangeBatch(
                replica=record.replica,
                generation=record.generation,
                namespace=namespace,
                sequence=0,
                tier=tier,
                stored=blocks[start : start + COPY_BLOCKS],
                is_clear=start == 0,
            )
