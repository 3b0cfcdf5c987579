"""What a simulated world looks like, and what moving pages costs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.eviction import EvictionName
from sidecar.tiers import DemoteRule, FetchRule

if TYPE_CHECKING:
    from sidecar.tiers import SourceName


class Shape(Struct, frozen=True, kw_only=True):
    """What a world looks like. Slots 0: no such tier. ``quota_pages``: of salts a and b."""

    pages: int = 8
    page_tokens: int = 2
    step_tokens: int = 16
    sequences: int = 4
    host_slots: int = 0
    disk_slots: int = 0
    eviction: EvictionName = "lru"
    quota_pages: tuple[int, int] = (0, 0)
    public_tokens: int = 0
    fetch: FetchRule = "always"
    demote: DemoteRule = "all"
    page_ms: float = 1.0
    token_ms: float = 1.0
    pair_ms: float = 0.1


class Prices:
    """Costs of a shape."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def fetch_ms(self, source: SourceName, pages: int) -> float:
        return {"host": 1, "disk": 3, "peer": 5}[source] * pages * self._shape.page_ms

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        pairs = tokens * context_tokens + tokens * (tokens + 1) // 2
        return self._shape.token_ms * tokens + self._shape.pair_ms * pairs
