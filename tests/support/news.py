"""Waits until a router knows what bundled workers hold, of prompts that share nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from support.fleet import until

if TYPE_CHECKING:
    from support.conversation import Answered
    from support.fleet import LocalFleet, Router

OUTPUT_TOKENS = 4
"""Of each answer; the last one of them is in no page."""


class News:
    """Counts the blocks of each talk's last turn, and waits for as many at ``router``."""

    def __init__(self, fleet: LocalFleet, router: Router, block_tokens: int) -> None:
        self._fleet, self._router, self._block_tokens = fleet, router, block_tokens
        self._held = Counter[str]()

    async def resident(self) -> dict[str, int]:
        """Return how many blocks the router knows of, by replica."""
        seen = await self._fleet.seen(self._router)
        return {name: one["resident_blocks"] for name, one in seen.items()}

    async def begin(self) -> None:
        """Count from what is known now."""
        self._held = Counter(await self.resident())

    async def of(self, turn: Answered, before: Answered | None = None) -> None:
        """Wait until the router knows the blocks of ``turn``, which goes on from ``before``."""
        earlier = self._blocks(before) if before is not None else 0
        self._held[turn.replica] += self._blocks(turn) - earlier

        async def is_known() -> bool:
            return (await self.resident())[turn.replica] >= self._held[turn.replica]

        await until(is_known, f"what {turn.replica} holds")

    def _blocks(self, turn: Answered) -> int:
        return (turn.prompt_tokens + OUTPUT_TOKENS - 1) // self._block_tokens
