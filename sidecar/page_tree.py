"""What the folder keeps of an engine's pages: trees, each in a space of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from state.model import Tier
from state.prefix import chain_root, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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


def space_of(
    identity: ModelIdentity,
    adapter: str,
    scope: str,
    keys: ChainKeys,
    adapter_key: str | None = None,
) -> Space:
    """Return the empty space of an adapter and a scope under ``identity``.

    ``adapter_key`` is what the chains of the adapter start from, its name by default.
    """
    own = structs.replace(identity, adapter=adapter_key or adapter, scope=scope)
    key = keys.of(scope)
    return Space(adapter, scope, key, namespace_of(own), chain_root(own, key))


def detached(
    space: Space, pages: Iterable[Page], tiers: Sequence[Tier]
) -> Iterator[tuple[Tier, BlockId]]:
    """Take the pages of ``space`` out of it: they are followed, and indexed no more.

    Yields what they counted: each block once for each tier that it was in. ``tiers`` are those of
    the bits of ``counted_tiers``.
    """
    for page in pages:
        if page.space is not space:
            continue
        for index, tier in enumerate(tiers):
            if page.block is not None and page.counted_tiers & (1 << index):
                yield tier, page.block
        page.space, page.block, page.counted_tiers, page.packed = None, None, 0, b""
