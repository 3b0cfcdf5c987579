"""Ids of requests are random, of one form, and none comes twice."""

from __future__ import annotations

import re

from router.mint import Mint


def test_ids_differ_and_are_of_32_hex_digits() -> None:
    mint = Mint()
    ids = [mint() for _ in range(1_000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_two_mints_share_nothing() -> None:
    first, second = Mint(), Mint()
    assert {first() for _ in range(300)}.isdisjoint(second() for _ in range(300))
