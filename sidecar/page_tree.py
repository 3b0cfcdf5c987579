"""What the folder keeps of an engine's pages: trees, each in a space of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from state.model import Tier
from state.prefix import chain_root, namespace_of

if TYPE_CHECKING:
    from state.model import BlockId, ModelIdentity, NamespaceId
    from state.prefix import ChainKey
    from state.secret import ChainKeys


@dataclass(slots=True, eq=False)
class Space:
    """One adapter and scope: what its chains start from, and how many pages it has."""

    adapter: str
    scope: str
    key: ChainKey
    namespace: NamespaceId
    root: BlockId
    pages: int = 0


@dataclass(slots=True, eq=False)
class Page:
    """One engine page; ``space`` is None when it is followed but never indexed.

    ``slot`` is its place in its block. The last page of a block knows the block's id, the others
    their tokens. A page without copies stays while it has children, for their ids' sake.
    """

    handle: int
    space: Space | None
    parent: Page | None
    slot: int
    packed: bytes
    block: BlockId | None = None
    counted_tiers: int = 0
    copies: list[int] = field(default_factory=lambda: [0] * len(Tier))
    children: set[Page] | None = None


def space_of(identity: ModelIdentity, adapter: str, scope: str, keys: ChainKeys) -> Space:
    """Return the empty space of an adapter and a scope under ``identity``."""
    own = structs.replace(identity, adapter=adapter, scope=scope)
    key = keys.of(scope)
    return Space(adapter, scope, key, namespace_of(own), chain_root(own, key))
