from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.pool import PageId, PagePool, PoolError

if TYPE_CHECKING:
    from sidecar.journal import Transition


def _conserved(pool: PagePool) -> tuple[int, int, int]:
    pool.audit()
    return pool.free_pages, pool.held_pages, pool.cached_pages


def test_a_taken_page_is_held_and_a_released_one_is_free() -> None:
    pool = PagePool(4)
    taken = pool.take(3)
    assert len(set(taken.pages)) == 3
    assert taken.evicted == []
    assert _conserved(pool) == (1, 3, 0)
    pool.release(taken.pages)
    assert _conserved(pool) == (4, 0, 0)


def test_a_released_page_with_reusable_content_is_cached_and_can_be_shared_again() -> None:
    pool = PagePool(2)
    page = pool.take(1).pages[0]
    pool.index((page,))
    pool.release([page])
    assert _conserved(pool) == (1, 0, 1)
    pool.share([page])
    pool.share([page])
    assert pool.references(page) == 2
    assert _conserved(pool) == (1, 1, 0)
    pool.release([page])
    assert _conserved(pool) == (1, 1, 0)
    pool.release([page])
    assert _conserved(pool) == (1, 0, 1)


def test_free_pages_go_first_and_then_the_least_recently_released() -> None:
    pool = PagePool(4)
    pages = pool.take(3).pages
    for page in pages:
        pool.index((page,))
    pool.release([pages[2], pages[0], pages[1]])
    first = pool.take(1)
    assert first.evicted == []
    assert first.pages[0] not in pages
    assert pool.take(2).evicted == [pages[2], pages[0]]
    assert _conserved(pool) == (0, 3, 1)


def test_sharing_a_cached_page_saves_it_from_eviction() -> None:
    pool = PagePool(2)
    old, new = pool.take(2).pages
    for page in (old, new):
        pool.index((page,))
    pool.release([old, new])
    pool.share([old])
    pool.release([old])
    assert pool.take(1).evicted == [new]


def test_forgetting_content_frees_cached_pages_and_keeps_held_ones() -> None:
    pool = PagePool(3)
    held, cached = pool.take(2).pages
    for page in (held, cached):
        pool.index((page,))
    pool.release([cached])
    pool.forget_content()
    assert _conserved(pool) == (2, 1, 0)
    pool.release([held])
    assert _conserved(pool) == (3, 0, 0)


def test_a_page_cannot_be_released_twice() -> None:
    pool = PagePool(1)
    pages = pool.take(1).pages
    pool.release(pages)
    with pytest.raises(PoolError, match="more often"):
        pool.release(pages)


def test_a_free_page_can_be_neither_shared_nor_made_reusable() -> None:
    pool = PagePool(1)
    with pytest.raises(PoolError, match="free"):
        pool.share([PageId(0)])
    with pytest.raises(PoolError, match="not held"):
        pool.index((PageId(0),))


def test_taking_more_than_there_is_changes_nothing() -> None:
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(PoolError, match="2 pages wanted, 1 available"):
        pool.take(2)
    assert _conserved(pool) == (1, 1, 0)


def test_a_lost_page_is_noticed_at_the_next_change() -> None:
    pool = PagePool(2)
    pool._free.pop()
    with pytest.raises(PoolError, match="are not 2"):
        pool.take(1)


def test_a_pool_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)


def test_a_holder_of_a_shared_page_goes_on_with_its_own_copy() -> None:
    told: list[Transition] = []
    pool = PagePool(3, journal=told.append)
    [source] = pool.take(1, holder="a").pages
    pool.fill((source,))
    pool.share((source,), "b")
    [target] = pool.take(1, holder="b", how="append").pages
    pool.replace(source, target, "b")
    assert (pool.references(source), pool.references(target)) == (1, 1)
    assert pool.states()["used"] == 2
    assert (told[-1].op, told[-1].pages, told[-1].targets) == ("copy", [source], [target])
    with pytest.raises(PoolError, match="not shared"):
        pool.replace(source, target, "b")
    pool.audit()
