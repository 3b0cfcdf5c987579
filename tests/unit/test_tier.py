"""The slots of one lower tier."""

from __future__ import annotations

import pytest

from sidecar.pool import PageId, PoolError
from sidecar.tier import Dropped, LowerTier
from sidecar.tree import PageFacts
from state.model import BlockId

A, B, C, D = (BlockId(name * 16) for name in (b"a", b"b", b"c", b"d"))
FACTS = PageFacts(None, b"", 0)


def _put(tier: LowerTier, *keys: BlockId, facts: PageFacts | None = FACTS) -> list[Dropped]:
    dropped: list[Dropped] = []
    for key in keys:
        put = tier.reserve("w")
        assert put is not None
        dropped += put.dropped
        tier.commit(put.slot, key, facts, "w")
        tier.pool.audit()
    return dropped


def test_the_least_recently_used_key_makes_room() -> None:
    tier = LowerTier("host", 2)
    assert _put(tier, A, B) == []
    tier.give_back(tier.lease([A], "r"), "r")
    assert [each.key for each in _put(tier, C)] == [B]
    assert (A in tier, B in tier, C in tier, len(tier)) == (True, False, True, 2)


def test_leased_slots_stay_whatever_comes() -> None:
    tier = LowerTier("host", 2)
    _put(tier, A, B)
    slots = tier.lease([A, B], "r")
    assert tier.reserve("w") is None
    assert tier.dropped == 1
    tier.give_back(slots, "r")
    assert [each.key for each in _put(tier, C, D)] == [B, A]


def test_reserved_slots_are_not_found_and_an_abandoned_one_is_free() -> None:
    tier = LowerTier("disk", 1)
    put = tier.reserve("w")
    assert put is not None
    assert tier.pool.states()["reserved"] == 1
    assert tier.reserve("w") is None
    tier.abandon(put.slot, "w")
    assert tier.pool.free_pages == 1
    assert _put(tier, A) == []


def test_only_the_leading_run_counts() -> None:
    tier = LowerTier("host", 4)
    _put(tier, A, C)
    assert [tier.leading(keys) for keys in ([A, B, C], [B, C], [A, C], [])] == [1, 0, 2, 0]


def test_a_dropped_key_that_is_read_is_gone_at_once_and_its_slot_after_the_reading() -> None:
    tier = LowerTier("disk", 2)
    _put(tier, A, B)
    slots = tier.lease([A], "r")
    assert [each.key for each in tier.drop([A, C])] == [A]
    assert A not in tier
    assert tier.pool.free_pages == 0
    tier.give_back(slots, "r")
    tier.pool.audit()
    assert tier.pool.free_pages == 1


def test_clearing_keeps_what_is_read_or_written_until_it_ends() -> None:
    tier = LowerTier("host", 3)
    _put(tier, A, B)
    slots, put = tier.lease([A], "r"), tier.reserve("w")
    assert put is not None
    assert {each.key for each in tier.clear()} == {A, B}
    assert (len(tier), tier.pool.held_pages) == (0, 2)
    tier.give_back(slots, "r")
    tier.abandon(put.slot, "w")
    tier.pool.audit()
    assert tier.pool.free_pages == 3


def test_restored_keys_are_found_but_known_only_once_their_facts_are() -> None:
    discarded: list[BlockId] = []
    tier = LowerTier("disk", 2)
    tier.restore([A, B, C], discarded.append)
    assert discarded == [A]
    assert not tier.announce(A, FACTS)
    assert tier.announce(B, FACTS)
    assert not tier.announce(B, FACTS)
    dropped = _put(tier, D, A)
    assert [(each.key, each.facts) for each in dropped] == [(B, FACTS), (C, None)]


def test_exactly_as_many_keys_as_slots_are_all_restored() -> None:
    discarded: list[BlockId] = []
    tier = LowerTier("disk", 2)
    tier.restore([A, B], discarded.append)
    assert (discarded, len(tier)) == ([], 2)


def test_a_slot_is_told_apart_by_what_it_holds_now() -> None:
    tier = LowerTier("host", 1)
    _put(tier, A)
    assert tier.holds_at(PageId(0), A)
    _put(tier, B)
    assert (tier.holds_at(PageId(0), A), tier.holds_at(PageId(0), B)) == (False, True)


def test_a_lease_that_ends_twice_is_a_defect() -> None:
    tier = LowerTier("host", 1)
    _put(tier, A)
    slots = tier.lease([A], "r")
    tier.give_back(slots, "r")
    with pytest.raises(PoolError, match="more often"):
        tier.give_back(slots, "r")
