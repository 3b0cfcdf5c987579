"""Tokens that were asked for, kept by the digest of what decides them.

A prompt that continues another mostly begins with its tokens: where it does, id for id, both share
a run (``prompt.run``), and only the blocks that are new are hashed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from prompt.model import PromptTokens
from prompt.radix import PrefixTree
from prompt.run import RunTokens, TokenRun
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable

CAPACITY_BYTES: Final = 64 * 1024 * 1024
MARK_TOKENS: Final = 1024
"""So far apart are the places, besides ends, from which a run can be gone on with."""
ENTRY_BYTES: Final = 600
"""What an entry takes up besides its ids."""


class KnownTokens:
    """For one thread. ``capacity_bytes`` bounds packed ids; runs weigh as much again."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._tree: PrefixTree[tuple[TokenRun, int]] = PrefixTree(capacity_bytes // 2)
        self._kept: OrderedDict[Hashable, PromptTokens] = OrderedDict()
        self.used_bytes = 0

    def get(self, key: Hashable) -> PromptTokens | None:
        """Return the tokens that were put under ``key``, if they are still there."""
        tokens = self._kept.get(key)
        if tokens is not None:
            self._kept.move_to_end(key)
        return tokens

    def put(self, key: Hashable, packed: bytes) -> PromptTokens:
        """Keep exact ids under ``key``; return them."""
        found = self._tree.find(packed)
        run, known = found.payload or (TokenRun(), 0)
        run = run.extended(known, packed[known * TOKEN_BYTES :])
        count = len(packed) // TOKEN_BYTES
        first = (known // MARK_TOKENS + 1) * MARK_TOKENS
        counts = [*range(first, count, MARK_TOKENS), count]
        marks = [(at * TOKEN_BYTES, (run, at)) for at in counts]
        self._tree.insert(packed, len(packed), marks, found)
        tokens = PromptTokens(run=RunTokens(run, count, b""), is_exact=True)
        replaced = self._kept.pop(key, None)
        if replaced is not None:
            self.used_bytes -= _weight_bytes(replaced)
        self._kept[key] = tokens
        self.used_bytes += _weight_bytes(tokens)
        while self.used_bytes > self._capacity_bytes // 2 and self._kept:
            _, forgotten = self._kept.popitem(last=False)
            self.used_bytes -= _weight_bytes(forgotten)
        return tokens


def _weight_bytes(tokens: PromptTokens) -> int:
    return ENTRY_BYTES + tokens.count * TOKEN_BYTES
