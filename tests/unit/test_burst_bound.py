"""What a router notes of prompts is bounded as it comes in, not by a sweep some time later."""

from __future__ import annotations

from state.model import BlockId, ReplicaId
from state.placement import Placements

PROMPTS = 100_000
BLOCKS = 8
CAPACITY_BLOCKS = 1_000


def test_a_burst_of_unique_prompts_within_one_moment_stays_within_the_bound() -> None:
    """C42: nothing is given up by the clock here, which stands still."""
    book = Placements(capacity_blocks=CAPACITY_BLOCKS)
    replica = ReplicaId("r")
    most = 0
    for prompt in range(PROMPTS):
        first = prompt * BLOCKS
        chain = [BlockId(number.to_bytes(16, "big")) for number in range(first, first + BLOCKS)]
        book.place(replica, chain, 0.0)
        most = max(most, book.blocks)
        if prompt % 10_000 == 0:
            assert book.overlap(chain, 0.0) == {replica: BLOCKS}
    assert most == CAPACITY_BLOCKS
