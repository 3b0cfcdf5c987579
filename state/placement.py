"""What this router itself has sent where, as residency that no engine has confirmed.

A request that was just assigned will leave its prompt in that replica's cache, but the engine says
so only after the prefill. Until then equal prompts must already find each other: a placement counts
for a short time to live. For replicas whose engines announce nothing, the same record with a long
time to live and the engine's capacity is all that is known of their caches.

Per replica the blocks are kept in the order of last use, the deepest block of a chain first. What
goes, by age or capacity, goes from that end, so that a block never outlives its ancestors, and the
leading run of a chain can be found by bisection instead of a walk.

Once an engine has told, its word counts: a placement that outlived it would hide an eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from state.model import BlockId, ReplicaId

PENDING_TTL_S: Final = 2.0
NEWS_S: Final = 0.5
"""How long after its first answer byte a prompt may still be without news from the engine."""
DEFAULT_CAPACITY_BLOCKS: Final = 65_536

_Entry = tuple[float, int, int]
"""Expiry in seconds, number of placements that have not been withdrawn, ordinal of the first."""


@dataclass(slots=True, eq=False)
class Placement:
    """One assignment. It stands unless it is withdrawn; confirming it rules that out."""

    replica: ReplicaId
    chain: tuple[BlockId, ...]
    ordinal: int
    is_open: bool = True


@dataclass(slots=True)
class _Held:
    ttl_s: float
    capacity_blocks: int
    blocks: OrderedDict[BlockId, _Entry] = field(default_factory=OrderedDict)


class Placements:
    """Recent assignments per replica. Clock values are passed in; memory is bounded."""

    __slots__ = ("_awaited", "_capacity_blocks", "_held", "_ordinal", "_ttl_s")

    def __init__(
        self, ttl_s: float = PENDING_TTL_S, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS
    ) -> None:
        self._ttl_s = ttl_s
        self._capacity_blocks = capacity_blocks
        self._held: dict[ReplicaId, _Held] = {}
        self._ordinal = 0
        self._awaited: list[tuple[float, Placement]] = []

    def limit(self, replica: ReplicaId, ttl_s: float, capacity_blocks: int) -> None:
        """Give ``replica`` its own time to live and capacity; a shorter life starts afresh."""
        held = self._of(replica)
        if ttl_s < held.ttl_s:
            held.blocks.clear()
        held.ttl_s = ttl_s
        held.capacity_blocks = capacity_blocks

    def place(self, replica: ReplicaId, chain: Sequence[BlockId], now_s: float) -> Placement:
        """Note that a prompt with ``chain`` goes to ``replica``."""
        self._ordinal += 1
        held = self._of(replica)
        placed = tuple(chain[: held.capacity_blocks])
        placement = Placement(replica, placed, self._ordinal)
        blocks = held.blocks
        self._expire(held, now_s)
        expiry_s = now_s + held.ttl_s
        fresh = (expiry_s, 1, self._ordinal)
        # Neighbours mostly came with the same placement: they share one entry, old and new.
        last, renewed = fresh, fresh
        for block in reversed(placed):
            entry = blocks.get(block)
            if entry is None:
                blocks[block] = fresh
                continue
            if entry is not last:
                last, renewed = entry, (expiry_s, entry[1] + 1, entry[2])
            blocks[block] = renewed
            blocks.move_to_end(block)
        while len(blocks) > held.capacity_blocks:
            blocks.popitem(last=False)
        return placement

    def overlap(self, chain: Sequence[BlockId], now_s: float) -> dict[ReplicaId, int]:
        """Return the leading blocks of ``chain`` that were sent to each replica, where any."""
        runs = {}
        for replica, held in self._held.items():
            self._expire(held, now_s)
            run = _leading_run(held.blocks, chain)
            if run:
                runs[replica] = run
        return runs

    def resident(self, replica: ReplicaId) -> int:
        """Return the number of blocks on record for ``replica``."""
        held = self._held.get(replica)
        return len(held.blocks) if held else 0

    def confirm(self, placement: Placement) -> bool:
        """Note that the replica computed the prompt; False when the placement was closed."""
        was_open = placement.is_open
        placement.is_open = False
        return was_open

    def withdraw(self, placement: Placement) -> bool:
        """Undo an assignment that failed before any byte; False when it was closed.

        Blocks that other placements sent there too stay.
        """
        if not placement.is_open:
            return False
        placement.is_open = False
        self._take_back(placement)
        return True

    def await_news(self, placement: Placement, now_s: float) -> bool:
        """Let a computed prompt count until the engine tells of it; False when it was closed."""
        was_open = self.confirm(placement)
        if was_open and placement.chain:
            self._awaited.append((now_s + NEWS_S, placement))
        return was_open

    def settle(self, holds: Callable[[ReplicaId, BlockId], bool], now_s: float) -> None:
        """End every awaited placement whose last block ``holds`` shows, or whose time is up.

        From then on the engine's word counts alone: it will also tell of the eviction.
        """
        waiting = []
        for until_s, placement in self._awaited:
            if now_s >= until_s or holds(placement.replica, placement.chain[-1]):
                self._take_back(placement)
            else:
                waiting.append((until_s, placement))
        self._awaited = waiting

    def forget(self, replica: ReplicaId) -> None:
        """Drop all that was sent to ``replica``, and its limits: its cache is a new one."""
        self._held.pop(replica, None)

    def _take_back(self, placement: Placement) -> None:
        held = self._held.get(placement.replica)
        blocks = held.blocks if held else {}
        last: _Entry | None = None
        reduced: _Entry = (0.0, 0, 0)
        for block in placement.chain:
            entry = blocks.get(block)
            if entry is None or entry[2] > placement.ordinal:
                continue
            if entry[1] == 1:
                del blocks[block]
                continue
            if entry is not last:
                last, reduced = entry, (entry[0], entry[1] - 1, entry[2])
            blocks[block] = reduced

    def _of(self, replica: ReplicaId) -> _Held:
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = _Held(self._ttl_s, self._capacity_blocks)
        return held

    @staticmethod
    def _expire(held: _Held, now_s: float) -> None:
        blocks = held.blocks
        while blocks and next(iter(blocks.values()))[0] <= now_s:
            blocks.popitem(last=False)


def _leading_run(blocks: OrderedDict[BlockId, _Entry], chain: Sequence[BlockId]) -> int:
    """Return how many leading ids of ``chain`` are known: known ids are always a prefix."""
    if not chain or chain[0] not in blocks:
        return 0
    known, unknown = 1, len(chain) + 1
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if chain[middle - 1] in blocks:
            known = middle
        else:
            unknown = middle
    return known
