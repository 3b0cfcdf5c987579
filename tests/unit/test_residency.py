"""The index from blocks to replicas: runs, holes, tiers, lives and what is left of them."""

from __future__ import annotations

from state.model import ReplicaId, Tier
from state.residency import Residency
from support.fleet_state import A, B, block, blocks


def _gpu_runs(residency: Residency, *numbers: int) -> dict[ReplicaId, int]:
    found = residency.overlap(blocks(*numbers))
    return {replica: overlap.gpu_blocks for replica, overlap in found.items()}


def test_a_run_ends_where_the_first_block_is_missing() -> None:
    residency = Residency()
    residency.store(A, Tier.GPU, blocks(0, 1, 2))
    residency.store(B, Tier.GPU, blocks(0))
    assert _gpu_runs(residency, 0, 1, 2, 3) == {A: 3, B: 1}
    assert _gpu_runs(residency, 0, 1) == {A: 2, B: 1}
    assert _gpu_runs(residency, 9, 0, 1) == {}
    assert _gpu_runs(residency) == {}


def test_a_hole_ends_the_run_also_when_later_blocks_are_held() -> None:
    """B26, A61: A holds b0 and b2, B holds b0 and b1."""
    residency = Residency()
    residency.store(A, Tier.GPU, blocks(0, 2))
    residency.store(B, Tier.GPU, blocks(0, 1))
    assert _gpu_runs(residency, 0, 1, 2) == {A: 1, B: 2}


def test_lower_tiers_fill_holes_only_in_the_run_over_any_tier() -> None:
    residency = Residency()
    residency.store(A, Tier.GPU, blocks(0, 2))
    residency.store(A, Tier.HOST, blocks(1))
    residency.store(B, Tier.DISK, blocks(0))
    found = residency.overlap(blocks(0, 1, 2))
    assert (found[A].gpu_blocks, found[A].any_tier_blocks) == (1, 3)
    assert (found[B].gpu_blocks, found[B].any_tier_blocks) == (0, 1)


def test_storing_twice_and_removing_once_leaves_nothing() -> None:
    """Copies are counted where they exist, in the sidecar; the index is a set."""
    residency = Residency()
    residency.store(A, Tier.GPU, blocks(0))
    residency.store(A, Tier.GPU, blocks(0))
    assert residency.resident(A) == 1
    residency.remove(A, Tier.GPU, blocks(0, 5))
    assert (residency.resident(A), residency.indexed_blocks) == (0, 0)


def test_removing_from_one_replica_or_tier_leaves_the_others() -> None:
    residency = Residency()
    for replica in (A, B):
        residency.store(replica, Tier.GPU, blocks(0, 1))
    residency.store(A, Tier.HOST, blocks(0))
    residency.remove(A, Tier.GPU, blocks(0))
    assert _gpu_runs(residency, 0, 1)[B] == 2
    assert residency.overlap(blocks(0, 1))[A].any_tier_blocks == 2
    assert residency.blocks(A, Tier.HOST) == {block(0)}


def test_a_dropped_replica_is_gone_at_once_and_swept_later() -> None:
    residency = Residency()
    many = tuple(map(block, range(1000)))
    residency.store(A, Tier.GPU, many)
    residency.store(B, Tier.GPU, many[:10])
    residency.drop(A)
    assert _gpu_runs(residency, 0, 1) == {B: 2}
    assert (residency.resident(A), residency.retired_blocks) == (0, 1000)
    residency.sweep(400)
    assert residency.retired_blocks == 600
    residency.sweep(10_000)
    assert residency.indexed_blocks == 10


def test_a_slot_is_given_out_again_only_when_nothing_is_left_of_it() -> None:
    """R-18: what a former life held is never taken for the present one's."""
    residency = Residency()
    many = tuple(map(block, range(5000)))
    residency.store(A, Tier.GPU, many)
    residency.drop(A)
    residency.store(A, Tier.GPU, many[:1])
    assert _gpu_runs(residency, *range(5000)) == {A: 1}
    residency.sweep(10_000)
    residency.store(B, Tier.GPU, many[1:2])
    assert _gpu_runs(residency, 0, 1) == {A: 1}
    assert _gpu_runs(residency, 1, 2) == {B: 1}


def test_many_lives_do_not_grow_the_index() -> None:
    residency = Residency()
    for life in range(200):
        residency.store(A, Tier.GPU, tuple(map(block, range(life * 100, life * 100 + 100))))
        residency.drop(A)
    assert residency.indexed_blocks <= 300
    residency.store(B, Tier.GPU, blocks(1))
    assert residency._next_bit <= 1 << 5


def test_dropping_or_removing_what_is_unknown_changes_nothing() -> None:
    residency = Residency()
    residency.drop(A)
    residency.remove(A, Tier.GPU, blocks(1))
    residency.store(A, Tier.GPU, ())
    assert residency.overlap(blocks(1)) == {}
