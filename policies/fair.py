"""Turns among tenants, by virtual token counters: who used least goes first.

Each tenant's counter grows by the uncached tokens of what was sent for it. A tenant that had
nothing waiting and asks again starts at least at the lowest counter of those that wait: having
been idle is no credit. What it used before stays a debt, as long as anybody waits; when nobody
does, all is forgotten, because nobody had to wait for it. (Sheng et al., OSDI 2024, have the
counters and the lift for tokens of a batching engine.)

Within a tenant, and among tenants with equal counters, the lowest key goes first; of equal keys,
the first that came.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeAlias

from policies.ordered import Item, Key, OrderedHeap

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE_KEPT: Final = 4_096
"""Tenants without a waiting request whose debt is remembered; those idle longest are forgotten."""


class _Lane(Generic[Item]):
    """One tenant's waiting items, and what it used."""

    __slots__ = ("items", "used_tokens")

    def __init__(self, used_tokens: int) -> None:
        self.items: OrderedHeap[Item] = OrderedHeap()
        self.used_tokens = used_tokens


_Turn: TypeAlias = "tuple[Key, Item, _Lane[Item], Iterator[Item]]"


class FairQueue(Generic[Item]):
    """Items of many tenants in the order of their turns. A change costs O(log n)."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane[Item]] = {}
        self._turns: OrderedHeap[str] = OrderedHeap()
        self._tokens: dict[Item, tuple[str, int]] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def used_tokens(self, tenant: str) -> int:
        """Return the counter of ``tenant``, 0 where nothing is known of it."""
        lane = self._lanes.get(tenant)
        return lane.used_tokens if lane is not None else self._idle.get(tenant, 0)

    def add(self, item: Item, key: float, tenant: str, tokens: int) -> None:
        """Let ``item`` wait; it will cost ``tenant`` so many tokens."""
        lane = self._lanes.get(tenant)
        if lane is None:
            used = self._idle.pop(tenant, 0)
            first = self._turns.first()
            if first is not None:
                used = max(used, self._lanes[first].used_tokens)
            lane = self._lanes[tenant] = _Lane(used)
        lane.items.put(item, (key, self._ordinal))
        self._ordinal += 1
        self._tokens[item] = (tenant, max(1, tokens))
        self._settle(tenant, lane)

    def send(self, item: Item) -> None:
        """Take out ``item``, which goes to a replica, and charge its tenant."""
        tenant, tokens = self._tokens[item]
        self._lanes[tenant].used_tokens += tokens
        self.discard(item)

    def discard(self, item: Item) -> None:
        """Take out ``item`` at nobody's cost, where it is in."""
        tenant, _ = self._tokens.pop(item, ("", 0))
        lane = self._lanes.get(tenant)
        if lane is not None and item in lane.items:
            lane.items.discard(item)
            self._settle(tenant, lane)
        if not self._tokens:
            self._idle.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge ``tenant`` for a request that did not wait, while others do."""
        lane = self._lanes.get(tenant)
        if lane is not None:
            lane.used_tokens += max(1, tokens)
            self._settle(tenant, lane)
        elif self._tokens:
            self._rest(tenant, self._idle.get(tenant, 0) + max(1, tokens))

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in the order in which they would go if all went; change none meanwhile.

        After a turn a tenant stands behind those that have used less than it has by then.
        """
        fresh = iter(self._turns)
        tenant = next(fresh, None)
        begun: list[_Turn[Item]] = []
        while tenant is not None or begun:
            if tenant is not None and (not begun or self._place(tenant) < begun[0][0]):
                lane = self._lanes[tenant]
                rest = iter(lane.items)
                used_tokens, item = float(lane.used_tokens), next(rest)
                tenant = next(fresh, None)
            else:
                (used_tokens, *_), item, lane, rest = heappop(begun)
            yield item
            following = next(rest, None)
            if following is not None:
                used_tokens += self._tokens[item][1]
                place = (used_tokens, *lane.items.key_of(following))
                heappush(begun, (place, following, lane, rest))

    def _place(self, tenant: str) -> Key:
        return self._turns.key_of(tenant)

    def _settle(self, tenant: str, lane: _Lane[Item]) -> None:
        """Give ``tenant`` its place among the others; it has none when it has nothing waiting."""
        head = lane.items.first()
        if head is None:
            del self._lanes[tenant]
            self._turns.discard(tenant)
            self._rest(tenant, lane.used_tokens)
            return
        place = (lane.used_tokens, *lane.items.key_of(head))
        if tenant not in self._turns or self._place(tenant) != place:
            self._turns.put(tenant, place)

    def _rest(self, tenant: str, used_tokens: int) -> None:
        self._idle[tenant] = used_tokens
        self._idle.move_to_end(tenant)
        if len(self._idle) > IDLE_KEPT:
            self._idle.popitem(last=False)
