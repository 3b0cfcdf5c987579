from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sidecar.compute.numpy_runner import limit_blas_threads
from sidecar.compute.tile import CANONICAL_ROWS, Linear, Proofs, proven_rows, tiles_of

Rows = NDArray[np.float32]


def random_rows(*shape: int) -> Rows:
    return np.random.Generator(np.random.PCG64(4)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(13, 7), (48, 80), (64, 33), (192, 256), (512, 192), (768, 259)]
)
def test_a_row_is_multiplied_the_same_wherever_it_stands(inputs: int, outputs: int) -> None:
    weight, rows = random_rows(outputs, inputs), random_rows(300, inputs)
    linear = Linear(weight, None, Proofs(256))
    expected = linear(rows)
    assert expected == pytest.approx(rows @ weight.T, abs=1e-3)
    for first, end in [(0, 1), (7, 8), (3, 9), (5, 22), (0, 64), (100, 201), (299, 300)]:
        assert np.array_equal(linear(rows[first:end].copy()), expected[first:end])
    order = np.random.Generator(np.random.PCG64(6)).permutation(300)
    assert np.array_equal(linear(rows[order]), expected[order])


def test_threads_of_the_blas_change_no_bit_within_a_process() -> None:
    weight, rows = random_rows(768, 192), random_rows(200, 192)
    limit_blas_threads(2)
    try:
        linear = Linear(weight, None, Proofs(96))
        expected = linear(rows)
        for first, end in [(0, 1), (5, 22), (100, 196)]:
            assert np.array_equal(linear(rows[first:end].copy()), expected[first:end])
    finally:
        limit_blas_threads(1)


def test_a_bias_is_added_to_every_row() -> None:
    weight, bias, rows = random_rows(5, 8), random_rows(5), random_rows(20, 8)
    plain, biased = Linear(weight, None, Proofs(16)), Linear(weight, bias, Proofs(16))
    assert np.array_equal(biased(rows), plain(rows) + bias)


def test_no_rows_give_no_rows() -> None:
    assert Linear(random_rows(5, 8), None, Proofs(16))(random_rows(0, 8)).shape == (0, 5)


def test_a_number_of_rows_with_other_bits_is_not_used() -> None:
    def product(rows: Rows) -> Rows:
        return rows * np.float32(1.0000001) if len(rows) in {8, 64} else rows

    rows = random_rows(64, 3)
    assert proven_rows(product, rows, CANONICAL_ROWS, (4, 8, 32, 64)) == (4, 16, 32)


def test_a_difference_in_any_place_of_a_tile_is_seen() -> None:
    for place in range(32):

        def product(rows: Rows, place: int = place) -> Rows:
            result = rows.copy()
            if len(rows) == 32:
                result[place, 0] = np.nextafter(result[place, 0], np.float32(9))
            return result

        assert proven_rows(product, random_rows(32, 3), CANONICAL_ROWS, (32,)) == (16,)


def test_rows_go_one_by_one_where_their_place_changes_them() -> None:
    def product(rows: Rows) -> Rows:
        result = rows.copy()
        result[3:4] *= np.float32(1.0000001)
        return result

    assert proven_rows(product, random_rows(64, 3), CANONICAL_ROWS, (1, 16, 32)) == (1,)


def test_rows_go_one_by_one_where_others_change_them() -> None:
    def product(rows: Rows) -> Rows:
        moved: Rows = rows + rows.sum() * np.float32(1e-6)
        return moved

    assert proven_rows(product, random_rows(64, 3), CANONICAL_ROWS, (1, 16, 32)) == (1,)


@pytest.mark.parametrize("rows_count", [1, 3, 16, 17, 255, 256, 257, 1000])
@pytest.mark.parametrize("proven", [(1,), (16,), (1, 4, 16, 64), (16, 32, 256)])
def test_tiles_cover_every_row_once(rows_count: int, proven: tuple[int, ...]) -> None:
    tiles = tiles_of(rows_count, proven)
    covered = [row for first, end, _ in tiles for row in range(first, end)]
    assert covered == list(range(rows_count))
    assert all(count in proven and end - first <= count for first, end, count in tiles)
    assert all(end - first == count for first, end, count in tiles[:-1])


def test_rows_go_into_the_smallest_tile_that_holds_them() -> None:
    assert tiles_of(16, (1, 4, 16, 64)) == [(0, 16, 16)]
    assert tiles_of(67, (1, 4, 16, 64)) == [(0, 64, 64), (64, 67, 4)]


@pytest.mark.parametrize("function", [np.exp, np.square, np.sqrt])
def test_an_element_does_not_depend_on_its_place(function: np.ufunc) -> None:
    values = np.abs(random_rows(1000)) * 20
    whole = function(values)
    for first in (*range(70), 900, 999):
        for length in (1, 2, 7, 8, 15, 16, 33):
            part = function(values[first : first + length].copy())
            assert np.array_equal(part, whole[first : first + length])


@pytest.mark.parametrize("width", [1, 7, 8, 12, 64, 127, 128, 192, 1000, 4096, 9000])
def test_the_sum_of_a_row_does_not_depend_on_other_rows(width: int) -> None:
    rows = random_rows(40, width)
    sums = rows.sum(axis=-1, keepdims=True)
    for place in range(40):
        assert np.array_equal(rows[place : place + 1].sum(axis=-1, keepdims=True)[0], sums[place])
    by_head = rows.reshape(4, 10, width).sum(axis=-1, keepdims=True)
    assert np.array_equal(by_head.reshape(40, 1), sums)
