"""Blocks that reports prove: how long they count, how many, and what ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from router.evidence import LEARNED_TTL_S, MAX_WAITING, NEWS_S, Learned
from state.model import BlockId, Overlap, ReplicaId

if TYPE_CHECKING:
    from state.model import BlockId as Block

A, B = ReplicaId("a"), ReplicaId("b")


def chain(*numbers: int) -> tuple[Block, ...]:
    return tuple(BlockId(number.to_bytes(16, "big")) for number in numbers)


LONG = chain(*range(100))


def learned_of(blocks: tuple[Block, ...], most_blocks: int = 1_000) -> Learned:
    """Return what is known half a second after a proof at 0 s."""
    learned = Learned()
    learned.prove(A, blocks, 0.0, most_blocks)
    learned.settle(lambda _, __: False, NEWS_S)
    return learned


def run(learned: Learned, blocks: tuple[Block, ...] = LONG, now_s: float = 1.0) -> int:
    return learned.overlap(blocks, {}, now_s).get(A, 0)


@pytest.mark.parametrize("proved", [1, 2, 3, 7, 64, 99, 100])
def test_exactly_the_proved_leading_blocks_count(proved: int) -> None:
    """At whatever depth."""
    assert run(learned_of(LONG[:proved])) == proved


def test_another_prompt_shares_what_it_begins_with() -> None:
    """An id names its whole prefix."""
    other = LONG[:40] + chain(*range(1_000, 1_060))
    assert run(learned_of(LONG[:80]), other) == 40


def test_nothing_is_learned_before_the_news_had_their_time() -> None:
    """And nothing of what an event told by then: its eviction will be told, too."""
    learned = Learned()
    learned.prove(A, LONG, 0.0)
    learned.settle(lambda _, __: False, NEWS_S - 0.01)
    assert not learned
    asked = []

    def is_told(replica: ReplicaId, block: Block) -> bool:
        asked.append((replica, block))
        return True

    learned.settle(is_told, NEWS_S)
    assert asked == [(A, LONG[-1])]
    assert not learned


def test_what_events_tell_comes_first() -> None:
    """Learned blocks go on where the told ones end; a hole before them ends the run."""
    learned = learned_of(LONG[:60])
    told = {A: Overlap(gpu_blocks=30, any_tier_blocks=30)}
    assert learned.overlap(LONG, told, 1.0) == {A: 60}
    learned.leave_to_events(A, LONG, 30)
    assert learned.resident(A) == 30
    assert learned.overlap(LONG, told, 1.0) == {A: 60}
    assert run(learned) == 0  # told no more: whatever follows cannot be reached
    whole = {A: Overlap(gpu_blocks=100, any_tier_blocks=100)}
    assert learned.overlap(LONG, whole, 1.0) == {A: 100}


def test_what_is_not_proved_again_is_forgotten() -> None:
    """Nobody tells of the eviction; a new proof begins a new time."""
    learned = learned_of(LONG[:50])
    assert run(learned, now_s=NEWS_S + LEARNED_TTL_S - 0.1) == 50
    assert run(learned, now_s=NEWS_S + LEARNED_TTL_S) == 0
    learned.prove(A, LONG[:20], 100.0)
    learned.settle(lambda _, __: False, 100.0 + NEWS_S)
    assert run(learned, now_s=NEWS_S + LEARNED_TTL_S + 1.0) == 20
    learned.settle(lambda _, __: False, NEWS_S + LEARNED_TTL_S + 1.0)
    assert learned.resident(A) == 20
    learned.settle(lambda _, __: False, 1e6)
    assert not learned


def test_a_report_that_falls_short_ends_what_it_did_not_find() -> None:
    """The leading part stays."""
    learned = learned_of(LONG[:50])
    learned.cut(A, LONG, 12)
    assert (run(learned), learned.resident(A)) == (12, 12)
    learned.cut(A, LONG, 0)
    assert not learned


def test_no_more_counts_than_the_replica_has_room_for() -> None:
    """The least recently proved blocks go first, deepest first; one prompt is cut to the room."""
    learned = learned_of(LONG[:80], most_blocks=100)
    other = chain(*range(1_000, 1_050))
    learned.prove(A, other, 1.0, 100)
    learned.settle(lambda _, __: False, 2.0)
    assert learned.resident(A) == 100
    assert (run(learned, now_s=2.0), run(learned, other, 2.0)) == (50, 50)
    assert run(learned_of(LONG, most_blocks=30)) == 30
    assert not learned_of(LONG, most_blocks=0)


def test_proofs_that_wait_are_bounded() -> None:
    """A burst within half a second keeps its newest proofs."""
    learned = Learned()
    for number in range(MAX_WAITING + 100):
        learned.prove(A, chain(number), 0.0)
    learned.settle(lambda _, __: False, 1.0)
    assert learned.resident(A) == MAX_WAITING


def test_a_new_life_voids_what_is_known_and_what_waits() -> None:
    """Of that replica only."""
    learned = learned_of(LONG)
    learned.prove(B, LONG, 1.0)
    learned.prove(A, LONG, 1.0)
    learned.forget(A)
    learned.settle(lambda _, __: False, 2.0)
    assert learned.overlap(LONG, {}, 3.0) == {B: 100}


def test_the_end_of_a_scope_voids_everything() -> None:
    """Blocks do not say whose they are; what waits goes, too."""
    learned = learned_of(LONG)
    learned.prove(B, LONG, 1.0)
    learned.clear()
    learned.settle(lambda _, __: False, 2.0)
    assert not learned
