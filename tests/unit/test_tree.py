from __future__ import annotations

import pytest

from sidecar.cache import PagedCache
from sidecar.pagechange import PagesCleared, PagesRemoved, PagesStored
from sidecar.pool import PageId, PoolError
from sidecar.scope import Place
from sidecar.tree import PageFacts, PrefixTree
from state.model import BlockId
from state.prefix import chain_of, pack_tokens, unpack_tokens

ROOT = BlockId(b"root".ljust(16))
PLACE = Place(ROOT)
FACTS = PageFacts(None, b"", 0)
A, B, C = (BlockId(name * 16) for name in (b"a", b"b", b"c"))


def test_the_match_ends_at_the_first_hole_and_at_the_limit() -> None:
    tree = PrefixTree()
    tree.insert(PageId(0), A, FACTS)
    tree.insert(PageId(2), C, FACTS)
    assert tree.match([A, B, C], 3) == [0]
    tree.insert(PageId(1), B, FACTS)
    assert tree.match([A, B, C], 3) == [0, 1, 2]
    assert tree.match([A, B, C], 2) == [0, 1]


def test_a_prefix_with_two_copies_survives_the_loss_of_one() -> None:
    tree = PrefixTree()
    tree.insert(PageId(0), A, FACTS)
    tree.insert(PageId(1), A, FACTS)
    assert tree.copies() == {A: 2}
    assert tree.remove(PageId(0)) == (A, FACTS, 1)
    assert tree.match([A], 1) == [1]
    assert tree.remove(PageId(1)) == (A, FACTS, 0)
    assert tree.match([A], 1) == []


def test_a_page_is_indexed_once() -> None:
    tree = PrefixTree()
    tree.insert(PageId(0), A, FACTS)
    with pytest.raises(PoolError, match="already"):
        tree.insert(PageId(0), B, FACTS)


def _run(cache: PagedCache, token_ids: range, salt: str | None = None) -> int:
    """Compute a prompt and let it go; return the reused tokens."""
    table = cache.open_table(pack_tokens(token_ids), PLACE, salt)
    acquired = cache.acquire(table)
    assert acquired is not None
    cache.index(table, len(token_ids))
    cache.release(table)
    cache.pool.audit()
    return acquired.reused_tokens


def test_a_prompt_of_100_tokens_on_pages_of_32_stores_three_pages() -> None:
    cache = PagedCache(8, 32)
    assert _run(cache, range(100)) == 0
    keys = chain_of(ROOT, pack_tokens(range(100)), 32, 0)
    assert len(keys) == 3
    assert cache.drain_changes() == [PagesStored(keys, None, list(range(96)))]
    assert _run(cache, range(100)) == 96
    assert cache.drain_changes() == []


def test_a_prompt_of_exactly_k_pages_recomputes_its_last_page_as_a_second_copy() -> None:
    """A81: each copy announces itself, so the first removal does not mean that it is gone."""
    cache = PagedCache(8, 32)
    _run(cache, range(96))
    cache.drain_changes()
    assert _run(cache, range(96)) == 64
    keys = chain_of(ROOT, pack_tokens(range(96)), 32, 0)
    assert cache.drain_changes() == [PagesStored(keys[2:], keys[1], list(range(64, 96)))]
    assert cache.tree.copies() == {keys[0]: 1, keys[1]: 1, keys[2]: 2}


def test_children_are_evicted_before_their_parents() -> None:
    cache = PagedCache(4, 4)
    _run(cache, range(16))
    keys = chain_of(ROOT, pack_tokens(range(16)), 4, 0)
    cache.drain_changes()
    _run(cache, range(100, 108))
    assert cache.drain_changes()[0] == PagesRemoved((keys[3], keys[2]))
    assert _run(cache, range(9)) == 8


def test_a_shared_prefix_outlives_the_tails_that_hang_on_it() -> None:
    cache = PagedCache(6, 4)
    _run(cache, range(8))
    _run(cache, [*range(4), *range(50, 58)])  # type: ignore[arg-type]
    cache.drain_changes()
    _run(cache, range(100, 116))
    removed = [change for change in cache.drain_changes() if isinstance(change, PagesRemoved)]
    shared = chain_of(ROOT, pack_tokens(range(4)), 4, 0)[0]
    assert all(shared not in change.keys for change in removed)


def test_only_the_start_of_a_salted_prompt_carries_the_salt() -> None:
    cache = PagedCache(4, 4)
    table = cache.open_table(pack_tokens(range(8)), PLACE, "tenant-a")
    cache.acquire(table)
    cache.index(table, 4)
    cache.index(table, 8)
    first, second = cache.drain_changes()
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    assert (first.parent, first.salt) == (None, "tenant-a")
    assert (second.parent, second.salt) == (first.keys[-1], None)


def test_after_a_reset_a_running_sequence_indexes_nothing_more() -> None:
    cache = PagedCache(4, 4)
    table = cache.open_table(pack_tokens(range(12)), PLACE)
    cache.acquire(table)
    cache.index(table, 4)
    cache.reset()
    cache.index(table, 12)
    assert isinstance(cache.drain_changes()[-1], PagesCleared)
    cache.release(table)
    assert cache.pool.free_pages == 4
    assert _run(cache, range(12)) == 0


def test_a_prompt_without_room_changes_nothing() -> None:
    cache = PagedCache(4, 4)
    _run(cache, range(8))
    held = cache.open_table(pack_tokens(range(100, 108)), PLACE)
    cache.acquire(held)
    waiting = cache.open_table(pack_tokens([*range(8), *range(8)]), PLACE)
    assert cache.acquire(waiting) is None
    assert waiting.pages == []
    assert cache.pool.cached_pages == 2
    cache.pool.audit()


def test_tokens_are_unpacked_as_they_were_packed() -> None:
    token_ids = [0, 1, 255, 65_536, 2**32 - 1]
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids
