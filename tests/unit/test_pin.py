"""Pins: what they protect, until when, and in which order pages are let go afterwards."""

from __future__ import annotations

import pytest

from sidecar.eviction import ByteBenefit, Eviction, LeastRecentlyUsed, TenantQuota
from sidecar.pool import PagePool
from support.page_rig import PageRig

LONG, SHORT, OTHER = range(17), range(9), range(100, 113)


def _rig(pages: int = 12, eviction: Eviction | None = None) -> PageRig:
    rig = PageRig(pages, eviction=eviction)
    rig.answer(LONG)
    return rig


def _cached(rig: PageRig, tokens: range) -> int:
    chain = rig.table(tokens).chain
    return len(rig.cache.tree.match(chain, len(chain)))


def _press(rig: PageRig, prompts: int = 8) -> None:
    for number in range(prompts):
        rig.answer(range(1000 * number + 500, 1000 * number + 509))


@pytest.mark.parametrize("eviction", [LeastRecentlyUsed, ByteBenefit, lambda: TenantQuota({})])
def test_pinned_pages_stay_under_every_policy_until_the_deadline(eviction: type[Eviction]) -> None:
    rig = _rig(eviction=eviction())
    assert rig.cache.pin(rig.table(LONG), 10.0) == 4
    assert rig.cache.pool.states()["pinned"] == 4
    _press(rig)
    assert _cached(rig, LONG) == 4
    rig.cache.pool.expire_pins(9.9)
    assert rig.cache.pool.states()["pinned"] == 4
    rig.cache.pool.expire_pins(10.0)
    rig.audit()
    assert rig.cache.pool.states()["pinned"] == 0
    _press(rig)
    if not isinstance(rig.cache.pool.eviction, ByteBenefit):
        assert _cached(rig, LONG) == 0


def test_the_scheduler_ends_pins_when_their_time_has_come() -> None:
    rig = _rig()
    rig.cache.pin(rig.table(LONG), 10.0)
    rig.submit(range(50, 55))
    step = rig.scheduler.schedule(11.0)
    assert rig.cache.pool.pinned() == []
    rig.finish(step)


def test_a_pinned_page_may_be_shared_and_is_pinned_again_when_released() -> None:
    rig = _rig()
    rig.cache.pin(rig.table(LONG), 10.0)
    assert rig.answer(LONG) == 16
    assert rig.cache.pool.states()["pinned"] == 4


def test_a_shorter_pin_does_not_end_a_longer_one() -> None:
    rig = _rig()
    rig.cache.pin(rig.table(LONG), 10.0)
    rig.cache.pin(rig.table(LONG), 5.0)
    rig.cache.pool.expire_pins(6.0)
    assert rig.cache.pool.states()["pinned"] == 4
    rig.cache.pin(rig.table(LONG), 20.0)
    rig.cache.pool.expire_pins(10.0)
    assert rig.cache.pool.states()["pinned"] == 4
    rig.cache.pool.expire_pins(20.0)
    assert rig.cache.pool.states()["pinned"] == 0


def test_only_what_is_cached_is_pinned() -> None:
    rig = _rig()
    assert rig.cache.pin(rig.table(OTHER), 10.0) == 0
    assert rig.cache.pin(rig.table(range(30)), 10.0) == 4


@pytest.mark.parametrize("deadlines_s", [(5.0, 5.0), (5.0, 9.0), (9.0, 5.0)])
def test_children_are_evicted_before_their_parents_whatever_expired_first(
    deadlines_s: tuple[float, float],
) -> None:
    """Page numbers run against the order of the prompt, and all pins end in one turn."""
    rig = PageRig(6)
    rig.answer(range(200, 209))
    rig.answer(LONG)
    pages = rig.cache.tree.match(rig.table(LONG).chain, 4)
    assert pages != sorted(pages)
    rig.cache.pin(rig.table(LONG), deadlines_s[0])
    rig.cache.pin(rig.table(SHORT), deadlines_s[1])
    rig.cache.pool.expire_pins(100.0)
    rig.answer(range(300, 313))
    left = [len(rig.cache.tree.match([key], 1)) for key in rig.table(LONG).chain]
    assert left == sorted(left, reverse=True)
    assert 0 < sum(left) < 4


def test_unpinning_a_prompt_keeps_the_part_that_a_longer_pinned_one_needs() -> None:
    rig = _rig()
    rig.answer([*SHORT[:8], *OTHER])
    rig.cache.pin(rig.table(SHORT), 10.0)
    rig.cache.pin(rig.table(LONG), 10.0)
    assert rig.cache.unpin(rig.table(SHORT)) == 2
    assert rig.cache.pool.states()["pinned"] == 4
    assert rig.cache.unpin(rig.table(LONG)) == 4
    assert rig.cache.pool.states()["pinned"] == 0
    rig.audit()


def test_unpinning_the_longer_prompt_ends_the_shared_part_too() -> None:
    """A page has one deadline: who pinned it is not kept."""
    rig = _rig()
    rig.cache.pin(rig.table(SHORT), 10.0)
    rig.cache.pin(rig.table(LONG), 10.0)
    rig.cache.unpin(rig.table(LONG))
    assert rig.cache.pool.pinned() == []


def test_pins_end_with_a_reset() -> None:
    rig = _rig()
    rig.cache.pin(rig.table(LONG), 10.0)
    rig.cache.reset()
    rig.audit()
    assert rig.cache.pool.free_pages == rig.cache.pool.total_pages
    rig.cache.pool.expire_pins(100.0)
    rig.audit()


def test_a_deadline_of_old_content_does_not_end_the_pin_of_new() -> None:
    pool = PagePool(1)
    (page,) = pool.take(1).pages
    pool.index([page])
    pool.pin([page], 5.0)
    pool.forget_content()
    pool.index([page])
    pool.pin([page], 50.0)
    pool.release([page])
    pool.expire_pins(10.0)
    assert pool.states()["pinned"] == 1
    pool.audit()
