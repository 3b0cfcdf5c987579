"""Leases: counted while they live, ended once, never below zero."""

from __future__ import annotations

import pytest

from state.lease import LeaseBook, Outcome, sum_leases
from state.model import LeaseTotals
from support.fleet_state import A, B


def test_a_lease_counts_from_acquire_to_finish() -> None:
    book = LeaseBook()
    lease = book.acquire(A, 500, now_s=0.0)
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=500)}
    assert lease.first_byte()
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=0)}
    assert lease.finish(Outcome.DONE)
    assert (book.totals(), book.open_count, lease.outcome) == ({}, 0, Outcome.DONE)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_lease_ends_once(outcome: Outcome) -> None:
    """F12, C06: a second finish or a late first byte changes nothing."""
    book = LeaseBook()
    other = book.acquire(A, 7, now_s=0.0)
    lease = book.acquire(A, 10, now_s=0.0)
    assert lease.finish(outcome)
    before = book.version
    assert not lease.finish(Outcome.FAILED)
    assert not lease.first_byte()
    assert (lease.outcome, book.version) == (outcome, before)
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=7)}
    assert not other.first_byte() or not other.first_byte()


def test_a_replica_removed_and_added_again_starts_at_zero() -> None:
    """A25: the old life's leases end without touching the new one's counts."""
    book = LeaseBook()
    old = [book.acquire(A, 100, now_s=0.0) for _ in range(3)]
    book.forget(A)
    assert (book.inflight(A), book.open_count) == (0, 3)
    new = book.acquire(A, 5, now_s=1.0)
    for lease in old:
        lease.first_byte()
        assert lease.finish(Outcome.CANCELLED)
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=5)}
    new.finish(Outcome.DONE)
    assert (book.inflight(A), book.uncached_tokens(A), book.open_count) == (0, 0, 0)


def test_a_long_request_counts_as_long_as_it_runs() -> None:
    """C08, A21: no clock ends a lease; only its owner does."""
    book = LeaseBook()
    lease = book.acquire(A, 1, now_s=0.0)
    book.acquire(B, 1, now_s=3600.0).finish(Outcome.DONE)
    assert book.inflight(A) == 1
    lease.finish(Outcome.DONE)
    assert book.inflight(A) == 0


def test_the_version_moves_with_every_change_and_only_then() -> None:
    book = LeaseBook()
    seen = [book.version]
    lease = book.acquire(A, 1, now_s=0.0)
    seen.append(book.version)
    lease.first_byte()
    seen.append(book.version)
    lease.finish(Outcome.DONE)
    seen.append(book.version)
    book.forget(A)
    seen.append(book.version)
    assert seen == sorted(set(seen))
    book.forget(A)
    book.totals()
    assert book.version == seen[-1]


def test_recent_assignments_fade_by_half_per_half_life() -> None:
    book = LeaseBook(half_life_s=10.0)
    for _ in range(4):
        book.acquire(A, 0, now_s=0.0).finish(Outcome.DONE)
    assert book.recent(A, now_s=0.0) == pytest.approx(4.0)
    assert book.recent(A, now_s=10.0) == pytest.approx(2.0)
    book.acquire(A, 0, now_s=20.0)
    assert book.recent(A, now_s=20.0) == pytest.approx(2.0)
    assert book.recent(A, now_s=-5.0) == pytest.approx(2.0)
    assert book.recent(B, now_s=0.0) == 0.0


def test_totals_of_several_routers_add_up() -> None:
    one = {A: LeaseTotals(inflight=1, uncached_tokens=10)}
    two = {A: LeaseTotals(inflight=2, uncached_tokens=5), B: LeaseTotals(inflight=1)}
    assert sum_leases([one, two]) == {
        A: LeaseTotals(inflight=3, uncached_tokens=15),
        B: LeaseTotals(inflight=1),
    }
