"""What the folder keeps of an engine's pages: trees, each in a space of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from msgspec import structs

from state.model import Tier
from state.prefix import chain_root, namespace_of, tail_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from state.model import BlockId, ModelIdentity, NamespaceId
    from state.prefix import ChainKey
    from state.secret import ChainKeys


SpaceName: TypeAlias = "tuple[str, str, BlockId | None]"


@dataclass(slots=True, eq=False)
class Space:
    """One adapter and scope: what its chains start from, and how many pages it has.

    ``after``: the last block of the public prefix that it begins behind.
    """

    adapter: str
    scope: str
    key: ChainKey
    namespace: NamespaceId
    root: BlockId
    after: BlockId | None = None
    pages: int = 0

    @property
    def name(self) -> SpaceName:
        """What tells it from others."""
        return self.adapter, self.scope, self.after


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
    after: BlockId | None = None,
) -> Space:
    """Return the empty space of an adapter and a scope under ``identity``.

    ``adapter_key`` is what the chains of the adapter start from, its name by default.
    """
    own = structs.replace(identity, adapter=adapter_key or adapter, scope=scope)
    key = keys.of(scope)
    root = chain_root(own, key) if after is None else tail_root(after, scope, key)
    return Space(adapter, scope, key, namespace_of(own), root, after)


def begins_tail(page: Page, scope: str | None) -> bool:
    """Return whether what follows ``page`` under ``scope`` is the private tail of a public prefix.

    A tail begins with a block: behind a page within one, its ids could not be known.
    """
    is_public = page.space is not None and not page.space.scope and page.block is not None
    return bool(scope) and is_public


def parent_block(page: Page | None, space: Space) -> BlockId:
    """Return the id of the block that ends with ``page``, before the first one: the root."""
    if page is None or page.block is None or page.space is not space:
        return space.root
    return page.block


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
