"""SGLang's radix cache for tests: nodes of whole pages, evicted leaf by leaf, and their events.

A prompt finds at most all of its tokens but one, in whole pages. What a request leaves is inserted
in whole pages as one new leaf below what was there; a node that is only partly shared is split,
which nobody is told of. The least recently used leaf goes first, with all its pages. Pages are
named by a chain of SHA-256 digests over 4-byte tokens, of which events carry the first 8 bytes,
signed.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Encoding = Literal["array", "map"]
GPU: Final = "GPU"
_SALT_TAG: Final = b"sglang-cache-salt-v1\0"
_TOKEN_BYTES: Final = 4
_HASH_BYTES: Final = 8


def salt_digest(salt: str) -> bytes:
    """Return what the chain of a salted prompt starts from; nothing without a salt."""
    return hashlib.sha256(_SALT_TAG + salt.encode()).digest() if salt else b""


def page_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a page after the one with digest ``before``."""
    packed = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in tokens)
    return hashlib.sha256(before + packed).digest()


def event_hash(digest: bytes) -> int:
    """Return how events name a page."""
    return int.from_bytes(digest[:_HASH_BYTES], "big", signed=True)


@dataclass(slots=True, eq=False)
class _Node:
    """A run of pages; ``digests`` has one for each."""

    tokens: list[int]
    digests: list[bytes]
    parent: _Node | None
    used: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class SglangTree:
    """The cache of one engine life. ``take`` returns the events since the last time."""

    def __init__(self, page_tokens: int, capacity_tokens: int, encoding: Encoding) -> None:
        self.page_tokens = page_tokens
        self.capacity_tokens = capacity_tokens
        self.encoding = encoding
        self.held_tokens = 0
        self.evicted_pages = 0
        self._roots: dict[str, _Node] = {}
        self._events: list[Any] = []
        self._clock = itertools.count(1)

    def take(self) -> list[Any]:
        """Return what there is to tell."""
        events, self._events = self._events, []
        return events

    def match(self, tokens: Sequence[int], salt: str) -> int:
        """Return how many tokens of a prompt need not be computed."""
        _, matched = self._walk(tokens[: self._whole(len(tokens) - 1)], salt)
        return matched

    def insert(self, tokens: Sequence[int], salt: str) -> None:
        """Keep the whole pages of ``tokens``."""
        kept = list(tokens[: self._whole(len(tokens))])
        node, matched = self._walk(kept, salt)
        fresh = kept[matched:]
        if not fresh:
            return
        self._evict(len(fresh), node)
        before = node.digests[-1] if node.digests else salt_digest(salt)
        leaf = _Node(fresh, [], node, next(self._clock))
        for page in self._pages(fresh):
            before = page_digest(before, page)
            leaf.digests.append(before)
        node.children[tuple(fresh[: self.page_tokens])] = leaf
        self.held_tokens += len(fresh)
        self._tell_stored(leaf, node, salt)

    def clear(self) -> None:
        """Forget everything, and tell."""
        self._roots.clear()
        self.held_tokens = 0
        cleared: Any = ["AllBlocksCleared"]
        self._events.append(cleared if self.encoding == "array" else {"type": cleared[0]})

    def _walk(self, tokens: Sequence[int], salt: str) -> tuple[_Node, int]:
        """Return the last node on the way of ``tokens``, split where they part, and how far."""
        node = self._roots.setdefault(salt, _Node([], [], None))
        matched = 0
        while matched < len(tokens):
            child = node.children.get(tuple(tokens[matched : matched + self.page_tokens]))
            if child is None:
                break
            child.used = next(self._clock)
            shared = self._shared(child.tokens, tokens[matched:])
            if shared < len(child.tokens):
                child = self._split(child, shared)
            matched += shared
            node = child
        return node, matched

    def _shared(self, ours: Sequence[int], theirs: Sequence[int]) -> int:
        same = 0
        for one, other in zip(ours, theirs, strict=False):
            if one != other:
                break
            same += 1
        return self._whole(same)

    def _split(self, node: _Node, tokens: int) -> _Node:
        """Cut ``node`` after ``tokens``; returns the upper part."""
        pages, parent = tokens // self.page_tokens, node.parent
        assert parent is not None
        upper = _Node(node.tokens[:tokens], node.digests[:pages], parent, node.used)
        parent.children[tuple(upper.tokens[: self.page_tokens])] = upper
        node.tokens, node.digests, node.parent = node.tokens[tokens:], node.digests[pages:], upper
        upper.children[tuple(node.tokens[: self.page_tokens])] = node
        return upper

    def _evict(self, tokens: int, kept: _Node) -> None:
        """Make room for ``tokens``; the path to ``kept`` is in use."""
        path = {id(kept)}
        node = kept
        while node.parent is not None:
            node = node.parent
            path.add(id(node))
        while self.held_tokens + tokens > self.capacity_tokens:
            leaves = [leaf for leaf in self._leaves() if id(leaf) not in path]
            assert leaves, "the pool is too small for one request"
            oldest = min(leaves, key=lambda leaf: leaf.used)
            assert oldest.parent is not None
            del oldest.parent.children[tuple(oldest.tokens[: self.page_tokens])]
            self.held_tokens -= len(oldest.tokens)
            self.evicted_pages += len(oldest.digests)
            for digest in oldest.digests:
                self._tell_removed(digest)

    def _leaves(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None and not node.children:
                yield node

    def _tell_stored(self, leaf: _Node, parent: _Node, salt: str) -> None:
        """Tell of each page of a new node, as SGLang does: one event a page."""
        before = event_hash(parent.digests[-1]) if parent.digests else None
        for digest, page in zip(leaf.digests, self._pages(leaf.tokens), strict=True):
            name = event_hash(digest)
            if self.encoding == "array":
                event: Any = ["BlockStored", [name], before, page, len(page), None, GPU]
                if salt:
                    event.append({"cache_salt": salt})
            else:
                event = {
                    "type": "BlockStored",
                    "block_hashes": [name],
                    "parent_block_hash": before,
                    "token_ids": page,
                    "block_size": len(page),
                    "lora_id": None,
                    "medium": GPU,
                }
                if salt:
                    event["cache_salt"] = salt
            self._events.append(event)
            before = name

    def _tell_removed(self, digest: bytes) -> None:
        names = [event_hash(digest)]
        if self.encoding == "array":
            self._events.append(["BlockRemoved", names, GPU])
        else:
            self._events.append({"type": "BlockRemoved", "block_hashes": names, "medium": GPU})

    def _pages(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(tokens), self.page_tokens):
            yield list(tokens[start : start + self.page_tokens])

    def _whole(self, tokens: int) -> int:
        return max(0, tokens) // self.page_tokens * self.page_tokens
