"""The longest known prefix of a byte text, at the price of one comparison pass.

A compressed radix tree whose edges are views of the texts themselves. Finding compares memory
with memory: nothing is hashed, nothing is copied, and a text that continues a known one makes its
edge longer instead of adding another. *Marks* along the edges carry what is known of the text up
to there. Memory is bounded: the least recently used leaves go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

_P = TypeVar("_P")
EDGE_BYTES: Final = 600
"""What an edge costs beside its text."""
MARK_BYTES: Final = 200


class _Edge(Generic[_P]):
    __slots__ = ("children", "data", "offsets", "parent", "payloads", "start")

    def __init__(self, parent: _Edge[_P] | None, start: int, data: memoryview) -> None:
        self.parent = parent
        self.start = start
        self.data = data
        self.children: dict[int, _Edge[_P]] = {}
        self.offsets: list[int] = []
        self.payloads: list[_P] = []

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class Found(Struct, Generic[_P], frozen=True, gc=False):
    """The first ``matched`` bytes are known; ``payload`` is of the last mark therein, if any.

    ``place`` and ``version`` are the tree's own: where an insertion goes on.
    """

    matched: int
    payload: _P | None
    place: Any
    version: int


class PrefixTree(Generic[_P]):
    """Texts with marks. Not for several threads at once: callers lock."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._root: _Edge[_P] = _Edge(None, 0, memoryview(b""))
        self._leaves: OrderedDict[_Edge[_P], None] = OrderedDict()
        self._version = 0
        self.used_bytes = 0

    def find(self, key: bytes) -> Found[_P]:
        """Return the longest known prefix of ``key``."""
        edge, matched = self._walk(key)
        if edge in self._leaves:
            self._leaves.move_to_end(edge)
        return Found(matched, self._last_payload(edge, matched), edge, self._version)

    def insert(
        self, key: bytes, end: int, marks: Iterable[tuple[int, _P]], found: Found[_P]
    ) -> None:
        """Make the first ``end`` bytes of ``key`` known, with marks at ascending offsets.

        ``found`` is what ``find(key)`` gave. A mark at offset o counts for texts that share the
        first o bytes; marks in known stretches that have later ones are left out.
        """
        edge, matched = (
            (found.place, found.matched) if found.version == self._version else self._walk(key)
        )
        self._version += 1
        waiting = [mark for mark in marks if mark[0] <= end]
        if matched < edge.end and end > matched:
            edge = self._cut(edge, matched)
        self._add_marks(edge, waiting)
        if end > matched:
            leaf = self._grown(edge, key, matched, end)
            self._add_marks(leaf, waiting)
            self._leaves[leaf] = None
            self._leaves.move_to_end(leaf)
        self._evict()

    def clear(self) -> None:
        """Forget every text, at once: edges refer to each other, so each is taken apart."""
        edges = [self._root]
        while edges:
            edge = edges.pop()
            edges += edge.children.values()
            edge.parent, edge.data = None, memoryview(b"")
            edge.children, edge.offsets, edge.payloads = {}, [], []
        self._root = _Edge(None, 0, memoryview(b""))
        self._leaves.clear()
        self._version += 1
        self.used_bytes = 0

    def _walk(self, key: bytes) -> tuple[_Edge[_P], int]:
        edge, position = self._root, 0
        while position < len(key):
            child = edge.children.get(key[position])
            if child is None:
                break
            edge = child
            if not key.startswith(child.data, position):
                return edge, position + _common(key, position, child.data)
            position += len(child.data)
        return edge, position

    @staticmethod
    def _last_payload(edge: _Edge[_P] | None, matched: int) -> _P | None:
        while edge is not None:
            index = bisect_right(edge.offsets, matched)
            if index:
                return edge.payloads[index - 1]
            edge = edge.parent
        return None

    def _cut(self, edge: _Edge[_P], at: int) -> _Edge[_P]:
        """End ``edge`` at ``at``; what follows stays known only where it is worth an edge."""
        index = bisect_right(edge.offsets, at)
        size = at - edge.start
        is_leaf = not edge.children
        if is_leaf and index == len(edge.offsets):
            self.used_bytes -= len(edge.data) - size
            edge.data = edge.data[:size]
            return edge
        upper: _Edge[_P] = _Edge(edge.parent, edge.start, edge.data[:size])
        upper.offsets, edge.offsets = edge.offsets[:index], edge.offsets[index:]
        upper.payloads, edge.payloads = edge.payloads[:index], edge.payloads[index:]
        if edge.parent is not None:
            edge.parent.children[edge.data[0]] = upper
        edge.parent, edge.start, edge.data = upper, at, edge.data[size:]
        upper.children[edge.data[0]] = edge
        self.used_bytes += EDGE_BYTES
        return upper

    def _grown(self, edge: _Edge[_P], key: bytes, matched: int, end: int) -> _Edge[_P]:
        """Return a leaf for ``key[:end]``: ``edge`` itself, made longer, or a child of it."""
        if edge.children or edge is self._root:
            child: _Edge[_P] = _Edge(edge, matched, _view(key, matched, end))
            edge.children[key[matched]] = child
            self._leaves.pop(edge, None)
            self.used_bytes += EDGE_BYTES + len(child.data)
            return child
        edge.data = _view(key, edge.start, end)
        self.used_bytes += end - matched
        return edge

    def _add_marks(self, edge: _Edge[_P], marks: list[tuple[int, _P]]) -> None:
        for offset, payload in marks:
            last = edge.offsets[-1] if edge.offsets else edge.start
            if last < offset <= edge.end:
                edge.offsets.append(offset)
                edge.payloads.append(payload)
                self.used_bytes += MARK_BYTES

    def _evict(self) -> None:
        while self.used_bytes > self._capacity_bytes and self._leaves:
            leaf, _ = self._leaves.popitem(last=False)
            self.used_bytes -= EDGE_BYTES + len(leaf.data) + MARK_BYTES * len(leaf.offsets)
            parent = leaf.parent
            if parent is None:
                continue
            parent.children.pop(leaf.data[0], None)
            if parent is not self._root and not parent.children:
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)


def _view(key: bytes, start: int, end: int) -> memoryview:
    """Return a part of ``key``; a copy where it would keep much of the rest alive."""
    if end - start < len(key) - (end - start):
        return memoryview(key[start:end])
    return memoryview(key)[start:end]


def _common(key: bytes, position: int, data: memoryview) -> int:
    """Return how many leading bytes of ``data`` stand in ``key`` at ``position``."""
    known, unknown = 0, len(data)
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if key.startswith(data[known:middle], position + known):
            known = middle
        else:
            unknown = middle
    return known
