"""What this router itself has sent where, as residency that no engine has confirmed.

A request that was just assigned will leave its prompt in that replica's cache, but the engine says
so only after the prefill. Until then equal prompts must already find each other: a placement counts
for a short time to live. For replicas whose engines announce nothing, the same record with a long
time to live and the engine's capacity is all that is known of their caches.

A placement costs what is new in it. Per replica, each block belongs to the *run* of the placement
that brought it; a later placement of the same prefix only *holds* that run, up to a depth. What
nobody holds any more goes, deepest first, and a run whose blocks are gone lets go of the run that
it continued: a block never outlives its ancestors, and the leading run of a chain can be found by
bisection instead of a walk.

Once an engine has told, its word counts: a placement that outlived it would hide an eviction.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from state.model import TIP_BYTES, Tip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from state.model import BlockId, ReplicaId

PENDING_TTL_S: Final = 2.0
NEWS_S: Final = 0.5
"""How long after its first answer byte a prompt may still be without news from the engine."""
DEFAULT_CAPACITY_BLOCKS: Final = 65_536
BLOCK_BYTES: Final = 640
"""Process memory per block on record where each came alone; a sixth of it in long prompts."""


class _Run:
    """Blocks that came with one placement: depths ``start`` + 1 and on of their chain.

    ``holds`` counts who needs the run, by the depth up to which it is needed.
    """

    __slots__ = ("blocks", "holds", "parent", "start")

    def __init__(self, parent: _Run | None, start: int, blocks: list[BlockId]) -> None:
        self.parent = parent
        self.start = start
        self.blocks = blocks
        self.holds: dict[int, int] = {}
        if parent is not None:
            parent.hold(start)

    def hold(self, depth: int) -> None:
        """Count one more who needs the run up to ``depth``."""
        self.holds[depth] = self.holds.get(depth, 0) + 1


class Placement:
    """One assignment. It stands unless it is withdrawn; confirming it rules that out.

    ``tip`` is the last block of its chain, None for a chain without blocks.
    """

    __slots__ = ("depth", "expires_s", "held", "is_open", "replica", "run", "tip")

    def __init__(self, replica: ReplicaId, held: _Held, tip: BlockId | None) -> None:
        self.replica = replica
        self.held = held
        self.tip = tip
        self.is_open = True
        self.run: _Run | None = None
        self.depth = 0
        self.expires_s = 0.0


@dataclass(slots=True, eq=False)
class _Held:
    """What is known of one life of a replica: owners of blocks, placements by age."""

    ttl_s: float
    capacity_blocks: int
    owners: dict[BlockId, _Run] = field(default_factory=dict)
    standing: deque[Placement] = field(default_factory=deque)

    def add(self, placement: Placement, chain: Sequence[BlockId], now_s: float) -> None:
        """Let ``placement`` hold the blocks of ``chain``."""
        known = _leading_run(self.owners, chain)
        run = self.owners[chain[known - 1]] if known else None
        if known < len(chain):
            fresh = list(chain[known:])
            run = _Run(run, known, fresh)
            self.owners.update(dict.fromkeys(fresh, run))
        if run is not None:
            run.hold(len(chain))
            placement.run, placement.depth = run, len(chain)
            placement.expires_s = now_s + self.ttl_s
            self.standing.append(placement)

    def release(self, placement: Placement) -> tuple[_Run | None, int, list[list[BlockId]]]:
        """Let go of what ``placement`` holds.

        Return the blocks that nobody needs any more, deepest part first, and what they continued: a
        run, or None, up to a depth.
        """
        run, depth = placement.run, placement.depth
        placement.run = None
        freed: list[list[BlockId]] = []
        while run is not None:
            holders = run.holds[depth] - 1
            if holders:
                run.holds[depth] = holders
                break
            del run.holds[depth]
            needed = max(run.holds, default=run.start)
            if needed >= depth:
                break
            gone = run.blocks[needed - run.start :]
            del run.blocks[needed - run.start :]
            for block in gone:
                del self.owners[block]
            freed.append(gone)
            depth = needed
            if run.blocks:
                break
            run = run.parent
        return run, depth, freed

    def expire(self, now_s: float) -> None:
        """Release placements whose time is up."""
        standing = self.standing
        while standing and (standing[0].run is None or standing[0].expires_s <= now_s):
            self.release(standing.popleft())

    def shrink(self, most_blocks: int) -> None:
        """Release the oldest placements, their deepest blocks first, down to ``most_blocks``."""
        standing = self.standing
        while len(self.owners) > most_blocks:
            oldest = standing[0]
            run, depth, freed = self.release(oldest)
            spare = most_blocks - len(self.owners)
            blocks = [block for part in reversed(freed) for block in part][: max(spare, 0)]
            if not blocks:
                standing.popleft()
                continue
            kept = _Run(run, depth, blocks)
            self.owners.update(dict.fromkeys(blocks, kept))
            oldest.run, oldest.depth = kept, depth + len(blocks)
            kept.hold(oldest.depth)


class Placements:
    """Recent assignments per replica. Clock values are passed in; memory is bounded."""

    __slots__ = ("_awaited", "_capacity_blocks", "_held", "_ttl_s")

    def __init__(
        self, ttl_s: float = PENDING_TTL_S, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS
    ) -> None:
        self._ttl_s = ttl_s
        self._capacity_blocks = capacity_blocks
        self._held: dict[ReplicaId, _Held] = {}
        self._awaited: list[tuple[float, Placement]] = []

    def limit(self, replica: ReplicaId, ttl_s: float, capacity_blocks: int) -> None:
        """Give ``replica`` its own time to live and capacity; a shorter life starts afresh."""
        held = self._of(replica)
        if ttl_s < held.ttl_s:
            held = self._held[replica] = _Held(ttl_s, capacity_blocks)
        held.ttl_s = ttl_s
        held.capacity_blocks = capacity_blocks

    def place(self, replica: ReplicaId, chain: Sequence[BlockId], now_s: float) -> Placement:
        """Note that a prompt with ``chain`` goes to ``replica``."""
        held = self._of(replica)
        if len(chain) > held.capacity_blocks:
            chain = chain[: held.capacity_blocks]
        placement = Placement(replica, held, chain[-1] if chain else None)
        held.expire(now_s)
        if chain:
            held.add(placement, chain, now_s)
            if len(held.owners) > held.capacity_blocks:
                held.shrink(held.capacity_blocks)
            elif len(held.standing) > held.capacity_blocks:
                held.release(held.standing.popleft())
        return placement

    def overlap(self, chain: Sequence[BlockId], now_s: float) -> dict[ReplicaId, int]:
        """Return the leading blocks of ``chain`` that were sent to each replica, where any."""
        runs: dict[ReplicaId, int] = {}
        if not chain:
            return runs
        first = chain[0]
        for replica, held in self._held.items():
            standing = held.standing
            if standing and standing[0].expires_s <= now_s:
                held.expire(now_s)
            if first in held.owners:
                runs[replica] = _leading_run(held.owners, chain)
        return runs

    def of(self, _: str) -> Placements:
        """Return the book of one scope: here all scopes have the same."""
        return self

    @property
    def blocks(self) -> int:
        """Blocks on record, over all replicas."""
        return sum(len(held.owners) for held in self._held.values())

    def shrink(self, replica: ReplicaId, most_blocks: int) -> None:
        """Release the oldest that was sent to ``replica``, down to ``most_blocks``."""
        held = self._held.get(replica)
        if held is not None:
            held.shrink(most_blocks)

    def shrink_to(self, most_blocks: int) -> None:
        """Release the oldest, of whoever has most, down to ``most_blocks`` over all replicas."""
        share = fair_share([len(held.owners) for held in self._held.values()], most_blocks)
        for held in self._held.values():
            held.shrink(share)

    def expire(self, now_s: float) -> None:
        """Release whatever is too old, also where nobody looks."""
        for held in self._held.values():
            held.expire(now_s)

    def resident(self, replica: ReplicaId) -> int:
        """Return the number of blocks on record for ``replica``."""
        held = self._held.get(replica)
        return len(held.owners) if held else 0

    @staticmethod
    def confirm(placement: Placement) -> bool:
        """Note that the replica computed the prompt; False when the placement was closed."""
        was_open = placement.is_open
        placement.is_open = False
        return was_open

    @staticmethod
    def withdraw(placement: Placement) -> bool:
        """Undo an assignment that failed before any byte; False when it was closed.

        Blocks that other placements sent there too stay.
        """
        if not placement.is_open:
            return False
        placement.is_open = False
        placement.held.release(placement)
        return True

    def await_news(self, placement: Placement, now_s: float) -> bool:
        """Let a computed prompt count until the engine tells of it; False when it was closed."""
        was_open = self.confirm(placement)
        if was_open and placement.tip is not None:
            self._awaited.append((now_s + NEWS_S, placement))
        return was_open

    def settle(self, holds: Callable[[ReplicaId, BlockId], bool], now_s: float) -> None:
        """End every awaited placement whose last block ``holds`` shows, or whose time is up.

        From then on the engine's word counts alone: it will also tell of the eviction.
        """
        waiting = []
        for until_s, placement in self._awaited:
            tip = placement.tip
            if tip is None or now_s >= until_s or holds(placement.replica, tip):
                placement.held.release(placement)
            else:
                waiting.append((until_s, placement))
        self._awaited = waiting

    def forget(self, replica: ReplicaId) -> None:
        """Drop all that was sent to ``replica``, and its limits: its cache is a new one."""
        self._held.pop(replica, None)

    def _of(self, replica: ReplicaId) -> _Held:
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = _Held(self._ttl_s, self._capacity_blocks)
        return held


def fair_share(sizes: Sequence[int], capacity: int) -> int:
    """Return the largest share such that no more than ``capacity`` is left if none has more."""
    left = capacity
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


def _leading_run(blocks: dict[BlockId, _Run], chain: Sequence[BlockId]) -> int:
    """Return how many leading ids of ``chain`` are known: known ids are always a prefix."""
    if chain[0] not in blocks:
        return 0
    known, unknown = 1, len(chain) + 1
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if chain[middle - 1] in blocks:
            known = middle
        else:
            unknown = middle
    return known


def tip_of(chains: Sequence[Sequence[BlockId]]) -> Tip | None:
    """Return the end of the longest chain; None where none has a block."""
    longest = chains[0] if len(chains) == 1 else max(chains, key=len, default=())
    return Tip(len(longest), longest[-1][:TIP_BYTES]) if longest else None


def told_blocks(tips: Sequence[Tip], chain: Sequence[BlockId]) -> int:
    """Return how many leading blocks of ``chain`` other routers' prompts will leave, by their ends.

    A prompt that ends amid a shared block, or goes on elsewhere before its end, tells nothing here.
    """
    most, length = 0, len(chain)
    for blocks, mark in tips:
        if most < blocks <= length and chain[blocks - 1][:TIP_BYTES] == mark:
            most = blocks
    return most
