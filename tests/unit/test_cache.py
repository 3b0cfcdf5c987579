"""Pool, tree and tiers together: admission, growth, copies, and the audit of all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.audit import AuditReplay
from sidecar.cache import PagedCache
from sidecar.journal import Transition
from sidecar.scope import Place
from state.model import BlockId
from support.page_rig import FlatPrices, PageRig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.table import BlockTable


def _acquired(rig: PageRig, tokens: range) -> BlockTable:
    table = rig.table(tokens)
    assert rig.cache.acquire(table) is not None
    return table


def test_a_full_prompt_finds_all_but_the_page_of_its_last_token() -> None:
    rig = PageRig()
    rig.answer(range(16))
    table = rig.table(range(16))
    acquired = rig.cache.acquire(table)
    assert acquired is not None
    assert (acquired.reused_tokens, acquired.is_pending) == (12, False)
    assert len(table.pages) == 4


def test_growing_takes_pages_only_when_the_last_one_is_full() -> None:
    rig = PageRig(4)
    table = _acquired(rig, range(6))
    for tokens, pages in ((7, 2), (8, 2), (9, 3)):
        assert rig.cache.grow(table, tokens, tokens - 1)
        assert len(table.pages) == pages
    assert not rig.cache.grow(table, 17, 9)
    assert len(table.pages) == 3
    rig.audit()


def test_a_shared_page_that_is_to_be_written_is_copied_once() -> None:
    rig = PageRig(4)
    parent = _acquired(rig, range(6))
    child = rig.table(range(6))
    rig.cache.fork(parent, child)
    shared = parent.pages[1]
    assert rig.cache.grow(child, 7, 6)
    assert child.pages[0] == parent.pages[0]
    assert child.pages[1] != shared
    assert rig.cache.drain_moves().copies == [(shared, child.pages[1])]
    assert rig.cache.grow(parent, 7, 6)
    assert (parent.pages[1], rig.cache.drain_moves().copies) == (shared, [])
    rig.audit()


def test_a_copy_that_finds_no_page_changes_nothing() -> None:
    rig = PageRig(2)
    parent = _acquired(rig, range(6))
    child = rig.table(range(6))
    rig.cache.fork(parent, child)
    assert not rig.cache.grow(child, 7, 6)
    assert child.pages == parent.pages
    assert rig.cache.drain_moves().copies == []
    rig.audit()


def test_a_refused_prompt_leaves_reference_counts_as_they_were() -> None:
    """Its own cached pages count as room until they are shared."""
    rig = PageRig(4)
    rig.answer(range(9))
    held = _acquired(rig, range(100, 104))
    assert rig.cache.pool.available_pages() == 3
    assert rig.cache.acquire(rig.table(range(16))) is None
    rig.audit()
    assert (rig.cache.pool.available_pages(), rig.cache.pool.cached_pages) == (3, 2)
    rig.cache.release(held)
    rig.audit()


def test_hits_and_the_time_that_they_saved_are_counted() -> None:
    rig = PageRig(prices=FlatPrices(token_ms=2.0))
    rig.answer(range(17))
    assert (rig.cache.hits, rig.cache.hit_pages, rig.cache.saved_ms) == (0, 0, 0.0)
    rig.answer(range(17))
    assert (rig.cache.hits, rig.cache.hit_pages, rig.cache.saved_ms) == (1, 4, 32.0)


def test_only_pages_that_were_hit_go_down_where_that_is_the_rule() -> None:
    rig = PageRig(5, host_slots=16, demote="reused")
    assert rig.host is not None
    rig.answer(range(17))
    rig.answer(range(100, 117))
    assert len(rig.host) == 0
    rig.answer(range(100, 117))
    rig.answer(range(200, 217))
    assert rig.host.leading(rig.table(range(100, 117)).chain) == 4


def test_content_that_comes_again_after_it_was_lost_has_to_be_reused_again_to_go_down() -> None:
    rig = PageRig(5, host_slots=4, demote="reused")
    assert rig.host is not None
    for first in (0, 0, 100, 200, 300):
        rig.answer(range(first, first + 17))
    chain = rig.table(range(17)).chain
    assert rig.host.leading(chain) == 4
    rig.host.drop(chain)
    rig.answer(range(17))
    rig.answer(range(100, 117))
    assert rig.host.leading(chain) == 0


def test_pages_have_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="page_tokens: expected at least 1, got 0"):
        PagedCache(4, 0)


def test_public_pages_belong_to_nobody_and_the_rest_to_the_tenant() -> None:
    rig = PageRig()
    root, tail = BlockId(b"r" * 16), BlockId(b"t" * 16)
    place = Place(root, public_pages=2, tail=tail, tenant="a")
    table = rig.table(range(14), place)
    assert rig.cache.acquire(table) is not None
    owned = {tenant: sum(states.values()) for tenant, states in rig.cache.pool.tenants().items()}
    assert owned == {"": 2, "a": 2}


def _replayed(transitions: Sequence[Transition], rig: PageRig) -> AuditReplay:
    replay = AuditReplay()
    tiers = (rig.cache, rig.host, rig.disk)
    pools = [each.pool for each in tiers if each is not None]
    fresh: dict[str, dict[str, int]] = {pool.tier: {"free": pool.total_pages} for pool in pools}
    replay.feed(Transition(op="open", totals=fresh))
    for transition in transitions:
        replay.feed(transition)
    totals: dict[str, dict[str, int]] = {pool.tier: pool.states() for pool in pools}
    tenants: dict[str, dict[str, dict[str, int]]] = {pool.tier: pool.tenants() for pool in pools}
    replay.feed(Transition(op="count", totals=totals, tenants=tenants))
    return replay


def test_the_journal_replays_to_what_the_pools_count_in_every_tier() -> None:
    rig = PageRig(5, host_slots=3, disk_slots=4)
    for first in (0, 100, 0, 200):
        rig.answer(range(first, first + 17), 3)
    rig.cache.pin(rig.table(range(200, 217)), 5.0)
    rig.cache.pool.expire_pins(6.0)
    rig.cache.reset()
    rig.answer(range(9), 6)
    replay = _replayed(rig.transitions, rig)
    assert replay.summary().evicted_pages["lru"] > 0
    assert {each.op for each in rig.transitions} >= {
        "create", "append", "reserve", "fill", "index", "share", "move", "pin", "unpin",
        "release", "evict", "clear",
    }  # fmt: skip


def test_a_journal_that_lacks_a_release_does_not_replay() -> None:
    rig = PageRig(5)
    rig.answer(range(17))
    lacking = [each for each in rig.transitions if each.op != "release"]
    with pytest.raises(Exception, match="pages, not"):
        _replayed(lacking, rig)
