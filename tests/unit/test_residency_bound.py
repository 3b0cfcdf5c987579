"""A bounded index: the bound holds, what is asked for stays, and a run is never overstated."""

from __future__ import annotations

from random import Random

import pytest

from state.block_table import DictTable
from state.holding import PORTION_BLOCKS, Holding
from state.model import BlockId, ReplicaId, Tier
from state.residency import HOLDER_BYTES, MIN_BYTES, Residency
from support.fleet_state import A, B, C, block

FITS = MIN_BYTES // (DictTable.entry_bytes + HOLDER_BYTES)
"""About so many blocks of one holder each fit into the smallest bound."""


def _chain(name: int, blocks: int) -> tuple[BlockId, ...]:
    return tuple(block(name << 32 | depth) for depth in range(blocks))


def _run(held: set[BlockId], chain: tuple[BlockId, ...]) -> int:
    return next((depth for depth, one in enumerate(chain) if one not in held), len(chain))


def _gpu_run(residency: Residency, chain: tuple[BlockId, ...], replica: ReplicaId = A) -> int:
    overlap = residency.overlap(chain).get(replica)
    return overlap.gpu_blocks if overlap else 0


def test_the_bound_holds_under_a_stream_of_stores_and_evictions_are_counted() -> None:
    residency = Residency(MIN_BYTES)
    for name in range(400):
        residency.store(A, Tier.GPU, _chain(name, 100))
        assert residency.memory_bytes <= MIN_BYTES
    assert residency.resident(A) + residency.evicted_blocks == 40_000
    assert residency.resident(A) > FITS * 0.7
    newest, oldest = _chain(399, 100), _chain(0, 100)
    assert (_gpu_run(residency, newest), _gpu_run(residency, oldest)) == (100, 0)


def test_without_a_bound_nothing_is_evicted() -> None:
    residency = Residency()
    for name in range(100):
        residency.store(A, Tier.GPU, _chain(name, 100))
    assert (residency.evicted_blocks, residency.resident(A)) == (0, 10_000)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_never_overstated_against_a_plain_model(seed: int) -> None:
    """Random stores, removals, drops and lookups on three replicas, far beyond the bound."""
    rng = Random(seed)
    residency = Residency(MIN_BYTES)
    held: dict[tuple[ReplicaId, Tier], set[BlockId]] = {
        (replica, tier): set() for replica in (A, B, C) for tier in (Tier.GPU, Tier.HOST)
    }
    for _ in range(600):
        replica = rng.choice((A, B, C))
        tier = rng.choice((Tier.GPU, Tier.GPU, Tier.HOST))
        chain = _chain(rng.randrange(60), rng.randrange(1, 400))
        first = rng.randrange(len(chain))
        if rng.random() < 0.6:
            residency.store(replica, tier, chain[first:])
            held[replica, tier] |= set(chain[first:])
        elif rng.random() < 0.97:
            residency.remove(replica, tier, chain[first:])
            held[replica, tier] -= set(chain[first:])
        else:
            residency.drop(replica)
            held[replica, Tier.GPU], held[replica, Tier.HOST] = set(), set()
        assert residency.memory_bytes <= MIN_BYTES
        asked = _chain(rng.randrange(60), 400)
        found = residency.overlap(asked)
        for one in (A, B, C):
            gpu, host = held[one, Tier.GPU], held[one, Tier.HOST]
            overlap = found.get(one)
            gpu_blocks, any_blocks = (
                (overlap.gpu_blocks, overlap.any_tier_blocks) if overlap else (0, 0)
            )
            assert gpu_blocks <= _run(gpu, asked)
            assert any_blocks <= _run(gpu | host, asked)
    for (replica, tier), model in held.items():
        assert residency.blocks(replica, tier) <= model
    assert residency.evicted_blocks > 1000


def test_removing_an_evicted_block_is_harmless_and_storing_it_brings_it_back() -> None:
    residency = Residency(MIN_BYTES)
    first = _chain(0, 100)
    for name in range(400):
        residency.store(A, Tier.GPU, _chain(name, 100))
    assert _gpu_run(residency, first) == 0
    before = residency.resident(A)
    residency.remove(A, Tier.GPU, first)
    assert residency.resident(A) == before
    residency.store(A, Tier.GPU, first)
    assert _gpu_run(residency, first) == 100


def test_a_chain_that_is_asked_for_stays_whole_while_others_go() -> None:
    residency = Residency(MIN_BYTES)
    wanted = _chain(0, 100)
    residency.store(A, Tier.GPU, wanted)
    for name in range(1, 1000):
        residency.store(A, Tier.GPU, _chain(name, 100))
        if name % 5 == 0:
            assert _gpu_run(residency, wanted) == 100
    assert _gpu_run(residency, _chain(500, 100)) == 0


def test_blocks_that_are_all_asked_for_do_not_break_the_bound() -> None:
    residency = Residency(MIN_BYTES)
    for name in range(90):
        residency.store(A, Tier.GPU, _chain(name, 100))
        for earlier in range(name + 1):
            residency.overlap(_chain(earlier, 100))
        assert residency.memory_bytes <= MIN_BYTES
    assert residency.evicted_blocks > 3000


def test_the_replica_that_holds_most_gives_way_first() -> None:
    residency = Residency(MIN_BYTES)
    small = _chain(0, 1000)
    residency.store(B, Tier.GPU, small)
    for name in range(1, 300):
        residency.store(A, Tier.GPU, _chain(name, 100))
    assert _gpu_run(residency, small, B) == 1000


def test_what_a_dropped_replica_left_goes_before_anything_alive() -> None:
    residency = Residency(MIN_BYTES)
    shared = _chain(0, 3400)
    for replica in (A, C):
        residency.store(replica, Tier.GPU, shared)
    residency.drop(A)
    residency.store(B, Tier.GPU, _chain(1, 600))
    assert residency.memory_bytes <= MIN_BYTES
    assert residency.retired_blocks < 3400 - 2 * 600 - 64
    assert (residency.resident(C), residency.evicted_blocks) == (3400, 0)


def test_a_block_that_was_asked_for_leaves_nothing_behind_when_it_goes() -> None:
    residency = Residency(MIN_BYTES)
    for name in range(60):
        residency.store(A, Tier.GPU, _chain(name, 100))
        residency.overlap(_chain(name, 100))
    for name in range(60):
        residency.remove(A, Tier.GPU, _chain(name, 100))
    assert residency.evicted_blocks > 0
    assert (residency.resident(A), residency.indexed_blocks) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_journal_names_each_block_once_and_keeps_the_order(seed: int) -> None:
    rng = Random(seed)
    holding = Holding(2, Tier.GPU)
    held: dict[BlockId, None] = {}
    for _ in range(300):
        fresh = [one for one in map(block, rng.sample(range(20_000), 200)) if one not in held]
        holding.add(fresh)
        held |= dict.fromkeys(fresh)
        lost = rng.sample(list(held), min(len(held), rng.randrange(300)))
        holding.remove(lost)
        for one in lost:
            del held[one]
        if rng.random() < 0.2:
            for one in holding.take(rng.randrange(1, 2000)):
                del held[one]
        assert holding.blocks == len(held)
        listed = list(holding)
        assert len(set(listed)) == len(listed)
        assert set(listed) == set(held)
        assert holding.journal_blocks <= 1.25 * len(held) + 3 * PORTION_BLOCKS
        assert sum(map(len, holding._sealed)) // 16 + len(holding._open) == holding.journal_blocks


def test_the_oldest_blocks_of_a_journal_are_taken_first() -> None:
    holding = Holding(2, Tier.GPU)
    chain = list(_chain(0, 3 * PORTION_BLOCKS))
    holding.add(chain)
    holding.remove(chain[:10])
    assert holding.take(100) == chain[10:100]
    assert holding.take(5000) == chain[100:PORTION_BLOCKS]
    assert holding.take(5000)[0] == chain[PORTION_BLOCKS]


def test_a_journal_lets_go_of_what_went_in_the_order_in_which_it_came() -> None:
    """As with an engine's least recently used blocks: nothing is noted as gone for long."""
    holding = Holding(2, Tier.GPU)
    chain = list(_chain(0, 8 * PORTION_BLOCKS))
    holding.add(chain)
    for start in range(0, 6 * PORTION_BLOCKS, 64):
        holding.remove(chain[start : start + 64])
        assert holding.journal_blocks <= holding.blocks + PORTION_BLOCKS
    assert list(holding) == chain[6 * PORTION_BLOCKS :]
