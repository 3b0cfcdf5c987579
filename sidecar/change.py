"""Which blocks are resident, and what changed since a mark: the output side of folding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from state.model import BlockId, NamespaceId, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping


class BlockChange(Struct, frozen=True, kw_only=True):
    """Net residency changes in one namespace and tier; no block is in both tuples."""

    namespace: NamespaceId
    tier: Tier
    stored: tuple[BlockId, ...] = ()
    removed: tuple[BlockId, ...] = ()


class Fold(Struct, frozen=True, kw_only=True):
    """What a run of events did: first everything is gone if ``is_clear``, then the changes."""

    is_clear: bool = False
    changes: tuple[BlockChange, ...] = ()


@dataclass(slots=True)
class FoldCounts:
    """What a folder did, could not use or had to correct, since it was made."""

    unknown_tier_events: int = 0
    other_group_events: int = 0
    short_pages: int = 0
    unknown_pages: int = 0
    ambiguous_events: int = 0
    opaque_pages: int = 0
    reports: int = 0
    overflows: int = 0
    stored_pages: int = 0
    removed_pages: int = 0
    returned_pages: int = 0


class ResidentBlocks:
    """Counts how many page runs make each block resident; usually one.

    Two runs share a block id when an engine holds the same tokens under two handles.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[NamespaceId, Tier], dict[BlockId, int]] = {}
        self._was_resident: dict[tuple[NamespaceId, Tier], dict[BlockId, bool]] = {}
        self._is_clear = False

    def mark(self) -> None:
        """Start a span; ``net`` tells what changed in it."""
        self._was_resident = {}
        self._is_clear = False

    def add(self, namespace: NamespaceId, tier: Tier, block: BlockId) -> None:
        """Count one more run of ``block``."""
        runs = self._runs.setdefault((namespace, tier), {})
        self._note(namespace, tier, block, is_resident=block in runs)
        runs[block] = runs.get(block, 0) + 1

    def discard(self, namespace: NamespaceId, tier: Tier, block: BlockId) -> None:
        """Count one run of ``block`` less; it was added before."""
        runs = self._runs[namespace, tier]
        self._note(namespace, tier, block, is_resident=True)
        runs[block] -= 1
        if runs[block]:
            return
        del runs[block]
        if not runs:
            del self._runs[namespace, tier]

    def clear(self) -> None:
        """Forget all blocks; what the span did before does not matter any more."""
        self._runs.clear()
        self._was_resident = {}
        self._is_clear = True

    def blocks(self) -> Mapping[tuple[NamespaceId, Tier], set[BlockId]]:
        """Return a copy of all resident blocks."""
        return {key: set(runs) for key, runs in self._runs.items()}

    def net(self) -> Fold:
        """Return what changed since ``mark``."""
        changes = []
        for (namespace, tier), was_resident in self._was_resident.items():
            now = self._runs.get((namespace, tier), {})
            stored = tuple(b for b, was in was_resident.items() if not was and b in now)
            removed = tuple(b for b, was in was_resident.items() if was and b not in now)
            if stored or removed:
                changes.append(
                    BlockChange(namespace=namespace, tier=tier, stored=stored, removed=removed)
                )
        return Fold(is_clear=self._is_clear, changes=tuple(changes))

    def _note(
        self, namespace: NamespaceId, tier: Tier, block: BlockId, *, is_resident: bool
    ) -> None:
        self._was_resident.setdefault((namespace, tier), {}).setdefault(block, is_resident)
