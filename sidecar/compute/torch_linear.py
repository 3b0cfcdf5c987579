"""Products with weights in torch, whose every row comes out the same whatever rows are beside it.

On a processor the weights are laid out for oneDNN once, which makes a product with few rows as fast
as memory allows; where this torch cannot do that, the plain product is taken. Libraries choose
their kernels by shape, so which numbers of rows give the same bits is tried out with the weights'
own shapes before they are used (``proven_counts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from sidecar.compute.torch_package import torch

Tensor = Any
Product = Callable[[Tensor], Tensor]

CANONICAL_ROWS: Final = 16
PACKED_FOR_ROWS: Final = 16
"""The layout suits other numbers of rows as well."""
TRIED_SEED: Final = 0
MOVED_ROWS: Final = 5
"""Moves a row to another place in the tile and in the registers."""


class Linear:
    """``x W^T + b`` for rows ``x``; weights are (outputs, inputs), the bias (outputs,) or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self._bias = bias
        self._packed = _packed(weight)
        self._weight = weight if self._packed is None else None

    def __call__(self, rows: Tensor) -> Tensor:
        """Return (R, outputs) for (R, inputs)."""
        if self._packed is None:
            return torch.nn.functional.linear(rows, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - torch's compiler calls it too
            rows, self._packed, self._bias, "none", [], ""
        )

    def in_tiles(self, rows: Tensor, tile_rows: int) -> Tensor:
        """Return the product, computed in tiles of at most ``tile_rows``."""
        if len(rows) <= tile_rows:
            return self(rows)
        return torch.cat([self(tile) for tile in rows.split(tile_rows)])


def _packed(weight: Tensor) -> Tensor | None:
    """Return the weight in oneDNN's layout; None where there is no such thing."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)  # noqa: SLF001
    except (AttributeError, NotImplementedError, RuntimeError):  # not built in; no such dtype here
        return None


def proven_counts(
    product: Product, rows: Tensor, counts: Sequence[int], canonical: int = CANONICAL_ROWS
) -> tuple[int, ...]:
    """Return those of ``counts`` that may be the number of rows of ``product``.

    ``rows`` are random ones, as many as the largest count. Each row must have the bits that it has
    in a tile of ``canonical`` rows. Only ``canonical`` is returned if a row's place in that tile
    matters, because then nothing can be known; it is the best there is.
    """
    expected = _in_tiles(product, rows, canonical)
    moved = _in_tiles(product, rows.roll(MOVED_ROWS, 0), canonical).roll(-MOVED_ROWS, 0)
    if not torch.equal(moved, expected):
        return (canonical,)
    return tuple(count for count in counts if torch.equal(product(rows[:count]), expected[:count]))


def _in_tiles(product: Product, rows: Tensor, tile_rows: int) -> Tensor:
    whole = len(rows) // tile_rows * tile_rows
    return torch.cat([product(tile) for tile in rows[:whole].split(tile_rows)])


def common_counts(products: Sequence[Linear], counts: Sequence[int]) -> tuple[int, ...]:
    """Return those of ``counts`` that are proven for every shape among ``products``."""
    shapes = {(one.outputs, one.inputs): one for one in products}
    proven = set(counts)
    generator = torch.Generator().manual_seed(TRIED_SEED)
    for one in shapes.values():
        rows = torch.randn(counts[-1], one.inputs, generator=generator).to(one.device, one.dtype)
        proven &= set(proven_counts(one, rows, counts))
    return tuple(sorted(proven)) or (CANONICAL_ROWS,)
