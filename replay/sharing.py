"""What the requests of a trace share, counted over the whole of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.trace import TraceRequest
    from state.model import BlockId

COMMON_SHARE: Final = 0.02
"""A block that more of all prompts have belongs to no session: it is a template or a tool list."""


class Sharing:
    """How many prompts have each prefix block."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        counts: Counter[BlockId] = Counter()
        for request in requests:
            counts.update(request.chain)
        self._counts = counts
        self._common = max(16.0, COMMON_SHARE * len(requests))

    def prefix(self, request: TraceRequest) -> str:
        """Return the id, in hex, of the deepest block that another prompt has; "" for none."""
        deepest = b""
        for block in request.chain:
            if self._counts[block] == 1:
                break
            deepest = block
        return deepest.hex()

    def session(self, request: TraceRequest) -> str | None:
        """Return the trace's own session, or the first block that not everybody has.

        That is what a client's session header would tell: turns of a session begin alike.
        """
        if request.session:
            return request.session
        for block in request.chain:
            if self._counts[block] <= self._common:
                return block.hex()
        return request.chain[-1].hex() if request.chain else None

    def possible_hit_ratio(self, requests: Sequence[TraceRequest], block_tokens: int) -> float:
        """Return the share of prompt tokens that one cache without end would have."""
        seen: set[BlockId] = set()
        hit = total = 0
        for request in requests:
            total += request.prompt_tokens
            for depth, block in enumerate(request.chain, 1):
                if block not in seen:
                    break
                if depth * block_tokens < request.prompt_tokens:
                    hit += block_tokens
            seen.update(request.chain)
        return hit / total if total else 0.0
