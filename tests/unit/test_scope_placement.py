"""S-08: placements of one scope displace nothing of another one's, and end with their scope."""

from __future__ import annotations

import tracemalloc

import pytest

from state.model import BlockId, ReplicaId
from state.placement import BLOCK_BYTES, Placements, fair_share
from state.scope_placement import ScopedPlacements
from support.fleet_state import A, B, block

FLOOD_BLOCKS = 100_000
CHAIN_BLOCKS = 100
BOUND = 2_000


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> tuple[BlockId, ...]:
    """Return a chain that shares nothing with those of other numbers."""
    return tuple(block(number * 1_000_000 + depth) for depth in range(1, blocks + 1))


def tick(books: ScopedPlacements, now_s: float = 0.0) -> None:
    """Do what the router does every few milliseconds."""
    books.settle(lambda _, __: False, now_s)


def test_a_flood_of_one_scope_leaves_what_another_one_placed() -> None:
    """S-08: 10^5 unique blocks; without books of their own all of it would be gone."""
    books, shared = ScopedPlacements(600.0, {"tenant:a": BOUND}), Placements(600.0, 10_000)
    books.limit(A, 600.0, 10_000)
    mine = [chain(number) for number in range(1, 6)]
    for one in mine:
        books.of("tenant:b").place(A, one, 0.0)
        shared.place(A, one, 0.0)
    for number in range(FLOOD_BLOCKS // CHAIN_BLOCKS):
        books.of("tenant:a").place(A, chain(1_000 + number), 0.0)
        shared.place(A, chain(1_000 + number), 0.0)
        if number % 10 == 0:
            tick(books)
            assert books.of("tenant:a").blocks <= BOUND
    for one in mine:
        assert books.of("tenant:b").overlap(one, 0.0) == {A: CHAIN_BLOCKS}
        assert books.of("tenant:a").overlap(one, 0.0) == {}
        assert shared.overlap(one, 0.0) == {}
    last = chain(1_000 + FLOOD_BLOCKS // CHAIN_BLOCKS - 1)
    assert books.of("tenant:a").overlap(last, 0.0) == {A: CHAIN_BLOCKS}


def test_a_bound_holds_over_all_replicas_and_whoever_has_most_gives_way() -> None:
    """A scope may have its blocks wherever it likes, but no more of them."""
    books = ScopedPlacements(600.0, {"tenant:a": 500})
    for replica, chains in ((A, 4), (B, 2)):
        for number in range(chains):
            books.of("tenant:a").place(replica, chain(number + 10 * chains), 0.0)
    assert books.of("tenant:a").blocks == 600
    tick(books)
    assert (books.resident(A), books.resident(B)) == (300, 200)
    assert books.of("tenant:a").overlap(chain(43), 0.0) == {A: CHAIN_BLOCKS}
    assert books.of("tenant:a").overlap(chain(40), 0.0) == {}


def test_all_scopes_together_hold_no_more_than_a_replica_has() -> None:
    """Without a bound of their own, too: the largest gives way, the small ones lose nothing."""
    books = ScopedPlacements(600.0, {})
    for number in range(30):
        books.of("tenant:a").place(A, chain(number), 0.0)
    for number in range(3):
        books.of("tenant:b").place(A, chain(100 + number), 0.0)
    books.limit(A, 600.0, 1_000)
    tick(books)
    assert books.resident(A) == 1_000
    assert books.of("tenant:b").blocks == 300


def test_what_ends_is_gone_and_only_that() -> None:
    """S-10: whatever was placed for a scope, on every replica; its next book begins with limits."""
    books = ScopedPlacements(600.0, {})
    books.limit(A, 600.0, 50)
    for replica in (A, B):
        books.of("tenant:a").place(replica, chain(1), 0.0)
        books.of("tenant:b").place(replica, chain(2), 0.0)
    assert books.end("tenant:a") == 150
    assert books.end("tenant:a") == 0
    assert books.of("tenant:a").overlap(chain(1), 0.0) == {}
    assert books.of("tenant:b").overlap(chain(2), 0.0) == {A: 50, B: CHAIN_BLOCKS}
    books.of("tenant:a").place(A, chain(1), 0.0)
    assert books.of("tenant:a").blocks == 50


def test_a_replica_that_began_anew_is_forgotten_in_every_book() -> None:
    """And settled placements end in each of them."""
    books = ScopedPlacements(600.0, {})
    for scope in ("tenant:a", "tenant:b"):
        book = books.of(scope)
        book.place(A, chain(1), 0.0)
        book.await_news(book.place(B, chain(1), 0.0), 0.0)
    books.forget(A)
    assert (books.resident(A), books.resident(B)) == (0, 200)
    books.settle(lambda replica, _: replica == B, 0.0)
    assert books.resident(B) == 0


def test_what_is_too_old_goes_also_where_nobody_looks() -> None:
    """An idle scope does not keep its blocks for ever."""
    books = ScopedPlacements(10.0, {})
    for number in range(5):
        books.of(f"tenant:{number}").place(A, chain(number), 0.0)
    for _ in range(5):
        tick(books, 11.0)
    assert books.resident(A) == 0


@pytest.mark.parametrize(
    ("sizes", "capacity", "share"),
    [([], 5, 0), ([3, 4], 10, 4), ([9, 1], 6, 5), ([9, 9, 9], 9, 3), ([5, 2, 8], 10, 4)],
)
def test_a_fair_share_is_the_largest_that_fits(sizes: list[int], capacity: int, share: int) -> None:
    """Whoever has less keeps all."""
    assert fair_share(sizes, capacity) == share
    assert sum(min(size, share) for size in sizes) <= capacity


@pytest.mark.parametrize(("blocks", "least"), [(1, 0.8), (CHAIN_BLOCKS, 0.1)])
def test_a_block_on_record_takes_no_more_than_it_is_counted_for(blocks: int, least: float) -> None:
    """The bound is in bytes: the estimate is not below what the process really uses."""
    books = ScopedPlacements(600.0, {})
    book = books.of("tenant:a")
    tracemalloc.start()
    try:
        for number in range(20_000 // blocks):
            book.place(ReplicaId("a"), chain(number, blocks), 0.0)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert least * BLOCK_BYTES < used_bytes / book.blocks <= BLOCK_BYTES
