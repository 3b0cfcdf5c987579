"""Pages that come back after they were evicted are counted, and nothing else is taken for one."""

from __future__ import annotations

from sidecar.event import ClearedPages, RemovedPages, StoredPages
from sidecar.fold import PageFolder
from state.model import ModelIdentity, Tier
from state.prefix import pack_tokens, salt_scope

IDENTITY = ModelIdentity(model="m", block_tokens=2)


def store(handle: int, *, tier: Tier = Tier.GPU, salt: str = "") -> StoredPages:
    return StoredPages(
        handles=(handle,),
        parent=None,
        packed_tokens=pack_tokens([handle, handle]),
        page_tokens=2,
        scope=salt_scope(salt),
        tier=tier,
    )


def remove(handle: int, tier: Tier = Tier.GPU) -> RemovedPages:
    return RemovedPages(handles=(handle,), tier=tier)


def test_a_page_that_is_computed_again_after_its_eviction_is_counted_once() -> None:
    pages = PageFolder(IDENTITY, 2)
    pages.apply([store(1), store(2), remove(1)])
    assert (pages.counts.stored_pages, pages.counts.removed_pages) == (2, 1)
    pages.apply([store(3)])
    assert pages.counts.returned_pages == 0
    pages.apply([store(1)])
    assert pages.counts.returned_pages == 1
    pages.apply([store(1), remove(1), store(1)])  # a second copy came and went
    assert pages.counts.returned_pages == 1
    assert (pages.counts.stored_pages, pages.counts.removed_pages) == (6, 2)


def test_a_page_that_waited_in_a_lower_tier_was_not_lost() -> None:
    """B23: brought back, not computed."""
    pages = PageFolder(IDENTITY, 2)
    pages.apply([store(1), store(1, tier=Tier.HOST), remove(1), store(1)])
    assert pages.counts.returned_pages == 0
    pages.apply([remove(1), remove(1, Tier.HOST), store(1)])
    assert pages.counts.returned_pages == 0  # its end in host memory is no eviction from the GPU
    pages.apply([remove(1), store(1)])
    assert pages.counts.returned_pages == 1
    pages.apply([store(2), remove(2), store(2, tier=Tier.HOST), store(2)])
    assert pages.counts.returned_pages == 1


def test_a_cache_that_was_emptied_on_purpose_evicted_nothing() -> None:
    pages = PageFolder(IDENTITY, 2)
    pages.apply([store(1), store(2), remove(2), ClearedPages(), store(1), store(2)])
    assert pages.counts.returned_pages == 0


def test_pages_are_counted_by_whether_they_have_a_salt() -> None:
    pages = PageFolder(IDENTITY, 2)
    assert pages.pages_by_salt() == (0, 0)
    pages.apply([store(1), store(2, salt="a"), store(3, salt="b"), store(4, salt="b")])
    assert pages.pages_by_salt() == (1, 3)
    pages.apply([remove(3), remove(1)])
    assert pages.pages_by_salt() == (0, 2)
