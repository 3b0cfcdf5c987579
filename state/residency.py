"""Which replica holds which prefix block: an in-process index from block to replicas.

Per tier, one dict maps a block id to an int whose bits are the *slots* of the replicas that hold
it. The leading resident run of a chain on every replica then is one walk: AND the ints along the
chain; where a bit falls, that replica's run ends, also when it holds later blocks again.

A slot belongs to one life of a replica's cache. Dropping a replica only retires its slot, in O(1):
the walk starts from the bits of live slots, so retired bits never count. What a retired slot left
behind is swept in small portions by later changes, from the slot's own set of blocks and not by a
search through the index; the slot is given out again once nothing of it is left. The sets cost
about a third more memory than bits alone, and buy exact counts and drops that stop nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from operator import or_
from typing import TYPE_CHECKING, Final

from state.model import Overlap, ReplicaId, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from state.model import BlockId

BLOCK_BYTES_ESTIMATE: Final = 160
"""Process memory per (block, replica): id, dict entry, bitmap and set entry."""
_SWEEP_PER_CHANGE: Final = 2
_SWEEP_FLOOR_BLOCKS: Final = 64


@dataclass(slots=True)
class _Slot:
    bit: int
    blocks: dict[Tier, set[BlockId]] = field(default_factory=dict)


class Residency:
    """Block -> bitmap of replicas, per tier. Synchronous; a replica is known once it stores."""

    __slots__ = (
        "_bitmaps",
        "_free_bits",
        "_live_mask",
        "_names",
        "_next_bit",
        "_retired",
        "_slots",
    )

    def __init__(self) -> None:
        self._bitmaps: dict[Tier, dict[BlockId, int]] = {tier: {} for tier in Tier}
        self._slots: dict[ReplicaId, _Slot] = {}
        self._retired: list[_Slot] = []
        self._free_bits: list[int] = []
        self._names: dict[int, ReplicaId] = {}
        self._next_bit = 1
        self._live_mask = 0

    def store(self, replica: ReplicaId, tier: Tier, blocks: Sequence[BlockId]) -> None:
        """Note that ``replica`` holds ``blocks`` in ``tier``; known ones change nothing."""
        if not blocks:
            return
        slot = self._slots.get(replica) or self._open(replica)
        bit = slot.bit
        bitmap = self._bitmaps[tier]
        get = bitmap.get
        old, new = 0, bit
        for block in blocks:
            known = get(block, 0)
            if known is not old:
                old, new = known, known | bit
            bitmap[block] = new  # one int object for a run of blocks with the same holders
        held = slot.blocks.get(tier)
        if held is None:
            held = slot.blocks[tier] = set()
        held.update(blocks)
        self._sweep_for(len(blocks))

    def remove(self, replica: ReplicaId, tier: Tier, blocks: Sequence[BlockId]) -> None:
        """Note that ``replica`` lost ``blocks`` from ``tier``; unknown ones change nothing."""
        slot = self._slots.get(replica)
        held = slot.blocks.get(tier) if slot else None
        if slot is None or not held:
            return
        lost = held.intersection(blocks)
        held -= lost
        self._clear_bit(tier, slot.bit, lost)
        self._sweep_for(len(blocks))

    def drop(self, replica: ReplicaId) -> None:
        """Forget everything that ``replica`` holds, at once and in constant time."""
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        self._live_mask &= ~slot.bit
        del self._names[slot.bit]
        self._retired.append(slot)

    def overlap(self, chain: Sequence[BlockId]) -> dict[ReplicaId, Overlap]:
        """Return the leading resident run of ``chain`` per replica, where it is not empty."""
        gpu = self._bitmaps[Tier.GPU]
        lower = [bitmap for tier, bitmap in self._bitmaps.items() if tier is not Tier.GPU]
        gpu_runs = self._runs(chain, [gpu])
        if not any(lower):
            return {
                replica: Overlap(gpu_blocks=run, any_tier_blocks=run)
                for replica, run in gpu_runs.items()
            }
        any_runs = self._runs(chain, [gpu, *lower])
        return {
            replica: Overlap(gpu_blocks=gpu_runs.get(replica, 0), any_tier_blocks=run)
            for replica, run in any_runs.items()
        }

    def resident(self, replica: ReplicaId) -> int:
        """Return how many blocks ``replica`` holds, over all tiers (a block in two counts 2)."""
        slot = self._slots.get(replica)
        return sum(map(len, slot.blocks.values())) if slot else 0

    def blocks(self, replica: ReplicaId, tier: Tier) -> frozenset[BlockId]:
        """Return a copy of what ``replica`` holds in ``tier``."""
        slot = self._slots.get(replica)
        return frozenset(slot.blocks.get(tier, ())) if slot else frozenset()

    @property
    def indexed_blocks(self) -> int:
        """Entries of the index over all tiers, not yet swept ones included."""
        return sum(map(len, self._bitmaps.values()))

    @property
    def retired_blocks(self) -> int:
        """Blocks of dropped replicas that wait to be swept."""
        return sum(len(held) for slot in self._retired for held in slot.blocks.values())

    def sweep(self, limit_blocks: int) -> None:
        """Clean up at most ``limit_blocks`` that dropped replicas left behind."""
        while self._retired and limit_blocks > 0:
            slot = self._retired[-1]
            for tier in list(slot.blocks):
                held = slot.blocks[tier]
                swept = [held.pop() for _ in range(min(limit_blocks, len(held)))]
                self._clear_bit(tier, slot.bit, swept)
                limit_blocks -= len(swept)
                if not held:
                    del slot.blocks[tier]
            if not slot.blocks:
                self._retired.pop()
                self._free_bits.append(slot.bit)

    def _open(self, replica: ReplicaId) -> _Slot:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        slot = self._slots[replica] = _Slot(bit)
        self._live_mask |= bit
        self._names[bit] = replica
        return slot

    def _clear_bit(self, tier: Tier, bit: int, blocks: Iterable[BlockId]) -> None:
        bitmap = self._bitmaps[tier]
        for block in blocks:
            rest = bitmap[block] & ~bit
            if rest:
                bitmap[block] = rest
            else:
                del bitmap[block]

    def _sweep_for(self, changed_blocks: int) -> None:
        if self._retired:
            self.sweep(_SWEEP_FLOOR_BLOCKS + _SWEEP_PER_CHANGE * changed_blocks)

    def _runs(
        self, chain: Sequence[BlockId], bitmaps: list[dict[BlockId, int]]
    ) -> dict[ReplicaId, int]:
        """Return the run per replica over blocks that any of ``bitmaps`` has."""
        alive = self._live_mask
        if not alive:
            return {}
        holders = map(bitmaps[0].get, chain, repeat(0))
        for bitmap in bitmaps[1:]:
            holders = map(or_, holders, map(bitmap.get, chain, repeat(0)))
        ended: list[tuple[int, int]] = []
        last = -1
        for depth, held in enumerate(holders):
            if held is last:  # most neighbours share one int object: see ``store``
                continue
            last = held
            still = held & alive
            if still == alive:
                continue
            if depth:
                ended.append((depth, alive ^ still))
            alive = still
            if not alive:
                break
        else:
            if chain:
                ended.append((len(chain), alive))
        return self._named(ended)

    def _named(self, ended: list[tuple[int, int]]) -> dict[ReplicaId, int]:
        """Return the run per replica, given which bits ended after which depth."""
        runs: dict[ReplicaId, int] = {}
        for run, ended_bits in ended:
            rest = ended_bits
            while rest:
                bit = rest & -rest
                runs[self._names[bit]] = run
                rest ^= bit
        return runs
