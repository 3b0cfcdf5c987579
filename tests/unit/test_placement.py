"""What was sent where: for a while, up to a capacity, unless it failed."""

from __future__ import annotations

from state.placement import Placements
from support.fleet_state import A, B, block, blocks


def test_a_placement_counts_until_its_time_to_live_is_over() -> None:
    placements = Placements(ttl_s=2.0)
    placements.place(A, blocks(0, 1, 2), now_s=0.0)
    assert placements.overlap(blocks(0, 1, 5), now_s=1.9) == {A: 2}
    assert placements.overlap(blocks(5, 0), now_s=1.9) == {}
    assert placements.overlap(blocks(0), now_s=2.0) == {}
    assert placements.resident(A) == 0


def test_a_shared_prefix_lives_as_long_as_its_latest_use() -> None:
    placements = Placements(ttl_s=2.0)
    placements.place(A, blocks(0, 1, 2), now_s=0.0)
    placements.place(A, blocks(0, 7), now_s=1.0)
    assert placements.overlap(blocks(0, 1, 2), now_s=2.5) == {A: 1}
    assert placements.overlap(blocks(0, 7), now_s=2.5) == {A: 2}


def test_capacity_takes_the_least_recent_and_deepest_blocks_first() -> None:
    placements = Placements(ttl_s=600.0, capacity_blocks=4)
    placements.place(A, blocks(0, 1, 2), now_s=0.0)
    placements.place(A, blocks(0, 8, 9), now_s=1.0)
    assert placements.resident(A) == 4
    assert placements.overlap(blocks(0, 1, 2), now_s=1.0) == {A: 2}
    assert placements.overlap(blocks(0, 8, 9), now_s=1.0) == {A: 3}


def test_a_chain_longer_than_the_capacity_keeps_its_front() -> None:
    placements = Placements(capacity_blocks=3)
    placements.place(A, tuple(map(block, range(10))), now_s=0.0)
    assert placements.overlap(tuple(map(block, range(10))), now_s=0.0) == {A: 3}


def test_each_replica_may_have_its_own_limits() -> None:
    placements = Placements(ttl_s=2.0)
    placements.limit(B, ttl_s=600.0, capacity_blocks=2)
    for replica in (A, B):
        placements.place(replica, blocks(0, 1, 2), now_s=0.0)
    assert placements.overlap(blocks(0, 1, 2), now_s=1.0) == {A: 3, B: 2}
    assert placements.overlap(blocks(0, 1, 2), now_s=500.0) == {B: 2}
    placements.limit(B, ttl_s=1.0, capacity_blocks=2)
    assert placements.overlap(blocks(0), now_s=500.0) == {}


def test_a_withdrawn_placement_leaves_what_others_sent() -> None:
    placements = Placements()
    first = placements.place(A, blocks(0, 1), now_s=0.0)
    failed = placements.place(A, blocks(0, 1, 2, 3), now_s=0.1)
    assert placements.withdraw(failed)
    assert placements.overlap(blocks(0, 1, 2), now_s=0.2) == {A: 2}
    assert not placements.withdraw(failed)
    assert placements.withdraw(first)
    assert placements.overlap(blocks(0), now_s=0.2) == {}


def test_a_confirmed_placement_can_not_be_withdrawn() -> None:
    placements = Placements()
    placement = placements.place(A, blocks(0), now_s=0.0)
    assert placements.confirm(placement)
    assert not placements.confirm(placement)
    assert not placements.withdraw(placement)
    assert placements.overlap(blocks(0), now_s=0.0) == {A: 1}


def test_withdrawing_what_has_expired_or_was_forgotten_touches_nothing_newer() -> None:
    placements = Placements(ttl_s=2.0)
    old = placements.place(A, blocks(0, 1), now_s=0.0)
    placements.place(A, blocks(0, 1), now_s=5.0)
    placements.withdraw(old)
    assert placements.overlap(blocks(0, 1), now_s=5.0) == {A: 2}
    older = placements.place(A, blocks(0, 1), now_s=5.0)
    placements.forget(A)
    assert placements.overlap(blocks(0), now_s=5.0) == {}
    placements.place(A, blocks(0), now_s=5.0)
    placements.withdraw(older)
    assert placements.overlap(blocks(0, 1), now_s=5.0) == {A: 1}


def test_memory_stays_within_capacity_for_any_number_of_prompts() -> None:
    placements = Placements(ttl_s=1e9, capacity_blocks=50)
    for number in range(100):
        start = number * 20
        placements.place(A, tuple(map(block, range(start, start + 20))), now_s=float(number))
    assert placements.resident(A) == 50
