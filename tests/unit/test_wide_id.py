"""Ids of blocks are 128 bits of what was computed, whatever an engine calls its pages."""

from __future__ import annotations

from sidecar.event import StoredPages
from sidecar.fold import PageFolder
from state.model import BlockId, ModelIdentity, Tier
from state.prefix import ID_BYTES, chain_of, chain_root, pack_tokens
from state.secret import ChainKeys

IDENTITY = ModelIdentity(model="m", block_tokens=4)
SEED = 7
HANDLE = 12083517102536510777


def stored(tokens: list[int]) -> set[BlockId]:
    """Return the ids that a page of ``tokens`` has under one and the same name of the engine."""
    folder = PageFolder(IDENTITY, 4, keys=ChainKeys(SEED))
    page = StoredPages(
        handles=(HANDLE,),
        parent=None,
        packed_tokens=pack_tokens(tokens),
        page_tokens=4,
        adapter="",
        scope=None,
        opaque_from=None,
        tier=Tier.GPU,
        group=None,
    )
    folder.apply([page])
    [ids] = folder.resident().values()
    return set(ids)


def test_pages_whose_64_bit_names_collide_are_other_blocks() -> None:
    """S-07: an engine's name leads to a page of its own cache, and is the id of nothing."""
    first, second = stored([1, 2, 3, 4]), stored([5, 6, 7, 8])
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)
    expected = chain_of(chain_root(IDENTITY, SEED), pack_tokens([1, 2, 3, 4]), 4, SEED)
    assert first == set(expected)
    assert {len(block) for block in first | second} == {ID_BYTES} == {16}
