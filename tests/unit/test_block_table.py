"""The compact table at size, what it takes of memory, and an index that does without it."""

from __future__ import annotations

import gc
import subprocess
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest

from state.block_table import DictTable
from state.compiled import build, library_path
from state.model import BlockId, ReplicaId, Tier
from state.native import SOURCE, load, table_maker
from state.native_table import NativeTable
from state.residency import HOLDER_BYTES, MIN_BYTES, Residency
from support.fleet_state import A, block
from support.native import (
    COMPILER,
    both_forms,
    native_library,
    native_table,
    needs_compiler,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from state.block_table import BlockTable


def _random_blocks(count: int, seed: int) -> list[BlockId]:
    packed = Random(seed).randbytes(16 * count)
    return [BlockId(packed[at : at + 16]) for at in range(0, len(packed), 16)]


@both_forms
@pytest.mark.parametrize("name_blocks", ["random", "alike"])
def test_a_large_table_forgets_and_keeps_what_it_should(
    make_table: Callable[[], BlockTable], name_blocks: str
) -> None:
    """Ids that differ in a few bits spread as well: nobody can aim at one part of a table."""
    alike = [block(number << 40) for number in range(20_000)]
    blocks = alike if name_blocks == "alike" else _random_blocks(20_000, 1)
    table = make_table()
    for at in range(0, len(blocks), 700):
        table.add(blocks[at : at + 700], 2)
    table.add(blocks[::3], 1 << 70)
    order = blocks[:]
    Random(2).shuffle(order)
    for at in range(0, len(order), 900):
        table.discard(order[at : at + 900], 2)
    kept = set(blocks[::3])
    assert len(table) == len(kept)
    assert table.masks(blocks) == [1 << 70 if one in kept else 0 for one in blocks]
    table.discard(blocks, 1 << 70)
    assert len(table) == 0
    assert list(table.walk(blocks[:5], until_unknown=True)) == [(1, 0)]


@both_forms
def test_ids_that_share_half_are_told_apart(make_table: Callable[[], BlockTable]) -> None:
    """An id is compared whole, not by a hash of it."""
    low = [BlockId(bytes(8) + number.to_bytes(8, "big")) for number in range(2000)]
    high = [BlockId(number.to_bytes(8, "big") + bytes(8)) for number in range(1, 2000)]
    table = make_table()
    table.add(low, 2)
    assert table.masks(high) == [0] * len(high)
    table.add(high, 4)
    assert table.masks(low + high) == [2] * len(low) + [4] * len(high)


@both_forms
def test_a_chain_longer_than_a_portion_is_walked_to_its_end(
    make_table: Callable[[], BlockTable],
) -> None:
    """Also where every block has other holders than the one before."""
    chain = _random_blocks(3_000, 3)
    table = make_table()
    table.add(chain, 2)
    table.add(chain[::2], 4)
    told = list(table.walk(chain, until_unknown=True))
    assert told == [(depth + 1, 6 if depth % 2 == 0 else 2) for depth in range(3_000)]
    table.discard(chain[2_500:2_501], 2)
    table.discard(chain[2_500:2_501], 4)
    stopped = list(table.walk(chain, until_unknown=True))
    assert stopped[-1] == (2_501, 0)
    on = list(table.walk(chain, until_unknown=False))
    assert (on[2_500], on[-1][0]) == ((2_501, 0), 3_000)


@needs_compiler
def test_a_compact_table_takes_what_it_says_also_after_changes() -> None:
    table = NativeTable(native_library())
    rounds = [_random_blocks(40_000, seed) for seed in range(3)]
    table.add(rounds[0], 2)
    for old, new in pairwise(rounds):
        for at in range(0, len(old), 2_000):
            table.discard(old[at : at + 2_000], 2)
            table.add(new[at : at + 2_000], 2)
    assert len(table) == 40_000
    assert table.table_bytes <= 40_000 * NativeTable.entry_bytes
    table.discard(rounds[-1], 2)
    assert table.table_bytes <= 600_000  # it gives back what it no longer needs


@needs_compiler
def test_a_table_is_freed_with_its_index() -> None:
    freed: list[int] = []
    library = native_library()
    free = library.free
    library.free = lambda address: freed.append(address) or free(address)  # type: ignore[func-returns-value]
    try:
        residency = Residency(make_table=table_maker(library))
        assert freed == []
        del residency
        gc.collect()
    finally:
        library.free = free
    assert len(freed) == len(Tier)


@both_forms
def test_the_bound_holds_on_either_form(make_table: Callable[[], BlockTable]) -> None:
    residency = Residency(MIN_BYTES, make_table)
    fits = MIN_BYTES // (residency.entry_bytes + HOLDER_BYTES)
    asked = tuple(_random_blocks(200, 5))
    residency.store(A, Tier.GPU, asked)
    for number in range(40):
        residency.store(A, Tier.GPU, _random_blocks(1_000, 100 + number))
        residency.store(ReplicaId("small"), Tier.GPU, _random_blocks(20, 500 + number))
        assert residency.memory_bytes <= MIN_BYTES
        if residency.evicted_blocks or residency.resident(A) > 0.5 * fits:
            residency.overlap(asked)
    assert residency.resident(ReplicaId("small")) == 800
    assert 0.7 * fits < residency.resident(A) + 800 <= fits
    assert residency.overlap(asked)[A].gpu_blocks == 200
    assert residency.resident(A) + residency.evicted_blocks == 40_200


def test_without_a_helper_an_index_is_a_dict(tmp_path: Path) -> None:
    assert load(tmp_path / "absent.so") is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    assert load(broken) is None
    assert isinstance(table_maker(None)(), DictTable)


@needs_compiler
def test_a_helper_is_known_by_its_source(tmp_path: Path) -> None:
    built = build(SOURCE, tmp_path, (str(COMPILER),))
    assert built == library_path(SOURCE, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [built.name]
    assert load(built) is not None
    assert isinstance(table_maker(load(built))(), NativeTable)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        build(SOURCE, tmp_path, ("false",))
    with pytest.raises(OSError, match="no-such-compiler"):
        build(SOURCE, tmp_path, ("no-such-compiler",))
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_both_forms_of_the_index_answer_alike() -> None:
    """Random stores, removals and drops of 70 replicas on long chains with holes."""
    rng = Random(9)
    chains = [_random_blocks(300, seed) for seed in range(4)]
    indexes = [Residency(make_table=make) for make in (DictTable, native_table)]
    for _ in range(250):
        replica = ReplicaId(f"r{rng.randrange(70)}")
        tier = rng.choice((Tier.GPU, Tier.GPU, Tier.HOST))
        chain = rng.choice(chains)
        first, last = sorted(rng.sample(range(301), 2))
        blocks = chain[first * (rng.random() < 0.5) : last]
        change = rng.random()
        for index in indexes:
            if change < 0.6:
                index.store(replica, tier, blocks)
            elif change < 0.97:
                index.remove(replica, tier, blocks[::-1])
            else:
                index.drop(replica)
        found = [index.overlap(chain) for index in indexes]
        assert found[0] == found[1]
        assert indexes[0].resident(replica) == indexes[1].resident(replica)
        assert indexes[0].indexed_blocks == indexes[1].indexed_blocks
