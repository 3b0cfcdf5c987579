"""Which replica holds which prefix block: an in-process index from block to replicas.

Per tier, one table (``block_table``) maps a block id to an int whose bits are the *slots* of the
replicas that hold it. The leading resident run of a chain on every replica then is one walk: AND
the ints along the chain; where a bit falls, that replica's run ends, also when it holds later
blocks again.

A slot belongs to one life of a replica's cache. Dropping a replica only retires its slot, in O(1):
the walk starts from the bits of live slots, so retired bits never count. What a retired slot left
behind is swept in small portions by later changes, from the journal of what it held (``holding``)
and not by a search through the index; the slot is given out again once nothing of it is left.

With ``max_bytes`` the index is bounded: beyond it blocks are evicted, from whoever holds most, its
oldest first. An evicted block is one that is no longer known: runs get shorter, never longer. What
chains asked for lately is passed over once (second chance): a chain that is asked for marks all of
its blocks, so a block seldom goes before its descendants. Marks are made when something must go,
from the last chains asked; a request pays one append for that, and only near the bound.
"""

from __future__ import annotations

from collections import deque
from functools import reduce
from itertools import compress
from operator import or_
from typing import TYPE_CHECKING, Final, TypeVar

from state.block_table import ASKED, DictTable
from state.holding import PORTION_BLOCKS, Holding
from state.model import Overlap, ReplicaId, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from state.block_table import BlockTable
    from state.model import BlockId

HOLDER_BYTES: Final = 24
"""Further memory per replica that holds it: 16 in the journal, and what is noted as gone."""
MIN_BYTES: Final = 1 << 20
_ASKED_CHAINS: Final = 64
_SPARING_PORTIONS: Final = 8
"""In one change; after that many the rest goes unasked, so that no change takes long."""
_CHECK_BLOCKS: Final = 512
"""So many new blocks may come before the bound is looked at; it is kept that much below."""
_SWEEP_PER_CHANGE: Final = 2
_SWEEP_FLOOR_BLOCKS: Final = 64
_Value = TypeVar("_Value")


class Residency:
    """Block -> bitmap of replicas, per tier. Synchronous; a replica is known once it stores."""

    __slots__ = (
        "_asked",
        "_free_bits",
        "_is_tight",
        "_live_mask",
        "_names",
        "_next_bit",
        "_retired",
        "_slots",
        "_tables",
        "_unchecked_blocks",
        "entry_bytes",
        "evicted_blocks",
        "max_bytes",
    )

    def __init__(
        self, max_bytes: int | None = None, make_table: Callable[[], BlockTable] = DictTable
    ) -> None:
        self._tables = {tier: make_table() for tier in Tier}
        self.entry_bytes = self._tables[Tier.GPU].entry_bytes
        """Process memory per distinct block of a tier, see ``BlockTable``."""
        self._slots: dict[ReplicaId, tuple[int, dict[Tier, Holding]]] = {}
        self._retired: list[tuple[int, dict[Tier, Holding]]] = []
        self._free_bits: list[int] = []
        self._names: dict[int, ReplicaId] = {}
        self._next_bit = ASKED << 1
        self._live_mask = 0
        self.max_bytes = max_bytes
        """The bound; None for none. Less than ``MIN_BYTES`` is taken for that."""
        self._asked: deque[Sequence[BlockId]] = deque(maxlen=_ASKED_CHAINS)
        self._is_tight = False
        self._unchecked_blocks = 0
        self.evicted_blocks = 0
        """Blocks, counted once per holder, that went to stay within the bound."""

    def store(self, replica: ReplicaId, tier: Tier, blocks: Sequence[BlockId]) -> None:
        """Note that ``replica`` holds ``blocks`` in ``tier``; known ones change nothing."""
        if not blocks:
            return
        holding = self._holding(replica, tier)
        fresh = self._tables[tier].add(blocks, holding.bit)
        holding.add(fresh)
        self._sweep_for(len(blocks))
        self._unchecked_blocks += len(fresh)
        if self.max_bytes is not None and self._unchecked_blocks >= _CHECK_BLOCKS:
            self._unchecked_blocks = 0
            self._keep_within(max(self.max_bytes, MIN_BYTES))

    def remove(self, replica: ReplicaId, tier: Tier, blocks: Sequence[BlockId]) -> None:
        """Note that ``replica`` lost ``blocks`` from ``tier``; unknown ones change nothing."""
        _, holdings = self._slots.get(replica, (0, {}))
        holding = holdings.get(tier)
        if holding is None:
            return
        holding.remove(self._tables[tier].discard(blocks, holding.bit))
        self._sweep_for(len(blocks))

    def drop(self, replica: ReplicaId) -> None:
        """Forget everything that ``replica`` holds, at once and in constant time."""
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        bit, _ = slot
        self._live_mask &= ~bit
        del self._names[bit]
        self._retired.append(slot)

    def overlap(self, chain: Sequence[BlockId]) -> dict[ReplicaId, Overlap]:
        """Return the leading resident run of ``chain`` per replica, where it is not empty."""
        if not self._live_mask:
            return {}
        if self._is_tight and len(chain) > 1:
            self._asked.append(chain)
        gpu = self._tables[Tier.GPU]
        lower = [table for table in self._tables.values() if table is not gpu and len(table)]
        gpu_runs = self._runs(chain, [gpu])
        if not lower:
            return self._named([(bits, Overlap(run, run)) for run, bits in gpu_runs])
        gpu_blocks = self._named([(bits, run) for run, bits in gpu_runs])
        any_tier = self._named([(bits, run) for run, bits in self._runs(chain, [gpu, *lower])])
        return {
            replica: Overlap(gpu_blocks=gpu_blocks.get(replica, 0), any_tier_blocks=run)
            for replica, run in any_tier.items()
        }

    def resident(self, replica: ReplicaId) -> int:
        """Return how many blocks ``replica`` holds, over all tiers (a block in two counts 2)."""
        _, holdings = self._slots.get(replica, (0, {}))
        return sum(holding.blocks for holding in holdings.values())

    def gpu_blocks(self, replica: ReplicaId) -> int:
        """Return how many blocks ``replica`` holds in GPU memory."""
        _, holdings = self._slots.get(replica, (0, {}))
        holding = holdings.get(Tier.GPU)
        return holding.blocks if holding is not None else 0

    def blocks(self, replica: ReplicaId, tier: Tier) -> frozenset[BlockId]:
        """Return a copy of what ``replica`` holds in ``tier``."""
        _, holdings = self._slots.get(replica, (0, {}))
        return frozenset(holdings.get(tier, ()))

    @property
    def indexed_blocks(self) -> int:
        """Entries of the index over all tiers, not yet swept ones included."""
        return sum(map(len, self._tables.values()))

    @property
    def retired_blocks(self) -> int:
        """Blocks of dropped replicas that wait to be swept."""
        return sum(held.blocks for _, holdings in self._retired for held in holdings.values())

    @property
    def memory_bytes(self) -> int:
        """Estimated process memory of the index and its journals; never above ``max_bytes``."""
        journal_blocks = sum(held.journal_blocks for held in self._all_holdings())
        return self.indexed_blocks * self.entry_bytes + journal_blocks * HOLDER_BYTES

    def sweep(self, limit_blocks: int) -> None:
        """Clean up at most ``limit_blocks`` that dropped replicas left behind."""
        while self._retired and limit_blocks > 0:
            bit, holdings = self._retired[-1]
            for tier in list(holdings):
                holding = holdings[tier]
                before = holding.journal_blocks
                self._tables[tier].discard(holding.take(limit_blocks), bit)
                limit_blocks -= before - holding.journal_blocks
                if not holding.journal_blocks:
                    del holdings[tier]
            if not holdings:
                self._retired.pop()
                self._free_bits.append(bit)

    def _holding(self, replica: ReplicaId, tier: Tier) -> Holding:
        bit, holdings = self._slots.get(replica) or self._open(replica)
        holding = holdings.get(tier)
        if holding is None:
            holding = holdings[tier] = Holding(bit, tier)
        return holding

    def _open(self, replica: ReplicaId) -> tuple[int, dict[Tier, Holding]]:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        slot = self._slots[replica] = (bit, {})
        self._live_mask |= bit
        self._names[bit] = replica
        return slot

    def _all_holdings(self) -> Iterator[Holding]:
        for _, holdings in (*self._slots.values(), *self._retired):
            yield from holdings.values()

    def _sweep_for(self, changed_blocks: int) -> None:
        if self._retired:
            self.sweep(_SWEEP_FLOOR_BLOCKS + _SWEEP_PER_CHANGE * changed_blocks)

    def _keep_within(self, max_bytes: int) -> None:
        """Evict until the bound holds; what dropped replicas left goes first."""
        limit_bytes = max_bytes - _CHECK_BLOCKS * (self.entry_bytes + HOLDER_BYTES)
        held_bytes = self.memory_bytes
        self._is_tight = held_bytes > limit_bytes - limit_bytes // 4
        portions = 0
        while held_bytes > limit_bytes:
            if self._retired:
                self.sweep(PORTION_BLOCKS)
            else:
                self._mark_asked()
                largest = max(self._all_holdings(), key=lambda held: held.journal_blocks)
                self._evict_from(largest, is_sparing=portions < _SPARING_PORTIONS)
                portions += 1
            held_bytes = self.memory_bytes

    def _evict_from(self, holding: Holding, *, is_sparing: bool) -> None:
        """Evict the oldest portion; what was asked for gets a second life where ``is_sparing``."""
        victims = holding.take(PORTION_BLOCKS)
        if is_sparing:
            table = self._tables[holding.tier]
            is_asked = [mask & ASKED for mask in table.masks(victims)]
            asked = list(compress(victims, is_asked))
            if asked:
                victims = [one for one, spared in zip(victims, is_asked, strict=True) if not spared]
                table.discard(asked, ASKED)
                holding.add(asked)
        self._tables[holding.tier].discard(victims, holding.bit)
        self.evicted_blocks += len(victims)

    def _mark_asked(self) -> None:
        """Mark the known leading blocks of the chains that were asked for lately."""
        while self._asked:
            chain = self._asked.pop()
            for table in self._tables.values():
                known = 0
                for depth, mask in table.walk(chain, until_unknown=True) if len(table) else ():
                    if mask:
                        known = depth
                if known:
                    table.add(chain[:known], ASKED)

    def _runs(
        self, chain: Sequence[BlockId], tables: Collection[BlockTable]
    ) -> list[tuple[int, int]]:
        """Return after how many blocks that any of ``tables`` has which bits end; none at once."""
        alive = self._live_mask
        is_one = len(tables) == 1
        walks = [table.walk(chain, until_unknown=is_one) for table in tables]
        ended: list[tuple[int, int]] = []
        run = 0
        for depth, held in walks[0] if is_one else _merged(walks):
            still = held & alive
            if still != alive:
                if run:
                    ended.append((run, alive ^ still))
                alive = still
                if not alive:
                    break
            run = depth
        else:
            if run:
                ended.append((run, alive))
        return ended

    def _named(self, values: Iterable[tuple[int, _Value]]) -> dict[ReplicaId, _Value]:
        """Return the value of each replica, given those of sets of bits."""
        names = self._names
        named: dict[ReplicaId, _Value] = {}
        for bits, value in values:
            rest = 0 if bits in names else bits
            if not rest:
                named[names[bits]] = value
            while rest:
                bit = rest & -rest
                named[names[bit]] = value
                rest ^= bit
        return named


def _merged(walks: Sequence[Iterator[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """Yield up to which depth who holds the blocks in any tier; all walks end at one depth."""
    pieces = [piece for walk in walks if (piece := next(walk, None))]
    while pieces:
        depth = min(end for end, _ in pieces)
        yield depth, reduce(or_, (mask for _, mask in pieces))
        pieces = [
            piece
            for walk, here in zip(walks, pieces, strict=True)
            if (piece := next(walk, None) if here[0] == depth else here)
        ]
