"""Which pages are fetched, for how long, and what the lower tiers keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.pool import PageId
from sidecar.tier import LowerTier
from sidecar.tiers import FIRST_RETRY, LEAST_PATIENCE_S, MOST_RETRY, Tiers
from sidecar.tree import PageFacts
from state.model import BlockId

if TYPE_CHECKING:
    from sidecar.tiers import FetchRule, SourceName

FACTS = PageFacts(parent=None, packed_tokens=b"", depth=0, tenant="", salt=None)


def key(number: int) -> BlockId:
    return BlockId(bytes([number]) * 16)


KEYS = [key(number) for number in range(8)]


class Prices:
    """A page costs this much, by source; a token costs 1 ms to compute."""

    def __init__(self, **page_ms: float) -> None:
        self.page_ms = page_ms

    def fetch_ms(self, source: SourceName, pages: int) -> float:
        return self.page_ms[source] * pages

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        return float(tokens) + 0.0 * context_tokens


def holding(
    prices: Prices, host: int = 0, disk: int = 0, *, slots: int = 8, fetch: FetchRule = "cheaper"
) -> Tiers:
    """Return tiers of which the host has the first keys, and the disk those that follow."""
    tiers = Tiers(
        prices, 4, host=LowerTier("host", slots), disk=LowerTier("disk", slots), fetch=fetch
    )
    assert tiers.host is not None
    assert tiers.disk is not None
    for tier, keys in ((tiers.host, KEYS[:host]), (tiers.disk, KEYS[host : host + disk])):
        for each in keys:
            put = tier.reserve("test")
            assert put is not None
            tier.commit(put.slot, each, FACTS, "test")
    return tiers


def test_a_run_is_fetched_up_to_where_computing_is_cheaper() -> None:
    prices = Prices(host=1, disk=100, peer=100)
    tiers = holding(prices, host=2, disk=3)
    assert tiers.plan(KEYS, 0).runs == (("host", 2),)
    prices.page_ms["disk"] = 1
    assert tiers.plan(KEYS, 0).runs == (("host", 2), ("disk", 3))
    assert tiers.plan(KEYS, 0, has_peer=True).runs == (("host", 2), ("disk", 3))
    prices.page_ms["peer"] = 1
    assert tiers.plan(KEYS, 0, has_peer=True).runs == (("host", 2), ("disk", 3), ("peer", 3))


def test_a_dear_source_is_tried_again_ever_more_rarely() -> None:
    tiers = holding(Prices(disk=100), disk=8)
    tried = [at for at in range(1, 6_000) if tiers.plan(KEYS, 0).pages]
    waits = [after - before for before, after in zip([0, *tried], tried, strict=False)]
    assert waits == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024, 1024]
    assert (waits[0], waits[-1]) == (FIRST_RETRY, MOST_RETRY)


def test_a_source_that_became_cheap_is_used_and_its_refusals_are_forgotten() -> None:
    prices = Prices(disk=100)
    tiers = holding(prices, disk=8)
    for _ in range(FIRST_RETRY - 1):
        assert not tiers.plan(KEYS, 0).pages
    prices.page_ms["disk"] = 1
    assert tiers.plan(KEYS, 0).pages == 8
    prices.page_ms["disk"] = 100
    for _ in range(FIRST_RETRY - 1):
        assert not tiers.plan(KEYS, 0).pages
    assert tiers.plan(KEYS, 0).pages == 8


def test_refusals_of_one_source_say_nothing_of_another() -> None:
    tiers = holding(Prices(host=1, disk=100, peer=100), host=2, disk=2)
    for _ in range(FIRST_RETRY - 1):
        assert tiers.plan(KEYS[:4], 0).runs == (("host", 2),)
    assert not tiers.plan([key(99)], 0, has_peer=True).pages
    assert tiers.plan(KEYS[:4], 0).runs == (("host", 2), ("disk", 2))


def test_a_fetch_is_waited_for_as_long_as_computing_takes() -> None:
    tiers = holding(Prices())
    assert tiers.patience_s(0, 100) == pytest.approx(0.4)
    assert tiers.patience_s(0, 1) == LEAST_PATIENCE_S
    assert holding(Prices(), fetch="always").patience_s(0, 1) is None


def _demote(tiers: Tiers, each: BlockId) -> bool:
    demotion, _ = tiers.demote(PageId(0), each, FACTS, was_reused=False)
    if demotion is not None:
        assert tiers.host is not None
        tiers.host.commit(demotion.slot, each, FACTS, "demotion")
    return demotion is not None


def test_what_the_device_used_last_leaves_the_host_last() -> None:
    """The copy of a page that was on the device meanwhile is as recent as the page was."""
    tiers = holding(Prices(), host=2, slots=2)
    assert tiers.host is not None
    assert not _demote(tiers, KEYS[0])
    assert _demote(tiers, KEYS[5])
    assert KEYS[0] in tiers.host
    assert KEYS[1] not in tiers.host
    assert tiers.host.pool.held_pages == 0
