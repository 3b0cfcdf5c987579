"""What requests in flight leave of a replica's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.footprint import Footprint, Footprints
from support.fleet_state import A, B, blocks

if TYPE_CHECKING:
    from state.model import BlockId

BLOCK = 64


def take(book: Footprints, chain: tuple[BlockId, ...], output_tokens: int = 0) -> Footprint:
    return book.take(A, (chain,), BLOCK, len(chain) * BLOCK, output_tokens)


def room(book: Footprints, capacity_blocks: int, chain: tuple[BlockId, ...]) -> int | None:
    return book.room_tokens(A, capacity_blocks * BLOCK, (chain,), BLOCK, len(chain) * BLOCK)


def test_what_fits_beside_the_others_keeps_all_of_its_cache() -> None:
    book = Footprints()
    assert room(book, 1, blocks(5, 6, 7)) is None
    take(book, blocks(0, 1, 2))
    assert room(book, 6, blocks(5, 6, 7)) is None


def test_what_does_not_fit_keeps_what_the_others_leave_when_they_end() -> None:
    book = Footprints()
    take(book, blocks(0, 1, 2), output_tokens=70)
    assert room(book, 6, blocks(5, 6, 7)) == 3 * BLOCK - 70
    take(book, blocks(8, 9), output_tokens=70)
    assert room(book, 6, blocks(5, 6, 7)) == 0
    assert book.room_tokens(B, 64, (blocks(5),), BLOCK, 128) is None


def test_shared_blocks_count_once_and_stay() -> None:
    book = Footprints()
    for tail in range(10, 30):
        take(book, blocks(0, 1, 2, tail))
    assert room(book, 24, blocks(0, 1, 2, 3)) is None
    assert room(book, 20, blocks(0, 1, 2, 3)) == 3 * BLOCK
    assert room(book, 20, blocks(0, 9)) == BLOCK


def test_an_ended_request_takes_up_nothing_and_ends_once() -> None:
    book = Footprints()
    first, second = take(book, blocks(0, 1)), take(book, blocks(0, 1, 2))
    assert first.end(None)
    assert not first.end(None)
    assert room(book, 4, blocks(7, 8)) == BLOCK
    assert second.end(None)
    assert room(book, 1, blocks(7, 8)) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(0, 4), st.integers(4, 40)),
        max_size=30,
    )
)
def test_asking_early_or_late_gives_the_same_room(
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Blocks are counted from the first question on; a book that was asked all along agrees."""
    asked, fresh = Footprints(), Footprints()
    running: list[tuple[Footprint, Footprint]] = []
    for length, branch, ends, capacity in requests:
        chain = blocks(*range(branch * 100, branch * 100 + length))
        running.append((take(asked, chain, length), take(fresh, chain, length)))
        room(asked, capacity, blocks(0, 100, 300))
        for _ in range(min(ends, len(running))):
            for footprint in running.pop(0):
                footprint.end(None)
    for capacity in (2, 10, 30):
        assert room(asked, capacity, blocks(0, 1, 300)) == room(fresh, capacity, blocks(0, 1, 300))


@pytest.mark.parametrize(("most", "expected"), [(None, 100), (40, 40), (4_000, 100)])
def test_the_length_of_an_answer_is_expected_from_those_before(
    most: int | None, expected: int
) -> None:
    book = Footprints()
    assert book.expected_output_tokens(most) == 0
    for _ in range(3):
        take(book, blocks(0)).end(100)
    assert book.expected_output_tokens(most) == expected


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.booleans()), max_size=30))
def test_nothing_is_left_when_all_have_ended(
    requests: list[tuple[int, int, bool]],
) -> None:
    book = Footprints()
    running: list[Footprint] = []
    for length, branch, ends_another in requests:
        running.append(take(book, blocks(*range(branch * 100, branch * 100 + length)), length))
        if ends_another:
            assert running.pop(0).end(length)
    for footprint in running:
        assert footprint.end(None)
    assert book.room_tokens(A, 0, (blocks(1),), BLOCK, BLOCK) is None
