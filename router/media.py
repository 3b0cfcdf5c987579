"""Prompts with images: the ids before the first one are exact, and engines tell who holds them.

The rest is known by its likeness alone (``prompt.media``), and by this router's own placements. A
replica holds as much of such a prompt as the better of the two says.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import structs

from policies.view import Warmth
from router.adapter import announced_of
from state.prefix import cached_tokens, salt_scope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.chooser import Routed
    from router.fleet import Member
    from router.outlook import Outlook
    from state.model import ModelIdentity, Overlap, ReplicaId
    from state.store import FleetReader

NOTHING: Final[Mapping[ReplicaId, int]] = MappingProxyType({})


def held_heads(
    routed: Routed, candidates: Sequence[Member], outlook: Outlook, reader: FleetReader
) -> Mapping[ReplicaId, int]:
    """Return how many tokens of the head each replica holds, by its events."""
    head = routed.prompt.head
    if head is None:
        return NOTHING
    scope = salt_scope(routed.prompt.salt)
    overlaps: dict[ModelIdentity, Mapping[ReplicaId, Overlap]] = {}
    held: dict[ReplicaId, int] = {}
    for member in candidates:
        announced = announced_of(routed, member) if member.has_events else None
        if announced is None:
            continue
        identity = structs.replace(announced, scope=scope)
        found = overlaps.get(identity)
        if found is None:
            root, key = outlook.root(identity), outlook.keys.of(scope)
            chain = head.chain(root, identity.block_tokens, key)
            found = overlaps[identity] = reader.overlap(chain)
        overlap = found.get(member.replica)
        if overlap is not None:
            blocks = overlap.gpu_blocks
            held[member.replica] = cached_tokens(blocks, identity.block_tokens, head.count)
    return held


def raised(warmth: Warmth, head_tokens: int) -> Warmth:
    """Return ``warmth`` where a replica holds so much of the head."""
    if head_tokens <= warmth.cached_tokens:
        return warmth
    return Warmth(head_tokens, 0, warmth.lower_tier_tokens, warmth.placed_tokens)
