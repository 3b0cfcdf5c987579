"""Matrix products whose every row comes out the same, bit for bit, whatever rows are beside it.

A BLAS may add up a row's products in another order when the matrices have other shapes. So
products are computed in tiles of a few fixed numbers of rows, and a number is used only if it was
seen to give the bits of the canonical one, for each row and each place in the tile. Which order a
BLAS takes depends on shapes and not on values: random values show it. If even the canonical tile
gives a row other bits at another place, rows are multiplied one at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

CANONICAL_ROWS: Final = 16
LINEAR_ROWS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
PROOF_TILES: Final = 2
PROOF_VALUES: Final = 1 << 23
"""No proof makes a larger product than this: a head of a large vocabulary is used on few rows."""


def proven_rows(
    product: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    rows: NDArray[np.float32],
    canonical: int,
    candidates: Sequence[int],
) -> tuple[int, ...]:
    """Return the numbers of rows that may be given to ``product`` at once, ascending.

    ``product`` maps each row of an array to a row of its result; ``rows`` are random ones to try it
    with: a multiple of ``canonical`` and at least the largest candidate. Only 1 is returned if
    ``canonical`` itself does not prove invariant: a row must have its bits at every place of a tile
    of copies, and beside other rows.
    """
    expected = _in_tiles(product, rows, canonical)
    alike = product(np.repeat(rows[:1], canonical, axis=0))
    if not (alike == expected[0]).all():
        return (1,)
    return tuple(
        count
        for count in sorted({*candidates, canonical})
        if _has_bits(product, rows[: PROOF_TILES * count], count, expected)
    )


def _has_bits(
    product: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    rows: NDArray[np.float32],
    count: int,
    expected: NDArray[np.float32],
) -> bool:
    """Return whether tiles of ``count`` rows give ``expected``."""
    found = _in_tiles(product, rows, count)
    return np.array_equal(found, expected[: len(found)])


def _in_tiles(
    product: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    rows: NDArray[np.float32],
    count: int,
) -> NDArray[np.float32]:
    """Return the product of as many of ``rows`` as fill tiles of ``count``."""
    firsts = range(0, len(rows) - count + 1, count)
    return np.concatenate([product(rows[first : first + count]) for first in firsts])


def rounded_up(count: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is at least ``count``."""
    return -(-count // unit) * unit


def tiles_of(rows_count: int, proven: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cover ``rows_count`` rows: returns (first, end, tile rows), the last tile perhaps not filled.

    A rest goes into the smallest of the ``proven`` (ascending) numbers that holds it.
    """
    tiles = []
    first = 0
    while first < rows_count:
        rest = rows_count - first
        count = next((each for each in proven if each >= rest), proven[-1])
        end = min(first + count, rows_count)
        tiles.append((first, end, count))
        first = end
    return tiles


class Linear:
    """``x @ weight.T + bias`` for rows that are independent of each other, bit for bit."""

    def __init__(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, proofs: Proofs
    ) -> None:
        self._transposed = weight.T
        self._bias = bias
        self._proven = proofs.linear_rows(weight)

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return float32 ``(rows, outputs)`` for contiguous float32 ``(rows, inputs)``."""
        result = np.empty((len(rows), self._transposed.shape[1]), dtype=np.float32)
        for first, end, count in tiles_of(len(rows), self._proven):
            if end - first == count:
                np.matmul(rows[first:end], self._transposed, out=result[first:end])
                continue
            padded = np.zeros((count, rows.shape[1]), dtype=np.float32)
            padded[: end - first] = rows[first:end]
            result[first:end] = np.matmul(padded, self._transposed)[: end - first]
        if self._bias is not None:
            result += self._bias
        return result


class Proofs:
    """What was proven for each shape of weights, so that each is tried once."""

    def __init__(self, largest_rows: int) -> None:
        self._candidates = [rows for rows in LINEAR_ROWS if rows <= largest_rows]
        self._random = np.random.Generator(np.random.PCG64(0))
        self._linear: dict[tuple[int, ...], tuple[int, ...]] = {}

    def rows(self, *shape: int) -> NDArray[np.float32]:
        """Return random values."""
        return self._random.standard_normal(shape, dtype=np.float32)

    def linear_rows(self, weight: NDArray[np.float32]) -> tuple[int, ...]:
        """Return the numbers of rows that may be multiplied with ``weight`` at once."""
        if weight.shape not in self._linear:
            most = max(CANONICAL_ROWS, PROOF_VALUES // len(weight))
            candidates = [rows for rows in self._candidates if rows <= most]
            largest = max(CANONICAL_ROWS, *candidates)
            rows = self.rows(rounded_up(largest, CANONICAL_ROWS), weight.shape[1])
            self._linear[weight.shape] = proven_rows(
                lambda tile: np.matmul(tile, weight.T), rows, CANONICAL_ROWS, candidates
            )
        return self._linear[weight.shape]
