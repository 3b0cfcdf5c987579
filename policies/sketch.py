"""A bounded sketch of prompt traffic: how often each prefix arrives, with the places of the forks.

It is a path-compressed tree over chains. A node is a run of blocks that all its traffic walked
together; its end is a fork, or the end of somebody's prompt. An id names the whole prefix that
ends there, so one comparison tells that a whole run matches, and a bisection finds the exact block
where a newcomer leaves it. A request thus touches one node per fork on its way, never one per
block.

Each node counts arrivals that decay with time: ``arrivals`` halves every ``half_life_s``. A run
that is cut keeps its count on both parts, since everybody who reached its end passed the cut. A
prompt that continues a rarely used leaf moves that leaf's end and starts its count anew: nobody
else was there yet. So a session whose prompt grows with each turn never counts more than its last
turn, in one node.

Memory is bounded in nodes and in stored blocks. When full, the leaf with the fewest decayed
arrivals among the longest unseen ones goes (space-saving without inheritance: counts are never too
high, and too low by no more than what the evicted leaf had). A prefix is remembered while fewer
than a few thousand other prompts arrive between two of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import exp, log
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from state.model import ReplicaId

ID_BYTES: Final = 16
RUN_BLOCKS: Final = 512
"""A new run stores at most this many blocks; whoever repeats the prompt prolongs it."""
FORKS: Final = 32
"""Forks followed per request: bounds its cost whatever clients send."""
EVICTION_SAMPLE: Final = 8


class SketchBounds(Struct, frozen=True, kw_only=True):
    """What the sketch may grow to, and how it forgets.

    ``settled_arrivals``: a leaf with so many arrivals is not prolonged but gets a child.
    """

    half_life_s: float
    settled_arrivals: float
    max_nodes: int
    max_blocks: int


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of blocks; ``end_blocks`` is the length of the prefix that ends with it.

    ``wanted_holders``, ``low_since_s``, ``placed`` and ``prefix_tokens`` belong to whoever decides
    on holders.
    """

    parent: PrefixNode | None
    first: BlockId
    packed: bytes
    end_blocks: int
    born_s: float
    seen_s: float
    arrivals: float = 1.0
    children: dict[BlockId, PrefixNode] = field(default_factory=dict)
    wanted_holders: int = 1
    low_since_s: float | None = None
    placed: tuple[tuple[ReplicaId, ...], frozenset[ReplicaId]] | None = None
    prefix_tokens: int = 0

    @property
    def name(self) -> bytes:
        """The id of the prefix that ends here."""
        return self.packed[-ID_BYTES:]

    @property
    def run_blocks(self) -> int:
        """How many blocks the run has."""
        return len(self.packed) // ID_BYTES


class PrefixSketch:
    """Decayed arrival counts of prefixes. Not safe for threads; time may stand still."""

    def __init__(self, bounds: SketchBounds, now_s: float) -> None:
        self._bounds = bounds
        self._decay_s = bounds.half_life_s / log(2)
        self._leaves: dict[PrefixNode, None] = {}
        self._nodes = 0
        self._blocks = 0
        self.root = PrefixNode(
            parent=None,
            first=BlockId(b""),
            packed=b"",
            end_blocks=0,
            born_s=now_s,
            seen_s=now_s,
            arrivals=0.0,
        )

    @property
    def node_count(self) -> int:
        """How many prefixes are counted."""
        return self._nodes

    @property
    def stored_blocks(self) -> int:
        """How many block ids are stored, 16 bytes each."""
        return self._blocks

    def rate_per_s(self, node: PrefixNode, now_s: float, window_s: float) -> float:
        """Return the arrival rate at ``node``, which was counted at ``now_s``.

        A node younger than the decay has seen less than a full window; the estimate allows for
        that. ``window_s`` is the least age it assumes, so that two arrivals at once are no flood.
        """
        age_s = max(now_s - node.born_s, window_s)
        return node.arrivals / (self._decay_s * (1.0 - exp(-age_s / self._decay_s)))

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield every prefix that is counted."""
        below = list(self.root.children.values())
        while below:
            node = below.pop()
            yield node
            below += node.children.values()

    def count(self, chain: Sequence[BlockId], now_s: float) -> list[PrefixNode]:
        """Count one arrival of ``chain``; return the nodes it passed, shallow to deep."""
        node = self.root
        self._touch(node, now_s)
        path: list[PrefixNode] = []
        depth = 0
        while depth < len(chain) and len(path) < FORKS:
            child = node.children.get(chain[depth])
            if child is None:
                path.append(self._grown(node, chain, now_s))
                break
            matching = _matching_blocks(child.packed, chain, depth)
            if matching < child.run_blocks:
                child = self._cut(child, matching)
            self._touch(child, now_s)
            path.append(child)
            node, depth = child, child.end_blocks
            if self._is_open(node) and depth < len(chain):
                self._prolong(node, chain, now_s)
                break
        self._make_room(now_s)
        return path

    def walk(self, chain: Sequence[BlockId]) -> list[tuple[PrefixNode, int]]:
        """Return the nodes on the way of ``chain``, and how deep it goes with each; counts nothing.

        The depth is in blocks of the chain; the last node's run may go on beyond it.
        """
        node, depth = self.root, 0
        path: list[tuple[PrefixNode, int]] = []
        while depth < len(chain) and len(path) < FORKS:
            child = node.children.get(chain[depth])
            if child is None:
                break
            depth += _matching_blocks(child.packed, chain, depth)
            path.append((child, depth))
            if depth < child.end_blocks:
                break
            node = child
        return path

    def _is_open(self, node: PrefixNode) -> bool:
        return not node.children and node.arrivals < self._bounds.settled_arrivals

    def _touch(self, node: PrefixNode, now_s: float) -> None:
        node.arrivals = self._decayed(node, now_s) + 1.0
        node.seen_s = max(node.seen_s, now_s)
        if node in self._leaves:
            del self._leaves[node]
            self._leaves[node] = None

    def faded(self, node: PrefixNode, now_s: float) -> float:
        """Return the part, in [0, 1], of a node's arrivals that is left since the last one."""
        return exp(-max(0.0, now_s - node.seen_s) / self._decay_s)

    def _decayed(self, node: PrefixNode, now_s: float) -> float:
        return node.arrivals * self.faded(node, now_s)

    def _grown(self, parent: PrefixNode, chain: Sequence[BlockId], now_s: float) -> PrefixNode:
        """Return the new leaf of ``chain`` under ``parent``."""
        start = parent.end_blocks
        run = chain[start : start + RUN_BLOCKS]
        leaf = PrefixNode(
            parent=parent,
            first=run[0],
            packed=b"".join(run),
            end_blocks=start + len(run),
            born_s=now_s,
            seen_s=now_s,
        )
        parent.children[leaf.first] = leaf
        self._leaves.pop(parent, None)
        self._leaves[leaf] = None
        self._nodes += 1
        self._blocks += len(run)
        return leaf

    def _prolong(self, leaf: PrefixNode, chain: Sequence[BlockId], now_s: float) -> None:
        """Move the end of ``leaf`` to where ``chain`` goes on: its first arrival there."""
        run = chain[leaf.end_blocks : leaf.end_blocks + RUN_BLOCKS]
        leaf.packed += b"".join(run)
        leaf.end_blocks += len(run)
        leaf.born_s, leaf.arrivals = now_s, 1.0
        leaf.wanted_holders, leaf.low_since_s, leaf.placed = 1, None, None
        self._blocks += len(run)

    def _cut(self, node: PrefixNode, blocks: int) -> PrefixNode:
        """Return the new parent of ``node`` that takes over the first ``blocks`` of its run."""
        parent = node.parent
        assert parent is not None  # noqa: S101 - the root has no run to cut
        head = PrefixNode(
            parent=parent,
            first=node.first,
            packed=node.packed[: blocks * ID_BYTES],
            end_blocks=parent.end_blocks + blocks,
            born_s=node.born_s,
            seen_s=node.seen_s,
            arrivals=node.arrivals,
        )
        parent.children[head.first] = head
        node.packed = node.packed[blocks * ID_BYTES :]
        node.first = BlockId(node.packed[:ID_BYTES])
        node.parent = head
        head.children[node.first] = node
        self._nodes += 1
        return head

    def _make_room(self, now_s: float) -> None:
        """Forget leaves until both bounds hold; the newest leaf stays."""
        bounds = self._bounds
        while self._nodes > bounds.max_nodes or self._blocks > bounds.max_blocks:
            sample = list(islice(self._leaves, min(EVICTION_SAMPLE, len(self._leaves) - 1)))
            if not sample:
                return
            self._forget(min(sample, key=lambda leaf: self._decayed(leaf, now_s)))

    def _forget(self, leaf: PrefixNode) -> None:
        parent = leaf.parent
        assert parent is not None  # noqa: S101 - the root is never among the leaves
        del self._leaves[leaf]
        del parent.children[leaf.first]
        self._nodes -= 1
        self._blocks -= leaf.run_blocks
        if not parent.children and parent is not self.root:
            self._leaves[parent] = None


def _matching_blocks(packed: bytes, chain: Sequence[BlockId], start: int) -> int:
    """Return how many leading blocks of a run equal ``chain`` from ``start`` on; the first does.

    Ids name whole prefixes: where block i matches, all before it do, so bisection is enough.
    """
    length = min(len(packed) // ID_BYTES, len(chain) - start)
    if packed[(length - 1) * ID_BYTES : length * ID_BYTES] == chain[start + length - 1]:
        return length
    matching, differing = 1, length
    while differing - matching > 1:
        middle = (matching + differing) // 2
        if packed[(middle - 1) * ID_BYTES : middle * ID_BYTES] == chain[start + middle - 1]:
            matching = middle
        else:
            differing = middle
    return matching
