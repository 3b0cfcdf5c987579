"""What a router keeps of prompts that never come again: as much as its bounds say, and no more."""

from __future__ import annotations

import gc
import tracemalloc
from typing import TYPE_CHECKING, Final

from policies.hot import HeatMap, HotSettings
from policies.weighted import Weighted
from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Chooser, Knowledge
from router.fleet import Member
from router.upstream import Endpoint
from state.lease import LeaseBook, Outcome
from state.memory import MemoryState
from state.model import ReplicaId, RouterId
from state.placement import Placements
from state.prefix import pack_tokens
from state.secret import ChainKeys

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT_TOKENS: Final = 640
CAPACITY_BLOCKS: Final = 200
BATCH: Final = 200
LEAK_BYTES: Final = 64
"""More than this per prompt would be something that is kept of each: an id takes 49."""


class Feed:
    """A chooser with small bounds, and prompts of which no two share a block."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.members = [
            Member(replica=ReplicaId(f"r{number}"), endpoint=Endpoint("127.0.0.1", 1 + number))
            for number in range(4)
        ]
        self.know = Knowledge(
            reader=MemoryState(clock=lambda: self.now_s).reader(RouterId("me")),
            leases=LeaseBook(),
            pending=Placements(2.0),
            guessed=Placements(10**6),
            heat=HeatMap(HotSettings(max_nodes=64, max_blocks=1_024)),
        )
        for member in self.members:
            self.know.guessed.limit(member.replica, 10**6, CAPACITY_BLOCKS)
        self.chooser = Chooser(
            self.know, Weighted(), keys=ChainKeys(1), seed=1, clock=lambda: self.now_s
        )
        self._first = iter(range(10**9))

    def prompts(self) -> Iterator[ReadPrompt]:
        """Yield one batch of new prompts."""
        for _ in range(BATCH):
            first = next(self._first)
            packed = pack_tokens([first, *range(1, PROMPT_TOKENS)])
            tokens = PromptTokens(packed=packed, is_exact=True)
            yield ReadPrompt(model="m", is_stream=True, prompts=(tokens,))

    def send(self) -> int:
        """Send a batch; return the bytes that are in use afterwards."""
        for prompt in self.prompts():
            self.now_s += 0.2
            choice = self.chooser.choose(self.chooser.route(prompt), self.members)
            assert choice is not None
            assert choice.decision.predicted_cached_tokens == 0
            choice.first_byte(self.now_s)
            choice.finish(Outcome.DONE, had_first_byte=True, output_tokens=5)
            self.know.pending.settle(lambda _, __: False, self.now_s)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


def test_unique_prompts_stop_taking_memory_once_the_bounds_are_reached() -> None:
    """A90, C40: placements, heat, leases and footprints of prompts that never return."""
    feed = Feed()
    tracemalloc.start()
    try:
        feed.send()
        sizes = [feed.send() for _ in range(4)]
    finally:
        tracemalloc.stop()
    blocks_sent = 5 * BATCH * PROMPT_TOKENS // 64
    held = [feed.know.guessed.resident(member.replica) for member in feed.members]
    assert all(0 < blocks <= CAPACITY_BLOCKS for blocks in held)
    assert blocks_sent > 10 * sum(held)
    assert max(sizes[2:]) - max(sizes[:2]) < LEAK_BYTES * BATCH
