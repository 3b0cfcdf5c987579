"""The paged KV cache in torch, and attention that reads it through block tables.

A group's keys and values are gathered block by block (see ``plan``), and every sum runs over one
block first, then over the blocks in order. A block has a fixed length and starts at a fixed place
in the text, and what lies behind a query adds exact zeros: a query's result has the same bits in
any group. The maximum over all blocks comes first, so that nothing is rescaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidecar.compute.plan import SUMMED_BLOCKS
from sidecar.compute.torch_linear import CANONICAL_ROWS, TRIED_SEED, proven_counts
from sidecar.compute.torch_package import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.compute.model import ModelConfig
    from sidecar.compute.plan import StepShape
    from sidecar.compute.torch_linear import Product

Tensor = Any

LEAST_EXPONENT: Final = -87.0
"""Below it the exponential is denormal, which takes processors twenty times as long."""
TRIED_BATCHES: Final = (1, 2, 3, 4, 8, 16)


class KvCache:
    """Keys and values of all layers: (layers, 2, pages + 1, kv_heads, page_tokens, head_width).

    A page's tokens of one head lie together, so that gathering them by block and head gives the
    operands of batched products. The last page is a spare one: padding writes and reads it.
    """

    def __init__(self, config: ModelConfig, shape: StepShape, dtype: Any, device: Any) -> None:
        entry = (config.kv_heads, shape.page_tokens, config.head_width)
        sizes = (config.layers, 2, shape.pages + 1, *entry)
        self.content = torch.zeros(sizes, dtype=dtype, device=device)
        self.block_tokens = shape.block_pages * shape.page_tokens
        self._block_rows = shape.block_pages * config.kv_heads
        self._cells = self.content.view(config.layers, -1, config.head_width)
        self._parts = self.content.view(config.layers, 2, -1, entry[1] * entry[2])

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store (R, 2 x kv_heads, head_width) at ``rows``, which are ``StepPlan.kv_rows``."""
        cells = self._cells[layer]
        cells.index_copy_(0, rows, keys_values.reshape(-1, cells.shape[1]))

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values at ``rows``, which are ``AttentionGroup.pages``.

        Each is (S x C x kv_heads, block_tokens, head_width).
        """
        keys, values = self._parts[layer]
        shape = (-1, self.block_tokens, self._cells.shape[2])
        return keys.index_select(0, rows).view(shape), values.index_select(0, rows).view(shape)

    def visibility(self, limits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether tokens lie behind each query's limit in a group, and 0 there, 1 before.

        Both are (S, C, 1, M, block_tokens).
        """
        blocks = len(rows) // (len(limits) * self._block_rows)
        positions = torch.arange(blocks * self.block_tokens, device=rows.device)
        by_block = positions.view(1, blocks, 1, 1, self.block_tokens)
        is_behind = by_block > limits[:, None, None, :, None]
        return is_behind, is_behind.logical_not().float()


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, visibility: tuple[Tensor, Tensor]
) -> Tensor:
    """Return (S, kv_heads, M, head_width), float32, for scaled queries (S x kv_heads, M, width).

    Keys and values are a group's (see ``KvCache.gather``), the visibility is too. Softmax and
    the sum over blocks are float32.
    """
    is_behind, factors = visibility
    sequences, blocks, _, count, block_tokens = is_behind.shape
    width = queries.shape[2]
    by_block = queries.view(sequences, 1, -1, count, width).expand(-1, blocks, -1, -1, -1)
    scores = torch.bmm(by_block.reshape(-1, count, width), keys.transpose(1, 2)).float()
    weights = scores.view(sequences, blocks, -1, count, block_tokens)
    weights.masked_fill_(is_behind, -torch.inf)
    weights.sub_(weights.amax(-1, keepdim=True).amax(1, keepdim=True))
    weights.clamp_(min=LEAST_EXPONENT).exp_().mul_(factors)
    mixed = torch.bmm(scores.to(values.dtype), values)
    mixed = mixed.view(sequences, blocks, -1, count, width)
    return _over_blocks(mixed) / _over_blocks(weights.sum(-1, keepdim=True))


def _over_blocks(parts: Tensor) -> Tensor:
    """Return the sum over blocks (dimension 1): over each ``SUMMED_BLOCKS``, then over their sums.

    Blocks of zeros at the end do not change it.
    """
    if parts.shape[1] <= SUMMED_BLOCKS:
        return _in_order(parts, 1)
    return _in_order(_in_order(parts.unflatten(1, (-1, SUMMED_BLOCKS)), 2), 1)


def _in_order(parts: Tensor, dimension: int) -> Tensor:
    first, *others = parts.unbind(dimension)
    total = first.float()
    for other in others:
        total = total + other
    return total


def proven_query_counts(cache: KvCache, counts: Sequence[int]) -> tuple[int, ...]:
    """Return those of ``counts`` that give a query the same bits, in batches of any length tried.

    Only ``CANONICAL_ROWS`` is returned if the length of the batch matters.
    """
    content = cache.content
    generator = torch.Generator().manual_seed(TRIED_SEED)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(content.device, content.dtype)

    keys = random(TRIED_BATCHES[-1], cache.block_tokens, content.shape[-1])
    proven = set(counts)
    for operand in (keys.transpose(1, 2), keys):
        rows = random(counts[-1], operand.shape[1])
        expected = _batched(operand, TRIED_BATCHES[-1])(rows[:CANONICAL_ROWS])
        for batch in TRIED_BATCHES:
            product = _batched(operand, batch)
            if not torch.equal(product(rows[:CANONICAL_ROWS]), expected):
                return (CANONICAL_ROWS,)
            proven &= set(proven_counts(product, rows, counts))
    return tuple(sorted(proven)) or (CANONICAL_ROWS,)


def _batched(operand: Tensor, batch: int) -> Product:
    """Return the product of rows with each matrix of ``operand``, ``batch`` of them at a time."""

    def product(rows: Tensor) -> Tensor:
        parts = (rows.expand(len(part), -1, -1).bmm(part) for part in operand.split(batch))
        return torch.cat(list(parts)).transpose(0, 1)

    return product
