"""Causal attention of one sequence over its cached keys and values, invariant in its bits.

Keys lie in blocks of a fixed number of tokens, aligned to absolute positions. Scores and weighted
sums are products of fixed shapes, one for each block; the blocks' sums are added up in order. So a
query's result depends on the keys up to its own position only: later blocks are left out or add
exact zeros. The highest score is subtracted from all before the exponential; a maximum is exact in
any order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from sidecar.compute.tile import CANONICAL_ROWS, Proofs, proven_rows, rounded_up, tiles_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sidecar.compute.model import ModelConfig

BLOCK_TOKENS: Final = 64
QUERY_ROWS: Final = (1, 2, 4, 8, 16, 32)
PROOF_BLOCKS: Final = 2


class Attention:
    """Attends for one model; a tile is some query positions with all heads of a group."""

    def __init__(self, config: ModelConfig, proofs: Proofs) -> None:
        self._kv_heads = config.kv_heads
        self._group = config.heads // config.kv_heads
        self._width = config.head_width
        self._scale = np.float32(1 / math.sqrt(config.head_width))
        self._proven = self._prove(proofs)

    def _prove(self, proofs: Proofs) -> tuple[int, ...]:
        canonical = max(1, CANONICAL_ROWS // self._group)
        most = max(canonical, *QUERY_ROWS)
        keys = proofs.rows(PROOF_BLOCKS * BLOCK_TOKENS, self._kv_heads, self._width)
        values = proofs.rows(PROOF_BLOCKS * BLOCK_TOKENS, self._kv_heads, self._width)
        heads = self._kv_heads * self._group
        queries = proofs.rows(rounded_up(most, canonical), heads, self._width)

        def product(tile: NDArray[np.float32]) -> NDArray[np.float32]:
            return self._tile(tile, keys, values, np.full(len(tile), len(keys) - 1))

        return proven_rows(product, queries, canonical, QUERY_ROWS)

    def __call__(
        self,
        queries: NDArray[np.float32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        first_position: int,
    ) -> NDArray[np.float32]:
        """Return float32 ``(tokens, heads, width)`` for ``queries`` of that shape.

        They stand at ``first_position`` and after it. ``keys`` and ``values`` are ``(positions,
        kv_heads, width)``, whole blocks with zeros after the last position.
        """
        result = np.empty_like(queries)
        for first, end, count in tiles_of(len(queries), self._proven):
            tile = queries[first:end]
            positions = np.arange(first_position + first, first_position + first + count)
            if end - first < count:
                tile = np.zeros((count, *queries.shape[1:]), dtype=np.float32)
                tile[: end - first] = queries[first:end]
                positions[end - first :] = 0
            seen = rounded_up(first_position + end, BLOCK_TOKENS)
            attended = self._tile(tile, keys[:seen], values[:seen], positions)
            result[first:end] = attended[: end - first]
        return result

    def _tile(
        self,
        queries: NDArray[np.float32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        positions: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Attend for the queries at ``positions``; arrays as in ``__call__``."""
        tokens = len(queries)
        grouped = (queries * self._scale).reshape(tokens, self._kv_heads, self._group, self._width)
        rows = grouped.transpose(1, 2, 0, 3).reshape(self._kv_heads, 1, -1, self._width)
        scores = np.matmul(rows, self._blocks(keys).transpose(0, 1, 3, 2))
        by_token = scores.reshape(
            self._kv_heads, scores.shape[1], self._group, tokens, BLOCK_TOKENS
        )
        _hide_later(by_token, positions)
        scores -= scores.max(axis=(1, 3), keepdims=True)
        weights = np.exp(scores, out=scores)
        totals = _added_in_order(weights.sum(axis=3))
        sums = _added_in_order(np.matmul(weights, self._blocks(values)))
        sums /= totals[:, :, None]
        heads = sums.reshape(self._kv_heads, self._group, tokens, self._width)
        return heads.transpose(2, 0, 1, 3).reshape(queries.shape)

    def _blocks(self, cached: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a view ``(kv_heads, blocks, BLOCK_TOKENS, width)``."""
        blocks = cached.reshape(-1, BLOCK_TOKENS, self._kv_heads, self._width)
        return blocks.transpose(2, 0, 1, 3)


def _hide_later(scores: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
    """Give minus infinity to keys after the query's position.

    ``scores`` is ``(kv_heads, blocks, group, tokens, BLOCK_TOKENS)``.
    """
    first_block = int(positions.min()) // BLOCK_TOKENS
    later = scores[:, first_block:]
    keys = np.arange(first_block * BLOCK_TOKENS, scores.shape[1] * BLOCK_TOKENS)
    is_later = keys.reshape(-1, 1, 1, BLOCK_TOKENS) > positions[:, None]
    np.copyto(later, np.float32(-np.inf), where=is_later)


def _added_in_order(parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sum over axis 1, one part after the other."""
    total = parts[:, 0].copy()
    for block in range(1, parts.shape[1]):
        total += parts[:, block]
    return total
