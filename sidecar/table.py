"""A sequence's block table, and what moves between tiers for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.pool import PageId
from sidecar.tiers import SourceName
from state.model import BlockId
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from sidecar.scope import Place
    from sidecar.tiers import Demotion


class Incoming(Struct, frozen=True):
    """One page whose content comes from a lower tier (a leased ``slot``) or from a peer."""

    page: PageId
    key: BlockId
    source: SourceName
    slot: PageId | None = None


class Arrival(Struct, frozen=True):
    """Content that is ready to be loaded into ``page``: a leased host ``slot``, or bytes.

    ``depth`` counts the pages of the prompt before it. ``is_first``: of its source in this prompt.
    """

    page: PageId
    source: SourceName
    depth: int
    slot: PageId | None = None
    content: bytes | None = None
    is_first: bool = False


@dataclass(slots=True)
class BlockTable:
    """A sequence's tokens and the pages that hold their KV.

    ``packed`` is u32 little-endian (``state.prefix.pack_tokens``). ``chain`` has the keys of the
    leading full pages; it grows with the tokens. ``epoch`` names the cache content it belongs to.
    ``incoming`` waits for content; ``arrivals`` go into the next step.
    """

    packed: bytearray
    place: Place
    salt: str | None = None
    request: str | None = None
    chain: list[BlockId] = field(default_factory=list)
    pages: list[PageId] = field(default_factory=list)
    indexed_pages: int = 0
    epoch: int = 0
    incoming: list[Incoming] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.packed) // TOKEN_BYTES


class Acquired(Struct, frozen=True):
    """What ``PagedCache.acquire`` found: ``reused_tokens`` are there once the step has run.

    ``is_pending``: content must arrive first; ``PagedCache.arrive`` then tells how much did.
    """

    reused_tokens: int
    is_pending: bool = False


@dataclass(slots=True)
class Moves:
    """What the next step copies before it computes, and the host slots that it reads."""

    demotions: list[Demotion] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    copies: list[tuple[PageId, PageId]] = field(default_factory=list)
    leases: list[PageId] = field(default_factory=list)
