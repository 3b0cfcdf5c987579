"""What each eviction policy promises, and who loses under it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.cache import PagedCache
from sidecar.eviction import ByteBenefit, LeastRecentlyUsed, TenantQuota
from sidecar.pool import PageId, PagePool
from sidecar.scheduler import NeverFitsError, Scheduler
from sidecar.scope import Place
from sidecar.step import SchedulerLimits
from state.model import BlockId
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from sidecar.eviction import Eviction

PAGE_TOKENS = 4


class Costs:
    """Each token costs 1 ms, and 0.1 ms for each token before it."""

    def fetch_ms(self, source: str, pages: int) -> float:
        return float(pages) if source else 0.0

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        return tokens + 0.1 * tokens * context_tokens


def _cache(pages: int, eviction: Eviction) -> PagedCache:
    return PagedCache(pages, PAGE_TOKENS, eviction=eviction, costs=Costs())


def _place(tenant: str) -> Place:
    return Place(BlockId((tenant or "root").encode().ljust(16)), tenant=tenant)


def _run(cache: PagedCache, first: int, tokens: int, now_s: float = 0.0, tenant: str = "") -> int:
    """Compute a prompt of whole pages and one token; return the tokens that were there."""
    cache.now_s = now_s
    packed = pack_tokens(range(first, first + tokens + 1))
    table = cache.open_table(packed, _place(tenant), tenant or None, "r")
    acquired = cache.acquire(table)
    assert acquired is not None
    cache.index(table, tokens + 1)
    cache.fill(table, 0, tokens + 1)
    cache.release(table)
    cache.pool.audit()
    return acquired.reused_tokens


def _held(cache: PagedCache, first: int, tokens: int, tenant: str = "") -> int:
    packed = pack_tokens(range(first, first + tokens))
    chain = cache.open_table(packed, _place(tenant)).chain
    return PAGE_TOKENS * len(cache.tree.match(chain, len(chain)))


def _owned_pages(pool: PagePool, tenant: str) -> int:
    return sum(pool.tenants().get(tenant, {}).values())


def test_under_lru_a_large_prefix_that_rests_loses_everything_to_a_stream_of_small_ones() -> None:
    cache = _cache(17, LeastRecentlyUsed())
    for _ in range(5):
        _run(cache, 0, 48)
    for number in range(1, 9):
        _run(cache, 1000 * number, 8)
    assert _held(cache, 0, 48) == 0
    assert _held(cache, 8000, 8) == 8


def test_under_byte_benefit_the_same_prefix_stays_and_what_is_used_once_loses() -> None:
    cache = _cache(17, ByteBenefit())
    for _ in range(5):
        _run(cache, 0, 48)
    for number in range(1, 9):
        _run(cache, 1000 * number, 8)
    assert _held(cache, 0, 48) == 48
    assert _held(cache, 1000, 8) == 0


def test_under_byte_benefit_a_small_tenant_loses_to_a_busy_one_however_little_it_holds() -> None:
    cache = _cache(8, ByteBenefit())
    _run(cache, 0, 8, now_s=0.0, tenant="small")
    for second in range(1, 20):
        _run(cache, 1000 + 1000 * (second % 2), 12, now_s=second, tenant="busy")
    assert _held(cache, 0, 8, "small") < 8
    assert _held(cache, 1000, 12, "busy") == _held(cache, 2000, 12, "busy") == 12


def test_under_byte_benefit_old_uses_count_less_with_every_half_life() -> None:
    cache = _cache(7, ByteBenefit(half_life_s=10.0))
    for _ in range(8):
        _run(cache, 0, 12, now_s=0.0)
    _run(cache, 1000, 12, now_s=100.0)
    _run(cache, 2000, 12, now_s=100.0)
    assert (_held(cache, 0, 12), _held(cache, 1000, 12)) == (0, 12)


def test_under_byte_benefit_new_content_does_not_inherit_the_uses_of_the_old() -> None:
    policy = ByteBenefit()
    page, other = PageId(0), PageId(1)
    for second in range(9):
        policy.note_use([page], [5.0], float(second), are_new=second == 0)
    policy.note_use([page, other], [5.0, 5.0], 9.0, are_new=True)
    policy.note_use([other], [5.0], 10.0, are_new=False)
    for each in (other, page):
        policy.admit([(each, "")])
    assert [policy.victim("", {}) for _ in range(2)] == [page, other]


def test_under_byte_benefit_a_parent_outlives_its_children_though_they_are_worth_more() -> None:
    """The child goes first even when its parent was in use elsewhere as it was released."""
    cache = _cache(10, ByteBenefit())
    parent = cache.open_table(pack_tokens(range(6)), _place(""), None, "p")
    child = cache.open_table(pack_tokens(range(29)), _place(""), None, "c")
    for table in (parent, child):
        assert cache.acquire(table) is not None
        cache.index(table, table.total_tokens)
        cache.fill(table, 0, table.total_tokens)
    cache.release(child)
    cache.release(parent)
    _run(cache, 1000, 16)
    assert len(cache.tree.match(child.chain, 7)) == 5
    assert [len(cache.tree.match([key], 1)) for key in child.chain] == [1] * 5 + [0] * 2


def _owned(pool: PagePool, tenant: str, pages: int) -> list[PageId]:
    """Let ``tenant`` compute pages and let them go."""
    taken = pool.take(pages, tenant).pages
    pool.fill(taken)
    pool.index(taken)
    pool.release(taken[::-1])
    pool.audit()
    return taken


def test_under_quotas_nobody_at_or_below_its_quota_loses_a_page_to_others() -> None:
    pool = PagePool(10, TenantQuota({"a": 4, "b": 4}))
    _owned(pool, "a", 4)
    _owned(pool, "c", 6)
    assert pool.available_pages("b") == 6
    assert pool.available_pages("a") == 10
    _owned(pool, "b", 6)
    assert (_owned_pages(pool, "a"), _owned_pages(pool, "b"), _owned_pages(pool, "c")) == (4, 6, 0)
    assert pool.available_pages("c") == 2
    taken = pool.take(2, "c")
    assert len(taken.evicted) == 2
    assert (_owned_pages(pool, "a"), _owned_pages(pool, "b")) == (4, 4)
    assert pool.available_pages("c") == 0


def test_under_quotas_what_others_leave_unused_is_borrowed_and_given_back() -> None:
    pool = PagePool(10, TenantQuota({"a": 5, "b": 5}))
    borrowed = _owned(pool, "a", 10)
    assert _owned_pages(pool, "a") == 10
    taken = pool.take(5, "b")
    assert taken.evicted == borrowed[::-1][:5]
    assert (_owned_pages(pool, "a"), _owned_pages(pool, "b")) == (5, 5)
    assert pool.available_pages("b") == 0


def test_under_quotas_the_tenant_furthest_above_its_quota_gives_first() -> None:
    pool = PagePool(12, TenantQuota({"a": 2, "b": 4}))
    _owned(pool, "a", 5)
    _owned(pool, "b", 6)
    _owned(pool, "c", 1)
    losers = []
    for _ in range(6):
        before = {each: _owned_pages(pool, each) for each in "abc"}
        pool.take(1, "d")
        losers += [each for each in "abc" if _owned_pages(pool, each) < before[each]]
    assert losers == ["a", "a", "b", "a", "b", "c"]


def test_under_quotas_a_tenant_within_its_quota_reuses_its_own_oldest_page() -> None:
    pool = PagePool(4, TenantQuota({"a": 2, "b": 2}))
    mine = _owned(pool, "a", 2)
    theirs = _owned(pool, "b", 2)
    assert pool.take(1, "a").evicted == [mine[1]]
    assert not set(theirs) & set(pool.take(1, "a").pages)
    assert pool.available_pages("a") == 0


def test_under_quotas_a_prompt_that_needs_what_others_are_guaranteed_never_fits() -> None:
    eviction = TenantQuota({"a": 4, "b": 2})
    scheduler = Scheduler(PagedCache(8, PAGE_TOKENS, eviction=eviction), SchedulerLimits())
    assert [scheduler.most_pages(each) for each in ("a", "b", "")] == [6, 4, 2]
    scheduler.check_fits(16, 1, "b")
    with pytest.raises(NeverFitsError, match=r"4 pages of 4 tokens.*needs 5 pages"):
        scheduler.check_fits(17, 1, "b")
    with pytest.raises(NeverFitsError, match=r"6 of 8.*guaranteed to other tenants"):
        scheduler.check_fits(12, 1, "")


def test_two_tenants_that_ask_for_all_they_may_have_both_finish() -> None:
    eviction = TenantQuota({"a": 3, "b": 3})
    scheduler = Scheduler(PagedCache(6, PAGE_TOKENS, eviction=eviction), SchedulerLimits())
    for number in range(8):
        tenant = "ab"[number % 2]
        packed = pack_tokens(range(100 * number, 100 * number + 6))
        table = scheduler.cache.open_table(packed, _place(tenant), tenant, f"r{number}")
        scheduler.submit(table, 7)
    for _ in range(500):
        step = scheduler.schedule()
        assert step.works
        for sequence in scheduler.complete(step):
            scheduler.append(sequence, 7)
            if sequence.output_tokens == sequence.max_output_tokens:
                scheduler.end(sequence)
        scheduler.cache.pool.audit()
        if not scheduler.has_work:
            break
    assert scheduler.counters.generated_tokens == 56
