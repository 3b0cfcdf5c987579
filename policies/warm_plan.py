"""Which prefixes to place on a replica before anybody asks for them there.

A hot prompt is a row of *parts*: each goes from one fork of the traffic to the next, so that a part
of what many prompts share stands once, however many go on behind it. A replica should hold a part

- as one of its wanted holders: the first k* replicas by rendezvous hash (see ``policies.hot``);
- where no replica holds it, as the first by that hash of those with an empty cache: whatever was
  held by one replica alone is lost with its cache.

The part that comes most often goes first. It is of no use without those before it, so these go with
it and count with it. What does not fit the budget is cut at a block, and nothing follows.

A replica that leaves hands over what fewer than k* others hold, to the next ones by the same hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from policies.hot import rendezvous
from state.model import BlockId, ReplicaId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


class WarmPart(Struct, frozen=True, kw_only=True):
    """The tokens from ``start_tokens`` to ``end_tokens`` of a prompt.

    ``name`` is the id of its last block, ``parent`` that of the part before it, None for the first.
    ``holders`` hold all up to ``end_tokens``; ``begun`` has how many of its own tokens those hold
    that hold some. ``block_tokens`` is the granularity of ids.
    """

    name: BlockId
    parent: BlockId | None
    start_tokens: int
    end_tokens: int
    block_tokens: int
    rate_per_s: float
    wanted_holders: int
    holders: frozenset[ReplicaId]
    begun: dict[ReplicaId, int] = {}


class WarmPlace(NamedTuple):
    """What to place: the prompt of part ``name`` up to ``end_tokens``, ``new_tokens`` of them."""

    replica: ReplicaId
    name: BlockId
    end_tokens: int
    new_tokens: int


class _Purse:
    """What is left of a budget, and what was bought of it."""

    def __init__(self, parts: Mapping[BlockId, WarmPart], tokens: int, places: int) -> None:
        self._parts = parts
        self._tokens = tokens
        self._places = places
        self._bought: set[tuple[ReplicaId, BlockId]] = set()
        self.bought: list[WarmPlace] = []

    @property
    def is_empty(self) -> bool:
        return self._tokens <= 0 or len(self.bought) >= self._places

    def buy(self, part: WarmPart, replica: ReplicaId) -> None:
        """Place ``part`` on ``replica``, after what it needs there; as far as the budget goes."""
        for one in self._needed(part, replica):
            held_tokens = one.start_tokens + one.begun.get(replica, 0)
            new_tokens = one.end_tokens - held_tokens
            if new_tokens > self._tokens:
                new_tokens = self._tokens // one.block_tokens * one.block_tokens
                self._tokens = 0
            else:
                self._tokens -= new_tokens
            if new_tokens > 0:
                self._bought.add((replica, one.name))
                end_tokens = held_tokens + new_tokens
                self.bought.append(WarmPlace(replica, one.name, end_tokens, new_tokens))
            if self.is_empty:
                return

    def _needed(self, part: WarmPart, replica: ReplicaId) -> list[WarmPart]:
        """Return the parts up to ``part`` that ``replica`` neither holds nor will, in their order.

        Whoever holds a part holds all before it.
        """
        missing: list[WarmPart] = []
        at: WarmPart | None = part
        while at is not None and replica not in at.holders:
            if (replica, at.name) not in self._bought:
                missing.append(at)
            at = self._parts.get(at.parent) if at.parent is not None else None
        return missing[::-1]


def plan_warm_up(
    parts: Mapping[BlockId, WarmPart],
    replica: ReplicaId,
    members: Collection[ReplicaId],
    *,
    empty: Collection[ReplicaId],
    budget_tokens: int,
    most_places: int,
) -> list[WarmPlace]:
    """Return what ``replica`` should be given, in this order.

    ``members`` may hold the parts, ``replica`` among them; ``empty`` are those that begin with an
    empty cache. ``parts`` are by their names, each with all before it. Together the places have
    ``budget_tokens`` of new tokens at most.
    """
    purse = _Purse(parts, budget_tokens, most_places)
    for part in _hottest(parts):
        if purse.is_empty:
            break
        if replica not in part.holders and _is_wanted(part, replica, members, empty):
            purse.buy(part, replica)
    return purse.bought


def plan_hand_over(
    parts: Mapping[BlockId, WarmPart],
    leaving: ReplicaId,
    members: Collection[ReplicaId],
    *,
    budget_tokens: int,
    most_places: int,
) -> list[WarmPlace]:
    """Return what to place where before ``leaving`` is gone, in this order.

    ``members`` are those that may be given something; ``leaving`` is none of them. Bounds as in
    ``plan_warm_up``, over all of them together.
    """
    purse = _Purse(parts, budget_tokens, most_places)
    for part in _hottest(parts):
        if leaving not in part.holders:
            continue
        held = sum(replica in part.holders for replica in members)
        heirs = [one for one in rendezvous(part.name, members) if one not in part.holders]
        for heir in heirs[: max(0, part.wanted_holders - held)]:
            if purse.is_empty:
                return purse.bought
            purse.buy(part, heir)
    return purse.bought


def _hottest(parts: Mapping[BlockId, WarmPart]) -> Iterator[WarmPart]:
    """Yield the parts, the one that comes most often first; of equals, the shortest prefix."""

    def order(part: WarmPart) -> tuple[float, int, bytes]:
        return (-part.rate_per_s, part.end_tokens, part.name)

    yield from sorted(parts.values(), key=order)


def _is_wanted(
    part: WarmPart,
    replica: ReplicaId,
    members: Collection[ReplicaId],
    empty: Collection[ReplicaId],
) -> bool:
    order = rendezvous(part.name, members)
    if replica in order[: part.wanted_holders]:
        return True
    if any(one in part.holders for one in order):
        return False
    return replica == _first(order, empty)


def _first(order: Sequence[ReplicaId], among: Collection[ReplicaId]) -> ReplicaId | None:
    return next((one for one in order if one in among), None)
