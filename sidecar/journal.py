"""What happens to pages, as values: the language between the cache and its audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Callable

TierName = Literal["device", "host", "disk"]
PageState = Literal["free", "allocated", "used", "reserved", "evictable", "pinned"]

Operation = Literal[
    "open",  # a file begins: what every page of every tier is at this moment
    "create",  # free pages to a prompt: allocated
    "append",  # free pages to a growing answer: allocated
    "reserve",  # free pages to a transfer that is under way: reserved; a slot has no ``request``
    "fill",  # the content is there: allocated and reserved pages with a holder become used
    "index",  # the content is kept and found when the last holder releases the page; a reserved
    # page without holder becomes evictable
    "unindex",  # the content is not to be found any more; without a holder the page becomes free
    "share",  # one more holder; evictable and pinned pages become used, others stay what they are
    "copy",  # a shared page is written: ``request`` gives up ``pages``, ``targets`` become used
    "move",  # content goes to ``target_tier``, into ``targets`` reserved there; no state changes
    "pin",
    "unpin",
    "release",  # one holder less; the last one makes the page evictable, pinned or free; without
    # ``request``: a reserved page without holder becomes free
    "evict",  # an evictable page becomes free; ``why`` is the rule that chose it
    "clear",  # all content of the tier is forgotten; pages without holder become free
    "end",  # a request is over, and holds nothing; ``why``: done, cancelled, timed_out, failed
    "count",  # how many pages are in each state, as the pool counts them; ``why`` closed: the
    # engine stops, nothing is held and every request has ended
]


class PageRecord(Struct, frozen=True, omit_defaults=True):
    """One page in an ``open`` record. ``tenant`` is whose request took the page when it was free.

    Allocated and used pages have holders (request id to the number of times that it holds the
    page), evictable and pinned ones are indexed.
    """

    page: int
    state: PageState
    holders: dict[str, int] = field(default_factory=dict)
    is_indexed: bool = False
    is_pinned: bool = False
    tenant: str | None = None


class Transition(Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the audit. ``request`` names who holds; no tokens, no keys, no text.

    Whoever takes or shares pages of the device is a request, and has an ``end``; in lower tiers a
    holder may also be a transfer.

    ``why`` of a release: done, cancelled, timed_out, preempted, failed; of an eviction: the rule.
    ``totals`` (open, count) has pages by tier and state, free ones too: they add up to the tier.
    ``tenants`` (count) has pages by tier, tenant and state, where the pool counts tenants.
    ``records`` (open) has by tier every page that is not free. ``tenant`` is a digest, empty for
    none; it counts where free pages are taken: create, append, reserve.

    The log sets the rest: ``n`` numbers its lines without a gap from 1 on (0: not from a log),
    ``t`` is the wall clock in seconds, and ``run`` (open) names the log's life by the wall clock
    in ns at its start.
    """

    n: int = 0
    t: float = 0.0
    op: Operation
    tier: TierName = "device"
    pages: list[int] = field(default_factory=list)
    request: str | None = None
    why: str | None = None
    tenant: str | None = None
    targets: list[int] = field(default_factory=list)
    target_tier: TierName | None = None
    run: int = 0
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    tenants: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    records: dict[str, list[PageRecord]] = field(default_factory=dict)


Journal: TypeAlias = "Callable[[Transition], None]"
