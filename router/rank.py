"""Replicas that are data-parallel ranks of one engine: what they share, and where a pin counts.

A rank is chosen like any replica, and the request names it in a header. The engine's process is
common to all: what is refused to one of them is refused to all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from router.chooser import Routed
    from router.fleet import Member
    from state.model import ReplicaId

UNPINNED_PATHS: Final = frozenset({"/v1/responses"})
"""Where vLLM 0.32 does not read the header: it chooses the rank itself."""


def is_reached(routed: Routed, member: Member) -> bool:
    """Return whether the request will be computed by ``member`` and by no other rank."""
    return member.rank is None or routed.can_pin


def mates(members: Iterable[Member], member: Member) -> Collection[ReplicaId]:
    """Return the replicas that are the same process as ``member``, itself among them."""
    if member.rank is None:
        return (member.replica,)
    return {
        other.replica
        for other in members
        if other.rank is not None and other.endpoint == member.endpoint
    } | {member.replica}


def one_of_each_engine(members: Iterable[Member]) -> list[Member]:
    """Return ``members`` with the first rank in place of all ranks of an engine."""
    kept: dict[object, Member] = {}
    for member in members:
        kept.setdefault(member.replica if member.rank is None else member.endpoint, member)
    return list(kept.values())
