"""Blocks that no event told of and a report proved: what a late subscriber cannot know.

A sidecar that begins after its engine, or that lost events, knows nothing of what was cached
before. But an engine that reports more cached tokens than predicted proves that it holds the
leading blocks of that prompt. They count as resident there, for this router alone.

Nobody will tell when they are evicted. So they count for ``LEARNED_TTL_S`` from the last proof, as
many of them as the replica has room for, least recently proved ones going first; and a report that
falls short of them ends those it did not find. A new life of the replica, or a clear, voids all.

An event may be on its way. A proof waits for ``NEWS_S``; what was told by then is not learned, so
that the engine's word stands alone, with its word of the eviction.

An id names its whole prefix and all leading blocks are proved together, so that known ones are a
run, whose end a bisection finds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from state.model import BlockId, Overlap, ReplicaId

LEARNED_TTL_S: Final = 600.0
NEWS_S: Final = 0.5
DEFAULT_BLOCKS: Final = 65_536
"""Per replica, where its capacity is not known."""
MAX_WAITING: Final = 1_024


class _Proof(NamedTuple):
    due_s: float
    replica: ReplicaId
    blocks: tuple[BlockId, ...]
    most_blocks: int


class Learned:
    """Proved blocks per replica. Clock values are passed in, in seconds; memory is bounded."""

    __slots__ = ("_expiry_s", "_waiting")

    def __init__(self) -> None:
        self._expiry_s: dict[ReplicaId, OrderedDict[BlockId, float]] = {}
        self._waiting: deque[_Proof] = deque(maxlen=MAX_WAITING)

    def __bool__(self) -> bool:
        """Return whether anything is known at all."""
        return bool(self._expiry_s)

    def prove(
        self,
        replica: ReplicaId,
        blocks: tuple[BlockId, ...],
        now_s: float,
        most_blocks: int = DEFAULT_BLOCKS,
    ) -> None:
        """Note that ``replica`` reported these leading blocks of a chain as cached.

        It has room for ``most_blocks`` at most.
        """
        blocks = blocks[:most_blocks]
        if blocks:
            self._waiting.append(_Proof(now_s + NEWS_S, replica, blocks, most_blocks))

    def settle(self, holds: Callable[[ReplicaId, BlockId], bool], now_s: float) -> None:
        """Learn what was proved ``NEWS_S`` ago and is not told by now: ``holds`` says what is."""
        waiting = self._waiting
        while waiting and waiting[0].due_s <= now_s:
            proof = waiting.popleft()
            if not holds(proof.replica, proof.blocks[-1]):
                self._learn(proof, now_s)
        for replica in list(self._expiry_s):
            self._expire(replica, now_s)

    def overlap(
        self, chain: Sequence[BlockId], told: Mapping[ReplicaId, Overlap], now_s: float
    ) -> dict[ReplicaId, int]:
        """Return the leading blocks of ``chain`` per replica of which anything was learned.

        ``told``: what events say of the same chain.
        """
        runs: dict[ReplicaId, int] = {}
        for replica in self._expiry_s:
            overlap = told.get(replica)
            told_blocks = overlap.gpu_blocks if overlap is not None else 0
            runs[replica] = self.run(replica, chain, told_blocks, now_s)
        return runs

    def run(
        self, replica: ReplicaId, chain: Sequence[BlockId], told_blocks: int, now_s: float
    ) -> int:
        """Return how many leading blocks ``replica`` holds, beyond those that events told of."""
        expiry_s = self._expiry_s.get(replica)
        if expiry_s is None or told_blocks >= len(chain):
            return told_blocks
        if expiry_s.get(chain[told_blocks], now_s) <= now_s:
            return told_blocks
        known, unknown = told_blocks + 1, len(chain) + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if expiry_s.get(chain[middle - 1], now_s) > now_s:
                known = middle
            else:
                unknown = middle
        return known

    def leave_to_events(
        self, replica: ReplicaId, chain: Sequence[BlockId], told_blocks: int
    ) -> None:
        """Forget what events tell of by now: they will also tell of the eviction."""
        self._remove(replica, chain[:told_blocks])

    def cut(self, replica: ReplicaId, chain: Sequence[BlockId], found_blocks: int) -> None:
        """Forget the blocks of ``chain`` after the ``found_blocks`` that were really there."""
        self._remove(replica, chain[found_blocks:])

    def forget(self, replica: ReplicaId) -> None:
        """Void all that was learned of ``replica``, and what waits."""
        self._expiry_s.pop(replica, None)
        if self._waiting:
            kept = [proof for proof in self._waiting if proof.replica != replica]
            self._waiting = deque(kept, maxlen=MAX_WAITING)

    def clear(self) -> None:
        """Void all: chains of a scope ended, and whose a block was cannot be told."""
        self._expiry_s.clear()
        self._waiting.clear()

    def resident(self, replica: ReplicaId) -> int:
        """Return how many blocks were learned of ``replica``."""
        return len(self._expiry_s.get(replica, ()))

    def _learn(self, proof: _Proof, now_s: float) -> None:
        expiry_s = self._expiry_s.setdefault(proof.replica, OrderedDict())
        until_s = now_s + LEARNED_TTL_S
        for block in reversed(proof.blocks):  # the deepest is the first to go
            expiry_s[block] = until_s
            expiry_s.move_to_end(block)
        while len(expiry_s) > proof.most_blocks:
            expiry_s.popitem(last=False)

    def _remove(self, replica: ReplicaId, blocks: Sequence[BlockId]) -> None:
        expiry_s = self._expiry_s.get(replica)
        if expiry_s is not None:
            for block in blocks:
                expiry_s.pop(block, None)
            self._tidy(replica)

    def _expire(self, replica: ReplicaId, now_s: float) -> None:
        expiry_s = self._expiry_s[replica]
        while expiry_s and next(iter(expiry_s.values())) <= now_s:
            expiry_s.popitem(last=False)
        self._tidy(replica)

    def _tidy(self, replica: ReplicaId) -> None:
        if not self._expiry_s[replica]:
            del self._expiry_s[replica]
